"""One forward of a stage, and what its backward starts from: the one way in which stages are run.

The engine's actions, the warm-up and the measurement of layers all come here, so that what is warmed up and
measured is what runs. Must not know exchanges, lanes or transports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from worker.engine.routes import LocalInput, ModelInput, RemoteInput

Source = ModelInput | LocalInput | RemoteInput
Positions = int | Sequence[int] | None
"""Which of a module's outputs are the model's; of several the loss takes a tuple."""


@dataclass(frozen=True)
class Arguments:
    """Arguments of a stage's module. `leaves` are those that take a gradient, `sources` where each came from."""

    values: list[torch.Tensor]
    leaves: list[torch.Tensor]
    sources: list[LocalInput | RemoteInput]


@dataclass(frozen=True)
class StageRun:
    """What a forward made: the module's outputs in order, and the loss of the model's output."""

    outputs: list[torch.Tensor]
    loss: torch.Tensor | None

    def roots(self, loss_of: Positions) -> list[torch.Tensor]:
        """Everything that a backward may start from, the loss in place of the outputs `loss_of`."""
        places = _places(loss_of)
        candidates = list(self.outputs)
        if self.loss is not None and places:
            candidates[places[0]] = self.loss
            candidates = [root for at, root in enumerate(candidates) if at not in places[1:]]
        return [root for root in candidates if root.requires_grad]


def gather(
    sources: Sequence[Source], fetch: Callable[[Source], torch.Tensor], *, training: bool
) -> Arguments:
    """The tensors that `fetch` gives for `sources`; with `training`, leaves for those that take a gradient."""
    values, leaves, leaf_sources = [], [], []
    for source in sources:
        tensor = fetch(source)
        if not isinstance(source, ModelInput):
            tensor = tensor.detach()
            if training and _takes_gradient(source, tensor):
                leaves.append(tensor.requires_grad_())
                leaf_sources.append(source)
        values.append(tensor)
    return Arguments(values, leaves, leaf_sources)


def _takes_gradient(source: LocalInput | RemoteInput, tensor: torch.Tensor) -> bool:
    if isinstance(source, RemoteInput):
        return source.route.differentiable
    return tensor.is_floating_point() or tensor.is_complex()


@contextlib.contextmanager
def _autocast(device_type: str, dtype: torch.dtype, *, keep_casts: bool) -> Iterator[None]:
    """Autocast whose casts of weights outlive it, until `drop_casts`: torch's own drops them with the outermost
    context, and each microbatch in flight would keep a copy of every weight. (Of a frozen one each still does:
    torch keeps casts of what takes a gradient.) Without gradients none is kept.
    """
    torch.autocast_increment_nesting()
    try:
        with torch.autocast(device_type, dtype=dtype, cache_enabled=keep_casts):
            yield
    finally:
        torch.autocast_decrement_nesting()


def drop_casts() -> None:
    """Forget the casts of weights that forwards under autocast share; to be called when weights change."""
    torch.clear_autocast_cache()


def _no_leaf(argument: torch.Tensor) -> torch.Tensor:
    """The same values and gradients, but not what autocast takes for a weight, whose cast would be kept."""
    return argument.view_as(argument) if argument.requires_grad and argument.is_leaf else argument


@contextlib.contextmanager
def computing(device_type: str, *, training: bool, autocast_dtype: torch.dtype | None) -> Iterator[None]:
    """The body computes with gradients (`training`) and under autocast (a dtype), as a stage does."""
    grad = torch.enable_grad() if training else torch.no_grad()
    autocast = contextlib.nullcontext()
    if autocast_dtype is not None:
        autocast = _autocast(device_type, autocast_dtype, keep_casts=training)
    with grad, autocast:
        yield


def run_forward(
    module: nn.Module,
    arguments: Sequence[torch.Tensor],
    *,
    device_type: str,
    training: bool,
    autocast_dtype: torch.dtype | None,
    accept: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] = list,
    loss_of: Positions = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> StageRun:
    """Run `module`, and `loss` on its outputs `loss_of`, with gradients (`training`) and under autocast (a dtype).

    `accept` makes of the module's outputs those that are handed on; the loss sees these.
    """
    if autocast_dtype is not None:
        arguments = [_no_leaf(argument) for argument in arguments]
    with computing(device_type, training=training, autocast_dtype=autocast_dtype):
        results = module(*arguments)
        outputs = accept((results,) if isinstance(results, torch.Tensor) else results)
        value = None
        if loss is not None and (places := _places(loss_of)):
            value = loss(outputs[places[0]] if len(places) == 1 else tuple(outputs[at] for at in places))
    return StageRun(outputs, value)


def _places(loss_of: Positions) -> tuple[int, ...]:
    if loss_of is None:
        return ()
    return (loss_of,) if isinstance(loss_of, int) else tuple(loss_of)
