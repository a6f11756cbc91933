"""REDUCE and STEP of a mesh whose workers share the optimizer's state (`shard: optimizer`): gradients reduce-scattered, each
worker updates its own part of every parameter, and parameters all-gathered.

Workers that share matrices (tensor parallel) have each their own; of these, and of what all of them have whole, the
data-parallel workers with the same share have their parts.

Gradients of a parameter that other meshes hold too are summed whole, as on any other mesh: its copies stay one to the bit.
The collectives come in one order on all workers: buckets in that of the program, then REDUCE, then STEP, each through
parameters in one order. Must not know programs, lanes or microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from worker.buckets import BUCKET_BYTES
from worker.engine.lanes import Finish, followed_by
from worker.engine.shards import Parts, adopt, keys_of_elements, own_parts, part_of_entry
from worker.engine.update import ModelUpdate, UpdateSettings
from worker.transport.base import Transport, finish


def make_update(*, transport: Transport, settings: UpdateSettings, **given: Any) -> ModelUpdate:
    """The update of this worker's mesh; arguments are those of ModelUpdate."""
    shared = transport.mesh in settings.sharded and _data_workers(transport, settings) > 1
    kind = ShardedUpdate if shared else ModelUpdate
    return kind(transport=transport, settings=settings, **given)


def _data_workers(transport: Transport, settings: UpdateSettings) -> int:
    return transport.topology.workers(transport.mesh) // settings.tensor


class ShardedUpdate(ModelUpdate):
    """What the optimizer updates are parts of the parameters, and views of them."""

    def __init__(self, *, transport: Transport, settings: UpdateSettings, **given: Any):
        super().__init__(transport=transport, settings=settings, **given)
        self._parts = Parts(transport.worker // settings.tensor, _data_workers(transport, settings))
        self.updated = own_parts(self.parameters, self._parts)
        self._own = {self.parameters[name]: part for name, part in self.updated.items()}
        self._tied = {self.parameters[name] for name in self._tied_groups}
        if self.optimizer is not None:
            adopt(self.optimizer, self._own, self._parts)

    def begin(self) -> None:
        super().begin()
        for part in self.updated.values():
            part.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        for names in _together(self.updated, self.parameters):
            parts = [self.updated[name] for name in names]
            sizes = [self.parameters[name].numel() for name in names]
            for name, whole in zip(names, self._gather(parts, sizes), strict=True):
                parameter = self.parameters[name]
                parameter.copy_(whole.view_as(parameter))

    def _own_state(self) -> dict[str, Any]:
        """As of a mesh that shares no optimizer, which every worker of this one must ask for at the same time; the
        optimizer's state is in the host's memory, and only the first of the workers that share it has it."""
        own = super()._own_state()
        return {**own, "optimizer": self._gathered_state(own["optimizer"])}

    def _load_own(self, state: Mapping[str, Any]) -> None:
        parts = {
            name: part_of_entry(entry, self.parameters[name], self._parts)
            for name, entry in state["optimizer"].items()
            if name in self.updated
        }
        super()._load_own({**state, "optimizer": parts})

    # REDUCE

    def _average(self, parameters: Sequence[nn.Parameter]) -> Finish | None:
        tied = [p for p in parameters if p in self._tied]
        if tied:
            finish(super()._average(tied))
        alone = [p for p in parameters if p not in self._tied]
        return self._scatter(alone) if alone else None

    def _scatter(self, parameters: Sequence[nn.Parameter]) -> Finish | None:
        """Start to sum this worker's parts over the mesh, and to count which workers made a gradient."""
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
                own.copy_(part[: own.numel()] / self._shares)
            for k in unmade:
                self._makers[parameters[k]] = makers[k].clone()

        return followed_by(self.transport.start_reduce_scatter(self._workers_group, out, flat), hand_out)

    def _gradients_of_norm(self) -> list[torch.Tensor]:
        """Of this worker's parts, all of them together are the mesh's; from here on gradients are those of parts."""
        for parameter in self._tied:
            if parameter.grad is not None:
                self._take_part(parameter)
        self._makers = {self._own[parameter]: makers for parameter, makers in self._makers.items()}
        own = (self.updated[name].grad for name in self._counted_here() if name in self.updated)
        return [gradient for gradient in own if gradient is not None]

    def _take_part(self, parameter: nn.Parameter) -> None:
        """Have the gradient of this worker's part lie in that of the parameter."""
        self._own[parameter].grad = self._parts.of(parameter.grad.reshape(-1))

    # STEP, and checkpoints

    @torch.no_grad()
    def _gathered_state(self, own: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        leads = self._parts.worker == 0
        found = {name: dict(entry) for name, entry in own.items()} if leads else {}
        vectors = {
            (name, key): own[name][key]
            for name in own
            for key in keys_of_elements(own[name], self.updated[name])
        }
        for places in _together(vectors, {place: self.parameters[place[0]] for place in vectors}):
            sizes = [self.parameters[name].numel() for name, _ in places]
            wholes = self._gather([vectors[place] for place in places], sizes)
            for (name, key), whole in zip(places, wholes, strict=True):
                if leads:
                    found[name][key] = whole.view(self.parameters[name].shape).to("cpu", copy=True)
        return found

    def _gather(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """The vectors of so many elements of which every worker has its part, one after the other."""
        own = torch.cat(
            [self._parts.filled(part.detach(), size) for part, size in zip(parts, sizes, strict=True)]
        )
        out = own.new_empty(self._parts.workers, own.numel())
        finish(self.transport.start_all_gather(self._workers_group, out, own))
        lengths = [self._parts.length(size) for size in sizes]
        for rows, size in zip(out.split(lengths, dim=1), sizes, strict=True):
            yield rows.reshape(-1)[:size]


def _together(vectors: Mapping[Any, torch.Tensor], wholes: Mapping[Any, torch.Tensor]) -> list[list[Any]]:
    """The keys of `vectors` in their order, in runs of one dtype whose wholes are about a bucket each."""
    found: list[list[Any]] = []
    held, kind = 0, None
    for key, vector in vectors.items():
        size = wholes[key].numel() * vector.element_size()
        if not found or vector.dtype != kind or held + size > BUCKET_BYTES:
            found.append([])
            held, kind = 0, vector.dtype
        found[-1].append(key)
        held += size
    return found
