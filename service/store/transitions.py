"""State changes of jobs and attempts: the only place that checks transitions and writes their events.

Every function works inside the caller's write session, on a job that `lock_job` has locked, so that event numbers
have no gaps or doubles; several jobs are locked in the order of their ids. A change of a job's state also enqueues
its webhook deliveries, and its end adds the span of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.spec.states import TRANSITIONS, AttemptState, JobState
from service.spec.values import storable_text
from service.store.database import MOVES_KEY
from service.store.notifications import enqueue_deliveries
from service.store.spans import add_job_span
from service.store.tables import WITHOUT_SPEC, AttemptRow, EventRow, JobRow


class TransitionError(ValueError):
    """The job's state has no transition to the requested state."""

    def __init__(self, job: JobRow, to: JobState) -> None:
        super().__init__(f"job {job.id} is {job.state} and cannot become {to}")
        self.state = job.job_state


async def lock_job(session: AsyncSession, job_id: str) -> JobRow | None:
    """The job, locked until the session ends, so that its event numbers have no gaps or doubles; None: no such job."""
    return (
        await session.execute(select(JobRow).where(JobRow.id == job_id).with_for_update())
    ).scalar_one_or_none()


async def lock_jobs(session: AsyncSession, job_ids: Sequence[str]) -> Sequence[JobRow]:
    """The jobs that exist, without specifications, locked in the order of their ids, so that two sessions never deadlock."""
    query = (
        select(JobRow)
        .options(WITHOUT_SPEC)
        .where(JobRow.id.in_(job_ids))
        .order_by(JobRow.id)
        .with_for_update()
    )
    return (await session.execute(query)).scalars().all()


def move_job(
    session: AsyncSession,
    job: JobRow,
    to: JobState,
    *,
    at: datetime,
    reason: str | None = None,
    message: str | None = None,
    attempt: int | None = None,
    by: str | None = None,
) -> None:
    """Change the state; reason and message replace the old ones; `by` is the principal. Raises TransitionError."""
    if to not in TRANSITIONS[job.job_state]:
        raise TransitionError(job, to)
    job.state, job.reason, job.message = to, reason, storable_text(message)
    if to is JobState.RUNNING and job.started_at is None:
        job.started_at = at
    if to.final:
        job.finished_at = at
        add_job_span(session, job, at=at)
    described = f"{to}: {reason}" if reason else str(to)
    text = f"{described}: {message}" if message else described
    event = new_event(job, "state", text, at=at, attempt=attempt, by=by)
    session.add(event)
    session.info[MOVES_KEY] = session.info.get(MOVES_KEY, 0) + 1
    enqueue_deliveries(session, job, event)


def explain_wait(session: AsyncSession, job: JobRow, reason: str, message: str, *, at: datetime) -> None:
    """Record why a queued job waits; an event only when the reason changes, not for each new message."""
    if job.reason != reason:
        add_event(session, job, "waiting", message, at=at)
    job.reason, job.message = reason, message


def move_attempt(
    attempt: AttemptRow,
    to: AttemptState,
    *,
    at: datetime,
    reason: str | None = None,
    message: str | None = None,
) -> None:
    """Change the state of an attempt that is not final."""
    assert not attempt.attempt_state.final, f"attempt {attempt.id} is already {attempt.state}"
    attempt.state, attempt.reason, attempt.message = to, reason, storable_text(message)
    if to is AttemptState.RUNNING:
        attempt.started_at = at
    if to.final:
        attempt.finished_at = at


def add_event(
    session: AsyncSession,
    job: JobRow,
    kind: str,
    message: str,
    *,
    at: datetime,
    attempt: int | None = None,
    by: str | None = None,
) -> None:
    """Append to the job's event log under the job's next number; `by` is the principal who asked for the change."""
    session.add(new_event(job, kind, message, at=at, attempt=attempt, by=by))


def new_event(
    job: JobRow, kind: str, message: str, *, at: datetime, attempt: int | None = None, by: str | None = None
) -> EventRow:
    """An event under the job's next number, for the session in which the job is locked or new."""
    job.last_event += 1
    return EventRow(
        job_id=job.id,
        number=job.last_event,
        at=at,
        attempt=attempt,
        kind=kind,
        message=storable_text(message) or "",
        principal=by or None,
    )
