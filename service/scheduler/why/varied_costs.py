"""Gives the mean makespan of programs where costs vary as they did in measured steps.

Where costs vary, a step is longer than at its usual costs: lanes wait for the last of several inputs. Two plans of equal
length at usual costs differ in it, as one with more microbatches in flight waits less. So plans are compared by their mean
over replays in which each action takes as much longer as the same action did in a measured step, of the same microbatch
and of the one that is none, one, two, ... further on. Nothing is assumed of how costs are distributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from service.scheduler.planner import MeanMakespans
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.programs.plan import Plan
from service.scheduler.why.measured import task_seconds
from service.scheduler.why.step_graph import StepGraph, StepTask, make_step_graph

_REPLAYED_TASKS = 200_000  # in all replays of one plan: about a quarter of a second
_LEAST_REPLAYS = 8  # a mean of fewer says little

_Kind = tuple[str, str | int, str | None]
_Factors = Mapping[_Kind, Sequence[float]]


@dataclass(frozen=True)
class VariedCosts:
    """For each measured step, by kind of action and microbatch, its time over the usual one."""

    steps: tuple[_Factors, ...]

    @classmethod
    def of(cls, measured: Sequence[StepGraph], usual: StepGraph) -> VariedCosts:
        """The costs of `measured` steps of one plan, whose `usual` step has the same tasks."""
        return cls(tuple(_factors(graph, usual) for graph in measured))

    def mean_makespans(
        self, spec: PipelineSpec, running: StepGraph, recomputed: Iterable[str]
    ) -> MeanMakespans | None:
        """The means of the `running` step and of other plans of `spec`, which has the usual costs, with the stages
        `recomputed`; None where too few replays are affordable."""
        recomputed = tuple(recomputed)
        running_s = self.mean_makespan(running, task_seconds(spec, running, recomputed))

        def of_plan(plan: Plan) -> float | None:
            step = make_step_graph(spec, plan.programs, plan.slots, plan.slots)
            return self.mean_makespan(step, task_seconds(spec, step, recomputed))

        return None if running_s is None else MeanMakespans(running_s, of_plan)

    @property
    def microbatches(self) -> int:
        return max((len(row) for step in self.steps for row in step.values()), default=0)

    def mean_makespan(self, step: StepGraph, usual_s: Sequence[float]) -> float | None:
        """The mean makespan in seconds of a step whose tasks usually take `usual_s`; None where its replays would take
        too long to be enough."""
        counts = min(len(self.steps) * self.microbatches, _REPLAYED_TASKS // max(1, len(step.tasks)))
        if counts < _LEAST_REPLAYS:
            return None
        shifts = -(-counts // len(self.steps))
        apart = max(1, self.microbatches // shifts)
        kinds = [_kind(task) for task in step.tasks]
        return fmean(
            step.replay(
                [
                    seconds * _factor(factors, kind, task.microbatch + by)
                    for seconds, kind, task in zip(usual_s, kinds, step.tasks, strict=True)
                ]
            )
            for factors in self.steps
            for by in range(0, min(self.microbatches, shifts * apart), apart)
        )


def _kind(task: StepTask) -> _Kind:
    """The kind of a task. B, I and W of a stage are one: other programs may split what was measured whole."""
    op = "F" if task.op == "F" else "B"
    return (op, task.stage or "", None) if task.edge is None else (op, task.edge, task.target)


def _factor(factors: _Factors, kind: _Kind, microbatch: int) -> float:
    row = factors.get(kind)
    return row[microbatch % len(row)] if row else 1.0


def _factors(measured: StepGraph, usual: StepGraph) -> dict[_Kind, list[float]]:
    """Divide the time of tasks, with what they began late, by the usual one; returned by kind and microbatch."""
    sums: dict[_Kind, dict[int, tuple[float, float]]] = {}
    for index, task in enumerate(usual.tasks):
        took_s = measured.measured_s[index] + max(0.0, measured.delay_s[index])
        usual_s = usual.measured_s[index] + max(0.0, usual.delay_s[index])
        of_kind = sums.setdefault(_kind(task), {})
        before = of_kind.get(task.microbatch, (0.0, 0.0))
        of_kind[task.microbatch] = before[0] + took_s, before[1] + usual_s
    return {
        kind: [took_s / usual_s if usual_s > 0 else 1.0 for _, (took_s, usual_s) in sorted(rows.items())]
        for kind, rows in sums.items()
    }
