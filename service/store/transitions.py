"""State changes of jobs and attempts: the only place that checks transitions and writes their events and spans.

Every function works inside the caller's write session, on a job that `lock_job` has locked, so that event numbers
have no gaps or doubles; several jobs are locked in the order of their ids. A change of a job's state also enqueues
its webhook deliveries. Spans of jobs, attempts and waits are collected in the session and exported after its commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.observability.tracing import Span, attempt_context, derived_span, exporting, record_span
from service.spec.states import TRANSITIONS, AttemptState, JobState
from service.spec.values import storable_text
from service.store.notifications import enqueue_deliveries
from service.store.tables import WITHOUT_SPEC, Attempt, Event, Job
from worker.contract.logs import TraceParent

_PENDING_SPANS_KEY = "slotline_spans"


def add_job_span(session: AsyncSession, job: Job, *, at: datetime) -> None:
    """The job is over: all of it since its submission, below the request that submitted it.

    One that is retried has another such span when it is over again.
    """
    if (request := _submission_context(job)) is None:
        return
    _add_span(
        session,
        Span(
            "job",
            _job_context(job, request),
            job.created_at.timestamp(),
            at.timestamp(),
            parent_id=request.span_id,
            attributes={
                **_job_attributes(job),
                "slotline.state": str(job.state),
                "slotline.reason": job.reason,
                "slotline.step": job.step,
                "slotline.accelerators": job.accelerators,
            },
            error=None if job.state != JobState.FAILED else job.message or job.reason or "failed",
        ),
    )


def add_attempt_span(session: AsyncSession, job: Job, attempt: Attempt, *, at: datetime) -> None:
    """The attempt is over, also one whose driver was killed before it could tell."""
    if (request := _submission_context(job)) is None:
        return
    _add_span(
        session,
        Span(
            "attempt",
            derived_span(request, attempt.id),
            attempt.created_at.timestamp(),
            at.timestamp(),
            parent_id=_job_context(job, request).span_id,
            attributes={
                **_job_attributes(job),
                "slotline.attempt": attempt.number,
                "slotline.device": attempt.device,
                "slotline.state": str(attempt.state),
                "slotline.reason": attempt.reason,
            },
            error=None if attempt.state != AttemptState.FAILED else attempt.message or "failed",
        ),
    )


async def add_wait_span(session: AsyncSession, job: Job, *, until: datetime) -> None:
    """The job waited for accelerators until now: since it was submitted, asked for again, or its last attempt ended."""
    if (request := _submission_context(job)) is None:
        return
    before = await session.get(Attempt, f"{job.id}-{job.attempts_made - 1}")
    since = job.queued_at
    if before is not None and before.finished_at is not None:
        since = max(since, before.finished_at)
    _add_span(
        session,
        Span(
            "wait in the queue",
            request.child(),
            since.timestamp(),
            until.timestamp(),
            parent_id=_job_context(job, request).span_id,
            attributes={
                **_job_attributes(job),
                "slotline.queue": job.queue,
                "slotline.attempt": job.attempts_made,
            },
        ),
    )


def record_submission_span(job: Job, attempt: Attempt, started_at: float, ended_at: float) -> None:
    """Ray took the attempt's driver."""
    if (context := attempt_context(job.traceparent, attempt.id)) is not None and exporting():
        attributes = {**_job_attributes(job), "slotline.attempt": attempt.number}
        record_span(
            Span(
                "submit to Ray", context.child(), started_at, ended_at, context.span_id, attributes=attributes
            )
        )


def record_pending_spans(session: AsyncSession) -> None:
    """What a session noted, now that it is true."""
    for span in session.info.pop(_PENDING_SPANS_KEY, ()):
        record_span(span)


def _submission_context(job: Job) -> TraceParent | None:
    return TraceParent.read(job.traceparent) if exporting() else None


def _job_context(job: Job, request: TraceParent) -> TraceParent:
    """The span of a job until it is over; a retry begins another one."""
    return derived_span(request, f"{job.id} {job.attempts_forgiven}")


def _job_attributes(job: Job) -> dict[str, str]:
    return {"slotline.job": job.id, "slotline.name": job.name}


def _add_span(session: AsyncSession, span: Span) -> None:
    session.info.setdefault(_PENDING_SPANS_KEY, []).append(span)


class TransitionError(ValueError):
    """The job is in a state from which the wanted state cannot be reached."""

    def __init__(self, job: Job, to: JobState) -> None:
        super().__init__(f"job {job.id} is {job.state} and cannot become {to}")
        self.state = job.job_state


async def lock_job(session: AsyncSession, job_id: str) -> Job | None:
    """The job, locked until the session ends, so that its event numbers have no gaps or doubles."""
    return (await session.execute(select(Job).where(Job.id == job_id).with_for_update())).scalar_one_or_none()


async def lock_jobs(session: AsyncSession, job_ids: Sequence[str]) -> Sequence[Job]:
    """Several jobs, locked in the order of their ids, so that two that lock some never wait in a circle.

    They come without their specifications.
    """
    query = select(Job).options(WITHOUT_SPEC).where(Job.id.in_(job_ids)).order_by(Job.id).with_for_update()
    return (await session.execute(query)).scalars().all()


def move_job(
    session: AsyncSession,
    job: Job,
    to: JobState,
    *,
    at: datetime,
    reason: str | None = None,
    message: str | None = None,
    attempt: int | None = None,
    by: str | None = None,
) -> None:
    """Change the state; reason and message replace the old ones; `by` asked for it. Raises TransitionError."""
    if to not in TRANSITIONS[job.job_state]:
        raise TransitionError(job, to)
    job.state, job.reason, job.message = to, reason, storable_text(message)
    if to is JobState.RUNNING and job.started_at is None:
        job.started_at = at
    if to.final:
        job.finished_at = at
        add_job_span(session, job, at=at)
    described = f"{to}: {reason}" if reason else str(to)
    told = f"{described}: {message}" if message else described
    event = new_event(job, "state", told, at=at, attempt=attempt, by=by)
    session.add(event)
    enqueue_deliveries(session, job, event)


def explain_wait(session: AsyncSession, job: Job, reason: str, message: str, *, at: datetime) -> None:
    """Say why a queued job waits; an event only when the kind of reason changes."""
    if job.reason != reason:
        add_event(session, job, "waiting", message, at=at)
    job.reason, job.message = reason, message


def move_attempt(
    attempt: Attempt,
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
    job: Job,
    kind: str,
    message: str,
    *,
    at: datetime,
    attempt: int | None = None,
    by: str | None = None,
) -> None:
    """Append to the job's event log under the job's next number; `by` is who asked for what happened."""
    session.add(new_event(job, kind, message, at=at, attempt=attempt, by=by))


def new_event(
    job: Job, kind: str, message: str, *, at: datetime, attempt: int | None = None, by: str | None = None
) -> Event:
    """An event under the job's next number, for the session in which the job is locked or new."""
    job.last_event += 1
    return Event(
        job_id=job.id,
        number=job.last_event,
        at=at,
        attempt=attempt,
        kind=kind,
        message=storable_text(message) or "",
        principal=by or None,
    )
