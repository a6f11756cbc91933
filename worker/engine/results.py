"""Options, slot limits, step results and errors of an engine: light values that cross process borders.

All errors survive pickling, so that they reach the driver whole; errors of a transport are in transport/base.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from worker.contract.job import AUTOCAST_DTYPES, LossScaling
from worker.contract.program import COMPUTE_LANE, TRANSFER_OPS, MeasuredSlot, Program
from worker.transport.base import EngineError


class StageError(EngineError):
    """The user's code raised in an action: a stage's forward or backward, the loss, the optimizer."""

    def __init__(
        self, message: str, action: str, stage: int | None, microbatch: int | None, details: str = ""
    ):
        super().__init__(message, action, stage, microbatch, details)
        self.message = message
        self.action = action
        self.stage = stage
        self.microbatch = microbatch
        self.details = details

    def __str__(self) -> str:
        return self.message


class StallError(EngineError):
    """A slot did not end within its limit."""

    def __init__(self, message: str, action: str, lane: str, waited_s: float):
        super().__init__(message, action, lane, waited_s)
        self.message = message
        self.action = action
        self.lane = lane
        self.waited_s = waited_s

    def __str__(self) -> str:
        return self.message


class NonFiniteError(EngineError):
    """A loss or the gradient norm is NaN or infinite and the policy is to stop."""


NON_FINITE_POLICIES = ("stop", "skip")
TRANSFER_DTYPES = ("auto", "bf16")


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The type to which autocast casts; None where modules compute in their own."""
    name = AUTOCAST_DTYPES[precision]
    return None if name is None else getattr(torch, name)


@dataclass(frozen=True)
class SlotLimits:
    """A slot may last `factor` times its planned time, and at least `floor_s`.

    A transfer also waits for its peer's action, and REDUCE for the slowest mesh: see `slot_limits`.
    """

    factor: float = 20.0
    floor_s: float = 30.0

    def limit_s(self, planned_s: float) -> float:
        return max(self.floor_s, self.factor * planned_s)


def slot_limits(program: Program, planned_s: Sequence[float] | None, limits: SlotLimits) -> list[float]:
    """Seconds that each instruction may run, from its planned time and from what it may have to wait for."""
    if planned_s is None:
        return [limits.floor_s] * len(program)
    longest = max(planned_s, default=0.0)
    compute = sum(s for i, s in zip(program, planned_s, strict=True) if i.lane == COMPUTE_LANE)
    extra = {"REDUCE": compute, **dict.fromkeys(TRANSFER_OPS, longest)}
    return [limits.limit_s(s + extra.get(i.op, 0.0)) for i, s in zip(program, planned_s, strict=True)]


@dataclass(frozen=True)
class StreamPriorities:
    """CUDA stream priorities: lower numbers run first. Transfers go first so that their few blocks start
    between those of a large kernel."""

    compute: int = 0
    transfer: int = -1


@dataclass(frozen=True)
class RunOptions:
    """Options of the run of a mesh.

    `precision`: "fp32" (the modules' own dtypes), "bf16" or "fp16" (autocast, fp32 parameters; fp16 with
    `loss_scaling`); `transfers`: see `transfer_dtype`; `seed` None leaves torch's RNG state alone; `non_finite`: a NaN or
    infinite loss or gradient norm ends the run ("stop") or the step ("skip"); `keeps_random`: a program without backward
    draws by `seed` too, and the RNGs of the process are restored afterwards. With `count_targets` microbatches weigh by
    what it counts in their targets, and the loss is not called for one without any. `sync_batch_norm`: see
    parallel/sync_batch_norm.py. Meshes in `sharded` shard
    the optimizer state (ZeRO-1); `tensor` is the tensor-parallel size. Of the steps up to `spot_check_until`
    one forward is computed again (spot_check.py); None: of none.
    """

    precision: str = "fp32"
    transfers: str = "auto"
    clip_grad_norm: float | None = None
    seed: int | None = 0
    non_finite: str = "stop"
    count_targets: Callable[[Any], torch.Tensor] | None = None
    tensor: int = 1
    keeps_random: bool = False
    sharded: tuple[str, ...] = ()
    loss_scaling: LossScaling = field(default_factory=LossScaling)
    sync_batch_norm: bool = False
    limits: SlotLimits = field(default_factory=SlotLimits)
    device: str = "cpu"
    priorities: StreamPriorities = field(default_factory=StreamPriorities)
    spot_check_until: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in AUTOCAST_DTYPES:
            raise ValueError(
                f"precision {self.precision!r} is unknown: use one of {', '.join(AUTOCAST_DTYPES)}"
            )
        if self.transfers not in TRANSFER_DTYPES:
            raise ValueError(
                f"transfers {self.transfers!r} is unknown: use one of {', '.join(TRANSFER_DTYPES)}"
            )
        if self.non_finite not in NON_FINITE_POLICIES:
            raise ValueError(
                f"non_finite {self.non_finite!r} is unknown: use one of {', '.join(NON_FINITE_POLICIES)}"
            )
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm is {self.clip_grad_norm}; give a positive norm or none")

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return autocast_dtype(self.precision)


@dataclass
class StepResult:
    """One step of one worker.

    `losses` (and `metrics` by name) have a number per microbatch, not divided by their count, only where the model's output
    is; `outputs` are the model's outputs there, of a program without backward. `loss_scale` and `overflowed`: see
    UpdateResult. `difference`: a forward of the step that was computed again came out otherwise. `without_targets`: how many
    microbatches were left out, as nothing in them is a target."""

    step: int
    losses: list[float]
    metrics: dict[str, list[float]]
    outputs: list[Any]
    slots: list[MeasuredSlot]
    grad_norm: float | None
    skipped: bool
    started_s: float
    ended_s: float
    loss_scale: float | None = None
    overflowed: bool = False
    difference: str | None = None
    without_targets: int = 0
