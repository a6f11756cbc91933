"""The trace of who submits a job: kept with it, handed to its driver, in the server's own lines."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from service.api.routers import activity
from service.jobs.log_lines import written_at
from service.orchestrator.attempts.watch import AttemptWatcher
from service.store.jobs import find_job
from tests.service.api.conftest import Api, ApiMaker
from tests.service.conftest import job_body
from worker.contract.logs import JsonFormatter, TraceParent

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def submitted(api: Api, headers: dict[str, str]) -> dict[str, Any]:
    answer = await api.client.post("/api/v1/jobs", json=job_body(), headers=headers)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_a_jobs_trace_is_that_of_its_request_and_reaches_its_driver(make_api: ApiMaker):
    async with make_api(log_format="json") as api:
        job = await submitted(api, {"traceparent": TRACE})
        assert job["trace_id"] == TRACE.split("-")[1]
        await api.rounds(job["id"])
        env = api.cluster.submissions[f"{job['id']}-1"].env
        assert TraceParent.read(env["SLOTLINE_TRACEPARENT"]).trace_id == job["trace_id"]
        assert env["SLOTLINE_LOG_FORMAT"] == "json"
        other = await submitted(api, {"traceparent": "nonsense"})
        assert other["trace_id"] not in (None, job["trace_id"])


async def test_jobs_of_the_past_have_no_trace_and_start_all_the_same(make_api: ApiMaker):
    async with make_api() as api:
        job = await submitted(api, {})
        async with api.service.database.write() as session:
            (await find_job(session, job["id"])).traceparent = None
        await api.rounds(job["id"])
        env = api.cluster.submissions[f"{job['id']}-1"].env
        assert "SLOTLINE_TRACEPARENT" not in env and env["SLOTLINE_LOG_FORMAT"] == "text"
        assert (await api.job(job["id"]))["trace_id"] is None


async def test_lines_of_the_server_say_which_job_and_trace_they_are_about(
    make_api: ApiMaker, monkeypatch: pytest.MonkeyPatch
):
    lines: list[dict[str, Any]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonFormatter().format(record)))

    handler = Kept()
    logger = logging.getLogger("service")
    monkeypatch.setattr(logger, "level", logging.INFO)

    async def ask(*_: object) -> None:
        logging.getLogger("service.orchestrator.attempts.watch").info("asking Ray")

    monkeypatch.setattr(AttemptWatcher, "_ask", ask)
    logger.addHandler(handler)
    try:
        async with make_api() as api:
            job = await submitted(api, {"traceparent": TRACE})
            await api.rounds(job["id"])
            for _ in range(2):
                await api.service.orchestrator.round()
                await api.service.orchestrator.settle()
            logging.getLogger("service.orchestrator.attempts.watch").info("of no job")

            async def broken(*_: object, **__: object) -> None:
                raise RuntimeError("planted")

            monkeypatch.setattr(activity, "log_lines", broken)
            await api.client.get(f"/api/v1/jobs/{job['id']}/logs", headers={"traceparent": TRACE})
    finally:
        logger.removeHandler(handler)
    failed = next(one for one in lines if "planted" in one.get("error", "") + one["message"])
    assert failed["trace_id"] == job["trace_id"]
    asking = next(one for one in lines if one["message"] == "asking Ray")
    assert (asking["job"], asking["attempt"], asking["trace_id"]) == (job["id"], 1, job["trace_id"])
    assert "job" not in next(one for one in lines if one["message"] == "of no job")


async def test_lines_of_json_logs_have_a_time_to_be_found_by():
    line = '{"time": "2026-05-17T12:00:01.250Z", "level": "INFO"}'
    assert written_at(line) == written_at("2026-05-17T12:00:01.250Z INFO x: y")
    assert written_at(line) is not None and written_at('{"time": "soon"}') is None
