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
        self._counted = _Counted()
        self._group = TensorGroup(0, workers, self._counted)

    @attributed_to(Reason.PLAN_INFEASIBLE)
    def of(self, stage: StageModule) -> tuple[StageModule, frozenset[str]]:
        """The stage, and of which parameters it has a part, by their names in the model; AttemptFailure for what so many
        workers cannot share."""
        shared = tensor_stage(stage, self._plan, self._group)
        return shared.module, frozenset(shared.splits)

    def take(self) -> list[tuple[str, int, int]]:
        """What it would have done since this was asked last: of each way to sum (those of SumCosts) how often, and bytes of
        whole tensors in all."""
        found, self._counted.ways = self._counted.ways, {}
        return [(way, count, size) for way, (count, size) in sorted(found.items())]


class _Counted:
    """In place of the group's transport: what would be gathered is this worker's own."""

    def __init__(self) -> None:
        self.ways: dict[str, tuple[int, int]] = {}

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._add("reduce", tensor)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._add("gather", out)
        out.copy_(tensor.expand_as(out))

    def _add(self, way: str, whole: torch.Tensor) -> None:
        count, size = self.ways.get(way, (0, 0))
        self.ways[way] = (count + 1, size + whole.nbytes)
