"""Rules of operations that multiply and normalise: linear layers, convolutions, attention, tables of words, norms.

As in shapes.py, a rule returns the new value, or None where the operation needs whole tensors.
"""

from __future__ import annotations

import torch
from torch import fx

from worker.tensor.collectives import Lookup, add_bias
from worker.tensor.layout import Split
from worker.tensor.rewrite import Rewriter, Value, arguments_of

aten = torch.ops.aten


def norm(rw: Rewriter, node: fx.Node) -> Value | None:
    """Layer and root-mean-square norms over whole last dimensions."""
    bound, first = arguments_of(node), node.args[0]
    split = rw.split_of(first)
    if split is None or split.dim >= len(rw.shape(first)) - len(bound["normalized_shape"]):
        return None
    others = {one: rw.entered(one) for one in node.all_input_nodes if one is not first}
    return rw.copy(node, {first: rw.local(first), **others}, split)


def linear(rw: Rewriter, node: fx.Node) -> Value | None:
    """x W^T + b: by columns (rows of W), by rows (columns of W, and of x), or with W whole."""
    bound = arguments_of(node)
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    if len(rw.shape(weight)) != 2:
        return None
    last, split = len(rw.shape(x)) - 1, rw.split_of(weight)
    if split is None:
        of_x = rw.split_of(x)
        if of_x is None or of_x.dim == last:
            return None
        others = {one: rw.entered(one) for one in (weight, bias) if one is not None}
        return rw.copy(node, {x: rw.local(x), **others}, of_x)
    if split.dim == 0:
        given = {x: rw.entered(x), weight: rw.local(weight)}
        if bias is not None:
            given[bias] = rw.picked(bias, split.along(0))
        return rw.copy(node, given, split.along(last))
    part = rw.add(aten.linear.default, rw.picked(x, split.along(last)), rw.local(weight))
    return _biased(rw, node, rw.summed(part), bias)


def matmul(rw: Rewriter, node: fx.Node) -> Value | None:
    """matmul, mm and bmm of tensors of two dimensions and more."""
    a, b = node.args[:2]
    made = _product(rw, a, b, rw.shape(node))
    if made is None:
        return None
    given, split, partial = made
    value = rw.copy(node, given, split)
    return Value(rw.summed(value.node)) if partial else value


def addmm(rw: Rewriter, node: fx.Node) -> Value | None:
    """b + x W, as GPT-2's own layers write it."""
    bound = arguments_of(node)
    bias, a, b = node.args[:3]
    if bound.get("beta", 1) != 1 or bound.get("alpha", 1) != 1 or len(rw.shape(bias)) != 1:
        return None
    made = _product(rw, a, b, rw.shape(node))
    if made is None:
        return None
    given, split, partial = made
    product = rw.add(aten.mm.default, given[a], given[b])
    if partial:
        return _biased(rw, node, rw.summed(product), bias)
    where = rw.picked(bias, split.along(0)) if split.dim == 1 else rw.entered(bias)
    return Value(rw.emit(node, add_bias, (product, where)), split)


def _biased(rw: Rewriter, node: fx.Node, total: fx.Node, bias: fx.Node | None) -> Value:
    """A sum over the workers, and what is added once."""
    return Value(total if bias is None else rw.emit(node, add_bias, (total, rw.whole(bias))))


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
        given = {a: rw.picked(a, inner.along(a_last)), b: rw.picked(b, inner.along(b_first))}
        return given, None, True
    if of_a is not None and of_a.dim == a_last - 1:
        return ({a: rw.local(a), b: rw.entered(b)}, of_a.along(rank - 2), False) if of_b is None else None
    if of_b is not None and of_b.dim == b_first + 1:
        return ({a: rw.entered(a), b: rw.local(b)}, of_b.along(rank - 1), False) if of_a is None else None
    batch = of_a.along(of_a.dim + rank - len(left)) if of_a else of_b.along(of_b.dim + rank - len(right))
    given = {}
    for one, sizes in ((a, left), (b, right)):
        dim = batch.dim - rank + len(sizes)
        if dim < 0 or sizes[dim] == 1:
            given[one] = rw.entered(one)
        else:
            given[one] = rw.picked(one, batch.along(dim))
    return given, batch, False


def embedding(rw: Rewriter, node: fx.Node) -> Value | None:
    """Rows of a table: split by words, each worker has zeros for those of the others; or split by features."""
    bound = arguments_of(node)
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
    look = Lookup(rw.group, split.size, bound.get("padding_idx", -1))
    return Value(rw.summed(rw.call(look, rw.local(table), rw.local(words))))


def convolution(rw: Rewriter, node: fx.Node) -> Value | None:
    """Of channels: by those that come out (rows of the weight), or by those that go in."""
    bound = arguments_of(node)
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    split = rw.split_of(weight)
    if split is None or bound.get("groups", 1) != 1 or len(rw.shape(x)) != len(rw.shape(weight)):
        return None
    if split.dim == 0:
        given = {x: rw.entered(x), weight: rw.local(weight)}
        if bias is not None:
            given[bias] = rw.picked(bias, split.along(0))
        return rw.copy(node, given, split.along(1))
    if split.dim != 1:
        return None
    given = {x: rw.picked(x, split.along(1)), weight: rw.local(weight)}
    total = rw.summed(rw.copy(node, given, None, bias=None).node)
    if bias is None:
        return Value(total)
    shape = [-1] + [1] * (len(rw.shape(weight)) - 2)
    return Value(rw.add(add_bias, total, rw.add(aten.reshape.default, rw.whole(bias), shape)))


def group_norm(rw: Rewriter, node: fx.Node) -> Value | None:
    """Over whole groups of channels."""
    bound = arguments_of(node)
    x, groups, split = bound["input"], bound["num_groups"], rw.split_of(node.args[0])
    if split is None or split.dim != 1 or len(split.parts) > 1 or groups % rw.group.workers:
        return None
    own = [one for one in (bound.get("weight"), bound.get("bias")) if one is not None]
    given = {x: rw.local(x), **{one: rw.picked(one, split.along(0)) for one in own}}
    return rw.copy(node, given, split, num_groups=groups // rw.group.workers)


def by_channel(rw: Rewriter, node: fx.Node) -> Value | None:
    """Pools and enlarges batches of images, each channel by itself."""
    first = node.args[0]
    split = rw.split_of(first)
    if split is None or split.dim != 1 or len(rw.shape(first)) != 4:
        return None
    return rw.copy(node, {first: rw.local(first)}, split)


def attention(rw: Rewriter, node: fx.Node) -> Value | None:
    """Scaled dot products of the same heads of queries, keys and values; their dropout needs whole ones."""
    bound = arguments_of(node)
    query, key, value, mask = bound["query"], bound["key"], bound["value"], bound.get("attn_mask")
    splits = [rw.split_of(one) for one in (query, key, value)]
    if bound.get("dropout_p") or any(split is None for split in splits) or len({s.dim for s in splits}) > 1:
        return None
    dim, rank = splits[0].dim, len(rw.shape(query))
    if dim >= rank - 2 or any(len(split.parts) > 1 for split in splits):
        return None
    given = {one: rw.local(one) for one in (query, key, value)}
    if mask is not None:
        of_mask = dim - rank + len(rw.shape(mask))
        whole = of_mask < 0 or rw.shape(mask)[of_mask] == 1
        given[mask] = rw.entered(mask) if whole else rw.picked(mask, splits[0].along(of_mask))
    origins = frozenset().union(*(split.origins for split in splits))
    return rw.copy(node, given, splits[0].with_origins(origins))
