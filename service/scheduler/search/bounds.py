"""Lower bounds on the makespan, before any plan exists; for any acyclic stage graph and placement.

The seven of the literature, one-machine relaxations, and memory times time. Microbatches are interchangeable:
give the j-th run of every kind to microbatch j, and dependencies, resources and what is held at any time stay as
they were. So every kind may be assumed to run them in order, which strengthens heads and tails.
Microbatches of different length buckets are not: no order among them is assumed. The exchange holds inside a bucket,
and sums over microbatches, least heads, least tails and least sizes hold for any order.
Each bound says why it holds. A bound above a makespan that was reached is a defect (`drop_refuted_bounds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from service.scheduler import kernels
from service.scheduler.kernels import BACKWARD, FORWARD, TOLERANCE, WEIGHT
from service.scheduler.problem.defects import defect
from service.scheduler.problem.problem import Problem
from service.scheduler.problem.timeline import earliest_times

_MAX_ONE_MACHINE_TASKS = 200_000  # tasks; beyond, one-machine relaxations are left out


@dataclass(frozen=True, eq=False)
class _KindPaths:
    """float[kinds, buckets]: earliest start of the first task, least time after the end of the last, and length."""

    head: np.ndarray
    tail: np.ndarray
    length: np.ndarray


def lower_bound(problem: Problem) -> float:
    """The best of all bounds, in seconds."""
    return max(lower_bounds(problem).values())


def lower_bounds(problem: Problem) -> dict[str, float]:
    """Each bound by name, in seconds."""
    if problem.splits and problem.fused.any():
        problem = problem.all_split()
    paths, trips = _kind_paths(problem), _round_trips(problem)
    bounds = {
        "critical path": float((paths.head + paths.length + paths.tail)[_exists(problem)].max()),
        "mesh work": _mesh_work_bound(problem, paths, weights=True),
        "input gradient work": 0.0 if problem.inference else _mesh_work_bound(problem, paths, weights=False),
        "first backward": 0.0 if problem.inference else _first_backward_bound(problem, paths),
        "in flight": 0.0 if problem.inference else _in_flight_bound(problem, paths, trips),
        "memory time": 0.0 if problem.inference else _memory_time_bound(problem, paths, trips),
        "link": _link_bound(problem, paths),
        "uniform chain": _uniform_chain_bound(problem, paths),
    }
    if problem.tasks <= _MAX_ONE_MACHINE_TASKS:
        bounds["one machine"] = _one_machine_bound(problem)
    return bounds


def drop_refuted_bounds(bounds: Mapping[str, float], makespan: float) -> tuple[dict[str, float], list[str]]:
    """The bounds without those above a makespan that was reached, and a note on each dropped one.

    Raises SchedulerDefect where defects are errors.
    """
    kept, notes = {}, []
    for name, bound in bounds.items():
        if bound <= makespan * (1 + TOLERANCE):
            kept[name] = bound
        else:
            notes.append(
                defect(
                    f"bound {name!r} of {bound!r} s is above the makespan {makespan!r} s that was reached: dropped"
                )
            )
    return kept, notes


def _exists(problem: Problem) -> np.ndarray:
    """bool[kinds, buckets]."""
    return problem.exists[:, problem.representatives]


def _kind_paths(problem: Problem) -> _KindPaths:
    order = np.argsort(problem.kind_rank)
    heads, tails, lengths = [], [], []
    for microbatch in problem.representatives.tolist():
        length = problem.duration[:, microbatch]
        head = np.zeros(problem.kinds)
        for kind in order.tolist():
            for after in problem.dependents[kind]:
                head[after] = max(head[after], head[kind] + length[kind])
        heads.append(head)
        tails.append(kernels.tails(*problem.dependent_rows, length.copy(), order, len(order)) - length)
        lengths.append(length)
    return _KindPaths(*(np.column_stack(columns) for columns in (heads, tails, lengths)))


def _work(problem: Problem, length: np.ndarray) -> float:
    """Seconds of all microbatches, from the lengths float[kinds, buckets] of some kinds."""
    return sum(
        count * float(length[:, bucket].sum()) for bucket, count in enumerate(problem.bucket_sizes.tolist())
    )


def _kinds_of_mesh(problem: Problem, mesh: int, ops: tuple[int, ...]) -> np.ndarray:
    stages = np.flatnonzero(problem.mesh_of_stage == mesh)
    kinds = np.array([problem.kind(s, op) for s in stages.tolist() for op in ops], dtype=np.int64)
    return kinds[problem.exists[kinds, 0]]


def _without_forwards(problem: Problem, kinds: np.ndarray) -> np.ndarray:
    return kinds[problem.stage_and_op(kinds)[1] != FORWARD]


def _mesh_work_bound(problem: Problem, paths: _KindPaths, *, weights: bool) -> float:
    """Bounds 2 and 3: what a mesh must run (with or without W), between its first and its last action.

    The lane runs one action at a time, the first not before the least head, and after the last comes at least
    the least tail. A forward is never the last: its backward follows on the same lane.
    """
    best = 0.0
    for mesh in range(problem.meshes):
        ops = (FORWARD, BACKWARD, WEIGHT) if weights else (FORWARD, BACKWARD)
        kinds = _kinds_of_mesh(problem, mesh, ops)
        if not problem.inference:  # a forward is never the last
            final = _without_forwards(problem, kinds)
        else:
            final = kinds
        work = _work(problem, paths.length[kinds])
        best = max(best, float(paths.head[kinds].min() + work + paths.tail[final].min()))
    return best


def _first_backward_bound(problem: Problem, paths: _KindPaths) -> float:
    """Bound 4: until the first backward of a mesh only forwards run, as many as its memory holds.

    That backward starts at some t ≥ the least head of one; before t the lane worked min(t − first head, K) at
    most, K the forwards that fit into the memory together; the rest of its work comes after t. t less that
    minimum does not fall as t grows, so its value at the least t is a bound.
    """
    best = 0.0
    limits = _mesh_limits(problem)
    for mesh in range(problem.meshes):
        stages = np.flatnonzero(problem.mesh_of_stage == mesh).tolist()
        kinds = _kinds_of_mesh(problem, mesh, (FORWARD, BACKWARD, WEIGHT))
        backward = min(float(paths.head[problem.kind(s, BACKWARD)].min()) for s in stages)
        first = float(paths.head[kinds].min())
        before = min(_forward_work(problem, stages, int(limits[mesh])), backward - first)
        tail = float(paths.tail[_without_forwards(problem, kinds)].min())
        work = _work(problem, paths.length[kinds])
        best = max(best, backward + work - before + tail)
    return best


def _forward_work(problem: Problem, stages: list[int], limit: int) -> float:
    """Most seconds of forwards that a mesh can run before any backward (a fractional knapsack, from above)."""
    forward_s = problem.duration[:, problem.representatives]
    activation = problem.activation_by_microbatch[:, problem.representatives]
    sizes = problem.bucket_sizes.tolist()
    free, sized = 0.0, []
    for bucket, count in enumerate(sizes):
        seconds = {s: float(forward_s[problem.kind(s, FORWARD), bucket]) for s in stages}
        free += sum(seconds[s] for s in stages if limit < 0 or not activation[s, bucket]) * count
        sized += [(seconds[s], int(activation[s, bucket]), count) for s in stages if activation[s, bucket]]
    if limit < 0:
        return float(free)
    if len(sized) == 1:
        seconds_each, held, count = sized[0]
        return float(free + min(limit // held, count) * seconds_each)
    left = float(limit)
    for seconds_each, held, most in sorted(sized, key=lambda item: -item[0] / item[1]):
        count = min(left / held, most)
        free += count * seconds_each
        left -= count * held
    return float(free)


def _stage_limits(problem: Problem) -> np.ndarray:
    """int[stages], −1 where there is none: what a mesh holds of activations at most when a forward of a stage begins.

    Under `memory_bytes` a forward's own tensors lie beside it: those that it received from the start of their
    transfers to its end, so with all that is held when it begins; those that it sends from its end to the end of
    their transfers, and no backward of its lane has ended since it began. Only where all of these actions take
    longer than the tolerance within which two times are one instant.
    """
    limits = problem.relaxed_activation_limit[problem.mesh_of_stage]
    least = 2 * TOLERANCE * float(problem.duration.sum())
    length = problem.duration.max(axis=1) if problem.interchangeable else problem.duration.min(axis=1)
    for stage in range(problem.stages):
        mesh, forward = int(problem.mesh_of_stage[stage]), problem.kind(stage, FORWARD)
        backwards = _without_forwards(problem, _kinds_of_mesh(problem, mesh, (BACKWARD, WEIGHT)))
        if problem.memory_limit[mesh] < 0 or min(length[forward], *length[backwards]) <= least:
            continue
        received = _lasting_bytes(problem, problem.dependencies[forward], length > least)
        sent = _lasting_bytes(problem, problem.dependents[forward], length > least)
        room = problem.memory_limit[mesh] - problem.static_bytes[mesh] - max(received, sent)
        limits[stage] = max(min(limits[stage], room), 0)
    return limits


def _lasting_bytes(problem: Problem, kinds: list[int], lasting: np.ndarray) -> int:
    return sum(int(problem.least_size[kind]) for kind in kinds if lasting[kind])


def _mesh_limits(problem: Problem) -> np.ndarray:
    """int[meshes], −1 where there is none: a mesh holds most when a forward of one of its stages begins."""
    stages = _stage_limits(problem)
    limits = problem.relaxed_activation_limit.copy()
    for mesh in np.flatnonzero(limits >= 0).tolist():
        limits[mesh] = stages[(problem.mesh_of_stage == mesh) & (problem.activation > 0)].max(initial=-1)
        if limits[mesh] < 0:
            limits[mesh] = problem.relaxed_activation_limit[mesh]
    return limits


def in_flight_caps(problem: Problem) -> list[int]:
    """For each stage how many microbatches may be between F and the end of its backward's first part."""
    caps = []
    limits = _stage_limits(problem)
    for stage in range(problem.stages):
        limit = int(limits[stage])
        cap = problem.microbatches
        if limit >= 0 and problem.activation[stage]:
            cap = min(cap, _microbatches_that_fit(problem, stage, limit))
        if problem.spec.max_in_flight is not None and not problem.sources[stage]:
            cap = min(cap, problem.spec.max_in_flight)
        caps.append(max(cap, 1))
    return caps


def _microbatches_that_fit(problem: Problem, stage: int, limit: int) -> int:
    """The most microbatches whose activations of a stage fit together: the smallest."""
    if problem.interchangeable:
        return limit // int(problem.activation[stage])
    held = np.cumsum(np.sort(problem.activation_by_microbatch[stage]))
    return int(np.searchsorted(held, limit, side="right"))


def _round_trips(problem: Problem) -> np.ndarray:
    """float[stages, buckets]: least seconds from the start of a forward to the end of its backward's first part.

    The longest path that begins with that forward itself. A wait for another branch, at a join before the
    backward, is not on it: the first microbatch pays it, and a later one may find it paid.
    """
    trips = np.zeros((problem.stages, len(problem.representatives)))
    order = np.argsort(problem.kind_rank).tolist()
    for bucket, microbatch in enumerate(problem.representatives.tolist()):
        length = problem.duration[:, microbatch]
        for stage in range(problem.stages):
            end = np.full(problem.kinds, -np.inf)
            forward = problem.kind(stage, FORWARD)
            end[forward] = length[forward]
            for kind in order:
                if end[kind] == -np.inf:
                    continue
                for after in problem.dependents[kind]:
                    end[after] = max(end[after], end[kind] + length[after])
            trips[stage, bucket] = end[problem.kind(stage, BACKWARD)]
    return trips


def _in_flight_bound(problem: Problem, paths: _KindPaths, trips: np.ndarray) -> float:
    """Bound 5: with k in flight, forward m starts after backward m − k has ended, a round trip after its forward.

    So forward r + q k (r < k) starts at least q round trips after forward r, which starts r forwards after the
    first of its stage. What recurs each round is the path from the forward to its own backward; the
    earliest start of the first forward counts once, at the beginning.
    In any order: let f(n) be the start of the n-th forward to begin. When number n = r + k begins, at least r + 1
    microbatches have come back; one of them began as number r or later, so f(r + k) is a round trip, of the
    microbatch with the shortest, behind f(r).
    """
    best = 0.0
    for stage, cap in enumerate(in_flight_caps(problem)):
        forward, backward = problem.kind(stage, FORWARD), problem.kind(stage, BACKWARD)
        rounds, rest = divmod(problem.microbatches - 1, cap)
        trip = trips[stage].min()
        last = paths.head[forward].min() + rounds * trip + rest * paths.length[forward].min()
        best = max(best, float(last + trip + paths.tail[backward].min()))
    return best


def _memory_time_bound(problem: Problem, paths: _KindPaths, trips: np.ndarray) -> float:
    """Bytes times seconds that the microbatches hold on a mesh fit into its limit times its time.

    A microbatch holds a stage's activation for at least the round trip, and its stash for at least W. All of it
    lies between the earliest forward of the mesh and the last action that gives something back.
    Bytes of unequal microbatches are rounded, too, so that what leaves no room for another counts as the whole limit:
    whatever fits together at a time still does so (see `_rounded`).
    """
    best = 0.0
    limits = _mesh_limits(problem)
    for mesh in range(problem.meshes):
        limit = int(limits[mesh])
        if limit <= 0:
            continue
        stages = np.flatnonzero(problem.mesh_of_stage == mesh)
        weight_s = paths.length[problem.kind(stages, WEIGHT)]  # 0 where a backward is not split
        here = np.ix_(stages, problem.representatives)
        activation, stash = problem.activation_by_microbatch[here], problem.stash_by_microbatch[here]
        kinds = _kinds_of_mesh(problem, mesh, (BACKWARD, WEIGHT))
        head = float(paths.head[problem.kind(stages, FORWARD)].min())
        for threshold in [0] if problem.interchangeable else _thresholds(activation, limit):
            held = _rounded(activation, limit, threshold) * trips[stages]
            held = held + _rounded(stash, limit, threshold) * weight_s
            span = _work(problem, held) / limit
            best = max(best, head + span + float(paths.tail[kinds].min()))
    return best


def _rounded(sizes: np.ndarray, limit: int, threshold: int) -> np.ndarray:
    """Sizes above limit − threshold count as the limit, those below the threshold as nothing.

    A dual feasible function (Fekete and Schepers 2001) of whole sizes, for thresholds up to half of limit + 1: of sizes
    that fit into the limit together at most one is above limit − threshold, and beside it all others are below the
    threshold; where none is, no size grows. It does not fall as sizes grow, so what is given back in part still fits.
    """
    if not threshold:
        return sizes
    return np.where(sizes > limit - threshold, limit, np.where(sizes < threshold, 0, sizes))


def _thresholds(sizes: np.ndarray, limit: int) -> list[int]:
    """0, and the thresholds from which another size counts as the whole limit, or up to which one counts."""
    found = {0, *sizes.ravel().tolist(), *(limit - sizes + 1).ravel().tolist()}
    return sorted(threshold for threshold in found if 0 <= threshold <= (limit + 1) // 2)


def _link_bound(problem: Problem, paths: _KindPaths) -> float:
    """Bound 6 for whatever transfers occupy (links, ports, or with overlap off the lanes themselves).

    One at a time, none before the least head, and after the last of them the least tail.
    """
    best = 0.0
    there = _exists(problem)[:, 0]
    for resource in np.unique(problem.resources[problem.compute_kinds :]).tolist():
        if resource < 0:
            continue
        kinds = np.flatnonzero(problem.kinds_on(resource) & there)
        if not len(kinds):
            continue
        work = _work(problem, paths.length[kinds])
        best = max(best, float(paths.head[kinds].min() + work + paths.tail[kinds].min()))
    return best


def _uniform_chain_bound(problem: Problem, paths: _KindPaths) -> float:
    """Bound 7, unsplit: a stage waits for its first forward, works, and the gradient of its last backward goes on.

    As bound 2, for the actions of one stage alone: the last of them is a backward.
    """
    if problem.splits or problem.inference:
        return 0.0
    best = 0.0
    for stage in range(problem.stages):
        forward, backward = problem.kind(stage, FORWARD), problem.kind(stage, BACKWARD)
        work = _work(problem, paths.length[[forward, backward]])
        best = max(best, float(paths.head[forward].min() + work + paths.tail[backward].min()))
    return best


def _one_machine_bound(problem: Problem) -> float:
    """Every resource alone, preemptive, with each task's head and tail (Jackson's bound).

    Heads and tails are longest paths over dependencies, the order within kinds (the exchange argument above: of the
    microbatches of one bucket), and, where all are interchangeable, forward m after backward m − k where at most k are
    in flight.
    """
    head, tail = _task_paths(problem)
    exists, duration = problem.exists.reshape(-1), problem.duration.reshape(-1)
    best = float((head + tail)[exists].max())
    for resource in problem.exclusive_resources:
        members = np.flatnonzero(problem.kinds_on(resource))
        tasks = (members[:, None] * problem.microbatches + np.arange(problem.microbatches)).reshape(-1)
        tasks = tasks[exists[tasks]]
        order = tasks[np.argsort(head[tasks], kind="stable")]
        best = max(best, kernels.jackson_makespan(head[order], duration[order], (tail - duration)[order]))
    return best


def _task_paths(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(head, tail with own length) of tasks: dependencies, order within kinds, and caps from memory."""
    microbatches, exists = problem.microbatches, problem.exists
    edges = [problem.dependency_edges]
    row = np.arange(microbatches, dtype=np.int64)
    later = row[problem.previous_in_bucket >= 0]
    earlier = problem.previous_in_bucket[later]
    for kind in np.flatnonzero(exists[:, 0] & (problem.resources >= 0).any(axis=1)).tolist():
        edges.append((kind * microbatches + earlier, kind * microbatches + later))
    if problem.interchangeable and not problem.inference:
        for stage, cap in enumerate(in_flight_caps(problem)):
            if cap < microbatches:
                backward, forward = problem.kind(stage, BACKWARD), problem.kind(stage, FORWARD)
                edges.append((backward * microbatches + row[:-cap], forward * microbatches + row[cap:]))
    times = earliest_times(problem, *edges)
    return times.start, times.tails()
