"""Forwards that wait until there is memory: what a mesh has sent lies in a buffer until it is gone.

A plan that begins everything as early as it can piles up what a slow link has not taken yet. It fits where a forward
waits for a send to end; its order stays. Knows nothing of how the plan was found.
"""

from __future__ import annotations

import numpy as np

from service.scheduler.kernels import TOLERANCE
from service.scheduler.model.memory import first_over_memory, holding_waits, posting_waits
from service.scheduler.model.problem import FORWARD
from service.scheduler.model.timeline import OrderError, Timeline, retime

_TASKS = 60_000  # that are played again for one plan,
_EMPTY = 400  # and what playing none costs, in tasks


def held_back(timeline: Timeline, *, worth_s: float = np.inf) -> Timeline | None:
    """The same orders within memory_bytes; None where that is no shorter than `worth_s`, or does not succeed soon.

    From the first instant at which a mesh holds too much: what arrives there then arrives after the action that runs,
    or the last forward that can waits for the send that ends next. Again and again.
    """
    problem, posted = timeline.problem, posting_waits(timeline)
    causes, effects = holding_waits(timeline)
    for _ in range(1 + _TASKS // (_EMPTY + problem.tasks)):
        if timeline.makespan >= worth_s * (1 - TOLERANCE):
            return None
        over = first_over_memory(timeline)
        if over is None:
            return timeline
        wait = _wait(timeline, *over)
        if wait is None:
            return None
        causes, effects = np.append(causes, wait[0]), np.append(effects, wait[1])
        try:
            timeline = retime(problem, timeline.sequence, posted, (causes, effects))
        except OrderError:
            return None
    return None


def _wait(timeline: Timeline, mesh: int, at_s: float) -> tuple[int, int] | None:
    """(what ends, what shall begin then): a tensor that arrives at `at_s` and what runs there, or the last forward
    begun by then that can wait for a send, and that send."""
    problem, lane, moves = timeline.problem, timeline.lanes[mesh], timeline.transfers
    until = at_s * (1 + TOLERANCE)
    kinds = moves // problem.microbatches
    lasting = problem.size[kinds] > 0
    arriving = moves[lasting & (problem.receiver_of_kind[kinds] == mesh)]
    arriving = arriving[np.abs(timeline.start[arriving] - at_s) <= at_s * TOLERANCE]
    running = lane[(timeline.start[lane] < until) & (timeline.end[lane] > until)]
    if len(arriving) and len(running):
        return int(running[0]), int(arriving[-1])
    forwards = lane[
        (problem.stage_and_op(lane // problem.microbatches)[1] == FORWARD) & (timeline.start[lane] <= until)
    ]
    sends = moves[lasting & (problem.sender_of_kind[kinds] == mesh)]
    made = np.array([_made(timeline, send) for send in sends.tolist()])
    for forward in forwards[::-1].tolist():
        begin = timeline.start[forward] * (1 + TOLERANCE)
        there = sends[(made <= begin) & (timeline.end[sends] > begin)]
        if len(there):
            return int(there[timeline.end[there].argmin()]), forward
    return None


def _made(timeline: Timeline, transfer: int) -> float:
    """When what a transfer carries is first there, in seconds."""
    problem = timeline.problem
    kind, microbatch = divmod(transfer, problem.microbatches)
    return min(timeline.end[need * problem.microbatches + microbatch] for need in problem.dependencies[kind])
