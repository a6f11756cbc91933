"""The states of jobs and of their attempts, and what may follow what. Values only."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job stands; the last three are final (until a user asks for a retry)."""

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
_ENDS = {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.RECOVERING}
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLED}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.CANCELLING} | _ENDS),
    JobState.RUNNING: frozenset({JobState.CANCELLING} | _ENDS),
    JobState.RECOVERING: frozenset({JobState.STARTING, JobState.CANCELLED}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.SUCCEEDED, JobState.FAILED}),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
    JobState.SUCCEEDED: frozenset(),
}


class AttemptState(StrEnum):
    """Where one attempt stands."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        return self not in (AttemptState.STARTING, AttemptState.RUNNING)
