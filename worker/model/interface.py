"""Adapts a user's model so that it takes tensors by position and returns one tensor or a tuple of tensors.

Inputs go in by position or keyword; out comes one tensor of a pytree (tuples, dicts, dataclasses, those of
transformers and diffusers among them), all of them, or the loss that the model computes itself. Replaces
`forward` in place: modules and parameters keep their names, which is why nothing is wrapped around the model.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from worker.contract.profile import TraceError
from worker.model.hf_patches import run_all_experts
from worker.model.pytree import TreeSpec, describe_tree, flatten_tree, named_children, named_leaves

LOSS_OUTPUT = "loss"
WHOLE_OUTPUT = "*"
"""As model.output: the loss takes the result as the model returns it, though it be a single tensor in a dict."""


class ModelInterface:
    """The adaptation of a model: the TreeSpec of its last result (None for one tensor), and notes for people."""

    tree_spec: TreeSpec | None = None
    notes: Sequence[str] = ()


def adapt_model(
    model: nn.Module, keywords: Sequence[str], *, output: str | None = None, own_loss: bool = False
) -> ModelInterface:
    """From now on `model` takes tensors by position, named by `keywords` where there are any, and returns one or a tuple.

    One is that named `output` ("logits", "0.hidden"), its loss where `own_loss`, or else the only one there is. Where
    there are several they come as a tuple, and the returned Interface says what they were parts of.
    Its modules and parameters keep their names, which is why nothing is put around it. Caches of keys and values,
    which no training uses, are turned off in the configurations of its modules.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
    interface, running = ModelInterface(), False
    interface.notes = run_all_experts(model)
    # bound to the model, not to this one: a copy of the model calls itself
    own = vars(model).get("forward", type(model).forward)
    own, bound = (
        getattr(own, "__func__", own),
        isinstance(own, types.MethodType) or "forward" not in vars(model),
    )

    @functools.wraps(model.forward)
    def forward(model: nn.Module, *inputs: Any, **named: Any) -> Any:
        nonlocal running
        original = functools.partial(own, model) if bound else own
        if running:  # the model calls itself
            return original(*inputs, **named)
        running = True
        try:
            given = dict(zip(keywords, inputs, strict=True)) if keywords else {}
            result = original(**given) if keywords else original(*inputs)
        finally:
            running = False
        chosen, interface.tree_spec = _select_output(result, type(model).__name__, output, own_loss)
        return chosen

    kind = inspect.Parameter.POSITIONAL_ONLY
    taken = [inspect.Parameter("model_", kind)]  # what the graph calls its inputs
    if keywords:
        taken += [inspect.Parameter(name, kind) for name in keywords]
    else:
        taken += inspect.signature(model.forward).parameters.values()
    forward.__signature__ = inspect.Signature(taken)
    del forward.__wrapped__  # it would keep the model
    model.forward = types.MethodType(forward, model)
    return interface


def _select_output(
    result: Any, model: str, output: str | None, own_loss: bool
) -> tuple[Tensor | tuple[Tensor, ...], TreeSpec | None]:
    if isinstance(result, Tensor) and output in (None, WHOLE_OUTPUT) and not own_loss:
        return result, None
    found = dict(named_leaves(result))
    returned = f"{model} returns {describe_tree(result)}"
    if own_loss:
        return _own_loss_output(found, returned, output), None
    if output not in (None, WHOLE_OUTPUT):
        return _named_output(result, output, returned)
    if not found:
        raise TraceError(f"{returned}, and the loss takes some: return the tensors that it needs")
    if len(found) == 1 and output is None:
        return next(iter(found.values())), None
    return flatten_tree(result)


def _named_output(
    result: Any, output: str, returned: str
) -> tuple[Tensor | tuple[Tensor, ...], TreeSpec | None]:
    """The part of a result with a dotted name."""
    part = result
    for name in output.split("."):
        if (part := dict(named_children(part)).get(name)) is None:
            raise TraceError(f"{returned}, none of them named {output!r}: correct model.output")
    if isinstance(part, Tensor):
        return part, None
    tensors, tree_spec = flatten_tree(part)
    if not tensors:
        raise TraceError(f"{returned}, and {output!r} is no tensor and holds none: correct model.output")
    return tensors, tree_spec


def _own_loss_output(found: Mapping[str, Tensor], returned: str, output: str | None) -> Tensor:
    """The tensor named as the job says, or `loss`, or the only single number."""
    numbers = [name for name, tensor in found.items() if tensor.dim() == 0 and tensor.is_floating_point()]
    name = output or (LOSS_OUTPUT if LOSS_OUTPUT in found else numbers[0] if len(numbers) == 1 else None)
    if name is None or name not in found:
        raise TraceError(
            f"the job has no loss, and {returned}, of which none is {output or 'its loss'!r}: give `loss`, name it in "
            "model.output, or have the data set return what the model's own loss needs (labels, with transformers)"
        )
    if name not in numbers:
        raise TraceError(
            f"{returned}, and {name or 'it'} is not one number: return the mean over the samples"
        )
    return found[name]
