"""Orders and times the messages of a resharding: list schedules over chunks, and matchings of card loads.

Matchings (open shop with preemption, Gonzalez and Sahni 1976): when work may be cut anywhere, everything ends
after exactly the largest load of a card in one direction. A matrix of loads, filled up so that every row and
column has that sum, is a sum of perfect matchings (Birkhoff); in each matching every busiest card works.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from service.scheduler.resharding.hops import TilePart
from service.scheduler.resharding.layout import ReshardingProblem

MAX_MATCHED_CARDS = 48
"""Cards in one direction; more would take seconds."""

CardPair = tuple[int, int]


def in_matching_order(problem: ReshardingProblem, parts: tuple[TilePart, ...]) -> tuple[TilePart, ...] | None:
    """The parts, cut where a matching ends, in the order in which matchings carry them.

    None where a part passes more than one card (what is passed on waits, and a matching knows nothing of that), or for
    too many cards. Parts that pass none come first.
    """
    queues: dict[CardPair, deque[TilePart]] = defaultdict(deque)
    ordered = []
    for part in parts:
        pairs = [
            (problem.workers[hop.sender].card, problem.workers[hop.receiver].card)
            for hop in part.hops
            if not hop.local
        ]
        if len(pairs) > 1:
            return None
        if pairs:
            queues[pairs[0]].append(part)
        else:
            ordered.append(part)
    loads = {pair: sum(part.end - part.begin for part in queue) for pair, queue in queues.items()}
    if max(len({a for a, _ in loads}), len({b for _, b in loads}), 0) > MAX_MATCHED_CARDS:
        return None
    for pair, length in _stretches(loads):
        queue = queues[pair]
        while length:
            part = queue.popleft()
            taken = min(length, part.end - part.begin)
            ordered.append(replace(part, end=part.begin + taken))
            if part.begin + taken < part.end:
                queue.appendleft(replace(part, begin=part.begin + taken))
            length -= taken
    return tuple(ordered)


def _stretches(loads: dict[CardPair, int]) -> Iterator[tuple[CardPair, int]]:
    """(pair, elements) by the start of each stretch; a pair in one matching after another is one stretch."""
    if not loads:
        return
    table = _padded_loads(loads)
    outs, ins = sorted({a for a, _ in loads}), sorted({b for _, b in loads})
    partner: dict[int, int] = {}
    open_since: dict[CardPair, int] = {}
    stretches: list[tuple[int, CardPair, int]] = []
    now, total = 0, sum(table[0].values())
    while now < total:
        partner = _perfect_matching(table, partner)
        length = min(table[row][column] for row, column in partner.items())
        pairs = {
            (outs[row], ins[column])
            for row, column in partner.items()
            if row < len(outs) and column < len(ins)
        }
        for pair in [pair for pair in open_since if pair not in pairs]:
            stretches.append((open_since.pop(pair), pair, now))
        for pair in pairs:
            open_since.setdefault(pair, now)
        for row, column in partner.items():
            table[row][column] -= length
            if not table[row][column]:
                del table[row][column]
        partner = {row: column for row, column in partner.items() if column in table[row]}
        now += length
    stretches += [(since, pair, now) for pair, since in open_since.items()]
    for since, pair, end in sorted(stretches):
        yield pair, end - since


def _padded_loads(loads: dict[CardPair, int]) -> list[dict[int, int]]:
    """Rows of a square table with the loads in its corner and every row and column of the largest sum."""
    outs, ins = sorted({a for a, _ in loads}), sorted({b for _, b in loads})
    row_of, column_of = {a: k for k, a in enumerate(outs)}, {b: k for k, b in enumerate(ins)}
    rows, columns = [0] * len(outs), [0] * len(ins)
    table: list[dict[int, int]] = [{} for _ in range(len(outs) + len(ins))]
    for (a, b), load in loads.items():
        table[row_of[a]][column_of[b]] = load
        table[len(outs) + column_of[b]][len(ins) + row_of[a]] = load
        rows[row_of[a]] += load
        columns[column_of[b]] += load
    largest = max(rows + columns)
    for k, load in enumerate(rows):
        if largest > load:
            table[k][len(ins) + k] = largest - load
    for k, load in enumerate(columns):
        if largest > load:
            table[len(outs) + k][k] = largest - load
    return table


def _perfect_matching(table: list[dict[int, int]], partner: dict[int, int]) -> dict[int, int]:
    """A perfect matching on the positive entries that keeps as much as it can of `partner` (Kuhn's augmenting paths)."""
    taken = {column: row for row, column in partner.items()}

    def augment(row: int, tried: set[int]) -> bool:
        for column in sorted(table[row], key=lambda column: (-table[row][column], column)):
            if column not in tried:
                tried.add(column)
                if column not in taken or augment(taken[column], tried):
                    taken[column] = row
                    return True
        return False

    matched = set(partner)
    for row in range(len(table)):
        if row not in matched:
            found = augment(row, set())
            assert found, "equal sums of rows and columns have a perfect matching"
    return {row: column for column, row in taken.items()}


_SIMULTANEOUS = 1e-12
"""Ends closer than this, relative to the whole, are one instant: sums of floats in different orders."""


@dataclass(frozen=True)
class OrderedMessage:
    """Elements `begin` to `end` of a tile from one worker to another, after the messages that bring them to it."""

    tile: int
    begin: int
    end: int
    sender: int
    receiver: int
    local: bool
    after: tuple[int, ...]


@dataclass(frozen=True)
class TimedMessages:
    """Messages in the order of their starts; `starts` and `ends` in seconds, message by message."""

    messages: tuple[OrderedMessage, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        return max(self.ends, default=0.0)


def cut_into_messages(parts: Iterable[TilePart], chunks: int) -> tuple[OrderedMessage, ...]:
    """Each hop of each part, in `chunks` pieces where a part passes several hops (a single hop gains nothing)."""
    messages: list[OrderedMessage] = []
    for part in parts:
        count = 1 if part.depth < 2 else min(chunks, part.end - part.begin)
        for k in range(count):
            length = part.end - part.begin
            begin, end = part.begin + k * length // count, part.begin + (k + 1) * length // count
            first = len(messages)
            for hop in part.hops:
                after = () if hop.after < 0 else (first + hop.after,)
                messages.append(
                    OrderedMessage(part.tile, begin, end, hop.sender, hop.receiver, hop.local, after)
                )
    return tuple(messages)


def message_count(parts: Iterable[TilePart], chunks: int) -> int:
    """The number of messages that `cut_into_messages` would make."""
    return sum(
        len(part.hops) * (1 if part.depth < 2 else min(chunks, part.end - part.begin)) for part in parts
    )


def in_given_order(problem: ReshardingProblem, messages: Sequence[OrderedMessage]) -> TimedMessages:
    """Each port serves its messages in the given order, each as soon as both ports and what it waits for are free."""
    free: dict[tuple[str, int], float] = {}
    starts, ends = [], []
    for message in messages:
        ports = _message_ports(problem, message)
        start = max(
            [free.get(port, 0.0) for port in ports] + [ends[before] for before in message.after], default=0.0
        )
        end = start + _message_s(problem, message)
        starts.append(start)
        ends.append(end)
        free.update(dict.fromkeys(ports, end))
    return _sorted_by_start(TimedMessages(tuple(messages), tuple(starts), tuple(ends)))


def list_schedule(
    problem: ReshardingProblem, messages: Sequence[OrderedMessage], *, tails_first: bool
) -> TimedMessages:
    """A list schedule: whenever ports are free, the most urgent message that may start does.

    Urgent is the pair of ports with the most left to do (so that the busiest never waits), then the longest way
    behind the message; with `tails_first` the other way round.
    """
    return _ListSchedule(problem, messages, tails_first).run()


class _ListSchedule:
    def __init__(self, problem: ReshardingProblem, messages: Sequence[OrderedMessage], tails_first: bool):
        self._messages = messages
        self._tails_first = tails_first
        self._lengths = [_message_s(problem, message) for message in messages]
        self._pairs = [_message_ports(problem, message) for message in messages]
        self._left: dict[tuple[str, int], float] = {}
        for pair, length in zip(self._pairs, self._lengths, strict=True):
            for port in pair:
                self._left[port] = self._left.get(port, 0.0) + length
        self._slack = _SIMULTANEOUS * max(self._left.values(), default=0.0)
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

    def run(self) -> TimedMessages:
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
        return _sorted_by_start(TimedMessages(tuple(self._messages), tuple(self._starts), tuple(self._ends)))

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


def _message_s(problem: ReshardingProblem, message: OrderedMessage) -> float:
    length = message.end - message.begin
    if message.local:
        return problem.local_s(length) + problem.links.local_latency_s
    return problem.card_s(length) + problem.links.latency_s


def _message_ports(problem: ReshardingProblem, message: OrderedMessage) -> tuple[tuple[str, int], ...]:
    if message.local:
        return (("local out", message.sender), ("local in", message.receiver))
    workers = problem.workers
    return (("card out", workers[message.sender].card), ("card in", workers[message.receiver].card))


def _sorted_by_start(timed: TimedMessages) -> TimedMessages:
    """The messages by start; at equal starts a waiting message comes later (one of length 0 ends as it starts)."""
    order = sorted(range(len(timed.messages)), key=lambda m: (timed.starts[m], timed.ends[m], m))
    place = {m: k for k, m in enumerate(order)}
    messages = []
    for m in order:
        message = timed.messages[m]
        after = tuple(sorted(place[before] for before in message.after))
        messages.append(
            OrderedMessage(
                message.tile,
                message.begin,
                message.end,
                message.sender,
                message.receiver,
                message.local,
                after,
            )
        )
    return TimedMessages(
        tuple(messages), tuple(timed.starts[m] for m in order), tuple(timed.ends[m] for m in order)
    )
