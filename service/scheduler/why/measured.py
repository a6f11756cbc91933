"""Compares measured with planned seconds per stage, mesh and link; the spec with measured costs; answer values.

Values only, times in seconds; the dataclasses are the JSON of "why is my step slow?" (their fields are a wire
format).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, median_low
from typing import TypeVar

from service.scheduler.auto.recomputation import with_recomputation
from service.scheduler.problem.spec import (
    LinkSpec,
    NetworkSpec,
    PipelineSpec,
    StageSpec,
    edge_costs,
    link_costs,
)
from service.scheduler.why.calibration import Calibration
from service.scheduler.why.step_graph import Link, StepGraph, StepTask

_NEGLIGIBLE_S = 1e-12
Key = TypeVar("Key")


@dataclass(frozen=True)
class PlannedAndMeasured:
    """Planned and measured seconds of several tasks together."""

    planned_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """Measured over planned seconds; 1 where nothing was planned."""
        return self.measured_s / self.planned_s if self.planned_s > _NEGLIGIBLE_S else 1.0


def total_times_by(step: StepGraph, key: Callable[[StepTask], Key | None]) -> dict[Key, PlannedAndMeasured]:
    """Times of the tasks by one of their properties; tasks without it (None) are left out."""
    planned: dict[Key, float] = defaultdict(float)
    measured: dict[Key, float] = defaultdict(float)
    for task, plan_s, ran_s in zip(step.tasks, step.planned_s, step.measured_s, strict=True):
        if (name := key(task)) is not None:
            planned[name] += plan_s
            measured[name] += ran_s
    return {name: PlannedAndMeasured(planned[name], measured[name]) for name in planned}


def median_ratio(ratios: Iterable[float]) -> float:
    """The ratio that the middle one of others has, at least 1: being quicker than planned is nobody's duty."""
    return max(1.0, median_low([*ratios] or [1.0]))


def host_delays(step: StepGraph) -> dict[str, float]:
    """Mean seconds by mesh by which its compute actions begin later than they could."""
    found: dict[str, list[float]] = defaultdict(list)
    for task, delay_s in zip(step.tasks, step.delay_s, strict=True):
        if task.target is None:
            found[task.mesh].append(max(0.0, delay_s))
    return {mesh: sum(delays) / len(delays) for mesh, delays in found.items()}


def measured_spec(spec: PipelineSpec, step: StepGraph, *, hosts: bool = True) -> PipelineSpec:
    """The spec with measured costs: the median over the microbatches of an action, and over all transfers of a link.

    With `hosts` the overhead of hosts on each action is included. An operation that did not run (W, where all
    backwards were whole) is scaled by the ratio of those that ran.
    """
    lasted: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for task, plan_s, ran_s in zip(step.tasks, step.planned_s, step.measured_s, strict=True):
        if task.stage is not None:
            lasted[task.stage, task.op].append((plan_s, ran_s))
    middle = {
        key: PlannedAndMeasured(median(plan for plan, _ in both), median(ran for _, ran in both))
        for key, both in lasted.items()
    }
    late_s = host_delays(step) if hosts else {}
    stages = [_measured_stage(stage, middle, late_s.get(stage.mesh, 0.0)) for stage in spec.stages]
    links = total_times_by(step, lambda task: task.link)
    scaled = scale_links(
        spec.model_copy(update={"stages": stages}), {link: found.ratio for link, found in links.items()}
    )
    unplanned = {
        link: found.measured_s / max(1, sum(task.link == link for task in step.tasks))
        for link, found in links.items()
        if found.planned_s <= _NEGLIGIBLE_S < found.measured_s
    }
    return _with_transfer_seconds(scaled, unplanned) if unplanned else scaled


def _measured_stage(
    stage: StageSpec, middle: Mapping[tuple[str, str], PlannedAndMeasured], late_s: float
) -> StageSpec:
    # a B that is planned as its two parts is one action, and late once
    part_s = late_s / 2 if stage.backward_s is None and (stage.name, "B") in middle else late_s

    def cost(seconds: float, more_s: float, *ops: str) -> float:
        for op in ops:
            if (found := middle.get((stage.name, op))) is not None:
                if seconds > _NEGLIGIBLE_S:
                    return seconds * found.ratio + more_s
                return found.measured_s + more_s if op == ops[0] else 0.0
        return seconds

    again = stage.recompute
    if again is not None:
        again = again.model_copy(update={"extra_s": cost(again.extra_s, 0.0, "B", "I")})
    return stage.model_copy(
        update={
            "forward_s": cost(stage.forward_s, late_s, "F"),
            "backward_input_s": cost(stage.backward_input_s, part_s, "I", "B"),
            "backward_weight_s": cost(stage.backward_weight_s, part_s, "W", "B"),
            "backward_s": None if stage.backward_s is None else cost(stage.backward_s, late_s, "B", "I"),
            "recompute": again,
        }
    )


def scale_meshes(
    spec: PipelineSpec, factor: Mapping[str, float], late_s: Mapping[str, float]
) -> PipelineSpec:
    """The spec whose stages take `factor` of their mesh as long, and `late_s` more for each action."""

    def one(stage: StageSpec) -> StageSpec:
        by, more_s = factor.get(stage.mesh, 1.0), late_s.get(stage.mesh, 0.0)

        def cost(seconds: float) -> float:
            return seconds * by + more_s if seconds > _NEGLIGIBLE_S else 0.0

        again = stage.recompute
        return stage.model_copy(
            update={
                "forward_s": cost(stage.forward_s),
                "backward_input_s": cost(stage.backward_input_s),
                "backward_weight_s": cost(stage.backward_weight_s),
                "backward_s": None if stage.backward_s is None else cost(stage.backward_s),
                "recompute": again and again.model_copy(update={"extra_s": again.extra_s * by}),
            }
        )

    return spec.model_copy(update={"stages": [one(stage) for stage in spec.stages]})


def scale_links(spec: PipelineSpec, factor: Mapping[Link, float]) -> PipelineSpec:
    """The spec in which the transfers of each link take `factor` times as long."""
    of_pair = link_costs(spec.network)
    known = {(link.source, link.target): link for link in spec.network.links}
    for link, by in factor.items():
        bandwidth, latency_s = of_pair(*link)
        known[link] = LinkSpec(
            source=link[0],
            target=link[1],
            bandwidth_bytes_per_s=None if bandwidth is None else bandwidth / max(by, _NEGLIGIBLE_S),
            latency_s=latency_s * by,
            contention=known[link].contention if link in known else None,
        )
    mesh_of = {stage.name: stage.mesh for stage in spec.stages}
    edges = []
    for edge in spec.edges:
        link = (mesh_of[edge.source], mesh_of[edge.target])
        costs = {}
        if edge.forward_s is not None:
            costs["forward_s"] = edge.forward_s * factor.get(link, 1.0)
        if edge.backward_s is not None:
            costs["backward_s"] = edge.backward_s * factor.get(link[::-1], 1.0)
        edges.append(edge.model_copy(update=costs))
    network = spec.network.model_copy(update={"links": list(known.values())})
    return spec.model_copy(
        update={"network": NetworkSpec.model_validate(network.model_dump()), "edges": edges}
    )


def _with_transfer_seconds(spec: PipelineSpec, seconds: Mapping[Link, float]) -> PipelineSpec:
    """Edges in seconds whose plan cost nothing, with what a transfer of their link took."""
    mesh_of = {stage.name: stage.mesh for stage in spec.stages}
    edges = []
    for edge in spec.edges:
        link = (mesh_of[edge.source], mesh_of[edge.target])
        costs = {}
        if edge.forward_s is not None and link in seconds:
            costs["forward_s"] = seconds[link]
        if edge.backward_s is not None and link[::-1] in seconds:
            costs["backward_s"] = seconds[link[::-1]]
        edges.append(edge.model_copy(update=costs))
    return spec.model_copy(update={"edges": edges})


def task_seconds(spec: PipelineSpec, step: StepGraph, recomputed: Iterable[str]) -> list[float]:
    """Seconds of every task of a step at the costs of `spec`, where the stages `recomputed` recompute."""
    stages = {stage.name: stage for stage in with_recomputation(spec, recomputed).stages}
    of_edge = edge_costs(spec)
    seconds = []
    for task in step.tasks:
        if task.edge is not None:
            seconds.append(of_edge(task.edge)[task.op == "B"])
            continue
        stage = stages[task.stage or ""]
        seconds.append(
            {
                "F": stage.forward_s,
                "B": stage.whole_backward_s,
                "I": stage.backward_input_s,
                "W": stage.backward_weight_s,
            }[task.op]
        )
    return seconds


def with_decided_recomputation(spec: PipelineSpec, recomputed: Iterable[str]) -> PipelineSpec:
    """The spec in which exactly the stages `recomputed` recompute, and no other may."""
    chosen = {*recomputed}

    def decided(stage: StageSpec) -> StageSpec:
        again = stage.recompute if stage.name in chosen else None
        return stage.model_copy(update={"recompute": again and again.model_copy(update={"required": True})})

    return spec.model_copy(update={"stages": [decided(stage) for stage in spec.stages]})


class CauseKind(StrEnum):
    """The causes of a step that takes longer than it could."""

    LINK = "slow link"
    NETWORK = "slow network"
    """All links alike are slower than planned."""
    MESH = "straggler"
    """The actions of one mesh themselves take longer than on other meshes, relative to their plan."""
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
    """The changes that could make a step shorter."""

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
class SlowdownCause:
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
class MeshTotals:
    """Seconds of one mesh between the first and the last slot of a step; `idle_s` by reason (gaps.IdleReason)."""

    mesh: str
    compute_s: float
    idle_s: Mapping[str, float]


@dataclass(frozen=True)
class LinkTotals:
    """The transfers of one directed link; `exposed_s` are the seconds for which compute lanes were idle for it."""

    source: str
    target: str
    transfers: int
    transfer_s: float
    exposed_s: float


@dataclass(frozen=True)
class TimelineTotals:
    """A timeline, planned or measured, in sums."""

    makespan_s: float
    meshes: tuple[MeshTotals, ...]
    links: tuple[LinkTotals, ...]


@dataclass(frozen=True)
class Explanation:
    """The explanation of a step; causes and changes begin with the largest.

    `step_s` is the whole step that shares and gains are of; `left_out` are changes that were not tried for want of
    time. A step is `healthy` where it is near its plan, the plan near its bound, and nothing is to blame. `calibrated`
    is None where nothing was measured.
    """

    verdict: str
    healthy: bool
    step_s: float
    planned_step_s: float
    lower_bound_s: float
    planned: TimelineTotals
    measured: TimelineTotals | None
    calibrated: Calibration | None
    causes: tuple[SlowdownCause, ...]
    changes: tuple[Change, ...]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def duration_text(seconds: float) -> str:
    """For people: three figures, and no powers of ten."""
    if abs(seconds) < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if abs(seconds) < 999.5 else f"{seconds:,.0f} s"


def factor_text(factor: float) -> str:
    return f"{factor:.2f} times" if factor < 10 else f"{factor:.0f} times"
