"""Tabu search on the orders of all resources: exchange two neighbours of a critical path, again and again.

Moves after van Laarhoven, Aarts and Lenstra (1992), their value estimated after Taillard (1994), tabu
list after Nowicki and Smutnicki (1996); here for tasks that may occupy two resources, and with memory.
"""

from __future__ import annotations

import numpy as np

from service.scheduler.kernels.compiled import compiled

_EPSILON = 1e-9
_LIST = 1 << 18  # places of the tabu list; pairs that share one only forbid each other's moves


@compiled
def _link(sequence, resources, resource_count, change, before, after, held):
    """From tasks in order to their neighbours on each resource, and the bytes held there before each task."""
    last = np.full(resource_count, -1, dtype=np.int64)
    total = np.zeros(resource_count, dtype=np.int64)
    before[:] = -1
    after[:] = -1
    for index in range(sequence.shape[0]):
        task = sequence[index]
        for side in range(2):
            resource = resources[task, side]
            if resource < 0:
                continue
            other = last[resource]
            before[task, side] = other
            if other >= 0:
                after[other, 0 if resources[other, 0] == resource else 1] = task
            last[resource] = task
            held[task, side] = total[resource]
            total[resource] += change[task]


@compiled
def _times(pointer, successors, duration, exists, missing, before, after, start, order):
    """Earliest starts, and a topological order of the tasks that are not on a cycle; returns their number."""
    missing = missing.copy()
    count = 0
    for task in range(duration.shape[0]):
        if not exists[task]:
            continue
        start[task] = 0.0
        for side in range(2):
            if before[task, side] >= 0:
                missing[task] += 1
        if missing[task] == 0:
            order[count] = task
            count += 1
    at = 0
    while at < count:
        task = order[at]
        at += 1
        end = start[task] + duration[task]
        for position in range(pointer[task], pointer[task + 1]):
            other = successors[position]
            start[other] = max(start[other], end)
            missing[other] -= 1
            if missing[other] == 0:
                order[count] = other
                count += 1
        for side in range(2):
            other = after[task, side]
            if other >= 0:
                start[other] = max(start[other], end)
                missing[other] -= 1
                if missing[other] == 0:
                    order[count] = other
                    count += 1
    return count


@compiled
def _tails(pointer, successors, duration, after, tail, order, count):
    """Longest path behind the end of each task."""
    for index in range(count - 1, -1, -1):
        task = order[index]
        longest = 0.0
        for position in range(pointer[task], pointer[task + 1]):
            other = successors[position]
            longest = max(longest, duration[other] + tail[other])
        for side in range(2):
            other = after[task, side]
            if other >= 0:
                longest = max(longest, duration[other] + tail[other])
        tail[task] = longest


@compiled
def _exchange(first, second, resource, resources, change, before, after, held):
    """`second` directly before `first` on a resource where it came directly after it."""
    side = 0 if resources[first, 0] == resource else 1
    other = 0 if resources[second, 0] == resource else 1
    earlier, later = before[first, side], after[second, other]
    if earlier >= 0:
        after[earlier, 0 if resources[earlier, 0] == resource else 1] = second
    if later >= 0:
        before[later, 0 if resources[later, 0] == resource else 1] = first
    before[second, other] = earlier
    after[second, other] = first
    before[first, side] = second
    after[first, side] = later
    held[second, other] = held[first, side]
    held[first, side] = held[second, other] + change[second]


@compiled
def _longest(task, without, pointer, neighbours, beside, time, duration, least):
    """The longest path to (or from) a task, at least `least`; its neighbour `without` left out."""
    for position in range(pointer[task], pointer[task + 1]):
        other = neighbours[position]
        least = max(least, time[other] + duration[other])
    for side in range(2):
        other = beside[task, side]
        if other >= 0 and other != without:
            least = max(least, time[other] + duration[other])
    return least


@compiled
def improve_orders(
    sequence,
    microbatches,
    resource_count,
    pointer,
    successors,
    need_pointer,
    needs,
    missing,
    exists,
    duration,
    resources,
    reaches,
    change,
    limit,
    lead,
    goal,
    iterations,
    patience,
    tenure,
    seed,
):
    """(start, order, iterations used): the best times found from the orders of `sequence`.

    Ends at `goal`, or after `patience` iterations that found nothing better. `resources` are those of each
    task, `change` the bytes that it takes or gives back on its lane; `reaches` says between kinds
    what can never change places, `lead` by how many microbatches a forward may be ahead of the backwards of
    its stage (or −1). A move stays forbidden for `tenure` to twice as many iterations.
    """
    np.random.seed(seed)  # numba's generator of this thread
    tasks = duration.shape[0]
    before = np.empty((tasks, 2), dtype=np.int64)
    after = np.empty((tasks, 2), dtype=np.int64)
    held = np.zeros((tasks, 2), dtype=np.int64)
    _link(sequence, resources, resource_count, change, before, after, held)
    start = np.zeros(tasks)
    tail = np.zeros(tasks)
    order = np.empty(tasks, dtype=np.int64)
    best_start = np.full(tasks, np.inf)
    best_order = sequence.copy()
    best = np.inf
    allowed_from = np.zeros(_LIST, dtype=np.int64)
    firsts = np.empty(2 * tasks, dtype=np.int64)
    seconds = np.empty(2 * tasks, dtype=np.int64)
    sides = np.empty(2 * tasks, dtype=np.int64)
    first, second, on, also_on = -1, -1, -1, -1
    improved_at = 0
    iteration = 0
    while iteration < iterations and iteration - improved_at <= patience:
        iteration += 1
        count = _times(pointer, successors, duration, exists, missing, before, after, start, order)
        if count < sequence.shape[0]:  # only tasks without length can close a cycle: take the move back
            if first < 0:
                break
            _exchange(second, first, on, resources, change, before, after, held)
            if also_on >= 0:
                _exchange(second, first, also_on, resources, change, before, after, held)
            allowed_from[(second * tasks + first) & (_LIST - 1)] = iteration + iterations
            first = -1
            continue
        _tails(pointer, successors, duration, after, tail, order, count)
        makespan = 0.0
        for index in range(count):
            makespan = max(makespan, start[order[index]] + duration[order[index]])
        tolerance = _EPSILON * makespan
        if makespan < best - tolerance:
            best = makespan
            best_start[:] = start
            best_order[:] = order[:count]
            improved_at = iteration
            if best <= goal:
                break

        # a critical path, one of all, from its end; its neighbours on a resource that may change places
        task, choices = -1, 0
        for index in range(count):
            if start[order[index]] + duration[order[index]] >= makespan - tolerance:
                choices += 1
                if np.random.randint(choices) == 0:
                    task = order[index]
        moves = 0
        while task >= 0:
            cause, choices = -1, 0
            for position in range(need_pointer[task], need_pointer[task + 1]):
                other = needs[position]
                if start[other] + duration[other] >= start[task] - tolerance:
                    choices += 1
                    if np.random.randint(choices) == 0:
                        cause = other
            for side in range(2):
                other = before[task, side]
                if other < 0 or start[other] + duration[other] < start[task] - tolerance:
                    continue
                choices += 1
                if np.random.randint(choices) == 0:
                    cause = other
                kind, other_kind = task // microbatches, other // microbatches
                if kind == other_kind:
                    continue
                if reaches[other_kind, kind] and other % microbatches <= task % microbatches:
                    continue
                if side == 1 and before[task, 0] == other:
                    continue  # the same move
                behind_of = lead[kind]
                if (
                    behind_of >= 0
                    and other_kind // 3 == kind // 3
                    and other % microbatches + behind_of <= task % microbatches
                ):
                    continue  # a forward after the backward that lets it in
                resource = resources[task, side]
                other_side = 0 if resources[other, 0] == resource else 1
                if change[task] > 0 and 0 <= limit[resource] < held[other, other_side] + change[task]:
                    continue
                firsts[moves] = other
                seconds[moves] = task
                sides[moves] = side
                moves += 1
            if start[task] <= tolerance:
                break
            task = cause

        chosen, fallback, ties = -1, -1, 0
        least = np.inf
        for move in range(moves):
            u, v, v_side = firsts[move], seconds[move], sides[move]
            u_side = 0 if resources[u, 0] == resources[v, v_side] else 1
            shared = resources[v, 1 - v_side]
            both = shared >= 0 and resources[u, 1 - u_side] == shared
            if both and after[u, 1 - u_side] != v:
                continue
            # v first: what u waited for on the resources that they share, and what v itself waits for
            ahead = 0.0
            behind = 0.0
            for side in range(2):
                if side == u_side or both:
                    other = before[u, side]
                    if other >= 0:
                        ahead = max(ahead, start[other] + duration[other])
                if side == v_side or both:
                    other = after[v, side]
                    if other >= 0:
                        behind = max(behind, tail[other] + duration[other])
            v_start = _longest(v, u, need_pointer, needs, before, start, duration, ahead)
            u_start = _longest(u, -1, need_pointer, needs, before, start, duration, v_start + duration[v])
            u_tail = _longest(u, v, pointer, successors, after, tail, duration, behind)
            v_tail = _longest(v, -1, pointer, successors, after, tail, duration, u_tail + duration[u])
            value = max(v_start + duration[v] + v_tail, u_start + duration[u] + u_tail)
            if allowed_from[(v * tasks + u) & (_LIST - 1)] > iteration and value >= best - tolerance:
                if fallback < 0 or np.random.randint(move + 1) == 0:
                    fallback = move
                continue
            if value < least - tolerance:
                least, chosen, ties = value, move, 1
            elif value <= least + tolerance:
                ties += 1
                if np.random.randint(ties) == 0:
                    chosen = move
        if chosen < 0:
            chosen = fallback
        if chosen < 0:
            continue  # nothing on this path may change places; another one is drawn
        first, second = firsts[chosen], seconds[chosen]
        side = sides[chosen]
        on, also_on = resources[second, side], resources[second, 1 - side]
        if also_on >= 0 and also_on != resources[first, 0] and also_on != resources[first, 1]:
            also_on = -1
        _exchange(first, second, on, resources, change, before, after, held)
        if also_on >= 0:
            _exchange(first, second, also_on, resources, change, before, after, held)
        allowed_from[(first * tasks + second) & (_LIST - 1)] = (
            iteration + tenure + np.random.randint(tenure + 1)
        )
    return best_start, best_order, iteration
