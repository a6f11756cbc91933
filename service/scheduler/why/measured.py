"""What a step cost in fact: how much longer than planned every stage, mesh and link took, and a spec with those costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median, median_low
from typing import TypeVar

from service.scheduler.model.spec import (
    LinkSpec,
    NetworkSpec,
    PipelineSpec,
    StageSpec,
    edge_costs,
    link_costs,
)
from service.scheduler.recomputation import with_choice
from service.scheduler.why.step import Link, Step, Task

_NOTHING_S = 1e-12
Key = TypeVar("Key")


@dataclass(frozen=True)
class Times:
    """Planned and measured seconds of several tasks together."""

    planned_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """How many times as long as planned; 1 where nothing was planned."""
        return self.measured_s / self.planned_s if self.planned_s > _NOTHING_S else 1.0


def sums(step: Step, key: Callable[[Task], Key | None]) -> dict[Key, Times]:
    """Times of the tasks by a property of theirs; tasks without it (None) are left out."""
    planned: dict[Key, float] = defaultdict(float)
    measured: dict[Key, float] = defaultdict(float)
    for task, plan_s, ran_s in zip(step.tasks, step.planned_s, step.measured_s, strict=True):
        if (name := key(task)) is not None:
            planned[name] += plan_s
            measured[name] += ran_s
    return {name: Times(planned[name], measured[name]) for name in planned}


def typical(ratios: Iterable[float]) -> float:
    """The ratio that the middle one of others has, at least 1: being quicker than planned is nobody's duty."""
    return max(1.0, median_low([*ratios] or [1.0]))


def host_delays(step: Step) -> dict[str, float]:
    """By mesh, the mean seconds by which its actions begin later than they could."""
    found: dict[str, list[float]] = defaultdict(list)
    for task, delay_s in zip(step.tasks, step.delay_s, strict=True):
        if task.target is None:
            found[task.mesh].append(max(0.0, delay_s))
    return {mesh: sum(delays) / len(delays) for mesh, delays in found.items()}


def measured_spec(spec: PipelineSpec, step: Step, *, hosts: bool = True) -> PipelineSpec:
    """The spec with costs as they were measured: the middle of all microbatches of an action, and of a link's
    transfers together. Where `hosts`, what hosts take for each action is a part of it.

    What was not run (W, where all backwards were whole) costs as many times its plan as what was.
    """
    lasted: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for task, plan_s, ran_s in zip(step.tasks, step.planned_s, step.measured_s, strict=True):
        if task.stage is not None:
            lasted[task.stage, task.op].append((plan_s, ran_s))
    middle = {
        key: Times(median(plan for plan, _ in both), median(ran for _, ran in both))
        for key, both in lasted.items()
    }
    late_s = host_delays(step) if hosts else {}
    stages = [_stage(stage, middle, late_s.get(stage.mesh, 0.0)) for stage in spec.stages]
    links = sums(step, lambda task: task.link)
    scaled = slower_links(
        spec.model_copy(update={"stages": stages}), {link: found.ratio for link, found in links.items()}
    )
    unplanned = {
        link: found.measured_s / max(1, sum(task.link == link for task in step.tasks))
        for link, found in links.items()
        if found.planned_s <= _NOTHING_S < found.measured_s
    }
    return _with_seconds(scaled, unplanned) if unplanned else scaled


def _stage(stage: StageSpec, middle: Mapping[tuple[str, str], Times], late_s: float) -> StageSpec:
    # a B that is planned as its two parts is one action, and late once
    part_s = late_s / 2 if stage.backward_s is None and (stage.name, "B") in middle else late_s

    def cost(seconds: float, more_s: float, *ops: str) -> float:
        for op in ops:
            if (found := middle.get((stage.name, op))) is not None:
                if seconds > _NOTHING_S:
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


def slower_meshes(
    spec: PipelineSpec, factor: Mapping[str, float], late_s: Mapping[str, float]
) -> PipelineSpec:
    """The spec whose stages take `factor` of their mesh as long, and `late_s` more for each action."""

    def one(stage: StageSpec) -> StageSpec:
        by, more_s = factor.get(stage.mesh, 1.0), late_s.get(stage.mesh, 0.0)

        def cost(seconds: float) -> float:
            return seconds * by + more_s if seconds > _NOTHING_S else 0.0

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


def slower_links(spec: PipelineSpec, factor: Mapping[Link, float]) -> PipelineSpec:
    """The spec in which the transfers of these links take so many times as long."""
    of_pair = link_costs(spec.network)
    known = {(one.source, one.target): one for one in spec.network.links}
    for link, by in factor.items():
        bandwidth, latency_s = of_pair(*link)
        known[link] = LinkSpec(
            source=link[0],
            target=link[1],
            bandwidth_bytes_per_s=None if bandwidth is None else bandwidth / max(by, _NOTHING_S),
            latency_s=latency_s * by,
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


def _with_seconds(spec: PipelineSpec, seconds: Mapping[Link, float]) -> PipelineSpec:
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


def task_seconds(spec: PipelineSpec, step: Step, recomputed: Iterable[str]) -> list[float]:
    """How long every task of a step lasts at the costs of `spec`, where the stages `recomputed` recompute."""
    stages = {stage.name: stage for stage in with_choice(spec, recomputed).stages}
    of_edge = edge_costs(spec)
    found = []
    for task in step.tasks:
        if task.edge is not None:
            found.append(of_edge(task.edge)[task.op == "B"])
            continue
        stage = stages[task.stage or ""]
        found.append(
            {
                "F": stage.forward_s,
                "B": stage.whole_backward_s,
                "I": stage.backward_input_s,
                "W": stage.backward_weight_s,
            }[task.op]
        )
    return found
