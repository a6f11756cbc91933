"""Calibrates a running plan: the costs that several measured steps give, and the makespan of its programs at these costs.

A cost is the median over steps of the mean over the microbatches of a step: a disturbed step moves it little, what
varies within every step counts. Workers that share processors need no model of their own: their slots are measured
while they share.

Costs alone say too little where microbatches vary: lanes wait for the last of several inputs, so the makespan at mean
costs is below the mean makespan. The calibrated makespan is therefore the mean over replays of the programs in which
every action takes as long as the same action took in the same step none, one, two, ... microbatches further on; of
several steps the median. Where microbatches do not differ it is exactly the measured one.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, median, stdev
from typing import Any

from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.why.gaps import TimedSlot
from service.scheduler.why.step_graph import PlanMismatchError, StepGraph, make_step_graph
from worker.contract.program import FINAL_OPS
from worker.contract.timeline import FIRST_PROFILED_STEPS

CALIBRATION_STEPS = 9
"""The last steps, whose slots give the costs: five of another length change a median over them."""
_FEWEST_STEADY_STEPS = 3  # as few as a median takes one disturbed step among
LEAST_GAIN = 0.03
"""Of a makespan, for which a running job changes its plan."""
_REPLAYED_TASKS = 400_000  # in all replays of a calibration: about half a second
_FEWEST_SHIFTS = 4  # of microbatches, however long the plan


@dataclass(frozen=True)
class CalibratedCost:
    """Seconds of one microbatch's action of a stage, or of a transfer (`edge`, from `mesh` to `target`); REDUCE and STEP
    are those of a mesh in one step.

    `spread_s` is the median absolute deviation of steps from `seconds`; `late_s` the time from when all that it needs is
    there to its start: the engine's own time, and waiting for a processor.
    """

    mesh: str
    action: str
    seconds: float
    spread_s: float
    late_s: float = 0.0
    stage: str | None = None
    edge: int | None = None
    target: str | None = None


@dataclass(frozen=True)
class Calibration:
    """The costs of a running plan as `steps` measured steps gave them.

    `makespan_s` is that of the plan's programs at these costs, `measured_makespan_s` the median of the steps, `spread_s`
    their median absolute deviation from it, `update_s` what REDUCE and STEP take behind it.
    """

    steps: int
    makespan_s: float
    measured_makespan_s: float
    spread_s: float
    update_s: float
    costs: tuple[CalibratedCost, ...]


def choose_calibration_steps(profiled: Sequence[int], *, since_step: int | None = None) -> Sequence[int]:
    """The steps whose slots calibrate a plan, of an attempt's `profiled` ones in ascending order, behind `since_step`.

    The first step of an attempt is cold. The others at its start, which are profiled without a pause, count only until
    there are enough later ones: processes and caches are still settling then.
    """

    def behind(steps: Sequence[int]) -> list[int]:
        return [step for step in steps if since_step is None or step > since_step]

    steady = behind(profiled[FIRST_PROFILED_STEPS:])
    chosen = steady if len(steady) >= _FEWEST_STEADY_STEPS else behind(profiled[1:])
    return chosen[-CALIBRATION_STEPS:]


def is_clearly_shorter(planned_s: float, running_s: float, *, spread_s: float) -> bool:
    """True if a plan of `planned_s` is worth taking the place of one of `running_s`, both at the costs of measured steps
    that deviate by `spread_s`."""
    gain_s = running_s - planned_s
    return gain_s > spread_s and planned_s <= (1 - LEAST_GAIN) * running_s


def calibrate(
    spec: PipelineSpec,
    programs: Mapping[str, Sequence[Mapping[str, Any]]],
    planned: Sequence[TimedSlot],
    steps: Sequence[Sequence[TimedSlot]],
) -> tuple[Calibration, StepGraph] | None:
    """The calibration of a plan by the slots of measured steps, and its step in which every action and transfer takes, and
    begins as late as, its calibrated cost.

    Steps that are of another plan, or not whole, are left out; None where no step remains.
    """
    return calibrate_steps(measured_graphs(spec, programs, planned, steps))


def calibrate_steps(
    measured: Sequence[tuple[StepGraph, Sequence[TimedSlot]]],
) -> tuple[Calibration, StepGraph] | None:
    """The calibration of a plan by the graphs and slots of its measured steps; see `calibrate`."""
    graphs, slots = [graph for graph, _ in measured], [step for _, step in measured]
    if not graphs or not graphs[0].tasks:
        return None
    kinds = _tasks_by_kind(graphs[0])
    lasts = _means_by_kind([graph.measured_s for graph in graphs], kinds)
    delays = _means_by_kind([graph.delay_s for graph in graphs], kinds)
    costs = []
    for kind, indices in kinds.items():
        task, seconds = graphs[0].tasks[indices[0]], median(lasts[kind])
        costs.append(
            CalibratedCost(
                mesh=task.mesh,
                action=task.op,
                seconds=seconds,
                spread_s=_deviation(lasts[kind], seconds),
                late_s=median(delays[kind]),
                stage=task.stage,
                edge=task.edge,
                target=task.target,
            )
        )
    makespans = [graph.makespan_s for graph in graphs]
    measured_s = median(makespans)
    calibration = Calibration(
        steps=len(graphs),
        makespan_s=median(_varied_makespan_s(graph, kinds, steps=len(graphs)) for graph in graphs),
        measured_makespan_s=measured_s,
        spread_s=_deviation(makespans, measured_s),
        update_s=median(behind_makespan_s(step) for step in slots),
        costs=(*costs, *_update_costs(slots)),
    )
    of_task = {index: cost for cost, indices in zip(costs, kinds.values(), strict=True) for index in indices}
    tasks = range(len(graphs[0].tasks))
    usual = replace(
        graphs[0],
        measured_s=tuple(of_task[index].seconds for index in tasks),
        delay_s=tuple(of_task[index].late_s for index in tasks),
    )
    return calibration, usual


def measured_graphs(
    spec: PipelineSpec,
    programs: Mapping[str, Sequence[Mapping[str, Any]]],
    planned: Sequence[TimedSlot],
    steps: Sequence[Sequence[TimedSlot]],
) -> list[tuple[StepGraph, Sequence[TimedSlot]]]:
    """The graphs of those of the measured steps that are of this plan and whole, each with its slots."""
    found = []
    for step in steps:
        with contextlib.suppress(PlanMismatchError):
            found.append((make_step_graph(spec, programs, planned, step), step))
    return found


_Kinds = Mapping[Hashable, Sequence[int]]
"""The indices of the tasks of the same action of a stage, or transfers of an edge, in order of microbatches."""


def _tasks_by_kind(graph: StepGraph) -> _Kinds:
    kinds: dict[Hashable, list[int]] = defaultdict(list)
    for index in sorted(range(len(graph.tasks)), key=lambda index: graph.tasks[index].microbatch):
        task = graph.tasks[index]
        kinds[task.mesh, task.op, task.stage, task.edge, task.target].append(index)
    return kinds


def _means_by_kind(steps: Sequence[Sequence[float]], kinds: _Kinds) -> dict[Hashable, list[float]]:
    """The mean length of each kind's tasks in each step."""
    return {
        kind: [fmean(step[index] for index in indices) for step in steps] for kind, indices in kinds.items()
    }


def _varied_makespan_s(graph: StepGraph, kinds: _Kinds, *, steps: int) -> float:
    """The mean makespan of the programs with the times of other microbatches; `steps` share the number of replays."""
    microbatches = max(len(indices) for indices in kinds.values())
    most = max(_FEWEST_SHIFTS, _REPLAYED_TASKS // (steps * len(graph.tasks)))
    return fmean(
        graph.replay(_shifted(graph.measured_s, kinds, by), _shifted(graph.delay_s, kinds, by))
        for by in range(0, microbatches, -(-microbatches // most))
    )


def _shifted(seconds: Sequence[float], kinds: _Kinds, by: int) -> list[float]:
    """The times of tasks, each that of the same kind `by` microbatches further on, cyclically."""
    shifted = list(seconds)
    for indices in kinds.values():
        for place, index in enumerate(indices):
            shifted[index] = seconds[indices[(place + by) % len(indices)]]
    return shifted


def _update_costs(steps: Sequence[Sequence[TimedSlot]]) -> list[CalibratedCost]:
    """REDUCE and STEP of each mesh, all slots of a step together."""
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(steps))
    for number, slots in enumerate(steps):
        for slot in slots:
            if slot.action in FINAL_OPS:
                totals[slot.mesh, slot.action][number] += slot.end_s - slot.start_s
    return [
        CalibratedCost(mesh, action, median(seconds), _deviation(seconds, median(seconds)))
        for (mesh, action), seconds in sorted(totals.items())
    ]


def behind_makespan_s(slots: Sequence[TimedSlot]) -> float:
    """The seconds of REDUCE and STEP behind the makespan of a measured step."""
    made_s = max((slot.end_s for slot in slots if slot.action not in FINAL_OPS), default=0.0)
    return max([0.0, *(slot.end_s - made_s for slot in slots if slot.action in FINAL_OPS)])


def _deviation(values: Sequence[float], middle: float) -> float:
    return median(abs(value - middle) for value in values)


COVERAGE = 0.9
"""The share of ranges that hold."""
FEWEST_RUNS = 3
_STUDENT_T = (
    *(6.3138, 2.9200, 2.3534, 2.1318, 2.0150, 1.9432, 1.8946, 1.8595, 1.8331, 1.8125),
    *(1.7959, 1.7823, 1.7709, 1.7613, 1.7531, 1.7459, 1.7396, 1.7341, 1.7291, 1.7247),
    *(1.7207, 1.7171, 1.7139, 1.7109, 1.7081, 1.7056, 1.7033, 1.7011, 1.6991, 1.6973),
)
"""95 % points, by degrees of freedom from 1 on; beyond, those of the normal distribution are less than 2 % shorter."""


@dataclass(frozen=True)
class Forecast:
    """The value to expect, and the bounds between which it is with a probability of COVERAGE."""

    low: float
    middle: float
    high: float


def forecast(planned: float, ratios: Sequence[float]) -> Forecast | None:
    """The measured value to expect of a `planned` one, where `ratios` are measured over planned values of runs like it; None
    where these are fewer than FEWEST_RUNS.

    The logarithms of the ratios count as a sample of a normal distribution of unknown mean and spread, of which the next is
    another: the bounds are the prediction interval by Student's t (Hahn and Meeker, Statistical Intervals, section 4.8).
    ValueError for a ratio that is not a positive number.
    """
    if any(not 0 < ratio < math.inf for ratio in ratios):
        raise ValueError(f"ratios of measured to planned values are positive numbers, not {list(ratios)}")
    if len(ratios) < FEWEST_RUNS:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    middle, freedom = fmean(logs), len(logs) - 1
    quantile = (
        _STUDENT_T[freedom - 1] if freedom <= len(_STUDENT_T) else NormalDist().inv_cdf((1 + COVERAGE) / 2)
    )
    half = quantile * stdev(logs) * math.sqrt(1 + 1 / len(logs))
    low, high = (planned * math.exp(middle + sign * half) for sign in (-1, 1))
    return Forecast(low, planned * math.exp(middle), high)
