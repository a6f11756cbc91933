"""When every message goes: parts cut into chunks, and an order in which the busiest ports do not wait."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.scheduler.resharding.layout import Problem
from service.scheduler.resharding.routes import Part

_SAME = 1e-12
"""Ends closer than this, relative to the whole, are one instant: sums of floats in different orders."""


@dataclass(frozen=True)
class Message:
    """Elements `begin` to `end` of a tile from one worker to another, after the messages that bring them to it."""

    tile: int
    begin: int
    end: int
    sender: int
    receiver: int
    local: bool
    after: tuple[int, ...]


@dataclass(frozen=True)
class Timed:
    """Messages in the order of their starts; `starts` and `ends` in seconds, message by message."""

    messages: tuple[Message, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        return max(self.ends, default=0.0)


def cut_into_messages(parts: Iterable[Part], chunks: int) -> tuple[Message, ...]:
    """Each hop of each part, in `chunks` pieces where a part passes several hops (a single hop gains nothing)."""
    messages: list[Message] = []
    for part in parts:
        count = 1 if part.depth < 2 else min(chunks, part.end - part.begin)
        for k in range(count):
            length = part.end - part.begin
            begin, end = part.begin + k * length // count, part.begin + (k + 1) * length // count
            first = len(messages)
            for hop in part.hops:
                after = () if hop.after < 0 else (first + hop.after,)
                messages.append(Message(part.tile, begin, end, hop.sender, hop.receiver, hop.local, after))
    return tuple(messages)


def message_count(parts: Iterable[Part], chunks: int) -> int:
    """How many messages `cut_into_messages` would make."""
    return sum(
        len(part.hops) * (1 if part.depth < 2 else min(chunks, part.end - part.begin)) for part in parts
    )


def in_given_order(problem: Problem, messages: Sequence[Message]) -> Timed:
    """Each port serves its messages in the given order, each as soon as both ports and what it waits for are free."""
    free: dict[tuple[str, int], float] = {}
    starts, ends = [], []
    for message in messages:
        ports = _ports(problem, message)
        start = max(
            [free.get(port, 0.0) for port in ports] + [ends[before] for before in message.after], default=0.0
        )
        end = start + _seconds(problem, message)
        starts.append(start)
        ends.append(end)
        free.update(dict.fromkeys(ports, end))
    return _sorted(Timed(tuple(messages), tuple(starts), tuple(ends)))


def listed(problem: Problem, messages: Sequence[Message], *, tails_first: bool) -> Timed:
    """A list schedule: whenever ports are free, the most urgent message that may start does.

    Urgent is the pair of ports with the most left to do (so that the busiest never waits), then the longest way
    behind the message; with `tails_first` the other way round.
    """
    return _ListSchedule(problem, messages, tails_first).run()


class _ListSchedule:
    def __init__(self, problem: Problem, messages: Sequence[Message], tails_first: bool):
        self._messages = messages
        self._tails_first = tails_first
        self._lengths = [_seconds(problem, message) for message in messages]
        self._pairs = [_ports(problem, message) for message in messages]
        self._left: dict[tuple[str, int], float] = {}
        for pair, length in zip(self._pairs, self._lengths, strict=True):
            for port in pair:
                self._left[port] = self._left.get(port, 0.0) + length
        self._slack = _SAME * max(self._left.values(), default=0.0)
        self._behind: list[list[int]] = [[] for _ in messages]
        for m, message in enumerate(messages):
            for before in message.after:
                self._behind[before].append(m)
        self._tails = [0.0] * len(messages)
        for m in reversed(range(len(messages))):  # what follows a message stands behind it
            self._tails[m] = self._lengths[m] + max((self._tails[b] for b in self._behind[m]), default=0.0)
        self._waiting = [len(message.after) for message in messages]
        self._free: dict[tuple[str, int], float] = dict.fromkeys(self._left, 0.0)
        self._ready: dict[tuple[tuple[str, int], ...], list[tuple[float, int]]] = {}
        self._starts = [0.0] * len(messages)
        self._ends = [0.0] * len(messages)

    def run(self) -> Timed:
        running: list[tuple[float, int]] = []
        for m, count in enumerate(self._waiting):
            if not count:
                self._push(m)
        now = 0.0
        while True:
            while started := self._start_all(now):
                for m in started:
                    heapq.heappush(running, (self._ends[m], m))
            if not running:
                break
            now = running[0][0]
            while running and running[0][0] <= now + self._slack:
                end, m = heapq.heappop(running)
                now = max(now, end)
                for b in self._behind[m]:
                    self._waiting[b] -= 1
                    if not self._waiting[b]:
                        self._push(b)
        return _sorted(Timed(tuple(self._messages), tuple(self._starts), tuple(self._ends)))

    def _push(self, m: int) -> None:
        heapq.heappush(self._ready.setdefault(self._pairs[m], []), (-self._tails[m], m))

    def _start_all(self, now: float) -> list[int]:
        """Start the most urgent message of every pair of free ports, the most urgent pair first."""
        latest = now + self._slack
        urgent = []
        for pair, heap in self._ready.items():
            if heap and self._free[pair[0]] <= latest and self._free[pair[1]] <= latest:
                left = sorted(-self._left[port] for port in pair)
                tail, m = heap[0]
                urgent.append((tail, left, m) if self._tails_first else (left, tail, m))
        started = []
        for *_, m in sorted(urgent):
            pair = self._pairs[m]
            if all(self._free[port] <= latest for port in pair):
                heapq.heappop(self._ready[pair])
                self._start(m, now)
                started.append(m)
        self._ready = {pair: heap for pair, heap in self._ready.items() if heap}
        return started

    def _start(self, m: int, now: float) -> None:
        pair = self._pairs[m]
        start = max([now] + [self._free[port] for port in pair])
        self._starts[m], self._ends[m] = start, start + self._lengths[m]
        for port in pair:
            self._free[port] = self._ends[m]
            self._left[port] -= self._lengths[m]


def _seconds(problem: Problem, message: Message) -> float:
    length = message.end - message.begin
    if message.local:
        return problem.local_s(length) + problem.links.local_latency_s
    return problem.slow_s(length) + problem.links.latency_s


def _ports(problem: Problem, message: Message) -> tuple[tuple[str, int], ...]:
    if message.local:
        return (("local out", message.sender), ("local in", message.receiver))
    workers = problem.workers
    return (("card out", workers[message.sender].card), ("card in", workers[message.receiver].card))


def _sorted(timed: Timed) -> Timed:
    """By start; of equal starts what waits comes later (a message of length 0 ends as it starts)."""
    order = sorted(range(len(timed.messages)), key=lambda m: (timed.starts[m], timed.ends[m], m))
    place = {m: k for k, m in enumerate(order)}
    messages = []
    for m in order:
        one = timed.messages[m]
        after = tuple(sorted(place[before] for before in one.after))
        messages.append(Message(one.tile, one.begin, one.end, one.sender, one.receiver, one.local, after))
    return Timed(tuple(messages), tuple(timed.starts[m] for m in order), tuple(timed.ends[m] for m in order))
