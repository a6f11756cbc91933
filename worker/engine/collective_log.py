"""CollectiveLog: a flight recorder of the collectives a rank enters, compared with the ranks of each group.

Plans are proved to have one order of collectives (`verify`); this checks that what runs has it: collectives
entered in two orders hang, or add up unrelated tensors without an error. Each is recorded where it begins:
slot, operation, dtype, bytes. Ranks compare their logs with the first rank of each group before the first step
(from the dry run) and after it; after a later step only what differs from the step before is posted and
compared. Nothing else moves between workers, and nobody waits within a step. Transfers have tags, or lanes of
their own, and are not recorded.
On CUDA autograd has a thread of its own: the slot is that of the enqueuing thread, which waits for it. Must not
know stages or optimizers.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from worker.contract.program import Program
from worker.engine.lanes.base import Action, Finish
from worker.transport.base import AbortedError, EngineError, Topology, Transport

_LIMIT_S = 60.0
_POLL_S = 0.02
_DRY_RUN = 0


class CollectiveRecord(NamedTuple):
    """One collective as its worker came to it."""

    slot: str
    operation: str
    dtype: str
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.slot or 'no slot'}'s {self.operation} of {self.size_bytes} bytes ({self.dtype})"


RecordsByGroup = dict[str, list[CollectiveRecord]]
"""By group, in order."""


class CollectiveLog:
    """The notes of one worker's engine; `name` tells engines on one transport apart, `groups` the ranks of each group.

    Who has met what this worker has met, and does not say so for `limit_s` seconds, has not."""

    def __init__(self, name: str, transport: Transport, groups: Mapping[str, tuple[int, ...]]):
        self._name, self._transport = f"order of {name}", transport
        topology: Topology = transport.topology
        self._own = topology.rank(transport.mesh, transport.worker)
        self._own_name = topology.name(self._own)
        self._members = {
            group: tuple(topology.name(rank) for rank in ranks)
            for group, ranks in groups.items()
            if self._own in ranks and len(ranks) > 1
        }
        self._current: RecordsByGroup = {}
        self._reference: RecordsByGroup | None = None
        self._not_compared: set[str] = set()  # groups that are still to be compared for the first time
        self._runs = 0
        self._thread_slot = threading.local()
        self._slot = ""
        self.limit_s = _LIMIT_S

    def wrap(self, transport: Any) -> LoggedTransport:
        """`transport` with everything that is begun on it noted."""
        return LoggedTransport(transport, self)

    def attribute_to_slots(self, program: Program, action_of: Callable[[int], Action]) -> list[Action]:
        """The actions of a program, what each begins noted as a part of its slot."""
        actions, seen = [], Counter[str]()
        for index, instruction in enumerate(program):
            slot, action = str(instruction), action_of(index)
            seen[slot] += 1
            if seen[slot] > 1:  # buckets of one stage
                slot += f" ({seen[slot]})"
            actions.append(action if instruction.peer else self._as_slot(slot, action))
        return actions

    def _as_slot(self, slot: str, action: Action) -> Action:
        def run() -> Finish | None:
            self._thread_slot.slot = self._slot = slot
            return action()

        return run

    def begin(self) -> None:
        """Forget what was noted."""
        self._current = {}

    def add(self, group: str, what: str, tensor: torch.Tensor) -> None:
        """A collective begins. On CUDA autograd has a thread of its own, while the one that enqueues waits for it."""
        slot = getattr(self._thread_slot, "slot", self._slot)
        note = CollectiveRecord(slot, what, str(tensor.dtype), tensor.numel() * tensor.element_size())
        self._current.setdefault(group, []).append(note)

    def record_dry_run(self) -> None:
        """All of a step was run without the others: that is what will be met."""
        self._take_reference()
        self._post_reference(_DRY_RUN)
        self.begin()

    def compare_before_step(self) -> None:
        """Before a step: compare with those who have rehearsed too. EngineError for another order."""
        for group in sorted(self._not_compared):
            told = self._read_reference(self._members[group][0])
            if told is not None:
                self._compare(group, self._members[group][0], told[1])
                self._not_compared.discard(group)

    def compare_after_step(self) -> None:
        """Behind a step: what it met is what it met before, or all others have met it too. EngineError for another order,
        or where somebody does not tell his in time."""
        self._runs += 1
        own = self._own_records()
        if self._reference is None:
            self._take_reference()
            self._post_reference(self._runs)
        elif own != self._reference:
            differing = {group for group in self._members if own.get(group) != self._reference.get(group)}
            self._reference = own
            self._post_reference(self._runs)
            for group in sorted(differing):
                for member in self._members[group]:
                    if member != self._own_name:
                        self._compare(group, member, self._await_reference(group, member, self._runs))
        for group in sorted(self._not_compared):
            self._compare(
                group, self._members[group][0], self._await_reference(group, self._members[group][0], None)
            )
        self._not_compared.clear()

    def _own_records(self) -> RecordsByGroup:
        return {group: notes for group, notes in self._current.items() if group in self._members}

    def _take_reference(self) -> None:
        self._reference = self._own_records()
        self._not_compared = {group for group in self._reference if self._members[group][0] != self._own_name}

    def _post_reference(self, run: int) -> None:
        text = json.dumps(self._reference).encode()
        packed = base64.b64encode(zlib.compress(text)).decode()
        self._transport.post_message(self._name, json.dumps([run, packed]))

    def _read_reference(self, member: str) -> tuple[int, RecordsByGroup] | None:
        text = self._transport.read_message(self._name, member)
        if text is None:
            return None
        run, packed = json.loads(text)
        found = json.loads(zlib.decompress(base64.b64decode(packed)))
        return run, {group: [CollectiveRecord(*one) for one in notes] for group, notes in found.items()}

    def _await_reference(self, group: str, member: str, run: int | None) -> RecordsByGroup:
        """What a worker told, of that run or any; AbortedError where somebody failed meanwhile."""
        deadline = time.monotonic() + self.limit_s
        while True:
            told = self._read_reference(member)
            if told is not None and run in (None, told[0]):
                return told[1]
            if (failure := self._transport.failure()) is not None:
                raise AbortedError(failure.origin, failure.reason)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self._own_name} has met the collectives of group {group} otherwise than in earlier steps, and {member} "
                    f"has not within {self.limit_s:g} s said that it did: they are not in one order; report this with "
                    "the job"
                )
            time.sleep(_POLL_S)

    def _compare(self, group: str, member: str, theirs: Mapping[str, list[CollectiveRecord]]) -> None:
        own, other = self._reference.get(group, []), theirs.get(group, [])
        for number, (mine, their) in enumerate(zip_longest(own, other)):
            if mine != their:
                raise EngineError(
                    f"{self._own_name} and {member} meet the collectives of group {group} in different orders: number {number} "
                    f"is {mine or 'none'} on {self._own_name} and {their or 'none'} on {member}; gradients would be wrong: "
                    "report this with the job"
                )


class LoggedTransport:
    """A transport whose collectives are noted before they begin; `transport` may be replaced."""

    def __init__(self, transport: Any, order: CollectiveLog):
        self.transport, self._order = transport, order

    def all_reduce(self, group: str, tensor: torch.Tensor) -> None:
        self._order.add(group, "all-reduce", tensor)
        self.transport.all_reduce(group, tensor)

    def start_all_reduce(self, group: str, tensor: torch.Tensor) -> Callable[[], None] | None:
        self._order.add(group, "all-reduce", tensor)
        return self.transport.start_all_reduce(group, tensor)

    def start_reduce_scatter(
        self, group: str, out: torch.Tensor, tensor: torch.Tensor
    ) -> Callable[[], None] | None:
        self._order.add(group, "reduce-scatter", tensor)
        return self.transport.start_reduce_scatter(group, out, tensor)

    def start_all_gather(
        self, group: str, out: torch.Tensor, tensor: torch.Tensor
    ) -> Callable[[], None] | None:
        self._order.add(group, "all-gather", out)
        return self.transport.start_all_gather(group, out, tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)
