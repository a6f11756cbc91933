"""Finds model behaviour that no export keeps: gradient hooks, custom backwards, Python state, other RNGs.

Names each hazard and what it does to a job, and tries whether the output depends on it (counters set ahead, other
random numbers, repeated forwards). Comparing a model with its graph is checks/export's.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from worker.contract.profile import TraceError

# By how much a number that forward counts up is put ahead, to see whether anything comes to depend on it.
_COUNTER_OFFSETS = (1, 10, 1_000, 100_000)
# How often Python's random numbers are drawn anew, to see whether anything depends on them.
_RNG_TRIALS = 8
# How often forward runs again where it changes what cannot be put ahead.
_RERUNS = 3
_COLLECTIONS = (list, dict, set, deque)
SKIP_CHECK_HINT = "training.check_trace: false leaves out this check"


def check_trainable(model: nn.Module) -> None:
    """Refuse a model that cannot be trained in stages whatever its graph is; TraceError names what and the way out."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        count = sum(1 for _ in model.parameters())
        why = f"all of its {count} parameters are frozen" if count else "it has no parameters"
        raise TraceError(
            f"{type(model).__name__} has nothing to train: {why}; leave requires_grad on for what is to be trained"
        )
    for name, parameter in trained.items():
        if parameter.is_complex():
            raise TraceError(
                f"parameter {name!r} is complex ({parameter.dtype}), which norms and reductions of gradients do not "
                "take: keep real and imaginary part as real parameters, and use torch.view_as_complex in forward"
            )
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.sparse and module.weight.requires_grad:
            raise TraceError(
                f"module {name!r} ({type(module).__name__}) makes sparse gradients, which pipelines do not sum or "
                "clip: build it with sparse=False"
            )
        if module.max_norm is not None:
            raise TraceError(
                f"module {name!r} ({type(module).__name__}) has max_norm={module.max_norm}: its forward changes its "
                "weight, which no trace keeps; build it without max_norm, and scale its output in forward instead"
            )


def check_gradient_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients: a stage never calls them. TraceError names the first."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise TraceError(
                f"parameter {name!r} has a hook on its gradient, which no stage calls: scale or change gradients in "
                f"the optimizer (optimizer.factory may name one of your own), or remove the hook; {SKIP_CHECK_HINT}"
            )
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(
                f"{_module_label(model, name)} has a backward hook, which no stage calls: put what it does "
                f"into forward (torch.library.custom_op takes a backward of its own), or remove it; {SKIP_CHECK_HINT}"
            )


def check_group_norms(graph: fx.GraphModule, values: Mapping[fx.Node, Any]) -> None:
    """Refuse, for CPU, a group norm that trains weights on an input which takes no gradient and lies in channels-last
    order: torch's kernel writes that gradient all the same, and the process dies. `values` are fake results."""
    for node in graph.graph.nodes:
        if node.target is not torch.ops.aten.group_norm.default:
            continue
        given, _, *weights = node.args
        value = values.get(given)
        trained = [one for one in weights if isinstance(one, fx.Node) and values[one].requires_grad]
        if not trained or value is None or value.requires_grad or value.dim() not in (4, 5):
            continue
        last = torch.channels_last if value.dim() == 4 else torch.channels_last_3d
        if value.is_contiguous(memory_format=last) and not value.is_contiguous():
            raise TraceError(
                f"the group norm of module {_module_of(node)!r} trains its weights on a tensor in channels-last order "
                "that nothing before it trains: torch's backward of that ends the process on CPU, without pipelines "
                "too; give it `x.contiguous()`, or freeze its weights as well"
            )


def _module_of(node: fx.Node) -> str:
    """The dotted name of the innermost module that a node was traced in."""
    stack = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return stack[-1].removeprefix("L['self'].") if stack else ""


def custom_autograd_functions(loss: Tensor) -> list[str]:
    """Names of the autograd functions of a user's own that `loss` came through."""
    found: dict[str, None] = {}
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found[type(node).__name__.removesuffix("Backward")] = None
        waiting += [following for following, _ in node.next_functions]
    return list(found)


@dataclass(frozen=True)
class ForwardSideEffects:
    """What a forward left other than it was: attributes of modules that hold numbers (module, attribute: value) or
    flags, texts and collections (`others`), Python's and numpy's generators (`draws`); and where (file:line) it put
    hooks on tensors."""

    numbers: Mapping[tuple[str, str], float]
    others: tuple[tuple[str, str], ...]
    draws: bool
    hooks: tuple[str, ...]


class SideEffectWatch:
    """Notices what a forward of `model` moves; `end` says it, to be called when the forward is over."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._hooks: list[str] = []
        self._register = Tensor.register_hook
        self._moved: ForwardSideEffects | None = None

    def __enter__(self) -> SideEffectWatch:
        self._before, self._others = _number_attributes(self._model), _other_attributes(self._model)
        self._generators = _python_rng_state()

        def register_hook(tensor: Tensor, hook: Callable) -> Any:
            caller = sys._getframe(1)
            self._hooks.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
            return self._register(tensor, hook)

        Tensor.register_hook = register_hook
        return self

    def __exit__(self, *_: object) -> None:
        Tensor.register_hook = self._register

    def end(self) -> ForwardSideEffects:
        numbers = {
            key: value
            for key, value in _number_attributes(self._model).items()
            if self._before.get(key, value) != value
        }
        others = [
            key
            for key, value in _other_attributes(self._model).items()
            if self._others.get(key, value) != value
        ]
        return ForwardSideEffects(
            numbers, tuple(others), self._generators != _python_rng_state(), tuple(self._hooks)
        )


def find_dependence(
    model: nn.Module, moved: ForwardSideEffects, differs: Callable[[int | None], bool]
) -> str | None:
    """The first state that forward depends on and a graph keeps as traced, in words, or None.

    `differs(seed)` runs the forward with Python's generators at `seed` (None: as before) and says whether it
    made something else.
    """
    if moved.draws and any(differs(seed) for seed in range(_RNG_TRIALS)):
        return "random numbers of Python or numpy, which are drawn once, while tracing: draw them with torch"
    if moved.others and any(differs(None) for _ in range(_RERUNS)):
        (name, attribute), *_ = moved.others
        return (
            f"the attribute {attribute!r} of {_module_label(model, name)}, it seems, which forward itself changes and a "
            "trace keeps as it was: keep it in a buffer and compute with tensors"
        )
    modules = dict(model.named_modules())
    for (name, attribute), value in moved.numbers.items():
        try:
            for ahead in _COUNTER_OFFSETS:
                setattr(modules[name], attribute, value + ahead)
                if differs(None):
                    return (
                        f"the number {attribute!r} of {_module_label(model, name)}, which forward itself changes "
                        "and a trace keeps as it was: keep it in a buffer and compute with tensors"
                    )
        finally:
            setattr(modules[name], attribute, value)
    return None


def hazard_notes(model: nn.Module, moved: ForwardSideEffects, functions: Sequence[str] = ()) -> list[str]:
    """What to tell of a model whose result was not found to depend on what its forward moves, nor its gradients on the
    backwards of the autograd `functions` that it calls."""
    found = [
        f"forward changes {attribute!r} of {_module_label(model, name)}, which a trace keeps as it was: no change that was "
        "tried changed the output"
        for name, attribute in [*moved.numbers, *moved.others]
    ]
    if moved.draws:
        found.append(
            "forward draws random numbers of Python or numpy, which are drawn once, while tracing: no other draw that "
            "was tried changed the output"
        )
    if functions:
        found.append(
            f"forward calls the autograd function {', '.join(functions)}, of whose own backward tracing keeps nothing: on "
            "the first microbatch autograd's gradients were the same"
        )
    return found


def seed_python_rngs(seed: int) -> None:
    """Python's and numpy's generators stand at `seed` from now on."""
    random.seed(seed)
    np.random.seed(seed)


def _module_label(model: nn.Module, name: str) -> str:
    return f"module {name!r}" if name else type(model).__name__


def _number_attributes(model: nn.Module) -> dict[tuple[str, str], float]:
    return {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if type(value) in (int, float)
    }


def _other_attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Flags and texts, and of collections how many entries they have."""
    return {
        (name, attribute): len(value) if isinstance(value, _COLLECTIONS) else value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if type(value) in (bool, str) or isinstance(value, _COLLECTIONS)
    }


def _python_rng_state() -> tuple:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest
