"""What memory lets begin: forwards under caps and limits of activations, transfers under those of receive buffers."""

from __future__ import annotations

from service.scheduler.kernels.arrays import OPS
from service.scheduler.kernels.compiled import inlined


@inlined
def may_forward(stage, mesh, tasks, limits, run):
    """Whether the caps and the memory of its mesh let a stage begin another forward."""
    if run.stages[stage].started - run.stages[stage].returned >= limits.in_flight_cap[stage]:
        return False
    if run.stages[stage].started - run.stages[stage].finished >= limits.source_cap[stage]:
        return False
    if limits.activation_limit[mesh] < 0:
        return True
    room = limits.activation_limit[mesh] - run.meshes[mesh].held - limits.activation[stage]
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
        whole += limits.activation[other]
    for m in range(oldest, newest + 1):
        needed = 0
        given = 0
        for position in range(first, end, OPS):
            other = tasks.kinds_of_mesh.values[position] // OPS
            if m >= run.stages[other].started + (1 if other == stage else 0):
                needed += limits.activation[other]
            elif m >= run.stages[other].returned:
                given += limits.activation[other]
            elif m >= run.stages[other].finished:
                given += limits.stash[other]
        if needed > room:
            return False
        room += given
        if room >= whole:
            return True
    return True


@inlined
def has_buffer(task, mesh, receives, run):
    """Whether a receive buffer is left for a transfer when those used before it have taken theirs."""
    if receives.limit[mesh] < 0:
        return True
    room = receives.limit[mesh] - run.meshes[mesh].buffers
    at = run.meshes[mesh].buffer_low
    while room > 0 and receives.by_first_use.values[at] != task:
        if run.tasks[receives.by_first_use.values[at]].receive_rank >= 0:
            room -= 1
        at += 1
    return room > 0
