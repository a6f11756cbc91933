"""In what numbers a job computes and sends: the words of `training.precision` and `training.transfers`, and how its loss
is scaled in fp16. Light: no torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FP16 = "fp16"
# The type to which autocast casts, by its name in torch; fp32 leaves modules in their own.
AUTOCAST = {"fp32": None, "bf16": "bfloat16", FP16: "float16"}


@dataclass(frozen=True)
class LossScaling:
    """torch.amp.GradScaler's arguments under its names and with its defaults; after `max_skipped_steps` steps in a row
    whose gradients overflowed the job fails."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    max_skipped_steps: int = 24


def wire_dtype(dtype: torch.dtype, differentiable: bool, transfers: str) -> torch.dtype:
    """What a tensor travels as: "auto" is its own type, so that it arrives as it was; with "bf16" float32 that
    takes a gradient is rounded, as is its gradient. The using stage sees `dtype` again."""
    import torch

    halved = transfers == "bf16" and differentiable and dtype == torch.float32
    return torch.bfloat16 if halved else dtype
