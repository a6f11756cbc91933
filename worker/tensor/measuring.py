"""A stage that shares its matrices with others, measured by one worker alone: what it sums is counted, not summed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from worker.failure import attributed_to
from worker.model.stages import StageModule
from worker.reasons import Reason
from worker.tensor.collectives import TensorGroup
from worker.tensor.stage import tensor_stage


class Sharing:
    """What the first of `workers` runs of a stage by `plan`, and how much it would have summed with the others."""

    def __init__(self, workers: int, plan: Mapping[str, str] | None):
        self._plan = plan
        self._group = TensorGroup(0, workers, self._count)
        self._sums = self._bytes = 0

    @attributed_to(Reason.PLAN_INFEASIBLE)
    def of(self, stage: StageModule) -> StageModule:
        """AttemptFailure for what so many workers cannot share."""
        return tensor_stage(stage, self._plan, self._group).module

    def take(self) -> tuple[int, int]:
        """How often it would have summed since this was asked last, and bytes in all."""
        found = self._sums, self._bytes
        self._sums = self._bytes = 0
        return found

    def _count(self, tensor: torch.Tensor) -> None:
        self._sums += 1
        self._bytes += tensor.nbytes
