"""Split: the layout of a tensor over a tensor-parallel group, whole on each rank or split along one dimension.

A split dimension consists of parts, of each of which every rank has its share: a fused projection of queries,
keys and values has three, so that every rank has the same heads of all of them. `reshaped_split` follows a
split through a view. Values and arithmetic of shapes only: no graphs, no collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

Shape = Sequence[int]


class LayoutError(ValueError):
    """A tensor cannot be split as the plan says; it can over at most `max_workers` ranks."""

    def __init__(self, message: str, most: int = 1):
        super().__init__(message)
        self.max_workers = most


class UnevenError(LayoutError):
    """The number of ranks does not divide a split dimension; the numbers in `valid_workers` do, as far as is known."""

    def __init__(self, problem: str, fitting: Sequence[int]):
        super().__init__(
            f"{problem}; set `tensor` to one of {', '.join(map(str, fitting))}, or leave it whole (replicate) in "
            "resources.tensor_plan",
            max(fitting),
        )
        self.problem, self.valid_workers = problem, tuple(fitting)


@dataclass(frozen=True)
class Split:
    """A tensor split along `dim`, which consists of `parts` one after the other: each worker has its share of each.

    One part is the plain split. A fused projection of queries, keys and values has three, so that every worker has
    the same heads of all of them. `origins` are the parameters from which the split came, for messages.
    """

    dim: int
    parts: tuple[int, ...]
    origins: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """The size of the whole dimension."""
        return sum(self.parts)

    def along(self, dim: int, parts: Sequence[int] | None = None) -> Split:
        """The same split of another dimension."""
        return Split(dim, tuple(self.parts if parts is None else parts), self.origins)

    def with_origins(self, others: frozenset[str]) -> Split:
        return replace(self, origins=self.origins | others)

    def same_layout(self, other: Split) -> bool:
        """True where both split a tensor into the same elements, whatever their origins."""
        return (self.dim, self.parts) == (other.dim, other.parts)

    def check(self, workers: int, what: str) -> None:
        """UnevenError for parts that the number of ranks does not divide; `what` names the tensor."""
        if all(part % workers == 0 for part in self.parts):
            return
        common = math.gcd(*self.parts)
        parts = " + ".join(map(str, self.parts))
        raise UnevenError(
            f"{what}: {parts} cannot be split over {workers} workers",
            [n for n in range(1, common + 1) if common % n == 0],
        )

    def local_shape(self, shape: Shape, workers: int) -> tuple[int, ...]:
        """The shape of one rank's shard of a tensor of `shape`."""
        local = list(shape)
        local[self.dim] //= workers
        return tuple(local)

    def pick(self, whole: torch.Tensor, worker: int, workers: int) -> torch.Tensor:
        """The shard of `whole` of rank `worker` of `workers`; a view where there is one part."""
        pieces, start = [], 0
        for part in self.parts:
            share = part // workers
            pieces.append(whole.narrow(self.dim, start + worker * share, share))
            start += part
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def joined(self, parts: torch.Tensor) -> torch.Tensor:
        """The whole tensor from the shards of all ranks, [ranks, *shape of a shard]."""
        if len(self.parts) == 1 and self.dim == 0:
            return parts.flatten(0, 1)
        pieces, taken = [], 0
        for part in self.parts:
            share = part // len(parts)
            pieces += [row.narrow(self.dim, taken, share) for row in parts]
            taken += share
        return torch.cat(pieces, self.dim)

    def padded(self, local: torch.Tensor, worker: int, workers: int) -> torch.Tensor:
        """The shard of `worker` in a whole tensor of zeros: those of all ranks add up to the tensor."""
        shape = list(local.shape)
        shape[self.dim] = self.size
        whole = local.new_zeros(shape)
        self.place(local, whole, worker, workers)
        return whole

    def place(self, local: torch.Tensor, whole: torch.Tensor, worker: int, workers: int) -> None:
        """Write the shard of `worker` into `whole`: the inverse of `pick`."""
        start = taken = 0
        for part in self.parts:
            share = part // workers
            whole.narrow(self.dim, start + worker * share, share).copy_(local.narrow(self.dim, taken, share))
            start += part
            taken += share


def reshaped_split(split: Split, before: Shape, after: Shape, workers: int) -> Split | None:
    """The split of a tensor of shape `before` once it is viewed as `after`; None where no split of one dimension says it.

    Row-major reshaping keeps the product of sizes of a group of dimensions: within the group of the split one, a
    share is the same contiguous piece of every one of `outer` blocks, whatever the dimensions are called.
    """
    group = next((g for g in _dimension_groups(before, after) if split.dim in g[0]), None)
    if group is None:
        return None
    old, new = group
    prefix = math.prod(before[d] for d in old if d < split.dim)
    if len(old) == len(new) == 1:
        return split.along(new[0])
    if len({*split.parts}) != 1:
        return None
    outer, seen = prefix * len(split.parts), 1
    for dim in new:
        if seen == outer and after[dim] != 1:
            return split.along(dim, (after[dim],)) if after[dim] % workers == 0 else None
        if seen < outer < seen * after[dim]:
            blocks, rest = divmod(outer, seen)
            size = after[dim]
            if rest or size % blocks or (size // blocks) % workers:
                return None
            return split.along(dim, (size // blocks,) * blocks)
        seen *= after[dim]
    return None


def _dimension_groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """The least groups of neighbouring dimensions with equal products, in order."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = [], []
        left = right = 1
        if i < len(before):
            old.append(i)
            left, i = before[i], i + 1
        if j < len(after):
            new.append(j)
            right, j = after[j], j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], (old.append(i), i + 1)[1]
            else:
                right, j = right * after[j], (new.append(j), j + 1)[1]
        groups.append((old, new))
    return groups
