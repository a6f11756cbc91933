"""The exact least makespan of a small resharding, by CP-SAT, in slots of one element over one card.

Knows hosts and single elements only: copies inside a host are free, each host has one card, and a host may pass on
whatever it has. Everything that a plan may do in this model, this model may do too.
"""

from __future__ import annotations

from collections import defaultdict

from ortools.sat.python import cp_model

from service.scheduler.resharding.layout import Layout
from tests.service.scheduler.resharding.cases import elements_of


def least_slots(source: Layout, target: Layout, shape: tuple[int, ...], most: int) -> int:
    """Slots until every host of `target` has its elements; at most `most`, which must be feasible."""
    has, needs = defaultdict(set), defaultdict(set)
    for w, piece in enumerate(elements_of(source, shape)):
        for element in piece.ravel().tolist():
            has[element].add(source.hosts[w])
    for w, piece in enumerate(elements_of(target, shape)):
        for element in piece.ravel().tolist():
            if target.hosts[w] not in has[element]:
                needs[element].add(target.hosts[w])
    model = cp_model.CpModel()
    out, into, last = defaultdict(list), defaultdict(list), model.new_int_var(0, most, "last")
    for element, hosts in needs.items():
        carried = {}
        for host in sorted(hosts):
            for sender in sorted((has[element] | hosts) - {host}):
                for slot in range(most):
                    one = carried[sender, host, slot] = model.new_bool_var("")
                    out[sender, slot].append(one)
                    into[host, slot].append(one)
                    model.add(last >= slot + 1).only_enforce_if(one)
        for host in hosts:
            model.add_exactly_one(one for (_, h, _), one in carried.items() if h == host)
        for (sender, _, slot), one in carried.items():
            if sender not in has[element]:
                model.add_bool_or(
                    o for (_, h, s), o in carried.items() if h == sender and s < slot
                ).only_enforce_if(one)
    for group in (*out.values(), *into.values()):
        model.add_at_most_one(group)
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = 20
    status = solver.solve(model)
    assert status == cp_model.OPTIMAL, f"{solver.status_name(status)}: make the case smaller"
    return round(solver.objective_value)
