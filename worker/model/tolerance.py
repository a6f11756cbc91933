"""Relative RMS distance of two tensors that should be equal, and the tolerances that count as rounding.

A gradient that is small beside the model's largest counts as a fixed part of that. CPU in full precision is near
bit for bit (sums over several users may be reordered); autocast rounds to 8 bits, CUDA convolutions to TF32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# A gradient that is small beside the model's largest counts as this part of it.
MIN_GRADIENT_SHARE = 1e-2


@dataclass(frozen=True)
class Tolerance:
    """The greatest root mean square of a difference, as a part of that of what is compared: of values of the
    forward, and of gradients. A gradient that is small beside the model's largest counts as LEAST of it."""

    values: float
    gradients: float


# The graph makes the same calls as the model, so most tensors are equal bit for bit; what is summed over several
# users of a tensor may be summed in another order, and autocast rounds that to 8 bits.
FULL_PRECISION = Tolerance(values=1e-4, gradients=1e-3)
_HALF_PRECISION = Tolerance(values=2e-2, gradients=5e-2)
# Convolutions on CUDA round to TF32, by algorithms that need not be the same, unless told otherwise.
_TF32 = Tolerance(values=5e-3, gradients=2e-2)


def tolerance_for(model: nn.Module, autocast: torch.dtype | None, device: str) -> Tolerance:
    """What counts as rounding for a model that computes so."""
    half = (torch.bfloat16, torch.float16)
    if autocast in half or any(p.dtype in half for p in model.parameters()):
        return _HALF_PRECISION
    return FULL_PRECISION if device == "cpu" else _TF32


def relative_distance(expected: Tensor, found: Tensor, least: float) -> float:
    """The root mean square of the difference over that of `expected`, or over `least`, if that is more.

    What is infinite or no number in both alike counts as equal."""
    expected, found = _as_inexact(expected), _as_inexact(found)
    same = (expected == found) | (expected.isnan() & found.isnan())
    difference = rms(torch.where(same, 0, found - expected))
    if difference == 0:
        return 0.0
    whole = max(rms(expected.nan_to_num(0, 0, 0)), least)
    apart = difference / whole if whole else float("inf")
    return float("inf") if apart != apart else apart


def gradient_floor(gradients: Iterable[Tensor]) -> float:
    """What a gradient counts as at least, beside the others."""
    return MIN_GRADIENT_SHARE * max((rms(gradient) for gradient in gradients), default=0.0)


def rms(tensor: Tensor) -> float:
    """The root mean square."""
    if not tensor.numel():
        return 0.0
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=dtype)) / tensor.numel() ** 0.5


def _as_inexact(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()
