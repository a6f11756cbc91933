"""How the stages of a mesh compute: what a job says of it, and where their tensors go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from worker.engine.loss_scaler import LossScaler
from worker.engine.routes import Route

LossValue = torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]
"""The loss of a microbatch, alone or with metrics by name."""


@dataclass(frozen=True)
class ComputeSettings:
    """How the stages of a mesh compute. `transfer_dtype`: dtype of a route's tensor on the wire; `weights`: by a step's
    targets, what each microbatch's loss counts (1 on average), None where all count alike; `keeps_random`: RunOptions'."""

    device: torch.device
    training: bool
    microbatches: int
    loss: Callable[[torch.Tensor, torch.Tensor], LossValue]
    autocast_dtype: torch.dtype | None
    seed: int | None
    worker: int
    transfer_dtype: Callable[[Route], torch.dtype]
    is_pooled: Callable[[torch.Tensor], bool]
    weights: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None
    keeps_random: bool = False
    scaler: LossScaler | None = None
