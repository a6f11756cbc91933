"""Lower bounds on the makespan, before any plan exists; for any acyclic stage graph and placement.

The seven of the literature and one-machine relaxations. Microbatches are alike, so every kind may be
assumed to run them in order (exchange argument), which strengthens heads and tails.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.scheduler import kernels
from service.scheduler.model.problem import BACKWARD, FORWARD, WEIGHT, Problem
from service.scheduler.model.timeline import earliest_times

_LARGEST_EXACT = 200_000  # tasks; beyond, one-machine relaxations are left out


@dataclass(frozen=True, eq=False)
class _Paths:
    """For each kind: earliest start of its first task, and the least time after the end of its last."""

    head: np.ndarray
    tail: np.ndarray
    length: np.ndarray


def lower_bound(problem: Problem) -> float:
    """The best of all bounds, in seconds."""
    return max(lower_bounds(problem).values())


def lower_bounds(problem: Problem) -> dict[str, float]:
    """Each bound by name, in seconds."""
    if problem.splits and problem.fused.any():
        # B is I and W back to back: with all backwards split the optimum can only be shorter
        problem = problem.with_fused(np.zeros_like(problem.fused))
    paths = _paths(problem)
    bounds = {
        "critical path": float((paths.head + paths.length + paths.tail)[problem.exists[:, 0]].max()),
        "mesh work": _work(problem, paths, weights=True),
        "input gradient work": 0.0 if problem.inference else _work(problem, paths, weights=False),
        "first backward": 0.0 if problem.inference else _first_backward(problem, paths),
        "in flight": 0.0 if problem.inference else _in_flight(problem, paths),
        "link": _links(problem, paths),
        "uniform chain": _uniform_chain(problem, paths),
    }
    if problem.tasks <= _LARGEST_EXACT:
        bounds["one machine"] = _one_machine(problem)
    return bounds


def _paths(problem: Problem) -> _Paths:
    length = problem.duration[:, 0]
    head = np.zeros(problem.kinds)
    order = np.argsort(problem.kind_rank)
    for kind in order.tolist():
        for after in problem.dependents[kind]:
            head[after] = max(head[after], head[kind] + length[kind])
    tail = kernels.tails(*problem.dependent_rows, length.copy(), order, len(order)) - length
    return _Paths(head, tail, length)


def _kinds_of_mesh(problem: Problem, mesh: int, ops: tuple[int, ...]) -> np.ndarray:
    stages = np.flatnonzero(problem.mesh_of_stage == mesh)
    kinds = np.array([problem.kind(s, op) for s in stages.tolist() for op in ops], dtype=np.int64)
    return kinds[problem.exists[kinds, 0]]


def _without_forwards(problem: Problem, kinds: np.ndarray) -> np.ndarray:
    return kinds[problem.stage_and_op(kinds)[1] != FORWARD]


def _work(problem: Problem, paths: _Paths, *, weights: bool) -> float:
    """Bounds 2 and 3: what a mesh must run (with or without W), between its first and its last action."""
    best = 0.0
    for mesh in range(problem.meshes):
        ops = (FORWARD, BACKWARD, WEIGHT) if weights else (FORWARD, BACKWARD)
        kinds = _kinds_of_mesh(problem, mesh, ops)
        if not problem.inference:  # a forward is never the last
            final = _without_forwards(problem, kinds)
        else:
            final = kinds
        work = problem.microbatches * paths.length[kinds].sum()
        best = max(best, float(paths.head[kinds].min() + work + paths.tail[final].min()))
    return best


def _first_backward(problem: Problem, paths: _Paths) -> float:
    """Bound 4: until the first backward of a mesh only forwards run, as many as its memory holds."""
    best = 0.0
    for mesh in range(problem.meshes):
        stages = np.flatnonzero(problem.mesh_of_stage == mesh).tolist()
        kinds = _kinds_of_mesh(problem, mesh, (FORWARD, BACKWARD, WEIGHT))
        backward = min(float(paths.head[problem.kind(s, BACKWARD)]) for s in stages)
        first = float(paths.head[kinds].min())
        before = min(_forward_work(problem, stages, int(problem.activation_limit[mesh])), backward - first)
        tail = float(paths.tail[_without_forwards(problem, kinds)].min())
        work = problem.microbatches * float(paths.length[kinds].sum())
        best = max(best, backward + work - before + tail)
    return best


def _forward_work(problem: Problem, stages: list[int], limit: int) -> float:
    """Most seconds of forwards that a mesh can run before any backward (a fractional knapsack, from above)."""
    microbatches = problem.microbatches
    forward_s = [float(problem.duration[problem.kind(s, FORWARD), 0]) for s in range(problem.stages)]
    free = sum(forward_s[s] for s in stages if limit < 0 or not problem.activation[s]) * microbatches
    if limit < 0:
        return float(free)
    sized = [s for s in stages if problem.activation[s]]
    if len(sized) == 1:
        return float(
            free + min(limit // int(problem.activation[sized[0]]), microbatches) * forward_s[sized[0]]
        )
    left = float(limit)
    for stage in sorted(sized, key=lambda s: -forward_s[s] / problem.activation[s]):
        count = min(left / problem.activation[stage], microbatches)
        free += count * forward_s[stage]
        left -= count * problem.activation[stage]
    return float(free)


def in_flight_caps(problem: Problem) -> list[int]:
    """For each stage how many microbatches may be between F and the end of its backward's first part."""
    caps = []
    for stage in range(problem.stages):
        limit = int(problem.activation_limit[problem.mesh_of_stage[stage]])
        cap = problem.microbatches
        if limit >= 0 and problem.activation[stage]:
            cap = min(cap, limit // int(problem.activation[stage]))
        if problem.spec.max_in_flight is not None and not problem.sources[stage]:
            cap = min(cap, problem.spec.max_in_flight)
        caps.append(max(cap, 1))
    return caps


def _in_flight(problem: Problem, paths: _Paths) -> float:
    """Bound 5: with k in flight, forward m waits for the round trip of microbatch m − k."""
    best = 0.0
    for stage, cap in enumerate(in_flight_caps(problem)):
        forward, backward = problem.kind(stage, FORWARD), problem.kind(stage, BACKWARD)
        trip = paths.head[backward] + paths.length[backward] - paths.head[forward]
        rounds, rest = divmod(problem.microbatches - 1, cap)
        last = paths.head[forward] + rounds * trip + rest * paths.length[forward]
        best = max(best, float(last + trip + paths.tail[backward]))
    return best


def _links(problem: Problem, paths: _Paths) -> float:
    """Bound 6 for whatever transfers occupy (links, ports, or with overlap off the lanes themselves)."""
    best = 0.0
    there = problem.exists[:, 0]
    for resource in np.unique(problem.resources[problem.compute_kinds :]).tolist():
        if resource < 0:
            continue
        kinds = np.flatnonzero(problem.kinds_on(resource) & there)
        if not len(kinds):
            continue
        work = problem.microbatches * paths.length[kinds].sum()
        best = max(best, float(paths.head[kinds].min() + work + paths.tail[kinds].min()))
    return best


def _uniform_chain(problem: Problem, paths: _Paths) -> float:
    """Bound 7, unsplit: the last stage waits for the first forward, works, and its last gradient goes back."""
    if problem.splits or problem.inference:
        return 0.0
    best = 0.0
    for stage in range(problem.stages):
        forward, backward = problem.kind(stage, FORWARD), problem.kind(stage, BACKWARD)
        work = problem.microbatches * (paths.length[forward] + paths.length[backward])
        best = max(best, float(paths.head[forward] + work + paths.tail[backward]))
    return best


def _one_machine(problem: Problem) -> float:
    """Every resource alone, preemptive, with each task's head and tail (Jackson's bound)."""
    head, tail = _task_paths(problem)
    exists, duration = problem.exists.reshape(-1), problem.duration.reshape(-1)
    best = float((head + tail)[exists].max())
    for resource in problem.exclusive_resources:
        members = np.flatnonzero(problem.kinds_on(resource))
        tasks = (members[:, None] * problem.microbatches + np.arange(problem.microbatches)).reshape(-1)
        tasks = tasks[exists[tasks]]
        order = tasks[np.argsort(head[tasks], kind="stable")]
        best = max(best, kernels.jackson(head[order], duration[order], (tail - duration)[order]))
    return best


def _task_paths(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(head, tail with own length) of tasks: dependencies, order within kinds, and caps from memory."""
    microbatches, exists = problem.microbatches, problem.exists
    edges = [problem.dependency_edges]
    row = np.arange(microbatches, dtype=np.int64)
    for kind in np.flatnonzero(exists[:, 0] & (problem.resources >= 0).any(axis=1)).tolist():
        edges.append((kind * microbatches + row[:-1], kind * microbatches + row[1:]))
    if not problem.inference:
        for stage, cap in enumerate(in_flight_caps(problem)):
            if cap < microbatches:
                backward, forward = problem.kind(stage, BACKWARD), problem.kind(stage, FORWARD)
                edges.append((backward * microbatches + row[:-cap], forward * microbatches + row[cap:]))
    times = earliest_times(problem, *edges)
    return times.start, times.tails()
