"""Trace spans of jobs, attempts, waits and submissions to Ray, below the request that submitted the job.

Spans of stored changes are collected in the write session and exported after its commit (`record_pending_spans`). A
job without a trace context, or a process that exports no traces, records nothing.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from service.observability.tracing import Span, attempt_context, derived_span, exporting, record_span
from service.spec.states import AttemptState, JobState
from service.store.tables import AttemptRow, JobRow
from worker.contract.logs import TraceParent

_PENDING_SPANS_KEY = "slotline_spans"


def add_job_span(session: AsyncSession, job: JobRow, *, at: datetime) -> None:
    """Add the span of a job that has ended, from its submission on; a retried job gets another at its next end."""
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


def add_attempt_span(session: AsyncSession, job: JobRow, attempt: AttemptRow, *, at: datetime) -> None:
    """Add the span of an attempt that has ended, also of one whose driver was killed before it reported."""
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


async def add_wait_span(session: AsyncSession, job: JobRow, *, until: datetime) -> None:
    """Add the span of a job's wait for accelerators, from its submission, its retry or the end of its last attempt."""
    if (request := _submission_context(job)) is None:
        return
    before = await session.get(AttemptRow, f"{job.id}-{job.attempts_made - 1}")
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


def record_submission_span(job: JobRow, attempt: AttemptRow, started_at: float, ended_at: float) -> None:
    """Export the span of the submission of an attempt's driver to Ray; times are Unix seconds."""
    if (context := attempt_context(job.traceparent, attempt.id)) is not None and exporting():
        attributes = {**_job_attributes(job), "slotline.attempt": attempt.number}
        record_span(
            Span(
                "submit to Ray", context.child(), started_at, ended_at, context.span_id, attributes=attributes
            )
        )


def record_pending_spans(session: AsyncSession) -> None:
    """Export the spans that a session collected; called after its commit."""
    for span in session.info.pop(_PENDING_SPANS_KEY, ()):
        record_span(span)


def _submission_context(job: JobRow) -> TraceParent | None:
    return TraceParent.read(job.traceparent) if exporting() else None


def _job_context(job: JobRow, request: TraceParent) -> TraceParent:
    """The context of the job's span up to its next end; a retry begins another span."""
    return derived_span(request, f"{job.id} {job.attempts_forgiven}")


def _job_attributes(job: JobRow) -> dict[str, str]:
    return {"slotline.job": job.id, "slotline.name": job.name}


def _add_span(session: AsyncSession, span: Span) -> None:
    session.info.setdefault(_PENDING_SPANS_KEY, []).append(span)
