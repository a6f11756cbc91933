"""Older databases, with jobs in them, become ours; on SQLite and on PostgreSQL."""

from __future__ import annotations

import json

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

from service.store import database as room
from service.store.database import Database
from service.store.jobs import find_job
from tests.service.conftest import job_body


async def test_older_jobs_get_their_columns_from_their_specifications(
    database_url: str, monkeypatch: pytest.MonkeyPatch
):
    """Up from 0002 with jobs in it, also with some that no Slotline of today would take, down, and up again."""

    def go(connection: Connection, to: str) -> None:
        config = Config()
        config.set_main_option("script_location", str(room._MIGRATIONS))
        config.attributes["connection"] = connection
        (command.downgrade if to == "back to 0002" else command.upgrade)(config, to[-4:])

    older = Database(database_url)
    with monkeypatch.context() as patched:
        patched.setattr(room, "_migrate", lambda connection: go(connection, "0002"))
        await older.start()
    specs = {
        "a": job_body(resources={"workers_per_mesh": 2}),
        "b": {"training": [3], "resources": {"workers_per_mesh": "x"}},
        "c": [1],
    }
    insert = (
        "INSERT INTO jobs (id, name, queue, priority, accelerators, device, spec, state, created_at, queued_at,"
        " attempts_made, attempts_forgiven, last_event) VALUES (:id, 'n', 'default', 0, 2, 'auto', :spec, 'FAILED',"
        " '2026-01-01 00:00:00', '2026-01-01 00:00:00', :made, 0, 0)"
    )
    attempt = (
        "INSERT INTO attempts (id, job_id, number, state, token, device, accelerators, created_at, last_sequence,"
        " log_first_line) VALUES ('a-1', 'a', 1, 'FAILED', 't', 'cuda', 2, '2026-01-01 00:00:00', 0, 1)"
    )
    async with older.engine.begin() as connection:
        for name, spec in specs.items():
            values = {"id": name, "spec": json.dumps(spec), "made": int(name == "a")}
            await connection.execute(text(insert), values)
        await connection.execute(text(attempt))
    for _ in range(2):
        await older.start()
        async with older.read() as session:
            a, b, c = [await find_job(session, name) for name in specs]
        assert (a.steps_wanted, a.workers_per_mesh, a.device) == (10, 2, "cuda")
        assert (b.steps_wanted, b.workers_per_mesh, b.device) == (0, 1, "auto")
        assert (c.steps_wanted, c.workers_per_mesh) == (0, 1)
        async with older.engine.connect() as connection:
            connection = await connection.execution_options(slotline_write=True)
            async with connection.begin():
                await connection.run_sync(go, "back to 0002")
    await older.close()
