"""Parity checks: the one comparison of two runs that should give equal tensors, and the table of what is rounding.

The distance of two tensors is the RMS of their difference over the RMS of the expected one. The traced graph, the
sharded stages, the compiled stages and the pipeline beside its plain model are all compared by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# A gradient that is small beside the model's largest counts as this part of it.
MIN_GRADIENT_SHARE = 1e-2


@dataclass(frozen=True)
class Tolerance:
    """The greatest relative RMS distances that count as rounding, of values of the forward and of gradients."""

    values: float
    gradients: float


# A graph makes the same calls as its model, so most tensors are equal bit for bit; a sum over several users of a
# tensor may run in another order.
FULL_PRECISION = Tolerance(values=1e-4, gradients=1e-3)
# Autocast rounds to 8 bits.
_HALF_PRECISION = Tolerance(values=2e-2, gradients=5e-2)
# Convolutions on CUDA round to TF32 by default, and their algorithm may change from call to call.
_TF32 = Tolerance(values=5e-3, gradients=2e-2)
# A pipeline beside its plain model, fp32 on CPU. In 37 public models rounding was at most 6.4e-7 of a gradient, where
# the gradients of several users meet.
PIPELINE_FULL_PRECISION = Tolerance(values=1e-5, gradients=1e-4)
# A parameter after STEP may differ by this part of what the step changed, and by some roundings of its own dtype.
UPDATE_TOLERANCE = 1e-4
UPDATE_ROUNDINGS = 4
LEARNING_RATE_TOLERANCE = 1e-9
# Updates of one optimizer by itself and by another, as a part of what they moved: the same operations on the same
# numbers leave less to rounding than a step of the pipeline.
TRIED_UPDATE_TOLERANCE = 1e-5
# A partition of a parameter that is updated alone, as a part of the largest update.
PARTITION_UPDATE_TOLERANCE = 1e-4
# Parameters that are updated without the others: as a part of the largest movement, and as a multiple of what other
# random numbers, and values that are changed in their last bits, make of the same run.
SUBSET_UPDATE_TOLERANCE = 1e-5
SUBSET_TWIN_MARGIN = 10.0


def tolerance_for(model: nn.Module, autocast: torch.dtype | None, device: str) -> Tolerance:
    """The tolerance of a model that computes under `autocast` on a device type."""
    half = (torch.bfloat16, torch.float16)
    if autocast in half or any(p.dtype in half for p in model.parameters()):
        return _HALF_PRECISION
    return FULL_PRECISION if device == "cpu" else _TF32


@dataclass(frozen=True)
class Distance:
    """The distance of two tensors as a part of their size, and the greatest that is still rounding."""

    apart: float
    allowed: float

    @property
    def is_rounding(self) -> bool:
        return self.apart <= self.allowed

    def __str__(self) -> str:
        return f"{self.apart:.3g} of its size (at most {self.allowed:g} is rounding)"


@dataclass(frozen=True)
class Outcome:
    """The tensors of one forward (`values`) and of its backward (`gradients`), by names for people; None: none was made."""

    values: Mapping[str, Tensor | None]
    gradients: Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Mismatch:
    """A tensor that two outcomes have at a `distance` that is no rounding; None where one of them lacks it."""

    name: str
    is_gradient: bool
    expected: Tensor | None
    found: Tensor | None
    distance: Distance


def first_mismatch(expected: Outcome, found: Outcome, tolerance: Tolerance) -> Mismatch | None:
    """The first tensor of `expected` that `found` has otherwise, values before gradients; None where all is rounding.

    Gradients are measured by their own size, or by `gradient_floor` of all where that is more. A tensor that only one
    outcome has is a mismatch; further ones of `found` are not looked at.
    """
    floor = gradient_floor(gradient for gradient in expected.gradients.values() if gradient is not None)
    for is_gradient, wanted, others, allowed, least in (
        (False, expected.values, found.values, tolerance.values, 0.0),
        (True, expected.gradients, found.gradients, tolerance.gradients, floor),
    ):
        for name, tensor in wanted.items():
            other = others.get(name)
            if tensor is None and other is None:
                continue
            one_lacks_it = tensor is None or other is None
            distance = (
                Distance(float("inf"), allowed) if one_lacks_it else compare(tensor, other, allowed, least)
            )
            if not distance.is_rounding:
                return Mismatch(name, is_gradient, tensor, other, distance)
    return None


def compare(expected: Tensor, found: Tensor | None, allowed: float, floor: float = 0.0) -> Distance:
    """The distance of `found` from `expected`, infinite where it is missing or has another shape.

    `floor` is the least that the size of `expected` counts as; see `gradient_floor`.
    """
    if found is None or found.shape != expected.shape:
        return Distance(float("inf"), allowed)
    return Distance(relative_distance(expected, found, floor), allowed)


def compare_numbers(expected: float, found: float, allowed: float) -> Distance:
    """The distance of two numbers, relative to the expected one; absolute where that is zero."""
    return Distance(abs(found - expected) / (abs(expected) or 1.0), allowed)


def gradient_pair(expected: Tensor | None, found: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Two gradients of one parameter, a missing one as zeros; None where neither run made one."""
    if expected is None and found is None:
        return None
    return (
        torch.zeros_like(found) if expected is None else expected,
        torch.zeros_like(expected) if found is None else found,
    )


def gradient_floor(gradients: Iterable[Tensor]) -> float:
    """The RMS that each of a model's gradients counts as at least."""
    return MIN_GRADIENT_SHARE * max((rms(gradient) for gradient in gradients), default=0.0)


def relative_distance(expected: Tensor, found: Tensor, floor: float) -> float:
    """The RMS of the difference over the larger of `floor` and the RMS of `expected`.

    Entries that are equally infinite or NaN in both count as equal.
    """
    expected, found = _as_inexact(expected), _as_inexact(found)
    same = (expected == found) | (expected.isnan() & found.isnan())
    difference = rms(torch.where(same, 0, found - expected))
    if difference == 0:
        return 0.0
    size = max(rms(expected.nan_to_num(0, 0, 0)), floor)
    apart = difference / size if size else float("inf")
    return float("inf") if apart != apart else apart


def rms(tensor: Tensor) -> float:
    """The root mean square, summed in float64; zero for an empty tensor."""
    if not tensor.numel():
        return 0.0
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=dtype)) / tensor.numel() ** 0.5


def _as_inexact(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()
