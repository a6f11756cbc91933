"""The order in which no busiest card ever waits: loads between cards as a sum of matchings (open shop with preemption).

Gonzalez and Sahni 1976: when work may be cut anywhere, everything ends after exactly the largest load of a card in one
direction. A matrix of loads, filled up so that every row and column has that sum, is a sum of perfect matchings (Birkhoff);
each matching is a stretch of time in which every busiest card works.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace

from service.scheduler.resharding.layout import Problem
from service.scheduler.resharding.routes import Part

LARGEST = 48
"""Cards in one direction; more would take seconds."""

Pair = tuple[int, int]


def in_matchings(problem: Problem, parts: tuple[Part, ...]) -> tuple[Part, ...] | None:
    """The parts, cut where a matching ends, in the order in which matchings carry them.

    None where a part passes more than one card (what is passed on waits, and a matching knows nothing of that), or for
    too many cards. Parts that pass none come first.
    """
    queues: dict[Pair, deque[Part]] = defaultdict(deque)
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
    if max(len({a for a, _ in loads}), len({b for _, b in loads}), 0) > LARGEST:
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


def _stretches(loads: dict[Pair, int]) -> Iterator[tuple[Pair, int]]:
    """(pair, elements) by the start of each stretch; a pair in one matching after another is one stretch."""
    if not loads:
        return
    table = _filled(loads)
    outs, ins = sorted({a for a, _ in loads}), sorted({b for _, b in loads})
    partner: dict[int, int] = {}
    open_since: dict[Pair, int] = {}
    stretches: list[tuple[int, Pair, int]] = []
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


def _filled(loads: dict[Pair, int]) -> list[dict[int, int]]:
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
