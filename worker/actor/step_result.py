"""Values that one worker returns for a training step, an evaluation batch, and another program.

The driver combines them over the gang (worker/driver/step_measurement.py). Light: plain dataclasses, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.contract.job import Bucket
from worker.contract.program import MeasuredSlot
from worker.machine.telemetry import GpuUsage

LENGTHS_AHEAD = 8
"""Steps between one and that whose buckets it tells: so long may making its plan take."""


@dataclass(frozen=True)
class StepLengths:
    """The buckets of a step's microbatches, and the tokens of one worker's samples in it, without and with padding. `later`
    are those of the step LENGTHS_AHEAD behind it, by number from the smallest; none where the data tells no lengths."""

    buckets: tuple[Bucket, ...]
    tokens: int
    padded_tokens: int
    later: tuple[int, ...] = ()


@dataclass(frozen=True)
class CopiedShard:
    """The end of a copy of a worker's shard: its name and description once keepers hold it, or the error."""

    shard: str = ""
    description: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class WorkerStep:
    """One optimizer step. `losses` (one a microbatch, not divided by their number) and `metrics` by name are given only
    where the model's output is; `slots` are on this worker's clock. `grad_norm` and `learning_rate` are None on a mesh
    without trained parameters, `loss_scale` but in fp16, `gpu` where it was not read. `skipped`: no update was made,
    because gradients `overflowed` in fp16 or a number was not finite. `difference` and `without_targets`: those of
    StepResult. `ignored_targets`: how many targets of each microbatch are none, where microbatches weigh alike. `lengths`
    are given where samples have unequal lengths. `copied` is of a copy that has come to its end since the step before."""

    slots: list[MeasuredSlot]
    losses: list[float] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    grad_norm: float | None = None
    learning_rate: float | None = None
    skipped: bool = False
    loss_scale: float | None = None
    overflowed: bool = False
    peak_memory_bytes: int = 0
    tokens_per_sample: int | None = None
    gpu: GpuUsage | None = None
    difference: str | None = None
    without_targets: int = 0
    ignored_targets: list[int] = field(default_factory=list)
    lengths: StepLengths | None = None
    copied: CopiedShard | None = None


@dataclass(frozen=True)
class PreparedProgram:
    """A worker's readiness to swap its program: `refusal` says why it is not. `same_sums`: gradients are added up in the
    order of the running program, so that they are the same to the bit."""

    refusal: str | None = None
    same_sums: bool = False


@dataclass(frozen=True)
class EvaluatedBatch:
    """The microbatches of a batch that count, where the model's output is: their losses, metrics by name, and weights."""

    losses: list[float]
    metrics: dict[str, list[float]]
    weights: list[float]
