"""Divides items among options to the least largest load: its exact value by max flow, and the division itself."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ortools.graph.python.max_flow import SimpleMaxFlow


@dataclass(frozen=True)
class LoadItem:
    """Elements that any of `options` may carry, each a share of them."""

    elements: int
    options: tuple[int, ...]


@dataclass(frozen=True)
class LoadShare:
    """Elements `begin` to `end` of an item go to `option`."""

    option: int
    begin: int
    end: int


def least_largest_load(items: list[LoadItem]) -> Fraction:
    """The least value that the largest load can have, when items may be divided at will.

    It is the largest of W(S)/|S| over sets S of options, where W(S) counts the elements of the items with no option
    outside S. No division has less: the options of S carry at least W(S) together, so one of them W(S)/|S|. Some
    division has no more: with capacity T at each option, a maximal flow from items to options carries everything
    unless its minimal cut leaves a set S with W(S) > T|S| (Hall's condition). The search goes up from one such T to
    the next (Newton's method on the cut, as Dinkelbach 1967); each step is an exact quotient, and there are few.
    """
    items = [item for item in items if item.elements]
    if not items:
        return Fraction(0)
    options = {option for item in items for option in item.options}
    bound = Fraction(sum(item.elements for item in items), len(options))
    while (crowded := _overloaded_options(items, bound)) is not None:
        inside = sum(item.elements for item in items if crowded.issuperset(item.options))
        bound = Fraction(inside, len(crowded))
    return bound


def whole_shares(items: list[LoadItem]) -> list[list[LoadShare]]:
    """Every item to one option: those with the fewest options first, the largest of them first, to the least load."""
    loads: dict[int, int] = {}
    shares: list[list[LoadShare]] = [[] for _ in items]
    for i in sorted(range(len(items)), key=lambda i: (len(items[i].options), -items[i].elements, i)):
        option = min(
            items[i].options, key=lambda option: (loads.get(option, 0), items[i].options.index(option))
        )
        loads[option] = loads.get(option, 0) + items[i].elements
        shares[i] = [LoadShare(option, 0, items[i].elements)]
    return shares


def least_shares(items: list[LoadItem]) -> list[list[LoadShare]]:
    """A division with the least largest load, but for the rounding of each share to whole elements.

    Nothing is divided where dividing does not help.
    """
    bound = least_largest_load(items)
    whole = whole_shares(items)
    if largest_load(whole) <= bound:
        return whole
    flow, arcs, _ = _solved_flow(items, bound)
    shares: list[list[LoadShare]] = []
    for i, item in enumerate(items):
        found, carried, begin = [], 0, 0
        for option in item.options:
            carried += flow.flow(arcs[i, option])
            end = carried // bound.denominator
            if end > begin:
                found.append(LoadShare(option, begin, end))
                begin = end
        shares.append(found)
    return shares


def largest_load(shares: list[list[LoadShare]]) -> int:
    """The most elements that one option carries."""
    loads: dict[int, int] = {}
    for share in (share for of_item in shares for share in of_item):
        loads[share.option] = loads.get(share.option, 0) + share.end - share.begin
    return max(loads.values(), default=0)


def _overloaded_options(items: list[LoadItem], bound: Fraction) -> set[int] | None:
    """Options whose own items are more than `bound` for each of them, or None."""
    flow, _, nodes = _solved_flow(items, bound)
    if flow.optimal_flow() == bound.denominator * sum(item.elements for item in items):
        return None
    reached = set(flow.get_source_side_min_cut())
    return {option for option, node in nodes.items() if node in reached}


def _solved_flow(
    items: list[LoadItem], bound: Fraction
) -> tuple[SimpleMaxFlow, dict[tuple[int, int], int], dict[int, int]]:
    """The solved flow with every capacity times the bound's denominator, its arcs and the nodes of the options."""
    flow = SimpleMaxFlow()
    options = sorted({option for item in items for option in item.options})
    nodes = {option: 2 + len(items) + k for k, option in enumerate(options)}
    arcs = {}
    for i, item in enumerate(items):
        amount = item.elements * bound.denominator
        flow.add_arc_with_capacity(0, 2 + i, amount)
        for option in item.options:
            arcs[i, option] = flow.add_arc_with_capacity(2 + i, nodes[option], amount)
    for node in nodes.values():
        flow.add_arc_with_capacity(node, 1, bound.numerator)
    status = flow.solve(0, 1)
    assert status == flow.OPTIMAL, f"a maximal flow of {len(items)} items ended with {status}"
    return flow, arcs, nodes
