"""A lower bound of every resharding's makespan, and why it is one."""

from __future__ import annotations

from collections.abc import Iterable

from service.scheduler.resharding.balance import Item, least_largest_load
from service.scheduler.resharding.layout import Problem, Tile

_FINE = 1000
_LARGEST = 2**62
"""Of what the flow's whole numbers can hold, half."""


def lower_bound_s(problem: Problem) -> float:
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
    fine = _FINE if problem.tensor.elements * len(cards) ** 2 * _FINE < _LARGEST else 1
    out, into = [], []
    for tile in problem.tiles:
        if remote := problem.remote_hosts(tile):
            near = [w for group in problem.near_hosts(tile).values() for w in group]
            weight = _weight(problem, tile, fine)
            out.append(Item(weight, _distinct(cards[w] for w in (*tile.holders, *near))))
            into += [Item(weight, _distinct(cards[w] for w in group)) for group in remote.values()]
    elements = max(least_largest_load(out), least_largest_load(into)) / fine
    return max(problem.slow_s(float(elements)), _inside_s(problem))


def _weight(problem: Problem, tile: Tile, fine: int) -> int:
    """The tile and one latency, in parts of an element."""
    latency = problem.links.latency_s * problem.links.card_bytes_per_s / problem.tensor.element_bytes
    return tile.elements * fine + int(latency * fine)


def _inside_s(problem: Problem) -> float:
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
