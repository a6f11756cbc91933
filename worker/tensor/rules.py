"""Which operations can run on parts of tensors, and how: a rule for each kind, by operator name."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from worker.tensor.products import (
    addmm,
    attention,
    by_channel,
    convolution,
    embedding,
    group_norm,
    linear,
    matmul,
    norm,
)
from worker.tensor.rewrite import Rewriter, Value
from worker.tensor.shapes import (
    along_dimensions,
    cat,
    dropout,
    expand,
    getitem,
    new_like,
    permute,
    pieces,
    pointwise,
    repeat,
    repeat_interleave,
    reshape,
    same,
    select,
    slice_,
    unbind,
)

Rule = Callable[[Rewriter, fx.Node], Value | None]

RULES: dict[str, Rule] = {
    "pointwise": pointwise,
    **dict.fromkeys(
        ("contiguous", "to", "type_as", "detach", "alias", "lift_fresh_copy", "_to_copy", "clone", "gelu_"),
        same,
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
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), pieces),
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
        along_dimensions,
    ),
    **dict.fromkeys(("layer_norm", "rms_norm"), norm),
    "linear": linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), matmul),
    "addmm": addmm,
    "embedding": embedding,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    "group_norm": group_norm,
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "avg_pool2d", "max_pool2d"), by_channel),
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), new_like),
}
