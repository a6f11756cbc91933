"""Routes every element of a resharding: splits tiles over senders, and leads each piece through the target's hosts.

Decides no times; these are order.py's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from service.scheduler.resharding.balance import LoadItem, LoadShare, least_shares, whole_shares
from service.scheduler.resharding.layout import ReshardingProblem, Tile


@dataclass(frozen=True)
class Hop:
    """From one worker to another; `after` is the hop of the same part that brings it to the sender, -1 for a holder."""

    sender: int
    receiver: int
    local: bool
    after: int


@dataclass(frozen=True)
class TilePart:
    """Elements `begin` to `end` of a tile (in row order of its box) and their route, a tree of hops."""

    tile: int
    begin: int
    end: int
    hops: tuple[Hop, ...]

    @property
    def depth(self) -> int:
        """Hops on the longest route of an element."""
        depths = []
        for hop in self.hops:
            depths.append(1 if hop.after < 0 else depths[hop.after] + 1)
        return max(depths, default=0)


@dataclass(frozen=True)
class RouteStyle:
    """The rules by which routes are made.

    `divided`: tiles may be split over several senders, to the least largest load. `chains`: a tile that several hosts
    need is sent to this number of them, which pass it on from host to host (with 1, Alpa's pipelined broadcast); None:
    to each of them. `gathered`: each worker of a host that needs a tile receives a part of it and they pass the parts
    round (all-gather); else one receives it and passes it on (broadcast). `apart`: no copies inside a host, every worker
    receives its own over a card, for hosts whose own links are slower.
    """

    divided: bool
    chains: int | None
    gathered: bool
    apart: bool = False

    def __str__(self) -> str:
        chains_text = (
            "direct" if self.chains is None else "one chain" if self.chains == 1 else f"{self.chains} chains"
        )
        words = ["divided" if self.divided else "whole tiles", chains_text]
        inside = "each worker apart" if self.apart else "all-gather" if self.gathered else "broadcast"
        return ", ".join([*words, inside])


ROUTE_STYLES = tuple(
    RouteStyle(divided, chains, gathered)
    for chains in (None, 1, 2, 3)
    for divided in (False, True)
    for gathered in (False, True)
)
"""In the order in which they are tried: of equally good styles the first wins."""
SLOW_HOST_ROUTE_STYLES = (
    *ROUTE_STYLES,
    RouteStyle(False, None, False, apart=True),
    RouteStyle(True, None, False, apart=True),
)


def make_routes(problem: ReshardingProblem, style: RouteStyle) -> tuple[TilePart, ...]:
    """Every tile's parts. Deterministic; each element enters a host once."""
    return _Router(problem, style).parts()


@dataclass(frozen=True)
class _HostEntry:
    """From `cuts[k]` on (elements of a tile) a host is entered at `workers[k]`."""

    cuts: tuple[int, ...]
    workers: tuple[int, ...]

    def at(self, element: int) -> int:
        return self.workers[bisect_right(self.cuts, element) - 1]


class _Router:
    def __init__(self, problem: ReshardingProblem, style: RouteStyle):
        self._problem = problem
        self._style = style
        self._sent = [0] * len(problem.workers)  # elements, to balance the load of the workers of a card
        self._received = [0] * len(problem.workers)
        self._entries = self._all_entries()

    def parts(self) -> tuple[TilePart, ...]:
        parts = []
        for number, tile in enumerate(self._problem.tiles):
            if near := self._problem.near_hosts(tile):
                parts.append(TilePart(number, 0, tile.elements, tuple(self._near_hops(tile, near))))
        for number, groups, share in self._shares():
            parts += self._remote_parts(number, groups, share)
        return tuple(sorted(parts, key=lambda part: (part.tile, part.begin)))

    def _shares(self) -> list[tuple[int, tuple[tuple[int, ...], ...], LoadShare]]:
        """(tile, its groups of needers that are reached together, range and card of the sender)."""
        wanted = []
        for number, tile in enumerate(self._problem.tiles):
            if groups := self._groups(tile):
                count = min(self._style.chains or len(groups), len(groups))
                wanted += [(number, groups[k::count]) for k in range(count)]
        items = [
            LoadItem(self._problem.tiles[number].elements, self._cards(self._problem.tiles[number].holders))
            for number, _ in wanted
        ]
        shares = least_shares(items) if self._style.divided else whole_shares(items)
        return [
            (number, groups, share)
            for (number, groups), tile_shares in zip(wanted, shares, strict=True)
            for share in tile_shares
        ]

    def _groups(self, tile: Tile) -> tuple[tuple[int, ...], ...]:
        """The needers that receive the tile over a card, grouped by the host inside which it is passed on."""
        groups = tuple(self._problem.remote_hosts(tile).values())
        return tuple((w,) for group in groups for w in group) if self._style.apart else groups

    def _cards(self, workers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._problem.workers[w].card for w in workers))

    def _remote_parts(
        self, number: int, groups: tuple[tuple[int, ...], ...], share: LoadShare
    ) -> Iterator[TilePart]:
        """The share, cut where one of the hosts changes to its next entry, each piece with its route."""
        borders = {share.begin, share.end}
        entries = [self._entries[number, group] for group in groups]
        for entry in entries:
            borders.update(cut for cut in entry.cuts if share.begin < cut < share.end)
        for k, (begin, end) in enumerate(pairwise(sorted(borders))):
            sender = self._least(self._sent, self._on_card(number, share.option))
            self._sent[sender] += end - begin
            turn = (number + k) % len(groups)
            entry_points = [(group, entry.at(begin)) for group, entry in zip(groups, entries, strict=True)]
            chain = entry_points[turn:] + entry_points[:turn]
            yield TilePart(number, begin, end, tuple(_chain_hops(sender, chain)))

    def _all_entries(self) -> dict[tuple[int, tuple[int, ...]], _HostEntry]:
        """The entries of each tile into each host: cards by the least largest load, and workers of the chosen cards."""
        wanted = [
            (number, group) for number, tile in enumerate(self._problem.tiles) for group in self._groups(tile)
        ]
        items = [
            LoadItem(self._problem.tiles[number].elements, self._cards(group)) for number, group in wanted
        ]
        entries = {}
        for (number, group), shares in zip(wanted, least_shares(items), strict=True):
            cuts: list[int] = []
            workers: list[int] = []
            for share in shares:
                at_card = [w for w in group if self._problem.workers[w].card == share.option]
                length = share.end - share.begin
                count = min(len(at_card), length) if self._style.gathered else 1
                turns = sorted(at_card, key=lambda w: (self._received[w], w))[:count]
                borders = [share.begin + k * length // count for k in range(count + 1)]
                for w, (begin, end) in zip(turns, pairwise(borders), strict=True):
                    self._received[w] += end - begin
                    cuts.append(begin)
                    workers.append(w)
            entries[number, group] = _HostEntry(tuple(cuts), tuple(workers))
        return entries

    def _on_card(self, number: int, card: int) -> tuple[int, ...]:
        holders = self._problem.tiles[number].holders
        return tuple(w for w in holders if self._problem.workers[w].card == card)

    def _near_hops(self, tile: Tile, near: dict[str, tuple[int, ...]]) -> Iterator[Hop]:
        """Hops inside hosts: each host's holders send to equal runs of its needers, which pass the tile on."""
        count = 0
        for host, group in near.items():
            holders = [w for w in tile.holders if self._problem.workers[w].host == host]
            holders.sort(key=lambda w: (self._sent[w], w))
            runs = min(len(holders), len(group))
            for k, sender in enumerate(holders[:runs]):
                run = group[k * len(group) // runs : (k + 1) * len(group) // runs]
                self._sent[sender] += tile.elements
                for source, target in pairwise((sender, *run)):
                    yield Hop(source, target, True, -1 if source == sender else count - 1)
                    count += 1

    @staticmethod
    def _least(loads: list[int], workers: tuple[int, ...]) -> int:
        return min(workers, key=lambda w: (loads[w], w))


def _chain_hops(sender: int, entry_points: list[tuple[tuple[int, ...], int]]) -> Iterator[Hop]:
    """Hops from host to host, which enter each (group of workers, entry worker), and from there round its group."""
    count, before = 0, -1
    for group, first in entry_points:
        yield Hop(sender, first, False, before)
        before, sender = count, first
        count += 1
        place = group.index(first)
        round_host = group[place:] + group[:place]
        for source, target in pairwise(round_host):
            yield Hop(source, target, True, count - 1)
            count += 1
