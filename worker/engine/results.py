"""What an engine is told and what it returns: options, limits, step results. Light values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from worker.precision import AUTOCAST, LossScaling
from worker.program import COMPUTE_LANE, TRANSFER_OPS, Program
from worker.slots import MeasuredSlot

if TYPE_CHECKING:
    import torch

NON_FINITE = ("stop", "skip")
TRANSFERS = ("auto", "bf16")


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The type to which autocast casts; None where modules compute in their own."""
    import torch

    name = AUTOCAST[precision]
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
    """How a mesh computes.

    `precision`: "fp32" (the modules' own dtypes), "bf16" or "fp16" (autocast, fp32 parameters; fp16 with
    `loss_scaling`); `transfers`: see `wire_dtype`; `seed` None leaves torch's random state alone; `non_finite`: what a
    NaN or infinite loss or gradient norm does, "stop" or "skip" the step; `keeps_random`: a program without backward
    draws by `seed` too, and the process's random generators stand afterwards where they stood. With an `ignored_target`
    microbatches count by how many of their targets are another, not all alike. `sync_batch_norm`: see
    sync_norm.py. The workers of the meshes `sharded` share the optimizer's state; `tensor` workers next to each other share
    matrices.
    """

    precision: str = "fp32"
    transfers: str = "auto"
    clip_grad_norm: float | None = None
    seed: int | None = 0
    non_finite: str = "stop"
    ignored_target: int | None = None
    tensor: int = 1
    keeps_random: bool = False
    sharded: tuple[str, ...] = ()
    loss_scaling: LossScaling = field(default_factory=LossScaling)
    sync_batch_norm: bool = False
    limits: SlotLimits = field(default_factory=SlotLimits)
    device: str = "cpu"
    priorities: StreamPriorities = field(default_factory=StreamPriorities)

    def __post_init__(self) -> None:
        if self.precision not in AUTOCAST:
            raise ValueError(f"precision {self.precision!r} is unknown: use one of {', '.join(AUTOCAST)}")
        if self.transfers not in TRANSFERS:
            raise ValueError(f"transfers {self.transfers!r} is unknown: use one of {', '.join(TRANSFERS)}")
        if self.non_finite not in NON_FINITE:
            raise ValueError(f"non_finite {self.non_finite!r} is unknown: use one of {', '.join(NON_FINITE)}")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm is {self.clip_grad_norm}; give a positive norm or none")

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return autocast_dtype(self.precision)


@dataclass
class StepResult:
    """One step of one worker. `losses`: one a microbatch, only where the model's output is, not divided by their number;
    so are the `metrics` by name; `outputs`: the model's outputs, only there and only of a program without backward.
    `loss_scale` and `overflowed`: see UpdateResult."""

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
