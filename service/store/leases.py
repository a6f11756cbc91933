"""Leases by the database's clock: orchestrator role, process heartbeats, one-shot tasks, uses of job storage.

The role is a row with an expiry and a fencing token. Its holder renews it; after the expiry another process takes it
and the token grows. A frozen process does not know that, so each write through FencedDatabase checks, in its own
transaction, that its token is the newest, else it is rolled back. Time only says when a role may be taken; the token
keeps two from writing.
A task's holder renews its row; after TASK_SILENCE_LIMIT_S of silence whoever asks next takes it and starts it again.
Its result is read once. Reading and deleting a job's files exclude each other over all replicas; a use whose control
plane was lost ends at its limit, as what it began in the cluster does. One heartbeat row a process: a frozen writer
locks its own only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, delete, func, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from service.observability.instruments import Outage
from service.store.database import Database, Sessions, database_now, insert_missing, upsert
from service.store.tables import HeartbeatRow, StorageUse, TaskRow
from service.store.tables import LeaseRow as Row
from service.store.transitions import lock_job

logger = logging.getLogger(__name__)
ORCHESTRATOR_LEASE = "orchestrator"


class LeaseLostError(RuntimeError):
    """Another process has the role: what was to be written is not."""


@dataclass(frozen=True)
class LeaseStatus:
    """What the database says of a role; `left_s` is negative once the lease has expired."""

    holder: str
    token: int
    left_s: float


async def read_lease_status(database: Database, name: str = ORCHESTRATOR_LEASE) -> LeaseStatus | None:
    """Who has the role; None where nobody ever had it."""
    query = select(Row.holder, Row.token, Row.expires_at - database_now()).where(Row.name == name)
    async with database.read() as session:
        found = (await session.execute(query)).one_or_none()
    return None if found is None else LeaseStatus(*found)


def unique_process_name() -> str:
    """Of this process among those that share a database: no two have the same."""
    return f"{socket.gethostname()[:150]}-{os.getpid()}-{secrets.token_hex(4)}"


class Lease:
    """A role, `lease_s` at a time. Ask `held()` before each piece of work; `renew()` now and then; `check()` in each write.

    Take it again only when all work of the earlier term has ended: `check` knows the present token alone.
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
        """Whether this process has the role; takes it where nobody has. Raises LeaseLostError where it is gone."""
        if self.token is None:
            async with self._acquire_lock:
                return self.token is not None or await self._take()
        if time.monotonic() - self._renewed_at >= self.lease_s:  # it may have expired: the database knows
            await self.renew()
        return True

    async def renew(self) -> None:
        """Have it for another `lease_s` from now. Raises LeaseLostError."""
        token, asked_at = self.token, time.monotonic()
        if token is None:
            return
        renewed = self._change(token).values(expires_at=database_now() + self.lease_s)
        async with self._database.write() as session:
            found = (await session.execute(renewed.returning(Row.token))).scalar_one_or_none()
        if found is None:
            self._lost(token, await read_lease_status(self._database, self.name))
        elif token == self.token:
            self._renewed_at = asked_at

    async def release(self) -> None:
        """Let another one have it at once."""
        token, self.token = self.token, None
        if token is None:
            return
        with contextlib.suppress(SQLAlchemyError, OSError):
            async with self._database.write() as session:
                await session.execute(self._change(token).values(expires_at=database_now()))

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
            self._lost(token, LeaseStatus(holder, newest, 0.0))

    async def _take(self) -> bool:
        seen = await read_lease_status(self._database, self.name)
        if seen is not None and seen.left_s > 0 and not self._has_sqlite_alone:
            if self._followed_token != seen.token:
                logger.info("%s orchestrates (term %d): this one serves", seen.holder, seen.token)
            self._followed_token = seen.token
            return False
        now, asked_at = database_now(), time.monotonic()
        first = {"name": self.name, "holder": "", "token": 0, "taken_at": 0.0, "expires_at": 0.0}
        free = Row.expires_at <= now
        if self._has_sqlite_alone and seen is not None:
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
        self._has_sqlite_alone, self._renewed_at, self.token = False, asked_at, token
        logger.info("this control plane orchestrates now (term %d)", token)
        return True

    def _change(self, token: int) -> Any:
        return update(Row).where(Row.name == self.name, Row.token == token)

    def _lost(self, token: int, to: LeaseStatus | None) -> None:
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


_HEARTBEAT_KEPT_FOR = timedelta(hours=1)


async def record_heartbeat(session: AsyncSession, name: str, *, at: datetime) -> None:
    await upsert(session, HeartbeatRow, [{"name": name, "at": at}])


async def delete_old_heartbeats(session: AsyncSession, *, at: datetime) -> None:
    """Of processes that have ended."""
    await session.execute(delete(HeartbeatRow).where(HeartbeatRow.at < at - _HEARTBEAT_KEPT_FOR))


TASK_SILENCE_LIMIT_S = 30.0
_TASK_RESULT_KEPT_S = 3600.0


@dataclass(frozen=True)
class TaskOutcome:
    """What came of a run: its answer, or why there is none."""

    answer: str | None = None
    failure: str | None = None


async def is_task_running(database: Sessions, key: str) -> bool:
    """Whether a living process has this run, and it has not ended."""
    query = select(TaskRow.key).where(TaskRow.key == key, ~_is_holder_silent(), ~TaskRow.ended)
    async with database.read() as session:
        return (await session.execute(query)).first() is not None


async def take_task_outcome(session: AsyncSession, key: str) -> TaskOutcome | None:
    """What came of the run, which is forgotten with that; None where it has not ended."""
    told = delete(TaskRow).where(TaskRow.key == key, TaskRow.ended)
    found = (await session.execute(told.returning(TaskRow.answer, TaskRow.failure))).one_or_none()
    return None if found is None else TaskOutcome(*found)


async def claim_task(session: AsyncSession, key: str, holder: str) -> bool:
    """Whether `holder` has the run now, to begin it: nobody had it, or who had it is silent."""
    first = {"key": key, "holder": "", "beat_at": 0.0, "ended": False, "answer": None, "failure": None}
    await insert_missing(session, TaskRow, first)
    taken = update(TaskRow).where(TaskRow.key == key, ~TaskRow.ended, _is_holder_silent())
    taken = taken.values(holder=holder, beat_at=database_now())
    return (await session.execute(taken.returning(TaskRow.key))).first() is not None


async def renew_tasks(session: AsyncSession, holder: str, keys: list[str]) -> set[str]:
    """Say that `holder` goes on with its runs; those of `keys` that it still has."""
    beating = update(TaskRow).where(TaskRow.holder == holder, TaskRow.key.in_(keys))
    beating = beating.values(beat_at=database_now()).returning(TaskRow.key)
    return set((await session.execute(beating)).scalars())


async def finish_task(session: AsyncSession, key: str, holder: str, end: TaskOutcome | None) -> None:
    """Keep what came of a run, or nothing of it; a run that another process has taken is left to it."""
    mine = TaskRow.key == key, TaskRow.holder == holder
    if end is None:
        await session.execute(delete(TaskRow).where(*mine))
    else:
        ended = update(TaskRow).where(*mine)
        await session.execute(ended.values(ended=True, answer=end.answer, failure=end.failure))


async def delete_old_tasks(session: AsyncSession) -> None:
    """Those that nobody has asked for in an hour."""
    await session.execute(delete(TaskRow).where(TaskRow.beat_at < database_now() - _TASK_RESULT_KEPT_S))


def _is_holder_silent() -> ColumnElement[bool]:
    return TaskRow.beat_at < database_now() - TASK_SILENCE_LIMIT_S


class StorageUseKind(StrEnum):
    READING = "reading"
    REMOVING = "removing"


class StorageInUseError(Exception):
    """What was asked for is not possible now; the message says who is in the way."""


async def begin_storage_use(
    session: AsyncSession,
    job_id: str,
    use: StorageUseKind,
    folders: Sequence[str] | None,
    *,
    at: datetime,
    limit_s: float,
) -> str:
    """The id of a use of these folders (None: any). The job stays locked until the session ends. Raises InUseError."""
    await lock_job(session, job_id)
    await session.execute(delete(StorageUse).where(StorageUse.job_id == job_id, StorageUse.until < at))
    query = select(StorageUse).where(StorageUse.job_id == job_id, StorageUse.kind != use)
    for other in (await session.execute(query)).scalars():
        if folders is None or other.folders is None or {*folders} & {*other.folders}:
            doing = "an export reads" if other.kind == StorageUseKind.READING else "somebody deletes"
            what = "its checkpoints" if other.folders is None else ", ".join(other.folders)
            raise StorageInUseError(f"{doing} {what} of job {job_id} now: ask again when it has ended")
    found = StorageUse(
        id=secrets.token_hex(16),
        job_id=job_id,
        kind=use,
        folders=None if folders is None else list(folders),
        until=at + timedelta(seconds=limit_s),
    )
    session.add(found)
    return found.id


async def end_storage_use(session: AsyncSession, use_id: str) -> None:
    await session.execute(delete(StorageUse).where(StorageUse.id == use_id))


async def check_no_removal(session: AsyncSession, job_id: str, *, at: datetime) -> None:
    """Raise InUseError while something that the job has saved is deleted: an attempt might go on from that."""
    await lock_job(session, job_id)
    query = select(StorageUse.id).where(
        StorageUse.job_id == job_id, StorageUse.kind == StorageUseKind.REMOVING, StorageUse.until >= at
    )
    if (await session.execute(query.limit(1))).first() is not None:
        raise StorageInUseError(
            f"checkpoints of job {job_id} are being deleted: retry it when that has ended"
        )
