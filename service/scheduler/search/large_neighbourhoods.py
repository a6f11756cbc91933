"""Large neighbourhood search: CP-SAT rearranges one random window of a plan after another.

Each neighbourhood is a window of the timeline with a model of its own, of the window's size: for problems too
large to solve at once. Windows free a stretch of time, a group of meshes, or W. Deterministic: one seeded
generator, the solver's own time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.scheduler.kernels import OPS, WEIGHT
from service.scheduler.problem.memory import (
    keeps_activation_limits,
    keeps_memory_limits,
    keeps_receive_limits,
)
from service.scheduler.problem.problem import Problem
from service.scheduler.problem.timeline import Timeline
from service.scheduler.search import exact
from service.scheduler.search.windows import Window, WindowCutter, has_buffer_limits

_MAX_STEP_TIME = 0.04  # deterministic time of one neighbourhood at most,
_MIN_STEP_TIME = 0.004  # and at least
_PACE = 2.0  # without presolve the solver takes longer for a unit of its time
_PACE_WITH_BUFFERS = 3.0  # and where buffers are counted longer still
_BUILD_TIME_PER_TASK = 1.2e-5  # what building and loading the model costs, for each task of the window,
_CUT_TIME_PER_TASK = 1.5e-8  # cutting the window out, for each task of the timeline,
_REPLAY_TIME_PER_TASK = 2.5e-7  # and playing all of them again where the solver found something
_MAX_WINDOW_TASKS = 2_500  # tasks of a window where few meshes are free, and where W is
_MAX_FREE_TASKS = 900  # tasks of a window where all are


def large_neighbourhood_search(
    problem: Problem,
    timeline: Timeline,
    *,
    lower_bound_s: float,
    deterministic_limit: float,
    seed: int,
    stop: Callable[[], bool],
) -> Timeline:
    """A timeline at least as short within all limits, found by freeing random windows of time, groups of meshes, or W."""
    generator = np.random.default_rng(seed)
    scale, lengths = exact.integer_durations(problem)
    paths = WindowCutter(timeline)
    pace = _PACE_WITH_BUFFERS if has_buffer_limits(problem) else _PACE
    spent = _REPLAY_TIME_PER_TASK * len(timeline.sequence)
    while timeline.makespan > lower_bound_s * (1 + 1e-9) and not stop():
        step = min(_MAX_STEP_TIME, (deterministic_limit - spent) / pace)
        if step < _MIN_STEP_TIME:
            break
        window, free = _choose_neighbourhood(paths, generator)
        better, cost = exact.rearrange_window(window, ~free, lengths, scale, deterministic_limit=step)
        spent += (
            pace * cost
            + _BUILD_TIME_PER_TASK * len(window.tasks)
            + _CUT_TIME_PER_TASK * len(timeline.sequence)
            + 0.002
        )
        if better is not None:
            spent += _REPLAY_TIME_PER_TASK * len(timeline.sequence)
        if better is not None and better.makespan < timeline.makespan and _keeps_all_limits(better):
            timeline = better
            paths = WindowCutter(timeline)
    return timeline


def _keeps_all_limits(timeline: Timeline) -> bool:
    within = keeps_activation_limits(timeline.problem, timeline.lanes) and keeps_receive_limits(timeline)
    return within and keeps_memory_limits(timeline)


def _choose_neighbourhood(paths: WindowCutter, generator: np.random.Generator) -> tuple[Window, np.ndarray]:
    """A window, and which of its tasks may change places."""
    problem, tasks = paths.timeline.problem, len(paths.timeline.sequence)
    choice = int(generator.integers(3))
    if choice == 0:
        window = _random_window(paths, generator, min(_MAX_FREE_TASKS, tasks * generator.uniform(0.15, 0.45)))
        return window, np.ones(len(window.tasks), dtype=bool)
    window = _random_window(paths, generator, min(_MAX_WINDOW_TASKS, tasks))
    kinds = window.tasks // problem.microbatches
    if choice == 1:
        count = int(generator.integers(1, max(2, problem.meshes // 2) + 1))
        if generator.random() < 0.5:
            meshes = generator.permutation(problem.meshes)[:count]
        else:
            meshes = (np.arange(count) + generator.integers(problem.meshes)) % problem.meshes
        free = np.isin(problem.sender_of_kind, meshes) | np.isin(problem.receiver_of_kind, meshes)
        return window, free[kinds]
    weights = (kinds < problem.compute_kinds) & (kinds % OPS == WEIGHT)
    width = min(_MAX_FREE_TASKS, tasks * generator.uniform(0.1, 0.3))
    begin = int(generator.integers(-int(width / 2), len(window.tasks)))
    place = np.arange(len(window.tasks))
    return window, weights | ((place >= begin) & (place < begin + width))


def _random_window(paths: WindowCutter, generator: np.random.Generator, width: float) -> Window:
    """A window of `width` tasks at a random place; of fewer at the beginning and at the end."""
    tasks = len(paths.timeline.sequence)
    first = int(generator.uniform(-width / 2, tasks - width / 2)) if width < tasks else 0
    return paths.window(max(first, 0), min(max(first + int(width), 1), tasks))
