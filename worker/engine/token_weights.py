"""What the microbatches of a step count where tokens count alike: a mean over the whole batch is the mean of their means,
each weighted by its tokens. Runs within the first forward that has a loss, on the lane of that."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.engine.groups import workers_group
from worker.engine.meetings import Meetings
from worker.nests import Target, tokens_of
from worker.transport.base import Transport


@torch.no_grad()
def token_weights(
    targets: Sequence[Target], ignored: int, transport: Transport | Meetings, tensor: int = 1
) -> torch.Tensor:
    """The weight of each microbatch of this worker; over those of all workers of the mesh they are 1 on average.

    Every worker of the mesh, of which `tensor` next to each other have the same targets, calls this at the same place
    of its program.
    """
    tokens = torch.stack([tokens_of(target, ignored) for target in targets]).double()
    total, workers = tokens.sum(), transport.topology.workers(transport.mesh) // tensor
    if workers > 1:
        transport.all_reduce(workers_group(transport.mesh, transport.worker, tensor), total)
    return tokens * (len(targets) * workers) / total.clamp(min=1)
