"""States of jobs and attempts with their legal transitions, and states of nodes.

Values only: no database, no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
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
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLED, JobState.FAILED}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.CANCELLING} | _ATTEMPT_ENDS),
    JobState.RUNNING: frozenset({JobState.CANCELLING} | _ATTEMPT_ENDS),
    JobState.RECOVERING: frozenset({JobState.STARTING, JobState.CANCELLED}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.SUCCEEDED, JobState.FAILED}),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
    JobState.SUCCEEDED: frozenset(),
}


class CheckState(StrEnum):
    """The outcome of the check of a job before its first attempt; each of its attempts checks an undecided one again."""

    PASSED = "PASSED"
    UNDECIDED = "UNDECIDED"


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


class NodeState(StrEnum):
    """State of a node. Nothing new lands on one that is not READY; the jobs on a draining one save and go on elsewhere."""

    READY = "READY"
    QUARANTINED = "QUARANTINED"
    EXCLUDED = "EXCLUDED"
    DRAINING = "DRAINING"


BY_SLOTLINE, BY_RAY = "slotline", "ray"
"""Who else than a principal sets states of nodes."""


@dataclass(frozen=True)
class NodeMark:
    """The state that somebody set of the nodes of this name, or only of the one Ray node with `node_id`."""

    cluster: str
    name: str
    state: NodeState
    by: str
    since: datetime
    reason: str = ""
    until: datetime | None = None
    node_id: str = ""

    def __str__(self) -> str:
        until = f" until {self.until:%Y-%m-%d %H:%M} UTC" if self.until is not None else ""
        by = "" if self.by in ("", BY_SLOTLINE) else f" by {'Ray' if self.by == BY_RAY else self.by}"
        return f"{self.name} is {self.state.lower()}{until}{by}" + (
            f" ({self.reason})" if self.reason else ""
        )


def mark_in_force(marks: Iterable[NodeMark], name: str, node_id: str, *, now: datetime) -> NodeMark | None:
    """The strongest of the marks (of one cluster) that keep work off this node now; None where it is READY."""
    order = list(NodeState)
    found = [
        mark
        for mark in marks
        if mark.name == name
        and mark.node_id in ("", node_id)
        and mark.state is not NodeState.READY
        and (mark.until is None or mark.until > now)
    ]
    return max(found, key=lambda mark: order.index(mark.state), default=None)
