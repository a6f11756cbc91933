"""TensorParallelShards: the shards of one rank's parameters, gathered to whole state and taken apart again.

Counts for global sums what a rank owns (its shards, and replicated parameters on the first rank only) and
averages the gradients of replicated parameters, so that their copies stay equal to the bit: on CUDA additions
by atomics, on CPU processors of two kinds would drive them apart. All ranks of the group call state functions
at the same time and gather in one order. Also builds a mesh's tensor-parallel stages from the job's plan,
refusing a parameter that two stages split differently. Must not know optimizers, data or the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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

    def whole_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a mesh with whole tensors; all ranks of the group call this, and gather in one order."""
        parameters = {
            name: self._group.gather(tensor, split) if (split := self._splits.get(name)) else tensor
            for name, tensor in sorted(state["parameters"].items())
        }
        optimizer = {
            name: {key: self._whole(name, key, value, state) for key, value in sorted(entry.items())}
            for name, entry in sorted(state["optimizer"].items())
        }
        return {**state, "parameters": parameters, "optimizer": optimizer}

    def part_of_state(self, state: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        """This rank's shards of `names` from a state with whole tensors."""
        parameters = {
            name: self.part(name, tensor) for name, tensor in state["parameters"].items() if name in names
        }
        optimizer = {
            name: {
                key: self.part(name, value) if _has_same_shape(value, state["parameters"][name]) else value
                for key, value in entry.items()
            }
            for name, entry in state["optimizer"].items()
            if name in names
        }
        return {**state, "parameters": parameters, "optimizer": optimizer}

    def _whole(self, name: str, key: str, value: Any, state: Mapping[str, Any]) -> Any:
        split = self._splits.get(name)
        if split is None or not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        parameter = state["parameters"][name]
        if not _has_same_shape(value, parameter):
            raise ValueError(
                f"the optimizer keeps {key!r} of shape {list(value.shape)} for {name!r}, of which each worker has a part of "
                f"shape {list(parameter.shape)}: with `tensor` use an optimizer whose state has the "
                "shape of its parameters, as SGD, Adam and AdamW"
            )
        return self._group.gather(value.to(parameter.device), split).to(value.device)


def _has_same_shape(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


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
