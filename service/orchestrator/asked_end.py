"""An attempt that is asked to save a checkpoint and end: another job's turn, or its own time is over.

The driver hears it in the answer to its next report; what it reports then is taken for what was asked.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from service.job_states import AttemptState, JobState
from service.store.attempts import lock_attempt
from service.store.states import add_event
from service.store.tables import Attempt, Job
from worker.reasons import Reason


async def ask_to_end(
    session: AsyncSession, attempt_id: str, reason: Reason, message: str, *, at: datetime
) -> bool:
    """Ask the attempt to end; False where it is over, or ends already."""
    attempt, job = await lock_attempt(session, attempt_id)
    if attempt.attempt_state.final or job.current_attempt != attempt_id:
        return False
    if attempt.end_asked_at is not None or job.job_state is JobState.CANCELLING:
        return False
    attempt.end_asked_at, attempt.end_asked_for = at, reason
    job.reason, job.message = reason, f"{message}; saves a checkpoint and ends"
    add_event(session, job, "ending", job.message, at=at, attempt=attempt.number)
    return True


def as_asked(
    attempt: Attempt, state: AttemptState, reason: str | None, message: str | None
) -> tuple[AttemptState, str | None, str | None]:
    """How an attempt ended that was asked to: what the driver says of that, and being stopped, is for that reason.

    What went wrong meanwhile keeps its own.
    """
    if attempt.end_asked_for is None:
        return state, reason, message
    asked = Reason.parse(attempt.end_asked_for)
    if state is AttemptState.CANCELLED:  # by Ray's SIGTERM: the driver took longer than it had
        stopped = attempt.stopped_because or "the driver was told to end"
        return AttemptState.FAILED, asked, f"{asked.meaning}; {stopped}"
    if state is AttemptState.FAILED and reason == Reason.PREEMPTED:
        return state, asked, message
    return state, reason, message


def deadline_of(attempt: Attempt, job: Job) -> float | None:
    """Unix time at which the attempt has used up its job's time."""
    if job.max_duration_s is None:
        return None
    return attempt.created_at.timestamp() + max(job.max_duration_s - job.held_s, 0.0)


def is_over_time(job: Job) -> bool:
    """Whether the job may hold accelerators no more."""
    return job.max_duration_s is not None and job.held_s >= job.max_duration_s


def over_time(job: Job, message: str | None) -> str:
    """What the user is told at the end of a job that is over its time."""
    limit = f"max_duration is {job.max_duration_s:g} s: `slotline retry` goes on from the last checkpoint, as long again"
    return f"{message}; {limit}" if message else limit
