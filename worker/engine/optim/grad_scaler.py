"""The loss scale of fp16 as torch.amp.GradScaler has it, for a model that lies on many workers.

Every worker has one and all stay equal: they start equal, and REDUCE gives all of them the same found_inf. The
scale is a number on the host, changed between steps. Must not know optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from worker.contract.job import FP16, LossScaling
from worker.engine.results import NonFiniteError, RunOptions

Tensor = TypeVar("Tensor", bound=torch.Tensor)

_MAX_SCALE = torch.finfo(torch.float32).max


class PipelineGradScaler:
    """`scale` is what the losses of this step are multiplied with; `found`, after `unscale`, is more than 0 where a
    gradient is not finite: to be summed over all meshes before `ended`."""

    def __init__(self, scaling: LossScaling, device: torch.device | str):
        self.scale = float(scaling.init_scale)
        self.found_inf = torch.zeros((), dtype=torch.float64, device=device)
        self._scaling = scaling
        self._device = device
        self._since_change = 0  # steps without overflow
        self._skipped = 0  # steps in a row

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """What a backward begins with: the scale, in the type of the loss, where it may be infinite already."""
        return torch.full_like(loss, self.scale, dtype=torch.float32).to(loss.dtype)

    @torch.no_grad()
    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        """Divide by the scale, in place; whether each was finite goes to `found`. The host does not wait."""
        inverse = torch.full((), 1.0 / self.scale, dtype=torch.float32, device=self._device)
        found = torch.zeros((), dtype=torch.float32, device=self._device)
        reals = (torch.view_as_real(g) if g.is_complex() else g for g in gradients)
        for alike in group_by_dtype(reals).values():
            torch._amp_foreach_non_finite_check_and_unscale_(alike, found, inverse)
        self.found_inf = found.double()

    def ended(self, step: int) -> tuple[float, bool]:
        """The scale of the step that is over, and whether gradients overflowed; it is now that of the next one.

        NonFiniteError after too many such steps in a row. Waits for the device.
        """
        scaling, used = self._scaling, self.scale
        if float(self.found_inf) > 0:
            self.scale = _as_float32(self.scale * scaling.backoff_factor)
            self._since_change, self._skipped = 0, self._skipped + 1
            if self._skipped >= scaling.max_skipped_steps:
                raise NonFiniteError(
                    f"step {step}: the gradients of {self._skipped} steps in a row are not finite in fp16, the last "
                    f"with loss scale {used:g}: look for a loss or data that are no "
                    "number, lower the learning rate, or train with training.precision bf16 "
                    "(training.loss_scaling.max_skipped_steps is this limit)"
                )
            return used, True
        self._skipped = 0
        self._since_change += 1
        if self._since_change == scaling.growth_interval:
            larger = self.scale * scaling.growth_factor
            self.scale = _as_float32(larger) if larger <= _MAX_SCALE else self.scale
            self._since_change = 0
        return used, False

    def state(self) -> dict[str, Any]:
        """What the next step depends on; the same on every worker."""
        return {"scale": self.scale, "growth_tracker": self._since_change, "skipped_steps": self._skipped}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self.scale = float(state["scale"])
        self._since_change, self._skipped = int(state["growth_tracker"]), int(state["skipped_steps"])


def make_grad_scaler(options: RunOptions) -> PipelineGradScaler | None:
    """That of a mesh which trains by `options`, where its precision needs one."""
    return PipelineGradScaler(options.loss_scaling, options.device) if options.precision == FP16 else None


def group_by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """In the order of their first."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return found


def _as_float32(value: float) -> float:
    """Rounded as torch keeps it."""
    return float(torch.tensor(value, dtype=torch.float32)) if math.isfinite(value) else value
