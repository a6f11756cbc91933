"""Traced stages with their random states, and what they make."""

from __future__ import annotations

import torch

import worker.actor.actor  # noqa: F401 — first: rooms of the worker import each other
from worker.engine.forward import run_forward
from worker.examples.gpt import build
from worker.model.export import trace
from worker.model.rng import RandomState, reseed_at_random_ops

TOKENS = torch.arange(16).view(2, 8)


def gpt_stage(*, layers=1, dropout=0.0):
    """A GPT of one stage, as the engine has it, and its random state."""
    torch.manual_seed(3)
    traced = trace(build(layers, 16, 2, length=8, dropout=dropout), (TOKENS,))
    stage = traced.builder([0] * len(traced.layers)).stage(0)
    state = RandomState(7, 0, torch.device("cpu"))
    reseed_at_random_ops(stage, state)
    return stage, state


def made(stage, state, *, step=1, given=TOKENS):
    """The output of a forward with gradients, and the gradient of every parameter."""
    state.begin(step, 0)
    (output,) = run_forward(stage, [given], device_type="cpu", training=True, autocast_dtype=None).outputs
    stage.zero_grad()
    output.square().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in stage.parameters())]
