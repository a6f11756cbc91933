"""Rules by operator name for running an operation on parts of tensors: products, norms, views, reductions.

A rule is called when an input is split. It returns the new value, or None where the operation needs whole
tensors; LayoutError refuses what cannot be split evenly. A rule must not depend on what a rank holds: all ranks
decide the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from worker.parallel.tensor.graph_collectives import VocabParallelLookup, add_bias
from worker.parallel.tensor.placement import LayoutError, Split, reshaped_split
from worker.parallel.tensor.rewrite import Rewriter, ShardedValue, bound_arguments, is_inplace

aten = torch.ops.aten


def layer_norm(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """Layer and root-mean-square norms over whole last dimensions."""
    bound, first = bound_arguments(node), node.args[0]
    split = rw.split_of(first)
    if split is None or split.dim >= len(rw.shape(first)) - len(bound["normalized_shape"]):
        return None
    others = {one: rw.copied_to_group(one) for one in node.all_input_nodes if one is not first}
    return rw.copy(node, {first: rw.local(first), **others}, split)


def linear(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """x W^T + b: by columns (rows of W), by rows (columns of W, and of x), or with W whole."""
    bound = bound_arguments(node)
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    if len(rw.shape(weight)) != 2:
        return None
    last, split = len(rw.shape(x)) - 1, rw.split_of(weight)
    if split is None:
        of_x = rw.split_of(x)
        if of_x is None or of_x.dim == last:
            return None
        others = {one: rw.copied_to_group(one) for one in (weight, bias) if one is not None}
        return rw.copy(node, {x: rw.local(x), **others}, of_x)
    if split.dim == 0:
        given = {x: rw.copied_to_group(x), weight: rw.local(weight)}
        if bias is not None:
            given[bias] = rw.scattered(bias, split.along(0))
        return rw.copy(node, given, split.along(last))
    part = rw.add(aten.linear.default, rw.scattered(x, split.along(last)), rw.local(weight))
    return _with_bias(rw, node, rw.reduced(part), bias)


def matmul(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """matmul, mm and bmm of tensors of two dimensions and more."""
    a, b = node.args[:2]
    made = _product(rw, a, b, rw.shape(node))
    if made is None:
        return None
    given, split, partial = made
    value = rw.copy(node, given, split)
    return ShardedValue(rw.reduced(value.node)) if partial else value


def addmm(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """b + x W, as GPT-2's own layers write it."""
    bound = bound_arguments(node)
    bias, a, b = node.args[:3]
    if bound.get("beta", 1) != 1 or bound.get("alpha", 1) != 1 or len(rw.shape(bias)) != 1:
        return None
    made = _product(rw, a, b, rw.shape(node))
    if made is None:
        return None
    given, split, partial = made
    product = rw.add(aten.mm.default, given[a], given[b])
    if partial:
        return _with_bias(rw, node, rw.reduced(product), bias)
    where = rw.scattered(bias, split.along(0)) if split.dim == 1 else rw.copied_to_group(bias)
    return ShardedValue(rw.emit(node, add_bias, (product, where)), split)


def _with_bias(rw: Rewriter, node: fx.Node, total: fx.Node, bias: fx.Node | None) -> ShardedValue:
    """A sum over the workers, and what is added once."""
    return ShardedValue(total if bias is None else rw.emit(node, add_bias, (total, rw.whole(bias))))


def _product(
    rw: Rewriter, a: fx.Node, b: fx.Node, shape: tuple[int, ...]
) -> tuple[dict[fx.Node, fx.Node], Split | None, bool] | None:
    """The operands of a product, the split of the result, and whether it is a part of a sum; None without a rule."""
    left, right = rw.shape(a), rw.shape(b)
    if min(len(left), len(right)) < 2 or a is b:
        return None
    of_a, of_b, rank = rw.split_of(a), rw.split_of(b), len(shape)
    a_last, b_first = len(left) - 1, len(right) - 2
    inner = of_a if of_a is not None and of_a.dim == a_last else None
    if inner is None and of_b is not None and of_b.dim == b_first:
        inner = of_b
    if inner is not None:
        given = {a: rw.scattered(a, inner.along(a_last)), b: rw.scattered(b, inner.along(b_first))}
        return given, None, True
    if of_a is not None and of_a.dim == a_last - 1:
        return (
            ({a: rw.local(a), b: rw.copied_to_group(b)}, of_a.along(rank - 2), False)
            if of_b is None
            else None
        )
    if of_b is not None and of_b.dim == b_first + 1:
        return (
            ({a: rw.copied_to_group(a), b: rw.local(b)}, of_b.along(rank - 1), False)
            if of_a is None
            else None
        )
    batch = of_a.along(of_a.dim + rank - len(left)) if of_a else of_b.along(of_b.dim + rank - len(right))
    given = {}
    for one, sizes in ((a, left), (b, right)):
        dim = batch.dim - rank + len(sizes)
        if dim < 0 or sizes[dim] == 1:
            given[one] = rw.copied_to_group(one)
        else:
            given[one] = rw.scattered(one, batch.along(dim))
    return given, batch, False


def embedding(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """Rows of a table: split by words, each worker has zeros for those of the others; or split by features."""
    bound = bound_arguments(node)
    table, words = bound["weight"], bound["indices"]
    split = rw.split_of(table)
    if (
        split is None
        or rw.split_of(words) is not None
        or bound.get("scale_grad_by_freq")
        or bound.get("sparse")
    ):
        return None
    if split.dim == 1:
        return rw.copy(node, {}, split.along(len(rw.shape(node)) - 1))
    if len(split.parts) > 1:
        return None
    look = VocabParallelLookup(rw.group, split.size, bound.get("padding_idx", -1))
    return ShardedValue(rw.reduced(rw.call(look, rw.local(table), rw.local(words))))


def convolution(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """A convolution whose weight is split by output channels (its rows) or by input channels."""
    bound = bound_arguments(node)
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    split = rw.split_of(weight)
    if split is None or bound.get("groups", 1) != 1 or len(rw.shape(x)) != len(rw.shape(weight)):
        return None
    if split.dim == 0:
        given = {x: rw.copied_to_group(x), weight: rw.local(weight)}
        if bias is not None:
            given[bias] = rw.scattered(bias, split.along(0))
        return rw.copy(node, given, split.along(1))
    if split.dim != 1:
        return None
    given = {x: rw.scattered(x, split.along(1)), weight: rw.local(weight)}
    total = rw.reduced(rw.copy(node, given, None, bias=None).node)
    if bias is None:
        return ShardedValue(total)
    shape = [-1] + [1] * (len(rw.shape(weight)) - 2)
    return ShardedValue(rw.add(add_bias, total, rw.add(aten.reshape.default, rw.whole(bias), shape)))


def group_norm(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """Over whole groups of channels."""
    bound = bound_arguments(node)
    x, groups, split = bound["input"], bound["num_groups"], rw.split_of(node.args[0])
    if split is None or split.dim != 1 or len(split.parts) > 1 or groups % rw.group.workers:
        return None
    own = [one for one in (bound.get("weight"), bound.get("bias")) if one is not None]
    given = {x: rw.local(x), **{one: rw.scattered(one, split.along(0)) for one in own}}
    return rw.copy(node, given, split, num_groups=groups // rw.group.workers)


def per_channel(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """Pools and enlarges batches of images, each channel by itself."""
    first = node.args[0]
    split = rw.split_of(first)
    if split is None or split.dim != 1 or len(rw.shape(first)) != 4:
        return None
    return rw.copy(node, {first: rw.local(first)}, split)


def attention(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """Scaled dot products of the same heads of queries, keys and values; their dropout needs whole ones."""
    bound = bound_arguments(node)
    query, key, value, mask = bound["query"], bound["key"], bound["value"], bound.get("attn_mask")
    splits = [rw.split_of(one) for one in (query, key, value)]
    if bound.get("enable_gqa"):
        _refuse_split_inside_heads(rw, node, key, value)
    if bound.get("dropout_p") or any(split is None for split in splits) or len({s.dim for s in splits}) > 1:
        return None
    dim, rank = splits[0].dim, len(rw.shape(query))
    if dim >= rank - 2 or any(len(split.parts) > 1 for split in splits):
        return None
    given = {one: rw.local(one) for one in (query, key, value)}
    if mask is not None:
        of_mask = dim - rank + len(rw.shape(mask))
        whole = of_mask < 0 or rw.shape(mask)[of_mask] == 1
        given[mask] = rw.copied_to_group(mask) if whole else rw.scattered(mask, splits[0].along(of_mask))
    origins = frozenset().union(*(split.origins for split in splits))
    return rw.copy(node, given, splits[0].with_origins(origins))


def _refuse_split_inside_heads(rw: Rewriter, node: fx.Node, *operands: fx.Node) -> None:
    """Remember keys or values whose several heads the number of ranks does not divide, so that each head is split."""
    for one in operands:
        split, heads, last = rw.split_of(one), rw.shape(one)[-3], len(rw.shape(one)) - 1
        if split is None or split.dim != last or heads == 1:
            continue
        try:
            Split(last - 2, (heads,), split.origins).check(
                rw.group.workers, f"{node.name}, of the {heads} heads that {_origin_names(split)} makes"
            )
        except LayoutError as error:
            rw.gathered.refused.append(error)


def pointwise(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
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
        elif target.same_layout(moved):
            target = target.with_origins(moved.origins)
    given = {}
    for one in inputs:
        dim = target.dim - len(shape) + len(rw.shape(one))
        if dim < 0 or rw.shape(one)[dim] == 1:
            given[one] = rw.copied_to_group(one)
        else:
            given[one] = rw.scattered(one, target.along(dim))
    return rw.copy(node, given, target)


def keep_split(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """An operation on each element of its first argument alone, which stays where it is."""
    first = node.args[0]
    split = rw.split_of(first)
    return None if split is None else rw.copy(node, {first: rw.unaliased(node, first)}, split)


def dropout(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """A mask must be that of the whole tensor: on parts only where none is drawn."""
    bound = bound_arguments(node)
    return keep_split(rw, node) if not bound["train"] or bound["p"] == 0 else None


def reshape(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """Everything that is a view of other sizes. LayoutError where a dimension would have to be split unevenly."""
    first = node.args[0]
    split, before, after = rw.split_of(first), rw.shape(first), rw.shape(node)
    if split is None or rw.values[node].dtype != rw.values[first].dtype:
        return None  # of another type it has the same bytes, and not the same elements
    found = reshaped_split(split, before, after, rw.group.workers)
    if found is None:
        _refuse_uneven(rw, split, before, after, node)
        return None
    return ShardedValue(
        rw.emit(
            node,
            aten.reshape.default,
            (rw.unaliased(node, first), list(found.local_shape(after, rw.group.workers))),
        ),
        found,
    )


def _refuse_uneven(rw: Rewriter, split: Split, before: tuple, after: tuple, node: fx.Node) -> None:
    """Remember a view that the number of ranks cannot split (of heads, most often), or that no number can."""
    alone = reshaped_split(split, before, after, 1)
    if alone is None:
        rw.gathered.untracked_views += 1
    elif not all(part % rw.group.workers == 0 for part in alone.parts):
        try:
            alone.check(
                rw.group.workers, f"{node.name}, a view as {list(after)} of what {_origin_names(split)} makes"
            )
        except LayoutError as error:
            rw.gathered.refused.append(error)


def _origin_names(split: Split) -> str:
    return " and ".join(sorted(split.origins)) or "a split tensor"


def permute(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
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


def expand(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """Repeats dimensions of size one, none of which is split."""
    first = node.args[0]
    split, shape = rw.split_of(first), rw.shape(node)
    moved = split.along(split.dim + len(shape) - len(rw.shape(first)))
    size = list(moved.local_shape(shape, rw.group.workers))
    return rw.copy(node, {first: rw.local(first)}, moved, size=size)


def repeat(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    first, times = node.args[0], node.args[1]
    split = rw.split_of(first)
    moved = split.along(split.dim + len(times) - len(rw.shape(first)))
    return rw.copy(node, {first: rw.local(first)}, moved) if times[moved.dim] == 1 else None


def repeat_interleave(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """A repetition of each element: a shard stays a shard."""
    bound, first = bound_arguments(node), node.args[0]
    split, dim, times = rw.split_of(first), bound.get("dim"), bound.get("repeats")
    if split is None or dim is None or not isinstance(times, int) or bound.get("output_size") is not None:
        return None
    if dim % len(rw.shape(first)) == split.dim:
        split = split.along(split.dim, [part * times for part in split.parts])
    return rw.copy(node, {first: rw.local(first)}, split)


def slice_(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """A slice of another dimension, or of a whole part of the split one."""
    bound, first = bound_arguments(node), node.args[0]
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
    return ShardedValue(rw.emit(node, aten.slice.Tensor, local), split.along(dim, kept))


def select(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    first, dim = node.args[0], node.args[1]
    split, dim = rw.split_of(first), dim % len(rw.shape(first))
    if dim == split.dim:
        return None
    return rw.copy(node, {first: rw.local(first)}, split.along(split.dim - (dim < split.dim)))


def unbind(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    bound, first = bound_arguments(node), node.args[0]
    split, shape = rw.split_of(first), rw.shape(first)
    dim = bound.get("dim", 0) % len(shape)
    if dim == split.dim:
        return None
    one = split.along(split.dim - (dim < split.dim))
    return rw.copy(node, {first: rw.local(first)}, (one,) * shape[dim])


def split_tensor(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """split, split_with_sizes and chunk: of another dimension, or into the very parts of the split one."""
    bound, first = bound_arguments(node), node.args[0]
    split, rank = rw.split_of(first), len(rw.shape(first))
    dim = bound.get("dim", 0) % rank
    sizes = [value.shape[dim] for value in rw.values[node]]
    if dim != split.dim:
        return rw.copy(node, {first: rw.local(first)}, (split,) * len(sizes))
    if tuple(sizes) != split.parts:
        return None
    local = [size // rw.group.workers for size in sizes]
    made = rw.emit(node, aten.split_with_sizes.default, (rw.local(first), local, dim))
    return ShardedValue(made, tuple(split.along(dim, (size,)) for size in sizes))


def getitem(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    of, index = node.args
    splits = rw.split_of(of)
    return ShardedValue(rw.emit(node, operator.getitem, (rw.local(of), index)), splits[index])


def cat(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """Along another dimension than the split one."""
    bound = bound_arguments(node)
    tensors = bound["tensors"]
    rank = len(rw.shape(tensors[0]))
    split = next(s for one in tensors if (s := rw.split_of(one)) is not None)
    stacks = node.target.overloadpacket.__name__ == "stack"
    dim = bound.get("dim", 0) % (rank + stacks)
    if not stacks and (dim == split.dim or any(len(rw.shape(one)) != rank for one in tensors)):
        return None
    given = {one: rw.scattered(one, split) for one in tensors}
    return rw.copy(node, given, split.along(split.dim + (stacks and dim <= split.dim)))


def reduce_dimensions(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """Sums, means, softmax: over other dimensions than the split one."""
    bound, first = bound_arguments(node), node.args[0]
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


def new_like(rw: Rewriter, node: fx.Node) -> ShardedValue | None:
    """A new tensor that asks another for its type only."""
    first = node.args[0]
    return rw.copy(node, {first: rw.local(first)}, None)


Rule = Callable[[Rewriter, fx.Node], ShardedValue | None]

RULES: dict[str, Rule] = {
    "pointwise": pointwise,
    **dict.fromkeys(
        ("contiguous", "to", "type_as", "detach", "alias", "lift_fresh_copy", "_to_copy", "clone", "gelu_"),
        keep_split,
    ),
    **dict.fromkeys(("dropout", "dropout_"), dropout),
    **dict.fromkeys(
        (
            "view",
            "reshape",
            "_unsafe_view",
            "flatten",
            "unflatten",
            "unsqueeze",
            "squeeze",
            "view_as",
            "reshape_as",
        ),
        reshape,
    ),
    **dict.fromkeys(("permute", "transpose", "t", "numpy_T", "mT"), permute),
    "expand": expand,
    "repeat": repeat,
    "repeat_interleave": repeat_interleave,
    "slice": slice_,
    "select": select,
    "unbind": unbind,
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), split_tensor),
    "getitem": getitem,
    **dict.fromkeys(("cat", "stack", "concat"), cat),
    **dict.fromkeys(
        (
            "softmax",
            "_softmax",
            "log_softmax",
            "sum",
            "mean",
            "amax",
            "var",
            "std",
            "logsumexp",
            "cumsum",
            "norm",
        ),
        reduce_dimensions,
    ),
    **dict.fromkeys(("layer_norm", "rms_norm"), layer_norm),
    "linear": linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), matmul),
    "addmm": addmm,
    "embedding": embedding,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    "group_norm": group_norm,
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "avg_pool2d", "max_pool2d"), per_channel),
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), new_like),
}
