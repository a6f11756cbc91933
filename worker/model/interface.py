"""How a user's model is called, and what of its result is used: stages take and give tensors only.

Inputs go in by position or by keyword; out comes one tensor of a nest of tuples, dicts and dataclasses (those of
transformers and diffusers among them), or the loss that the model computes itself.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from worker.model.errors import TraceError

LOSS = "loss"


def adapt(
    model: nn.Module, keywords: Sequence[str], *, output: str | None = None, own_loss: bool = False
) -> None:
    """From now on `model` takes tensors by position, named by `keywords` where there are any, and returns one.

    That is the one named `output` ("logits", "0.hidden"), its loss where `own_loss`, or else the only one there is.
    Its modules and parameters keep their names, which is why nothing is put around it. Caches of keys and values,
    which no training uses, are turned off in the configurations of its modules.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
    original = model.forward
    running = False

    @functools.wraps(original)
    def forward(*inputs: Any, **named: Any) -> Any:
        nonlocal running
        if running:  # the model calls itself
            return original(*inputs, **named)
        running = True
        try:
            given = dict(zip(keywords, inputs, strict=True)) if keywords else {}
            result = original(**given) if keywords else original(*inputs)
        finally:
            running = False
        return _chosen(result, type(model).__name__, output, own_loss)

    if keywords:  # what the graph calls its inputs
        kind = inspect.Parameter.POSITIONAL_ONLY
        forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in keywords])
    model.forward = forward


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nest with their dotted names; that of a tensor itself is empty."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for name, part in _parts(value):
        yield from tensors_of(part, f"{path}.{name}" if path else name)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):  # before dataclasses: ModelOutput is both
        yield from ((str(key), part) for key, part in value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((one.name, getattr(value, one.name)) for one in dataclasses.fields(value))
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", None) or range(len(value))
        yield from ((str(name), part) for name, part in zip(names, value, strict=True))


def _chosen(result: Any, model: str, output: str | None, own_loss: bool) -> Tensor:
    if isinstance(result, Tensor) and output is None and not own_loss:
        return result
    found = dict(tensors_of(result))
    shown = ", ".join(f"{name or 'a tensor'} {list(tensor.shape)}" for name, tensor in found.items())
    returned = f"{model} returns a {type(result).__name__} of {shown or 'no tensors'}"
    if own_loss:
        return _own_loss(found, returned, output)
    if output is not None:
        if output not in found:
            raise TraceError(f"{returned}, none of them named {output!r}: correct model.output")
        return found[output]
    if len(found) != 1:
        raise TraceError(
            f"{returned}, and the loss takes one tensor: say in model.output which one"
            + (", or leave out `loss`, since the model returns its own" if LOSS in found else "")
        )
    return next(iter(found.values()))


def _own_loss(found: Mapping[str, Tensor], returned: str, output: str | None) -> Tensor:
    """The tensor named as the job says, or `loss`, or the only single number."""
    numbers = [name for name, tensor in found.items() if tensor.dim() == 0 and tensor.is_floating_point()]
    name = output or (LOSS if LOSS in found else numbers[0] if len(numbers) == 1 else None)
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
