"""Finds the causes of a slow step: replays it with one resource at a time put back to its planned cost.

The time that a replay saves is the cost of that cause. Only what is clearly slower than planned and costs a
clear part of the step is named: noise spread over all of them is nobody's fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from statistics import median_low

from service.scheduler.problem.spec import PipelineSpec, link_costs
from service.scheduler.why.measured import (
    CauseKind,
    PlannedAndMeasured,
    SlowdownCause,
    duration_text,
    factor_text,
    host_delays,
    median_ratio,
    total_times_by,
)
from service.scheduler.why.step_graph import Link, StepGraph, StepTask

MIN_COST_SHARE = 0.05
"""The smallest cost of a cause, as a share of the step."""
_SLOWER_RATIO = 1.15  # measured over planned, from which a stage, mesh or link counts as slower
_WEAKER_LINK_RATIO = (
    2.0  # bandwidth of other links over its own, from which a link is slow although as planned
)
_SINGLE_HOST_SHARE = 0.6  # of the cost of all hosts together, from which a single one is the cause


def find_causes(
    step: StepGraph, spec: PipelineSpec, *, step_s: float, nodes: Mapping[str, Collection[str]] | None = None
) -> list[SlowdownCause]:
    """The causes inside the timeline of a step that takes `step_s` in all, the most expensive first.

    With the `nodes` of each mesh links between nodes are compared with each other, and those inside a node likewise.
    """
    finder = _CauseFinder(step, spec, nodes or {})
    causes = [*finder.stages(), *finder.computing(), *finder.links(), *finder.hosts()]
    return significant_causes(causes, step_s=step_s)


def significant_causes(causes: Collection[SlowdownCause], *, step_s: float) -> list[SlowdownCause]:
    """The causes that cost a clear part of the step, the most expensive first."""
    significant = [cause for cause in causes if cause.cost_s >= MIN_COST_SHARE * step_s]
    return sorted(significant, key=lambda cause: -cause.cost_s)


class _CauseFinder:
    def __init__(self, step: StepGraph, spec: PipelineSpec, nodes: Mapping[str, Collection[str]]) -> None:
        self._step, self._spec, self._nodes = step, spec, nodes
        self._now_s = step.makespan_s
        self._meshes = total_times_by(step, lambda task: task.mesh if task.target is None else None)
        self._ratios = {mesh: times.ratio for mesh, times in self._meshes.items()}

    def stages(self) -> Iterator[SlowdownCause]:
        """Stages that are slower than the others of their mesh, and else whole meshes that are slower than others."""
        stages = total_times_by(self._step, lambda task: task.stage)
        of_mesh: dict[str, list[str]] = defaultdict(list)
        for stage in self._spec.stages:
            if stage.name in stages:
                of_mesh[stage.mesh].append(stage.name)
        for mesh, names in of_mesh.items():
            slow = {}
            for name in names:
                others = median_ratio(stages[other].ratio for other in names if other != name)
                others = max(others, self._others(mesh))
                if len(names) > 1 and stages[name].ratio >= _SLOWER_RATIO * others:
                    slow[name] = others / stages[name].ratio
            if slow and len(slow) < len(names):
                for name, factor in slow.items():
                    yield self._stage(mesh, name, stages[name], factor)
            else:
                yield from self._mesh(mesh, names)

    def _others(self, mesh: str) -> float:
        return median_ratio(ratio for other, ratio in self._ratios.items() if other != mesh)

    def _stage(self, mesh: str, name: str, times: PlannedAndMeasured, factor: float) -> SlowdownCause:
        return SlowdownCause(
            CauseKind.STAGE,
            name,
            self._saved(lambda task: factor if task.stage == name else 1.0),
            f"stage {name} on mesh {mesh} computes {factor_text(times.ratio)} as long as planned "
            f"({duration_text(times.measured_s)} instead of {duration_text(times.planned_s)} a step), the other stages "
            "of its mesh do not: it costs more than its layers were measured to cost",
        )

    def _mesh(self, mesh: str, names: Collection[str]) -> Iterator[SlowdownCause]:
        times, others = self._meshes[mesh], self._others(mesh)
        if times.ratio < _SLOWER_RATIO * others:
            return
        factor = others / times.ratio
        beside = f", the other meshes {factor_text(others)}" if len(self._ratios) > 1 else ""
        yield SlowdownCause(
            CauseKind.MESH,
            mesh,
            self._saved(lambda task: factor if task.target is None and task.mesh == mesh else 1.0),
            f"mesh {mesh} (stage {', '.join(names)}) computes {factor_text(times.ratio)} as long as planned "
            f"({duration_text(times.measured_s)} instead of {duration_text(times.planned_s)} a step){beside}: its "
            "accelerator or its node is slower, or shared with others",
        )

    def computing(self) -> Iterator[SlowdownCause]:
        """The slowdown that all meshes have in common."""
        common = median_low(self._ratios.values()) if self._ratios else 1.0
        if common < _SLOWER_RATIO or len(self._ratios) == 1:  # a single mesh has none to compare with
            return
        factor = {mesh: 1.0 / min(common, max(1.0, ratio)) for mesh, ratio in self._ratios.items()}
        yield SlowdownCause(
            CauseKind.COMPUTE,
            "all meshes",
            self._saved(lambda task: factor[task.mesh] if task.target is None else 1.0),
            f"all meshes compute {factor_text(common)} as long as planned: accelerators that slow down (heat, power), "
            "processors shared with others, or layers that were measured when all was quieter",
        )

    def links(self) -> Iterator[SlowdownCause]:
        """Pairs of meshes that are slower than others; else all of them, where all are slower than planned."""
        links = total_times_by(self._step, lambda task: task.link)
        weak = self._weaker(links)
        pairs = sorted({tuple(sorted(link)) for link in links})
        slow_pairs = 0
        for pair in pairs:
            others = median_ratio(times.ratio for link, times in links.items() if tuple(sorted(link)) != pair)
            factor: dict[Link, float] = {}
            for link in (pair, pair[::-1]):
                if link not in links:
                    continue
                if links[link].ratio >= _SLOWER_RATIO * others or link in weak:
                    factor[link] = min(others / links[link].ratio, 1.0) * weak.get(link, 1.0)
            if factor:
                slow_pairs += 1
                yield self._link(factor, links, weak, others)
        common = median_low(times.ratio for times in links.values()) if links else 1.0
        if common >= _SLOWER_RATIO and slow_pairs < len(pairs):
            by = {link: 1.0 / min(common, max(1.0, times.ratio)) for link, times in links.items()}
            yield SlowdownCause(
                CauseKind.NETWORK,
                "all links",
                self._saved(lambda task: 1.0 if task.link is None else by[task.link]),
                f"transfers take {factor_text(common)} as long as planned on all links: the network is shared with others, "
                "or it was quieter when it was measured",
            )

    def _link(
        self,
        factor: Mapping[Link, float],
        links: Mapping[Link, PlannedAndMeasured],
        weak: Mapping[Link, float],
        others: float,
    ) -> SlowdownCause:
        parts, none_slower = [], True
        for link in factor:
            times, between = links[link], f"from {link[0]} to {link[1]}"
            if times.ratio >= _SLOWER_RATIO * others:
                none_slower = False
                parts.append(
                    f"transfers {between} take {factor_text(times.ratio)} as long as planned "
                    f"({duration_text(times.measured_s)} instead of {duration_text(times.planned_s)} a step)"
                )
            if link in weak:
                compared = {True: "of other links between nodes", False: "of other links inside a node"}
                parts.append(
                    f"the bandwidth {between} was measured before training to be {1 / weak[link]:.1f} times below that "
                    f"{compared.get(self._crosses_nodes(link), 'of other links')}: its transfers take "
                    f"{duration_text(times.measured_s)} a step"
                )
        if not none_slower:
            parts.append(f"transfers on other links take {factor_text(others)} as long as planned")
        return SlowdownCause(
            CauseKind.LINK,
            " and ".join(f"{a} -> {b}" for a, b in factor),
            self._saved(lambda task: factor.get(task.link or ("", ""), 1.0)),
            "; ".join(parts),
        )

    def _weaker(self, links: Mapping[Link, PlannedAndMeasured]) -> dict[Link, float]:
        """Links that are planned to be slow: by what their transfers shrink at the bandwidth of the others."""
        of_pair = link_costs(self._spec.network)
        widths = {link: of_pair(*link)[0] for link in links}
        weak = {}
        for link, width in widths.items():
            others = [
                w
                for other, w in widths.items()
                if w is not None
                and set(other) != set(link)
                and self._crosses_nodes(other) == self._crosses_nodes(link)
            ]
            if width is None or not others or not self._carries_bytes(link):
                continue
            if (usual := median_low(others)) >= _WEAKER_LINK_RATIO * width:
                weak[link] = width / usual
        return weak

    def _crosses_nodes(self, link: Link) -> bool | None:
        """True for a link between nodes, False for one within a node; None where the nodes of its meshes are not known."""
        first, second = (set(self._nodes.get(mesh, ())) for mesh in link)
        return first.isdisjoint(second) if first and second else None

    def _carries_bytes(self, link: Link) -> bool:
        mesh_of = {stage.name: stage.mesh for stage in self._spec.stages}
        for edge in self._spec.edges:
            meshes = (mesh_of[edge.source], mesh_of[edge.target])
            there = edge.forward_bytes or (edge.held_bytes and edge.forward_s)  # resharded: in seconds
            back = edge.backward_bytes or (edge.held_bytes and edge.backward_s)
            if (meshes == link and there) or (meshes == link[::-1] and back):
                return True
        return False

    def hosts(self) -> Iterator[SlowdownCause]:
        """Actions and transfers that begin late though all before them has ended: of one mesh, or of all."""
        every_s = self._without_delay(frozenset(self._ratios))
        if every_s <= 0:
            return
        late_s = host_delays(self._step)
        slowest = max(late_s, key=lambda mesh: self._without_delay(frozenset((mesh,))))
        alone_s = self._without_delay(frozenset((slowest,)))
        usual_s = median_low(late_s.values())
        if len(late_s) > 1 and alone_s >= _SINGLE_HOST_SHARE * every_s:
            yield SlowdownCause(
                CauseKind.HOST,
                slowest,
                alone_s,
                f"mesh {slowest} begins an action {duration_text(late_s[slowest])} after all that it needs is there, others "
                f"{duration_text(usual_s)}: the process that starts its actions is slow or waits for a processor; its "
                "accelerator itself is not slower",
            )
            return
        yield SlowdownCause(
            CauseKind.HOST,
            "all meshes",
            every_s,
            f"actions begin {duration_text(usual_s)} after all that they need is there, on all meshes: the processes "
            "that start them are slow or share processors; larger microbatches make fewer of them",
        )

    def _without_delay(self, meshes: frozenset[str]) -> float:
        delays = [
            min(delay_s, 0.0) if task.mesh in meshes else delay_s
            for task, delay_s in zip(self._step.tasks, self._step.delay_s, strict=True)
        ]
        return self._now_s - self._step.replay(self._step.measured_s, delays)

    def _saved(self, factor: Callable[[StepTask], float]) -> float:
        """Seconds that a step saves whose tasks last `factor` times as long as measured."""
        lasts = [
            seconds * factor(task)
            for task, seconds in zip(self._step.tasks, self._step.measured_s, strict=True)
        ]
        return self._now_s - self._step.replay(lasts, self._step.delay_s)
