"""BatchNorm in a traced model, whose workers have parts of a microbatch: where it is, and what to tell of it."""

from __future__ import annotations

import torch
from torch import fx

from worker.job import Job
from worker.model.tracing import TracedModel

_TRAINING = 5  # the argument that says so


def is_batch_norm(node: fx.Node) -> bool:
    """Whether a node of a graph normalises by the statistics of the batch that it is given."""
    return node.target is torch.ops.aten.batch_norm.default and bool(node.args[_TRAINING])


def batch_norm_notes(traced: TracedModel, job: Job) -> list[str]:
    """What to tell where data-parallel workers normalise each by its own rows."""
    workers = max(job.mesh_sizes) // job.resources.tensor
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
