"""CollectiveLog: a flight recorder of the collectives a rank enters, compared with the ranks of each group.

Plans are proved to have one order of collectives (`check_programs`); this checks that what runs has it: collectives
entered in two orders hang, or add up unrelated tensors without an error. Each is recorded where it begins:
slot, operation, dtype, bytes. All ranks of a group compare their logs after a dry run, and else with its first rank
after the first step; after a later step only what differs from the step before is posted and compared. Nothing else
moves between workers, and nobody waits within a step. Transfers have tags, or lanes of their own, and are not
recorded.
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
from typing import NamedTuple, TypeVar

import torch

from worker.contract.program import Program
from worker.transport.base import AbortedError, EngineError, Topology, Transport

_LIMIT_S = 60.0
_POLL_S = 0.02
_DRY_RUN = 0
Result = TypeVar("Result")


class CollectiveRecord(NamedTuple):
    """One collective as its worker entered it."""

    slot: str
    operation: str
    dtype: str
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.slot or 'no slot'}'s {self.operation} of {self.size_bytes} bytes ({self.dtype})"


RecordsByGroup = dict[str, list[CollectiveRecord]]
"""By group, in order."""


class CollectiveLog:
    """The collectives of one worker's engine, in order; `name` tells engines on one transport apart, `groups` has the
    ranks of each group.

    A worker whose order changed after the first step waits for the others to post the same change."""

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

    def attribute_to_slots(
        self, program: Program, action_of: Callable[[int], Callable[[], Result]]
    ) -> list[Callable[[], Result]]:
        """The actions of a program; the collectives that each begins are recorded with its slot."""
        actions, seen = [], Counter[str]()
        for index, instruction in enumerate(program):
            slot, action = str(instruction), action_of(index)
            seen[slot] += 1
            if seen[slot] > 1:  # buckets of one stage
                slot += f" ({seen[slot]})"
            actions.append(action if instruction.peer else self._as_slot(slot, action))
        return actions

    def _as_slot(self, slot: str, action: Callable[[], Result]) -> Callable[[], Result]:
        def run() -> Result:
            self._thread_slot.slot = self._slot = slot
            return action()

        return run

    def begin(self) -> None:
        """Forget the records of the last step."""
        self._current = {}

    def add(self, group: str, operation: str, tensor: torch.Tensor) -> None:
        """Record that a collective begins. On CUDA autograd has a thread of its own, while the one that enqueues waits."""
        slot = getattr(self._thread_slot, "slot", self._slot)
        record = CollectiveRecord(slot, operation, str(tensor.dtype), tensor.numel() * tensor.element_size())
        self._current.setdefault(group, []).append(record)

    def record_dry_run(self) -> None:
        """Post the records of a dry run, which ran a whole step alone: the steps will have the same."""
        self._take_reference()
        self._post_reference(_DRY_RUN)
        self.begin()

    def compare_dry_runs(self, limit_s: float, poll: Callable[[], None] = lambda: None) -> RecordsByGroup:
        """The records of the dry run, which are those of every worker of a group. Every worker calls this behind its dry
        run, and waits for the others; `poll` is called meanwhile, and may raise. EngineError for another order than
        theirs, on every worker that it concerns, or where one does not come within `limit_s`."""
        deadline = time.monotonic() + limit_s
        groups_of: dict[str, list[str]] = {}
        for group in sorted(self._reference):
            for member in self._members[group]:
                groups_of.setdefault(member, []).append(group)
        groups_of.pop(self._own_name, None)
        for member, groups in groups_of.items():
            records = self._await_dry_run(member, deadline, limit_s, poll)
            for group in groups:
                self._compare(group, member, records)
        self._not_compared.clear()
        return self._reference

    def _await_dry_run(
        self, member: str, deadline: float, limit_s: float, poll: Callable[[], None]
    ) -> RecordsByGroup:
        while (message := self._read_reference(member)) is None:
            poll()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self._own_name} has run its program once without transfers, and {member} has not within "
                    f"{limit_s:g} s said that it did: look at what it does there (`slotline logs`)"
                )
            time.sleep(_POLL_S)
        return message[1]

    def compare_after_step(self, slot_limit_s: float = 0.0) -> None:
        """Compare the step that ended with the one before, and what differs with the other workers. EngineError for
        another order, or where a worker does not post its own in time: slots behind the last sum may take others up to
        `slot_limit_s` seconds longer."""
        self._runs += 1
        limit_s = _LIMIT_S + slot_limit_s
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
                        self._compare(
                            group, member, self._await_reference(group, member, self._runs, limit_s)
                        )
        for group in sorted(self._not_compared):
            first = self._members[group][0]
            self._compare(group, first, self._await_reference(group, first, None, limit_s))
        self._not_compared.clear()

    def _own_records(self) -> RecordsByGroup:
        return {group: records for group, records in self._current.items() if group in self._members}

    def _take_reference(self) -> None:
        self._reference = self._own_records()
        self._not_compared = {group for group in self._reference if self._members[group][0] != self._own_name}

    def _post_reference(self, run: int) -> None:
        text = json.dumps(self._reference).encode()
        packed = base64.b64encode(zlib.compress(text)).decode()
        self._transport.post_message(self._name, json.dumps([run, packed]))

    def _read_reference(self, member: str) -> tuple[int, RecordsByGroup] | None:
        message = self._transport.read_message(self._name, member)
        if message is None:
            return None
        run, packed = json.loads(message)
        groups = json.loads(zlib.decompress(base64.b64decode(packed)))
        return run, {
            group: [CollectiveRecord(*fields) for fields in records] for group, records in groups.items()
        }

    def _await_reference(self, group: str, member: str, run: int | None, limit_s: float) -> RecordsByGroup:
        """The records that `member` posted of `run`, or of any run for None; AbortedError where a worker failed
        meanwhile."""
        deadline = time.monotonic() + limit_s
        while True:
            message = self._read_reference(member)
            if message is not None and run in (None, message[0]):
                return message[1]
            if (failure := self._transport.failure()) is not None:
                raise AbortedError(failure.origin, failure.reason)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self._own_name} has met the collectives of group {group} otherwise than in earlier steps, and "
                    f"{member} has not within {limit_s:g} s said that it did: they are not in one order; report this with "
                    "the job"
                )
            time.sleep(_POLL_S)

    def _compare(self, group: str, member: str, remote: Mapping[str, list[CollectiveRecord]]) -> None:
        pairs = zip_longest(self._reference.get(group, []), remote.get(group, []))
        for number, (local_record, remote_record) in enumerate(pairs):
            if local_record != remote_record:
                raise EngineError(
                    f"{self._own_name} and {member} meet the collectives of group {group} in different orders: number "
                    f"{number} is {local_record or 'none'} on {self._own_name} and {remote_record or 'none'} on {member}; "
                    "gradients would be wrong: report this with the job"
                )
