"""The spans of jobs and attempts that end, and of waits: recorded when the transaction that ends them is committed."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from service.job_states import AttemptState, JobState
from service.store.tables import Attempt, Job
from service.tracing import Span, attempt_context, derived, exporting, record
from worker.logs import TraceParent

_NOTED = "slotline_spans"


def note_job(session: AsyncSession, job: Job, *, at: datetime) -> None:
    """The job is over: all of it since its submission, below the request that submitted it.

    One that is retried has another such span when it is over again.
    """
    if (request := _wanted(job)) is None:
        return
    _note(
        session,
        Span(
            "job",
            _life(job, request),
            job.created_at.timestamp(),
            at.timestamp(),
            parent_id=request.span_id,
            attributes={
                **_of_job(job),
                "slotline.state": str(job.state),
                "slotline.reason": job.reason,
                "slotline.step": job.step,
                "slotline.accelerators": job.accelerators,
            },
            error=None if job.state != JobState.FAILED else job.message or job.reason or "failed",
        ),
    )


def note_attempt(session: AsyncSession, job: Job, attempt: Attempt, *, at: datetime) -> None:
    """The attempt is over, also one whose driver was killed before it could tell."""
    if (request := _wanted(job)) is None:
        return
    _note(
        session,
        Span(
            "attempt",
            derived(request, attempt.id),
            attempt.created_at.timestamp(),
            at.timestamp(),
            parent_id=_life(job, request).span_id,
            attributes={
                **_of_job(job),
                "slotline.attempt": attempt.number,
                "slotline.device": attempt.device,
                "slotline.state": str(attempt.state),
                "slotline.reason": attempt.reason,
            },
            error=None if attempt.state != AttemptState.FAILED else attempt.message or "failed",
        ),
    )


async def note_wait(session: AsyncSession, job: Job, *, until: datetime) -> None:
    """The job waited for accelerators until now: since it was submitted, asked for again, or its last attempt ended."""
    if (request := _wanted(job)) is None:
        return
    before = await session.get(Attempt, f"{job.id}-{job.attempts_made - 1}")
    since = job.queued_at
    if before is not None and before.finished_at is not None:
        since = max(since, before.finished_at)
    _note(
        session,
        Span(
            "wait in the queue",
            request.child(),
            since.timestamp(),
            until.timestamp(),
            parent_id=_life(job, request).span_id,
            attributes={**_of_job(job), "slotline.queue": job.queue, "slotline.attempt": job.attempts_made},
        ),
    )


def record_submission(job: Job, attempt: Attempt, started_at: float, ended_at: float) -> None:
    """Ray took the attempt's driver."""
    if (context := attempt_context(job.traceparent, attempt.id)) is not None and exporting():
        attributes = {**_of_job(job), "slotline.attempt": attempt.number}
        record(
            Span(
                "submit to Ray", context.child(), started_at, ended_at, context.span_id, attributes=attributes
            )
        )


def record_noted(session: AsyncSession) -> None:
    """What a session noted, now that it is true."""
    for span in session.info.pop(_NOTED, ()):
        record(span)


def _wanted(job: Job) -> TraceParent | None:
    return TraceParent.read(job.traceparent) if exporting() else None


def _life(job: Job, request: TraceParent) -> TraceParent:
    """The span of a job until it is over; a retry begins another one."""
    return derived(request, f"{job.id} {job.attempts_forgiven}")


def _of_job(job: Job) -> dict[str, str]:
    return {"slotline.job": job.id, "slotline.name": job.name}


def _note(session: AsyncSession, span: Span) -> None:
    session.info.setdefault(_NOTED, []).append(span)
