"""The dispatcher of the kernels for one problem: what it may hold, and the order in which buffers are taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.scheduler import kernels
from service.scheduler.model.problem import Problem, to_rows

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
        self._limits = kernels.Limits(
            activation=problem.activation,
            stash=problem.stash,
            activation_limit=no_limits if problem.inference else problem.activation_limit,
            in_flight_cap=np.full(stages, NO_LIMIT, dtype=np.int64),
            source_cap=source_cap,
        )
        self._receives = _receives(problem, lanes)

    def run(
        self,
        priority: np.ndarray,
        *,
        in_flight_cap: np.ndarray | None = None,
        patience: float = 0.0,
        activation_limit: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(start, tasks as they began) with `priority` for each task; some are missing where it got stuck.

        `activation_limit` (bytes of each mesh) stands in for the limits of the spec.
        """
        limits = self._limits
        if in_flight_cap is not None:
            limits = limits._replace(in_flight_cap=in_flight_cap)
        if activation_limit is not None:
            limits = limits._replace(activation_limit=activation_limit)
        start, begun, count = kernels.dispatch(
            self._problem.arrays, self._lanes, limits, self._receives, priority, float(patience)
        )
        return start, begun[:count]


def _receives(problem: Problem, lanes: Sequence[np.ndarray] | None) -> kernels.Receives:
    rank = np.full(problem.tasks, -1, dtype=np.int64)
    if lanes is None or not (problem.receive_limit >= 0).any():
        no_limits = np.full(problem.meshes, -1, dtype=np.int64)
        limit = no_limits if lanes is None else problem.receive_limit
        return kernels.Receives(limit, to_rows([[] for _ in range(problem.meshes)]), rank)
    rows = [receives_by_first_use(problem, lane) for lane in lanes]
    for row in rows:
        rank[row] = np.arange(len(row))
    return kernels.Receives(problem.receive_limit, to_rows(rows), rank)


def receives_by_first_use(problem: Problem, lane: np.ndarray) -> list[int]:
    """The transfers that arrive at a mesh, in the order in which its compute order needs them."""
    return list(_uses(problem, lane))


def needed_receive_buffers(problem: Problem, lane: np.ndarray) -> int:
    """Fewest receive buffers with which a mesh can run its compute order."""
    change = np.zeros(len(lane) + 1, dtype=np.int64)
    for first, last in _uses(problem, lane).values():
        change[first] += 1
        change[last + 1] -= 1
    return int(np.cumsum(change).max(initial=0))


def _uses(problem: Problem, lane: np.ndarray) -> dict[int, tuple[int, int]]:
    """For each transfer that arrives here the positions of its first and its last direct user."""
    uses: dict[int, tuple[int, int]] = {}
    for position, task in enumerate(np.asarray(lane).tolist()):
        kind, microbatch = divmod(task, problem.microbatches)
        for need in problem.dependencies[kind]:
            if need >= problem.compute_kinds:
                received = need * problem.microbatches + microbatch
                uses[received] = (uses.get(received, (position,))[0], position)
    return uses
