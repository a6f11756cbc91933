"""Databases for tests of the control plane: SQLite in a file, and a private PostgreSQL."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from service.spec.job import JobSpec
from service.store.database import Database
from service.store.jobs import NewJob, create_jobs
from service.store.tables import Job
from tests.missing import leave_out
from tests.service.postgres import is_installed, private_postgres


def job_body(**changes: Any) -> dict[str, Any]:
    """A job's specification as a user sends it; `changes` replace its top-level fields."""
    body = {
        "name": "small",
        "model": {"factory": "worker.examples.gpt:build", "args": {"layers": 4, "width": 32}},
        "data": {"factory": "worker.examples.text:ByteWindows", "args": {"length": 32}},
        "loss": {"factory": "torch.nn.functional:cross_entropy"},
        "training": {"steps": 10, "global_batch": 8, "microbatches": 4},
        "pipeline": {"stages": 4},
    }
    return {**body, **changes}


async def somebody_waits(database: Database, tasks: Sequence[asyncio.Task]) -> None:
    """Return when every one of `tasks` waits for a lock that another session holds, or has ended.

    PostgreSQL says who waits. SQLite lets one write at a time: there they all wait, and are given a moment
    to go wrong in.
    """
    if database.is_sqlite:
        await asyncio.sleep(0.05)
        return
    waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    async with asyncio.timeout(60), database.engine.connect() as connection:
        while True:
            blocked = (await connection.execute(waiting)).scalar_one()
            await connection.rollback()
            if blocked + sum(task.done() for task in tasks) >= len(tasks):
                return
            await asyncio.sleep(0.005)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL cluster of this test session, on a socket in a folder of its own."""
    if not is_installed():
        leave_out("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with private_postgres(durable=False) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database: the test runs once on each kind."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'store.db'}"
    import psycopg

    template = request.getfixturevalue("postgres_url")
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(template.format("postgres").replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return template.format(name)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A migrated database."""
    database = Database(database_url)
    await database.start()
    yield database
    await database.close()


async def create_job(session: AsyncSession, spec: JobSpec, *, at: datetime, **given: str) -> Job:
    """One job in the store; `given` are fields of NewJob."""
    (job,) = await create_jobs(session, [NewJob(spec, at, **given)])
    return job
