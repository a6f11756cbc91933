"""Collectives: every sum and gather of one worker, over the process groups of its run, recorded and mutable.

Groups are a pure function of topology and stages (process_groups.py), computed first, and equal on every worker. All
ranks of a group enter its collectives in one order, that of their programs and of their stages' graphs: the log
(collective_log.py) compares these orders. A collective inside a slot (of tensor parallelism, synchronised BatchNorm,
token weights) is counted besides, so that for one that does not end the missing ranks can be named; on CUDA it is
only enqueued, and nobody waits in it. A dry run mutes collectives and transfers.
Also computes token weights: where tokens count equally, each microbatch's mean is weighted by its tokens over the
mesh. Must not know stages or slots.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from worker.model.pytree import Target
from worker.parallel.collective_log import CollectiveLog
from worker.parallel.process_groups import dp_group, in_stage_peers
from worker.transport.base import Lane, Transport, finish, real_view
from worker.transport.selftest import collective_selftest


class Collectives:
    """All collectives of one worker over `groups`, the ranks of each group by name, and the `transport` that they take.

    `log` records them in order; `name` tells apart the logs of several runs on one transport.
    """

    def __init__(self, transport: Transport, groups: Mapping[str, tuple[int, ...]], name: str = "steps"):
        self.topology, self.mesh, self.worker = transport.topology, transport.mesh, transport.worker
        self.groups = groups
        self.transport = MutableTransport(transport)
        self.log = CollectiveLog(name, transport, groups)
        self._entered_counts: dict[str, int] = {}
        self._waiting_in: str | None = None

    def connect(self, lanes: tuple[Lane, ...]) -> None:
        """Block until every peer is there, of the groups and of `lanes`. ConnectError names who is missing."""
        self.transport.connect(self.groups, lanes)

    def rehearse(
        self, device: torch.device, *, limit_s: float, poll: Callable[[], None] = lambda: None
    ) -> None:
        """Run each collective of a dry run once alone, with known values.

        NCCL connects what a collective of that kind and size takes when it meets the first one, and on a device where a
        receive spins that would wait for ever. Every worker calls this behind its dry run; arguments and errors are those
        of `compare_dry_runs`, besides ConnectError for wrong values.
        """
        topology = self.topology
        rank = topology.rank(self.mesh, self.worker)
        for group, records in sorted(self.log.compare_dry_runs(limit_s, poll).items()):
            distinct = {(record.operation, record.dtype, record.size_bytes) for record in records}
            for operation, dtype, size_bytes in sorted(distinct):
                trial = collective_selftest(
                    *(self.transport, group, operation, getattr(torch, dtype.removeprefix("torch."))),
                    size_bytes=size_bytes,
                    index=self.groups[group].index(rank),
                    ranks=len(self.groups[group]),
                    device=device,
                )
                trial.start()
                trial.check(topology.name(rank))

    @property
    def is_muted(self) -> bool:
        return self.transport.is_muted

    def muted(self) -> contextlib.AbstractContextManager[None]:
        """A context in which nothing is sent, received or summed; collectives are recorded as ever."""
        return self.transport.muted()

    def all_reduce(self, group: str, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the group, in place."""
        self.log.add(group, "all-reduce", tensor)
        self.transport.all_reduce(group, tensor)

    def start_all_reduce(self, group: str, tensor: torch.Tensor) -> Callable[[], None] | None:
        """Start an `all_reduce`: on CPU the returned call blocks until the sum is there."""
        self.log.add(group, "all-reduce", tensor)
        return self.transport.start_all_reduce(group, tensor)

    def start_reduce_scatter(
        self, group: str, out: torch.Tensor, tensor: torch.Tensor
    ) -> Callable[[], None] | None:
        """Sum contiguous `tensor` over the group and keep this worker's equal part of it in `out`."""
        self.log.add(group, "reduce-scatter", tensor)
        return self.transport.start_reduce_scatter(group, real_view(out), real_view(tensor))

    def start_all_gather(
        self, group: str, out: torch.Tensor, tensor: torch.Tensor
    ) -> Callable[[], None] | None:
        """Fill contiguous `out` with the `tensor` of every worker of the group, in their order."""
        self.log.add(group, "all-gather", out)
        return self.transport.start_all_gather(group, real_view(out), real_view(tensor))

    def in_stage(self, group: str) -> InStageCollectives:
        """The collectives of one group that this worker enters inside actions."""
        return InStageCollectives(self, group)

    def progress_text(self) -> str:
        """The number of in-stage collectives that this worker has entered, by group, for `missing` of its peers."""
        return "".join(
            f", come to {count} sums of {group}"
            for group, count in sorted(self._entered_counts.copy().items())
        )

    def missing(self, progress_of: Callable[[str], str]) -> tuple[str, ...]:
        """The workers that have not entered the in-stage collective in which this one waits, by the text that each
        published last; none where it waits in no collective, or all have come."""
        group = self._waiting_in
        if group is None:
            return ()
        count = re.compile(rf"come to (\d+) sums of {re.escape(group)}(?:,|$)")
        matches = {name: count.search(progress_of(name)) for name in self.other_members(group)}
        entered = {name: int(match[1]) if match else 0 for name, match in matches.items()}
        return tuple(name for name in entered if entered[name] < self._entered_counts[group])

    def other_members(self, group: str) -> tuple[str, ...]:
        """The other workers of a group; none for a name that is no group."""
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


class InStageCollectives:
    """The collectives of one group inside actions (a GroupCommunicator of tensor/graph_collectives.py): each is counted
    when it is entered, and waited for."""

    def __init__(self, collectives: Collectives, group: str):
        self._collectives, self._group = collectives, group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the group, in place."""
        with self._collectives._entered(self._group):
            self._collectives.all_reduce(self._group, tensor)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill contiguous `out` with the `tensor` of every worker of the group, in their order."""
        with self._collectives._entered(self._group):
            finish(self._collectives.start_all_gather(self._group, out, tensor))


class MutableTransport:
    """A transport that moves nothing while it is muted: received tensors are zero, sums are this worker's own part."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self.is_muted = False

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """A context in which nothing moves; nor afterwards, where the body raises."""
        self.is_muted = True
        yield
        self.is_muted = False

    def send(self, peer: str, tag: int, tensor: torch.Tensor) -> Callable[[], None] | None:
        return None if self.is_muted else self._transport.send(peer, tag, tensor)

    def receive(self, peer: str, tag: int, out: torch.Tensor) -> Callable[[], None] | None:
        if not self.is_muted:
            return self._transport.receive(peer, tag, out)
        out.data.zero_()  # a write that autograd does not see, as from a transport
        return None

    def all_reduce(self, group: str, tensor: torch.Tensor) -> None:
        if not self.is_muted:
            self._transport.all_reduce(group, tensor)

    def start_all_reduce(self, group: str, tensor: torch.Tensor) -> Callable[[], None] | None:
        return None if self.is_muted else self._transport.start_all_reduce(group, tensor)

    def start_reduce_scatter(
        self, group: str, out: torch.Tensor, tensor: torch.Tensor
    ) -> Callable[[], None] | None:
        if not self.is_muted:
            return self._transport.start_reduce_scatter(group, out, tensor)
        out.copy_(
            tensor.view(-1, *out.shape)[0]
        )  # in a dry run the first part is as good as this worker's own
        return None

    def start_all_gather(
        self, group: str, out: torch.Tensor, tensor: torch.Tensor
    ) -> Callable[[], None] | None:
        if not self.is_muted:
            return self._transport.start_all_gather(group, out, tensor)
        out.view(-1, *tensor.shape).copy_(tensor)  # finite numbers; a dry run restores what it changed
        return None

    def exchange(
        self,
        group: str,
        sends: Sequence[tuple[str, torch.Tensor]],
        receives: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        if not self.is_muted:
            self._transport.exchange(group, sends, receives)
            return
        for _, out in receives:
            out.zero_()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@torch.no_grad()
def token_weights(
    targets: Sequence[Target],
    count: Callable[[Target], torch.Tensor],
    collectives: Collectives,
    tensor: int = 1,
) -> list[float]:
    """The weight of each microbatch of this worker by what is counted in its targets; their mean over all workers of the
    mesh is 1. On CUDA the host waits, once a step.

    Every worker of the mesh, of which `tensor` next to each other have the same targets, calls this at the same place
    of its program.
    """
    tokens = torch.stack([count(target) for target in targets]).double()
    total, dp_size = tokens.sum(), collectives.topology.workers(collectives.mesh) // tensor
    if dp_size > 1:
        group = dp_group(collectives.mesh, collectives.worker, tensor)
        collectives.in_stage(group).all_reduce(total)
    if not total > 0:
        return [0.0] * len(targets)
    return (tokens * (len(targets) * dp_size) / total).tolist()
