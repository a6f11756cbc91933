"""What an answer to "why is my step slow?" is made of. Values only; times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class CauseKind(StrEnum):
    """What may be to blame for a step that takes longer than it could."""

    LINK = "slow link"
    NETWORK = "slow network"
    """All links alike are slower than planned."""
    MESH = "straggler"
    """The actions of one mesh themselves take longer than those of the others, beside their plan."""
    STAGE = "slow stage"
    """One of several stages of a mesh, while the others of that mesh keep to their plan."""
    COMPUTE = "slow computing"
    """The actions of all meshes alike take longer than planned."""
    HOST = "host overhead"
    """Actions begin late though all that they need is there: the loop that starts them is slow."""
    BETWEEN = "between steps"
    """No lane runs: reading of data, calls of the driver, reports."""
    UPDATE = "slow update"
    """REDUCE and STEP, behind the makespan."""
    MEMORY = "memory limit"
    CUT = "uneven cut"


class ChangeKind(StrEnum):
    """What could be changed to make the step shorter."""

    LINK = "faster link"
    NETWORK = "faster network"
    MESH = "faster mesh"
    STAGE = "faster stage"
    HOST = "quicker host"
    MICROBATCHES = "other microbatches"
    LAYER = "move a layer"
    CUT = "another cut"
    MEMORY = "more memory"
    PLAN = "plan anew"


@dataclass(frozen=True)
class Cause:
    """`cost_s` is how much shorter the step would be without it, all else as it was measured."""

    kind: CauseKind
    subject: str
    cost_s: float
    message: str


@dataclass(frozen=True)
class Change:
    """`gain_s` is how much shorter the scheduler predicts the step to be with it, `step_s` how long it is then.

    The change needs a new attempt, whose plan knows what was measured: `alone_s` is its gain beside that plan.
    """

    kind: ChangeKind
    subject: str
    gain_s: float
    alone_s: float
    step_s: float
    message: str


@dataclass(frozen=True)
class MeshShare:
    """What one mesh did between the first and the last slot of a step; `idle_s` by reason (gaps.Reason)."""

    mesh: str
    compute_s: float
    idle_s: Mapping[str, float]


@dataclass(frozen=True)
class LinkShare:
    """What one directed link carried; `exposed_s` is how long compute lanes were idle for it."""

    source: str
    target: str
    transfers: int
    transfer_s: float
    exposed_s: float


@dataclass(frozen=True)
class Side:
    """A timeline, planned or measured, in sums."""

    makespan_s: float
    meshes: tuple[MeshShare, ...]
    links: tuple[LinkShare, ...]


@dataclass(frozen=True)
class Explanation:
    """The whole answer. Causes and changes begin with those that cost or bring most.

    `step_s` is the whole step that shares and gains are of; `left_out` are changes that were not tried for want of
    time. A step is `healthy` where it is near its plan, the plan near its bound, and nothing is to blame.
    """

    verdict: str
    healthy: bool
    step_s: float
    planned_step_s: float
    lower_bound_s: float
    planned: Side
    measured: Side | None
    causes: tuple[Cause, ...]
    changes: tuple[Change, ...]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def milliseconds(seconds: float) -> str:
    """For people: three figures, and no powers of ten."""
    if abs(seconds) < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if abs(seconds) < 999.5 else f"{seconds:,.0f} s"


def times(factor: float) -> str:
    return f"{factor:.2f} times" if factor < 10 else f"{factor:.0f} times"
