"""One worker's end of a resharding on a stream: packing, messages in rounds and unpacking are enqueued one behind the other.

The host waits for nothing, and what is computed goes on: all of it runs on the stream that is current, that of the
transfer's lane. Copies are made on that stream too, so that their memory is used again only behind what read it. Must
not know stages and schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from worker.resharding import Tiles, check_tensor
from worker.resharding_plan import ReshardingPlan
from worker.resharding_rounds import rounds_of


class Exchanging(Protocol):
    """What this asks of a transport: messages of one round, by the plan's names of the workers."""

    def exchange(
        self,
        group: str,
        sends: Sequence[tuple[str, torch.Tensor]],
        receives: Sequence[tuple[str, torch.Tensor]],
    ) -> None: ...


class StreamResharder:
    """One worker's end of one plan, whose messages travel in `group`; enqueues it as often as asked."""

    def __init__(self, plan: ReshardingPlan, worker: str, group: str):
        self._plan, self._worker, self._group = plan, worker, group
        own = ([one for one in of if worker in (one.sender, one.receiver)] for of in rounds_of(plan))
        self._rounds = [messages for messages in own if messages]

    def enqueue(self, tensor: torch.Tensor, transport: Exchanging) -> None:
        """`tensor` is the worker's box of the whole: of a source read, of a target filled. ValueError where it has
        another shape or element size."""
        check_tensor(self._worker, self._plan, tensor)
        messages = [one for of in self._rounds for one in of]
        tiles = Tiles(self._plan, self._worker, messages, tensor.detach())
        for of in self._rounds:
            sent = [one for one in of if one.sender == self._worker]
            come = [one for one in of if one.receiver == self._worker]
            transport.exchange(
                self._group,
                [(one.receiver, tiles.part(one)) for one in sent],
                [(one.sender, tiles.part(one)) for one in come],
            )
            for one in sent:
                tiles.sent(one)
            for one in come:
                tiles.received(one)
