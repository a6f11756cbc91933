"""Jobs in the store: submit, find, list in pages, cancel, retry.

Functions take the caller's session; those that change something need a write session.
"""

from __future__ import annotations

import hashlib
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Select, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.job_states import WAITING_STATES, JobState
from service.jobspec import JobSpec
from service.principals import NOBODY, by_whom
from service.store.audit import add_audit
from service.store.job_filters import JobFilter, narrowed
from service.store.notifications import tell
from service.store.states import lock_job, move_job, new_event
from service.store.tables import WITHOUT_SPEC, Attempt, Job, JobLabel
from worker.reasons import Reason

_ALPHABET = string.ascii_lowercase + string.digits


@dataclass(frozen=True)
class PageKey:
    """Where a page of jobs ends: jobs are listed newest first."""

    created_at: datetime
    job_id: str


@dataclass(frozen=True)
class NewJob:
    """A job to be stored as QUEUED, and where it comes from."""

    spec: JobSpec
    at: datetime
    owner: str = NOBODY
    idempotency_key: str | None = None
    request_digest: str | None = None
    traceparent: str | None = None
    given_plan: str | None = None


async def create_jobs(session: AsyncSession, new: Sequence[NewJob]) -> list[Job]:
    """Store jobs as QUEUED, with as many statements for all as for one. An idempotency key that its owner has used refuses
    all: sqlalchemy's IntegrityError."""
    jobs = [_queued(one) for one in new]
    events = [
        new_event(job, "state", f"QUEUED: {_submitted(one.owner)}", at=one.at, by=one.owner)
        for job, one in zip(jobs, new, strict=True)
    ]
    session.add_all(jobs)
    await session.flush()
    session.add_all(events)
    for job, event in zip(jobs, events, strict=True):
        tell(session, job, event)
    for job, one in zip(jobs, new, strict=True):
        session.add_all(
            JobLabel(job_id=job.id, name=name, value=value) for name, value in one.spec.labels.items()
        )
        add_audit(session, one.owner, "job.submit", job.id, at=one.at, detail=job.name)
    return jobs


def _submitted(owner: str) -> str:
    return f"submitted by {owner}" if owner else "submitted"


def _queued(new: NewJob) -> Job:
    spec, key = new.spec, new.idempotency_key
    return Job(
        id="job-" + "".join(secrets.choice(_ALPHABET) for _ in range(10)),
        name=spec.name,
        queue=spec.queue,
        priority=spec.priority,
        accelerators=spec.accelerators,
        workers_per_mesh=0 if spec.resources.workers else spec.resources.workers_per_mesh,
        device=spec.resources.device,
        steps_wanted=spec.training.steps,
        spec=spec.model_dump(mode="json"),
        state=JobState.QUEUED,
        created_at=new.at,
        queued_at=new.at,
        owner=new.owner,
        idempotency_key=None if key is None else owned_key(new.owner, key),
        request_digest=new.request_digest,
        traceparent=new.traceparent,
        given_plan=new.given_plan,
        attempts_made=0,
        attempts_forgiven=0,
        infrastructure_forgiven=0,
        last_event=0,
        labels=spec.labels,
        notifications=[one.model_dump(mode="json") for one in spec.notifications] or None,
        max_duration_s=spec.max_duration,
        held_s=0.0,
    )


async def is_current(session: AsyncSession, attempt: Attempt) -> bool:
    """Whether its job, whose specification may be long, goes by this attempt."""
    query = select(Job.current_attempt).where(Job.id == attempt.job_id)
    return (await session.execute(query)).scalar_one_or_none() == attempt.id


async def find_job(session: AsyncSession, job_id: str) -> Job | None:
    return await session.get(Job, job_id)


async def owner_of(session: AsyncSession, job_id: str) -> str | None:
    """Who submitted the job; None: no such job. Loads no job, so that one can be locked afterwards."""
    return (await session.execute(select(Job.owner).where(Job.id == job_id))).scalar_one_or_none()


async def queue_of(session: AsyncSession, job_id: str) -> str | None:
    """The queue that the job is in; loads no job, as `owner_of`."""
    return (await session.execute(select(Job.queue).where(Job.id == job_id))).scalar_one_or_none()


async def find_by_idempotency_key(session: AsyncSession, key: str, *, owner: str = NOBODY) -> Job | None:
    """The job that this owner submitted with this key."""
    query = select(Job).where(Job.idempotency_key == owned_key(owner, key))
    return (await session.execute(query)).scalar_one_or_none()


def owned_key(owner: str, key: str) -> str:
    """An owner's key as the store has it, where keys are unique. No key holds a blank, so that none can be
    taken for another owner's."""
    if owner == NOBODY:
        return key
    return f"{hashlib.sha256(owner.encode()).hexdigest()} {hashlib.sha256(key.encode()).hexdigest()}"


async def list_jobs(
    session: AsyncSession,
    *,
    state: JobState | None = None,
    queue: str | None = None,
    owner: str | None = None,
    limit: int = 50,
    after: PageKey | None = None,
    wanted: JobFilter = JobFilter(),
) -> Sequence[Job]:
    """At most `limit` jobs, without their specifications, newest first, that come after the page that ended with `after`."""
    query: Select[tuple[Job]] = narrowed(select(Job).options(WITHOUT_SPEC), wanted)
    if state is not None:
        query = query.where(Job.state == state)
    if queue is not None:
        query = query.where(Job.queue == queue)
    if owner is not None:
        query = query.where(Job.owner == owner)
    if after is not None:
        same_time = and_(Job.created_at == after.created_at, Job.id < after.job_id)
        query = query.where(or_(Job.created_at < after.created_at, same_time))
    query = query.order_by(Job.created_at.desc(), Job.id.desc()).limit(limit)
    return (await session.execute(query)).scalars().all()


async def waiting_jobs(session: AsyncSession) -> list[Job]:
    """Jobs that want accelerators, without their specifications."""
    query = (
        select(Job).options(WITHOUT_SPEC).where(Job.state.in_(WAITING_STATES)).order_by(Job.queued_at, Job.id)
    )
    return list((await session.execute(query)).scalars())


async def unlike_meshes(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, list[int]]:
    """The workers of each mesh, by job, of jobs whose meshes have unlike sizes."""
    if not job_ids:
        return {}
    query = select(Job.id, Job.spec["resources"]["workers"]).where(Job.id.in_(job_ids))
    return {job_id: sizes for job_id, sizes in (await session.execute(query)).all() if sizes}


async def cancel_job(session: AsyncSession, job_id: str, *, at: datetime, by: str = NOBODY) -> Job | None:
    """Cancel at once what only waits; ask a running job to end. Twice is once. None: no such job. `by` asks.

    Raises TransitionError for a job that has ended in another way.
    """
    job = await lock_job(session, job_id)
    if job is None or job.job_state in (JobState.CANCELLING, JobState.CANCELLED):
        return job
    add_audit(session, by, "job.cancel", job.id, at=at, detail=job.state)
    job.cancel_requested_at = at
    if job.job_state in WAITING_STATES:
        move_job(
            session,
            job,
            JobState.CANCELLED,
            at=at,
            reason=Reason.CANCELLED_BY_USER,
            message=f"cancelled by {by_whom(by)}",
            by=by,
        )
    else:
        move_job(
            session,
            job,
            JobState.CANCELLING,
            at=at,
            reason=Reason.CANCELLED_BY_USER,
            message="the driver is asked to end" + (f", by {by}" if by else ""),
            by=by,
        )
    return job


async def retry_job(session: AsyncSession, job_id: str, *, at: datetime, by: str = NOBODY) -> Job | None:
    """Queue a failed or cancelled job again; it goes on from its last checkpoint. None: no such job.

    Raises TransitionError for a job that is not FAILED or CANCELLED.
    """
    job = await lock_job(session, job_id)
    if job is None:
        return None
    before = job.state
    move_job(session, job, JobState.QUEUED, at=at, message=f"retried by {by_whom(by)}", by=by)
    add_audit(session, by, "job.retry", job.id, at=at, detail=before)
    job.message = None
    job.queued_at, job.finished_at, job.cancel_requested_at, job.not_before = at, None, None, None
    job.attempts_forgiven, job.held_s = job.attempts_made, 0.0
    job.files_removed_at = None
    job.current_attempt = None
    return job
