"""What the store says of files that are deleted: before, so that nobody goes by them, and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.cluster_settings import DEFAULT
from service.job_states import FINAL_STATES
from service.jobspec import stored
from service.principals import by_whom
from service.store.audit import add_audit
from service.store.states import add_event, lock_job
from service.store.storage_uses import InUseError, Use, begin_use, end_use
from service.store.tables import Job
from worker.checkpoint_files import folder_name, step_uri
from worker.removal_request import RemovalRequest, Removed

_JOBS_AT_ONCE = 50


@dataclass(frozen=True)
class BegunRemoval:
    """What a process of the cluster is to delete; `reported` is the checkpoint that the job went by until now."""

    use_id: str
    request: RemovalRequest
    reported: int | None
    by: str
    cluster: str
    days: float | None = None
    """After so long it was removed without being asked for."""


async def begin_removal(
    session: AsyncSession,
    job_id: str,
    folders: Sequence[str] | None,
    *,
    at: datetime,
    limit_s: float,
    by: str,
    days: float | None = None,
) -> BegunRemoval:
    """Begin to delete these folders of a job (None: all). Raises InUseError, also for what an attempt would go on from."""
    job = await lock_job(session, job_id)
    assert job is not None, job_id
    in_use = not job.job_state.final
    if in_use and (folders is None or reported_folder(job) in folders):
        raise InUseError(
            f"job {job_id} is {job.state}, and would go on from its checkpoint after step {job.checkpoint_step}: that one "
            "stays until the job has ended"
        )
    use_id = await begin_use(session, job_id, Use.REMOVING, folders, at=at, limit_s=limit_s)
    reported = job.checkpoint_step
    if folders is None or reported_folder(job) in folders:
        job.checkpoint_step = job.checkpoint_uri = None  # a retry looks for what is there
    what = "all" if folders is None else ", ".join(folders)
    if days is None:
        add_audit(session, by, "job.remove_files", job_id, at=at, detail=what)
    uri = stored(job.spec, "checkpoint", "uri", "")
    request = RemovalRequest(uri, job_id, None if folders is None else tuple(folders), in_use)
    return BegunRemoval(use_id, request, reported, by, job.began_on or DEFAULT, days)


def reported_folder(job: Job) -> str | None:
    """The folder of the checkpoint that an attempt would go on from, as far as its driver has said."""
    return None if job.checkpoint_step is None else folder_name(job.checkpoint_step)


async def end_removal(
    session: AsyncSession, begun: BegunRemoval, found: Removed | None, *, at: datetime
) -> None:
    """Have the job say what is left of its files; None for `found`: nobody knows."""
    request = begun.request
    job = await lock_job(session, request.job)
    await end_use(session, begun.use_id)
    if job is None:
        return
    if found is None or found.failed is not None:
        if job.checkpoint_step is None and begun.reported is not None:
            _goes_by(job, request.uri, begun.reported)
        return
    job.stored_bytes = found.left_bytes
    if job.job_state.final and job.checkpoint_step not in found.left:
        _goes_by(job, request.uri, max(found.left, default=None))
    best = (job.best_checkpoint or {}).get("step")
    if best is not None and folder_name(best) in found.removed:
        job.best_checkpoint = None
    if begun.days is not None:  # what is refused, since it is none of ours, is refused the next time too
        job.files_removed_at = at
    if found.removed:
        who = (
            f"deleted by {by_whom(begun.by)}"
            if begun.days is None
            else f"deleted {begun.days:g} days after the end (SLOTLINE_KEEP_CHECKPOINTS_DAYS)"
        )
        message = f"{', '.join(found.removed)}: {found.freed_bytes:,} bytes {who}"
        add_event(session, job, "removed", message, at=at, by=begun.by)


def _goes_by(job: Job, uri: str, step: int | None) -> None:
    job.checkpoint_step = step
    job.checkpoint_uri = None if step is None else step_uri(uri, job.id, step)


async def jobs_to_empty(session: AsyncSession, *, days: float, at: datetime) -> list[str]:
    """Jobs that ended so long ago, and of whose files nobody has said that they are gone."""
    query = (
        select(Job.id)
        .where(
            Job.state.in_(FINAL_STATES),
            Job.finished_at < at - timedelta(days=days),
            Job.files_removed_at.is_(None),
            Job.spec["checkpoint"]["uri"].as_string().is_not(None),
        )
        .order_by(func.random())  # those that fail each time keep no others waiting
        .limit(_JOBS_AT_ONCE)
    )
    return list((await session.execute(query)).scalars())
