"""BatchNorm in a traced model, whose workers have parts of a microbatch: where it is, and what to tell of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from worker.job import Job
from worker.model.tracing import TracedModel

_TRAINING = 5  # the argument that says so


def is_batch_norm(node: fx.Node) -> bool:
    """Whether a node of a graph normalises by the statistics of the batch that it is given."""
    return node.target is torch.ops.aten.batch_norm.default and bool(node.args[_TRAINING])


def norm_sums(
    operations: Iterable[fx.Node], values: Mapping[fx.Node, Any]
) -> tuple[tuple[str, int, int], ...]:
    """What the batch norms of a layer sum where they normalise over all workers of a mesh (engine/sync_norm.py): of a
    time's name (LayerCost) how many, and bytes in all. `values` are those of the graph's nodes."""
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
    """What to tell where data-parallel workers normalise each by its own rows."""
    workers = job.data_workers
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
