"""Rules of operations that move elements or treat each by itself: pointwise, views, pieces, reductions.

A rule is called when an input is split. It returns the new value, or None where the operation needs whole tensors.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from worker.tensor.layout import LayoutError, Split, reshaped
from worker.tensor.rewrite import Rewriter, Value, arguments_of, is_inplace

aten = torch.ops.aten


def pointwise(rw: Rewriter, node: fx.Node) -> Value | None:
    """Element by element, with broadcasting."""
    if isinstance(rw.values[node], tuple):
        return None
    inputs, shape = node.all_input_nodes, rw.shape(node)
    if is_inplace(node) and rw.split_of(node.args[0]) is None:
        return None  # it must change the whole tensor, not a part that was picked from it
    target: Split | None = None
    for one in inputs:
        split = rw.split_of(one)
        if split is None:
            continue
        moved = split.along(split.dim + len(shape) - len(rw.shape(one)))
        if target is None:
            target = moved
        elif target.like(moved):
            target = target.with_origins(moved.origins)
    given = {}
    for one in inputs:
        dim = target.dim - len(shape) + len(rw.shape(one))
        if dim < 0 or rw.shape(one)[dim] == 1:
            given[one] = rw.entered(one)
        else:
            given[one] = rw.picked(one, target.along(dim))
    return rw.copy(node, given, target)


def same(rw: Rewriter, node: fx.Node) -> Value | None:
    """What leaves every element where it is, and looks at its first argument's elements only."""
    first = node.args[0]
    split = rw.split_of(first)
    return None if split is None else rw.copy(node, {first: rw.apart(node, first)}, split)


def dropout(rw: Rewriter, node: fx.Node) -> Value | None:
    """A mask must be that of the whole tensor: on parts only where none is drawn."""
    bound = arguments_of(node)
    return same(rw, node) if not bound["train"] or bound["p"] == 0 else None


def reshape(rw: Rewriter, node: fx.Node) -> Value | None:
    """Everything that is a view of other sizes. LayoutError where a dimension would have to be split unevenly."""
    first = node.args[0]
    split, before, after = rw.split_of(first), rw.shape(first), rw.shape(node)
    if split is None or rw.values[node].dtype != rw.values[first].dtype:
        return None  # of another type it has the same bytes, and not the same elements
    found = reshaped(split, before, after, rw.group.workers)
    if found is None:
        _refuse_uneven(rw, split, before, after, node)
        return None
    return Value(
        rw.emit(
            node,
            aten.reshape.default,
            (rw.apart(node, first), list(found.local_shape(after, rw.group.workers))),
        ),
        found,
    )


def _refuse_uneven(rw: Rewriter, split: Split, before: tuple, after: tuple, node: fx.Node) -> None:
    """Remember a view that one worker could split, and so many cannot (of heads, most often), or that none could."""
    alone = reshaped(split, before, after, 1)
    if alone is None:
        rw.gathered.lost += 1
    elif not all(part % rw.group.workers == 0 for part in alone.parts):
        try:
            alone.check(
                rw.group.workers, f"{node.name}, a view as {list(after)} of what {_named(split)} makes"
            )
        except LayoutError as error:
            rw.gathered.refused.append(error)


def _named(split: Split) -> str:
    return " and ".join(sorted(split.origins)) or "a split tensor"


def permute(rw: Rewriter, node: fx.Node) -> Value | None:
    """Dimensions in another order."""
    first = node.args[0]
    split, rank = rw.split_of(first), len(rw.shape(first))
    order = list(range(rank))
    name = node.target.overloadpacket.__name__
    if name == "permute":
        order = [dim % rank for dim in node.args[1]]
    elif name == "transpose":
        a, b = (dim % rank for dim in node.args[1:3])
        order[a], order[b] = b, a
    elif rank == 2:  # t, mT and numpy_T
        order = [1, 0]
    else:
        return None
    return rw.copy(node, {first: rw.local(first)}, split.along(order.index(split.dim)))


def expand(rw: Rewriter, node: fx.Node) -> Value | None:
    """Repeats dimensions of size one, none of which is split."""
    first = node.args[0]
    split, shape = rw.split_of(first), rw.shape(node)
    moved = split.along(split.dim + len(shape) - len(rw.shape(first)))
    size = list(moved.local_shape(shape, rw.group.workers))
    return rw.copy(node, {first: rw.local(first)}, moved, size=size)


def repeat(rw: Rewriter, node: fx.Node) -> Value | None:
    first, times = node.args[0], node.args[1]
    split = rw.split_of(first)
    moved = split.along(split.dim + len(times) - len(rw.shape(first)))
    return rw.copy(node, {first: rw.local(first)}, moved) if times[moved.dim] == 1 else None


def repeat_interleave(rw: Rewriter, node: fx.Node) -> Value | None:
    """Each of the elements several times: a share stays a share."""
    bound, first = arguments_of(node), node.args[0]
    split, dim, times = rw.split_of(first), bound.get("dim"), bound.get("repeats")
    if split is None or dim is None or not isinstance(times, int) or bound.get("output_size") is not None:
        return None
    if dim % len(rw.shape(first)) == split.dim:
        split = split.along(split.dim, [part * times for part in split.parts])
    return rw.copy(node, {first: rw.local(first)}, split)


def slice_(rw: Rewriter, node: fx.Node) -> Value | None:
    """Of another dimension, or a whole part of the split one."""
    bound, first = arguments_of(node), node.args[0]
    split, shape = rw.split_of(first), rw.shape(first)
    dim = bound.get("dim", 0) % len(shape)
    if dim != split.dim:
        return rw.copy(node, {first: rw.local(first)}, split)
    size, workers = shape[dim], rw.group.workers
    start, end = bound.get("start") or 0, bound.get("end")
    start = max(start + size, 0) if start < 0 else start
    end = size if end is None else min(end + size if end < 0 else end, size)
    begins = [sum(split.parts[:index]) for index in range(len(split.parts) + 1)]
    if bound.get("step", 1) != 1 or start not in begins or end not in begins or end <= start:
        return None
    kept = split.parts[begins.index(start) : begins.index(end)]
    local = (rw.local(first), dim, start // workers, end // workers)
    return Value(rw.emit(node, aten.slice.Tensor, local), split.along(dim, kept))


def select(rw: Rewriter, node: fx.Node) -> Value | None:
    first, dim = node.args[0], node.args[1]
    split, dim = rw.split_of(first), dim % len(rw.shape(first))
    if dim == split.dim:
        return None
    return rw.copy(node, {first: rw.local(first)}, split.along(split.dim - (dim < split.dim)))


def unbind(rw: Rewriter, node: fx.Node) -> Value | None:
    bound, first = arguments_of(node), node.args[0]
    split, shape = rw.split_of(first), rw.shape(first)
    dim = bound.get("dim", 0) % len(shape)
    if dim == split.dim:
        return None
    one = split.along(split.dim - (dim < split.dim))
    return rw.copy(node, {first: rw.local(first)}, (one,) * shape[dim])


def pieces(rw: Rewriter, node: fx.Node) -> Value | None:
    """split, split_with_sizes and chunk: of another dimension, or into the very parts of the split one."""
    bound, first = arguments_of(node), node.args[0]
    split, rank = rw.split_of(first), len(rw.shape(first))
    dim = bound.get("dim", 0) % rank
    sizes = [value.shape[dim] for value in rw.values[node]]
    if dim != split.dim:
        return rw.copy(node, {first: rw.local(first)}, (split,) * len(sizes))
    if tuple(sizes) != split.parts:
        return None
    local = [size // rw.group.workers for size in sizes]
    made = rw.emit(node, aten.split_with_sizes.default, (rw.local(first), local, dim))
    return Value(made, tuple(split.along(dim, (size,)) for size in sizes))


def getitem(rw: Rewriter, node: fx.Node) -> Value | None:
    of, index = node.args
    splits = rw.split_of(of)
    return Value(rw.emit(node, operator.getitem, (rw.local(of), index)), splits[index])


def cat(rw: Rewriter, node: fx.Node) -> Value | None:
    """Along another dimension than the split one."""
    bound = arguments_of(node)
    tensors = bound["tensors"]
    rank = len(rw.shape(tensors[0]))
    split = next(s for one in tensors if (s := rw.split_of(one)) is not None)
    stacks = node.target.overloadpacket.__name__ == "stack"
    dim = bound.get("dim", 0) % (rank + stacks)
    if not stacks and (dim == split.dim or any(len(rw.shape(one)) != rank for one in tensors)):
        return None
    given = {one: rw.picked(one, split) for one in tensors}
    return rw.copy(node, given, split.along(split.dim + (stacks and dim <= split.dim)))


def along_dimensions(rw: Rewriter, node: fx.Node) -> Value | None:
    """Sums, means, softmax: over other dimensions than the split one."""
    bound, first = arguments_of(node), node.args[0]
    split, rank = rw.split_of(first), len(rw.shape(first))
    dims = bound.get("dim")
    if split is None or dims is None or dims == []:
        return None
    dims = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
    if split.dim in dims:
        return None
    lost = len(rw.shape(first)) > len(rw.shape(node))
    moved = split.along(split.dim - (sum(dim < split.dim for dim in dims) if lost else 0))
    return rw.copy(node, {first: rw.local(first)}, moved)


def new_like(rw: Rewriter, node: fx.Node) -> Value | None:
    """A new tensor that asks another for its type only."""
    first = node.args[0]
    return rw.copy(node, {first: rw.local(first)}, None)
