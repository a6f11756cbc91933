"""Run every kernel of the local stages once before the first step, with nothing to show for it.

CUDA loads kernels when they are first used, and loading waits for the device: behind a receive that spins
for its sender it would wait for ever. Must not know lanes or transports.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from worker.engine.backward import backward, backward_input
from worker.engine.errors import StageError
from worker.engine.routes import LocalInput, ModelInput, StageWiring
from worker.engine.stage import ComputeSettings


def warm_up(
    stages: Mapping[int, tuple[nn.Module, StageWiring]],
    inputs: tuple[torch.Tensor, ...],
    target: torch.Tensor | None,
    settings: ComputeSettings,
    split: bool,
) -> None:
    """One forward, and backward as the program does it, of each stage on zeros and on `inputs`.

    Parameters keep no gradient and buffers (running statistics) their values.
    """
    made: dict[tuple[int, str], torch.Tensor] = {}
    for index in sorted(stages):
        try:
            _warm_up_stage(index, *stages[index], inputs, target, settings, split, made)
        except Exception as error:
            raise StageError(
                f"stage {index} raised {type(error).__name__} in its first run: {error}",
                "F",
                index,
                0,
                "".join(traceback.format_exception(error)),
            ) from error


def _warm_up_stage(
    index: int,
    module: nn.Module,
    wiring: StageWiring,
    inputs: tuple[torch.Tensor, ...],
    target: torch.Tensor | None,
    settings: ComputeSettings,
    split: bool,
    made: dict[tuple[int, str], torch.Tensor],
) -> None:
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    leaves, arguments = _arguments(wiring, inputs, made, settings)
    results = _run(module, arguments, settings)
    for output, result in zip(wiring.outputs, results, strict=True):
        made[index, output.tensor] = result.detach()
    if settings.training:
        roots = _roots(wiring, results, target, settings.loss)
        gradients = [torch.ones_like(root) for root in roots]
        if split:
            backward_input(roots, gradients, leaves)[1].run()
        else:
            backward(roots, gradients, leaves)
    for parameter in module.parameters():
        parameter.grad = None
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])


def _arguments(
    wiring: StageWiring,
    inputs: tuple[torch.Tensor, ...],
    made: Mapping[tuple[int, str], torch.Tensor],
    settings: ComputeSettings,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    leaves, arguments = [], []
    for source in wiring.inputs:
        if isinstance(source, ModelInput):
            arguments.append(inputs[source.position])
            continue
        if isinstance(source, LocalInput):
            tensor = made[source.source, source.tensor].clone()
            differentiable = tensor.is_floating_point()
        else:
            route = source.route
            tensor = torch.zeros(route.shape, dtype=settings.transfer_dtype(route), device=settings.device)
            differentiable = route.differentiable
        if settings.training and differentiable:
            leaves.append(tensor.requires_grad_())
        arguments.append(tensor)
    return leaves, arguments


def _run(module: nn.Module, arguments: Sequence[torch.Tensor], settings: ComputeSettings):
    dtype = settings.autocast_dtype
    autocast = torch.autocast(settings.device.type, dtype=dtype, enabled=dtype is not None)
    with torch.set_grad_enabled(settings.training), autocast:
        results = module(*arguments)
    return (results,) if isinstance(results, torch.Tensor) else results


def _roots(
    wiring: StageWiring,
    results: Sequence[torch.Tensor],
    target: torch.Tensor | None,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    roots = [
        loss(result, target) if output.is_model_output and target is not None else result
        for output, result in zip(wiring.outputs, results, strict=True)
    ]
    return [root for root in roots if root.requires_grad]
