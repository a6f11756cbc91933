"""The stages of an engine compiled, before its first step: on a sample for what the model is given, on made-up values for
what other stages make. Nothing is sent, no buffer changes, no gradient is left."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from worker.compiled.compiler import Compiler, compiled_pieces
from worker.compiled.pieces import no_gradient
from worker.engine import Engine
from worker.engine.routes import ModelInput, StageWiring
from worker.engine.stage import StageRunner

_SEED = 0


def compile_stages(
    engine: Engine, compiler: Compiler, inputs: Sequence[Tensor], target: Any, device: str
) -> list[str]:
    """Have the stages of `engine` run compiled, as far as `compiler` can; what to tell of it.

    `inputs` and `target` are a microbatch of this worker.
    """
    done = []
    with engine.silenced():
        for index, (module, wiring) in engine.stages.items():
            name, runner = f"stage s{index}", engine.runners[index]
            values = list(_values(module, wiring, inputs, device))
            several = len(wiring.model_outputs) > 1 and True in runner.trained
            if several and (lost := _without_gradient(runner, module, values, target)):
                compiler.refuse(
                    name,
                    f"the loss uses only some of the model's outputs, and {lost[0]!r} ({len(lost)} in all), which gets no "
                    "gradient from it, would get one of zeros",
                )
                continue
            run = functools.partial(_run, runner, values)
            if compiler.compile(name, module, run, runner.trained):
                done.append(f"s{index} in {compiled_pieces(module)}")
    notes = list(compiler.notes)
    if done:
        notes.append(f"by torch.compile, stages in pieces: {', '.join(done)}")
    return notes


def _run(runner: StageRunner, values: Sequence[Tensor], training: bool) -> None:
    runner.rehearse(values, training=training)


def _values(
    module: nn.Module, wiring: StageWiring, inputs: Sequence[Tensor], device: str
) -> Iterator[Tensor]:
    """What the stage's forward takes."""
    generator = torch.Generator().manual_seed(_SEED)
    for source, shape, dtype in zip(wiring.inputs, module.input_shapes, module.input_dtypes, strict=True):
        if isinstance(source, ModelInput):
            yield inputs[source.position].to(device)
        elif dtype.is_floating_point or dtype.is_complex:
            yield torch.randn(shape, generator=generator).to(device, dtype)
        else:  # indices that every table has, and masks that hide nothing
            fill = torch.ones if dtype == torch.bool else torch.zeros
            yield fill(shape, dtype=dtype, device=device)


def _without_gradient(
    runner: StageRunner, module: nn.Module, values: Sequence[Tensor], target: Any
) -> list[str]:
    """Trained parameters that only such outputs of the model depend on as the loss does not use: autograd leaves them
    without a gradient, and a compiled backward, which begins at all outputs, does not."""
    roots = runner.rehearse(values, training=True, target=target)
    return no_gradient(module, roots) if roots else []
