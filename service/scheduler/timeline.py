"""The simulator: orders in, timed slots out; and what a list of slots amounts to.

Decides the order of transfers by urgency. Knows nothing of schedules by name or of programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from service.scheduler import kernels
from service.scheduler.problem import BACKWARD, FORWARD, Problem
from service.scheduler.spec import SpecError

NO_LIMIT = np.iinfo(np.int64).max // 4


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every task in seconds, and all tasks by start (`sequence`), causes first."""

    problem: Problem
    start: np.ndarray
    sequence: np.ndarray

    @cached_property
    def end(self) -> np.ndarray:
        return self.start + self.problem.duration.reshape(-1)

    @cached_property
    def makespan(self) -> float:
        return float(self.end[self.sequence].max()) - float(self.start[self.sequence].min())

    @cached_property
    def lanes(self) -> list[np.ndarray]:
        """For each mesh its compute tasks in order."""
        compute = self.sequence[self.sequence < self.problem.compute_tasks]
        meshes = self.problem.resources[compute // self.problem.microbatches, 0]
        return [compute[meshes == mesh] for mesh in range(self.problem.meshes)]


class OrderError(SpecError):
    """Compute orders that can never finish: some action waits for one behind itself."""


def simulate(problem: Problem, lanes: Sequence[np.ndarray]) -> Timeline:
    """The timeline of given compute orders (tasks for each mesh), transfers going by urgency.

    Transfers of equal urgency go in the order of their edges. Raises OrderError when the orders
    cannot finish (a cycle, or too few receive buffers).
    """
    pointer, successors = _graph(problem, lanes)
    duration, exists = problem.duration.reshape(-1), problem.exists.reshape(-1)
    start, order, count = kernels.longest_paths(pointer, successors, duration, exists)
    if count < exists.sum():
        raise OrderError(_stuck_message(problem, lanes, set(order[:count].tolist())))
    limited = bool((problem.receive_limit >= 0).any())
    if problem.contended or limited:
        urgency = kernels.tails(pointer, successors, duration, order, count)
        start, order, count = Dispatcher(problem, lanes).run(urgency)
        if count < exists.sum():
            raise OrderError(_buffers_message(problem, lanes, set(order[:count].tolist())))
    return make_timeline(problem, start, order[:count])


def make_timeline(problem: Problem, start: np.ndarray, order: np.ndarray) -> Timeline:
    """The timeline of known starts; `order` is any order in which causes come first."""
    return Timeline(problem, start, order[np.argsort(start[order], kind="stable")])


def retime(problem: Problem, sequence: np.ndarray, *waits: tuple[np.ndarray, np.ndarray]) -> Timeline:
    """Every task as early as possible while each resource keeps the order in which `sequence` lists its tasks.

    `waits` are pairs of arrays: tasks, and tasks that start after those have ended. Raises OrderError when
    all that contradicts the dependencies.
    """
    parts = [order_edges(problem, []), *waits]
    kinds = sequence // problem.microbatches
    for resource in np.unique(problem.resources[problem.resources >= 0]).tolist():
        here = sequence[(problem.resources == resource).any(axis=1)[kinds]]
        parts.append((here[:-1], here[1:]))
    sources, targets = (np.concatenate(side) for side in zip(*parts, strict=True))
    pointer, successors = compress_edges(problem.tasks, sources, targets)
    exists = problem.exists.reshape(-1)
    begin, order, count = kernels.longest_paths(pointer, successors, problem.duration.reshape(-1), exists)
    if count < exists.sum():
        raise OrderError("the resource orders wait for each other for ever")
    return make_timeline(problem, begin, order[:count])


def order_by_start(problem: Problem, start: np.ndarray) -> np.ndarray:
    """All tasks by start; of those at one instant the ones without length first, causes before effects."""
    tasks = np.flatnonzero(problem.exists.reshape(-1))
    rank = problem.kind_rank[tasks // problem.microbatches]
    length = problem.duration.reshape(-1)[tasks]
    return tasks[np.lexsort((tasks, rank, length > 0, start[tasks]))]


class Dispatcher:
    """`kernels.dispatch` for one problem, its arrays prepared once; chooses compute orders, or times given ones."""

    def __init__(self, problem: Problem, lanes: Sequence[np.ndarray] | None = None) -> None:
        stages, spec = problem.stages, problem.spec
        by_mesh: list[list[int]] = [[] for _ in range(problem.meshes)]
        for kind in range(3 * stages):
            by_mesh[problem.mesh_of_stage[kind // 3]].append(kind)
        source_cap = np.full(stages, NO_LIMIT, dtype=np.int64)
        if spec.max_in_flight is not None and not problem.inference:
            source_cap[[s for s in range(stages) if not problem.sources[s]]] = spec.max_in_flight
        no_limits = np.full(problem.meshes, -1, dtype=np.int64)
        self.problem = problem
        self._before = (
            problem.microbatches,
            stages,
            problem.meshes,
            problem.exists.reshape(-1),
            problem.duration.reshape(-1),
            missing_counts(problem),
            *problem.dependent_arrays,
            *problem.dependency_arrays,
            problem.resources,
            problem.resource_count,
            problem.receiver_of_kind,
            *_rows(by_mesh),
            *_rows(lanes if lanes is not None else [[] for _ in range(problem.meshes)]),
        )
        self._limits = (
            problem.activation,
            problem.stash,
            no_limits if problem.inference else problem.activation_limit,
        )
        self._source_cap = source_cap
        self._receives = (
            no_limits if lanes is None else problem.receive_limit,
            *_receive_order(problem, lanes),
        )
        self._no_cap = np.full(stages, NO_LIMIT, dtype=np.int64)

    def run(
        self,
        priority: np.ndarray,
        *,
        in_flight_cap: np.ndarray | None = None,
        patience: float = 0.0,
        activation_limit: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """(start, order, count) with `priority` for each task; count falls short where it got stuck.

        `activation_limit` (bytes of each mesh) stands in for the limits of the spec.
        """
        *sizes, limit = self._limits
        return kernels.dispatch(
            *self._before,
            priority,
            *sizes,
            limit if activation_limit is None else activation_limit,
            self._no_cap if in_flight_cap is None else in_flight_cap,
            self._source_cap,
            patience,
            *self._receives,
        )


def missing_counts(problem: Problem) -> np.ndarray:
    """int32[tasks]: how many tasks each one waits for, compute orders aside."""
    pointer, needs = problem.dependency_arrays
    exists = problem.exists
    missing = np.zeros(exists.shape, dtype=np.int32)
    for kind in range(problem.kinds):
        for need in needs[pointer[kind] : pointer[kind + 1]]:
            missing[kind] += exists[need]
    return np.where(exists, missing, 0).astype(np.int32).reshape(-1)


def _rows(rows: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    pointer = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=pointer[1:])
    parts = [np.asarray(row, dtype=np.int64) for row in rows]
    return pointer, np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _graph(problem: Problem, lanes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return compress_edges(problem.tasks, *order_edges(problem, lanes))


def order_edges(problem: Problem, lanes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(causes, effects): every dependency between tasks, and each compute action before the next on its lane."""
    microbatches, exists = problem.microbatches, problem.exists
    column = np.arange(microbatches, dtype=np.int64)
    causes, effects = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for kind, needs in enumerate(problem.dependencies):
        for need in needs:
            both = exists[kind] & exists[need]
            causes.append((need * microbatches + column)[both])
            effects.append((kind * microbatches + column)[both])
    for lane in lanes:
        causes.append(np.asarray(lane[:-1], dtype=np.int64))
        effects.append(np.asarray(lane[1:], dtype=np.int64))
    return np.concatenate(causes), np.concatenate(effects)


def compress_edges(nodes: int, sources: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compressed rows (pointer, successors) of a list of edges."""
    pointer = np.zeros(nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(sources, minlength=nodes), out=pointer[1:])
    return pointer, targets[np.argsort(sources, kind="stable")]


def _receive_order(
    problem: Problem, lanes: Sequence[np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per mesh the transfers that arrive there by first use (pointer, tasks), and each task's rank."""
    rank = np.full(problem.tasks, -1, dtype=np.int64)
    if lanes is None or not (problem.receive_limit >= 0).any():
        return np.zeros(problem.meshes + 1, dtype=np.int64), np.empty(0, dtype=np.int64), rank
    rows: list[list[int]] = []
    for lane in lanes:
        row: dict[int, None] = {}
        for task in np.asarray(lane).tolist():
            kind, microbatch = divmod(task, problem.microbatches)
            for need in problem.dependencies[kind]:
                if need >= 3 * problem.stages:
                    row.setdefault(need * problem.microbatches + microbatch)
        rows.append(list(row))
        rank[rows[-1]] = np.arange(len(rows[-1]))
    return (*_rows(rows), rank)


def action_name(problem: Problem, task: int) -> str:
    """torch's notation of a compute action, `2F0`."""
    kind, microbatch = divmod(int(task), problem.microbatches)
    stage, op = divmod(kind, 3)
    letter = (
        "F" if op == FORWARD else "W" if op != BACKWARD else "B" if problem.fused[stage, microbatch] else "I"
    )
    return f"{stage}{letter}{microbatch}"


def _stuck_message(problem: Problem, lanes: Sequence[np.ndarray], done: set[int]) -> str:
    heads = []
    for mesh, lane in enumerate(lanes):
        blocked = next((task for task in np.asarray(lane).tolist() if task not in done), None)
        if blocked is not None:
            heads.append(f"{problem.spec.meshes[mesh].name} at {action_name(problem, blocked)}")
    return (
        f"the compute orders wait for each other for ever ({', '.join(heads[:4])}): move those actions later"
    )


def _buffers_message(problem: Problem, lanes: Sequence[np.ndarray], done: set[int]) -> str:
    pointer, tasks, _ = _receive_order(problem, lanes)
    for mesh in range(problem.meshes):
        limit = int(problem.receive_limit[mesh])
        left = [task for task in tasks[pointer[mesh] : pointer[mesh + 1]].tolist() if task not in done]
        if limit >= 0 and left:
            needed = needed_receive_buffers(problem, lanes[mesh])
            if needed > limit:
                return (
                    f"mesh {problem.spec.meshes[mesh].name!r} has receive_buffer_limit {limit}, but this order needs "
                    f"{needed} received tensors at once: raise the limit to {needed}"
                )
    return "the receive buffers are too few for this order: raise receive_buffer_limit"


def needed_receive_buffers(problem: Problem, lane: np.ndarray) -> int:
    """Fewest receive buffers with which a mesh can run its compute order."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, task in enumerate(np.asarray(lane).tolist()):
        kind, microbatch = divmod(task, problem.microbatches)
        for need in problem.dependencies[kind]:
            if need >= 3 * problem.stages:
                first.setdefault(need * problem.microbatches + microbatch, position)
                last[need * problem.microbatches + microbatch] = position
    change = np.zeros(len(lane) + 1, dtype=np.int64)
    for received, position in first.items():
        change[position] += 1
        change[last[received] + 1] -= 1
    return int(np.cumsum(change).max(initial=0))
