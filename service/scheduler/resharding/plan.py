"""A resharding plan: tiles, messages in one order for all workers, times, bound; as values and as JSON.

The JSON is what `worker/resharding.py` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.scheduler.resharding.layout import Box, Problem
from service.scheduler.resharding.order import Timed

TOLERANCE = 1e-9


@dataclass(frozen=True)
class PlannedWorker:
    """`box` is what it holds before (a source) or has afterwards (a target)."""

    name: str
    host: str
    card: int
    source: bool
    box: Box


@dataclass(frozen=True)
class PlannedMessage:
    """Elements `begin` to `end` of a tile, in row order of its box; `after` are places of earlier messages."""

    tile: int
    begin: int
    end: int
    sender: str
    receiver: str
    local: bool
    after: tuple[int, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True)
class ReshardingPlan:
    """`messages` stand in the order in which every worker runs its own. `strategy` says how it was made."""

    shape: tuple[int, ...]
    element_bytes: int
    workers: tuple[PlannedWorker, ...]
    tiles: tuple[Box, ...]
    messages: tuple[PlannedMessage, ...]
    makespan_s: float
    lower_bound_s: float
    strategy: str

    @property
    def proven_optimal(self) -> bool:
        return self.makespan_s <= self.lower_bound_s * (1 + TOLERANCE)

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "element_bytes": self.element_bytes,
            "strategy": self.strategy,
            "makespan_s": self.makespan_s,
            "lower_bound_s": self.lower_bound_s,
            "proven_optimal": self.proven_optimal,
            "workers": [
                {
                    "name": w.name,
                    "host": w.host,
                    "card": w.card,
                    "source": w.source,
                    "box": [list(side) for side in w.box],
                }
                for w in self.workers
            ],
            "tiles": [[list(side) for side in box] for box in self.tiles],
            "messages": [
                {
                    "tile": m.tile,
                    "begin": m.begin,
                    "end": m.end,
                    "sender": m.sender,
                    "receiver": m.receiver,
                    "local": m.local,
                    "after": list(m.after),
                    "start_s": m.start_s,
                    "end_s": m.end_s,
                }
                for m in self.messages
            ],
        }


def plan_of(problem: Problem, timed: Timed, lower_bound_s: float, strategy: str) -> ReshardingPlan:
    """The plan of timed messages, with names for numbers."""
    workers = tuple(
        PlannedWorker(worker.name, worker.host, worker.card, w < problem.sources, worker.box)
        for w, worker in enumerate(problem.workers)
    )
    messages = tuple(
        PlannedMessage(
            one.tile,
            one.begin,
            one.end,
            workers[one.sender].name,
            workers[one.receiver].name,
            one.local,
            one.after,
            start,
            end,
        )
        for one, start, end in zip(timed.messages, timed.starts, timed.ends, strict=True)
    )
    return ReshardingPlan(
        problem.tensor.shape,
        problem.tensor.element_bytes,
        workers,
        tuple(tile.box for tile in problem.tiles),
        messages,
        timed.makespan_s,
        lower_bound_s,
        strategy,
    )
