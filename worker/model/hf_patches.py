"""Patches library code while a model is exported: no-op `.to`, finite checks, expert routing, custom backwards.

Written for transformers. A `Module.to` that changes nothing is skipped, since parameters are stand-ins then.
Questions whether a tensor is finite are answered yes; infinite values show in the loss and the gradient norm.
Experts that were looped over as chosen run on every token with weight 0 where not chosen: equal sums, and zero in
place of no gradient. Known autograd functions get a forward from which autograd derives their backward. The check
before the first step finds a library that has changed what these do.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear, one_hot
from torch.overrides import TorchFunctionMode


@contextmanager
def skip_noop_conversions() -> Iterator[None]:
    """In the body `Module.to` does nothing where nothing would change."""
    original = nn.Module.to

    def to(self: nn.Module, *args: Any, **options: Any) -> nn.Module:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **options)
        tensors = [*self.parameters(), *self.buffers()]
        same = all(
            (device is None or one.device == device)
            and (dtype is None or one.dtype == dtype or not (one.is_floating_point() or one.is_complex()))
            for one in tensors
        )
        return self if same and memory_format is None else original(self, *args, **options)

    nn.Module.to = to
    try:
        yield
    finally:
        nn.Module.to = original


_ALL_EXPERTS_NOTE = (
    "{names} loops over the experts that were chosen, which cannot be traced: every expert runs on every token instead, "
    "with weight 0 where it was not chosen; the sums are the same, and experts that nobody chose have gradients of zero, "
    "not none"
)


def run_all_experts(model: nn.Module) -> list[str]:
    """Give the modules of `model` that loop over chosen experts a forward that takes all; what to tell of it."""
    found: dict[str, None] = {}
    for module in model.modules():
        kind = type(module)
        forward = _EXPERT_FORWARDS.get(kind.__name__)
        if forward is not None and kind.__module__.startswith("transformers."):
            module.forward = types.MethodType(forward, module)
            found[kind.__name__] = None
    return [_ALL_EXPERTS_NOTE.format(names=", ".join(found))] if found else []


def _switch_experts_forward(self: nn.ModuleDict, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`chosen` is [tokens, 1, experts] of ones and zeros, as is all zero for a token that is over the capacity."""
    mask = chosen.permute(2, 1, 0)
    total = torch.zeros_like(hidden)
    for index in range(self.num_experts):
        made = self[f"expert_{index}"](hidden) * _expert_weight(mask[index], weights)[:, None]
        total = total + made.to(hidden.dtype)
    return total


def _expert_weight(mask: Tensor, weights: Tensor) -> Tensor:
    """The weight of an expert for each token: `weights` [tokens, slots] where `mask` [slots, tokens] is one."""
    return torch.where(mask > 0, weights.transpose(0, 1), torch.zeros_like(weights[:1, :1])).sum(0)


def _dbrx_experts_forward(self: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    rows = hidden.shape[0]
    hidden = hidden.reshape(-1, self.hidden_size)
    mask = one_hot(chosen, num_classes=self.num_experts + 1).permute(2, 1, 0)
    shape = (-1, self.ffn_hidden_size, self.hidden_size)
    v1, w1, w2 = (weight.view(shape) for weight in (self.mlp.v1, self.mlp.w1, self.mlp.w2))
    total = torch.zeros_like(hidden)
    for index in range(self.num_experts):
        made = self.mlp(hidden, w1[index], v1[index], w2[index]).view(-1, self.hidden_size)
        total = total + made * _expert_weight(mask[index], weights)[:, None]
    return total.view(rows, -1, self.hidden_size)


def _longcat_experts_forward(self: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    mask = one_hot(chosen, num_classes=self.total_experts).permute(2, 1, 0)
    total = torch.zeros_like(hidden)
    for index in range(self.total_experts):
        if index >= self.num_routed_experts or self.gate_up_proj is None:
            made = self.identity_expert(hidden)
        else:
            gate, up = linear(hidden, self.gate_up_proj[index]).chunk(2, dim=-1)
            made = linear(self.act_fn(gate) * up, self.down_proj[index])
        total = total + (made * _expert_weight(mask[index], weights)[:, None]).to(hidden.dtype)
    return total


_EXPERT_FORWARDS: dict[str, Callable[..., Tensor]] = {
    "SwitchTransformersExperts": _switch_experts_forward,
    "DbrxExperts": _dbrx_experts_forward,
    "LongcatFlashExperts": _longcat_experts_forward,
}


_FINITE_CHECKS = {
    **dict.fromkeys((torch.isfinite, Tensor.isfinite), True),
    **dict.fromkeys((torch.isinf, Tensor.isinf, torch.isnan, Tensor.isnan), False),
}
_REDUCTIONS = {
    **dict.fromkeys((torch.all, Tensor.all), True),
    **dict.fromkeys((torch.any, Tensor.any), False),
}
_TO_PYTHON = (Tensor.__bool__, Tensor.item)


class AssumeFinite(TorchFunctionMode):
    """While a model is traced: all of a tensor is finite, where its forward asks for that; `asked` says how often."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self._known: dict[
            int, tuple[Tensor, bool, bool]
        ] = {}  # by id: what keeps it, its answer, whether one value

    def notes(self) -> list[str]:
        """Notes for people, empty where nothing was asked."""
        if not self.asked:
            return []
        return [
            f"forward asks {self.asked} times whether a tensor is finite, and is traced as if it always were: infinite "
            "values are not clamped, they show in the loss"
        ]

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = self._known.get(id(args[0])) if args else None
        if known is not None and known[2] and function in _TO_PYTHON:
            self.asked += 1
            return known[1]
        result = function(*args, **(kwargs or {}))
        if function in _FINITE_CHECKS:
            self._known[id(result)] = (result, _FINITE_CHECKS[function], False)
        elif known is not None and _REDUCTIONS.get(function) is known[1] and len(args) == 1 and not kwargs:
            self._known[id(result)] = (result, known[1], True)
        return result


@contextmanager
def patch_autograd_functions() -> Iterator[None]:
    """In the body the known functions are called as written here, also where a forward imports their module only then."""
    original = Function.__dict__["apply"]

    def apply(kind: type[Function], *args: Any, **options: Any) -> Any:
        written_anew = _PATCHED_FUNCTIONS.get((kind.__module__, kind.__name__))
        return (written_anew or original.__get__(None, kind))(*args, **options)

    Function.apply = classmethod(apply)
    try:
        yield
    finally:
        Function.apply = original


def _with_gradient(value: Tensor, term: Tensor) -> Tensor:
    """`value`, with the gradient of `term`."""
    return value.detach() + (term - term.detach())


def _sparse_mixer(
    scores: Tensor, multiplier: Tensor, selected: Tensor, gates: Tensor, mask: Tensor
) -> Tensor:
    """PhiMoE's backward: the scores get multiplier * (one-hot of the selected - gates) of the gradient."""
    ones = torch.zeros_like(gates).scatter(-1, selected, 1.0)
    slopes = (multiplier * (ones - gates)).detach()
    return _with_gradient(multiplier * mask, (scores * slopes).sum(-1, keepdim=True))


_MAX_SLOPE = 1000.0


def _bounded_root(x: Tensor) -> Tensor:
    """RecurrentGemma's square root, with a slope of at most _MOST."""
    slopes = 1 / torch.sqrt(torch.clip(4.0 * x.detach(), min=1 / _MAX_SLOPE**2))
    return _with_gradient(torch.sqrt(x.detach()), x * slopes)


_PATCHED_FUNCTIONS: dict[tuple[str, str], Callable[..., Tensor]] = {
    ("transformers.models.phimoe.modeling_phimoe", "PhimoeMultiplier"): _sparse_mixer,
    ("transformers.models.recurrent_gemma.modeling_recurrent_gemma", "SqrtBoundDerivative"): _bounded_root,
}
PATCHED_FUNCTION_NAMES = frozenset(name for _, name in _PATCHED_FUNCTIONS)
