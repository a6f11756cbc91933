"""The least time that cards allow a resharding, as a linear program over single elements; knows no tiles and no routes.

Copies inside hosts are free, messages have no latency, each host has one card. What a host needs and has not enters it
once, from a host that has it, at the start or because it needs it too: only the first of these is asked of senders.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from ortools.linear_solver import pywraplp

from service.scheduler.resharding.layout import Layout
from tests.service.scheduler.resharding.cases import elements_of


def least_elements(source: Layout, target: Layout, shape: tuple[int, ...]) -> float:
    """Elements that the busiest card carries in one direction, at the least."""
    has, needs = defaultdict(set), defaultdict(set)
    for given, found in ((source, has), (target, needs)):
        for w, piece in enumerate(elements_of(given, shape)):
            for element in piece.ravel().tolist():
                found[element].add(given.hosts[w])
    alike: Counter[tuple[frozenset[str], frozenset[str]]] = (
        Counter()
    )  # elements that the same hosts have, and lack
    for element, hosts in needs.items():
        if lacking := hosts - has[element]:
            alike[frozenset(has[element]), frozenset(lacking)] += 1
    solver = pywraplp.Solver.CreateSolver("GLOP")
    longest = solver.NumVar(0, solver.infinity(), "longest")
    sent = defaultdict(list)
    for (hosts, _), count in alike.items():
        shares = [solver.NumVar(0, solver.infinity(), "") for _ in hosts]
        solver.Add(sum(shares) >= count)
        for host, share in zip(sorted(hosts), shares, strict=True):
            sent[host].append(share)
    received: Counter[str] = Counter()
    for (_, lacking), count in alike.items():
        received.update(dict.fromkeys(lacking, count))
    for shares in sent.values():
        solver.Add(sum(shares) <= longest)
    for count in received.values():
        solver.Add(longest >= count)
    solver.Minimize(longest)
    assert solver.Solve() == pywraplp.Solver.OPTIMAL
    return longest.solution_value()
