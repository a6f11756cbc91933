"""The door: two layouts of a tensor and the links in, a resharding plan out.

The model and what it proves stand in bound.py. The order is searched: all styles of routes (routes.py), chunks from
one to as many as the limit on messages allows, list schedules with two rules and matchings; the shortest wins, then the
fewest messages. Fine chunks are tried for the best few routes of the coarse ones only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from service.scheduler.resharding.bound import lower_bound_s
from service.scheduler.resharding.layout import Layout, Links, Problem, Tensor, problem
from service.scheduler.resharding.matchings import in_matchings
from service.scheduler.resharding.order import Timed, cut_into_messages, in_given_order, listed, message_count
from service.scheduler.resharding.plan import TOLERANCE, ReshardingPlan, plan_of
from service.scheduler.resharding.routes import STYLES, STYLES_OF_SLOW_HOSTS, Part, routes

MESSAGES = 1024
_LARGEST_CHUNKS = 64
_COARSE = 8  # the first look at a route may have this part of all messages
_REFINED = 3


@dataclass(frozen=True)
class _Route:
    """Parts, also in the order of matchings where there is one, and the best that is known of them."""

    how: str
    parts: tuple[Part, ...]
    matched: tuple[Part, ...] | None


@dataclass(frozen=True)
class _Found:
    timed: Timed
    how: str

    def better_than(self, other: _Found | None) -> bool:
        """Shorter, or as short with fewer messages."""
        if other is None:
            return True
        one, two = self.timed, other.timed
        if abs(one.makespan_s - two.makespan_s) > TOLERANCE * two.makespan_s:
            return one.makespan_s < two.makespan_s
        return len(one.messages) < len(two.messages)


def plan_resharding(
    tensor: Tensor, source: Layout, target: Layout, links: Links, *, messages: int = MESSAGES
) -> ReshardingPlan:
    """The shortest plan found; a function of its arguments alone.

    `messages` limits how finely parts are cut for pipelining; a plan has more only where its parts alone are more.
    """
    given = problem(tensor, source, target, links)
    bound = lower_bound_s(given)
    best: _Found | None = None
    looked: list[tuple[float, int, _Route, int]] = []
    for number, route in enumerate(_distinct_routes(given)):
        counts = list(_chunk_counts(route.parts, 1, messages // _COARSE)) or [1]
        found = _best(given, route, counts)
        looked.append((found.timed.makespan_s, number, route, counts[-1]))
        best = found if found.better_than(best) else best
        if best.timed.makespan_s <= bound * (1 + TOLERANCE):
            return plan_of(given, best.timed, bound, best.how)  # styles with fewer messages come first
    for _, _, route, chunks in sorted(looked, key=lambda one: one[:2])[:_REFINED]:
        if counts := list(_chunk_counts(route.parts, 2 * chunks, messages)):
            found = _best(given, route, counts)
            best = found if found.better_than(best) else best
    assert best is not None
    return plan_of(given, best.timed, bound, best.how)


def _best(given: Problem, route: _Route, counts: list[int]) -> _Found:
    best: _Found | None = None
    for chunks in counts:
        how = f"{route.how}, {chunks} chunks" if chunks > 1 else route.how
        cut = cut_into_messages(route.parts, chunks)
        found = [_Found(listed(given, cut, tails_first=first), how) for first in (False, True)]
        if route.matched is not None:
            ordered = in_given_order(given, cut_into_messages(route.matched, chunks))
            found.append(_Found(ordered, f"{how}, in matchings"))
        for one in found:
            best = one if one.better_than(best) else best
    assert best is not None
    return best


def _distinct_routes(given: Problem) -> Iterator[_Route]:
    seen = set()
    links = given.links
    slow_hosts = links.local_bytes_per_s is not None and links.local_bytes_per_s < links.card_bytes_per_s
    for style in STYLES_OF_SLOW_HOSTS if slow_hosts else STYLES:
        parts = routes(given, style)
        if parts not in seen:
            seen.add(parts)
            yield _Route(str(style), parts, in_matchings(given, parts))


def _chunk_counts(parts: tuple[Part, ...], first: int, messages: int) -> Iterator[int]:
    """From `first` on, doubled while cutting changes anything and the limit holds."""
    chunks, before = first, message_count(parts, first // 2) if first > 1 else 0
    while chunks <= _LARGEST_CHUNKS:
        count = message_count(parts, chunks)
        if count in (before, 0) or count > messages:
            return
        yield chunks
        chunks, before = 2 * chunks, count
