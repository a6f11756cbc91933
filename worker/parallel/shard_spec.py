"""ShardSpec: which slice of a parameter a rank owns, and the common pieces in which two layouts can be compared.

A parameter with users on several meshes may be whole on one and split on another, or split over different
numbers of ranks: cut at every boundary that any rank has, it lies in pieces, each whole or absent on every
rank. Values only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

CutPoints = Mapping[int, tuple[int, ...]]
"""By dimension the indices at which a tensor is cut, both ends among them."""


@dataclass(frozen=True)
class ShardSpec:
    """What a worker has of tensor `name`: the whole, or of each of the `parts` that follow each other along `dim` the
    share `worker` of as many as `workers`."""

    name: str
    dim: int | None = None
    parts: tuple[int, ...] = ()
    worker: int = 0
    workers: int = 1

    @property
    def layout(self) -> str:
        """How its workers share it; the same words are the same way, among whatever number. Nothing for the whole."""
        return "" if self.dim is None else f"dimension {self.dim} of {' + '.join(map(str, self.parts))}"

    @property
    def description(self) -> str:
        """For a comparison with the others that have the same."""
        if self.dim is None:
            return self.name
        return f"{self.name} (part {self.worker + 1} of {self.workers} along {self.layout})"

    @property
    def layout_key(self) -> tuple[int | None, tuple[int, ...], int]:
        """The same of all that share it alike."""
        return self.dim, self.parts, self.workers

    def boundaries(self) -> Iterator[int]:
        """Where, along `dim`, one of its workers ends, or begins."""
        yield from (0, *accumulate(self.parts))
        for part, end in zip(self.parts, accumulate(self.parts), strict=True):
            yield from (end - part + n * part // self.workers for n in range(self.workers))

    def local_index(self, dim: int, index: int) -> int | None:
        """Where this worker has what lies at `index` of the whole's dimension; None where it has not."""
        if dim != self.dim:
            return index
        start = taken = 0
        for part in self.parts:
            share = part // self.workers
            at = index - start - self.worker * share
            if 0 <= at < share:
                return taken + at
            start, taken = start + part, taken + share
        return None


def common_cuts(workers: Sequence[Collection[ShardSpec]]) -> dict[str, CutPoints]:
    """By name the tensors that some workers share otherwise than others, with the pieces in which they can be compared."""
    ways: dict[str, dict[tuple[int | None, tuple[int, ...], int], ShardSpec]] = {}
    for held in workers:
        for one in held:
            ways.setdefault(one.name, {}).setdefault(one.layout_key, one)
    return {name: _cut_points(found.values()) for name, found in ways.items() if len(found) > 1}


def common_pieces(held: ShardSpec, tensor: torch.Tensor, cuts: CutPoints) -> dict[str, torch.Tensor]:
    """Those that a worker has: views of its `tensor`, by what they are for people."""
    found = [((), tensor)]
    for dim, ends in sorted(cuts.items()):
        found = [
            ((*told, f"{begin} to {end - 1} along dimension {dim}"), piece.narrow(dim, at, end - begin))
            for told, piece in found
            for begin, end in pairwise(ends)
            if (at := held.local_index(dim, begin)) is not None
        ]
    return {", ".join((held.name, *told)): piece for told, piece in found}


def _cut_points(ways: Collection[ShardSpec]) -> CutPoints:
    borders: dict[int, set[int]] = {}
    for one in ways:
        if one.dim is not None:
            borders.setdefault(one.dim, set()).update(one.boundaries())
    return {dim: tuple(sorted(found)) for dim, found in borders.items()}
