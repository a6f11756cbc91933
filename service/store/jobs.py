"""Jobs: submission in batches, filtered lists in pages, changes while they wait, cancellation, retry.

Functions take the caller's session; changes need a write session. Lists leave out specifications, which are long;
each filter narrows the query over an index of its own.
`SubmissionBatcher` stores the jobs that arrive during one commit in the next transaction, so that no submission waits
for a batch to fill; where a batch is refused each job is stored alone, so that none fails for another.
Idempotency keys are unique per owner. A retry goes on from the last checkpoint; a waiting job keeps its age when
moved.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Select, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.spec.job import JobSpec
from service.spec.principals import ANONYMOUS, principal_text
from service.spec.resources import stored_mesh_sizes
from service.spec.states import WAITING_STATES, JobState
from service.store.database import DATABASE_UNAVAILABLE, Database
from service.store.events import add_audit
from service.store.files import hold_for_resume
from service.store.notifications import enqueue_deliveries
from service.store.tables import WITHOUT_SPEC, AttemptRow, JobLabelRow, JobRow, cluster_of_attempts
from service.store.transitions import add_event, lock_job, move_job, new_event
from worker.contract.reasons import Reason


class OtherClusterError(ValueError):
    """The job began on another cluster than the one that the queue belongs to."""

    def __init__(self, job: JobRow, queue: str, cluster: str) -> None:
        super().__init__(
            f"job {job.id} began on cluster {job.began_on}, where its checkpoints and its device are, and queue {queue} "
            f"belongs to cluster {cluster}: move it to a queue of {job.began_on}, or cancel it and submit it anew"
        )


class NotWaitingError(ValueError):
    """The job is not waiting in a queue, so its queue and priority are fixed."""

    def __init__(self, job: JobRow) -> None:
        super().__init__(
            f"job {job.id} is {job.state}, and only a job that waits can change its queue or priority"
        )


async def change_waiting_job(
    session: AsyncSession,
    job_id: str,
    *,
    queue: str | None,
    priority: int | None,
    at: datetime,
    by: str = ANONYMOUS,
    cluster: str | None = None,
) -> JobRow | None:
    """Move a waiting job to another queue or priority; it keeps its age. None: no such job. `by` is the principal.

    Raises NotWaitingError, and OtherClusterError for a job that began elsewhere than on the new queue's `cluster`
    (None: not checked).
    """
    job = await lock_job(session, job_id)
    if job is None:
        return None
    if job.job_state not in WAITING_STATES:
        raise NotWaitingError(job)
    if queue is not None and cluster is not None and job.began_on not in (None, cluster):
        raise OtherClusterError(job, queue, cluster)
    changes = []
    if queue is not None and queue != job.queue:
        changes.append(f"queue {job.queue} becomes {queue}")
        job.queue = queue
    if priority is not None and priority != job.priority:
        changes.append(f"priority {job.priority} becomes {priority}")
        job.priority = priority
    if changes:
        add_event(session, job, "changed", ", ".join(changes), at=at, by=by)
        add_audit(session, by, "job.change", job.id, at=at, detail=", ".join(changes))
    return job


def set_meshes(
    session: AsyncSession, job: JobRow, spec: JobSpec, *, at: datetime, by: str = ANONYMOUS
) -> bool:
    """Give a locked job the meshes of `spec`, its own specification in all else; False where it has them already."""
    changed = spec.model_dump(mode="json")
    before, after = _meshes_text(job.spec), _meshes_text(changed)
    if after == before:
        return False
    job.spec = changed
    job.accelerators = spec.accelerators
    job.fewest_accelerators = _fewest_accelerators(spec)
    message = f"meshes {before} become {after}"
    add_event(session, job, "changed", message, at=at, by=by)
    add_audit(session, by, "job.change", job.id, at=at, detail=message)
    return True


def _fewest_accelerators(spec: JobSpec) -> int | None:
    fewest = spec.fewest_accelerators
    return fewest if fewest < spec.accelerators else None


def _meshes_text(spec: Mapping[str, Any]) -> str:
    most, fewest = (spec["resources"].get(name) for name in ("meshes", "fewest_meshes"))
    return f"{most}" if fewest is None else f"{fewest} to {most}"


@dataclass(frozen=True)
class LabelFilter:
    """Jobs with this label; a `value` of None matches any."""

    name: str
    value: str | None = None


@dataclass(frozen=True)
class JobFilter:
    """Conditions on listed jobs, all of which must hold; `since` and `until` bound the time of submission."""

    states: Sequence[JobState] = ()
    name: str | None = None
    labels: Sequence[LabelFilter] = ()
    since: datetime | None = None
    until: datetime | None = None
    project: str | None = None


def apply_job_filter(query: Select[tuple[JobRow]], wanted: JobFilter) -> Select[tuple[JobRow]]:
    """The query restricted to jobs that pass the filter."""
    if wanted.states:
        query = query.where(JobRow.state.in_(wanted.states))
    if wanted.name is not None:
        query = query.where(JobRow.name == wanted.name)
    if wanted.project is not None:
        query = query.where(JobRow.project == wanted.project)
    for label in wanted.labels:
        having = select(JobLabelRow.job_id).where(JobLabelRow.name == label.name)
        if label.value is not None:
            having = having.where(JobLabelRow.value == label.value)
        query = query.where(JobRow.id.in_(having))
    if wanted.since is not None:
        query = query.where(JobRow.created_at >= wanted.since)
    if wanted.until is not None:
        query = query.where(JobRow.created_at < wanted.until)
    return query


_JOB_ID_ALPHABET = string.ascii_lowercase + string.digits


@dataclass(frozen=True)
class PageKey:
    """The last job of a page; jobs are listed newest first."""

    created_at: datetime
    job_id: str


@dataclass(frozen=True)
class ResumedCheckpoint:
    """The checkpoint of a job after a step, from which another job begins."""

    job_id: str
    step: int


@dataclass(frozen=True)
class NewJob:
    """A job to be stored as QUEUED, with its owner and the request that submitted it."""

    spec: JobSpec
    at: datetime
    owner: str = ANONYMOUS
    idempotency_key: str | None = None
    request_digest: str | None = None
    traceparent: str | None = None
    saved_plan_id: str | None = None
    resumes: ResumedCheckpoint | None = None


async def create_resuming_job(session: AsyncSession, new: NewJob) -> JobRow:
    """Store a job that begins from another one's checkpoint, which stays until then.

    Raises StorageInUseError where that is being deleted, else as `create_jobs`.
    """
    (job,) = await create_jobs(session, [new])
    await hold_for_resume(session, job.id, source=new.resumes.job_id, step=new.resumes.step, at=new.at)
    return job


async def create_jobs(session: AsyncSession, new: Sequence[NewJob]) -> list[JobRow]:
    """Store jobs as QUEUED; the number of statements does not grow with theirs.

    Raises sqlalchemy's IntegrityError, and stores none, where an owner has used an idempotency key before.
    """
    jobs = [_queued_job(new_job) for new_job in new]
    events = [
        new_event(
            job, "state", f"QUEUED: {_submitted_message(new_job.owner)}", at=new_job.at, by=new_job.owner
        )
        for job, new_job in zip(jobs, new, strict=True)
    ]
    session.add_all(jobs)
    await session.flush()
    session.add_all(events)
    for job, event in zip(jobs, events, strict=True):
        enqueue_deliveries(session, job, event)
    for job, new_job in zip(jobs, new, strict=True):
        session.add_all(
            JobLabelRow(job_id=job.id, name=name, value=value) for name, value in new_job.spec.labels.items()
        )
        add_audit(session, new_job.owner, "job.submit", job.id, at=new_job.at, detail=job.name)
    return jobs


def _submitted_message(owner: str) -> str:
    return f"submitted by {owner}" if owner else "submitted"


def _queued_job(new: NewJob) -> JobRow:
    spec, key = new.spec, new.idempotency_key
    return JobRow(
        id="job-" + "".join(secrets.choice(_JOB_ID_ALPHABET) for _ in range(10)),
        name=spec.name,
        queue=spec.queue,
        priority=spec.priority,
        accelerators=spec.accelerators,
        fewest_accelerators=_fewest_accelerators(spec),
        accelerator_type=spec.resources.accelerator,
        workers_per_mesh=0
        if spec.resources.workers or spec.resources.spares
        else spec.resources.workers_per_mesh,
        device=spec.resources.device,
        steps_wanted=spec.training.steps,
        spec=spec.model_dump(mode="json"),
        state=JobState.QUEUED,
        created_at=new.at,
        queued_at=new.at,
        owner=new.owner,
        project=spec.project,
        idempotency_key=None if key is None else scoped_idempotency_key(new.owner, key),
        request_digest=new.request_digest,
        traceparent=new.traceparent,
        saved_plan_id=new.saved_plan_id,
        attempts_made=0,
        attempts_forgiven=0,
        infrastructure_forgiven=0,
        last_event=0,
        labels=spec.labels,
        notifications=[hook.model_dump(mode="json") for hook in spec.notifications] or None,
        max_duration_s=spec.max_duration,
        held_s=0.0,
    )


async def is_current(session: AsyncSession, attempt: AttemptRow) -> bool:
    """True for the current attempt of its job; the job, with its long specification, is not loaded."""
    query = select(JobRow.current_attempt).where(JobRow.id == attempt.job_id)
    return (await session.execute(query)).scalar_one_or_none() == attempt.id


async def find_job(session: AsyncSession, job_id: str) -> JobRow | None:
    return await session.get(JobRow, job_id)


async def jobs_that_ended(session: AsyncSession, job_ids: Collection[str], *, before: datetime) -> set[str]:
    """The ids of the jobs that have ended before a time."""
    final = [state for state in JobState if state.final]
    query = select(JobRow.id).where(
        JobRow.id.in_(job_ids), JobRow.state.in_(final), JobRow.finished_at < before
    )
    return set((await session.execute(query)).scalars())


class JobScope(NamedTuple):
    """The principal that submitted a job, and its project."""

    owner: str
    project: str


async def scope_of(session: AsyncSession, job_id: str) -> JobScope | None:
    """None: no such job. Loads no job, so that it can be locked afterwards."""
    row = (await session.execute(select(JobRow.owner, JobRow.project).where(JobRow.id == job_id))).first()
    return None if row is None else JobScope(*row)


async def queue_of(session: AsyncSession, job_id: str) -> str | None:
    """The queue of the job; loads no job, as `scope_of`."""
    return (await session.execute(select(JobRow.queue).where(JobRow.id == job_id))).scalar_one_or_none()


async def find_by_idempotency_key(
    session: AsyncSession, key: str, *, owner: str = ANONYMOUS
) -> JobRow | None:
    """The job that this owner submitted with this key."""
    query = select(JobRow).where(JobRow.idempotency_key == scoped_idempotency_key(owner, key))
    return (await session.execute(query)).scalar_one_or_none()


def scoped_idempotency_key(owner: str, key: str) -> str:
    """The stored form of an owner's key, unique over owners.

    Keys of users contain no blank, so none equals another owner's stored form.
    """
    if owner == ANONYMOUS:
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
    projects: Collection[str] | None = None,
) -> Sequence[JobRow]:
    """At most `limit` jobs after the page that ended with `after`, newest first, without their specifications; of these
    `projects`, or of all."""
    query: Select[tuple[JobRow]] = apply_job_filter(select(JobRow).options(WITHOUT_SPEC), wanted)
    if projects is not None:
        query = query.where(JobRow.project.in_(projects))
    if state is not None:
        query = query.where(JobRow.state == state)
    if queue is not None:
        query = query.where(JobRow.queue == queue)
    if owner is not None:
        query = query.where(JobRow.owner == owner)
    if after is not None:
        same_time = and_(JobRow.created_at == after.created_at, JobRow.id < after.job_id)
        query = query.where(or_(JobRow.created_at < after.created_at, same_time))
    query = query.order_by(JobRow.created_at.desc(), JobRow.id.desc()).limit(limit)
    return (await session.execute(query)).scalars().all()


class WaitingRow(NamedTuple):
    """The fields of a waiting job that decide over it: a round reads those of thousands of jobs."""

    id: str
    queue: str
    priority: int
    owner: str | None
    project: str
    queued_at: datetime
    accelerators: int
    fewest_accelerators: int | None
    last_accelerators: int | None
    accelerator_type: str | None
    patient_until: datetime | None
    workers_per_mesh: int
    device: str
    attempts_made: int
    not_before: datetime | None
    max_duration_s: float | None
    held_s: float
    cluster: str | None
    state: str
    reason: str | None
    message: str | None
    check_state: str | None

    @property
    def began_on(self) -> str | None:
        """The cluster of its attempts and checkpoints; None before the first attempt."""
        return cluster_of_attempts(self.cluster, self.attempts_made)

    @property
    def is_elastic(self) -> bool:
        """True where its number of meshes may change."""
        return self.fewest_accelerators is not None and self.workers_per_mesh > 0


_ROWS_AT_ONCE = 250


async def waiting_jobs(session: AsyncSession) -> list[WaitingRow]:
    """Jobs that wait for accelerators, oldest first. Thousands of rows are made a few at a time: others have their turn
    between them."""
    query = (
        select(*(getattr(JobRow, name) for name in WaitingRow._fields))
        .where(JobRow.state.in_(WAITING_STATES))
        .order_by(JobRow.queued_at, JobRow.id)
        .execution_options(yield_per=_ROWS_AT_ONCE)
    )
    jobs: list[WaitingRow] = []
    async for rows in (await session.stream(query)).partitions():
        jobs += map(WaitingRow._make, rows)
        await asyncio.sleep(0)
    return jobs


@dataclass(frozen=True)
class WaitingGroup:
    """The jobs of a queue and project that wait for one reason (None: not looked at yet): their number, and the oldest."""

    queue: str
    project: str
    reason: str | None
    jobs: int
    first: JobRow


async def waiting_front(session: AsyncSession, limit: int) -> tuple[list[JobRow], list[WaitingGroup]]:
    """All jobs that may have one of the first `limit` turns of their project, without their specifications, and the waiting
    jobs by queue, project and reason.

    Jobs of one queue, project, priority, owner, device and size take turns by age: more than the oldest `limit` of such a
    group are not read, however many wait.
    """
    age = JobRow.queued_at, JobRow.id
    group = (
        JobRow.queue,
        JobRow.project,
        JobRow.priority,
        JobRow.owner,
        JobRow.device,
        JobRow.accelerators,
    )
    waits = JobRow.state.in_(WAITING_STATES)
    place = func.row_number().over(partition_by=group, order_by=age).label("place")
    ranked = select(JobRow.id, place).where(waits).subquery("ranked")
    front = (
        select(JobRow)
        .options(WITHOUT_SPEC)
        .join(ranked, ranked.c.id == JobRow.id)
        .where(ranked.c.place <= limit)
        .order_by(*age)
    )
    by_reason = JobRow.queue, JobRow.project, JobRow.reason
    counts = (
        select(*by_reason, func.count().label("jobs"), func.min(JobRow.queued_at).label("since"))
        .where(waits)
        .group_by(*by_reason)
        .subquery("counts")
    )
    oldest = (
        select(JobRow, counts.c.jobs)
        .options(WITHOUT_SPEC)
        .join(
            counts,
            and_(
                JobRow.queue == counts.c.queue,
                JobRow.project == counts.c.project,
                JobRow.reason.is_not_distinct_from(counts.c.reason),
                JobRow.queued_at == counts.c.since,
            ),
        )
        .where(waits)
        .order_by(*age)
    )
    groups = dict[tuple[str, str, str | None], WaitingGroup]()
    for job, jobs in (await session.execute(oldest)).all():
        key = job.queue, job.project, job.reason
        groups.setdefault(key, WaitingGroup(*key, jobs, job))
    return list((await session.scalars(front)).all()), list(groups.values())


async def specified_mesh_sizes(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, list[int]]:
    """Numbers of workers of each mesh, by job, as the specifications of these jobs have them."""
    if not job_ids:
        return {}
    query = select(JobRow.id, JobRow.spec["resources"]).where(JobRow.id.in_(job_ids))
    return {
        job_id: stored_mesh_sizes(resources) for job_id, resources in (await session.execute(query)).all()
    }


async def cancel_job(
    session: AsyncSession, job_id: str, *, at: datetime, by: str = ANONYMOUS
) -> JobRow | None:
    """Cancel a waiting job at once, or ask a running job to end; idempotent. None: no such job. `by` is the principal.

    Raises TransitionError for a job that has succeeded or failed.
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
            message=f"cancelled by {principal_text(by)}",
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


async def retry_job(
    session: AsyncSession, job_id: str, *, at: datetime, by: str = ANONYMOUS
) -> JobRow | None:
    """Queue a failed or cancelled job again; it resumes from its last checkpoint. None: no such job.

    Raises TransitionError for a job that is not FAILED or CANCELLED.
    """
    job = await lock_job(session, job_id)
    if job is None:
        return None
    before = job.state
    move_job(session, job, JobState.QUEUED, at=at, message=f"retried by {principal_text(by)}", by=by)
    add_audit(session, by, "job.retry", job.id, at=at, detail=before)
    job.message = None
    job.queued_at, job.finished_at, job.cancel_requested_at, job.not_before = at, None, None, None
    job.attempts_forgiven, job.held_s = job.attempts_made, 0.0
    job.files_removed_at = job.check_state = None
    job.current_attempt = None
    return job


_SUBMISSION_BATCH_JOBS = 50


@dataclass(frozen=True)
class _PendingSubmission:
    new: NewJob
    stored: asyncio.Future[JobRow]


class SubmissionBatcher:
    """Stores the jobs that are submitted to this process in batches, in their order."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._pending: list[_PendingSubmission] = []
        self._storing: asyncio.Task[None] | None = None

    async def store(self, new: NewJob) -> JobRow:
        """Store and commit the job. Raises the database's error: IntegrityError for an idempotency key that was used."""
        submission = _PendingSubmission(new, asyncio.get_running_loop().create_future())
        self._pending.append(submission)
        if self._storing is None:
            self._storing = asyncio.create_task(self._store_all())
        return await submission.stored

    async def _store_all(self) -> None:
        try:
            while self._pending:
                batch = self._pending[:_SUBMISSION_BATCH_JOBS]
                self._pending = self._pending[_SUBMISSION_BATCH_JOBS:]
                await self._store_batch([submission for submission in batch if not submission.stored.done()])
        finally:
            self._storing = None
            for submission in self._pending:  # only where this task was cancelled: the server ends
                submission.stored.cancel()

    async def _store_batch(self, batch: list[_PendingSubmission]) -> None:
        """Store the batch in one transaction; where that is refused, each job in its own, so that none fails for another."""
        if not batch:
            return
        try:
            async with self._database.write() as session:
                jobs = await create_jobs(session, [submission.new for submission in batch])
        except Exception as error:
            if len(batch) == 1 or isinstance(error, DATABASE_UNAVAILABLE):
                for submission in batch:
                    if not submission.stored.done():
                        submission.stored.set_exception(error)
                return
            for submission in batch:
                await self._store_batch([submission])
        else:
            for submission, job in zip(batch, jobs, strict=True):
                if not submission.stored.done():
                    submission.stored.set_result(job)
