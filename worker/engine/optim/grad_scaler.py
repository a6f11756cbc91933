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

GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0, 0.5, 2000
"""As torch.amp.GradScaler's defaults: GROWTH_INTERVAL counts steps without overflow."""
MAX_SKIPPED_STEPS = 24
"""Steps in a row that overflow, after which a job fails: by then a scale of 65536 has come down to less than 1."""
_MAX_SCALE = torch.finfo(torch.float32).max


class PipelineGradScaler:
    """`scale` is the factor on the losses of this step; `found_inf`, after `unscale`, is more than 0 where a gradient is
    not finite, and has to be summed over all meshes before `end_step`."""

    def __init__(self, scaling: LossScaling, device: torch.device | str):
        self.scale = float(scaling.init_scale)
        self.found_inf = torch.zeros((), dtype=torch.float64, device=device)
        self._device = device
        self._since_change = 0  # steps without overflow
        self._skipped = 0  # steps in a row

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """The gradient with which a backward begins: the scale, in the dtype of the loss, where it may be infinite."""
        return torch.full_like(loss, self.scale, dtype=torch.float32).to(loss.dtype)

    @torch.no_grad()
    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        """Divide `gradients` by the scale, in place, and set `found_inf`. The host does not wait."""
        inverse = torch.full((), 1.0 / self.scale, dtype=torch.float32, device=self._device)
        found = torch.zeros((), dtype=torch.float32, device=self._device)
        reals = (torch.view_as_real(g) if g.is_complex() else g for g in gradients)
        for tensors in group_by_dtype(reals).values():
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, inverse)
        self.found_inf = found.double()

    def take_found_inf(self, summed: torch.Tensor) -> None:
        """Take over `found_inf` as it was summed over all meshes."""
        self.found_inf = summed

    def end_step(self, step: int) -> tuple[float, bool]:
        """Set the scale of the next step; returns the scale of this one, and whether its gradients overflowed.

        NonFiniteError after too many such steps in a row. Waits for the device.
        """
        used = self.scale
        if float(self.found_inf) > 0:
            self.scale = _as_float32(self.scale * BACKOFF_FACTOR)
            self._since_change, self._skipped = 0, self._skipped + 1
            if self._skipped >= MAX_SKIPPED_STEPS:
                raise NonFiniteError(
                    f"step {step}: the gradients of {self._skipped} steps in a row are not finite in fp16, the last "
                    f"with loss scale {used:g}: look for a loss or data that are no "
                    "number, lower the learning rate, or train with training.precision bf16"
                )
            return used, True
        self._skipped = 0
        self._since_change += 1
        if self._since_change == GROWTH_INTERVAL:
            larger = self.scale * GROWTH_FACTOR
            self.scale = _as_float32(larger) if larger <= _MAX_SCALE else self.scale
            self._since_change = 0
        return used, False

    def state(self) -> dict[str, Any]:
        """The state that the next step depends on, equal on every worker."""
        return {"scale": self.scale, "growth_tracker": self._since_change, "skipped_steps": self._skipped}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self.scale = float(state["scale"])
        self._since_change, self._skipped = int(state["growth_tracker"]), int(state["skipped_steps"])


def make_grad_scaler(options: RunOptions) -> PipelineGradScaler | None:
    """The loss scaler of a mesh that trains by `options`; None where its precision needs no scaling."""
    return PipelineGradScaler(options.loss_scaling, options.device) if options.precision == FP16 else None


def group_by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """`tensors` by dtype, dtypes in the order of their first tensor."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def _as_float32(value: float) -> float:
    """`value` rounded to float32, as torch.amp.GradScaler keeps its scale."""
    return float(torch.tensor(value, dtype=torch.float32)) if math.isfinite(value) else value
