"""The event-driven dispatcher: runs tasks as early as priorities, resources and memory allow.

At each instant ends come first, then starts by descending priority: of the tasks that the compute lanes choose
and the heads of the transfer queues the most urgent one starts, until none may. Greedy and non-preemptive.
Running tasks lie in a binary heap, earliest end first. Forwards start under the caps and limits of activations
(with the banker's rule where several stages share a mesh), transfers under the receive buffers of their mesh.
"""

from __future__ import annotations

import numpy as np

from service.scheduler.kernels.arrays import (
    BACKWARD,
    FORWARD,
    OPS,
    WEIGHT,
    compiled,
    inlined,
    new_dispatch_state,
)


@inlined
def push_running(end, task, run):
    """Into the binary heap of running tasks, earliest end first, of equal ends the lowest task."""
    run.tasks[task].end = end
    at = run.counts[0].running
    run.counts[0].running += 1
    while at > 0:
        parent = (at - 1) >> 1
        other = run.heap[parent]
        if run.tasks[other].end < end or (run.tasks[other].end == end and other < task):
            break
        run.heap[at] = other
        at = parent
    run.heap[at] = task


@inlined
def pop_earliest_end(run):
    """The running task that ends first, taken from the heap."""
    first = run.heap[0]
    run.counts[0].running -= 1
    count = run.counts[0].running
    task = run.heap[count]
    end = run.tasks[task].end
    at = 0
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        right = child + 1
        if right < count and (
            run.tasks[run.heap[right]].end < run.tasks[run.heap[child]].end
            or (
                run.tasks[run.heap[right]].end == run.tasks[run.heap[child]].end
                and run.heap[right] < run.heap[child]
            )
        ):
            child = right
        if end < run.tasks[run.heap[child]].end or (
            end == run.tasks[run.heap[child]].end and task < run.heap[child]
        ):
            break
        run.heap[at] = run.heap[child]
        at = child
    run.heap[at] = task
    return first


@inlined
def may_start_forward(stage, mesh, tasks, limits, run):
    """True if the caps and the memory of its mesh let a stage begin another forward."""
    if run.stages[stage].started - run.stages[stage].returned >= limits.in_flight_cap[stage]:
        return False
    if run.stages[stage].started - run.stages[stage].finished >= limits.source_cap[stage]:
        return False
    if limits.activation_limit[mesh] < 0:
        return True
    begins = limits.order[run.stages[stage].started]
    room = limits.activation_limit[mesh] - run.meshes[mesh].held - limits.activation[stage, begins]
    if room < 0:
        return False
    first, end = tasks.kinds_of_mesh.pointer[mesh], tasks.kinds_of_mesh.pointer[mesh + 1]
    if end - first == OPS:
        return True
    # several stages share the memory: afterwards the microbatches must still be able to finish one by
    # one, oldest first, each with what those before it give back (the banker's rule)
    oldest = run.stages[stage].started
    newest = run.stages[stage].started
    whole = 0
    for position in range(first, end, OPS):
        other = tasks.kinds_of_mesh.values[position] // OPS
        oldest = min(oldest, run.stages[other].finished)
        newest = max(newest, run.stages[other].started - 1)
        whole += limits.most_activation[other]
    for place in range(oldest, newest + 1):
        m = limits.order[place]
        needed = 0
        given = 0
        for position in range(first, end, OPS):
            other = tasks.kinds_of_mesh.values[position] // OPS
            if place >= run.stages[other].started + (1 if other == stage else 0):
                needed += limits.activation[other, m]
            elif place >= run.stages[other].returned:
                given += limits.activation[other, m]
            elif place >= run.stages[other].finished:
                given += limits.stash[other, m]
        if needed > room:
            return False
        room += given
        if room >= whole:
            return True
    return True


@inlined
def has_receive_buffer(task, mesh, receives, run):
    """True if a receive buffer is left for a transfer once the transfers used before it have a buffer."""
    if receives.limit[mesh] < 0:
        return True
    room = receives.limit[mesh] - run.meshes[mesh].buffers
    at = run.meshes[mesh].buffer_low
    while room > 0 and receives.by_first_use.values[at] != task:
        if run.tasks[receives.by_first_use.values[at]].receive_rank >= 0:
            room -= 1
        at += 1
    return room > 0


TOLERANCE = 1e-9  # relative; two times this close are one instant


@compiled
def dispatch(tasks, lanes, limits, receives, priority, patience):
    """(start, order, count): run everything as early as priorities and resources allow.

    With `lanes.values` the compute orders are given; without, every lane picks the allowed ready task of
    highest priority, or waits up to `patience` of its length for a better one. Greedy, non-preemptive.
    """
    fixed = lanes.values.shape[0] > 0
    highest = receives.limit[0]
    for mesh in range(1, tasks.meshes):  # numpy's max takes longer to compile
        highest = max(highest, receives.limit[mesh])
    limited = highest >= 0  # begun as False, numba would compile all that follows for that constant too
    run = new_dispatch_state(tasks, lanes, receives, limited)
    _run_events(tasks, lanes, limits, receives, priority, patience, fixed, limited, run)
    return run.tasks["start"].copy(), run.order, run.counts[0].begun


@inlined
def _run_events(tasks, lanes, limits, receives, priority, patience, fixed, limited, run):
    """`dispatch` on a new run: from one end of a task to the next."""
    time = 0.0
    while True:
        window = time + TOLERANCE * abs(time)
        while run.counts[0].running > 0 and run.tasks[run.heap[0]].end <= window:
            task = pop_earliest_end(run)
            _finish_task(task, run.tasks[task].end, tasks, limits, receives, limited, priority, run)
        while True:
            best = _choose_compute(time, window, fixed, tasks, lanes, limits, priority, patience, run)
            if run.counts[0].waiting_kinds > 0:
                best = _choose_transfer(best, tasks, receives, limited, priority, run)
            if best < 0:
                break
            _start_task(best, time, fixed, tasks, limits, receives, limited, run)
        if run.counts[0].running == 0:
            break
        time = run.tasks[run.heap[0]].end


@inlined
def _finish_task(task, end, tasks, limits, receives, limited, priority, run):
    """A task has ended: give back what it held, and queue the transfers that waited for it alone."""
    microbatches = tasks.microbatches
    first_transfer = OPS * tasks.stages
    kind = task // microbatches
    m = task - kind * microbatches
    for side in range(2):
        resource = tasks.resources[kind, side]
        if resource >= 0:
            run.resources[resource].busy = False
            run.resources[resource].free_at = end
            if resource < tasks.meshes:
                run.meshes[resource].stale = True
    if kind < first_transfer:
        stage = kind // OPS
        op = kind - OPS * stage
        mesh = tasks.resources[kind, 0]
        last = op == WEIGHT or (op == BACKWARD and not tasks.exists[task + microbatches])
        if op == BACKWARD:
            run.stages[stage].returned += 1
            run.meshes[mesh].held -= (
                limits.activation[stage, m] if last else limits.activation[stage, m] - limits.stash[stage, m]
            )
        elif op == WEIGHT:
            run.meshes[mesh].held -= limits.stash[stage, m]
        if last:
            run.stages[stage].finished += 1
        if limited:
            for position in range(tasks.needs.pointer[kind], tasks.needs.pointer[kind + 1]):
                need = tasks.needs.values[position]
                if need >= first_transfer:
                    run.tasks[need * microbatches + m].buffer_users -= 1
                    if run.tasks[need * microbatches + m].buffer_users == 0:
                        run.meshes[tasks.receiver[need]].buffers -= 1
    for position in range(tasks.dependents.pointer[kind], tasks.dependents.pointer[kind + 1]):
        after_kind = tasks.dependents.values[position]
        after = after_kind * microbatches + m
        if not tasks.exists[after]:
            continue
        run.tasks[after].missing -= 1
        run.tasks[after].ready_at = max(run.tasks[after].ready_at, end)
        if run.tasks[after].missing != 0:
            continue
        if after_kind < first_transfer:
            run.meshes[tasks.resources[after_kind, 0]].stale = True
        elif tasks.resources[after_kind, 0] < 0 and not limited:  # nothing to wait for
            begin = run.tasks[after].ready_at
            run.tasks[after].start = begin
            run.order[run.counts[0].begun] = after
            run.counts[0].begun += 1
            push_running(begin + tasks.duration[after], after, run)
        else:
            by_rank = limited and receives.limit[tasks.receiver[after_kind]] >= 0
            _enqueue(after, after_kind, first_transfer, by_rank, priority, run)


@inlined
def _enqueue(task, kind, first_transfer, by_rank, priority, run):
    """Into the queue of its kind, by first use where buffers are limited, else by priority."""
    row = kind - first_transfer
    at = run.kinds[kind].queue_tail
    if at == run.kinds[kind].queue_head:
        run.counts[0].waiting_kinds += 1
    while at > run.kinds[kind].queue_head:
        other = run.queue[row, at - 1]
        if by_rank:
            if run.tasks[other].receive_rank <= run.tasks[task].receive_rank:
                break
        elif priority[other] >= priority[task]:
            break
        run.queue[row, at] = other
        at -= 1
    run.queue[row, at] = task
    run.kinds[kind].queue_tail += 1


@inlined
def _choose_compute(time, window, fixed, tasks, lanes, limits, priority, patience, run):
    """The most urgent task that a free compute lane would run, or −1."""
    best = -1
    best_priority = -np.inf
    for mesh in range(tasks.meshes):
        if run.resources[mesh].busy:
            continue
        if run.meshes[mesh].stale:
            if fixed:
                choice = -1
                position = run.meshes[mesh].position
                if position < lanes.pointer[mesh + 1] and run.tasks[lanes.values[position]].missing == 0:
                    choice = lanes.values[position]
            else:
                choice = _choose_on_lane(mesh, time, window, tasks, limits, priority, patience, run)
            run.meshes[mesh].stale = False
            run.meshes[mesh].choice = choice
        choice = run.meshes[mesh].choice
        if choice >= 0 and priority[choice] > best_priority:
            best = choice
            best_priority = priority[choice]
    return best


@inlined
def _choose_on_lane(mesh, time, window, tasks, limits, priority, patience, run):
    """The allowed ready task of highest priority; −1 for none, or when a better one is worth waiting for."""
    microbatches = tasks.microbatches
    first, end = tasks.kinds_of_mesh.pointer[mesh], tasks.kinds_of_mesh.pointer[mesh + 1]
    choice = -1
    for position in range(first, end):
        kind = tasks.kinds_of_mesh.values[position]
        place = run.kinds[kind].next
        if place >= microbatches:
            continue
        task = kind * microbatches + limits.order[place]
        if run.tasks[task].missing != 0 or not tasks.exists[task]:
            continue
        if kind % OPS == FORWARD and not may_start_forward(kind // OPS, mesh, tasks, limits, run):
            continue
        if choice < 0 or priority[task] > priority[choice]:
            choice = task
    if choice < 0 or patience <= 0.0:
        return choice
    deadline = time + patience * tasks.duration[choice]
    for position in range(first, end):
        kind = tasks.kinds_of_mesh.values[position]
        place = run.kinds[kind].next
        if place >= microbatches:
            continue
        task = kind * microbatches + limits.order[place]
        if not tasks.exists[task] or run.tasks[task].missing == 0 or run.tasks[task].unknown != 0:
            continue
        if kind % OPS == FORWARD and not may_start_forward(kind // OPS, mesh, tasks, limits, run):
            continue
        if priority[task] > priority[choice] and window < run.tasks[task].expected < deadline:
            return -1
    return choice


@inlined
def _choose_transfer(best, tasks, receives, limited, priority, run):
    """The most urgent transfer that may start now, where it is more urgent than `best`; else `best`."""
    first_transfer = OPS * tasks.stages
    best_priority = priority[best] if best >= 0 else -np.inf
    seen = 0
    for kind in range(first_transfer, run.kinds.shape[0]):
        head = run.kinds[kind].queue_head
        if head == run.kinds[kind].queue_tail:
            if seen == run.counts[0].waiting_kinds:
                break
            continue
        seen += 1
        first = tasks.resources[kind, 0]
        second = tasks.resources[kind, 1]
        if (first >= 0 and run.resources[first].busy) or (second >= 0 and run.resources[second].busy):
            continue
        task = run.queue[kind - first_transfer, head]
        if priority[task] <= best_priority:
            continue
        if limited and not has_receive_buffer(task, tasks.receiver[kind], receives, run):
            continue
        best = task
        best_priority = priority[task]
    return best


@inlined
def _start_task(task, time, fixed, tasks, limits, receives, limited, run):
    """Start a task as early as its causes and resources were there."""
    microbatches = tasks.microbatches
    first_transfer = OPS * tasks.stages
    kind = task // microbatches
    m = task - kind * microbatches
    begin = run.tasks[task].ready_at
    for side in range(2):
        resource = tasks.resources[kind, side]
        if resource >= 0:
            run.resources[resource].busy = True
            begin = max(begin, run.resources[resource].free_at)
    if begin < time - TOLERANCE * abs(time):
        begin = time
    if kind >= first_transfer:
        run.kinds[kind].queue_head += 1
        if run.kinds[kind].queue_head == run.kinds[kind].queue_tail:
            run.counts[0].waiting_kinds -= 1
        if limited:
            mesh = tasks.receiver[kind]
            run.meshes[mesh].buffers += 1
            run.tasks[task].receive_rank = -1
            pointer, values = receives.by_first_use
            while (
                run.meshes[mesh].buffer_low < pointer[mesh + 1]
                and run.tasks[values[run.meshes[mesh].buffer_low]].receive_rank < 0
            ):
                run.meshes[mesh].buffer_low += 1
    elif fixed:
        run.meshes[tasks.resources[kind, 0]].position += 1
    else:
        stage = kind // OPS
        run.kinds[kind].next += 1
        if kind % OPS == FORWARD:
            run.stages[stage].started += 1
            if tasks.exists[task + microbatches]:
                run.meshes[tasks.resources[kind, 0]].held += limits.activation[stage, m]
            else:  # forwards only: nothing is kept
                run.stages[stage].returned += 1
                run.stages[stage].finished += 1
    run.tasks[task].start = begin
    run.order[run.counts[0].begun] = task
    run.counts[0].begun += 1
    end = begin + tasks.duration[task]
    push_running(end, task, run)
    if kind < first_transfer or tasks.resources[kind, 0] >= 0 or limited:
        _propagate_expected_ends(task, m, end, limited, tasks, run)


@inlined
def _propagate_expected_ends(task, m, end, limited, tasks, run):
    """Tell the dependents of a begun task when it ends; through transfers that nothing can hold up, too."""
    microbatches = tasks.microbatches
    first_transfer = OPS * tasks.stages
    run.pending[0] = task
    depth = 1
    while depth > 0:
        depth -= 1
        known = run.pending[depth]
        kind = known // microbatches
        known_end = end if known == task else run.tasks[known].expected + tasks.duration[known]
        for position in range(tasks.dependents.pointer[kind], tasks.dependents.pointer[kind + 1]):
            after_kind = tasks.dependents.values[position]
            after = after_kind * microbatches + m
            if not tasks.exists[after]:
                continue
            run.tasks[after].unknown -= 1
            run.tasks[after].expected = max(run.tasks[after].expected, known_end)
            free = after_kind >= first_transfer and tasks.resources[after_kind, 0] < 0 and not limited
            if run.tasks[after].unknown == 0 and free:
                run.pending[depth] = after
                depth += 1
