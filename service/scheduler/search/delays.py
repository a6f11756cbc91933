"""Delays that save memory: ALAP transfers, and forwards that wait until a send buffer is free.

A transfer that goes as early as it can waits at its receiver in a buffer; it goes as late as no other task minds,
its receive posted after the last action that ends before. A plan that begins everything as early as it can piles
up what a slow link has not taken yet; it fits where a forward waits for a send to end. Resource orders stay, and
no ALAP transfer makes a plan longer. Knows nothing of how the plan was found.
"""

from __future__ import annotations

import numpy as np

from service.scheduler import kernels
from service.scheduler.kernels import FORWARD, TOLERANCE
from service.scheduler.problem.memory import first_over_memory, posting_waits, send_buffer_waits
from service.scheduler.problem.timeline import OrderError, Timeline, compress_edges, resource_edges, retime

_REPLAYED_TASKS = 60_000  # that are played again for one plan,
_REPLAY_OVERHEAD_TASKS = 400  # and what playing none costs, in tasks


def delay_forwards(timeline: Timeline, *, worth_s: float = np.inf) -> Timeline | None:
    """The same orders within memory_bytes; None where that is no shorter than `worth_s`, or does not succeed soon.

    From the first instant at which a mesh holds too much: what arrives there then arrives after the action that runs,
    or the last forward that can waits for the send that ends next. Again and again.
    """
    problem, posted = timeline.problem, posting_waits(timeline)
    causes, effects = send_buffer_waits(timeline)
    for _ in range(1 + _REPLAYED_TASKS // (_REPLAY_OVERHEAD_TASKS + problem.tasks)):
        if timeline.makespan >= worth_s * (1 - TOLERANCE):
            return None
        over = first_over_memory(timeline)
        if over is None:
            return timeline
        wait = _next_wait(timeline, *over)
        if wait is None:
            return None
        causes, effects = np.append(causes, wait[0]), np.append(effects, wait[1])
        try:
            timeline = retime(problem, timeline.sequence, posted, (causes, effects))
        except OrderError:
            return None
    return None


def _next_wait(timeline: Timeline, mesh: int, at_s: float) -> tuple[int, int] | None:
    """(what ends, what shall begin then): a tensor that arrives at `at_s` and what runs there, or the last forward
    begun by then that can wait for a send, and that send."""
    problem, lane, moves = timeline.problem, timeline.lanes[mesh], timeline.transfers
    until = at_s * (1 + TOLERANCE)
    kinds = moves // problem.microbatches
    lasting = (
        problem.size[kinds] if problem.interchangeable else problem.size_by_microbatch.reshape(-1)[moves]
    ) > 0
    arriving = moves[lasting & (problem.receiver_of_kind[kinds] == mesh)]
    arriving = arriving[np.abs(timeline.start[arriving] - at_s) <= at_s * TOLERANCE]
    running = lane[(timeline.start[lane] < until) & (timeline.end[lane] > until)]
    if len(arriving) and len(running):
        return int(running[0]), int(arriving[-1])
    forwards = lane[
        (problem.stage_and_op(lane // problem.microbatches)[1] == FORWARD) & (timeline.start[lane] <= until)
    ]
    sends = moves[lasting & (problem.sender_of_kind[kinds] == mesh)]
    made = np.array([_available_at_s(timeline, send) for send in sends.tolist()])
    for forward in forwards[::-1].tolist():
        begin = timeline.start[forward] * (1 + TOLERANCE)
        there = sends[(made <= begin) & (timeline.end[sends] > begin)]
        if len(there):
            return int(there[timeline.end[there].argmin()]), forward
    return None


def _available_at_s(timeline: Timeline, transfer: int) -> float:
    """The time at which the data of a transfer is first there, in seconds."""
    problem = timeline.problem
    kind, microbatch = divmod(transfer, problem.microbatches)
    return min(timeline.end[need * problem.microbatches + microbatch] for need in problem.dependencies[kind])


def alap_transfers(timeline: Timeline, receivers: np.ndarray) -> Timeline:
    """The timeline with every transfer to the meshes `receivers` (bool[meshes]) as late as no other task minds.

    Tensors wait at their sender instead. The makespan stays or falls.
    """
    problem = timeline.problem
    late = receivers[problem.receiver_of_kind]
    late[: problem.compute_kinds] = False
    edges = zip(problem.dependency_edges, resource_edges(problem, timeline.sequence), strict=True)
    successors = compress_edges(problem.tasks, *(np.concatenate(side) for side in edges))
    start = kernels.latest_starts(
        *successors,
        timeline.start,
        problem.duration.reshape(-1),
        timeline.sequence,
        np.repeat(late, problem.microbatches),
    )
    sequence = timeline.sequence[np.argsort(start[timeline.sequence], kind="stable")]
    delayed = Timeline(problem, start, sequence)
    causes, effects = posting_waits(delayed)
    posted = late[effects // problem.microbatches]
    try:
        return retime(problem, sequence, (causes[posted], effects[posted]))
    except OrderError:
        return timeline
