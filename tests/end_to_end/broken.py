"""A model that builds and traces and then raises while it trains."""

import torch
from torch import nn


@torch.library.custom_op("slotline_tests::fail", mutates_args=())
def fail(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the model was told to fail")


@fail.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.slotline_tests.fail(x)


def raises_in_forward() -> nn.Module:
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), Raises(), nn.Linear(8, 256))
