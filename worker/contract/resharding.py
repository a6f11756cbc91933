"""ReshardingPlan: tiles and ordered messages that move a tensor between meshes, checked and split into rounds.

The planner is the scheduler's; this is its JSON, checked for what a worker relies on. Rounds serve a transport
with one stream: messages of a round go at once and none needs another of it. They follow from the plan alone and
are equal on every rank, so nobody waits in a circle: a rank in the first unfinished round waits only for ranks
that will reach it, since everything they do before is over. Light: no torch at import.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Box = tuple[tuple[int, int], ...]
"""(begin, end) for each dimension of the whole tensor."""


@dataclass(frozen=True, slots=True)
class Message:
    """Elements `begin` to `end` of a tile, in row order of its box. `after`: the messages that bring them to the sender."""

    number: int
    tile: int
    begin: int
    end: int
    sender: str
    receiver: str
    local: bool
    after: tuple[int, ...]

    def __str__(self) -> str:
        return f"message {self.number} (tile {self.tile} [{self.begin}:{self.end}], {self.sender} to {self.receiver})"


@dataclass(frozen=True)
class ReshardingPlan:
    """`sources` and `targets` are the boxes that workers hold before and after, by name."""

    shape: tuple[int, ...]
    element_bytes: int
    tiles: tuple[Box, ...]
    sources: Mapping[str, Box]
    targets: Mapping[str, Box]
    messages: tuple[Message, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReshardingPlan:
        """Raises ValueError, naming the message, where no worker could run the plan."""
        boxes = {worker["name"]: (worker["source"], _parse_box(worker["box"])) for worker in data["workers"]}
        plan = cls(
            tuple(data["shape"]),
            data["element_bytes"],
            tuple(_parse_box(box) for box in data["tiles"]),
            {name: box for name, (source, box) in boxes.items() if source},
            {name: box for name, (source, box) in boxes.items() if not source},
            tuple(
                Message(
                    number,
                    one["tile"],
                    one["begin"],
                    one["end"],
                    one["sender"],
                    one["receiver"],
                    one["local"],
                    tuple(one["after"]),
                )
                for number, one in enumerate(data["messages"])
            ),
        )
        for message in plan.messages:
            plan._check(message)
        return plan

    def lanes(self) -> tuple[tuple[str, str], ...]:
        """The directed pairs of workers that exchange messages, in an order that is the same everywhere."""
        return tuple(sorted({(message.sender, message.receiver) for message in self.messages}))

    def box(self, worker: str) -> Box:
        """The box of `worker` before or after."""
        return self.sources[worker] if worker in self.sources else self.targets[worker]

    def elements(self, tile: int) -> int:
        return math.prod(end - begin for begin, end in self.tiles[tile])

    def holds(self, worker: str, tile: int) -> bool:
        """True if `worker` has the whole tile from the start."""
        return worker in self.sources and _inside(self.tiles[tile], self.sources[worker])

    def needs(self, worker: str, tile: int) -> bool:
        """True if `worker` has the tile in the end."""
        return worker in self.targets and _inside(self.tiles[tile], self.targets[worker])

    def _check(self, message: Message) -> None:
        unknown = {message.sender, message.receiver} - self.sources.keys() - self.targets.keys()
        if unknown:
            raise ValueError(
                f"{message} is of {', '.join(sorted(unknown))}, which the plan's workers are not"
            )
        if not 0 <= message.tile < len(self.tiles):
            raise ValueError(f"{message}: there are {len(self.tiles)} tiles")
        if not 0 <= message.begin < message.end <= self.elements(message.tile):
            raise ValueError(f"{message}: its tile has {self.elements(message.tile)} elements")
        for before in message.after:
            if not 0 <= before < message.number or self.messages[before].receiver != message.sender:
                raise ValueError(
                    f"{message} waits for message {before}, which does not bring its sender anything"
                )
        if self.holds(message.sender, message.tile):
            return
        brought = sorted(
            (one.begin, one.end)
            for one in (self.messages[before] for before in message.after)
            if one.tile == message.tile
        )
        reached = message.begin
        for begin, end in brought:
            if begin <= reached:
                reached = max(reached, end)
        if reached < message.end:
            raise ValueError(f"{message}: its sender neither holds that nor waits for it")


def _parse_box(sides: Any) -> Box:
    return tuple((begin, end) for begin, end in sides)


def _inside(box: Box, other: Box) -> bool:
    return all(c <= a and b <= d for (a, b), (c, d) in zip(box, other, strict=True))


def message_rounds(plan: ReshardingPlan) -> tuple[tuple[Message, ...], ...]:
    """One round where no message waits for another. Where workers pass on what they got, each sends one message a
    round to its host and one to others, and receives as many: what has come leaves while the next comes."""
    passed_on = any(message.after for message in plan.messages)
    round_of: dict[int, int] = {}
    free: dict[tuple[str, bool, bool], int] = defaultdict(int)
    found: dict[int, list[Message]] = defaultdict(list)
    for one in plan.messages:
        first = max((round_of[before] + 1 for before in one.after), default=0)
        ports = [(one.sender, True, one.local), (one.receiver, False, one.local)]
        if passed_on:
            first = max(first, *(free[port] for port in ports))
            for port in ports:
                free[port] = first + 1
        round_of[one.number] = first
        found[first].append(one)
    return tuple(tuple(found[number]) for number in sorted(found))
