"""Readiness: ready is a control plane whose rounds turn and whose database takes writes."""

from __future__ import annotations

import re
import time

import pytest
from sqlalchemy.exc import OperationalError

from tests.service.api.conftest import Api, ApiMaker


async def _answer(api: Api) -> tuple[int, str]:
    response = await api.client.get("/readyz")
    return response.status_code, response.json().get("detail", "")


async def test_rounds_that_do_not_turn_and_writes_that_fail_are_not_ready(
    make_api: ApiMaker, monkeypatch: pytest.MonkeyPatch
):
    async with make_api() as api:
        heartbeat = api.service.orchestrator.heartbeat
        await api.service.cluster.refresh()
        assert (await _answer(api))[0] == 200, "it has just begun"
        began = time.time()
        monkeypatch.setattr(time, "time", lambda: began + 60)
        status, detail = await _answer(api)
        assert status == 503 and re.search(r"no round for \d+ s", detail)
        heartbeat.round_finished()
        status, detail = await _answer(api)
        assert status == 503 and re.search(r"no write for \d+ s", detail)

        def full():
            raise OperationalError("INSERT", {}, Exception("database or disk is full"))

        write = api.service.database.write
        monkeypatch.setattr(api.service.database, "write", full)
        await heartbeat.beat()
        assert "no write" in (await _answer(api))[1]
        monkeypatch.setattr(api.service.database, "write", write)
        await heartbeat.beat()
        assert (await _answer(api))[0] == 200
