"""The database: engine, read and write sessions, upserts, its clock, and migrations at start.

Sessions are asynchronous, so that a request waits for the database without holding a thread: SQLite through
aiosqlite's thread, PostgreSQL through psycopg. No network call inside a session; every wait has a limit.
SQLite: writes take their turn first come, first served, with BEGIN IMMEDIATE; the file belongs to one control plane,
by a lock on a file beside it that goes with the process. A cancelled query leaves its connection and SQLite's lock
behind: `run_to_completion` finishes it first.
Migrations expand, then contract: a release only adds, so that the release before it runs beside it; what nothing
uses is dropped later, and `compatibility` then names the oldest revision whose code still works.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

import tenacity
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Double, event, inspect, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

from service.observability.instruments import DATABASE_SECONDS, Outage
from service.store.spans import record_pending_spans
from service.store.tables import Base


class database_now(FunctionElement[float]):
    """Unix seconds by the database's clock, at the moment of the statement rather than of its transaction."""

    type = Double()
    inherit_cache = True


@compiles(database_now)
def _compile_now_postgresql(*_: Any, **__: Any) -> str:
    return "CAST(EXTRACT(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"


@compiles(database_now, "sqlite")
def _compile_now_sqlite(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


logger = logging.getLogger(__name__)
MOVES_KEY = "slotline_moves"
"""In the `info` of a write session: how many jobs it has moved to other states."""
MIGRATIONS_DIR = Path(__file__).parent / "migrations"


_REPLACED_REVISIONS = tuple(f"{number:04}" for number in range(1, 16))
"""Revisions that migration 0016 replaced; `compatibility` may name one as the oldest code."""


class IncompatibleTablesError(RuntimeError):
    """The tables are of a revision that this version can neither use nor migrate; the message says the way out."""


class NewerTablesError(IncompatibleTablesError):
    """The tables belong to a newer Slotline and leave out what this one uses."""


class OlderTablesError(IncompatibleTablesError):
    """The tables are older than the first migration of this version."""


class NoSuchRevisionError(ValueError):
    """This version has no migration of that name, or no path to it."""


def _alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS_DIR).replace("%", "%%"))
    return config


def known_revisions() -> list[str]:
    """The revisions of the tables that this version can migrate between, newest first."""
    scripts = ScriptDirectory.from_config(_alembic_config())
    return [script.revision for script in scripts.walk_revisions()]


def migrate(connection: Connection, to: str = "head") -> None:
    """Bring the tables to a revision, up or down; newer tables that this code works with stay unchanged.

    Raises IncompatibleTablesError and NoSuchRevisionError.
    """
    config = _alembic_config()
    config.attributes["connection"] = connection
    known = known_revisions()
    present = MigrationContext.configure(connection).get_current_revision()
    if present in _REPLACED_REVISIONS:
        raise OlderTablesError(
            f"the database has the tables of revision {present}, and this Slotline takes over those of {known[-1]} or "
            f"newer: run `slotline migrate` of the version that still has the migrations 0001 to 0016 (git commit c30e8b2), "
            f"then start this one"
        )
    if present is not None and present not in known:
        _check_newer_revision(connection, present, known)
        return
    wanted = known[0] if to == "head" else to
    if wanted not in known:
        raise NoSuchRevisionError(
            f"there is no revision {to} of the tables: this Slotline knows {', '.join(reversed(known))}"
        )
    if present == wanted:
        return
    try:
        if present is not None and known.index(wanted) > known.index(present):
            command.downgrade(config, wanted)
        else:
            command.upgrade(config, wanted)
    except CommandError as error:
        raise NoSuchRevisionError(f"the tables cannot go from {present} to {wanted}: {error}") from error
    if present is not None:
        logger.info("the database's tables were of revision %s and are now of %s", present, wanted)


def _check_newer_revision(connection: Connection, present: str, known: list[str]) -> None:
    """Warn that the tables are newer. Raises NewerTablesError where what this code uses may be gone."""
    oldest = None
    if inspect(connection).has_table("compatibility"):
        oldest = connection.execute(text("SELECT oldest_code FROM compatibility")).scalar_one_or_none()
    if oldest not in (*known, *_REPLACED_REVISIONS):
        raise NewerTablesError(
            f"the database has the tables of a newer Slotline (revision {present}, for code from {oldest or present} on), "
            f"and this one knows them up to {known[0]}: start the newer version, or go back with its "
            f"`slotline migrate --to {known[0]}`, which drops what was added since"
        )
    logger.warning(
        "the database has the tables of a newer Slotline (revision %s); this one, of %s, works with them: "
        "an upgrade is under way, or start the newer version",
        present,
        known[0],
    )


DATABASE_UNAVAILABLE = (OperationalError, InterfaceError, PoolTimeoutError, OSError)
"""Errors of a database that is away, full or too busy."""
_MIGRATION_LOCK_KEY = 0x510711E  # PostgreSQL advisory lock: one control plane migrates, others wait
_BUSY_TIMEOUT_S = 30
_POOL_TIMEOUT_S = 10
"""Limit of the wait for a free connection of the pool; the caller may try again."""
_LIBPQ_OPTIONS = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""libpq's names and units: seconds, but tcp_user_timeout in milliseconds."""
_POSTGRES_SESSION_SETTINGS = {
    "statement_timeout": "30s",
    "idle_in_transaction_session_timeout": "15s",
    "tcp_keepalives_idle": 10,
    "tcp_keepalives_interval": 5,
    "tcp_keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Settings of each session at the server. No session waits for anything but the database, so a transaction that is idle
belongs to a process that is frozen or cut off; the server ends it, since it holds locks."""


def utc_now() -> datetime:
    """Now, aware, in UTC."""
    return datetime.now(UTC)


class Sessions(Protocol):
    """Read and write sessions: of a Database, or of a FencedDatabase, which refuses writes of a replaced process."""

    @property
    def outage(self) -> Outage: ...

    def read(self) -> AbstractAsyncContextManager[AsyncSession]: ...

    def write(self) -> AbstractAsyncContextManager[AsyncSession]: ...


class Database:
    """One engine; `read()` and `write()` give sessions. Objects stay usable after their session."""

    def __init__(self, url: str) -> None:
        self.url = make_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.outage = Outage("the database", logger)
        self.engine = _sqlite_engine(url) if self.is_sqlite else _postgres_engine(url)
        self._write_lock = asyncio.Lock()
        self.session_info: dict[str, Any] = {}
        """The `info` of every write session: see notifications.OPERATOR_WEBHOOK_KEY."""
        self.changes = 0
        """Changes of this process that somebody may know of: moves of jobs that it has committed, and users' requests. What
        was read before the last of them is out of date, for those who know."""
        _time_statements(self.engine)

    async def start(self, *, to: str = "head") -> None:
        """Create what is missing and migrate to the newest tables, or to a revision; safe to run twice.

        Raises IncompatibleTablesError where another version made tables that this one cannot work with.
        """
        if self.is_sqlite and self.url.database not in (None, "", ":memory:"):
            Path(str(self.url.database)).parent.mkdir(parents=True, exist_ok=True)
        if self.is_sqlite:
            await self._enable_wal()
        async with self.engine.connect() as connection:
            connection = await connection.execution_options(slotline_write=True)
            async with connection.begin():
                if not self.is_sqlite:
                    # migrations, and the wait for another process's, have no limit
                    await connection.execute(text("SET LOCAL statement_timeout = 0"))
                    await connection.execute(
                        text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK_KEY}
                    )
                await connection.run_sync(migrate, to)

    async def _enable_wal(self) -> None:
        """Set the journal mode, which the file stores. SQLite does not wait for locks then, so this retries."""
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(sqlite3.OperationalError),
            wait=tenacity.wait_random(0.01, 0.1),
            stop=tenacity.stop_after_delay(_BUSY_TIMEOUT_S),
            reraise=True,
        ):
            with attempt:
                async with self.engine.connect() as connection:
                    raw = await connection.get_raw_connection()
                    await raw.driver_connection.execute("PRAGMA journal_mode=WAL")

    async def close(self) -> None:
        await self.engine.dispose()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """A session for queries; nothing is written."""
        async with AsyncSession(self.engine, expire_on_commit=False, autoflush=False) as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """One transaction: committed at the end, rolled back on an exception.

        On SQLite it takes the write lock at once (BEGIN IMMEDIATE): a read that becomes a write
        later would fail with "database is locked" without waiting.
        """
        async with self._hold_sqlite_write_lock(), self.engine.connect() as connection:
            connection = await connection.execution_options(slotline_write=True)
            async with AsyncSession(connection, expire_on_commit=False, info=self.session_info) as session:
                async with session.begin():
                    yield session
                self.changes += session.info.get(MOVES_KEY, 0)
                record_pending_spans(session)

    @asynccontextmanager
    async def _hold_sqlite_write_lock(self) -> AsyncIterator[None]:
        """On SQLite, whose file belongs to one process, let writers take their turn first come, first served.

        SQLite's own waiters sleep for longer and longer and are overtaken by newcomers: of 8 constant writers some
        waited for seconds.
        """
        if not self.is_sqlite:
            yield
            return
        try:
            async with asyncio.timeout(_BUSY_TIMEOUT_S):
                await self._write_lock.acquire()
        except TimeoutError:
            raise PoolTimeoutError(f"other writes have held the database for {_BUSY_TIMEOUT_S} s") from None
        try:
            yield
        finally:
            self._write_lock.release()


def _postgres_engine(url: str) -> AsyncEngine:
    """An engine whose every wait has a limit; connection options in the URL take precedence.

    Client and server each notice within half a minute that the other is gone, and the server frees its locks.
    """
    return create_async_engine(
        url,
        pool_pre_ping=True,
        pool_size=10,
        max_overflow=10,
        pool_timeout=_POOL_TIMEOUT_S,
        connect_args=_postgres_arguments(url),
    )


def _postgres_arguments(url: str) -> dict[str, Any]:
    options = " ".join(f"-c {name}={value}" for name, value in _POSTGRES_SESSION_SETTINGS.items())
    of_url = make_url(url).query
    return {
        name: value for name, value in {**_LIBPQ_OPTIONS, "options": options}.items() if name not in of_url
    }


def _time_statements(engine: AsyncEngine) -> None:
    """Observe the seconds of each statement by its first word; BEGIN includes the wait for SQLite's write lock."""

    @event.listens_for(engine.sync_engine, "before_cursor_execute")
    def _begin(connection: Connection, *_: Any) -> None:
        connection.info["slotline_began"] = time.perf_counter()

    @event.listens_for(engine.sync_engine, "after_cursor_execute")
    def _end(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        seconds = time.perf_counter() - connection.info["slotline_began"]
        word = statement.split(None, 1)[0].upper() if statement.strip() else ""
        DATABASE_SECONDS.labels(word if word in _TIMED_STATEMENTS else "OTHER").observe(seconds)


_TIMED_STATEMENTS = frozenset({"SELECT", "INSERT", "UPDATE", "DELETE", "BEGIN"})


def _sqlite_engine(url: str) -> AsyncEngine:
    engine = create_async_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_S}, pool_timeout=_POOL_TIMEOUT_S)

    @event.listens_for(engine.sync_engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions on its own
        cursor = connection.cursor()
        for pragma in ("synchronous=NORMAL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("slotline_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


_SQLITE_LOCK_WAIT_S = 10.0


class DatabaseInUseError(RuntimeError):
    """Another control plane serves this SQLite file."""


@contextlib.asynccontextmanager
async def exclusive_sqlite_lock(database: Database) -> AsyncIterator[None]:
    """Lock a SQLite database for this process, with a short wait for one that is ending. Raises DatabaseInUseError.

    Each control plane on SQLite has its own Ray, so two on one file would each take the other's drivers for lost.
    """
    path = database.url.database
    if not database.is_sqlite or path in (None, "", ":memory:"):
        yield
        return
    file = Path(f"{path}.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as handle:
        deadline = time.monotonic() + _SQLITE_LOCK_WAIT_S
        while not _try_flock(handle.fileno()):
            if time.monotonic() >= deadline:
                raise DatabaseInUseError(
                    f"another Slotline serves {path}: end it, or give this one its own SLOTLINE_DATA_DIR"
                )
            await asyncio.sleep(0.1)
        yield


def _try_flock(descriptor: int) -> bool:
    """True if this process has the lock now, or the file system has none; the kernel frees it at the process's end."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("no lock on the database (%s): start only one Slotline on it", error)
    return True


ResultT = TypeVar("ResultT")


async def run_to_completion(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await `work` to its end even if the caller is cancelled; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # marks an error as retrieved, which asyncio would else log
        raise


async def upsert(session: AsyncSession, table: type[Base], rows: list[dict[str, Any]]) -> None:
    """Insert `rows` (all with the same columns); a row whose primary key exists is updated."""
    if not rows:
        return
    statement, key = _dialect_insert(session, table)
    others = {name: statement.excluded[name] for name in rows[0] if name not in key}
    if not others:
        await session.execute(statement.on_conflict_do_nothing(index_elements=key), rows)
        return
    await session.execute(statement.on_conflict_do_update(index_elements=key, set_=others), rows)


async def insert_missing(session: AsyncSession, table: type[Base], row: dict[str, Any]) -> None:
    """Insert `row` unless a row with its primary key exists."""
    statement, key = _dialect_insert(session, table)
    await session.execute(statement.on_conflict_do_nothing(index_elements=key), row)


def _dialect_insert(
    session: AsyncSession, table: type[Base]
) -> tuple[sqlite.Insert | postgresql.Insert, list[str]]:
    """An insert in the session's dialect, and the columns of the primary key."""
    dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    return dialect.insert(table), [column.name for column in table.__table__.primary_key]
