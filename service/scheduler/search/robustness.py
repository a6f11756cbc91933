"""How a plan stands transfers that take longer than planned: its orders kept, its times not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from service.scheduler.kernels import TOLERANCE
from service.scheduler.model.memory import holding_waits, posting_waits
from service.scheduler.model.problem import Problem
from service.scheduler.model.timeline import Timeline, earliest_times, lane_edges

LONGER = (2.0, 4.0)  # times as long


class Slack:
    """How slow a plan is when transfers take two and four times as long as planned; others are held against it."""

    def __init__(self, timeline: Timeline) -> None:
        self._latest = [stretched_makespan(timeline, longer) * (1 + TOLERANCE) for longer in LONGER]

    def kept_by(self, other: Timeline) -> bool:
        """Whether another plan is no slower then."""
        return all(
            stretched_makespan(other, longer) <= latest
            for longer, latest in zip(LONGER, self._latest, strict=True)
        )


def with_longer_transfers(problem: Problem, longer: float) -> Problem:
    """The same problem with transfers that take `longer` times as long."""
    transfers = tuple(
        replace(transfer, forward_s=transfer.forward_s * longer, backward_s=transfer.backward_s * longer)
        for transfer in problem.transfers
    )
    return replace(problem, transfers=transfers)


def stretched_makespan(timeline: Timeline, longer: float) -> float:
    """The makespan, in seconds, when every transfer lasts `longer` times as long.

    As its programs run it: each lane, port and directed pair in the planned order, receives posted after the action
    that the plan names. Infinite where these orders contradict each other.
    """
    problem = timeline.problem
    kinds = timeline.sequence // problem.microbatches
    orders = [timeline.sequence[problem.kinds_on(r)[kinds]] for r in problem.exclusive_resources]
    moves = timeline.transfers
    pairs = problem.sender_of_kind * problem.meshes + problem.receiver_of_kind
    pair = pairs[moves // problem.microbatches]
    orders += [moves[pair == one] for one in np.unique(pair)]
    durations = problem.duration.copy()
    durations[problem.compute_kinds :] *= longer
    flat = durations.reshape(-1)
    waits = posting_waits(timeline), holding_waits(timeline), lane_edges(orders)
    times = earliest_times(problem, problem.dependency_edges, *waits, durations=flat)
    if not times.complete:
        return float("inf")
    return float((times.start + flat)[times.topological].max())
