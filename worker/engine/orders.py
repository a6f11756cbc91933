"""In which order this worker comes to its collectives, compared with the other workers of each group while they run.

Plans are proved to have one order (`verify`); this looks whether what runs has it: sums that are met in two orders hang,
or add up what does not belong together and train on without a word. Every collective is noted where it begins: in which
slot, what, of how many bytes. Before the first step, where the program was rehearsed, and behind the first, each
worker compares its notes with those of the first worker of each group; behind a later step only what differs from
before is told and compared. Between workers nothing else moves, and nobody waits within a step. Transfers have tags, or
lanes of their own, and are not noted. Must not know stages or optimizers.
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

from worker.engine.errors import AbortedError, EngineError
from worker.engine.lanes import Action, Finish
from worker.program import Program
from worker.transport.base import Topology, Transport

_LIMIT_S = 60.0
_LOOK_S = 0.02
_REHEARSAL = 0


class Note(NamedTuple):
    """One collective as its worker came to it."""

    slot: str
    what: str
    dtype: str
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.slot or 'no slot'}'s {self.what} of {self.size_bytes} bytes ({self.dtype})"


Notes = dict[str, list[Note]]
"""By group, in order."""


class Order:
    """The notes of one worker's engine; `name` tells engines on one transport apart, `groups` the ranks of each group.

    Who has met what this worker has met, and does not say so for `limit_s` seconds, has not."""

    def __init__(self, name: str, transport: Transport, groups: Mapping[str, tuple[int, ...]]):
        self._name, self._transport = f"order of {name}", transport
        topology: Topology = transport.topology
        self._own = topology.rank(transport.mesh, transport.worker)
        self._me = topology.name(self._own)
        self._members = {
            group: tuple(topology.name(rank) for rank in ranks)
            for group, ranks in groups.items()
            if self._own in ranks and len(ranks) > 1
        }
        self._now: Notes = {}
        self._agreed: Notes | None = None
        self._open: set[str] = set()  # groups that are still to be compared for the first time
        self._runs = 0
        self._here = threading.local()
        self._slot = ""
        self.limit_s = _LIMIT_S

    def noted(self, transport: Any) -> Noted:
        """`transport` with everything that is begun on it noted."""
        return Noted(transport, self)

    def within(self, program: Program, action_of: Callable[[int], Action]) -> list[Action]:
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
            self._here.slot = self._slot = slot
            return action()

        return run

    def begin(self) -> None:
        """Forget what was noted."""
        self._now = {}

    def add(self, group: str, what: str, tensor: torch.Tensor) -> None:
        """A collective begins. On CUDA autograd has a thread of its own, while the one that enqueues waits for it."""
        slot = getattr(self._here, "slot", self._slot)
        note = Note(slot, what, str(tensor.dtype), tensor.numel() * tensor.element_size())
        self._now.setdefault(group, []).append(note)

    def rehearsed(self) -> None:
        """All of a step was run without the others: that is what will be met."""
        self._take()
        self._tell(_REHEARSAL)
        self.begin()

    def before(self) -> None:
        """Before a step: compare with those who have rehearsed too. EngineError for another order."""
        for group in sorted(self._open):
            told = self._told(self._members[group][0])
            if told is not None:
                self._compare(group, self._members[group][0], told[1])
                self._open.discard(group)

    def behind(self) -> None:
        """Behind a step: what it met is what it met before, or all others have met it too. EngineError for another order,
        or where somebody does not tell his in time."""
        self._runs += 1
        own = self._own_notes()
        if self._agreed is None:
            self._take()
            self._tell(self._runs)
        elif own != self._agreed:
            differing = {group for group in self._members if own.get(group) != self._agreed.get(group)}
            self._agreed = own
            self._tell(self._runs)
            for group in sorted(differing):
                for member in self._members[group]:
                    if member != self._me:
                        self._compare(group, member, self._awaited(group, member, self._runs))
        for group in sorted(self._open):
            self._compare(group, self._members[group][0], self._awaited(group, self._members[group][0], None))
        self._open.clear()

    def _own_notes(self) -> Notes:
        return {group: notes for group, notes in self._now.items() if group in self._members}

    def _take(self) -> None:
        self._agreed = self._own_notes()
        self._open = {group for group in self._agreed if self._members[group][0] != self._me}

    def _tell(self, run: int) -> None:
        text = json.dumps(self._agreed).encode()
        packed = base64.b64encode(zlib.compress(text)).decode()
        self._transport.tell(self._name, json.dumps([run, packed]))

    def _told(self, member: str) -> tuple[int, Notes] | None:
        text = self._transport.told(self._name, member)
        if text is None:
            return None
        run, packed = json.loads(text)
        found = json.loads(zlib.decompress(base64.b64decode(packed)))
        return run, {group: [Note(*one) for one in notes] for group, notes in found.items()}

    def _awaited(self, group: str, member: str, run: int | None) -> Notes:
        """What a worker told, of that run or any; AbortedError where somebody failed meanwhile."""
        deadline = time.monotonic() + self.limit_s
        while True:
            told = self._told(member)
            if told is not None and run in (None, told[0]):
                return told[1]
            if (failure := self._transport.failure()) is not None:
                raise AbortedError(failure.origin, failure.reason)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self._me} has met the collectives of group {group} otherwise than in earlier steps, and {member} "
                    f"has not within {self.limit_s:g} s said that it did: they are not in one order; report this with "
                    "the job"
                )
            time.sleep(_LOOK_S)

    def _compare(self, group: str, member: str, theirs: Mapping[str, list[Note]]) -> None:
        own, other = self._agreed.get(group, []), theirs.get(group, [])
        for number, (mine, their) in enumerate(zip_longest(own, other)):
            if mine != their:
                raise EngineError(
                    f"{self._me} and {member} meet the collectives of group {group} in different orders: number {number} "
                    f"is {mine or 'none'} on {self._me} and {their or 'none'} on {member}; gradients would be wrong: "
                    "report this with the job"
                )


class Noted:
    """A transport whose collectives are noted before they begin; `transport` may be replaced."""

    def __init__(self, transport: Any, order: Order):
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
