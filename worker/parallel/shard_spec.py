"""ShardSpec: which slice of a parameter a rank owns, and the common pieces in which two layouts are compared or copied.

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
"""The indices at which a tensor is cut, both ends included, by dimension."""


@dataclass(frozen=True)
class ShardSpec:
    """The slice of tensor `name` that a worker has: the whole, or slice `worker` of `workers` equal ones of each of the
    `parts` (sizes) that follow each other along `dim`."""

    name: str
    dim: int | None = None
    parts: tuple[int, ...] = ()
    worker: int = 0
    workers: int = 1

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, of which the slice has `shape`."""
        if self.dim is None:
            return tuple(shape)
        return (*shape[: self.dim], sum(self.parts), *shape[self.dim + 1 :])

    def local_shape(self, whole: Sequence[int]) -> tuple[int, ...] | None:
        """The shape of the slice of a tensor of shape `whole`; None where that is no tensor of this layout."""
        if self.dim is None:
            return tuple(whole)
        if self.dim >= len(whole) or whole[self.dim] != sum(self.parts):
            return None
        return (*whole[: self.dim], sum(self.parts) // self.workers, *whole[self.dim + 1 :])

    @property
    def layout(self) -> str:
        """The split for people, equal over any number of workers; empty for a whole tensor."""
        return "" if self.dim is None else f"dimension {self.dim} of {' + '.join(map(str, self.parts))}"

    @property
    def description(self) -> str:
        """The slice for people."""
        if self.dim is None:
            return self.name
        return f"{self.name} (part {self.worker + 1} of {self.workers} along {self.layout})"

    @property
    def layout_key(self) -> tuple[int | None, tuple[int, ...], int]:
        """Equal for all workers that hold the tensor in one layout."""
        return self.dim, self.parts, self.workers

    def boundaries(self) -> Iterator[int]:
        """The indices along `dim` at which the slice of a worker begins or ends."""
        yield from (0, *accumulate(self.parts))
        for part, end in zip(self.parts, accumulate(self.parts), strict=True):
            yield from (end - part + n * part // self.workers for n in range(self.workers))

    def local_index(self, dim: int, index: int) -> int | None:
        """The index in this worker's tensor of `index` of the whole along `dim`; None where it lies elsewhere."""
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
    """The cuts of each tensor that workers hold in several layouts, by name: in the pieces between them it can be
    compared. `workers` has the specs of each worker."""
    layouts: dict[str, dict[tuple[int | None, tuple[int, ...], int], ShardSpec]] = {}
    for specs in workers:
        for spec in specs:
            layouts.setdefault(spec.name, {}).setdefault(spec.layout_key, spec)
    return {name: _cut_points(specs.values()) for name, specs in layouts.items() if len(specs) > 1}


def common_pieces(spec: ShardSpec, tensor: torch.Tensor, cuts: CutPoints) -> dict[str, torch.Tensor]:
    """The pieces of a tensor that a worker has, as views of its `tensor`, by their description for people."""
    pieces: list[tuple[tuple[str, ...], torch.Tensor]] = [((), tensor)]
    for dim, ends in sorted(cuts.items()):
        pieces = [
            ((*places, f"{begin} to {end - 1} along dimension {dim}"), piece.narrow(dim, at, end - begin))
            for places, piece in pieces
            for begin, end in pairwise(ends)
            if (at := spec.local_index(dim, begin)) is not None
        ]
    return {", ".join((spec.name, *places)): piece for places, piece in pieces}


def copy_common(
    source: ShardSpec, source_tensor: torch.Tensor, target: ShardSpec, target_tensor: torch.Tensor
) -> None:
    """Write into a slice of a tensor what another slice of it has in common with it."""
    cuts = _cut_points([source, target])
    pieces = common_pieces(source, source_tensor, cuts)
    for place, piece in common_pieces(target, target_tensor, cuts).items():
        if place in pieces:
            piece.copy_(pieces[place])


def _cut_points(specs: Collection[ShardSpec]) -> CutPoints:
    boundaries: dict[int, set[int]] = {}
    for spec in specs:
        if spec.dim is not None:
            boundaries.setdefault(spec.dim, set()).update(spec.boundaries())
    return {dim: tuple(sorted(indices)) for dim, indices in boundaries.items()}
