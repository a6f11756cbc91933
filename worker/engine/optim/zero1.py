"""ZeRO-1: REDUCE and STEP of a mesh whose dp ranks share the optimizer state (`shard: optimizer` in the job).

Gradients are reduce-scattered, each rank updates its own partition of every parameter, and parameters are
all-gathered. A partition is a run of a parameter's elements in memory order: equal ones, of which the last ones may
be shorter or empty; long ones begin at multiples of ALIGNED_ELEMENTS. With tensor parallelism the dp ranks that hold
the same shard form the group. Gradients of a parameter that other meshes hold too are summed whole: its copies stay
equal to the bit. Collectives come in one order on all ranks: buckets in program order, then REDUCE, then STEP, each
through parameters in one order.
Must not know programs, lanes or microbatches; `trials` refuses optimizers that are not elementwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from worker.contract.buckets import BUCKET_BYTES
from worker.engine.lanes.base import Finish, chain_finish
from worker.engine.local_stages import LocalStages
from worker.engine.optim.reduce_and_step import ModelUpdate, UpdateSettings
from worker.parallel.chunks import STEP_KEY, FlatRun
from worker.parallel.collectives import Collectives
from worker.transport.base import finish

ALIGNED_ELEMENTS = 128
"""Partitions of so many elements and more begin at multiples of it: kernels and NCCL move vectors of aligned tensors."""


@dataclass(frozen=True)
class FlatPartition:
    """The partition of every parameter that worker `worker` of `workers` updates."""

    worker: int
    workers: int

    def length(self, elements: int) -> int:
        """The length of a partition of `elements`, the padding of the last one included."""
        length = -(-elements // self.workers)
        return length if length < ALIGNED_ELEMENTS else -(-length // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This worker's partition of a vector [elements]: a view."""
        return self.run(flat).of(flat)

    def run(self, tensor: torch.Tensor) -> FlatRun:
        """The elements of a tensor that are in this worker's partition."""
        elements = tensor.numel()
        length = self.length(elements)
        begin, end = (min(worker * length, elements) for worker in (self.worker, self.worker + 1))
        return FlatRun(begin, end, tuple(tensor.shape))

    def all_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """All partitions of a tensor, [workers, length], padded with zeros."""
        flat = tensor.reshape(-1)
        length = self.length(flat.numel())
        return functional.pad(flat, (0, self.workers * length - flat.numel())).view(self.workers, length)

    def filled(self, part: torch.Tensor, elements: int) -> torch.Tensor:
        """This worker's `part` of a vector of `elements`, padded to the length of all partitions."""
        return functional.pad(part, (0, self.length(elements) - part.numel()))


def local_partitions(parameters: Mapping[str, nn.Parameter], parts: FlatPartition) -> dict[str, nn.Parameter]:
    """This worker's partition of each trained parameter, a view: an update of it updates the parameter."""
    partitions = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        if not parameter.is_contiguous():  # its elements must lie in memory as all workers count them
            parameter.data = parameter.data.contiguous()
        partitions[name] = nn.Parameter(parts.of(parameter.detach().view(-1)))
    return partitions


def partition_optimizer(
    optimizer: torch.optim.Optimizer, own: Mapping[nn.Parameter, nn.Parameter], parts: FlatPartition
) -> None:
    """Have `optimizer`, which was made for whole parameters, as it may group them by shape, update their partitions."""
    for group in optimizer.param_groups:
        group["params"] = [own[parameter] for parameter in group["params"]]
    for parameter, entry in list(optimizer.state.items()):
        del optimizer.state[parameter]
        optimizer.state[own[parameter]] = partition_state_entry(entry, parameter, parts)


def partition_state_entry(
    entry: Mapping[str, Any], whole: torch.Tensor, parts: FlatPartition
) -> dict[str, Any]:
    """A worker's partition of the optimizer state of a parameter, copied so that the rest can be freed."""
    return {
        key: parts.of(value.reshape(-1)).clone() if _is_elementwise(key, value, whole) else value
        for key, value in entry.items()
    }


def _is_elementwise(key: str, value: Any, parameter: torch.Tensor) -> bool:
    return key != STEP_KEY and isinstance(value, torch.Tensor) and value.shape == parameter.shape


def make_update(
    stages: LocalStages, collectives: Collectives, settings: UpdateSettings, **options: Any
) -> ModelUpdate:
    """The update of this worker's mesh, sharded where its dp ranks share the optimizer state; `options` are those of
    ModelUpdate."""
    sharded = collectives.mesh in settings.sharded and _dp_size(collectives, settings) > 1
    kind = Zero1Update if sharded else ModelUpdate
    return kind(stages, collectives, settings, **options)


def _dp_size(collectives: Collectives, settings: UpdateSettings) -> int:
    return collectives.topology.workers(collectives.mesh) // settings.tensor


class Zero1Update(ModelUpdate):
    """Updates this rank's partitions of the parameters, which are views of them."""

    def __init__(
        self, stages: LocalStages, collectives: Collectives, settings: UpdateSettings, **options: Any
    ):
        super().__init__(stages, collectives, settings, **options)
        self._parts = FlatPartition(collectives.worker // settings.tensor, _dp_size(collectives, settings))
        self.updated = local_partitions(self.parameters, self._parts)
        self._own = {self.parameters[name]: part for name, part in self.updated.items()}
        self._tied = {self.parameters[name] for name in self._tied_groups}
        if self.optimizer is not None:
            partition_optimizer(self.optimizer, self._own, self._parts)

    def begin(self) -> None:
        super().begin()
        for part in self.updated.values():
            part.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        for names in keys_by_bucket(self.updated, self.parameters):
            parts = [self.updated[name] for name in names]
            sizes = [self.parameters[name].numel() for name in names]
            for name, whole in zip(names, self._gather(parts, sizes), strict=True):
                parameter = self.parameters[name]
                if not self.collectives.is_muted:  # else those of others are no values of theirs
                    parameter.copy_(whole.view_as(parameter))

    @property
    def partitions(self) -> Mapping[str, FlatRun]:
        return {name: self._parts.run(self.parameters[name]) for name in self.updated}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state; it has whole entries of the optimizer, of which this rank takes its partitions, or these."""
        parts = {
            name: partition_state_entry(entry, self.parameters[name], self._parts)
            for name, entry in state["optimizer"].items()
            if name in self.updated
        }
        super().load_state({**state, "optimizer": parts})

    # REDUCE

    def _average(self, parameters: Sequence[nn.Parameter]) -> Finish | None:
        tied = [p for p in parameters if p in self._tied]
        if tied:
            finish(super()._average(tied))
        alone = [p for p in parameters if p not in self._tied]
        return self._scatter(alone) if alone else None

    def _scatter(self, parameters: Sequence[nn.Parameter]) -> Finish | None:
        """Start to reduce-scatter gradients over the dp group, and to count the workers that made each."""
        unmade = [k for k, p in enumerate(parameters) if p.grad is None]
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        rows = [self._parts.all_of(p.grad) for p in parameters]
        counts = rows[0].new_ones(len(parameters))
        for k in unmade:
            counts[k] = 0.0
        flat = torch.cat([*rows, counts.expand(self._parts.workers, -1)], dim=1)
        out = flat.new_empty(flat.shape[1])

        @torch.no_grad()
        def hand_out() -> None:
            *parts, makers = out.split([*(row.shape[1] for row in rows), len(parameters)])
            for parameter, part in zip(parameters, parts, strict=True):
                self._take_part(parameter)
                own = self._own[parameter].grad
                own.copy_(part[: own.numel()] / self._dp_size_of_loss)
            for k in unmade:
                self._gradient_counts[parameters[k]] = makers[k].clone()

        return chain_finish(self.collectives.start_reduce_scatter(self._dp_group, out, flat), hand_out)

    def _gradients_of_norm(self) -> list[torch.Tensor]:
        """The gradients of this worker's partitions: those of all dp ranks make the mesh's. From here on gradients are those
        of partitions."""
        for parameter in self._tied:
            if parameter.grad is not None:
                self._take_part(parameter)
        self._gradient_counts = {
            self._own[parameter]: makers for parameter, makers in self._gradient_counts.items()
        }
        own = (self.updated[name].grad for name in self._counted_here() if name in self.updated)
        return [gradient for gradient in own if gradient is not None]

    def _take_part(self, parameter: nn.Parameter) -> None:
        """Make the gradient of this worker's partition a view of that of the parameter."""
        self._own[parameter].grad = self._parts.of(parameter.grad.reshape(-1))

    # STEP

    def _gather(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """All-gather vectors of `sizes` elements from the partitions of every dp rank; yields each in turn."""
        own = torch.cat(
            [self._parts.filled(part.detach(), size) for part, size in zip(parts, sizes, strict=True)]
        )
        out = own.new_empty(self._parts.workers, own.numel())
        finish(self.collectives.start_all_gather(self._dp_group, out, own))
        lengths = [self._parts.length(size) for size in sizes]
        for rows, size in zip(out.split(lengths, dim=1), sizes, strict=True):
            yield rows.reshape(-1)[:size]


def keys_by_bucket(
    vectors: Mapping[Any, torch.Tensor], wholes: Mapping[Any, torch.Tensor]
) -> list[list[Any]]:
    """The keys of `vectors` in their order, in runs of one dtype whose whole tensors fill about a bucket."""
    buckets: list[list[Any]] = []
    bucket_bytes, dtype = 0, None
    for key, vector in vectors.items():
        size = wholes[key].numel() * vector.element_size()
        if not buckets or vector.dtype != dtype or bucket_bytes + size > BUCKET_BYTES:
            buckets.append([])
            bucket_bytes, dtype = 0, vector.dtype
        buckets[-1].append(key)
        bucket_bytes += size
    return buckets
