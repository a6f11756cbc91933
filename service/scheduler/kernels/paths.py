"""Longest paths along task graphs in compressed sparse rows, ALAP starts, and Jackson's one-machine bound."""

from __future__ import annotations

import heapq

import numpy as np

from service.scheduler.kernels.arrays import compiled


@compiled
def longest_paths(pointer, successors, duration, exists):
    """(start, order, count): earliest starts along a graph, and a topological order of `count` tasks.

    count is less than the number of existing tasks when the graph has a cycle.
    """
    tasks = duration.shape[0]
    missing = np.zeros(tasks, dtype=np.int32)
    for position in range(successors.shape[0]):
        missing[successors[position]] += 1
    start = np.zeros(tasks)
    order = np.empty(tasks, dtype=np.int64)
    count = 0
    for task in range(tasks):
        if exists[task] and missing[task] == 0:
            order[count] = task
            count += 1
    head = 0
    while head < count:
        task = order[head]
        head += 1
        end = start[task] + duration[task]
        for position in range(pointer[task], pointer[task + 1]):
            after = successors[position]
            if end > start[after]:
                start[after] = end
            missing[after] -= 1
            if missing[after] == 0:
                order[count] = after
                count += 1
    return start, order, count


@compiled
def tails(pointer, successors, duration, order, count):
    """For each task the longest path from its start to the end of everything behind it."""
    tail = np.zeros(duration.shape[0])
    for index in range(count - 1, -1, -1):
        task = order[index]
        longest = 0.0
        for position in range(pointer[task], pointer[task + 1]):
            longest = max(longest, tail[successors[position]])
        tail[task] = longest + duration[task]
    return tail


@compiled
def jackson_makespan(head, length, tail):
    """Optimal preemptive makespan of one machine: of what is ready always the longest tail. Sorted by head."""
    remaining = length.copy()
    ready = [(0.0, -1)]
    ready.pop()
    time = 0.0
    best = 0.0
    at = 0
    count = head.shape[0]
    while at < count or len(ready) > 0:
        if len(ready) == 0:
            time = max(time, head[at])
        while at < count and head[at] <= time:
            heapq.heappush(ready, (-tail[at], at))
            at += 1
        negative, task = ready[0]
        until = head[at] if at < count else np.inf
        if time + remaining[task] <= until:
            heapq.heappop(ready)
            time += remaining[task]
            best = max(best, time - negative)
        else:
            remaining[task] -= until - time
            time = until
    return best


@compiled
def latest_starts(pointer, successors, start, duration, order, moves):
    """Starts where every task that `moves` begins as late as what comes after it allows, no earlier than before.

    `order` lists the tasks, causes first; the others keep their `start`.
    """
    latest = start.copy()
    for index in range(order.shape[0] - 1, -1, -1):
        task = order[index]
        if not moves[task] or pointer[task] == pointer[task + 1]:
            continue
        until = np.inf
        for position in range(pointer[task], pointer[task + 1]):
            until = min(until, latest[successors[position]])
        latest[task] = max(start[task], until - duration[task])
    return latest


@compiled
def compress_rows(nodes, causes, effects):
    """(pointer, successors): the successors of each node, in the order of the edges."""
    pointer = np.zeros(nodes + 1, dtype=np.int64)
    for position in range(causes.shape[0]):
        pointer[causes[position] + 1] += 1
    for node in range(nodes):
        pointer[node + 1] += pointer[node]
    place = pointer[:-1].copy()
    successors = np.empty(causes.shape[0], dtype=np.int64)
    for position in range(causes.shape[0]):
        cause = causes[position]
        successors[place[cause]] = effects[position]
        place[cause] += 1
    return pointer, successors
