"""The database: engine, read and write sessions, migrations at start.

Sessions are asynchronous, so that a request waits for the database without holding a thread, on
SQLite (a thread inside aiosqlite) as on PostgreSQL (psycopg). No network call inside a session.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import tenacity
from sqlalchemy import Connection, event, make_url, text
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from service.instruments import DATABASE_SECONDS
from service.outage import Outage
from service.store.schema import migrate
from service.store.spans import record_noted

logger = logging.getLogger(__name__)
AWAY = (OperationalError, InterfaceError, PoolTimeoutError, OSError)
"""What a database that is away, full or too busy raises."""
_MIGRATION_LOCK = 0x510711E  # PostgreSQL advisory lock: one control plane migrates, others wait
_BUSY_TIMEOUT_S = 30
_POOL_TIMEOUT_S = 10
"""So long a session waits for one of the connections, which others hold: the caller may ask again."""
_POSTGRES_CLIENT = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""As libpq names them: seconds, the last in milliseconds."""
_POSTGRES_SERVER = {
    "statement_timeout": "30s",
    "idle_in_transaction_session_timeout": "15s",
    "tcp_keepalives_idle": 10,
    "tcp_keepalives_interval": 5,
    "tcp_keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Settings of each session at the server. What waits in a transaction for its client is frozen or cut off, since no
session of ours waits for anything else than the database: others want what it has locked."""


def utc_now() -> datetime:
    """Now, aware, in UTC."""
    return datetime.now(UTC)


class Sessions(Protocol):
    """Where somebody reads and writes: a Database, or one that refuses the writes of a process that was replaced."""

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
        self._writing = asyncio.Lock()
        self.session_info: dict[str, Any] = {}
        """What every write session carries in its `info`: see notifications.EVERY_JOB."""
        _time_statements(self.engine)

    async def start(self, *, to: str = "head") -> None:
        """Create what is missing and migrate to the newest tables, or to a revision; safe to run twice.

        Raises NewerTablesError where a newer Slotline has made tables that this one cannot work with.
        """
        if self.is_sqlite and self.url.database not in (None, "", ":memory:"):
            Path(str(self.url.database)).parent.mkdir(parents=True, exist_ok=True)
        if self.is_sqlite:
            await self._keep_a_write_ahead_log()
        async with self.engine.connect() as connection:
            connection = await connection.execution_options(slotline_write=True)
            async with connection.begin():
                if not self.is_sqlite:
                    # a migration takes as long as it takes, and so does waiting for somebody else's
                    await connection.execute(text("SET LOCAL statement_timeout = 0"))
                    await connection.execute(
                        text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK}
                    )
                await connection.run_sync(migrate, to)

    async def _keep_a_write_ahead_log(self) -> None:
        """The file remembers it. SQLite does not wait for a lock when the journal changes, so we do."""
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
        async with self._turn(), self.engine.connect() as connection:
            connection = await connection.execution_options(slotline_write=True)
            async with AsyncSession(connection, expire_on_commit=False, info=self.session_info) as session:
                async with session.begin():
                    yield session
                record_noted(session)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """On SQLite, whose file one process has: who came first writes first.

        SQLite itself lets those that wait sleep for longer and longer, and whoever comes at the right moment goes
        before them: of 8 that write all the time some waited for seconds.
        """
        if not self.is_sqlite:
            yield
            return
        try:
            async with asyncio.timeout(_BUSY_TIMEOUT_S):
                await self._writing.acquire()
        except TimeoutError:
            raise PoolTimeoutError(f"other writes have held the database for {_BUSY_TIMEOUT_S} s") from None
        try:
            yield
        finally:
            self._writing.release()


def _postgres_engine(url: str) -> AsyncEngine:
    """An engine whose every wait ends; what the URL itself says of a connection goes before ours.

    Both ends find out within half a minute that the other is gone: we, that a query is asked in vain, and
    the server, that nobody holds the locks of a connection any more.
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
    options = " ".join(f"-c {name}={value}" for name, value in _POSTGRES_SERVER.items())
    given = make_url(url).query
    return {
        name: value for name, value in {**_POSTGRES_CLIENT, "options": options}.items() if name not in given
    }


def _time_statements(engine: AsyncEngine) -> None:
    """Observe how long each statement takes, by its first word; BEGIN waits for SQLite's write lock."""

    @event.listens_for(engine.sync_engine, "before_cursor_execute")
    def _begin(connection: Connection, *_: Any) -> None:
        connection.info["slotline_began"] = time.perf_counter()

    @event.listens_for(engine.sync_engine, "after_cursor_execute")
    def _end(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        seconds = time.perf_counter() - connection.info["slotline_began"]
        word = statement.split(None, 1)[0].upper() if statement.strip() else ""
        DATABASE_SECONDS.labels(word if word in _OPERATIONS else "OTHER").observe(seconds)


_OPERATIONS = frozenset({"SELECT", "INSERT", "UPDATE", "DELETE", "BEGIN"})


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
