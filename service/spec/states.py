"""States of jobs and attempts, with their legal transitions.

Values only: no database, no HTTP.
"""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """State of a job; the last three are final (until a user asks for a retry)."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        return self in FINAL_STATES


FINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
WAITING_STATES = frozenset({JobState.QUEUED, JobState.RECOVERING})
_ATTEMPT_ENDS = {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.RECOVERING}
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLED}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.CANCELLING} | _ATTEMPT_ENDS),
    JobState.RUNNING: frozenset({JobState.CANCELLING} | _ATTEMPT_ENDS),
    JobState.RECOVERING: frozenset({JobState.STARTING, JobState.CANCELLED}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.SUCCEEDED, JobState.FAILED}),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
    JobState.SUCCEEDED: frozenset(),
}


class AttemptState(StrEnum):
    """State of one attempt; the last three are final."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        return self not in (AttemptState.STARTING, AttemptState.RUNNING)
