"""Timeline and simulator: compute orders in, start times of every action and transfer out.

Decides the order of transfers by urgency (the longest path behind each), and of receive buffers by first use,
with `kernels.dispatch`. Knows nothing of schedules by name or of programs. An OrderError means orders that can
never finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from service.scheduler import kernels
from service.scheduler.kernels import BACKWARD
from service.scheduler.problem.problem import Problem, to_rows
from service.scheduler.problem.spec import SpecError

NO_LIMIT = np.iinfo(np.int64).max // 4


class Dispatcher:
    """`kernels.dispatch` for one problem, its arrays prepared once; chooses compute orders, or times given ones."""

    def __init__(self, problem: Problem, lanes: Sequence[np.ndarray] | None = None) -> None:
        stages, spec = problem.stages, problem.spec
        no_limits = np.full(problem.meshes, -1, dtype=np.int64)
        source_cap = np.full(stages, NO_LIMIT, dtype=np.int64)
        if spec.max_in_flight is not None and not problem.inference:
            source_cap[[s for s in range(stages) if not problem.sources[s]]] = spec.max_in_flight
        self._problem = problem
        self._lanes = to_rows(lanes if lanes is not None else [[] for _ in range(problem.meshes)])
        self._limits = kernels.LaneLimits(
            activation=problem.activation_by_microbatch,
            stash=problem.stash_by_microbatch,
            most_activation=problem.activation,
            activation_limit=no_limits if problem.inference else problem.activation_limit,
            in_flight_cap=np.full(stages, NO_LIMIT, dtype=np.int64),
            source_cap=source_cap,
            order=np.arange(problem.microbatches, dtype=np.int64),
        )
        self._receives = _receive_buffers(problem, lanes)

    def run(
        self,
        priority: np.ndarray,
        *,
        in_flight_cap: np.ndarray | None = None,
        patience: float = 0.0,
        activation_limit: np.ndarray | None = None,
        order: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(start, tasks as they began) with `priority` for each task; some are missing where it got stuck.

        `activation_limit` (bytes of each mesh) stands in for the limits of the spec. Every kind runs its microbatches in
        `order`, ascending where there is none.
        """
        limits = self._limits
        if in_flight_cap is not None:
            limits = limits._replace(in_flight_cap=in_flight_cap)
        if activation_limit is not None:
            limits = limits._replace(activation_limit=activation_limit)
        if order is not None:
            limits = limits._replace(order=order)
        start, begun, count = kernels.dispatch(
            self._problem.arrays, self._lanes, limits, self._receives, priority, float(patience)
        )
        return start, begun[:count]


def _receive_buffers(problem: Problem, lanes: Sequence[np.ndarray] | None) -> kernels.ReceiveBufferLimits:
    rank = np.full(problem.tasks, -1, dtype=np.int64)
    if lanes is None or not (problem.receive_limit >= 0).any():
        no_limits = np.full(problem.meshes, -1, dtype=np.int64)
        limit = no_limits if lanes is None else problem.receive_limit
        return kernels.ReceiveBufferLimits(limit, to_rows([[] for _ in range(problem.meshes)]), rank)
    rows = [receives_by_first_use(problem, lane) for lane in lanes]
    for row in rows:
        rank[row] = np.arange(len(row))
    return kernels.ReceiveBufferLimits(problem.receive_limit, to_rows(rows), rank)


def receives_by_first_use(problem: Problem, lane: np.ndarray) -> list[int]:
    """The transfers that arrive at a mesh, in the order in which its compute order needs them."""
    return list(_receive_uses(problem, lane))


def needed_receive_buffers(problem: Problem, lane: np.ndarray) -> int:
    """Fewest receive buffers with which a mesh can run its compute order."""
    change = np.zeros(len(lane) + 1, dtype=np.int64)
    for first, last in _receive_uses(problem, lane).values():
        change[first] += 1
        change[last + 1] -= 1
    return int(np.cumsum(change).max(initial=0))


def _receive_uses(problem: Problem, lane: np.ndarray) -> dict[int, tuple[int, int]]:
    """For each transfer that arrives here the positions of its first and its last direct user."""
    uses: dict[int, tuple[int, int]] = {}
    for position, task in enumerate(np.asarray(lane).tolist()):
        kind, microbatch = divmod(task, problem.microbatches)
        for need in problem.dependencies[kind]:
            if need >= problem.compute_kinds:
                received = need * problem.microbatches + microbatch
                uses[received] = (uses.get(received, (position,))[0], position)
    return uses


Edges = tuple[np.ndarray, np.ndarray]  # (causes, effects): tasks, and tasks that start after those have ended


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
    def rank(self) -> np.ndarray:
        """int[tasks]: the place of each task in `sequence`, −1 for one that does not exist."""
        rank = np.full(self.problem.tasks, -1, dtype=np.int64)
        rank[self.sequence] = np.arange(len(self.sequence))
        return rank

    @cached_property
    def lanes(self) -> list[np.ndarray]:
        """For each mesh its compute tasks in order."""
        compute = self.sequence[self.sequence < self.problem.compute_tasks]
        meshes = self.problem.resources[compute // self.problem.microbatches, 0]
        return [compute[meshes == mesh] for mesh in range(self.problem.meshes)]

    @cached_property
    def transfers(self) -> np.ndarray:
        """Transfer tasks by start."""
        return self.sequence[self.sequence >= self.problem.compute_tasks]


class OrderError(SpecError):
    """Compute orders that can never finish: some action waits for one behind itself."""


@dataclass(frozen=True, eq=False)
class EarliestTimes:
    """`start` of every task; `topological` lists the tasks that are on or behind no cycle, causes first."""

    start: np.ndarray
    topological: np.ndarray
    complete: bool  # whether there is no cycle
    _duration: np.ndarray
    _successors: kernels.Rows

    def tails(self) -> np.ndarray:
        """For each task the longest path from its start to the end of everything behind it."""
        return kernels.tails(*self._successors, self._duration, self.topological, len(self.topological))


def earliest_times(problem: Problem, *edges: Edges, durations: np.ndarray | None = None) -> EarliestTimes:
    """Longest paths along `edges` (all of them: dependencies, too, must be given).

    `durations` (float[tasks], seconds) stand in for those of the problem.
    """
    causes, effects = (np.concatenate(side) for side in zip(*edges, strict=True))
    successors = compress_edges(problem.tasks, causes, effects)
    duration = problem.duration.reshape(-1) if durations is None else durations
    exists = problem.exists.reshape(-1)
    start, order, count = kernels.longest_paths(*successors, duration, exists)
    return EarliestTimes(start, order[:count], bool(count == exists.sum()), duration, successors)


def compress_edges(nodes: int, causes: np.ndarray, effects: np.ndarray) -> kernels.Rows:
    """The successors of each node, in the order of the edges."""
    return kernels.Rows(*kernels.compress_rows(nodes, causes, effects))


def lane_edges(lanes: Sequence[np.ndarray]) -> Edges:
    """Each action before the next on its lane."""
    lanes = [np.asarray(lane, dtype=np.int64) for lane in lanes] or [np.empty(0, dtype=np.int64)]
    return np.concatenate([lane[:-1] for lane in lanes]), np.concatenate([lane[1:] for lane in lanes])


def resource_edges(problem: Problem, sequence: np.ndarray) -> Edges:
    """Each task before the next of `sequence` that occupies the same resource, resource by resource."""
    resources = problem.resources[sequence // problem.microbatches].reshape(-1)
    # the same as one row for each resource, which takes as many passes over all tasks as there are resources
    tasks = np.repeat(sequence, 2)[resources >= 0]
    resources = resources[resources >= 0]
    order = np.argsort(resources.astype(np.min_scalar_type(problem.resource_count)), kind="stable")
    tasks, resources = tasks[order], resources[order]
    same = resources[1:] == resources[:-1]
    return tasks[:-1][same], tasks[1:][same]


def simulate(problem: Problem, lanes: Sequence[np.ndarray]) -> Timeline:
    """The timeline of given compute orders (tasks for each mesh), transfers going by urgency.

    Transfers of equal urgency go in the order of their edges. Raises OrderError when the orders
    cannot finish (a cycle, or too few receive buffers).
    """
    times = earliest_times(problem, problem.dependency_edges, lane_edges(lanes))
    if not times.complete:
        raise OrderError(_deadlock_message(problem, lanes, set(times.topological.tolist())))
    limited = bool((problem.receive_limit >= 0).any())
    if not problem.contended and not limited:
        return make_timeline(problem, times.start, times.topological)
    start, begun = Dispatcher(problem, lanes).run(times.tails())
    if len(begun) < len(times.topological):
        raise OrderError(_receive_limit_message(problem, lanes, set(begun.tolist())))
    return make_timeline(problem, start, begun)


def make_timeline(problem: Problem, start: np.ndarray, topological: np.ndarray) -> Timeline:
    """The timeline of known starts; `topological` is any order in which causes come first."""
    return Timeline(problem, start, topological[np.argsort(start[topological], kind="stable")])


def retime(problem: Problem, sequence: np.ndarray, *waits: Edges) -> Timeline:
    """Every task as early as possible while each resource keeps the order in which `sequence` lists its tasks.

    Raises OrderError when that, the dependencies and `waits` contradict each other.
    """
    orders = resource_edges(problem, sequence)
    times = earliest_times(problem, problem.dependency_edges, *waits, orders)
    if not times.complete:
        raise OrderError("the resource orders wait for each other for ever")
    return make_timeline(problem, times.start, times.topological)


def order_by_start(problem: Problem, start: np.ndarray) -> np.ndarray:
    """All tasks by start; at one instant tasks without length come first, causes before effects."""
    tasks = np.flatnonzero(problem.exists.reshape(-1))
    rank = problem.kind_rank[tasks // problem.microbatches]
    length = problem.duration.reshape(-1)[tasks]
    return tasks[np.lexsort((tasks, rank, length > 0, start[tasks]))]


def action_name(problem: Problem, task: int) -> str:
    """torch's notation of a compute action, `2F0`."""
    kind, microbatch = divmod(int(task), problem.microbatches)
    stage, op = problem.stage_and_op(kind)
    letter = "B" if op == BACKWARD and problem.fused[stage, microbatch] else "FIW"[op]
    return f"{stage}{letter}{microbatch}"


def _deadlock_message(problem: Problem, lanes: Sequence[np.ndarray], done: set[int]) -> str:
    heads = []
    for mesh, lane in enumerate(lanes):
        blocked = next((task for task in np.asarray(lane).tolist() if task not in done), None)
        if blocked is not None:
            heads.append(f"{problem.spec.meshes[mesh].name} at {action_name(problem, blocked)}")
    return (
        f"the compute orders wait for each other for ever ({', '.join(heads[:4])}): move those actions later"
    )


def _receive_limit_message(problem: Problem, lanes: Sequence[np.ndarray], done: set[int]) -> str:
    for mesh, lane in enumerate(lanes):
        limit = int(problem.receive_limit[mesh])
        left = [task for task in receives_by_first_use(problem, lane) if task not in done]
        if limit >= 0 and left:
            needed = needed_receive_buffers(problem, lanes[mesh])
            if needed > limit:
                return (
                    f"mesh {problem.spec.meshes[mesh].name!r} has receive_buffer_limit {limit}, but this order needs "
                    f"{needed} received tensors at once: raise the limit to {needed}"
                )
    return "the receive buffers are too few for this order: raise receive_buffer_limit"
