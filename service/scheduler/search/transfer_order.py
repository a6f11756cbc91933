"""Improves the order of transfers while the compute orders stay; never longer than the order by urgency.

The dispatcher serves the most urgent transfer that is ready; where transfers share ports or lanes, waiting for a
better one may pay. Tabu search moves transfers only, then the exact solver rearranges them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.scheduler.kernels import TOLERANCE
from service.scheduler.problem.memory import keeps_memory_limits, keeps_receive_limits
from service.scheduler.problem.timeline import Timeline, earliest_times, lane_edges
from service.scheduler.search import exact
from service.scheduler.search.tabu import tabu_search

_MAX_TABU_TASK_ITERATIONS = 25_000_000  # work: tasks times iterations of one tabu search,
_MAX_ITERATIONS = 30_000  # at most so many of these,
_SEEDS = (1, 2, 3)
_MAX_SOLVER_TIME = 0.5  # and the solver's deterministic time,
_LARGEST_MODEL = 3_000  # for models up to this size


def improve_transfers(timeline: Timeline, *, effort: float, stop: Callable[[], bool]) -> Timeline:
    """A timeline with the same compute orders that is no longer; `effort` scales the work, 1 is about a second."""
    problem = timeline.problem
    if not problem.contended or effort <= 0:
        return timeline
    goal_s = makespan_bound_of_orders(timeline) * (1 + TOLERANCE)
    best = timeline
    iterations = int(effort * min(_MAX_ITERATIONS, _MAX_TABU_TASK_ITERATIONS / len(timeline.sequence)))
    for seed in _SEEDS:
        if best.makespan <= goal_s or stop():
            break
        found = tabu_search(
            problem, best, goal_s=goal_s, iterations=iterations, seed=seed, stop=stop, keep_compute=True
        )
        best = _shorter(best, found)
    if best.makespan > goal_s and not stop() and exact.exact_model_size(problem) <= _LARGEST_MODEL:
        compute = np.arange(problem.tasks) < problem.compute_tasks
        found, _ = exact.rearrange(
            problem, best, compute, lower_bound_s=0.0, deterministic_limit=effort * _MAX_SOLVER_TIME
        )
        if found is not None:
            best = _shorter(best, found)
    return best


def makespan_bound_of_orders(timeline: Timeline) -> float:
    """No order of transfers is shorter than the compute orders with transfers that occupy nothing."""
    problem = timeline.problem
    times = earliest_times(problem, problem.dependency_edges, lane_edges(timeline.lanes))
    return float((times.start + problem.duration.reshape(-1))[times.topological].max())


def _shorter(best: Timeline, found: Timeline) -> Timeline:
    shorter = found.makespan < best.makespan * (1 - TOLERANCE)
    return found if shorter and keeps_receive_limits(found) and keeps_memory_limits(found) else best
