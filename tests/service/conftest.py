"""Databases for tests of the control plane: SQLite in a file, and a private PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from service.store.database import Database
from tests.missing import leave_out


def job_body(**changes: Any) -> dict[str, Any]:
    """A job's specification as a user sends it; `changes` replace its top-level fields."""
    body = {
        "name": "small",
        "model": {"factory": "worker.model.gpt:build", "args": {"layers": 4, "width": 32}},
        "data": {"factory": "worker.data.text:ByteWindows", "args": {"length": 32}},
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
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL cluster of this test session, on a socket in a folder of its own."""
    binaries = _postgres_binaries()
    if binaries is None:
        leave_out("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    folder = Path("/tmp") / f"slotline-postgres-{uuid.uuid4().hex[:8]}"  # a socket's path must be short
    folder.mkdir(mode=0o700)
    if as_user:
        shutil.chown(folder, "postgres", "postgres")
    data = folder / "data"
    run = {"check": True, "cwd": "/", "stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    try:
        subprocess.run(
            [
                *as_user,
                binaries / "initdb",
                "-D",
                data,
                "-U",
                "test",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--no-sync",
            ],
            **run,
        )
        options = f"-c listen_addresses='' -k {folder} -c fsync=off -c full_page_writes=off"
        log = folder / "log"
        subprocess.run(
            [*as_user, binaries / "pg_ctl", "-D", data, "-l", log, "-o", options, "-w", "start"], **run
        )
        try:
            yield f"postgresql+psycopg://test@/{{}}?host={folder}"
        finally:
            subprocess.run([*as_user, binaries / "pg_ctl", "-D", data, "-m", "immediate", "stop"], **run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


def _postgres_binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parts[-3]))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else None
