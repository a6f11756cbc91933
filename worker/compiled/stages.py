"""The stages of an engine compiled, before its first step: on a sample for what the model is given, on made-up values for
what other stages make. Nothing is sent, no buffer changes, no gradient is left."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from worker.compiled.compiler import Compiler, compiled_pieces
from worker.compiled.pieces import no_gradient
from worker.engine import Engine
from worker.engine.routes import ModelInput, StageWiring
from worker.engine.stage import StageRunner

log = logging.getLogger(__name__)

_SEED = 0


_ONE_AT_A_TIME = threading.Lock()
"""Torch's compiler has flags of the process: what two threads compile at once it may leave as it is. Jobs have a process
a worker; `slotline verify` has a thread."""


def compile_stages(
    engine: Engine,
    compiler: Compiler,
    inputs: Sequence[Tensor],
    target: Any,
    device: str,
    *,
    meets: bool = False,
) -> list[str]:
    """Have the stages of `engine` run compiled, as far as `compiler` can; what to tell of it.

    `inputs` and `target` are a microbatch of this worker. Where a forward `meets` other workers, in sums, none of them may
    wait for its turn.
    """
    done = []
    with contextlib.nullcontext() if meets else _ONE_AT_A_TIME, engine.silenced():
        for index, (module, wiring) in engine.stages.items():
            name, runner = f"stage s{index}", engine.runners[index]
            values = list(_values(module, wiring, inputs, device))
            several = len(wiring.model_outputs) > 1 and True in runner.with_gradients
            if several and (why := _why_not(runner, module, values, target.to(device))):
                compiler.refuse(name, why)
                continue
            run = functools.partial(_run, runner, values)
            if compiler.compile(name, module, run, runner.with_gradients):
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


def _why_not(runner: StageRunner, module: nn.Module, values: Sequence[Tensor], target: Any) -> str | None:
    """Where the loss leaves outputs of the model unused autograd leaves parameters that only they depend on without a
    gradient; a compiled backward begins at all outputs, and does not."""
    try:
        roots = runner.rehearse(values, training=True, target=target)
        lost = no_gradient(module, roots) if roots else []
    except Exception as error:
        log.warning("stage s%d is not compiled", module.index, exc_info=True)
        return f"which of the model's outputs the loss uses is not known: it raised {type(error).__name__}: {error}"
    if not lost:
        return None
    return (
        f"the loss uses only some of the model's outputs, and {lost[0]!r} ({len(lost)} in all), which gets no gradient from "
        "it, would get one of zeros"
    )
