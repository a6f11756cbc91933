"""As what tensors travel between meshes: `training.transfers`."""

from __future__ import annotations

import torch


def wire_dtype(dtype: torch.dtype, differentiable: bool, transfers: str) -> torch.dtype:
    """What a tensor travels as: "auto" is its own type, so that it arrives as it was; with "bf16" float32 that
    takes a gradient is rounded, as is its gradient. The using stage sees `dtype` again."""
    halved = transfers == "bf16" and differentiable and dtype == torch.float32
    return torch.bfloat16 if halved else dtype
