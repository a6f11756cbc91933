"""Chunks: the rectangles of a whole tensor that a worker has, as views of its own tensor with their places in the whole.

A tensor-parallel slice of a fused projection is one rectangle for each of its parts; a ZeRO-1 partition, which is a run of
elements, is one for its whole rows and some for the rows that it begins and ends in. In rectangles any two layouts can be
compared, and torch.distributed.checkpoint describes them. Values only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from worker.parallel.shard_spec import ShardSpec

STEP_KEY = "step"
"""The key of the optimizer state that is one number for a whole parameter, also where that is a single number itself."""

Offsets = tuple[int, ...]


@dataclass(frozen=True)
class FlatRun:
    """The elements from `begin` up to `end` of a contiguous tensor of `shape`, in memory order."""

    begin: int
    end: int
    shape: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The run of a tensor of `shape`, [end - begin]."""
        return tensor.reshape(-1)[self.begin : self.end]


def chunks(
    tensor: torch.Tensor, spec: ShardSpec, run: FlatRun | None = None
) -> Iterator[tuple[Offsets, torch.Tensor]]:
    """The rectangles of the whole that `tensor` has, a slice by `spec` or a `run` of that slice: their offsets in the whole,
    and a view of each."""
    own = (
        [((0,) * tensor.dim(), tensor)] if run is None else _rectangles(tensor, run.begin, run.end, run.shape)
    )
    for offsets, view in own:
        yield from _placed(spec, offsets, view)


def pieces(offsets: Offsets, view: torch.Tensor, limit_bytes: int) -> Iterator[tuple[Offsets, torch.Tensor]]:
    """A rectangle cut into such of at most `limit_bytes`, along its first dimensions."""
    dim = next((dim for dim, size in enumerate(view.shape) if size > 1), None)
    if dim is None or view.nbytes <= limit_bytes:
        yield offsets, view
        return
    rows = max(1, view.shape[dim] * limit_bytes // view.nbytes)
    for start in range(0, view.shape[dim], rows):
        part = view.narrow(dim, start, min(rows, view.shape[dim] - start))
        yield from pieces(_moved(offsets, dim, start), part, limit_bytes)


def copy_overlap(
    source_offsets: Sequence[int], source: torch.Tensor, target_offsets: Sequence[int], target: torch.Tensor
) -> None:
    """Write into one rectangle what it has in common with another of the same tensor."""
    for dim in range(source.dim()):
        begin, end = _overlap(source_offsets[dim], source.shape[dim], target_offsets[dim], target.shape[dim])
        source = source.narrow(dim, begin - source_offsets[dim], end - begin)
        target = target.narrow(dim, begin - target_offsets[dim], end - begin)
    target.copy_(source)


def overlaps(
    offsets: Sequence[int], sizes: Sequence[int], others: Sequence[int], other: Sequence[int]
) -> bool:
    """True where two rectangles of one tensor have an element in common; `others` and `other` are the second's offsets and
    sizes."""
    spans = (_overlap(*place) for place in zip(offsets, sizes, others, other, strict=True))
    return all(begin < end for begin, end in spans)


def _overlap(start: int, size: int, other: int, other_size: int) -> tuple[int, int]:
    return max(start, other), min(start + size, other + other_size)


def _rectangles(
    vector: torch.Tensor, begin: int, end: int, shape: Sequence[int]
) -> Iterator[tuple[Offsets, torch.Tensor]]:
    """The elements from `begin` to `end` of a tensor of `shape`, which `vector` has, as rectangles of it."""
    if begin >= end:
        return
    if len(shape) < 2:
        yield (begin,) * len(shape), vector if shape else vector.view(())
        return
    row, at = math.prod(shape[1:]), begin

    def within_row(stop: int) -> Iterator[tuple[Offsets, torch.Tensor]]:
        index = at // row
        inner = _rectangles(
            vector[at - begin : stop - begin], at - index * row, stop - index * row, shape[1:]
        )
        for offsets, view in inner:
            yield (index, *offsets), view.unsqueeze(0)

    if at % row:
        stop = min(end, (at // row + 1) * row)
        yield from within_row(stop)
        at = stop
    if rows := (end - at) // row:
        whole = vector[at - begin : at - begin + rows * row].view(rows, *shape[1:])
        yield (at // row, *(0 for _ in shape[1:])), whole
        at += rows * row
    if at < end:
        yield from within_row(end)


def _placed(spec: ShardSpec, offsets: Offsets, view: torch.Tensor) -> Iterator[tuple[Offsets, torch.Tensor]]:
    """A rectangle of a slice, in the parts that lie together in the whole."""
    if spec.dim is None:
        yield offsets, view
        return
    dim, local, start = spec.dim, 0, 0
    for part in spec.parts:
        share = part // spec.workers
        begin, end = _overlap(offsets[dim], view.shape[dim], local, share)
        if begin < end:
            place = start + spec.worker * share + begin - local
            yield (
                (*offsets[:dim], place, *offsets[dim + 1 :]),
                view.narrow(dim, begin - offsets[dim], end - begin),
            )
        local, start = local + share, start + part


def _moved(offsets: Offsets, dim: int, by: int) -> Offsets:
    return (*offsets[:dim], offsets[dim] + by, *offsets[dim + 1 :])
