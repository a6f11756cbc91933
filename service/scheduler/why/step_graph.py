"""StepGraph: a measured step as the dependency graph of its programs, replayed with other task times.

Edges are the order of every lane and the events that instructions wait for. A task begins when all before it
have ended, and `delay_s` later (host, transport). Replayed with the measured times, the step takes exactly as
long as it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.why.gaps import TimedSlot
from worker.contract.program import COMPUTE_OPS, SEND_OPS, TRANSFER_OPS

Link = tuple[str, str]
"""(sending mesh, receiving mesh)."""


class PlanMismatchError(ValueError):
    """The slots do not belong to the plan's programs: another attempt measured them, or some are missing."""


class StepTask(NamedTuple):
    """A compute action of a stage, or a transfer: `edge` and `target` are None for an action.

    `op` is F, B, I or W; of a transfer F (activations) or B (their gradients). `mesh` computes, or sends.
    """

    mesh: str
    op: str
    stage: str | None
    microbatch: int
    edge: int | None = None
    target: str | None = None

    @property
    def link(self) -> Link | None:
        return None if self.target is None else (self.mesh, self.target)


@dataclass(frozen=True)
class StepGraph:
    """The tasks of a step, causes first, with their planned and measured seconds.

    `before[i]` are the indices of the tasks that have ended when task i may begin. Clocks of two hosts differ by a
    little, so a `delay_s` may be negative.
    """

    tasks: tuple[StepTask, ...]
    before: tuple[tuple[int, ...], ...]
    planned_s: tuple[float, ...]
    measured_s: tuple[float, ...]
    delay_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """The measured makespan in seconds."""
        return self.replay(self.measured_s, self.delay_s)

    def replay(self, lasts_s: Sequence[float], delay_s: Sequence[float] | None = None) -> float:
        """The makespan where the tasks last `lasts_s` and begin `delay_s` later than they could (None: at once)."""
        ends = [0.0] * len(self.tasks)
        first, last = float("inf"), 0.0
        for index, before in enumerate(self.before):
            begin = max([ends[other] for other in before], default=0.0)
            if delay_s is not None:
                begin += delay_s[index]
            ends[index] = begin + lasts_s[index]
            first, last = min(first, begin), max(last, ends[index])
        return last - first if self.tasks else 0.0


def make_step_graph(
    spec: PipelineSpec,
    programs: Mapping[str, Sequence[Mapping[str, Any]]],
    planned: Sequence[TimedSlot],
    measured: Sequence[TimedSlot],
) -> StepGraph:
    """The graph of the programs with the times of both timelines; raises PlanMismatchError where they do not fit."""
    numbers, before = _graph(spec, programs)
    tasks = list(numbers)
    plan = _task_times(planned)
    ran = _task_times(measured)
    if missing := next((task for task in tasks if task not in ran), None):
        measured_tasks = sum(task in ran for task in tasks)
        raise PlanMismatchError(
            f"of the plan's {len(tasks)} actions and transfers {measured_tasks} were measured "
            f"({_task_name(missing)} was not)"
        )
    order = _topological_order(before)
    place = {task: at for at, task in enumerate(order)}
    starts = [ran[tasks[task]][0] for task in order]
    ends = [ran[tasks[task]][1] for task in order]
    moved = [tuple(place[other] for other in before[task]) for task in order]
    origin = min(starts, default=0.0)
    delays = [
        start - max([ends[other] for other in others], default=origin)
        for start, others in zip(starts, moved, strict=True)
    ]
    planned_times = [plan.get(tasks[task], (0.0, 0.0)) for task in order]
    return StepGraph(
        tasks=tuple(tasks[task] for task in order),
        before=tuple(moved),
        planned_s=tuple(end - start for start, end in planned_times),
        measured_s=tuple(end - start for start, end in zip(starts, ends, strict=True)),
        delay_s=tuple(delays),
    )


def _graph(
    spec: PipelineSpec, programs: Mapping[str, Sequence[Mapping[str, Any]]]
) -> tuple[dict[StepTask, int], list[set[int]]]:
    """(number of every task, by number the tasks that it waits for); both ends of a transfer are one task."""
    numbers: dict[StepTask, int] = {}
    before: list[set[int]] = []
    for mesh, program in programs.items():
        recorded: dict[int, int] = {}
        last_on: dict[str, int] = {}
        for instruction in program:
            if (task := _step_task(spec, mesh, instruction)) is None:
                continue
            number = numbers.setdefault(task, len(numbers))
            if number == len(before):
                before.append(set())
            before[number] |= {recorded[event] for event in instruction["wait"] if event in recorded}
            if (lane := instruction["lane"]) in last_on:
                before[number].add(last_on[lane])
            last_on[lane] = number
            if instruction["record"] is not None:
                recorded[instruction["record"]] = number
    return numbers, before


def _step_task(spec: PipelineSpec, mesh: str, instruction: Mapping[str, Any]) -> StepTask | None:
    op = instruction["op"]
    if op in COMPUTE_OPS:
        return StepTask(mesh, op, spec.stages[instruction["stage"]].name, instruction["microbatch"])
    if op not in TRANSFER_OPS:
        return None
    ends = (mesh, instruction["peer"])
    source, target = ends if op in SEND_OPS else ends[::-1]
    return StepTask(source, op[-1], None, instruction["microbatch"], instruction["edge"], target)


def _task_times(slots: Sequence[TimedSlot]) -> dict[StepTask, tuple[float, float]]:
    """(start, end) of each task in seconds. A transfer starts when both ends are there, and ends when it is received."""
    times: dict[StepTask, tuple[float, float]] = {}
    sent: dict[StepTask, tuple[float, float]] = {}
    for slot in slots:
        if slot.microbatch is None:
            continue
        if slot.action in COMPUTE_OPS:
            times[StepTask(slot.mesh, slot.action, slot.stage, slot.microbatch)] = (slot.start_s, slot.end_s)
        elif slot.action in TRANSFER_OPS:
            direction, _, peer = slot.lane.partition(":")
            ends = (slot.mesh, peer) if direction == "send" else (peer, slot.mesh)
            task = StepTask(ends[0], slot.action[-1], None, slot.microbatch, slot.edge, ends[1])
            (sent if direction == "send" else times)[task] = (slot.start_s, slot.end_s)
    for task, (start_s, _) in sent.items():
        if task in times:
            begun_s, end_s = times[task]
            times[task] = (min(max(start_s, begun_s), end_s), end_s)
    return times


def _topological_order(before: Sequence[set[int]]) -> list[int]:
    after: list[list[int]] = [[] for _ in before]
    missing = [len(others) for others in before]
    for number, others in enumerate(before):
        for other in others:
            after[other].append(number)
    order = [number for number, count in enumerate(missing) if not count]
    for number in order:
        for other in after[number]:
            missing[other] -= 1
            if not missing[other]:
                order.append(other)
    if len(order) < len(before):
        raise PlanMismatchError("the programs wait for each other for ever")
    return order


def _task_name(task: StepTask) -> str:
    if task.target is None:
        return f"{task.stage} {task.op}{task.microbatch}"
    return f"edge {task.edge} {task.op}{task.microbatch} from {task.mesh} to {task.target}"
