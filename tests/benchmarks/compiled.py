"""Steps of stages with and without `training.compile`, on one thread of the CPU: what it gives, and what it takes before.

`make bench-compiled`: the built-in GPT and U-Net in one stage each. Compiled and as traced take turns in one process, so
that what else the machine does meets both alike; a step is the forward and backward of all microbatches. Times are those of
the processor, for compiling with its children's. Prints a table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import worker.actor.actor  # noqa: F401 — first: rooms of the worker import each other
from worker.engine.compile import StageCompiler
from worker.engine.forward import drop_casts, run_forward, uncompiled
from worker.examples import gpt, unet
from worker.model.export import trace
from worker.model.rng import RandomState, reseed_at_random_ops

MICROBATCHES = 4


@dataclass(frozen=True)
class Case:
    """A model, a microbatch of it, and the type under which it computes."""

    name: str
    model: Callable[[], nn.Module]
    given: torch.Tensor
    target: torch.Tensor
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    autocast: torch.dtype | None = None


def _cases() -> list[Case]:
    tokens = torch.randint(0, 256, (4, 128))
    images = torch.randn(8, 1, 32, 32)
    language = {"given": tokens, "target": tokens, "loss": cross_entropy}
    return [
        Case("GPT, 4 blocks of width 256", lambda: gpt.build(4, 256), **language),
        Case("the same, dropout 0.1", lambda: gpt.build(4, 256, dropout=0.1), **language),
        Case("the same, no dropout, bf16", lambda: gpt.build(4, 256), **language, autocast=torch.bfloat16),
        Case("U-Net, width 32, 2 levels", unet.build, given=images, target=images, loss=mse_loss),
    ]


def main() -> int:
    """One line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| one stage | graphs | as traced ms | compiled ms | compiled / as traced (each round) | compiling s |\n"
        "|---|---:|---:|---:|---:|---:|",
        flush=True,
    )
    for case in _cases():
        print(_line(case, options.rounds), flush=True)
    return 0


def _line(case: Case, rounds: int) -> str:
    torch.manual_seed(0)
    traced = trace(case.model(), (case.given,), autocast=case.autocast)
    stage = traced.builder([0] * len(traced.layers)).stage(0)
    state = RandomState(0, 0, torch.device("cpu"))
    reseed_at_random_ops(stage, state)

    compiler = StageCompiler(device="cpu", autocast=case.autocast, limit_s=3600)
    started = _processor_s()
    if not compiler.compile(case.name, stage, [case.given]):
        return f"| {case.name} | {'; '.join(compiler.notes)} | | | | |"
    compiling_s = _processor_s() - started

    def step(compiled: bool) -> float:
        started = time.thread_time()
        with nullcontext() if compiled else uncompiled(stage):
            for microbatch in range(MICROBATCHES):
                state.begin(1, microbatch)
                run = run_forward(
                    stage,
                    [case.given],
                    device_type="cpu",
                    training=True,
                    autocast_dtype=case.autocast,
                    loss_of=stage.model_outputs,
                    loss=lambda output: case.loss(output, case.target),
                )
                run.loss.backward()
        drop_casts()
        return time.thread_time() - started

    step(True), step(False)
    pairs = [(step(True), step(False)) for _ in range(rounds)]
    compiled, as_it_was = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
    ratios = sorted(one / other for one, other in pairs)
    quarters = statistics.quantiles(ratios, n=4)
    return (
        f"| {case.name} | {stage.compiled.graphs} | {as_it_was:.0f} | {compiled:.0f} | "
        f"{statistics.median(ratios):.2f} ({quarters[0]:.2f} to {quarters[2]:.2f}) | {compiling_s:.0f} |"
    )


def _processor_s() -> float:
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


if __name__ == "__main__":
    raise SystemExit(main())
