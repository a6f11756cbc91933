"""In what numbers a job computes: the words of `training.precision`, and how its loss is scaled in fp16. No torch."""

from __future__ import annotations

from dataclasses import dataclass

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
