"""Run every kernel of the local stages once before the first step, with nothing to show for it.

CUDA loads kernels when they are first used, and loading waits for the device: behind a receive that spins
for its sender it would wait for ever. Must not know lanes or transports.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping

import torch
from torch import nn

from worker.engine.backward import backward, backward_input
from worker.engine.errors import StageError
from worker.engine.routes import LocalInput, ModelInput, StageWiring
from worker.engine.stage import ComputeSettings
from worker.engine.stage_run import Source, gather, run_forward


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

    def fetch(source: Source) -> torch.Tensor:
        if isinstance(source, ModelInput):
            return inputs[source.position]
        if isinstance(source, LocalInput):
            return made[source.source, source.tensor].clone()
        return torch.zeros(source.route.shape, dtype=source.route.dtype, device=settings.device)

    arguments = gather(wiring.inputs, fetch, training=settings.training)
    run = run_forward(
        module,
        arguments.values,
        device_type=settings.device.type,
        training=settings.training,
        autocast_dtype=settings.autocast_dtype,
        loss_of=wiring.model_output,
        loss=None if target is None else lambda output: settings.loss(output, target),
    )
    for output, result in zip(wiring.outputs, run.outputs, strict=True):
        made[index, output.tensor] = result.detach()
    if settings.training:
        roots = run.roots(wiring.model_output)
        gradients = [torch.ones_like(root) for root in roots]
        if split:
            backward_input(roots, gradients, arguments.leaves)[1].run()
        else:
            backward(roots, gradients, arguments.leaves)
    for parameter in module.parameters():
        parameter.grad = None
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
