"""Sums that workers make inside a slot, where stages share matrices, batch norms or weights of tokens: all of a group come
to them in one order, that of their program and of their stages' graphs.

Counts them, so that of a sum that does not end it can be said who has not come. On CUDA a sum is only enqueued: nobody
waits in it. Must not know stages or slots.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping

import torch

from worker.engine.groups import fellows
from worker.transport.base import Transport, finish


class Meetings:
    """What one worker sums and gathers with others, through the transport that `now` gives. `groups` are the ranks of each
    group by name, told once they are known."""

    def __init__(self, transport: Transport, now: Callable[[], Transport]):
        self.topology, self.mesh, self.worker = transport.topology, transport.mesh, transport.worker
        self.groups: Mapping[str, tuple[int, ...]] = {}
        self._now = now
        self._begun: dict[str, int] = {}
        self._waits: str | None = None

    def all_reduce(self, group: str, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the group, in place."""
        with self._met(group):
            self._now().all_reduce(group, tensor)

    def all_gather(self, group: str, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill contiguous `out` with the `tensor` of every worker of the group, in their order."""
        with self._met(group):
            finish(self._now().start_all_gather(group, out, tensor))

    def of(self, group: str) -> Meeting:
        """Those of one group."""
        return Meeting(self, group)

    def told(self) -> str:
        """How far this worker has come, for `missing` of its peers."""
        return "".join(
            f", come to {count} sums of {group}" for group, count in sorted(self._begun.copy().items())
        )

    def missing(self, said: Callable[[str], str]) -> tuple[str, ...]:
        """The workers that have not come to the sum in which this one waits, by what each `said` last (`told`); none where
        it waits in no sum, or all have come."""
        group = self._waits
        if group is None:
            return ()
        count = re.compile(rf"come to (\d+) sums of {re.escape(group)}(?:,|$)")
        names = self.others(group)
        come = {name: int(found[1]) if (found := count.search(said(name))) else 0 for name in names}
        return tuple(name for name in names if come[name] < self._begun[group])

    def others(self, group: str) -> tuple[str, ...]:
        """The other workers of a group; of what is none, nobody."""
        own = self.topology.rank(self.mesh, self.worker)
        return tuple(self.topology.name(rank) for rank in self.groups.get(group, ()) if rank != own)

    def fellows(self) -> tuple[str, ...]:
        """The workers with which this one sums inside actions."""
        return fellows(self.topology, self.topology.rank(self.mesh, self.worker), self.groups)

    @contextlib.contextmanager
    def _met(self, group: str) -> Iterator[None]:
        self._begun[group] = self._begun.get(group, 0) + 1
        self._waits = group
        try:
            yield
        finally:
            self._waits = None


class Meeting:
    """The sums of one group (tensor/collectives.py's Between)."""

    def __init__(self, meetings: Meetings, group: str):
        self._meetings, self._group = meetings, group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._meetings.all_reduce(self._group, tensor)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._meetings.all_gather(self._group, out, tensor)
