"""BatchNorm over all workers of a mesh: each has a part of a microbatch's rows, and all normalise by the whole.

Stands in a stage's graph in place of torch's operation. The sums over workers are made within the stage's forward and
within its I or B, by every worker at the same place of the same program; W makes none, since what is summed lies before
the weight and bias are used. They have a group of their own: gradients are summed beside them, on another lane.
Must not know programs, lanes or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from worker.engine.meetings import Meetings
from worker.model.batch_norms import is_batch_norm
from worker.seeding import others_turn

Sum = Callable[[Tensor], None]
"""Sums a tensor over the workers of the mesh, in place."""


def synchronise(
    stages: Mapping[int, nn.Module] | None, meetings: Meetings, tensor: int = 1
) -> dict[str, tuple[int, ...]]:
    """Have every BatchNorm of `stages` normalise over the workers of their mesh; the ranks that must all-reduce together
    for that, by name, on every mesh. Nothing for None. `tensor` workers next to each other have the same rows: each adds up
    with those that have others."""
    if stages is None:
        return {}
    topology = meetings.topology
    groups = {
        _group(one, share): tuple(topology.rank(one, worker) for worker in range(share, size, tensor))
        for one, size in zip(topology.meshes, topology.sizes, strict=True)
        if size > tensor
        for share in range(tensor)
    }
    group = _group(meetings.mesh, meetings.worker % tensor)
    if group not in groups:
        return groups

    def add(tensor: Tensor) -> None:
        meetings.all_reduce(group, tensor)

    for stage in stages.values():
        for part in stage.modules():
            if isinstance(part, fx.GraphModule):
                _replace(part, add, topology.workers(meetings.mesh) // tensor)
    return groups


def _group(mesh: str, share: int) -> str:
    return f"norms/{mesh}/{share}"


def _replace(part: fx.GraphModule, add: Sum, workers: int) -> None:
    found = [node for node in part.graph.nodes if is_batch_norm(node)]
    for node in found:
        name = f"synchronised_{node.name}"
        part.add_submodule(name, SyncBatchNorm(add, workers))
        with part.graph.inserting_before(node):
            node.replace_all_uses_with(part.graph.call_module(name, node.args))
        part.graph.erase_node(node)
    if found:
        part.recompile()


class SyncBatchNorm(nn.Module):
    """Takes what aten.batch_norm takes. All workers have equally many rows."""

    def __init__(self, add: Sum, workers: int):
        super().__init__()
        self._add, self._workers = add, workers

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Tensor:
        made, mean, variance = _Normalise.apply(x, self._add, self._workers, eps)
        if running_mean is not None and running_var is not None:
            rows = self._workers * x.numel() // x.shape[1]
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((variance * (rows / (rows - 1))).to(running_var.dtype), momentum)
        if weight is not None:
            made = made * _by_channel(weight, x)
        if bias is not None:
            made = made + _by_channel(bias, x)
        return made.to(x.dtype)


class _Normalise(torch.autograd.Function):
    """(x - mean) / deviation by the rows of all workers, and mean and variance; in float32 at least."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, add: Sum, workers: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        values = x if x.dtype == torch.float64 else x.float()
        rows, channels = workers * (x.numel() // x.shape[1]), [d for d in range(x.dim()) if d != 1]
        mean = values.sum(channels)
        with others_turn():  # a forward may have the generators, and so may those that it waits for
            add(mean)
        mean /= rows
        made = values - _by_channel(mean, x)
        variance = made.square().sum(channels)
        with others_turn():
            add(variance)
        variance /= rows
        inverse = (variance + eps).rsqrt()
        made *= _by_channel(inverse, x)
        ctx.save_for_backward(made, inverse)
        ctx.add, ctx.rows, ctx.channels, ctx.dtype = add, rows, channels, x.dtype
        ctx.mark_non_differentiable(mean, variance)
        return made, mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, None, None, None]:
        made, inverse = ctx.saved_tensors
        sums = torch.stack([gradient.sum(ctx.channels), (gradient * made).sum(ctx.channels)])
        ctx.add(sums)
        of_gradient, of_product = (_by_channel(one, made) for one in sums / ctx.rows)
        found = (gradient - of_gradient - made * of_product) * _by_channel(inverse, made)
        return found.to(ctx.dtype), None, None, None


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))
