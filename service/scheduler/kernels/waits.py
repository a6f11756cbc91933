"""Waits between the lanes of one mesh: the fewest events that keep an order, and the vector clocks they imply.

Used twice, on purpose from separate sides: to compile programs, and to verify that nothing starts too early.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from service.scheduler.kernels.arrays import Rows, compiled


class MeshInstructions(NamedTuple):
    """The instructions of one mesh in host order, as arrays."""

    microbatches: int
    resource_count: int
    needs: Rows  # of kinds
    exists: np.ndarray  # bool[tasks]
    index: np.ndarray  # int[tasks]: place of a task among the instructions, −1 for none
    tasks: np.ndarray  # int[instructions], −1 for REDUCE and STEP
    receiving: np.ndarray  # bool[instructions]
    lane: np.ndarray  # int[instructions]
    resource: np.ndarray  # int[instructions]: what it occupies on this mesh, −1 for none


@compiled
def compile_waits(local, lanes, latest):
    """(pointer, waits): the fewest waits between lanes for the instructions of one mesh, as their places.

    `lanes` is their number; `latest[i]` the instruction that a receive is posted after, or that an action
    waits for until there is memory (−1: none).
    A wait implied by the lane's own order or by another wait is dropped.
    """
    microbatches, lane, resource = local.microbatches, local.lane, local.resource
    need_pointer, needs = local.needs
    count = local.tasks.shape[0]
    after = np.zeros((count, lanes), dtype=np.int32)
    number = np.zeros(count, dtype=np.int32)
    previous = np.full(lanes, -1, dtype=np.int64)
    occupant = np.full(local.resource_count, -1, dtype=np.int64)
    pointer = np.zeros(count + 1, dtype=np.int64)
    waits = np.empty(count + 16, dtype=np.int64)
    used = 0
    candidates = np.empty(need_pointer.shape[0] + 8, dtype=np.int64)
    for index in range(count):
        task = local.tasks[index]
        kind = task // microbatches
        m = task - kind * microbatches
        found = 0
        if latest[index] >= 0:
            candidates[0] = latest[index]
            found = 1
        if not local.receiving[index]:
            for position in range(need_pointer[kind], need_pointer[kind + 1]):
                need = needs[position] * microbatches + m
                if local.exists[need]:
                    candidates[found] = local.index[need]
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
        # a few, sorted by insertion: numpy's sort takes longer to compile than all of this
        for place in range(1, found):
            need, at = candidates[place], place
            while at > 0 and candidates[at - 1] > need:
                candidates[at] = candidates[at - 1]
                at -= 1
            candidates[at] = need
        for position in range(found - 1, -1, -1):
            need = candidates[position]
            if after[index, lane[need]] >= number[need]:
                continue
            if used == waits.shape[0]:
                grown = np.empty(2 * used, dtype=np.int64)
                for place in range(used):  # a slice's assignment compiles for seconds
                    grown[place] = waits[place]
                waits = grown
            waits[used] = need
            used += 1
            for other in range(lanes):
                after[index, other] = max(after[index, other], after[need, other])
        after[index, here] = number[index]
        pointer[index + 1] = used
    return pointer, waits[:used]


@compiled
def vector_clocks(lane, lanes, pointer, waits):
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
def first_unmet_dependency(local, before, number):
    """(index, needed index, reason) of the first instruction that may start too early, or (−1, −1, 0).

    `before` and `number` are those of `clocks`. Reason 1: it does not come after what makes its input.
    Reason 2: not after what holds its resource.
    """
    microbatches, lane, resource = local.microbatches, local.lane, local.resource
    need_pointer, needs = local.needs
    occupant = np.full(local.resource_count, -1, dtype=np.int64)
    for index in range(local.tasks.shape[0]):
        task = local.tasks[index]
        if task < 0:
            continue
        kind = task // microbatches
        m = task - kind * microbatches
        if not local.receiving[index]:
            for position in range(need_pointer[kind], need_pointer[kind + 1]):
                need = needs[position] * microbatches + m
                if local.exists[need]:
                    there = local.index[need]
                    if before[index, lane[there]] < number[there]:
                        return index, there, 1
        if resource[index] >= 0:
            last = occupant[resource[index]]
            if last >= 0 and before[index, lane[last]] < number[last]:
                return index, last, 2
            occupant[resource[index]] = index
    return -1, -1, 0
