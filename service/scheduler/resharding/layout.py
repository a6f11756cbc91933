"""Layouts of a tensor on the workers of a mesh, the links between workers, and the tiles that two layouts share.

Values only. A box is a piece of a tensor: (begin, end) for each of its dimensions.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import product

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    element_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes


@dataclass(frozen=True)
class Layout:
    """A tensor's placement on a mesh: the dimension of the tensor that each dimension of the mesh splits.

    `mesh` is the mesh's shape; its workers are numbered row by row and `hosts[w]` is the host of worker w.
    `split[d]` is a dimension of the tensor, or None where dimension d of the mesh replicates. Several dimensions of
    the mesh may split one of the tensor: the first cuts, the next cuts the pieces, as torch's DTensor does. Pieces
    have the lengths of torch.chunk (all as long as the first, the last ones shorter or empty), or `sizes[d]`.
    """

    name: str
    mesh: tuple[int, ...]
    split: tuple[int | None, ...]
    hosts: tuple[str, ...]
    sizes: tuple[tuple[int, ...] | None, ...]

    @property
    def workers(self) -> int:
        return math.prod(self.mesh)

    def boxes(self, shape: tuple[int, ...]) -> tuple[Box, ...]:
        """The box of each worker; empty where no elements are left for it."""
        return tuple(self._box(shape, place) for place in product(*(range(n) for n in self.mesh)))

    def _box(self, shape: tuple[int, ...], place: tuple[int, ...]) -> Box:
        box = [(0, length) for length in shape]
        for d, dimension in enumerate(self.split):
            if dimension is not None:
                begin, end = box[dimension]
                cuts = piece_borders(end - begin, self.mesh[d], self.sizes[d])
                box[dimension] = (begin + cuts[place[d]], begin + cuts[place[d] + 1])
        return tuple(box)


@dataclass(frozen=True)
class Links:
    """Bandwidths and latencies of a message. `local_bytes_per_s` None: copies inside a host cost nothing.

    Each host has `cards_per_host` network cards, shared by its workers in order; latencies are of each message.
    """

    card_bytes_per_s: float
    local_bytes_per_s: float | None = None
    latency_s: float = 0.0
    local_latency_s: float = 0.0
    cards_per_host: int = 1


def mesh_layout(
    name: str,
    *,
    mesh: tuple[int, ...],
    split: tuple[int | None, ...],
    hosts: tuple[str, ...] | None = None,
    sizes: tuple[tuple[int, ...] | None, ...] | None = None,
) -> Layout:
    """A layout; without `hosts` the first dimension of the mesh counts hosts of its own, "source:0", "source:1", …"""
    if hosts is None:
        each = math.prod(mesh[1:])
        hosts = tuple(f"{name}:{w // each}" for w in range(math.prod(mesh)))
    return Layout(name, mesh, split, hosts, sizes or (None,) * len(mesh))


def piece_borders(length: int, pieces: int, sizes: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The borders of `pieces` pieces of `length`, first 0, last `length`."""
    if sizes is not None:
        borders = [0]
        for size in sizes:
            borders.append(borders[-1] + size)
        return tuple(borders)
    step = -(-length // pieces)
    return tuple(min(k * step, length) for k in range(pieces + 1))


def volume(box: Box) -> int:
    """Elements of a box."""
    return math.prod(end - begin for begin, end in box)


def intersection(left: Box, right: Box) -> Box:
    """The common box of two; empty (begin = end in some dimension) where they are disjoint."""
    pairs = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True)]
    return tuple((begin, max(begin, end)) for begin, end in pairs)


@dataclass(frozen=True)
class Tile:
    """A box that all `holders` have and all `needers` receive, each the whole of it.

    Workers are numbered through both meshes: first the source's, then the target's.
    """

    box: Box
    holders: tuple[int, ...]
    needers: tuple[int, ...]

    @property
    def elements(self) -> int:
        return volume(self.box)


@dataclass(frozen=True)
class ReshardingWorker:
    """A worker and its box of the tensor; `card` is its network card, numbered through all hosts."""

    name: str
    host: str
    card: int
    box: Box


@dataclass(frozen=True)
class ReshardingProblem:
    """Two layouts of one tensor: the tiles to be moved between their workers, and the links."""

    tensor: Tensor
    links: Links
    workers: tuple[ReshardingWorker, ...]
    sources: int
    tiles: tuple[Tile, ...]

    def remote_hosts(self, tile: Tile) -> dict[str, tuple[int, ...]]:
        """The needers of `tile` by host, on hosts without a holder."""
        near = {self.workers[w].host for w in tile.holders}
        return {host: group for host, group in self._by_host(tile).items() if host not in near}

    def near_hosts(self, tile: Tile) -> dict[str, tuple[int, ...]]:
        """The needers of `tile` by host, on hosts with a holder: they need no card."""
        near = {self.workers[w].host for w in tile.holders}
        return {host: group for host, group in self._by_host(tile).items() if host in near}

    def _by_host(self, tile: Tile) -> dict[str, tuple[int, ...]]:
        needers: dict[str, tuple[int, ...]] = {}
        for w in tile.needers:
            host = self.workers[w].host
            needers[host] = (*needers.get(host, ()), w)
        return needers

    def card_s(self, elements: float) -> float:
        """Seconds of `elements` over one card."""
        return elements * self.tensor.element_bytes / self.links.card_bytes_per_s

    def local_s(self, elements: float) -> float:
        """Seconds of `elements` over a link inside a host."""
        rate = self.links.local_bytes_per_s
        return 0.0 if rate is None else elements * self.tensor.element_bytes / rate


def resharding_problem(tensor: Tensor, source: Layout, target: Layout, links: Links) -> ReshardingProblem:
    """The common refinement of both layouts: every pair of a source box and a target box shares at most one tile."""
    boxes = source.boxes(tensor.shape) + target.boxes(tensor.shape)
    hosts = source.hosts + target.hosts
    names = [f"{side.name}/{w}" for side in (source, target) for w in range(side.workers)]
    cards = _card_of_workers(source.hosts, links) + _card_of_workers(target.hosts, links)
    numbers = {card: n for n, card in enumerate(dict.fromkeys(cards))}
    workers = tuple(
        ReshardingWorker(name, host, numbers[card], box)
        for name, host, card, box in zip(names, hosts, cards, boxes, strict=True)
    )
    held = _workers_of_boxes(boxes, range(source.workers))
    needed = _workers_of_boxes(boxes, range(source.workers, len(boxes)))
    tiles = [
        Tile(shared, holders, needers)
        for box, holders in held.items()
        for other, needers in needed.items()
        if volume(shared := intersection(box, other))
    ]
    tiles.sort(key=lambda tile: tile.box)
    return ReshardingProblem(tensor, links, workers, source.workers, tuple(tiles))


def _workers_of_boxes(boxes: tuple[Box, ...], workers: range) -> dict[Box, tuple[int, ...]]:
    by_box: dict[Box, tuple[int, ...]] = {}
    for w in workers:
        if volume(boxes[w]):
            by_box[boxes[w]] = (*by_box.get(boxes[w], ()), w)
    return by_box


def _card_of_workers(hosts: tuple[str, ...], links: Links) -> list[tuple[str, int]]:
    """(host, card) of each worker: the cards of a host serve equal runs of its workers."""
    total, seen, cards = Counter(hosts), Counter[str](), []
    for host in hosts:
        cards.append((host, seen[host] * links.cards_per_host // total[host]))
        seen[host] += 1
    return cards
