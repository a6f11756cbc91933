"""The door: two layouts of a tensor and the links in, a resharding plan out.

The model and what it proves stand in bound.py. The order is searched: all styles of routes (routes.py), chunks from
one to as many as the limit on messages allows, list schedules with two rules; the shortest wins, then the fewest messages.
"""

from __future__ import annotations

from collections.abc import Iterator

from service.scheduler.resharding.bound import lower_bound_s
from service.scheduler.resharding.layout import Layout, Links, Problem, Tensor, problem
from service.scheduler.resharding.order import Timed, cut_into_messages, listed, message_count
from service.scheduler.resharding.plan import TOLERANCE, ReshardingPlan, plan_of
from service.scheduler.resharding.routes import STYLES, Part, Style, routes

MESSAGES = 1024
_LARGEST_CHUNKS = 64


def plan_resharding(
    tensor: Tensor, source: Layout, target: Layout, links: Links, *, messages: int = MESSAGES
) -> ReshardingPlan:
    """The shortest plan found; a function of its arguments alone.

    `messages` limits how finely parts are cut for pipelining; a plan has more only where its parts alone are more.
    """
    given = problem(tensor, source, target, links)
    bound = lower_bound_s(given)
    best: tuple[Timed, str] | None = None
    for style, parts in _distinct_routes(given):
        for chunks in _chunk_counts(parts, messages):
            cut = cut_into_messages(parts, chunks)
            for tails_first in (False, True):
                timed = listed(given, cut, tails_first=tails_first)
                if best is None or _better(timed, best[0]):
                    best = timed, f"{style}, {chunks} chunks" if chunks > 1 else str(style)
    assert best is not None
    return plan_of(given, best[0], bound, best[1])


def _distinct_routes(given: Problem) -> Iterator[tuple[Style, tuple[Part, ...]]]:
    seen = set()
    for style in STYLES:
        parts = routes(given, style)
        if parts not in seen:
            seen.add(parts)
            yield style, parts


def _chunk_counts(parts: tuple[Part, ...], messages: int) -> Iterator[int]:
    """1, 2, 4, … while cutting changes anything and the limit holds."""
    chunks, before = 1, 0
    while chunks <= _LARGEST_CHUNKS:
        count = message_count(parts, chunks)
        if count == before or (chunks > 1 and count > messages):
            return
        yield chunks
        chunks, before = 2 * chunks, count


def _better(one: Timed, other: Timed) -> bool:
    """Shorter, or as short with fewer messages."""
    if abs(one.makespan_s - other.makespan_s) > TOLERANCE * other.makespan_s:
        return one.makespan_s < other.makespan_s
    return len(one.messages) < len(other.messages)
