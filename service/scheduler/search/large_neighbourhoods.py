"""Large neighbourhood search: keep most of a plan's orders, let the solver rearrange the rest, repeat.

For problems too large to solve at once. Deterministic: one seeded generator, the solver's own time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.scheduler.model.problem import OPS, WEIGHT, Problem
from service.scheduler.model.timeline import Timeline
from service.scheduler.search import exact, exact_model

_STEP = 0.04  # deterministic time of one neighbourhood
_PLAIN = 2.0  # without presolve the solver takes longer for a unit of its time
_BUILD = 2e-6  # what building the model costs, for each of its literals


def large_neighbourhood_search(
    problem: Problem,
    timeline: Timeline,
    *,
    lower_bound_s: float,
    deterministic_limit: float,
    seed: int,
    stop: Callable[[], bool],
) -> Timeline:
    """A timeline at least as short, found by freeing random windows of time, groups of meshes, or all W."""
    generator = np.random.default_rng(seed)
    build = _BUILD * exact_model.model_size(problem)
    spent = 0.0
    while spent < deterministic_limit and timeline.makespan > lower_bound_s * (1 + 1e-9) and not stop():
        fixed = ~_free_tasks(problem, timeline, generator)
        better, cost = exact.rearrange(
            problem, timeline, fixed, lower_bound_s=lower_bound_s, deterministic_limit=_STEP
        )
        spent += _PLAIN * cost + build + 0.002
        if better is not None and better.makespan < timeline.makespan:
            timeline = better
    return timeline


def _free_tasks(problem: Problem, timeline: Timeline, generator: np.random.Generator) -> np.ndarray:
    choice = int(generator.integers(3))
    if choice == 0:
        return _window(timeline, generator, 0.15, 0.45)
    if choice == 1:
        count = int(generator.integers(1, max(2, problem.meshes // 2) + 1))
        if generator.random() < 0.5:
            meshes = generator.permutation(problem.meshes)[:count]
        else:
            meshes = (np.arange(count) + generator.integers(problem.meshes)) % problem.meshes
        kinds = np.isin(problem.sender_of_kind, meshes) | np.isin(problem.receiver_of_kind, meshes)
        return np.repeat(kinds, problem.microbatches)
    free = np.zeros((problem.kinds, problem.microbatches), dtype=bool)
    free[WEIGHT : problem.compute_kinds : OPS] = True
    return free.reshape(-1) | _window(timeline, generator, 0.1, 0.3)


def _window(timeline: Timeline, generator: np.random.Generator, least: float, most: float) -> np.ndarray:
    width = timeline.makespan * generator.uniform(least, most)
    begin = generator.uniform(-width / 2, timeline.makespan - width / 2)
    return (timeline.end > begin) & (timeline.start < begin + width)
