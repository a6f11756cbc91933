"""Which way every element goes: a part of a tile, its sender, its way through the target's hosts and inside them.

No times here; order.py gives them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from service.scheduler.resharding.balance import Item, Share, least_shares, whole_shares
from service.scheduler.resharding.layout import Problem, Tile


@dataclass(frozen=True)
class Hop:
    """One worker to another; `after` is the hop of the same part that brings it to the sender, -1 where it has it."""

    sender: int
    receiver: int
    local: bool
    after: int


@dataclass(frozen=True)
class Part:
    """Elements `begin` to `end` of a tile (in row order of its box) and their way, a tree of hops."""

    tile: int
    begin: int
    end: int
    hops: tuple[Hop, ...]

    @property
    def depth(self) -> int:
        """Hops on the longest way of an element."""
        depths = []
        for hop in self.hops:
            depths.append(1 if hop.after < 0 else depths[hop.after] + 1)
        return max(depths, default=0)


@dataclass(frozen=True)
class Style:
    """How routes are made.

    `divided`: tiles may be shared out among several senders, to the least largest load. `chained`: a tile that
    several hosts need is sent once and passed on from host to host (Alpa's pipelined broadcast); else the source sends
    it to each. `gathered`: each worker of a host that needs a tile receives a part of it and they pass the parts
    round (all-gather); else one receives it and it is passed on (broadcast).
    """

    divided: bool
    chained: bool
    gathered: bool

    def __str__(self) -> str:
        words = ["divided" if self.divided else "whole tiles", "chained" if self.chained else "direct"]
        return ", ".join([*words, "all-gather" if self.gathered else "broadcast"])


STYLES = tuple(Style(d, c, g) for d in (False, True) for c in (False, True) for g in (False, True))


def routes(problem: Problem, style: Style) -> tuple[Part, ...]:
    """Every tile's parts. Deterministic; each element enters a host once."""
    return _Router(problem, style).parts()


class _Router:
    def __init__(self, problem: Problem, style: Style):
        self._problem = problem
        self._style = style
        self._sent = [0] * len(problem.workers)  # elements, to take turns among the workers of a card
        self._received = [0] * len(problem.workers)

    def parts(self) -> tuple[Part, ...]:
        found = []
        for number, tile in enumerate(self._problem.tiles):
            if near := self._problem.near_hosts(tile):
                found.append(Part(number, 0, tile.elements, tuple(self._near_hops(tile, near))))
        for number, groups, share in self._shares():
            found += self._remote_parts(number, groups, share)
        return tuple(sorted(found, key=lambda part: (part.tile, part.begin)))

    def _shares(self) -> list[tuple[int, tuple[tuple[int, ...], ...], Share]]:
        """(tile, its groups of needers that are reached together, range and card of the sender)."""
        wanted = []
        for number, tile in enumerate(self._problem.tiles):
            groups = tuple(self._problem.remote_hosts(tile).values())
            if groups:
                wanted += [(number, groups)] if self._style.chained else [(number, (g,)) for g in groups]
        items = [
            Item(self._problem.tiles[number].elements, self._cards(self._problem.tiles[number].holders))
            for number, _ in wanted
        ]
        shares = least_shares(items) if self._style.divided else whole_shares(items)
        return [(*one, share) for one, of_item in zip(wanted, shares, strict=True) for share in of_item]

    def _cards(self, workers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._problem.workers[w].card for w in workers))

    def _remote_parts(self, number: int, groups: tuple[tuple[int, ...], ...], share: Share) -> Iterator[Part]:
        """The share cut wherever one of the hosts goes on to its next entry, each piece with its way."""
        borders = {share.begin, share.end}
        entries = [self._entries(group, share) for group in groups]
        for cuts, _ in entries:
            borders.update(cuts)
        ordered = sorted(borders)
        for k, (begin, end) in enumerate(itertools.pairwise(ordered)):
            sender = self._least(self._sent, self._on_card(number, share.option))
            self._sent[sender] += end - begin
            turn = (number + k) % len(groups)
            ways = []
            for group, (cuts, firsts) in zip(groups, entries, strict=True):
                ways.append((group, firsts[bisect_right(cuts, begin) - 1]))
            yield Part(number, begin, end, tuple(_chain(sender, ways[turn:] + ways[:turn])))

    def _entries(self, group: tuple[int, ...], share: Share) -> tuple[list[int], list[int]]:
        """Where each run begins and the worker at which it enters the host of `group`."""
        length = share.end - share.begin
        if not self._style.gathered:
            first = self._least(self._received, group)
            self._received[first] += length
            return [share.begin], [first]
        count = min(len(group), length)
        turns = sorted(group, key=lambda w: (self._received[w], w))[:count]
        cuts = [share.begin + k * length // count for k in range(count)]
        for w, begin, end in zip(turns, cuts, [*cuts[1:], share.end], strict=True):
            self._received[w] += end - begin
        return cuts, turns

    def _on_card(self, number: int, card: int) -> tuple[int, ...]:
        holders = self._problem.tiles[number].holders
        return tuple(w for w in holders if self._problem.workers[w].card == card)

    def _near_hops(self, tile: Tile, near: dict[str, tuple[int, ...]]) -> Iterator[Hop]:
        count = 0
        for host, group in near.items():
            holders = tuple(w for w in tile.holders if self._problem.workers[w].host == host)
            sender = self._least(self._sent, holders)
            self._sent[sender] += tile.elements
            for k, receiver in enumerate(group):
                yield Hop(sender if k == 0 else group[k - 1], receiver, True, -1 if k == 0 else count - 1)
                count += 1

    @staticmethod
    def _least(loads: list[int], workers: tuple[int, ...]) -> int:
        return min(workers, key=lambda w: (loads[w], w))


def _chain(sender: int, ways: list[tuple[tuple[int, ...], int]]) -> Iterator[Hop]:
    """From host to host, entering each at the given worker, and round each host from there."""
    count, before = 0, -1
    for group, first in ways:
        yield Hop(sender, first, False, before)
        before, sender = count, first
        count += 1
        place = group.index(first)
        round_host = group[place:] + group[:place]
        for giver, taker in itertools.pairwise(round_host):
            yield Hop(giver, taker, True, count - 1)
            count += 1
