"""Tabu search from a good timeline to a shorter one, on the whole step or window by window.

Says what may swap and what a task holds; the moves themselves are kernels/tabu.py. Keeps activation limits and
max_in_flight, not the limits of receive buffers. Deterministic: seeded, counted in iterations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.scheduler import kernels
from service.scheduler.kernels import FORWARD
from service.scheduler.problem.memory import activation_changes
from service.scheduler.problem.problem import Problem
from service.scheduler.problem.timeline import Timeline, compress_edges, make_timeline
from service.scheduler.search.windows import Window, WindowCutter

_PATIENCE = 20_000  # iterations without gain after which a round ends
_ROUND_TASKS = 50_000_000  # iterations times tasks of a round at most: between two looks at the deadline
_LARGEST = 12_000  # tasks; more do not fit into the caches, and a round looks at windows of them
_WINDOW = 6_000  # tasks
_WINDOW_ITERATIONS = 3_000
_CUT_ITERATIONS = (
    5  # iterations over a task take as long as cutting a window out of all tasks, for each of these,
)
_REPLAY_ITERATIONS = 40  # and as playing all of them again
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
    generator = np.random.default_rng(seed)
    if len(timeline.sequence) > _LARGEST and not keep_compute:
        return _by_windows(timeline, goal_s, iterations, generator, stop)
    disjunctive = _problem_graph(problem, keep_compute)
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


def _by_windows(
    timeline: Timeline,
    goal_s: float,
    iterations: int,
    generator: np.random.Generator,
    stop: Callable[[], bool],
) -> Timeline:
    """The same budget (iterations over all tasks) spent on one window after the other, at random places."""
    left = iterations * len(timeline.sequence)
    paths = WindowCutter(timeline)
    while left > 0 and timeline.makespan > goal_s and not stop():
        first = int(generator.integers(len(timeline.sequence) - _WINDOW))
        window = paths.window(first, first + _WINDOW)
        tasks, base, width = _window_numbering(window)
        disjunctive = _window_graph(window, tasks, base, width)
        start, order, used = kernels.tabu_round(
            disjunctive,
            tasks,
            goal_s,
            min(_WINDOW_ITERATIONS, 1 + left // _WINDOW),
            _WINDOW_ITERATIONS,
            int(generator.choice(_TENURES)),
            int(generator.integers(2**31)),
        )
        left -= used * _WINDOW + _CUT_ITERATIONS * len(timeline.sequence)
        ends = start[order] + disjunctive.tasks["duration"][order] + disjunctive.tasks["behind"][order]
        if ends.max() >= window.makespan * (1 - kernels.TOLERANCE):
            continue
        kinds, numbers = np.divmod(order[np.argsort(start[order], kind="stable")], width)
        found = window.replay(kinds * timeline.problem.microbatches + numbers + base, np.sort(start[order]))
        left -= _REPLAY_ITERATIONS * len(timeline.sequence)
        if found.makespan < timeline.makespan:
            timeline = found
            paths = WindowCutter(timeline)
    return timeline


def _window_numbering(window: Window) -> tuple[np.ndarray, int, int]:
    """(the window's tasks numbered by its own microbatches only, the first microbatch, their number)."""
    kinds, numbers = np.divmod(window.tasks, window.timeline.problem.microbatches)
    base, width = int(numbers.min()), int(np.ptp(numbers)) + 1
    return kinds * width + numbers - base, base, width


def _window_graph(window: Window, local: np.ndarray, base: int, width: int) -> kernels.DisjunctiveGraph:
    problem = window.timeline.problem
    whole = problem.microbatches
    tasks = np.zeros(problem.kinds * width, dtype=kernels.TABU_TASK_DTYPE)
    causes, effects = ((task // whole) * width + task % whole - base for task in window.dependencies)
    tasks["exists"][local] = True
    tasks["missing"] = np.bincount(effects, minlength=len(tasks))
    tasks["duration"][local] = problem.duration.reshape(-1)[window.tasks]
    tasks["release"][local], tasks["behind"][local] = window.release, window.tail
    compute = window.tasks < problem.compute_tasks
    tasks["change"][local[compute]] = activation_changes(problem, window.tasks[compute]).sum(axis=1)
    limit, lead = _memory_and_lead_limits(problem)
    limit[: problem.meshes] -= np.where(limit[: problem.meshes] < 0, 0, window.held)
    return kernels.DisjunctiveGraph(
        microbatches=width,
        resource_count=problem.resource_count,
        fixed_kinds=0,
        interchangeable=problem.interchangeable,
        tasks=tasks,
        dependents=compress_edges(len(tasks), causes, effects),
        needs=compress_edges(len(tasks), effects, causes),
        resources=np.where(tasks["exists"][:, None], np.repeat(problem.resources, width, axis=0), -1),
        precedes=problem.precedes,
        limit=limit,
        lead=lead,
    )


def _memory_and_lead_limits(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(bytes of each resource, microbatches that each kind may be ahead), −1 where there is no limit."""
    limit = np.full(problem.resource_count, -1, dtype=np.int64)
    lead = np.full(problem.kinds, -1, dtype=np.int64)
    if not problem.inference:
        limit[: problem.meshes] = problem.activation_limit
        if problem.spec.max_in_flight is not None:
            sources = [stage for stage in range(problem.stages) if not problem.sources[stage]]
            lead[problem.kind(np.array(sources), FORWARD)] = problem.spec.max_in_flight
    return limit, lead


def _problem_graph(problem: Problem, keep_compute: bool) -> kernels.DisjunctiveGraph:
    causes, effects = problem.dependency_edges
    exists = problem.exists.reshape(-1)
    limit, lead = _memory_and_lead_limits(problem)
    tasks = np.zeros(problem.tasks, dtype=kernels.TABU_TASK_DTYPE)
    tasks["exists"], tasks["missing"], tasks["duration"] = (
        exists,
        problem.missing,
        problem.duration.reshape(-1),
    )
    compute = np.flatnonzero(exists[: problem.compute_tasks])
    tasks["change"][compute] = activation_changes(problem, compute).sum(axis=1)
    return kernels.DisjunctiveGraph(
        microbatches=problem.microbatches,
        resource_count=problem.resource_count,
        fixed_kinds=problem.compute_kinds if keep_compute else 0,
        interchangeable=problem.interchangeable,
        tasks=tasks,
        dependents=compress_edges(problem.tasks, causes, effects),
        needs=compress_edges(problem.tasks, effects, causes),
        resources=np.where(exists[:, None], np.repeat(problem.resources, problem.microbatches, axis=0), -1),
        precedes=problem.precedes,
        limit=limit,
        lead=lead,
    )
