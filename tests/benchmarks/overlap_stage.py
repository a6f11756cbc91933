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
    def forward(ctx, stage, *inputs):
        ctx.stage, ctx.count = stage, len(inputs)
        stage.record.live += 1
        stage.record.peak = max(stage.record.peak, stage.record.live)
        stage.record.sleep("F", stage.forward_s)
        return torch.stack(inputs).sum(0) if len(inputs) > 1 else inputs[0].clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.stage.record.sleep("I", ctx.stage.backward_input_s)
        return None, *(gradient.clone() for _ in range(ctx.count))


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
    """y = sum of inputs + w, once for each tensor that leaves; F, I and W sleep. `edges` are the pipeline's
    (source, target, tensor). The first stage's input takes a gradient too, as an embedding would."""

    def __init__(self, index: int, edges: list, seconds: tuple[float, float, float], record: Record):
        super().__init__()
        self.forward_s, self.backward_input_s, self.backward_weight_s = seconds
        self.record = record
        self.weight = nn.Parameter(torch.zeros(1))
        self.first = index == 0
        self.inputs = tuple(name for _, target, name in edges if target == index) or ("input:0",)
        self.outputs = tuple(name for source, _, name in edges if source == index) or ("output",)
        self.original_names = {"weight": f"{index}.weight"}

    def forward(self, *inputs):
        if self.first and torch.is_grad_enabled():
            inputs = tuple(x.detach().requires_grad_() for x in inputs)
        y = _Input.apply(self, *inputs) + _Weight.apply(self.weight, self)
        return y if len(self.outputs) == 1 else tuple(y.clone() for _ in self.outputs)


class RelayingStage(nn.Module):
    """For torch's pipelining, whose tensors go to the next stage only: skip connections are handed on."""

    def __init__(self, index: int, edges: list, stage: SleepingStage):
        super().__init__()
        self.stage = stage
        self.arriving = [edge for edge in edges if edge[0] < index <= edge[1]]
        self.leaving = [edge for edge in edges if edge[0] <= index < edge[1]]

    def forward(self, *tensors):
        if not self.arriving:
            return self.stage(*tensors)
        here = {edge[2]: tensor for edge, tensor in zip(self.arriving, tensors, strict=True)}
        made = self.stage(*(here[name] for name in self.stage.inputs))
        here |= zip(self.stage.outputs, made if isinstance(made, tuple) else (made,), strict=True)
        if not self.leaving:
            return here["output"]
        leaving = tuple(
            here[name] if name in self.stage.outputs else here[name].clone() for _, _, name in self.leaving
        )
        return leaving if len(leaving) > 1 else leaving[0]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Costs next to nothing."""
    return (output[:, :16] - target[:, :16]).square().mean()
