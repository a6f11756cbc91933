"""Who uses what a job has saved: reading and deleting keep out of each other's way, whichever replica was asked.

A use that is not ended, since its control plane was lost, is over at its limit: what it began in the cluster ends then.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.kept_tables import StorageUse
from service.store.states import lock_job


class Use(StrEnum):
    READING = "reading"
    REMOVING = "removing"


class InUseError(Exception):
    """What was asked for is not possible now; the message says who is in the way."""


async def begin_use(
    session: AsyncSession,
    job_id: str,
    use: Use,
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
            doing = "an export reads" if other.kind == Use.READING else "somebody deletes"
            what = "its checkpoints" if other.folders is None else ", ".join(other.folders)
            raise InUseError(f"{doing} {what} of job {job_id} now: ask again when it has ended")
    found = StorageUse(
        id=secrets.token_hex(16),
        job_id=job_id,
        kind=use,
        folders=None if folders is None else list(folders),
        until=at + timedelta(seconds=limit_s),
    )
    session.add(found)
    return found.id


async def end_use(session: AsyncSession, use_id: str) -> None:
    await session.execute(delete(StorageUse).where(StorageUse.id == use_id))


async def check_not_removing(session: AsyncSession, job_id: str, *, at: datetime) -> None:
    """Raise InUseError while something that the job has saved is deleted: an attempt might go on from that."""
    await lock_job(session, job_id)
    query = select(StorageUse.id).where(
        StorageUse.job_id == job_id, StorageUse.kind == Use.REMOVING, StorageUse.until >= at
    )
    if (await session.execute(query.limit(1))).first() is not None:
        raise InUseError(f"checkpoints of job {job_id} are being deleted: retry it when that has ended")
