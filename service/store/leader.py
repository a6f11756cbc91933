"""Which control plane runs the orchestrator, where several share one PostgreSQL (a rolling update).

An advisory lock on a connection of its own: it goes when the connection or the process goes. SQLite
belongs to one control plane, which always leads: `sole_user` keeps a second one out.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from service.store.database import Database

logger = logging.getLogger(__name__)
_LEADER_LOCK = 0x510714E
_TAKE_OVER_S = 10.0


class DatabaseInUseError(RuntimeError):
    """Another control plane serves this SQLite file."""


@contextlib.asynccontextmanager
async def sole_user(database: Database) -> AsyncIterator[None]:
    """Hold a SQLite database alone, waiting a little for one that is just ending. Raises DatabaseInUseError.

    Two orchestrators on one file would each take the other's drivers for lost: each has a Ray of its own.
    """
    path = database.url.database
    if not database.is_sqlite or path in (None, "", ":memory:"):
        yield
        return
    file = Path(f"{path}.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as handle:
        deadline = time.monotonic() + _TAKE_OVER_S
        while not _locked(handle.fileno()):
            if time.monotonic() >= deadline:
                raise DatabaseInUseError(
                    f"another Slotline serves {path}: end it, or give this one its own SLOTLINE_DATA_DIR"
                )
            await asyncio.sleep(0.1)
        yield


def _locked(descriptor: int) -> bool:
    """Whether the lock is ours now; it goes with the process, however that ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("no lock on the database (%s): start only one Slotline on it", error)
    return True


class Leadership:
    """Ask `held()` before each round; `release()` lets another one lead at once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: AsyncConnection | None = None

    async def held(self) -> bool:
        """Whether this process leads; tries to become the leader when nobody is."""
        if self._database.is_sqlite:
            return True
        try:
            if self._connection is not None:
                await self._connection.execute(text("SELECT 1"))
                return True
            return await self._try()
        except (SQLAlchemyError, OSError):
            await self.release()
            raise

    async def release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(SQLAlchemyError, OSError):
                # at once: the server notices some time later that a connection has gone
                await connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _LEADER_LOCK})
            with contextlib.suppress(SQLAlchemyError, OSError):
                await connection.invalidate()  # not back into the pool: the lock lives in the connection
                await connection.close()

    async def _try(self) -> bool:
        connection = await self._database.engine.connect()
        connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
        query = text("SELECT pg_try_advisory_lock(:key)")
        if (await connection.execute(query, {"key": _LEADER_LOCK})).scalar_one():
            self._connection = connection
            return True
        await connection.close()
        return False
