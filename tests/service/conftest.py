"""Databases for tests of the control plane: SQLite in a file, and a private PostgreSQL."""

from __future__ import annotations

import asyncio
import functools
import shutil
import ssl
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncSession

from service.orchestrator.planning.pool import PlannerPool
from service.spec.job import JobSpec
from service.store.database import Database
from service.store.jobs import NewJob, create_jobs
from service.store.tables import JobRow
from tests.missing import leave_out
from tests.service.postgres import is_installed, private_postgres

# Each control plane has clients of HTTP, and to read the machine's certificates takes longer than most tests.
ssl.create_default_context = functools.cache(ssl.create_default_context)


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


class PlannerThatKeepsProcesses(PlannerPool):
    """A control plane's planner that takes the idle processes of one that was closed before and leaves its own to the
    next: a process takes longer to import the scheduler than most tests take. Only in the main thread: a planning process
    dies with the thread that started it."""

    _idle: ClassVar[dict[tuple[int, int | None], tuple[Any, Any]]] = {}

    def _processes_pool(self) -> Any:
        if self._pool is None and self._kind in self._idle and _in_main_thread():
            self._pool, self._given_up = self._idle.pop(self._kind)
        return super()._processes_pool()

    def close(self) -> None:
        is_idle = self._pool is not None and not self.load.running
        if is_idle and self._kind not in self._idle and _in_main_thread():
            self._given_up[:] = [0] * len(self._given_up)
            self._idle[self._kind] = self._pool, self._given_up
            self._pool = None
        super().close()

    @property
    def _kind(self) -> tuple[int, int | None]:
        return self._processes, self._memory_bytes

    @classmethod
    def end(cls) -> None:
        for pool, _ in cls._idle.values():
            pool.shutdown()
        cls._idle.clear()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.fixture(autouse=True, scope="session")
def planning_processes_are_kept() -> Iterator[None]:
    with mock.patch("service.control_plane.PlannerPool", PlannerThatKeepsProcesses):
        yield
    PlannerThatKeepsProcesses.end()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL cluster of this test session, on a socket in a folder of its own."""
    if not is_installed():
        leave_out("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with private_postgres(durable=False) as url:
        yield url


def sqlite_url(file: Path) -> str:
    return f"sqlite+aiosqlite:///{file}"


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite database with every table, that tests copy: migrating takes longer than most of them."""
    file = tmp_path_factory.mktemp("migrated") / "store.db"
    _migrate(sqlite_url(file))
    return file


@pytest.fixture(scope="session")
def migrated_postgres(postgres_url: str) -> str:
    """The name of a database with every table in the session's PostgreSQL."""
    url = create_postgres_database(postgres_url)
    _migrate(url)
    return make_url(url).database


BOTH = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]


@pytest.fixture(params=BOTH)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with every table and no row: the test runs once on each kind."""
    if request.param == "sqlite":
        file = shutil.copy(request.getfixturevalue("migrated_file"), tmp_path / "store.db")
        return sqlite_url(file)
    server, migrated = (request.getfixturevalue(name) for name in ("postgres_url", "migrated_postgres"))
    return create_postgres_database(server, copy_of=migrated)


@pytest.fixture(params=BOTH)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables, of each kind."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "store.db")
    return create_postgres_database(request.getfixturevalue("postgres_url"))


def create_postgres_database(server: str, *, copy_of: str = "template1") -> str:
    """The URL of a new database of a server."""
    import psycopg

    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server.format("postgres").replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{copy_of}"')
    return server.format(name)


def _migrate(url: str) -> None:
    async def start_once() -> None:
        database = Database(url)
        await database.start()
        await database.close()

    asyncio.run(start_once())


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A migrated database."""
    database = Database(database_url)
    await database.start()
    yield database
    await database.close()


async def create_job(session: AsyncSession, spec: JobSpec, *, at: datetime, **given: str) -> JobRow:
    """One job in the store; `given` are fields of NewJob."""
    (job,) = await create_jobs(session, [NewJob(spec, at, **given)])
    return job
