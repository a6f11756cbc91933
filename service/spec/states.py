"""States of jobs and attempts with their legal transitions; principals and roles with what each may do.

Values only: no database, no HTTP. A principal's name says where it comes from: `alice` is the name of a token,
`oidc:...` comes from an identity provider, `slotline:...` from a setting. Token names hold no colon, so that none
can be taken for another kind. A role includes all roles before it.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """Where one attempt stands."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        return self not in (AttemptState.STARTING, AttemptState.RUNNING)


ANONYMOUS = ""
"""The name of all who call a server that asks for no token; and the owner of what is older than owners."""
API_TOKEN_PRINCIPAL = "slotline:root"
"""Whoever has SLOTLINE_API_TOKEN."""
METRICS_TOKEN_PRINCIPAL = "slotline:metrics"
"""Whoever has SLOTLINE_METRICS_TOKEN."""


class Role(StrEnum):
    """Each may do what those before it may; `metrics` reads where drivers serve their metrics, and nothing else."""

    METRICS = "metrics"
    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    ADMIN = "admin"

    def includes(self, least: Role) -> bool:
        """Whether this role may do what takes at least `least`."""
        order = list(Role)
        return order.index(self) >= order.index(least)


@dataclass(frozen=True)
class Principal:
    """Who calls, with which role."""

    name: str
    role: Role

    def may_change(self, owner: str) -> bool:
        """Whether what `owner` made is theirs to cancel, retry or use: their own, or anybody's for operators."""
        return self.role.includes(Role.OPERATOR) or (
            self.role.includes(Role.SUBMITTER) and owner == self.name != ANONYMOUS
        )


OPEN_ACCESS_PRINCIPAL = Principal(ANONYMOUS, Role.ADMIN)
"""The caller of a server that asks for no token."""


def principal_text(name: str) -> str:
    """The name as messages have it."""
    return name or "the user"
