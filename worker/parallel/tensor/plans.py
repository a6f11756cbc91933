"""Tensor-parallel plans: the style of each parameter, by a user's module-name patterns or built-in ones.

Styles are colwise, rowwise, vocab and replicate. A user's plan that does not divide a parameter, or splits one
whose use is not known, is refused; a built-in one leaves it whole, but for matrices of linear layers.
Names and graphs only: no tensors are cut here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import fx, nn

from worker.contract.profile import ModelError
from worker.model.factory import pattern_matches
from worker.parallel.tensor.placement import LayoutError, Split
from worker.parallel.tensor.rewrite import bound_arguments, op_name

Style = Literal["colwise", "rowwise", "vocab", "replicate"]

BUILT_IN_PLAN: tuple[tuple[str, Style], ...] = (
    # the built-in GPT; timm's vision transformers
    *((f"*.{name}", "colwise") for name in ("qkv", "expand", "fc1")),
    *((f"*.{name}", "rowwise") for name in ("attention.project", "contract", "attn.proj", "fc2")),
    ("embed.token", "vocab"),
    # Llama, Mistral, Qwen, Gemma, Phi, OPT, BART, Whisper, …
    *((f"*.{name}_proj", "colwise") for name in ("q", "k", "v", "qkv", "gate", "up", "gate_up")),
    *((f"*.{name}", "rowwise") for name in ("o_proj", "out_proj", "down_proj", "self_attn.dense")),
    *((name, "vocab") for name in ("*.embed_tokens", "lm_head", "*.wte", "*.word_embeddings", "shared")),
    # GPT-2, GPT-J, MPT
    *((f"*.{name}", "colwise") for name in ("c_attn", "c_fc", "fc_in", "Wqkv")),
    *((f"*.{name}", "rowwise") for name in ("c_proj", "fc_out")),
    # GPT-NeoX, BLOOM, Falcon
    *((f"*.{name}", "colwise") for name in ("query_key_value", "dense_h_to_4h")),
    *((f"*.{name}", "rowwise") for name in ("attention.dense", "self_attention.dense", "dense_4h_to_h")),
    *((name, "vocab") for name in ("*.embed_in", "embed_out")),
    # BERT, RoBERTa, ViT of transformers; DistilBERT
    *((f"*.attention.{name}", "colwise") for name in ("query", "key", "value")),
    *((f"*.self.{name}", "colwise") for name in ("query", "key", "value")),
    ("*.intermediate.dense", "colwise"),
    ("*.output.dense", "rowwise"),
    *((f"*.{name}", "colwise") for name in ("q_lin", "k_lin", "v_lin", "ffn.lin1")),
    *((f"*.{name}", "rowwise") for name in ("out_lin", "ffn.lin2")),
    # the built-in U-Net, and those of diffusers
    *((f"{name}.conv1", "colwise") for name in ("down.*", "up.*", "middle", "*.resnets.*")),
    *((f"{name}.conv2", "rowwise") for name in ("down.*", "up.*", "middle", "*.resnets.*")),
    # T5
    *((f"*Attention.{name}", "colwise") for name in ("q", "k", "v", "relative_attention_bias")),
    ("*Attention.o", "rowwise"),
    *((f"*.{name}", "colwise") for name in ("wi", "wi_0", "wi_1")),
    ("*.wo", "rowwise"),
)
"""Module-name patterns of model families with their styles; the first match counts."""

_MAX_SHOWN_MODULES = 8
_PEFT_SUFFIX = ".base_layer"
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_MATRICES = {"linear": 0, "addmm": 1, "mm": 1, "matmul": 1}
_OUTPUT_DIM = {**_MATRICES, "embedding": 1, **dict.fromkeys(_CONVOLUTIONS, 0)}
"""The dimension of the matrix that becomes a dimension of the result, by operation."""
_TRANSPOSES = ("t", "numpy_T", "mT", "transpose")
"""Operations that transpose a matrix (of two dimensions `transpose` can swap no others)."""
_PASS_THROUGH = ("to", "_to_copy", "type_as", "contiguous")
"""Operations that leave a parameter's elements where they are."""


def style_of(name: str, plan: Mapping[str, str] | None) -> str | None:
    """The style of the parameter `name`; None where no pattern matches its module."""
    modules = _module_names(name)
    patterns = BUILT_IN_PLAN if plan is None else plan.items()
    return next(
        (style for pattern, style in patterns if any(pattern_matches(pattern, module) for module in modules)),
        None,
    )


def _module_names(name: str) -> tuple[str, ...]:
    """The names of a parameter's module: of a layer that peft has wrapped also the name before."""
    module = name.rpartition(".")[0]
    return (module, module.removesuffix(_PEFT_SUFFIX)) if module.endswith(_PEFT_SUFFIX) else (module,)


def check_tensor_plan(plan: Mapping[str, str] | None, names: Sequence[str], workers: int) -> None:
    """ModelError for a plan that splits none of the parameters `names`, or has a pattern without a matching module."""
    modules = list(dict.fromkeys(module for name in names for module in _module_names(name)))
    shown = ", ".join(modules[:_MAX_SHOWN_MODULES]) + (
        f" and {len(modules) - _MAX_SHOWN_MODULES} more" if len(modules) > _MAX_SHOWN_MODULES else ""
    )
    if plan is None:
        if not any(style_of(name, None) for name in names):
            raise ModelError(
                f"parallelism.tp is {workers}, and the built-in plan knows none of the model's modules ({shown}): say in "
                "resources.tensor_plan which are colwise, rowwise or vocab"
            )
        return
    idle = [pattern for pattern in plan if not any(pattern_matches(pattern, module) for module in modules)]
    if idle:
        raise ModelError(
            f"resources.tensor_plan: no module is called {', '.join(map(repr, idle))}; a star stands for any characters, "
            f"dots too, and re: begins a regular expression. The modules with parameters are {shown}"
        )
    if all(style_of(name, plan) in (None, "replicate") for name in names):
        raise ModelError(
            f"parallelism.tp is {workers}, and resources.tensor_plan shares no module of the model ({shown}): say which "
            "are colwise, rowwise or vocab, or set tp to 1"
        )


def split_parameters(
    body: fx.GraphModule, names: Mapping[str, str], plan: Mapping[str, str] | None, workers: int
) -> dict[str, Split]:
    """The splits of a stage's parameters, by their names in the graph; `names` has those in the model.

    LayoutError for a user's plan that does not divide a parameter, or splits one whose use is not known. The built-in plan
    leaves such a parameter whole, but for the matrices of linear layers, which have heads and hidden features.
    """
    splits: dict[str, Split] = {}
    for node in body.graph.nodes:
        if node.op != "get_attr" or node.target not in names:
            continue
        if not isinstance(getattr(body, node.target), nn.Parameter):
            continue  # a buffer stays whole
        name = names[node.target]
        style = style_of(name, plan)
        if style in (None, "replicate"):
            continue
        shape = getattr(body, node.target).shape
        dim = _split_dimension(node, style, len(shape))
        if dim is None:
            if plan is not None and len(shape) > 1:
                raise LayoutError(_unknown_use_message(node, name, style, list(shape)))
            continue
        split = Split(dim, (shape[dim],), frozenset({name}))
        if shape[dim] % workers and plan is None and not (style != "vocab" and _is_linear_matrix(node)):
            continue
        split.check(workers, f"parameter {name!r} ({style})")
        splits[node.target] = split
    return splits


def _split_dimension(node: fx.Node, style: str, rank: int) -> int | None:
    """The dimension of a parameter that its style splits; None: it stays whole."""
    if rank == 1:
        return 0 if style == "colwise" else None  # what is added to a sum is added once
    if style == "vocab":
        return 0
    for user in node.users:
        name = op_name(user)
        if rank == 2 and name in _TRANSPOSES:  # x @ W.T, as Falcon's layers write it
            turned = _split_dimension(user, style, rank)
            if turned is not None:
                return 1 - turned
        if name in _PASS_THROUGH and (passed := _split_dimension(user, style, rank)) is not None:
            return passed
        outer = _OUTPUT_DIM.get(name)
        if (
            outer is not None
            and (rank == 2 or name in _CONVOLUTIONS)
            and node in list(bound_arguments(user).values())
        ):
            return outer if style == "colwise" else 1 - outer
    return None


def _is_linear_matrix(node: fx.Node) -> bool:
    """True for a parameter that is the matrix of a linear layer."""
    return any(
        op_name(user) in _MATRICES
        or (op_name(user) in (*_TRANSPOSES, *_PASS_THROUGH) and _is_linear_matrix(user))
        for user in node.users
    )


def _unknown_use_message(node: fx.Node, name: str, style: str, shape: list[int]) -> str:
    """The message for a matrix that a plan splits and that no known operation uses."""
    users = ", ".join(sorted({op_name(user) for user in node.users})) or "nothing"
    known = ", ".join(_OUTPUT_DIM)
    return (
        f"resources.tensor_plan has parameter {name!r} of shape {shape} as {style}, and it is used by {users}: "
        f"only what {known} use can be split so; give it replicate, in a pattern before that one"
    )


def candidate_parts(body: fx.GraphModule, name: str, split: Split, workers: int) -> list[Split]:
    """Other parts of a split dimension that may be its true ones: two or three equal ones, or those into which the graph
    splits it."""
    size = split.size
    candidates = [(size // count,) * count for count in (3, 2) if size % (count * workers) == 0]
    for node in body.graph.nodes:
        sizes = tuple(node.args[1]) if op_name(node) == "split_with_sizes" else _slice_sizes(node, size)
        if sum(sizes) == size and all(part % workers == 0 for part in sizes):
            candidates.append(sizes)
    return [split.along(split.dim, parts) for parts in dict.fromkeys(candidates)]


def _slice_sizes(node: fx.Node, size: int) -> tuple[int, ...]:
    """The sizes of the slices of a value's last dimension, where these are all of it."""
    slices = [bound_arguments(user) for user in node.users if op_name(user) == "slice"]
    ends = {0, size}
    for arguments in slices:
        ends |= {
            end
            for end in (arguments.get("start"), arguments.get("end"))
            if isinstance(end, int) and 0 < end < size
        }
    places = sorted(ends)
    return tuple(after - before for before, after in itertools.pairwise(places)) if slices else ()
