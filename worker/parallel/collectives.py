"""Collectives that a rank enters inside a slot: of tensor parallelism, synchronised BatchNorm and token weights.

All ranks of a group enter them in one order: that of their program and of their stages' graphs. Each is
counted, so that for one that does not end the missing ranks can be named; on CUDA it is only enqueued, and
nobody waits in it. Also computes token weights: where tokens count equally, each microbatch's mean is weighted
by its tokens over the mesh. Must not know stages or slots.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from worker.model.pytree import Target, count_tokens
from worker.parallel.process_groups import dp_group, in_stage_peers
from worker.transport.base import Transport, finish


class Collectives:
    """What one worker sums and gathers with others, through the transport that `now` gives. `groups` are the ranks of each
    group by name, told once they are known."""

    def __init__(self, transport: Transport, now: Callable[[], Transport]):
        self.topology, self.mesh, self.worker = transport.topology, transport.mesh, transport.worker
        self.groups: Mapping[str, tuple[int, ...]] = {}
        self._current_transport = now
        self._entered_counts: dict[str, int] = {}
        self._waiting_in: str | None = None

    def all_reduce(self, group: str, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the group, in place."""
        with self._entered(group):
            self._current_transport().all_reduce(group, tensor)

    def all_gather(self, group: str, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill contiguous `out` with the `tensor` of every worker of the group, in their order."""
        with self._entered(group):
            finish(self._current_transport().start_all_gather(group, out, tensor))

    def of(self, group: str) -> GroupCollectives:
        """Those of one group."""
        return GroupCollectives(self, group)

    def progress_text(self) -> str:
        """How far this worker has come, for `missing` of its peers."""
        return "".join(
            f", come to {count} sums of {group}"
            for group, count in sorted(self._entered_counts.copy().items())
        )

    def missing(self, said: Callable[[str], str]) -> tuple[str, ...]:
        """The workers that have not come to the sum in which this one waits, by what each `said` last (`told`); none where
        it waits in no sum, or all have come."""
        group = self._waiting_in
        if group is None:
            return ()
        count = re.compile(rf"come to (\d+) sums of {re.escape(group)}(?:,|$)")
        names = self.other_members(group)
        come = {name: int(found[1]) if (found := count.search(said(name))) else 0 for name in names}
        return tuple(name for name in names if come[name] < self._entered_counts[group])

    def other_members(self, group: str) -> tuple[str, ...]:
        """The other workers of a group; of what is none, nobody."""
        own = self.topology.rank(self.mesh, self.worker)
        return tuple(self.topology.name(rank) for rank in self.groups.get(group, ()) if rank != own)

    def in_stage_peers(self) -> tuple[str, ...]:
        """The workers with which this one sums inside actions."""
        return in_stage_peers(self.topology, self.topology.rank(self.mesh, self.worker), self.groups)

    @contextlib.contextmanager
    def _entered(self, group: str) -> Iterator[None]:
        self._entered_counts[group] = self._entered_counts.get(group, 0) + 1
        self._waiting_in = group
        try:
            yield
        finally:
            self._waiting_in = None


class GroupCollectives:
    """The sums of one group (tensor/collectives.py's Between)."""

    def __init__(self, meetings: Collectives, group: str):
        self._collectives, self._group = meetings, group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._collectives.all_reduce(self._group, tensor)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._collectives.all_gather(self._group, out, tensor)


@torch.no_grad()
def token_weights(
    targets: Sequence[Target], ignored: int, transport: Transport | Collectives, tensor: int = 1
) -> torch.Tensor:
    """The weight of each microbatch of this worker; over those of all workers of the mesh they are 1 on average.

    Every worker of the mesh, of which `tensor` next to each other have the same targets, calls this at the same place
    of its program.
    """
    tokens = torch.stack([count_tokens(target, ignored) for target in targets]).double()
    total, workers = tokens.sum(), transport.topology.workers(transport.mesh) // tensor
    if workers > 1:
        transport.all_reduce(dp_group(transport.mesh, transport.worker, tensor), total)
    return tokens * (len(targets) * workers) / total.clamp(min=1)
