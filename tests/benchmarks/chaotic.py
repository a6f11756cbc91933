"""A model that misbehaves in a worker when a file says so, in the way that the file says."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

from worker.examples.gpt import build as build_gpt


def misbehave(kind: str) -> int:
    """Do what `kind` says, once; returns by how many columns a result is too wide."""
    match kind:
        case "raises":
            raise RuntimeError("the model was told to fail")
        case "exits":
            os._exit(3)
        case "hangs":
            time.sleep(10_000)
        case "accelerator":
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
        case "shape":
            return 1
    return 0


@torch.library.custom_op("slotline_chaos::maybe", mutates_args=())
def maybe(x: torch.Tensor, order: str) -> torch.Tensor:
    path = Path(order)
    try:
        kind = path.read_text()
        path.unlink()  # the worker that takes the order carries it out, and the next attempt has none
    except FileNotFoundError:
        return x.clone()
    return nn.functional.pad(x, (0, misbehave(kind)))


@maybe.register_fake
def _(x: torch.Tensor, order: str) -> torch.Tensor:
    return torch.empty_like(x)


maybe.register_autograd(lambda _, grad: (grad, None))


class Chaotic(nn.Module):
    """The identity, until the file `order` is there."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return maybe(x, self.order)


def build(order: str, **args: int) -> nn.Module:
    """A GPT with such a module at its end."""
    return nn.Sequential(build_gpt(**args), Chaotic(order))
