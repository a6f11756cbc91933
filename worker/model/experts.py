"""Mixtures of experts whose forward asks which experts were chosen: no graph holds that, since values tell.

Nearly all of transformers have an implementation that traces; those that have none are run with every expert on every
token, each result weighted by whether the expert was chosen: the same sums, at the cost of all experts. An expert that no
token of a batch chose has a gradient of zero, where the loop over the chosen ones leaves it none.
"""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot

NOTE = (
    "{names} loops over the experts that were chosen, which cannot be traced: every expert runs on every token instead, "
    "with weight 0 where it was not chosen; the sums are the same, and experts that nobody chose have gradients of zero, "
    "not none"
)


def run_all_experts(model: nn.Module) -> list[str]:
    """Give the modules of `model` that loop over chosen experts a forward that takes all; what to tell of it."""
    found: dict[str, None] = {}
    for module in model.modules():
        kind = type(module)
        forward = _FORWARDS.get(kind.__name__)
        if forward is not None and kind.__module__.startswith("transformers."):
            module.forward = types.MethodType(forward, module)
            found[kind.__name__] = None
    return [NOTE.format(names=", ".join(found))] if found else []


def _switch(self: nn.ModuleDict, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`chosen` is [tokens, 1, experts] of ones and zeros, as is all zero for a token that is over the capacity."""
    mask = chosen.permute(2, 1, 0)
    total = torch.zeros_like(hidden)
    for index in range(self.num_experts):
        made = self[f"expert_{index}"](hidden) * _share(mask[index], weights)[:, None]
        total = total + made.to(hidden.dtype)
    return total


def _share(mask: Tensor, weights: Tensor) -> Tensor:
    """How much of each token is an expert's: the `weights` [tokens, slots] where `mask` [slots, tokens] has ones."""
    return torch.where(mask > 0, weights.transpose(0, 1), torch.zeros_like(weights[:1, :1])).sum(0)


def _dbrx(self: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    rows = hidden.shape[0]
    hidden = hidden.reshape(-1, self.hidden_size)
    mask = one_hot(chosen, num_classes=self.num_experts + 1).permute(2, 1, 0)
    shape = (-1, self.ffn_hidden_size, self.hidden_size)
    v1, w1, w2 = (weight.view(shape) for weight in (self.mlp.v1, self.mlp.w1, self.mlp.w2))
    total = torch.zeros_like(hidden)
    for index in range(self.num_experts):
        made = self.mlp(hidden, w1[index], v1[index], w2[index]).view(-1, self.hidden_size)
        total = total + made * _share(mask[index], weights)[:, None]
    return total.view(rows, -1, self.hidden_size)


def _longcat(self: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    mask = one_hot(chosen, num_classes=self.total_experts).permute(2, 1, 0)
    total = torch.zeros_like(hidden)
    for index in range(self.total_experts):
        if index >= self.num_routed_experts or self.gate_up_proj is None:
            made = self.identity_expert(hidden)
        else:
            gate, up = linear(hidden, self.gate_up_proj[index]).chunk(2, dim=-1)
            made = linear(self.act_fn(gate) * up, self.down_proj[index])
        total = total + (made * _share(mask[index], weights)[:, None]).to(hidden.dtype)
    return total


_FORWARDS: dict[str, Callable[..., Tensor]] = {
    "SwitchTransformersExperts": _switch,
    "DbrxExperts": _dbrx,
    "LongcatFlashExperts": _longcat,
}
