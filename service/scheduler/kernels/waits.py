"""Waits between lanes: the fewest that keep an order, and what given ones imply."""

from __future__ import annotations

import numpy as np

from service.scheduler.kernels.compiled import compiled


@compiled
def compile_waits(
    tasks,
    receiving,
    lane,
    lanes,
    microbatches,
    first_transfer,
    need_pointer,
    needs,
    exists,
    resource,
    resource_count,
    latest,
    local,
):
    """(pointer, waits): the fewest waits between lanes for the instructions of one mesh, as local indices.

    `tasks` in host order; `latest[i]` is the instruction that a receive is posted after (−1: none);
    `resource[i]` what the instruction occupies on this mesh; `local` maps tasks to indices here (−1).
    A wait implied by the lane's own order or by another wait is dropped.
    """
    count = tasks.shape[0]
    after = np.zeros((count, lanes), dtype=np.int32)
    number = np.zeros(count, dtype=np.int32)
    previous = np.full(lanes, -1, dtype=np.int64)
    occupant = np.full(resource_count, -1, dtype=np.int64)
    pointer = np.zeros(count + 1, dtype=np.int64)
    waits = np.empty(count + 16, dtype=np.int64)
    used = 0
    candidates = np.empty(need_pointer.shape[0] + 8, dtype=np.int64)
    for index in range(count):
        task = tasks[index]
        kind = task // microbatches
        m = task - kind * microbatches
        found = 0
        if receiving[index]:
            if latest[index] >= 0:
                candidates[0] = latest[index]
                found = 1
        else:
            for position in range(need_pointer[kind], need_pointer[kind + 1]):
                need = needs[position] * microbatches + m
                if exists[need]:
                    candidates[found] = local[need]
                    found += 1
        if resource[index] >= 0:
            if occupant[resource[index]] >= 0:
                candidates[found] = occupant[resource[index]]
                found += 1
            occupant[resource[index]] = index
        here = lane[index]
        if previous[here] >= 0:
            for other in range(lanes):
                after[index, other] = after[previous[here], other]
            number[index] = number[previous[here]] + 1
        else:
            number[index] = 1
        previous[here] = index
        chosen = np.sort(candidates[:found])
        for position in range(found - 1, -1, -1):
            need = chosen[position]
            if after[index, lane[need]] >= number[need]:
                continue
            if used == waits.shape[0]:
                grown = np.empty(2 * used, dtype=np.int64)
                grown[:used] = waits
                waits = grown
            waits[used] = need
            used += 1
            for other in range(lanes):
                after[index, other] = max(after[index, other], after[need, other])
        after[index, here] = number[index]
        pointer[index + 1] = used
    return pointer, waits[:used]


@compiled
def clocks(lane, lanes, pointer, waits):
    """(before, number): for each instruction how many of each lane have ended before it starts, and its own number.

    Only what the lane orders and waits of this one mesh imply; waits must point backwards.
    """
    count = lane.shape[0]
    before = np.zeros((count, lanes), dtype=np.int32)
    number = np.zeros(count, dtype=np.int32)
    previous = np.full(lanes, -1, dtype=np.int64)
    for index in range(count):
        here = lane[index]
        last = previous[here]
        number[index] = 1
        if last >= 0:
            for other in range(lanes):
                before[index, other] = before[last, other]
            before[index, here] = number[last]
            number[index] = number[last] + 1
        previous[here] = index
        for position in range(pointer[index], pointer[index + 1]):
            need = waits[position]
            for other in range(lanes):
                before[index, other] = max(before[index, other], before[need, other])
            before[index, lane[need]] = max(before[index, lane[need]], number[need])
    return before, number


@compiled
def first_unmet(
    tasks,
    receiving,
    lane,
    before,
    number,
    microbatches,
    need_pointer,
    needs,
    exists,
    resource,
    resource_count,
    local,
):
    """(index, needed index, reason) of the first instruction that may start too early, or (−1, −1, 0).

    Reason 1: it does not come after what makes its input. Reason 2: not after what holds its resource.
    """
    occupant = np.full(resource_count, -1, dtype=np.int64)
    for index in range(tasks.shape[0]):
        task = tasks[index]
        if task < 0:
            continue
        kind = task // microbatches
        m = task - kind * microbatches
        if not receiving[index]:
            for position in range(need_pointer[kind], need_pointer[kind + 1]):
                need = needs[position] * microbatches + m
                if exists[need]:
                    there = local[need]
                    if before[index, lane[there]] < number[there]:
                        return index, there, 1
        if resource[index] >= 0:
            last = occupant[resource[index]]
            if last >= 0 and before[index, lane[last]] < number[last]:
                return index, last, 2
            occupant[resource[index]] = index
    return -1, -1, 0
