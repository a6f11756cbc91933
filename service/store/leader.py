"""Which control plane runs the orchestrator, where several share one PostgreSQL (a rolling update).

An advisory lock on a connection of its own: it goes when the connection or the process goes. SQLite
belongs to one process, which always leads.
"""

from __future__ import annotations

import contextlib

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from service.store.database import Database

_LEADER_LOCK = 0x510714E


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
