"""Tabu search from a good timeline to a better one: neighbours on its critical paths change places.

Says what may change places and what a task holds; the moves themselves are kernels/tabu.py.
Deterministic: seeded, counted in iterations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.scheduler import kernels
from service.scheduler.model.memory import activation_changes
from service.scheduler.model.problem import FORWARD, Problem
from service.scheduler.model.timeline import Timeline, compress_edges, make_timeline

_PATIENCE = 20_000  # iterations without gain after which a round ends
_ROUND_TASKS = 50_000_000  # iterations times tasks of a round at most: between two looks at the deadline
_TENURES = (20, 40, 80)  # iterations for which a move may not be taken back; each round draws one


def tabu_search(
    problem: Problem,
    timeline: Timeline,
    *,
    goal_s: float,
    iterations: int,
    seed: int,
    stop: Callable[[], bool],
    keep_compute: bool = False,
) -> Timeline:
    """A timeline at least as short; rounds of the search, each from the best so far.

    Keeps the activation limits and max_in_flight, not the limits of receive buffers. Ends at `goal_s`, when
    `stop` says so, or after `iterations`. With `keep_compute` the compute orders stay and only transfers move.
    """
    disjunctive = _disjunctive(problem, keep_compute)
    generator = np.random.default_rng(seed)
    while iterations > 0 and timeline.makespan > goal_s and not stop():
        start, order, used = kernels.tabu_round(
            disjunctive,
            timeline.sequence,
            goal_s,
            min(iterations, 1 + _ROUND_TASKS // problem.tasks),
            _PATIENCE,
            int(generator.choice(_TENURES)),
            int(generator.integers(2**31)),
        )
        iterations -= max(used, 1)
        found = make_timeline(problem, start, order)
        if found.makespan < timeline.makespan:
            timeline = found
    return timeline


def _disjunctive(problem: Problem, keep_compute: bool) -> kernels.Disjunctive:
    causes, effects = problem.dependency_edges
    exists = problem.exists.reshape(-1)
    limit = np.full(problem.resource_count, -1, dtype=np.int64)
    lead = np.full(problem.kinds, -1, dtype=np.int64)
    if not problem.inference:
        limit[: problem.meshes] = problem.activation_limit
        if problem.spec.max_in_flight is not None:
            sources = [stage for stage in range(problem.stages) if not problem.sources[stage]]
            lead[problem.kind(np.array(sources), FORWARD)] = problem.spec.max_in_flight
    tasks = np.zeros(problem.tasks, dtype=kernels.TASK)
    tasks["exists"], tasks["missing"], tasks["duration"] = (
        exists,
        problem.missing,
        problem.duration.reshape(-1),
    )
    compute = np.flatnonzero(exists[: problem.compute_tasks])
    tasks["change"][compute] = activation_changes(problem, compute).sum(axis=1)
    return kernels.Disjunctive(
        microbatches=problem.microbatches,
        resource_count=problem.resource_count,
        fixed_kinds=problem.compute_kinds if keep_compute else 0,
        tasks=tasks,
        dependents=compress_edges(problem.tasks, causes, effects),
        needs=compress_edges(problem.tasks, effects, causes),
        resources=np.where(exists[:, None], np.repeat(problem.resources, problem.microbatches, axis=0), -1),
        precedes=problem.precedes,
        limit=limit,
        lead=lead,
    )
