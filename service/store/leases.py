"""Leases: rows with one holder until an expiry; the orchestrator role, process heartbeats and one-shot tasks.

`LeaseTable` has the statements of every lease of the store; storage uses (files.py) and webhook deliveries
(notifications.py) are leases too. A request at a cluster's autoscaler is a row that has no expiry.
The orchestrator role is a row with an expiry and a fencing token. Its holder renews it; after the expiry another
process takes it and the token grows. A frozen process does not notice, so each write through FencedDatabase checks,
in its own transaction, that its token is the newest, else it is rolled back. The expiry says when the role may be
taken; the token keeps two processes from writing.
A task's holder renews its row; after TASK_SILENCE_LIMIT_S without a renewal the process that asks next takes it and
starts the task again. Its result is read once. Each process has its own heartbeat row: a frozen writer locks no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, delete, func, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from service.observability.instruments import Outage
from service.store.database import Database, Sessions, database_now, insert_missing, upsert
from service.store.tables import Base, HeartbeatRow, LeaseRow, TaskRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTable:
    """A table whose rows are leases: each is held until `silence_limit` after its `time`, then anybody may take it.

    `time` is the expiry itself where the limit is 0, else the last renewal. It is compared with the `now` of the
    caller: database_now() for Unix seconds (`silence_limit` in seconds), an aware datetime otherwise (a timedelta).
    A holder proves its lease by conditions on the row, such as its name or its fencing token.
    """

    table: type[Base]
    key: InstrumentedAttribute[str]
    time: InstrumentedAttribute[Any]
    silence_limit: float | timedelta

    def is_held(self, now: Any) -> ColumnElement[bool]:
        """The condition that a row's lease has not expired."""
        return self.time > now - self.silence_limit

    async def acquire(
        self,
        session: AsyncSession,
        key: str,
        *conditions: ColumnElement[bool],
        now: Any,
        or_if: ColumnElement[bool] | None = None,
        returning: InstrumentedAttribute[Any] | None = None,
        **values: Any,
    ) -> Any | None:
        """Set `values` of the row, if it fulfils the conditions and its lease has expired (or `or_if` is true).

        Returns the row's new value of the column `returning` (its key by default); None where it was not acquired.
        """
        free = ~self.is_held(now) if or_if is None else or_(~self.is_held(now), or_if)
        acquired = update(self.table).where(self.key == key, free, *conditions).values(values)
        acquired = acquired.returning(self.key if returning is None else returning)
        return (await session.execute(acquired)).scalar_one_or_none()

    async def renew(self, session: AsyncSession, *proof: ColumnElement[bool], time: Any) -> set[str]:
        """Set the time of the rows that fulfil `proof`; returns their keys, none where the lease was lost."""
        renewed = update(self.table).where(*proof).values({self.time: time}).returning(self.key)
        return set((await session.execute(renewed)).scalars())

    async def release(self, session: AsyncSession, *proof: ColumnElement[bool]) -> None:
        """Delete the rows that fulfil `proof`."""
        await session.execute(delete(self.table).where(*proof))

    async def delete_expired(self, session: AsyncSession, *conditions: ColumnElement[bool], now: Any) -> None:
        await self.release(session, ~self.is_held(now), *conditions)


ORCHESTRATOR_LEASE = "orchestrator"
_ROLES = LeaseTable(LeaseRow, LeaseRow.name, LeaseRow.expires_at, silence_limit=0.0)


class LeaseLostError(RuntimeError):
    """Another process has the role; the write is refused."""


@dataclass(frozen=True)
class LeaseStatus:
    """Holder, fencing token and remaining seconds of a role; `left_s` is negative once the lease has expired."""

    holder: str
    token: int
    left_s: float


async def read_lease_status(database: Database, name: str = ORCHESTRATOR_LEASE) -> LeaseStatus | None:
    """The status of a role; None before its first holder."""
    query = select(LeaseRow.holder, LeaseRow.token, LeaseRow.expires_at - database_now())
    async with database.read() as session:
        row = (await session.execute(query.where(LeaseRow.name == name))).one_or_none()
    return None if row is None else LeaseStatus(*row)


def unique_process_name() -> str:
    """A name that no other process of a shared database has: host, process id and random digits."""
    return f"{socket.gethostname()[:150]}-{os.getpid()}-{secrets.token_hex(4)}"


class Lease:
    """This process's lease of a role, for `lease_s` at a time.

    Call `acquire()` before each piece of work, `renew()` regularly, and `check()` in each write. Acquire it again only
    when all work of the earlier term has ended: `check` knows the present token alone.
    """

    def __init__(
        self, database: Database, *, lease_s: float, holder: str, name: str = ORCHESTRATOR_LEASE
    ) -> None:
        self.token: int | None = None
        self.lease_s, self.holder, self.name = lease_s, holder, name
        self._database = database
        self._renewed_at = 0.0
        self._has_sqlite_alone = database.is_sqlite
        self._followed_token: int | None = None
        self._acquire_lock = asyncio.Lock()

    async def acquire(self) -> bool:
        """Take the role if it is free; returns whether this process has it. Raises LeaseLostError where it was taken."""
        if self.token is None:
            async with self._acquire_lock:
                return self.token is not None or await self._take()
        if time.monotonic() - self._renewed_at >= self.lease_s:  # it may have expired: the database knows
            await self.renew()
        return True

    async def renew(self) -> None:
        """Have the role for another `lease_s` from now. Raises LeaseLostError."""
        token, asked_at = self.token, time.monotonic()
        if token is None:
            return
        if not await self._set_expiry(token, database_now() + self.lease_s):
            self._lose(token, await read_lease_status(self._database, self.name))
        elif token == self.token:
            self._renewed_at = asked_at

    async def release(self) -> None:
        """Let the lease expire now; its row stays, so that the next token is higher."""
        token, self.token = self.token, None
        if token is None:
            return
        with contextlib.suppress(SQLAlchemyError, OSError):
            await self._set_expiry(token, database_now())

    async def check(self, session: AsyncSession) -> None:
        """Refuse the writes of `session` if the role was taken; nobody can take it until the session ends.

        On PostgreSQL the server disconnects a process that freezes right then before its lease expires.
        """
        token = self.token
        if token is None:
            raise LeaseLostError("this control plane does not orchestrate now")
        columns: list[Any] = [LeaseRow.token, LeaseRow.holder]
        if not self._database.is_sqlite:
            limit = f"{self.lease_s * 500:.0f}ms"
            columns.append(func.set_config("idle_in_transaction_session_timeout", limit, True))
        query = select(*columns).where(LeaseRow.name == self.name).with_for_update(read=True)
        newest, holder, *_ = (await session.execute(query)).one()
        if newest != token:
            self._lose(token, LeaseStatus(holder, newest, 0.0))

    async def _take(self) -> bool:
        status = await read_lease_status(self._database, self.name)
        if status is not None and status.left_s > 0 and not self._has_sqlite_alone:
            if self._followed_token != status.token:
                logger.info("%s orchestrates (term %d): this one serves", status.holder, status.token)
            self._followed_token = status.token
            return False
        now, asked_at = database_now(), time.monotonic()
        # whoever opened a SQLite file has it alone (exclusive_sqlite_lock): a killed holder is not waited for
        was_killed = None if status is None or not self._has_sqlite_alone else LeaseRow.token == status.token
        async with self._database.write() as session:
            if status is None:
                unheld = {"name": self.name, "holder": "", "token": 0, "taken_at": 0.0, "expires_at": 0.0}
                await insert_missing(session, LeaseRow, unheld)
            token = await _ROLES.acquire(
                session,
                self.name,
                now=now,
                or_if=was_killed,
                returning=LeaseRow.token,
                holder=self.holder,
                token=LeaseRow.token + 1,
                taken_at=now,
                expires_at=now + self.lease_s,
            )
        if token is None:
            return False
        self._has_sqlite_alone, self._renewed_at, self.token = False, asked_at, token
        logger.info("this control plane orchestrates now (term %d)", token)
        return True

    async def _set_expiry(self, token: int, expires_at: Any) -> bool:
        """Set the expiry if this token is the newest; returns whether it is."""
        proof = LeaseRow.name == self.name, LeaseRow.token == token
        async with self._database.write() as session:
            return bool(await _ROLES.renew(session, *proof, time=expires_at))

    def _lose(self, token: int, successor: LeaseStatus | None) -> None:
        """Step down, with one warning for each term. Raises LeaseLostError."""
        if successor is None:
            message = "the lease's row is gone"
        else:
            message = f"{successor.holder} orchestrates (term {successor.token})"
        if self.token == token:
            self.token = None
            logger.warning(
                "%s, and this one, away for longer than its lease of %g s (term %d), steps down: "
                "what it was about to write was refused",
                message,
                self.lease_s,
                token,
            )
        raise LeaseLostError(message)


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
        """One transaction, as Database.write; checked at its end, so that the lease's row is locked for a moment only."""
        async with self._database.write() as session:
            yield session
            await session.flush()
            await self._lease.check(session)


_AUTOSCALER_REQUEST = "autoscaler-"
"""A request at a cluster's autoscaler is a row; its holder is the cluster, whose name may be too long for a key."""


async def clusters_with_requests(session: AsyncSession) -> list[str]:
    """The names of clusters whose autoscaler may have a request of this database's control planes."""
    query = select(LeaseRow.holder).where(LeaseRow.name.startswith(_AUTOSCALER_REQUEST, autoescape=True))
    return list((await session.execute(query)).scalars())


async def set_request_stands(session: AsyncSession, cluster: str, stands: bool) -> None:
    """Write down that the cluster's autoscaler may have a request, or that it has none."""
    name = f"{_AUTOSCALER_REQUEST}{hashlib.sha256(cluster.encode()).hexdigest()}"
    if stands:
        row = {"name": name, "holder": cluster, "token": 0, "taken_at": 0.0, "expires_at": 0.0}
        await insert_missing(session, LeaseRow, row)
    else:
        await _ROLES.release(session, LeaseRow.name == name)


_HEARTBEATS = LeaseTable(HeartbeatRow, HeartbeatRow.name, HeartbeatRow.at, silence_limit=timedelta(hours=1))
"""A process holds its own name; the row is deleted an hour after the last heartbeat."""


async def record_heartbeat(session: AsyncSession, name: str, *, at: datetime) -> None:
    await upsert(session, HeartbeatRow, [{"name": name, "at": at}])


async def delete_old_heartbeats(session: AsyncSession, *, at: datetime) -> None:
    """Delete the rows of processes that have ended."""
    await _HEARTBEATS.delete_expired(session, now=at)


TASK_SILENCE_LIMIT_S = 30.0
_TASK_RESULT_KEPT_S = 3600.0
_TASKS = LeaseTable(TaskRow, TaskRow.key, TaskRow.beat_at, silence_limit=TASK_SILENCE_LIMIT_S)


@dataclass(frozen=True)
class TaskOutcome:
    """The end of a task: its answer, or the failure that left it without one."""

    answer: str | None = None
    failure: str | None = None


async def is_task_running(database: Sessions, key: str) -> bool:
    """True while the task has not ended and its holder is not silent."""
    query = select(TaskRow.key).where(TaskRow.key == key, _TASKS.is_held(database_now()), ~TaskRow.ended)
    async with database.read() as session:
        return (await session.execute(query)).first() is not None


async def take_task_outcome(session: AsyncSession, key: str) -> TaskOutcome | None:
    """The outcome of the task, whose row is deleted with that; None where it has not ended."""
    ended = delete(TaskRow).where(TaskRow.key == key, TaskRow.ended)
    row = (await session.execute(ended.returning(TaskRow.answer, TaskRow.failure))).one_or_none()
    return None if row is None else TaskOutcome(*row)


async def claim_task(session: AsyncSession, key: str, holder: str) -> bool:
    """Give the task to `holder`, if nobody has it or its holder is silent; returns whether `holder` may begin it."""
    unheld = {"key": key, "holder": "", "beat_at": 0.0, "ended": False, "answer": None, "failure": None}
    await insert_missing(session, TaskRow, unheld)
    now = database_now()
    claimed = await _TASKS.acquire(session, key, ~TaskRow.ended, now=now, holder=holder, beat_at=now)
    return claimed is not None


async def renew_tasks(session: AsyncSession, holder: str, keys: list[str]) -> set[str]:
    """Renew the tasks of `holder`; returns which of `keys` it still has."""
    proof = TaskRow.holder == holder, TaskRow.key.in_(keys)
    return await _TASKS.renew(session, *proof, time=database_now())


async def finish_task(session: AsyncSession, key: str, holder: str, outcome: TaskOutcome | None) -> None:
    """Store the outcome of a task, or delete its row; a task that another process has taken is left to it."""
    proof = TaskRow.key == key, TaskRow.holder == holder
    if outcome is None:
        await _TASKS.release(session, *proof)
    else:
        ended = update(TaskRow).where(*proof)
        await session.execute(ended.values(ended=True, answer=outcome.answer, failure=outcome.failure))


async def delete_old_tasks(session: AsyncSession) -> None:
    """Delete tasks that nobody has asked for in an hour."""
    await _TASKS.release(session, TaskRow.beat_at < database_now() - _TASK_RESULT_KEPT_S)
