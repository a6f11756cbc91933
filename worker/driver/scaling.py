"""What a step says of numbers that were not finite: the loss scale of fp16, and why an update was left out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.step_values import WorkerStep


@dataclass(frozen=True)
class StepScaling:
    """`loss_scale` of the step, None but in fp16; `overflowed`: gradients did so in fp16, and the scale is lowered;
    `not_finite`: the update was left out as training.non_finite says."""

    loss_scale: float | None
    overflowed: bool
    not_finite: bool

    def told(self, step: int) -> str:
        """The event of a step that overflowed."""
        return (
            f"step {step}: gradients overflowed in fp16 with loss scale {self.loss_scale:g}; no update, and the next "
            "step scales by less"
        )


def step_scaling(results: Sequence[WorkerStep]) -> StepScaling:
    """Of what all workers say, which agree; a mesh may have no parameters."""
    overflowed = any(result.overflowed for result in results)
    scales = (result.loss_scale for result in results if result.loss_scale is not None)
    skipped = any(result.skipped for result in results)
    return StepScaling(next(scales, None), overflowed, skipped and not overflowed)
