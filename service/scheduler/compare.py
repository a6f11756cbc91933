"""Compares all schedules on one spec, beside two baselines: ONNX Runtime's lockstep and Alpa's definition order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from service.scheduler.auto.fixed_schedule import check_order_limits
from service.scheduler.kernels import BACKWARD, FORWARD
from service.scheduler.planner import find_timeline
from service.scheduler.problem.memory import peak_activation
from service.scheduler.problem.problem import Problem, build_problem
from service.scheduler.problem.spec import PipelineSpec, SpecError, one_stage_per_mesh
from service.scheduler.problem.timeline import Timeline, earliest_times, lane_edges, order_by_start, retime
from service.scheduler.programs.plan import plan_metrics
from service.scheduler.schedules import published
from service.scheduler.schedules.registry import AUTO, SCHEDULES
from service.scheduler.views.text_tables import aligned_columns

_BASELINES = {
    "onnxruntime": "eager-1f1b with max_in_flight = stages, compute and communication rows in lockstep",
    "alpa": "eager-1f1b, transfers in order of definition, receives at the producer's tick",
}


@dataclass(frozen=True)
class ComparisonRow:
    """One schedule on the spec; numbers are None where `refused` says why it cannot run."""

    schedule: str
    makespan_s: float | None = None
    span_s: float | None = None
    bubble_ratio: float | None = None
    peak_activation_bytes: int | None = None
    refused: str | None = None

    def to_json(self) -> dict[str, str | float | int | None]:
        return asdict(self)


def compare_schedules(spec: PipelineSpec, *, budget_s: float = 10.0) -> list[ComparisonRow]:
    """Every named training schedule, `auto` with this budget, and the two baselines."""
    rows = []
    for name in [*SCHEDULES, AUTO]:
        if name in ("inference", "csv"):
            continue
        changed = spec.model_copy(update={"schedule": name})
        rows.append(_comparison_row(name, lambda changed=changed: find_timeline(changed, budget_s=budget_s)))
    rows.append(_comparison_row("onnxruntime", lambda: lockstep_timeline(spec)))
    rows.append(_comparison_row("alpa", lambda: definition_order_timeline(spec)))
    return rows


def comparison_text(rows: list[ComparisonRow]) -> str:
    """The rows as a table, what the baselines are, and why schedules were refused."""
    table: list[tuple[str, ...]] = [("schedule", "makespan s", "span s", "bubble", "peak activations")]
    for row in rows:
        if row.refused is None:
            table.append(
                (
                    row.schedule,
                    f"{row.makespan_s:g}",
                    f"{row.span_s:g}",
                    f"{row.bubble_ratio:.1%}",
                    str(row.peak_activation_bytes),
                )
            )
        else:
            table.append((row.schedule, "-", "-", "-", "-"))
    lines = aligned_columns(table)
    lines += ["", *(f"{name}: {what}" for name, what in _BASELINES.items())]
    lines += [f"{row.schedule} cannot run: {row.refused}" for row in rows if row.refused is not None]
    return "\n".join(lines) + "\n"


def _comparison_row(name: str, timeline: Callable[[], Timeline]) -> ComparisonRow:
    try:
        found = timeline()
    except SpecError as error:
        return ComparisonRow(name, refused=str(error))
    metrics = plan_metrics(found)
    peak = max(peak_activation(found.problem, lane)[0] for lane in found.lanes)
    return ComparisonRow(name, found.makespan, metrics.span_s, metrics.bubble_ratio, peak)


def lockstep_timeline(spec: PipelineSpec) -> Timeline:
    """ONNX Runtime's: rows of computation and rows of communication, each as long as its longest task."""
    problem, lanes, clock = _eager_1f1b(spec, cap=len(spec.stages))
    check_order_limits(problem, lanes, "onnxruntime")
    duration, exists = problem.duration.reshape(-1), problem.exists.reshape(-1)
    row = _transfer_clocks(problem, 2 * clock, consumer=True)
    rows = int(row[exists].max()) + 1
    length = np.zeros(rows)
    np.maximum.at(length, row[exists], duration[exists])
    begin = np.concatenate(([0.0], np.cumsum(length)[:-1]))
    start = np.where(exists, begin[np.maximum(row, 0)], 0.0)
    tasks = np.flatnonzero(exists)
    return Timeline(problem, start, tasks[np.argsort(row[tasks], kind="stable")])


def definition_order_timeline(spec: PipelineSpec) -> Timeline:
    """Alpa's: each mesh sends and receives tick by tick of the producers, within a tick in the order of the edges."""
    problem, lanes, clock = _eager_1f1b(spec, cap=None)
    check_order_limits(problem, lanes, "alpa")
    key = _transfer_clocks(problem, 2 * clock, consumer=False).astype(float)
    first = problem.compute_tasks
    edges = np.repeat([t.edge for t in problem.transfers for _ in range(2)], problem.microbatches)
    key[first:] += edges / (len(spec.edges) + 1)
    return retime(problem, order_by_start(problem, key))


def _eager_1f1b(spec: PipelineSpec, cap: int | None) -> tuple[Problem, list[np.ndarray], np.ndarray]:
    """Problem, compute orders and unit clock of each compute task of eager-1f1b with a cap of its own."""
    if not one_stage_per_mesh(spec):
        raise SpecError("this baseline wants one stage a mesh")
    problem = build_problem(spec.model_copy(update={"max_in_flight": cap}), split=False, inference=False)
    lanes = published.eager_lanes(problem)
    unit = np.zeros(problem.tasks)
    unit[: problem.compute_tasks] = 1.0
    times = earliest_times(problem, problem.dependency_edges, lane_edges(lanes), durations=unit)
    return problem, lanes, times.start[: problem.compute_tasks].astype(np.int64)


def _transfer_clocks(problem: Problem, compute: np.ndarray, *, consumer: bool) -> np.ndarray:
    """Row of every task: computation as given, a transfer just before its first consumer or after its producers."""
    rows = np.zeros((problem.kinds, problem.microbatches), dtype=np.int64)
    rows[: problem.compute_kinds] = compute.reshape(-1, problem.microbatches)
    for index, transfer in enumerate(problem.transfers):
        source, targets = transfer.source, transfer.targets
        if consumer:
            arrives = np.min([rows[problem.kind(t, FORWARD)] for t in targets], axis=0)
            rows[problem.transfer_kind(index, 0)] = arrives - 1
            rows[problem.transfer_kind(index, 1)] = rows[problem.kind(source, BACKWARD)] - 1
        else:
            rows[problem.transfer_kind(index, 0)] = rows[problem.kind(source, FORWARD)] + 1
            rows[problem.transfer_kind(index, 1)] = (
                np.max([rows[problem.kind(t, BACKWARD)] for t in targets], axis=0) + 1
            )
    return rows.reshape(-1)
