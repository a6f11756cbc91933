"""SyncBatchNorm: BatchNorm that normalises by the rows of all dp ranks of a mesh, put into traced stage graphs.

Sums are made within the stage's forward and within its I or B, by every rank at the same place of the same
program; W makes none, since what is summed lies before weight and bias are used. They have a process group of
their own: gradients are summed beside them, on another lane. Also finds batch norms in traced models, prices
their sums, and notes where dp ranks normalise each by its own rows.
Must not know programs, lanes or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from worker.contract.job import Job
from worker.model.export import TracedModel
from worker.model.rng import release_rng_lock
from worker.parallel.collectives import Collectives
from worker.parallel.process_groups import batch_norm_group

_TRAINING_ARGUMENT = 5  # `training` among the arguments of aten.batch_norm


def is_batch_norm(node: fx.Node) -> bool:
    """True for a node of a graph that normalises by the statistics of its batch."""
    return node.target is torch.ops.aten.batch_norm.default and bool(node.args[_TRAINING_ARGUMENT])


def batch_norm_collectives(
    operations: Iterable[fx.Node], values: Mapping[fx.Node, Any]
) -> tuple[tuple[str, int, int], ...]:
    """The sums of a layer's batch norms where they normalise over the dp ranks of a mesh: (name of a time in LayerCost,
    number of sums, bytes in all). `values` are the fake values of the graph's nodes."""
    norms = [values[node.args[0]] for node in operations if is_batch_norm(node)]
    if not norms:
        return ()
    channels_bytes = sum(x.shape[1] * (8 if x.dtype == torch.float64 else 4) for x in norms)
    of_backward = (len(norms), 2 * channels_bytes)
    return (
        ("forward_s", 2 * len(norms), 2 * channels_bytes),
        ("backward_s", *of_backward),
        ("backward_input_s", *of_backward),
    )


def batch_norm_notes(traced: TracedModel, job: Job) -> list[str]:
    """Notes for the user where each data-parallel worker normalises by its own rows."""
    workers = job.max_dp_size
    if workers == 1 or job.training.sync_batch_norm:
        return []
    parts = [part for part in traced.placed.module.modules() if isinstance(part, fx.GraphModule)]
    count = sum(is_batch_norm(node) for part in parts for node in part.graph.nodes)
    if not count:
        return []
    return [
        f"each of {workers} workers of a mesh normalises by its own rows in {count} BatchNorm layers, as torch's "
        "DistributedDataParallel does, and checkpoints and evaluations have the running statistics of worker 0: "
        "training.sync_batch_norm: true normalises by the whole microbatch, as on one worker"
    ]


AllReduce = Callable[[Tensor], None]
"""Sums a tensor over the dp ranks of the mesh, in place."""


def synchronize_batch_norms(
    stages: Mapping[int, nn.Module], collectives: Collectives, tensor: int = 1
) -> None:
    """Have every BatchNorm of `stages` normalise over the dp ranks of their mesh; `tensor` ranks next to each other have
    the same rows."""
    group = batch_norm_group(collectives.mesh, collectives.worker, tensor)
    if group not in collectives.groups:
        return
    all_reduce = collectives.in_stage(group).all_reduce
    dp_size = collectives.topology.workers(collectives.mesh) // tensor
    for stage in stages.values():
        for part in stage.modules():
            if isinstance(part, fx.GraphModule):
                _replace_batch_norms(part, all_reduce, dp_size)


def _replace_batch_norms(part: fx.GraphModule, add: AllReduce, workers: int) -> None:
    nodes = [node for node in part.graph.nodes if is_batch_norm(node)]
    for node in nodes:
        name = f"synchronised_{node.name}"
        part.add_submodule(name, SyncBatchNorm(add, workers))
        with part.graph.inserting_before(node):
            node.replace_all_uses_with(part.graph.call_module(name, node.args))
        part.graph.erase_node(node)
    if nodes:
        part.recompile()


class SyncBatchNorm(nn.Module):
    """aten.batch_norm over the rows of all dp ranks, with its arguments. All workers have equally many rows."""

    def __init__(self, add: AllReduce, workers: int):
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
        normalised, mean, variance = _Normalise.apply(x, self._add, self._workers, eps)
        if running_mean is not None and running_var is not None:
            rows = self._workers * x.numel() // x.shape[1]
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((variance * (rows / (rows - 1))).to(running_var.dtype), momentum)
        if weight is not None:
            normalised = normalised * _by_channel(weight, x)
        if bias is not None:
            normalised = normalised + _by_channel(bias, x)
        return normalised.to(x.dtype)


class _Normalise(torch.autograd.Function):
    """(x - mean) / deviation by the rows of all workers, and mean and variance; in float32 at least."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, add: AllReduce, workers: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        values = x if x.dtype == torch.float64 else x.float()
        rows, channels = workers * (x.numel() // x.shape[1]), [d for d in range(x.dim()) if d != 1]
        mean = values.sum(channels)
        with release_rng_lock():  # a forward may have the generators, and so may those that it waits for
            add(mean)
        mean /= rows
        normalised = values - _by_channel(mean, x)
        variance = normalised.square().sum(channels)
        with release_rng_lock():
            add(variance)
        variance /= rows
        inverse = (variance + eps).rsqrt()
        normalised *= _by_channel(inverse, x)
        ctx.save_for_backward(normalised, inverse)
        ctx.add, ctx.rows, ctx.channels, ctx.dtype = add, rows, channels, x.dtype
        ctx.mark_non_differentiable(mean, variance)
        return normalised, mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, None, None, None]:
        normalised, inverse = ctx.saved_tensors
        sums = torch.stack([gradient.sum(ctx.channels), (gradient * normalised).sum(ctx.channels)])
        ctx.add(sums)
        of_gradient, of_product = (_by_channel(one, normalised) for one in sums / ctx.rows)
        found = (gradient - of_gradient - normalised * of_product) * _by_channel(inverse, normalised)
        return found.to(ctx.dtype), None, None, None


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))
