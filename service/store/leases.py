"""Which of several processes has a role: a row with an expiry by the database's clock, and a fencing token.

The holder renews its row; once that has expired another takes it, and the token grows. A process that was frozen
does not know that: so each of its writes asks, in its own transaction, whether its token is still the newest, and is
rolled back where it is not. Time only says when a role may be taken; that two never write is up to the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from service.outage import Outage
from service.store.clock import clock
from service.store.database import Database
from service.store.tables import Lease as Row
from service.store.upsert import insert_missing

logger = logging.getLogger(__name__)
ORCHESTRATOR = "orchestrator"


class LeaseLostError(RuntimeError):
    """Another process has the role: what was to be written is not."""


@dataclass(frozen=True)
class LeaseSeen:
    """What the database says of a role; `left_s` is negative once the lease has expired."""

    holder: str
    token: int
    left_s: float


async def lease_seen(database: Database, name: str = ORCHESTRATOR) -> LeaseSeen | None:
    """Who has the role; None where nobody ever had it."""
    query = select(Row.holder, Row.token, Row.expires_at - clock()).where(Row.name == name)
    async with database.read() as session:
        found = (await session.execute(query)).one_or_none()
    return None if found is None else LeaseSeen(*found)


def process_name() -> str:
    """Of this process among those that share a database: no two have the same."""
    return f"{socket.gethostname()[:150]}-{os.getpid()}-{secrets.token_hex(4)}"


class Lease:
    """A role, `lease_s` at a time. Ask `held()` before each piece of work; `renew()` now and then; `check()` in each write.

    Take it again only when all work of the earlier term has ended: `check` knows the present token alone.
    """

    def __init__(self, database: Database, *, lease_s: float, holder: str, name: str = ORCHESTRATOR) -> None:
        self.token: int | None = None
        self.lease_s, self.holder, self.name = lease_s, holder, name
        self._database = database
        self._renewed_at = 0.0
        self._alone = database.is_sqlite
        self._followed: int | None = None
        self._taking = asyncio.Lock()

    async def held(self) -> bool:
        """Whether this process has the role; takes it where nobody has. Raises LeaseLostError where it is gone."""
        if self.token is None:
            async with self._taking:
                return self.token is not None or await self._take()
        if time.monotonic() - self._renewed_at >= self.lease_s:  # it may have expired: the database knows
            await self.renew()
        return True

    async def renew(self) -> None:
        """Have it for another `lease_s` from now. Raises LeaseLostError."""
        token, asked_at = self.token, time.monotonic()
        if token is None:
            return
        renewed = self._change(token).values(expires_at=clock() + self.lease_s)
        async with self._database.write() as session:
            found = (await session.execute(renewed.returning(Row.token))).scalar_one_or_none()
        if found is None:
            self._lost(token, await lease_seen(self._database, self.name))
        elif token == self.token:
            self._renewed_at = asked_at

    async def release(self) -> None:
        """Let another one have it at once."""
        token, self.token = self.token, None
        if token is None:
            return
        with contextlib.suppress(SQLAlchemyError, OSError):
            async with self._database.write() as session:
                await session.execute(self._change(token).values(expires_at=clock()))

    async def check(self, session: AsyncSession) -> None:
        """Refuse what `session` has written where the role was taken since; until its end nobody can take it.

        On PostgreSQL a process that is frozen right then is cut off by the server before its lease expires.
        """
        token = self.token
        if token is None:
            raise LeaseLostError("this control plane does not orchestrate now")
        columns: list[Any] = [Row.token, Row.holder]
        if not self._database.is_sqlite:
            limit = f"{self.lease_s * 500:.0f}ms"
            columns.append(func.set_config("idle_in_transaction_session_timeout", limit, True))
        query = select(*columns).where(Row.name == self.name).with_for_update(read=True)
        newest, holder, *_ = (await session.execute(query)).one()
        if newest != token:
            self._lost(token, LeaseSeen(holder, newest, 0.0))

    async def _take(self) -> bool:
        seen = await lease_seen(self._database, self.name)
        if seen is not None and seen.left_s > 0 and not self._alone:
            if self._followed != seen.token:
                logger.info("%s orchestrates (term %d): this one serves", seen.holder, seen.token)
            self._followed = seen.token
            return False
        now, asked_at = clock(), time.monotonic()
        first = {"name": self.name, "holder": "", "token": 0, "taken_at": 0.0, "expires_at": 0.0}
        free = Row.expires_at <= now
        if self._alone and seen is not None:
            # whoever opened this file has it to itself (sole_user): a holder that was killed is not waited for
            free = or_(free, Row.token == seen.token)
        taken = update(Row).where(Row.name == self.name, free)
        taken = taken.values(
            holder=self.holder, token=Row.token + 1, taken_at=now, expires_at=now + self.lease_s
        )
        async with self._database.write() as session:
            if seen is None:
                await insert_missing(session, Row, first)
            token = (await session.execute(taken.returning(Row.token))).scalar_one_or_none()
        if token is None:
            return False
        self._alone, self._renewed_at, self.token = False, asked_at, token
        logger.info("this control plane orchestrates now (term %d)", token)
        return True

    def _change(self, token: int) -> Any:
        return update(Row).where(Row.name == self.name, Row.token == token)

    def _lost(self, token: int, to: LeaseSeen | None) -> None:
        """Say so once, and raise."""
        told = "the lease's row is gone" if to is None else f"{to.holder} orchestrates (term {to.token})"
        if self.token == token:
            self.token = None
            logger.warning(
                "%s, and this one, away for longer than its lease of %g s (term %d), steps down: "
                "what it was about to write was refused",
                told,
                self.lease_s,
                token,
            )
        raise LeaseLostError(told)


class FencedDatabase:
    """Sessions whose writes are refused, with LeaseLostError, once another process has the role of `lease`."""

    def __init__(self, database: Database, lease: Lease) -> None:
        self._database, self._lease = database, lease

    @property
    def outage(self) -> Outage:
        return self._database.outage

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        async with self._database.read() as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """One transaction, as Database.write: asked last, so that the lease's row is locked for a moment only."""
        async with self._database.write() as session:
            yield session
            await session.flush()
            await self._lease.check(session)
