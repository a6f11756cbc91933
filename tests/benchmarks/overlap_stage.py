"""A stage that takes an accelerator's time without its work: it sleeps, and autograd sees it.

Real tensors, real autograd nodes; the input gradient and the weight gradient sleep apart, so that I and W
of any runtime (ours or torch's) cost what they should. Counts the microbatches whose activations live.
"""

from __future__ import annotations

import time

import torch
from torch import nn


class Record:
    """What the stages of this process did since `clear`: (kind, start, end) and the peak of live forwards."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.actions: list[tuple[str, float, float]] = []
        self.live = self.peak = 0

    def sleep(self, kind: str, seconds: float) -> None:
        start = time.monotonic()
        time.sleep(seconds)
        self.actions.append((kind, start, time.monotonic()))


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stage):
        ctx.stage = stage
        stage.record.live += 1
        stage.record.peak = max(stage.record.peak, stage.record.live)
        stage.record.sleep("F", stage.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.stage.record.sleep("I", ctx.stage.backward_input_s)
        return gradient.clone(), None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, stage):
        ctx.stage = stage
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.stage.record.sleep("W", ctx.stage.backward_weight_s)
        ctx.stage.record.live -= 1
        return gradient, None


class SleepingStage(nn.Module):
    """y = x + w; F, I and W sleep. The first stage's input takes a gradient too, as an embedding would."""

    def __init__(self, index: int, count: int, seconds: tuple[float, float, float], record: Record):
        super().__init__()
        self.forward_s, self.backward_input_s, self.backward_weight_s = seconds
        self.record = record
        self.weight = nn.Parameter(torch.zeros(1))
        self.first = index == 0
        self.inputs = ("input:0",) if index == 0 else (f"h{index - 1}",)
        self.outputs = ("output",) if index == count - 1 else (f"h{index}",)
        self.original_names = {"weight": f"{index}.weight"}

    def forward(self, x):
        if self.first and torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        return _Input.apply(x, self) + _Weight.apply(self.weight, self)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Costs next to nothing."""
    return (output[:, :16] - target[:, :16]).square().mean()
