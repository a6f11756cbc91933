"""Plans a resharding: searches routes and message orders for the shortest, with two naive baselines beside it.

`plan_resharding` tries all route styles, chunks up to the limit on messages, list schedules with two rules, and
matchings; the shortest wins, then the fewest messages. Fine chunks are tried for the best few routes of the
coarse ones only. Baseline "send and receive": every target worker in turn asks for its tiles, receiver r asks
holder r modulo their number. In units of the whole tensor over one card it gives 2, 2, 3.75, 0.94, 3.5, 4, 8, 8
and 3.75 for the nine layouts of Zhuang et al., "On Optimizing the Communication of Model Parallelism", 2022.
Baseline "gather, then send": one source worker gathers the tensor, one target worker gets it whole and hands
out the tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from service.scheduler.resharding.hops import ROUTE_STYLES, SLOW_HOST_ROUTE_STYLES, TilePart, make_routes
from service.scheduler.resharding.layout import (
    Layout,
    Links,
    ReshardingProblem,
    Tensor,
    mesh_layout,
    resharding_problem,
)
from service.scheduler.resharding.order import (
    OrderedMessage,
    TimedMessages,
    cut_into_messages,
    in_given_order,
    in_matching_order,
    list_schedule,
    message_count,
)
from service.scheduler.resharding.resharding_plan import (
    PROOF_TOLERANCE,
    PlannedMessage,
    PlannedResharding,
    make_resharding_plan,
    resharding_lower_bound_s,
)


def plan_send_and_receive(tensor: Tensor, source: Layout, target: Layout, links: Links) -> PlannedResharding:
    """Every worker of the target receives its tiles one by one, from their holders in turn."""
    problem = resharding_problem(tensor, source, target, links)
    messages = []
    for receiver in range(problem.sources, len(problem.workers)):
        for number, tile in enumerate(problem.tiles):
            if receiver in tile.needers:
                sender = tile.holders[(receiver - problem.sources) % len(tile.holders)]
                messages.append(_whole_tile_message(problem, number, sender, receiver, ()))
    return make_resharding_plan(
        problem, in_given_order(problem, messages), resharding_lower_bound_s(problem), "send and receive"
    )


def plan_gather_then_send(tensor: Tensor, source: Layout, target: Layout, links: Links) -> PlannedResharding:
    """The first worker of the source gathers, the first of the target receives everything, then sends it on."""
    problem = resharding_problem(tensor, source, target, links)
    gatherer, distributor = 0, problem.sources
    messages: list[OrderedMessage] = []
    for number, tile in enumerate(problem.tiles):
        if gatherer not in tile.holders:
            messages.append(_whole_tile_message(problem, number, tile.holders[0], gatherer, ()))
    gathered = tuple(range(len(messages)))
    sent = []
    for number in range(len(problem.tiles)):
        sent.append(len(messages))
        messages.append(_whole_tile_message(problem, number, gatherer, distributor, gathered))
    for receiver in range(problem.sources + 1, len(problem.workers)):
        for number, tile in enumerate(problem.tiles):
            if receiver in tile.needers:
                messages.append(_whole_tile_message(problem, number, distributor, receiver, tuple(sent)))
    return make_resharding_plan(
        problem, in_given_order(problem, messages), resharding_lower_bound_s(problem), "gather, then send"
    )


def _whole_tile_message(
    problem: ReshardingProblem, number: int, sender: int, receiver: int, after: tuple[int, ...]
) -> OrderedMessage:
    local = problem.workers[sender].host == problem.workers[receiver].host
    return OrderedMessage(number, 0, problem.tiles[number].elements, sender, receiver, local, after)


DEFAULT_MAX_MESSAGES = 1024
_MAX_CHUNKS = 64
_COARSE_DIVISOR = 8  # the first look at a route may have this part of all messages
_MAX_REFINED_ROUTES = 3


@dataclass(frozen=True)
class _RouteCandidate:
    """The parts of a route, and the same in the order of matchings where there is one."""

    strategy: str
    parts: tuple[TilePart, ...]
    matched: tuple[TilePart, ...] | None


@dataclass(frozen=True)
class _TimedRoute:
    timed: TimedMessages
    strategy: str

    def better_than(self, other: _TimedRoute | None) -> bool:
        """Shorter, or as short with fewer messages."""
        if other is None:
            return True
        timed, timed_other = self.timed, other.timed
        if abs(timed.makespan_s - timed_other.makespan_s) > PROOF_TOLERANCE * timed_other.makespan_s:
            return timed.makespan_s < timed_other.makespan_s
        return len(timed.messages) < len(timed_other.messages)


def plan_resharding(
    tensor: Tensor, source: Layout, target: Layout, links: Links, *, messages: int = DEFAULT_MAX_MESSAGES
) -> PlannedResharding:
    """The shortest plan found; a function of its arguments alone.

    `messages` limits how finely parts are cut for pipelining; a plan has more only where its parts alone are more.
    """
    problem = resharding_problem(tensor, source, target, links)
    bound = resharding_lower_bound_s(problem)
    best: _TimedRoute | None = None
    coarse: list[tuple[float, int, _RouteCandidate, int]] = []
    for number, route in enumerate(_distinct_routes(problem)):
        counts = list(_chunk_counts(route.parts, 1, messages // _COARSE_DIVISOR)) or [1]
        found = _best_order(problem, route, counts)
        coarse.append((found.timed.makespan_s, number, route, counts[-1]))
        best = found if found.better_than(best) else best
        if best.timed.makespan_s <= bound * (1 + PROOF_TOLERANCE):
            return make_resharding_plan(
                problem, best.timed, bound, best.strategy
            )  # styles with fewer messages come first
    for _, _, route, chunks in sorted(coarse, key=lambda look: look[:2])[:_MAX_REFINED_ROUTES]:
        if counts := list(_chunk_counts(route.parts, 2 * chunks, messages)):
            found = _best_order(problem, route, counts)
            best = found if found.better_than(best) else best
    assert best is not None
    return make_resharding_plan(problem, best.timed, bound, best.strategy)


def _best_order(problem: ReshardingProblem, route: _RouteCandidate, counts: list[int]) -> _TimedRoute:
    best: _TimedRoute | None = None
    for chunks in counts:
        strategy = f"{route.strategy}, {chunks} chunks" if chunks > 1 else route.strategy
        cut = cut_into_messages(route.parts, chunks)
        routes = [
            _TimedRoute(list_schedule(problem, cut, tails_first=first), strategy) for first in (False, True)
        ]
        if route.matched is not None:
            ordered = in_given_order(problem, cut_into_messages(route.matched, chunks))
            routes.append(_TimedRoute(ordered, f"{strategy}, in matchings"))
        for candidate in routes:
            best = candidate if candidate.better_than(best) else best
    assert best is not None
    return best


def _distinct_routes(problem: ReshardingProblem) -> Iterator[_RouteCandidate]:
    seen = set()
    links = problem.links
    slow_hosts = links.local_bytes_per_s is not None and links.local_bytes_per_s < links.card_bytes_per_s
    for style in SLOW_HOST_ROUTE_STYLES if slow_hosts else ROUTE_STYLES:
        parts = make_routes(problem, style)
        if parts not in seen:
            seen.add(parts)
            yield _RouteCandidate(str(style), parts, in_matching_order(problem, parts))


def _chunk_counts(parts: tuple[TilePart, ...], first: int, messages: int) -> Iterator[int]:
    """From `first` on, doubled while cutting changes anything and the limit holds."""
    chunks, before = first, message_count(parts, first // 2) if first > 1 else 0
    while chunks <= _MAX_CHUNKS:
        count = message_count(parts, chunks)
        if count in (before, 0) or count > messages:
            return
        yield chunks
        chunks, before = 2 * chunks, count


__all__ = [
    "Layout",
    "Links",
    "PlannedMessage",
    "PlannedResharding",
    "Tensor",
    "mesh_layout",
    "plan_gather_then_send",
    "plan_resharding",
    "plan_send_and_receive",
]
