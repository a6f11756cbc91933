"""TensorParallelShards: the shards of one rank's parameters, what it counts of them and what its group has in common.

Counts for global sums what a rank owns (its shards, and replicated parameters on the first rank only) and
averages the gradients of replicated parameters, so that their copies stay equal to the bit: on CUDA additions
by atomics, on CPU processors of two kinds would drive them apart. Also builds a mesh's tensor-parallel stages
from the job's plan, refusing a parameter that two stages split differently. Must not know optimizers, data or the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from worker.contract.buckets import Gradient, group_into_buckets
from worker.contract.failures import attributed_to
from worker.contract.job import Job
from worker.contract.profile import ModelError
from worker.contract.reasons import Reason
from worker.model.export import TracedModel
from worker.model.stages import StageModule
from worker.parallel.shard_spec import ShardSpec
from worker.parallel.tensor.graph_collectives import GroupCommunicator, TensorGroup
from worker.parallel.tensor.placement import Split
from worker.parallel.tensor.plans import check_tensor_plan
from worker.parallel.tensor.tensor_stage import split_stage_as, tensor_stage


class TensorParallelShards:
    """The shards of a rank of `group`: of the parameters in `splits`, by original name; all others are whole."""

    def __init__(self, group: TensorGroup, splits: Mapping[str, Split]):
        self._group, self._splits = group, splits

    def shard_stage_like(self, stage: StageModule) -> StageModule:
        """Another graph of a stage on the same shards of its parameters."""
        return split_stage_as(stage, self._splits, self._group)

    def shard_spec(self, name: str) -> ShardSpec:
        """The slice of `name` that this rank has, for a comparison with others."""
        split = self._splits.get(name)
        if split is None:
            return ShardSpec(name)
        return ShardSpec(name, split.dim, split.parts, self._group.worker, self._group.workers)

    def counts(self, name: str) -> bool:
        """True where this rank counts `name` in a sum over the group: its shards, and whole parameters on the first rank."""
        return name in self._splits or self._group.worker == 0

    def counted(self, names: Sequence[str]) -> list[str]:
        """The parameters in `names` that this rank counts in a sum over the group."""
        return [name for name in names if self.counts(name)]

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the tensor `whole` of `name`."""
        split = self._splits.get(name)
        if split is None:
            return whole
        return split.pick(whole, self._group.worker, self._group.workers).clone()

    def zero_padded(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole of `name` with zeros outside this rank's shard: those of all ranks add up to it."""
        split = self._splits.get(name)
        return part if split is None else split.padded(part, self._group.worker, self._group.workers)

    def sum_whole(self, name: str, part: torch.Tensor, add: Callable[[torch.Tensor], None]) -> None:
        """Sum `name` over meshes that split it otherwise: `add` sums whole tensors, then `part` gets this rank's shard."""
        whole = self.zero_padded(name, part) if self.counts(name) else torch.zeros_like(part)
        add(whole)
        part.copy_(self.part(name, whole))

    def sum(self, total: torch.Tensor) -> None:
        """Sum `total` over the group, in place."""
        total.copy_(self._group.sum(total))

    def average_replicated(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Replace the gradients of replicated parameters by their mean over the group, equal to the bit on every rank: what
        ranks round differently (CUDA atomics, CPUs of two kinds) would drive their copies apart, step by step. REDUCE does
        this, and plans count it; a bucket's bytes at a time, which bounds the copy."""
        whole = [
            Gradient(name, (), one.nbytes, str(one.dtype))
            for name, one in gradients.items()
            if name not in self._splits
        ]
        for names in group_into_buckets(whole):
            replicated = [gradients[name] for name in names]
            flat = torch.cat([gradient.reshape(-1) for gradient in replicated])
            parts = (self._group.sum(flat) / self._group.workers).split(
                [gradient.numel() for gradient in replicated]
            )
            for gradient, part in zip(replicated, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def check_state(
        self, optimizer: Mapping[str, Mapping[str, Any]], updated: Mapping[str, torch.Tensor]
    ) -> None:
        """ValueError for optimizer state of which nobody can tell which slice of the whole a rank has: a value of a split
        parameter that is no single number and has not the shape of what the rank updates of it (`updated`)."""
        for name, entry in optimizer.items():
            if name not in self._splits:
                continue
            parameter = updated[name]
            for key, value in entry.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                    raise ValueError(
                        f"the optimizer keeps {key!r} of shape {list(value.shape)} for {name!r}, of which each worker has a "
                        f"part of shape {list(parameter.shape)}: with `tensor` use an optimizer whose state has the "
                        "shape of its parameters, as SGD, Adam and AdamW"
                    )


@attributed_to(Reason.PLAN_INFEASIBLE)
def check_tensor_plan_of(traced: TracedModel, plan: Mapping[str, str] | None, workers: int) -> None:
    """ModelError for a `plan` that splits nothing of the model, or names modules that it does not have."""
    check_tensor_plan(plan, list(traced.placed.parameters.values()), workers)


@attributed_to(Reason.PLAN_INFEASIBLE)
def tensor_parallel_stages(
    job: Job, stages: Mapping[int, StageModule], mesh: str, worker: int, communicator: GroupCommunicator
) -> tuple[TensorParallelShards, dict[int, StageModule]]:
    """The stages that `worker` of `mesh` runs in place of `stages`, and its shards of their parameters.

    Ranks sum through `communicator`. ModelError where stages that use one parameter split it differently.
    """
    tensor, plan = job.tp_size(mesh), job.resources.tensor_plan
    group = TensorGroup(worker % tensor, tensor, communicator)
    splits: dict[str, Split | None] = {}
    own_stages: dict[int, StageModule] = {}
    for index, stage in stages.items():
        shared = tensor_stage(stage, plan, group)
        for name in stage.original_names.values():
            split = shared.splits.get(name)
            if not _same_split(splits.setdefault(name, split), split):
                raise ModelError(
                    f"parameter {name!r} has several users: one wants {_describe_split(splits[name])} and another "
                    f"{_describe_split(split)}; give their modules one style in resources.tensor_plan, vocab or replicate"
                )
        own_stages[index] = shared.module
    return TensorParallelShards(
        group, {name: split for name, split in splits.items() if split is not None}
    ), own_stages


def _same_split(one: Split | None, other: Split | None) -> bool:
    return one is other if one is None or other is None else one.same_layout(other)


def _describe_split(split: Split | None) -> str:
    return "the whole of it" if split is None else f"parts along dimension {split.dim}"
