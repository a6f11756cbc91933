"""Rewrites attention so that flash kernels run it: constant masks become flags or shared buffers, heads are not repeated.

While it exports a model, transformers builds an explicit mask and repeats keys and values, where it passes is_causal
and enable_gqa when it runs the model. Flash kernels take no mask. A mask that depends on an input, on a parameter or
on a persistent buffer stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from worker.model.passes.constants import GraphConstants, storage_id
from worker.model.passes.inplace import mutated_arguments

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MAX_MASK_BYTES = 2**30
"""A larger mask is computed where it is used, as the model says."""
_FLASH_HEAD_SIZE = 256
_HALF = (torch.float16, torch.bfloat16)
_TRANSFORMERS_CALL = "attention_interface("
"""The call by which models of transformers reach their attention, in the line that a node was traced from."""
_COPIES = ("clone", "contiguous", "alias")
_REPEATS = ("expand", "repeat_interleave")
_RESHAPES = ("reshape", "view", "_unsafe_view", "flatten", "unsqueeze")


def simplify_attention(
    constants: GraphConstants, values: Mapping[fx.Node, Any], *, device: str, autocast: torch.dtype | None
) -> bool:
    """Rewrite all attention of a graph; `values` are the fake results of its nodes. True if any attention changed.

    A constant mask that hides nothing is dropped; a lower triangle, with as many queries as keys, becomes is_causal; any
    other becomes a buffer, one for all equal masks. Where no mask is left, repeated keys and values give way to
    enable_gqa, if a fused kernel of `device` takes that with the type that it computes in under `autocast`. In half
    precision these are repeats of transformers alone, which the model itself runs without: gradients that are summed in
    another order differ there by more than the comparison with the model allows (of a bias of keys, which cancels out).
    """
    graph = constants.module.graph
    calls = [node for node in graph.nodes if node.target is ATTENTION]
    before = [(call.args, call.kwargs) for call in calls]
    masks: dict[fx.Node, list[fx.Node]] = {}
    for call in calls:
        mask = attention_arguments(call)["attn_mask"]
        if mask in constants.nodes:
            masks.setdefault(mask, []).append(call)
    for mask, value in constants.values(masks):
        _replace_mask(constants, masks[mask], _without_repeats(value), values)
    constants.erase_unused()
    mutated = {storage_id(values[arg]) for node in graph.nodes for arg in mutated_arguments(node)}
    for call in calls:
        dtype = values[call.args[0]].dtype if autocast is None else autocast
        unmasked = attention_arguments(call)["attn_mask"] is None
        if unmasked and _takes_grouped_heads(call, values, device, dtype):
            _undo_repeated_heads(call, values, mutated, only_of_transformers=dtype in _HALF)
    return before != [(call.args, call.kwargs) for call in calls]


def attention_arguments(call: fx.Node) -> dict[str, Any]:
    """All arguments of an attention by name, with defaults."""
    schema = ATTENTION._schema.arguments
    given = dict(zip((argument.name for argument in schema), call.args, strict=False)) | dict(call.kwargs)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}


def _set_arguments(call: fx.Node, **changed: Any) -> None:
    """Change arguments of an attention by name; those that have their defaults are left out of its keywords."""
    new = attention_arguments(call) | changed
    schema = ATTENTION._schema.arguments
    call.args = tuple(new[argument.name] for argument in schema if not argument.kwarg_only)
    call.kwargs = {
        argument.name: new[argument.name]
        for argument in schema
        if argument.kwarg_only and new[argument.name] != argument.default_value
    }


def _replace_mask(
    constants: GraphConstants, calls: list[fx.Node], mask: Tensor, values: Mapping[fx.Node, Any]
) -> None:
    """Give `calls` what is equal to their constant `mask`."""
    visible, hidden = _visible_and_hidden(mask)
    for call in calls:
        queries, keys = (values[call.args[place]].shape[-2] for place in (0, 1))
        if visible.all():
            _set_arguments(call, attn_mask=None)
        elif queries == keys and _is_lower_triangle(visible, hidden, queries):
            _set_arguments(call, attn_mask=None, is_causal=True)
        elif mask.nbytes <= MAX_MASK_BYTES:
            _set_arguments(call, attn_mask=constants.placeholder(mask))


def _visible_and_hidden(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The elements that a mask leaves as they are, and those that it takes away altogether."""
    if mask.dtype == torch.bool:
        return mask, ~mask
    return mask == 0, mask <= torch.finfo(mask.dtype).min


def _is_lower_triangle(visible: Tensor, hidden: Tensor, size: int) -> bool:
    """True for a mask that shows every query the keys up to its own place, and has size 1 before the last two dimensions."""
    if visible.numel() != size * size or visible.shape[-2:] != (size, size):
        return False
    triangle = torch.ones(size, size, dtype=torch.bool).tril()
    return torch.equal(visible.reshape(size, size), triangle) and torch.equal(
        hidden.reshape(size, size), ~triangle
    )


def _without_repeats(mask: Tensor) -> Tensor:
    """The mask with size 1 in those dimensions before the last two along which it is the same; attention broadcasts it."""
    for dim in range(mask.dim() - 2):
        first = mask.narrow(dim, 0, 1)
        if mask.stride(dim) == 0 or torch.equal(mask, first.expand_as(mask)):
            mask = first
    return mask


def _takes_grouped_heads(
    call: fx.Node, values: Mapping[fx.Node, Any], device: str, dtype: torch.dtype
) -> bool:
    """True where a fused kernel takes fewer heads of keys than of queries: on CUDA that is flash attention alone, in half
    precision; everything else would run unfused, which is worse than repeated heads."""
    sizes = {values[call.args[place]].shape[-1] for place in (0, 2)}
    return device == "cpu" or (dtype in _HALF and len(sizes) == 1 and max(sizes) <= _FLASH_HEAD_SIZE)


def _undo_repeated_heads(
    call: fx.Node, values: Mapping[fx.Node, Any], mutated: set[int], *, only_of_transformers: bool
) -> None:
    """Give `call` the keys and values before their heads were repeated, if both were repeated equally often."""
    chains = [_repeating_operations(call.args[place], values) for place in (1, 2)]
    if not all(chains):
        return
    sources = [chain[-1].args[0] for chain in chains]
    operations = list(dict.fromkeys([*chains[0], *chains[1]]))
    if only_of_transformers and not all(map(_is_of_transformers, operations)):
        return
    memory = {storage_id(values[node]) for node in [*operations, *sources]}
    if values[sources[0]].shape[1] != values[sources[1]].shape[1] or not memory.isdisjoint(mutated):
        return
    _set_arguments(call, key=sources[0], value=sources[1], enable_gqa=True)
    for node in operations:
        if not node.users:
            call.graph.erase_node(node)


def _is_of_transformers(node: fx.Node) -> bool:
    """True for an operation of the attention that models of transformers share, and not of such a model itself."""
    innermost = (node.meta.get("stack_trace") or "").rpartition('File "')[2]
    return "transformers" in innermost and _TRANSFORMERS_CALL in innermost


def _repeating_operations(node: fx.Node, values: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """The operations, last one first, that repeat each head of a tensor [batch, groups, length, size] several times in a
    row and make `node` of it; empty where it is not made so."""
    chain: list[fx.Node] = []
    while _operation(node) in (*_COPIES, *_RESHAPES, *_REPEATS):
        chain.append(node)
        node = node.args[0]
        if _operation(chain[-1]) not in _COPIES and _repeats_heads(chain, values):
            return chain
    return []


def _repeats_heads(chain: list[fx.Node], values: Mapping[fx.Node, Any]) -> bool:
    """True for a repeat_interleave of heads, an expand of a single head, and a view, an expand and a view of the shapes
    [batch, groups, 1, length, size], [batch, groups, repeats, length, size] and [batch, heads, length, size]."""
    source, made = (tuple(values[node].shape) for node in (chain[-1].args[0], chain[0]))
    if len(source) != 4 or len(made) != 4 or source[1] >= made[1]:
        return False
    steps = [node for node in chain if _operation(node) not in _COPIES]
    names = [_operation(node) for node in steps]
    batch, groups, length, size = source
    repeats = made[1] // groups
    if names == ["repeat_interleave"]:
        return made == (batch, groups * repeats, length, size) and isinstance(steps[0].args[1], int)
    if names == ["expand"]:
        return groups == 1 and made == (batch, repeats, length, size)
    shapes = [
        (batch, groups * repeats, length, size),
        (batch, groups, repeats, length, size),
        (batch, groups, 1, length, size),
    ]
    viewed = len(names) == 3 and names[0] in _RESHAPES and names[1] == "expand" and names[2] in _RESHAPES
    return viewed and [tuple(values[node].shape) for node in steps] == shapes


def _operation(node: Any) -> str:
    """The name of an operator of torch, of whatever overload; empty for everything else."""
    packet = getattr(node.target, "overloadpacket", None) if isinstance(node, fx.Node) else None
    return packet.__name__ if packet is not None else ""
