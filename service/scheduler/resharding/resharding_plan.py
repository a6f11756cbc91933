"""ReshardingPlan: tiles, ordered messages, times and lower bound of a resharding, as values and as JSON.

The JSON is what the worker's resharding reads. `resharding_lower_bound_s` proves what no plan of the model can
beat.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from service.scheduler.resharding.balance import LoadItem, least_largest_load
from service.scheduler.resharding.layout import Box, ReshardingProblem, Tile
from service.scheduler.resharding.order import TimedMessages

_LATENCY_SCALE = 1000
_MAX_FLOW_VALUE = 2**62
"""Half of the largest whole number of the flow solver."""


def resharding_lower_bound_s(problem: ReshardingProblem) -> float:
    """Seconds that no plan of the model can beat.

    The model: a message moves elements of one tile from a worker that has them (it held them, or received them before)
    to one that needs them. Between hosts it occupies the sender's card outwards and the receiver's card inwards, inside
    a host the sender's and the receiver's own local link, for its length; nothing else is exclusive.

    *Outwards.* Each element of a tile that is needed on a host without a holder leaves the hosts that have it from
    the start at least once. Its first such message is sent by a holder, or by a needer beside a holder: by one of their
    cards. So the cards carry a division of these tiles among their options, and the largest load of any division is
    at least `least_largest_load`: its proof is Hall's.

    *Inwards.* For each (tile, host without a holder) each element enters through the card of one of the tile's needers
    there: the same argument, over all such pairs at once.

    Of each tile, both of these take one message at least, with its latency.

    *Both ways in.* What the workers of a host need arrives there over its cards or over their local links: the sum of their
    boxes is at most the bytes that all of these can carry, after the latency of a first message. The bound is the
    largest of the three.

    It is reached but for latencies and the fill of pipelines: least shares at the sources, every tile in a chain
    through its target hosts (a card there sends no more than it has received), and an order in which the busiest card
    never waits (Birkhoff's theorem: a matrix of loads is a sum of matchings that are together as long as its largest row
    or column; Gonzalez and Sahni 1976).
    """
    cards = [worker.card for worker in problem.workers]
    # latency counts in thousandths of an element, rounded down; of very large tensors in whole ones
    fine = (
        _LATENCY_SCALE if problem.tensor.elements * len(cards) ** 2 * _LATENCY_SCALE < _MAX_FLOW_VALUE else 1
    )
    out, into = [], []
    for tile in problem.tiles:
        if remote := problem.remote_hosts(tile):
            near = [w for group in problem.near_hosts(tile).values() for w in group]
            weight = _tile_weight(problem, tile, fine)
            out.append(LoadItem(weight, _distinct(cards[w] for w in (*tile.holders, *near))))
            into += [LoadItem(weight, _distinct(cards[w] for w in group)) for group in remote.values()]
    elements = max(least_largest_load(out), least_largest_load(into)) / fine
    return max(problem.card_s(float(elements)), _inside_hosts_s(problem))


def _tile_weight(problem: ReshardingProblem, tile: Tile, fine: int) -> int:
    """The tile and one latency, in parts of an element."""
    latency = problem.links.latency_s * problem.links.card_bytes_per_s / problem.tensor.element_bytes
    return tile.elements * fine + int(latency * fine)


def _inside_hosts_s(problem: ReshardingProblem) -> float:
    """Seconds in which each host's needers can have got everything, over all their links at once; or one message."""
    local = problem.links.local_bytes_per_s
    once = min(problem.links.latency_s, problem.links.local_latency_s)
    if local is None:
        return once
    arriving: dict[str, int] = {}
    workers: dict[str, set[int]] = {}
    for tile in problem.tiles:
        for w in tile.needers:
            host = problem.workers[w].host
            arriving[host] = arriving.get(host, 0) + tile.elements * problem.tensor.element_bytes
            workers.setdefault(host, set()).add(w)
    rates = {
        host: len(group) * local
        + len({problem.workers[w].card for w in group}) * problem.links.card_bytes_per_s
        for host, group in workers.items()
    }
    return once + max(arriving[host] / rates[host] for host in rates)


def _distinct(cards: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(cards))


PROOF_TOLERANCE = 1e-9


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
class PlannedResharding:
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
        return self.makespan_s <= self.lower_bound_s * (1 + PROOF_TOLERANCE)

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


def make_resharding_plan(
    problem: ReshardingProblem, timed: TimedMessages, lower_bound_s: float, strategy: str
) -> PlannedResharding:
    """The plan of timed messages, with names for numbers."""
    workers = tuple(
        PlannedWorker(worker.name, worker.host, worker.card, w < problem.sources, worker.box)
        for w, worker in enumerate(problem.workers)
    )
    messages = tuple(
        PlannedMessage(
            message.tile,
            message.begin,
            message.end,
            workers[message.sender].name,
            workers[message.receiver].name,
            message.local,
            message.after,
            start,
            end,
        )
        for message, start, end in zip(timed.messages, timed.starts, timed.ends, strict=True)
    )
    return PlannedResharding(
        problem.tensor.shape,
        problem.tensor.element_bytes,
        workers,
        tuple(tile.box for tile in problem.tiles),
        messages,
        timed.makespan_s,
        lower_bound_s,
        strategy,
    )
