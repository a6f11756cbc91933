"""Tabu search kernel: swaps neighbours on a critical path of the disjunctive graph, one move an iteration.

Moves after van Laarhoven, Aarts and Lenstra (1992), their value estimated after Taillard (1994), tabu list after
Nowicki and Smutnicki (1996); here for tasks that may occupy two resources, and with memory limits.
Deterministic for a seed: numba's generator of the calling thread is seeded at the start of a round.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from service.scheduler.kernels.arrays import OPS, Rows, compiled, inlined

_EPSILON = 1e-9
# a literal -1 is a type of its own, for which numba would compile the functions that it is handed to once more
_NONE = np.int64(-1)
_TABU_LIST_SIZE = 1 << 18  # places of the tabu list; pairs that share one only forbid each other's moves


TABU_TASK_DTYPE = np.dtype(
    [
        ("exists", np.int32),
        ("missing", np.int32),  # how many others it waits for
        ("duration", np.float64),
        ("change", np.int64),  # bytes that it takes (or gives back) on its lane
        ("release", np.float64),  # it begins no earlier
        ("behind", np.float64),  # the least time from its end to the end of everything
    ]
)


class DisjunctiveGraph(NamedTuple):
    """A problem as graph and resources, task by task."""

    microbatches: int
    resource_count: int
    fixed_kinds: int  # kinds below this number never change places with each other
    interchangeable: bool  # microbatches are interchangeable: every kind runs them in ascending order
    tasks: np.ndarray  # TASK[tasks]
    dependents: Rows  # of tasks
    needs: Rows  # of tasks
    resources: np.ndarray  # int[tasks, 2], −1 for none
    precedes: np.ndarray  # bool[kinds, kinds]: what can never change places
    limit: np.ndarray  # int[resources]: bytes, −1 where there is no limit
    lead: np.ndarray  # int[kinds]: microbatches a forward may be ahead of the backwards of its stage, or −1


# `orders` holds for each task and side its neighbours on that resource, and the bytes held there before it.
_PREDECESSOR, _SUCCESSOR, _HELD_BEFORE = 0, 1, 2
_TIMES_DTYPE = np.dtype(
    [("start", np.float64), ("tail", np.float64)]
)  # tail: the longest path behind its end


class _Moves(NamedTuple):
    """Pairs of neighbours (first, second) that may change places, and the side of `second` on which they are."""

    first: np.ndarray
    second: np.ndarray
    side: np.ndarray


@compiled
def tabu_round(problem, sequence, goal, iterations, patience, tenure, seed):
    """(start, order, iterations used): the best times found from the orders of `sequence`.

    Ends at `goal`, or after `patience` iterations that found nothing better. A move stays forbidden for
    `tenure` to twice as many iterations.
    """
    np.random.seed(seed)  # numba's generator of this thread
    tasks = problem.tasks.shape[0]
    orders = _link_orders(problem, sequence)
    times = np.zeros(tasks, dtype=_TIMES_DTYPE)
    missing = np.empty(tasks, dtype=np.int64)
    order = np.empty(tasks, dtype=np.int64)
    best_start = np.full(tasks, np.inf)
    best_order = sequence.copy()
    best = np.inf
    allowed_from = np.zeros(_TABU_LIST_SIZE, dtype=np.int64)
    places = 2 * tasks
    moves = _Moves(
        np.empty(places, dtype=np.int64), np.empty(places, dtype=np.int64), np.empty(places, dtype=np.int64)
    )
    first, second, on, also_on = _NONE, _NONE, _NONE, _NONE
    improved_at = 0
    iteration = 0
    while iteration < iterations and iteration - improved_at <= patience:
        iteration += 1
        count = _set_starts(problem, orders, times, missing, order)
        if count < sequence.shape[0]:  # only tasks without length can close a cycle: take the move back
            if first < 0:
                break
            _swap(problem, orders, second, first, on)
            if also_on >= 0:
                _swap(problem, orders, second, first, also_on)
            allowed_from[(second * tasks + first) & (_TABU_LIST_SIZE - 1)] = iteration + iterations
            first = -1
            continue
        _set_tails(problem, orders, times, order, count)
        makespan = 0.0
        for index in range(count):
            last = problem.tasks[order[index]]
            makespan = max(makespan, times[order[index]].start + last.duration + last.behind)
        tolerance = _EPSILON * makespan
        if makespan < best - tolerance:
            best = makespan
            for task in range(tasks):
                best_start[task] = times[task].start
            for index in range(count):  # a slice's assignment compiles for seconds
                best_order[index] = order[index]
            improved_at = iteration
            if best <= goal:
                break
        found = _find_moves(problem, orders, times, order, count, makespan, tolerance, moves)
        chosen = _choose_move(problem, orders, times, moves, found, allowed_from, iteration, best, tolerance)
        if chosen < 0:
            continue  # nothing on this path may change places; another one is drawn
        first, second = moves.first[chosen], moves.second[chosen]
        side = moves.side[chosen]
        on, also_on = problem.resources[second, side], problem.resources[second, 1 - side]
        if also_on >= 0 and also_on != problem.resources[first, 0] and also_on != problem.resources[first, 1]:
            also_on = _NONE
        _swap(problem, orders, first, second, on)
        if also_on >= 0:
            _swap(problem, orders, first, second, also_on)
        allowed_from[(first * tasks + second) & (_TABU_LIST_SIZE - 1)] = (
            iteration + tenure + np.random.randint(tenure + 1)
        )
    return best_start, best_order, iteration


@compiled
def _link_orders(problem, sequence):
    """The orders in which `sequence` lists the tasks of each resource."""
    resources = problem.resources
    orders = np.full((resources.shape[0], 3, 2), -1, dtype=np.int64)
    last = np.full(problem.resource_count, -1, dtype=np.int64)
    total = np.zeros(problem.resource_count, dtype=np.int64)
    for index in range(sequence.shape[0]):
        task = sequence[index]
        for side in range(2):
            resource = resources[task, side]
            if resource < 0:
                continue
            other = last[resource]
            orders[task, _PREDECESSOR, side] = other
            if other >= 0:
                orders[other, _SUCCESSOR, 0 if resources[other, 0] == resource else 1] = task
            last[resource] = task
            orders[task, _HELD_BEFORE, side] = total[resource]
            total[resource] += problem.tasks[task].change
    return orders


@inlined
def _set_starts(problem, orders, times, missing, order):
    """Earliest starts, and a topological order of the tasks that are not on a cycle; returns their number."""
    pointer, successors = problem.dependents
    tasks = problem.tasks
    count = 0
    for task in range(tasks.shape[0]):
        if not tasks[task].exists:
            continue
        times[task].start = tasks[task].release
        missing[task] = tasks[task].missing
        for side in range(2):
            if orders[task, _PREDECESSOR, side] >= 0:
                missing[task] += 1
        if missing[task] == 0:
            order[count] = task
            count += 1
    at = 0
    while at < count:
        task = order[at]
        at += 1
        end = times[task].start + tasks[task].duration
        for position in range(pointer[task], pointer[task + 1]):
            other = successors[position]
            times[other].start = max(times[other].start, end)
            missing[other] -= 1
            if missing[other] == 0:
                order[count] = other
                count += 1
        for side in range(2):
            other = orders[task, _SUCCESSOR, side]
            if other >= 0:
                times[other].start = max(times[other].start, end)
                missing[other] -= 1
                if missing[other] == 0:
                    order[count] = other
                    count += 1
    return count


@inlined
def _set_tails(problem, orders, times, order, count):
    pointer, successors = problem.dependents
    tasks = problem.tasks
    for index in range(count - 1, -1, -1):
        task = order[index]
        longest = tasks[task].behind
        for position in range(pointer[task], pointer[task + 1]):
            other = successors[position]
            longest = max(longest, tasks[other].duration + times[other].tail)
        for side in range(2):
            other = orders[task, _SUCCESSOR, side]
            if other >= 0:
                longest = max(longest, tasks[other].duration + times[other].tail)
        times[task].tail = longest


@inlined
def _swap(problem, orders, first, second, resource):
    """`second` directly before `first` on a resource where it came directly after it."""
    resources = problem.resources
    side = 0 if resources[first, 0] == resource else 1
    other = 0 if resources[second, 0] == resource else 1
    earlier, later = orders[first, _PREDECESSOR, side], orders[second, _SUCCESSOR, other]
    if earlier >= 0:
        orders[earlier, _SUCCESSOR, 0 if resources[earlier, 0] == resource else 1] = second
    if later >= 0:
        orders[later, _PREDECESSOR, 0 if resources[later, 0] == resource else 1] = first
    orders[second, _PREDECESSOR, other] = earlier
    orders[second, _SUCCESSOR, other] = first
    orders[first, _PREDECESSOR, side] = second
    orders[first, _SUCCESSOR, side] = later
    orders[second, _HELD_BEFORE, other] = orders[first, _HELD_BEFORE, side]
    orders[first, _HELD_BEFORE, side] = orders[second, _HELD_BEFORE, other] + problem.tasks[second].change


@inlined
def _find_moves(problem, orders, times, order, count, makespan, tolerance, moves):
    """Draw one critical path of all, from its end; how many neighbours on a resource of it may change places."""
    tasks = problem.tasks
    pointer, needs = problem.needs
    task, choices = _NONE, 0
    for index in range(count):
        last = order[index]
        if times[last].start + tasks[last].duration + tasks[last].behind >= makespan - tolerance:
            choices += 1
            if np.random.randint(choices) == 0:
                task = last
    found = 0
    while task >= 0:
        cause, choices = _NONE, 0
        for position in range(pointer[task], pointer[task + 1]):
            other = needs[position]
            if times[other].start + tasks[other].duration >= times[task].start - tolerance:
                choices += 1
                if np.random.randint(choices) == 0:
                    cause = other
        for side in range(2):
            other = orders[task, _PREDECESSOR, side]
            if other < 0 or times[other].start + tasks[other].duration < times[task].start - tolerance:
                continue
            choices += 1
            if np.random.randint(choices) == 0:
                cause = other
            if side == 1 and orders[task, _PREDECESSOR, 0] == other:
                continue  # the same move
            if _may_swap(problem, orders, other, task, side):
                moves.first[found] = other
                moves.second[found] = task
                moves.side[found] = side
                found += 1
        if times[task].start <= tasks[task].release + tolerance:
            break
        task = cause
    return found


@inlined
def _may_swap(problem, orders, first, second, side):
    """True if two neighbours may change places: no dependency, lead or memory limit is against it."""
    microbatches = problem.microbatches
    kind, first_kind = second // microbatches, first // microbatches
    if (problem.interchangeable and kind == first_kind) or max(kind, first_kind) < problem.fixed_kinds:
        return False
    m, first_m = second % microbatches, first % microbatches
    if problem.precedes[first_kind, kind] and (first_m == m or (problem.interchangeable and first_m < m)):
        return False
    lead = problem.lead[kind]
    if lead >= 0 and first_kind // OPS == kind // OPS and first_m + lead <= m:
        return False  # a forward after the backward that lets it in
    resource = problem.resources[second, side]
    first_side = 0 if problem.resources[first, 0] == resource else 1
    taken = problem.tasks[second].change
    return not (taken > 0 and 0 <= problem.limit[resource] < orders[first, _HELD_BEFORE, first_side] + taken)


@inlined
def _choose_move(problem, orders, times, moves, found, allowed_from, iteration, best, tolerance):
    """The allowed move of least estimated makespan; a forbidden one counts where it would be a new best.

    Where all are forbidden, one of them at random; −1 where there is none.
    """
    tasks = problem.tasks.shape[0]
    resources = problem.resources
    chosen, fallback, ties = _NONE, _NONE, 0
    least = np.inf
    for move in range(found):
        u, v, v_side = moves.first[move], moves.second[move], moves.side[move]
        u_side = 0 if resources[u, 0] == resources[v, v_side] else 1
        shared = resources[v, 1 - v_side]
        both = shared >= 0 and resources[u, 1 - u_side] == shared
        if both and orders[u, _SUCCESSOR, 1 - u_side] != v:
            continue
        value = _estimate_makespan(problem, orders, times, u, v, u_side, v_side, both)
        if allowed_from[(v * tasks + u) & (_TABU_LIST_SIZE - 1)] > iteration and value >= best - tolerance:
            if fallback < 0 or np.random.randint(move + 1) == 0:
                fallback = move
            continue
        if value < least - tolerance:
            least, chosen, ties = value, move, 1
        elif value <= least + tolerance:
            ties += 1
            if np.random.randint(ties) == 0:
                chosen = move
    return chosen if chosen >= 0 else fallback


@inlined
def _estimate_makespan(problem, orders, times, u, v, u_side, v_side, both):
    """Taillard's estimate: the longest path through u and v once v comes before u."""
    tasks = problem.tasks
    # v first: what u waited for on the resources that they share, and what v itself waits for
    ahead = 0.0
    behind = 0.0
    for side in range(2):
        if side == u_side or both:
            other = orders[u, _PREDECESSOR, side]
            if other >= 0:
                ahead = max(ahead, times[other].start + tasks[other].duration)
        if side == v_side or both:
            other = orders[v, _SUCCESSOR, side]
            if other >= 0:
                behind = max(behind, times[other].tail + tasks[other].duration)
    v_start = _longest_ahead(problem, orders, times, v, u, ahead)
    u_start = _longest_ahead(problem, orders, times, u, _NONE, v_start + tasks[v].duration)
    u_tail = _longest_behind(problem, orders, times, u, v, behind)
    v_tail = _longest_behind(problem, orders, times, v, _NONE, u_tail + tasks[u].duration)
    return max(v_start + tasks[v].duration + v_tail, u_start + tasks[u].duration + u_tail)


@inlined
def _longest_ahead(problem, orders, times, task, without, least):
    """The longest path to a task, at least `least`; its neighbour `without` left out."""
    pointer, needs = problem.needs
    tasks = problem.tasks
    least = max(least, tasks[task].release)
    for position in range(pointer[task], pointer[task + 1]):
        other = needs[position]
        least = max(least, times[other].start + tasks[other].duration)
    for side in range(2):
        other = orders[task, _PREDECESSOR, side]
        if other >= 0 and other != without:
            least = max(least, times[other].start + tasks[other].duration)
    return least


@inlined
def _longest_behind(problem, orders, times, task, without, least):
    """The longest path from the end of a task, at least `least`; its neighbour `without` left out."""
    pointer, successors = problem.dependents
    tasks = problem.tasks
    least = max(least, tasks[task].behind)
    for position in range(pointer[task], pointer[task + 1]):
        other = successors[position]
        least = max(least, times[other].tail + tasks[other].duration)
    for side in range(2):
        other = orders[task, _SUCCESSOR, side]
        if other >= 0 and other != without:
            least = max(least, times[other].tail + tasks[other].duration)
    return least
