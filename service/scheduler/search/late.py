"""Tensors that arrive when they are needed: as fast, with fewer buffers where receivers are short of memory.

A transfer that goes as early as it can waits at its receiver, in a buffer, for what runs there before. It may go
later and nothing else does: its receive is posted after the last action that ends before then.
"""

from __future__ import annotations

import numpy as np

from service.scheduler import kernels
from service.scheduler.model.memory import posting_waits
from service.scheduler.model.timeline import OrderError, Timeline, compress_edges, resource_edges, retime


def late_transfers(timeline: Timeline, receivers: np.ndarray) -> Timeline:
    """The timeline with every transfer to the meshes `receivers` (bool[meshes]) as late as no other task minds.

    What is sent waits at its sender instead. No longer than before.
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
