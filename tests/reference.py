"""The plain way to train: the unsplit model, one microbatch after the other, no pipeline.

What pipelined runs are compared with. Uses torch only, nothing of Slotline's model or engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = Sequence[tuple[tuple[Tensor, ...], Tensor]]


@dataclass(frozen=True)
class PlainStep:
    """One optimizer step: the unscaled loss of each microbatch, and the norm of the gradient before clipping."""

    losses: list[float]
    grad_norm: float

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


def accumulate(model: nn.Module, batch: Batch, loss: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
    """Add the gradient of the mean loss of `batch` (microbatches of (inputs, target)) to the model's."""
    losses = []
    for inputs, target in batch:
        value = loss(model(*inputs), target)
        (value / len(batch)).backward()
        losses.append(value.item())
    return losses


def train(
    model: nn.Module,
    batch_of_step: Callable[[int], Batch],
    *,
    steps: Sequence[int],
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    clip_grad_norm: float | None = None,
) -> list[PlainStep]:
    """Train `model` in place through the numbered steps; `batch_of_step` gives each its microbatches."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    update = optimizer(parameters)
    records = []
    for step in steps:
        update.zero_grad()
        losses = accumulate(model, batch_of_step(step), loss)
        limit = float("inf") if clip_grad_norm is None else clip_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        update.step()
        records.append(PlainStep(losses, norm.item()))
    return records


def dataset_batches(dataset: object, sampler: object, collate: Callable) -> Callable[[int], Batch]:
    """`batch_of_step` of a data set dealt out by a sampler (`indices(step, microbatch)`)."""

    def batch(step: int) -> Batch:
        return [
            collate([dataset[index] for index in sampler.indices(step, microbatch)])
            for microbatch in range(sampler.microbatches)
        ]

    return batch
