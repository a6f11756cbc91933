"""The event-driven dispatcher: runs tasks as early as priorities, resources and memory allow."""

from __future__ import annotations

import heapq

import numpy as np

from service.scheduler.kernels.compiled import compiled

TOLERANCE = 1e-9  # relative; two times this close are one instant


@compiled
def _may_forward(
    stage,
    mesh,
    mesh_pointer,
    mesh_kinds,
    held,
    started,
    returned,
    finished,
    activation,
    stash,
    activation_limit,
    in_flight_cap,
    source_cap,
):
    if started[stage] - returned[stage] >= in_flight_cap[stage]:
        return False
    if started[stage] - finished[stage] >= source_cap[stage]:
        return False
    if activation_limit[mesh] < 0:
        return True
    room = activation_limit[mesh] - held[mesh] - activation[stage]
    if room < 0:
        return False
    if mesh_pointer[mesh + 1] - mesh_pointer[mesh] == 3:
        return True
    # several stages share the memory: afterwards the microbatches must still be able to finish one by
    # one, oldest first, each with what those before it give back (the banker's rule)
    oldest = started[stage]
    newest = started[stage]
    whole = 0
    for position in range(mesh_pointer[mesh], mesh_pointer[mesh + 1], 3):
        other = mesh_kinds[position] // 3
        oldest = min(oldest, finished[other])
        newest = max(newest, started[other] - 1)
        whole += activation[other]
    for m in range(oldest, newest + 1):
        needed = 0
        given = 0
        for position in range(mesh_pointer[mesh], mesh_pointer[mesh + 1], 3):
            other = mesh_kinds[position] // 3
            if m >= started[other] + (1 if other == stage else 0):
                needed += activation[other]
            elif m >= returned[other]:
                given += activation[other]
            elif m >= finished[other]:
                given += stash[other]
        if needed > room:
            return False
        room += given
        if room >= whole:
            return True
    return True


@compiled
def dispatch(
    microbatches,
    stages,
    meshes,
    exists,
    duration,
    missing,
    pointer,
    dependents,
    need_pointer,
    needs,
    resources,
    resource_count,
    receiver,
    mesh_pointer,
    mesh_kinds,
    lane_pointer,
    lane_tasks,
    priority,
    activation,
    stash,
    activation_limit,
    in_flight_cap,
    source_cap,
    patience,
    receive_limit,
    receive_pointer,
    receive_tasks,
    receive_rank,
):
    """(start, order, count): run everything as early as priorities and resources allow.

    With `lane_tasks` the compute orders are given; without, every lane picks the allowed ready
    task of highest priority, or waits up to `patience` of its length for a better one. Greedy,
    non-preemptive: at each instant ends come first, then starts by descending priority.
    """
    tasks = duration.shape[0]
    kinds = tasks // microbatches
    first_transfer = 3 * stages
    fixed = lane_tasks.shape[0] > 0
    start = np.zeros(tasks)
    order = np.empty(tasks, dtype=np.int64)
    count = 0
    missing = missing.copy()
    receive_rank = receive_rank.copy()
    unknown = missing.copy()
    expected = np.zeros(tasks)
    busy = np.zeros(resource_count, dtype=np.bool_)
    free_at = np.zeros(resource_count)
    lane_choice = np.full(meshes, -1, dtype=np.int64)
    stale = np.ones(meshes, dtype=np.bool_)  # whose choice must be made again
    ready_at = np.zeros(tasks)
    next_of_kind = np.zeros(kinds, dtype=np.int64)
    lane_position = lane_pointer[:-1].copy()
    held = np.zeros(meshes, dtype=np.int64)
    started = np.zeros(stages, dtype=np.int64)
    returned = np.zeros(stages, dtype=np.int64)
    finished = np.zeros(stages, dtype=np.int64)
    queue = np.empty((max(kinds - first_transfer, 1), microbatches), dtype=np.int64)
    queue_head = np.zeros(kinds, dtype=np.int64)
    queue_tail = np.zeros(kinds, dtype=np.int64)
    buffers = np.zeros(meshes, dtype=np.int64)
    buffer_users = np.zeros(tasks, dtype=np.int32)
    buffer_low = receive_pointer[:-1].copy()
    limited = False
    for mesh in range(meshes):
        limited = limited or receive_limit[mesh] >= 0
    if limited:
        for kind in range(first_transfer, kinds):
            users = pointer[kind + 1] - pointer[kind]
            for m in range(microbatches):
                buffer_users[kind * microbatches + m] = users
    events = [(0.0, -1)]
    pending = np.empty(tasks, dtype=np.int64)
    time = 0.0
    waiting_kinds = 0
    while events:
        time = events[0][0]
        window = time + TOLERANCE * abs(time)
        while events and events[0][0] <= window:
            end, task = heapq.heappop(events)
            if task < 0:
                continue
            kind = task // microbatches
            m = task - kind * microbatches
            for side in range(2):
                resource = resources[kind, side]
                if resource >= 0:
                    busy[resource] = False
                    free_at[resource] = end
                    if resource < meshes:
                        stale[resource] = True
            if kind < first_transfer:
                stage = kind // 3
                op = kind - 3 * stage
                mesh = resources[kind, 0]
                last = op == 2 or (op == 1 and not exists[task + microbatches])
                if op == 1:
                    returned[stage] += 1
                    held[mesh] -= activation[stage] if last else activation[stage] - stash[stage]
                elif op == 2:
                    held[mesh] -= stash[stage]
                if last:
                    finished[stage] += 1
                if limited:
                    for position in range(need_pointer[kind], need_pointer[kind + 1]):
                        need = needs[position]
                        if need >= first_transfer:
                            buffer_users[need * microbatches + m] -= 1
                            if buffer_users[need * microbatches + m] == 0:
                                buffers[receiver[need]] -= 1
            for position in range(pointer[kind], pointer[kind + 1]):
                after_kind = dependents[position]
                after = after_kind * microbatches + m
                if not exists[after]:
                    continue
                missing[after] -= 1
                ready_at[after] = max(ready_at[after], end)
                if missing[after] == 0 and after_kind < first_transfer:
                    stale[resources[after_kind, 0]] = True
                if missing[after] == 0 and after_kind >= first_transfer:
                    if resources[after_kind, 0] < 0 and not limited:  # nothing to wait for
                        start[after] = ready_at[after]
                        order[count] = after
                        count += 1
                        heapq.heappush(events, (ready_at[after] + duration[after], after))
                        continue
                    row = after_kind - first_transfer
                    at = queue_tail[after_kind]
                    if at == queue_head[after_kind]:
                        waiting_kinds += 1
                    by_rank = limited and receive_limit[receiver[after_kind]] >= 0
                    while at > queue_head[after_kind]:
                        other = queue[row, at - 1]
                        if by_rank:
                            if receive_rank[other] <= receive_rank[after]:
                                break
                        elif priority[other] >= priority[after]:
                            break
                        queue[row, at] = other
                        at -= 1
                    queue[row, at] = after
                    queue_tail[after_kind] += 1
        while True:
            best = -1
            best_priority = -np.inf
            # compute lanes
            for mesh in range(meshes):
                if busy[mesh]:
                    continue
                if not stale[mesh]:
                    choice = lane_choice[mesh]
                    if choice >= 0 and priority[choice] > best_priority:
                        best = choice
                        best_priority = priority[choice]
                    continue
                choice = -1
                if fixed:
                    if lane_position[mesh] < lane_pointer[mesh + 1]:
                        task = lane_tasks[lane_position[mesh]]
                        if missing[task] == 0:
                            choice = task
                else:
                    for position in range(mesh_pointer[mesh], mesh_pointer[mesh + 1]):
                        kind = mesh_kinds[position]
                        m = next_of_kind[kind]
                        if m >= microbatches:
                            continue
                        task = kind * microbatches + m
                        if missing[task] != 0 or not exists[task]:
                            continue
                        if kind % 3 == 0 and not _may_forward(
                            kind // 3,
                            mesh,
                            mesh_pointer,
                            mesh_kinds,
                            held,
                            started,
                            returned,
                            finished,
                            activation,
                            stash,
                            activation_limit,
                            in_flight_cap,
                            source_cap,
                        ):
                            continue
                        if choice < 0 or priority[task] > priority[choice]:
                            choice = task
                    if choice >= 0 and patience > 0.0:
                        deadline = time + patience * duration[choice]
                        for position in range(mesh_pointer[mesh], mesh_pointer[mesh + 1]):
                            kind = mesh_kinds[position]
                            m = next_of_kind[kind]
                            if m >= microbatches:
                                continue
                            task = kind * microbatches + m
                            if not exists[task] or missing[task] == 0 or unknown[task] != 0:
                                continue
                            if kind % 3 == 0 and not _may_forward(
                                kind // 3,
                                mesh,
                                mesh_pointer,
                                mesh_kinds,
                                held,
                                started,
                                returned,
                                finished,
                                activation,
                                stash,
                                activation_limit,
                                in_flight_cap,
                                source_cap,
                            ):
                                continue
                            if priority[task] > priority[choice] and window < expected[task] < deadline:
                                choice = -1
                                break
                stale[mesh] = False
                lane_choice[mesh] = choice
                if choice >= 0 and priority[choice] > best_priority:
                    best = choice
                    best_priority = priority[choice]
            # transfers
            if waiting_kinds > 0:
                seen = 0
                for kind in range(first_transfer, kinds):
                    head = queue_head[kind]
                    if head == queue_tail[kind]:
                        if seen == waiting_kinds:
                            break
                        continue
                    seen += 1
                    first = resources[kind, 0]
                    second = resources[kind, 1]
                    if (first >= 0 and busy[first]) or (second >= 0 and busy[second]):
                        continue
                    task = queue[kind - first_transfer, head]
                    if priority[task] <= best_priority:
                        continue
                    mesh = receiver[kind]
                    if limited and receive_limit[mesh] >= 0:
                        room = receive_limit[mesh] - buffers[mesh]
                        at = buffer_low[mesh]
                        while room > 0 and receive_tasks[at] != task:
                            if receive_rank[receive_tasks[at]] >= 0:
                                room -= 1
                            at += 1
                        if room <= 0:
                            continue
                    best = task
                    best_priority = priority[task]
            if best < 0:
                break
            task = best
            kind = task // microbatches
            m = task - kind * microbatches
            begin = ready_at[task]
            for side in range(2):
                resource = resources[kind, side]
                if resource >= 0:
                    busy[resource] = True
                    begin = max(begin, free_at[resource])
            if begin < time - TOLERANCE * abs(time):
                begin = time
            if kind >= first_transfer:
                queue_head[kind] += 1
                if queue_head[kind] == queue_tail[kind]:
                    waiting_kinds -= 1
                mesh = receiver[kind]
                if limited:
                    buffers[mesh] += 1
                    receive_rank[task] = -1
                    while (
                        buffer_low[mesh] < receive_pointer[mesh + 1]
                        and receive_rank[receive_tasks[buffer_low[mesh]]] < 0
                    ):
                        buffer_low[mesh] += 1
            elif fixed:
                lane_position[resources[kind, 0]] += 1
            else:
                stage = kind // 3
                next_of_kind[kind] += 1
                if kind % 3 == 0:
                    started[stage] += 1
                    held[resources[kind, 0]] += activation[stage]
                    if not exists[task + microbatches]:  # forwards only: nothing is kept
                        held[resources[kind, 0]] -= activation[stage]
                        returned[stage] += 1
                        finished[stage] += 1
            start[task] = begin
            order[count] = task
            count += 1
            end = begin + duration[task]
            heapq.heappush(events, (end, task))
            # when are the dependents expected?
            depth = 0
            if kind < first_transfer or resources[kind, 0] >= 0 or limited:
                pending[0] = task
                depth = 1
            while depth > 0:
                depth -= 1
                known = pending[depth]
                known_kind = known // microbatches
                known_end = end if known == task else expected[known] + duration[known]
                for position in range(pointer[known_kind], pointer[known_kind + 1]):
                    after_kind = dependents[position]
                    after = after_kind * microbatches + m
                    if not exists[after]:
                        continue
                    unknown[after] -= 1
                    expected[after] = max(expected[after], known_end)
                    if (
                        unknown[after] == 0
                        and after_kind >= first_transfer
                        and resources[after_kind, 0] < 0
                        and not limited
                    ):
                        pending[depth] = after
                        depth += 1
    return start, order, count
