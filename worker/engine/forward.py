"""Runs one forward of a stage.

The engine's actions, the warm-up and the benchmark of layers all come here, so what is warmed up and measured
is what runs. Autocast's casts of weights outlive a forward until `drop_casts`: else each microbatch in flight
would keep a copy of every weight.
Must not know step state, lanes, transports or the RNG state (operations seed themselves by name).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from worker.engine.routes import LocalInput, ModelInput, RemoteInput

InputSource = ModelInput | LocalInput | RemoteInput
OutputPositions = int | Sequence[int] | None
"""The indices of a module's outputs that are the model's; of several the loss takes a tuple."""


@dataclass(frozen=True)
class StageArguments:
    """Arguments of a stage's module. `leaves` are the arguments that take a gradient; leaf k came from `sources[k]`."""

    values: list[torch.Tensor]
    leaves: list[torch.Tensor]
    sources: list[LocalInput | RemoteInput]


@dataclass(frozen=True)
class ForwardResult:
    """The module's outputs in order, and the loss of the model's output."""

    outputs: list[torch.Tensor]
    loss: torch.Tensor | None

    def roots(self, loss_of: OutputPositions) -> list[torch.Tensor]:
        """Everything that a backward may start from, the loss in place of the outputs `loss_of`."""
        places = _output_positions(loss_of)
        candidates = list(self.outputs)
        if self.loss is not None and places:
            candidates[places[0]] = self.loss
            candidates = [root for at, root in enumerate(candidates) if at not in places[1:]]
        return [root for root in candidates if root.requires_grad]


def gather_arguments(
    sources: Sequence[InputSource], fetch: Callable[[InputSource], torch.Tensor], *, training: bool
) -> StageArguments:
    """The tensors that `fetch` returns for `sources`; with `training`, leaves where one takes a gradient."""
    values, leaves, leaf_sources = [], [], []
    for source in sources:
        tensor = fetch(source)
        if not isinstance(source, ModelInput):
            tensor = tensor.detach()
            if training and _takes_gradient(source, tensor):
                leaves.append(tensor.requires_grad_())
                leaf_sources.append(source)
        values.append(tensor)
    return StageArguments(values, leaves, leaf_sources)


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


@contextlib.contextmanager
def keeping_no_tensors() -> Iterator[None]:
    """A context in which a forward with gradients keeps no tensor for a backward, which it can't have.

    For the first forward of a recomputed stage under autocast: without gradients it would cast every weight anew, and so
    would each microbatch; so it shares the casts that the second forwards need.
    """
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _refuse_backward):
        yield


def _refuse_backward(_: None) -> torch.Tensor:
    raise RuntimeError(
        "a backward through the first forward of a recomputed stage, which has kept nothing for it"
    )


def drop_casts() -> None:
    """Forget the casts of weights that forwards under autocast share; to be called when weights change."""
    torch.clear_autocast_cache()


def as_non_leaf(argument: torch.Tensor) -> torch.Tensor:
    """A view with the same values and gradients: autocast keeps the cast of a leaf, which it takes for a weight."""
    return argument.view_as(argument) if argument.requires_grad and argument.is_leaf else argument


@contextlib.contextmanager
def compute_context(
    device_type: str, *, training: bool, autocast_dtype: torch.dtype | None
) -> Iterator[None]:
    """A context that computes with gradients (`training`) and under autocast (a dtype), as a stage does."""
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
    loss_of: OutputPositions = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> ForwardResult:
    """Run `module`, and `loss` on its outputs `loss_of`, with gradients (`training`) and under autocast (a dtype).

    `accept` checks or replaces the module's outputs before the loss sees them.
    """
    if autocast_dtype is not None:
        arguments = [as_non_leaf(argument) for argument in arguments]
    with compute_context(device_type, training=training, autocast_dtype=autocast_dtype):
        results = module(*arguments)
        outputs = accept((results,) if isinstance(results, torch.Tensor) else results)
        value = None
        if loss is not None and (places := _output_positions(loss_of)):
            value = loss(outputs[places[0]] if len(places) == 1 else tuple(outputs[at] for at in places))
    return ForwardResult(outputs, value)


def _output_positions(loss_of: OutputPositions) -> tuple[int, ...]:
    if loss_of is None:
        return ()
    return (loss_of,) if isinstance(loss_of, int) else tuple(loss_of)


def is_compiled(stage: nn.Module) -> bool:
    """True where the body of `stage` runs compiled."""
    return getattr(stage, "compiled", None) is not None


@contextlib.contextmanager
def uncompiled(stage: nn.Module) -> Iterator[None]:
    """A context in which `stage` runs as traced."""
    if not is_compiled(stage):
        yield
        return
    compiled, stage.compiled = stage.compiled, None
    try:
        yield
    finally:
        stage.compiled = compiled
