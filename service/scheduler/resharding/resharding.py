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
    Message,
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
    ReshardingPlan,
    make_resharding_plan,
    resharding_lower_bound_s,
)


def plan_send_and_receive(tensor: Tensor, source: Layout, target: Layout, links: Links) -> ReshardingPlan:
    """Every worker of the target gets its tiles one by one, from the holder whose turn it is."""
    given = resharding_problem(tensor, source, target, links)
    messages = []
    for receiver in range(given.sources, len(given.workers)):
        for number, tile in enumerate(given.tiles):
            if receiver in tile.needers:
                sender = tile.holders[(receiver - given.sources) % len(tile.holders)]
                messages.append(_whole_tile_message(given, number, sender, receiver, ()))
    return make_resharding_plan(
        given, in_given_order(given, messages), resharding_lower_bound_s(given), "send and receive"
    )


def plan_gather_then_send(tensor: Tensor, source: Layout, target: Layout, links: Links) -> ReshardingPlan:
    """The first worker of the source gathers, the first of the target gets everything, then gives it out."""
    given = resharding_problem(tensor, source, target, links)
    gatherer, giver = 0, given.sources
    messages: list[Message] = []
    for number, tile in enumerate(given.tiles):
        if gatherer not in tile.holders:
            messages.append(_whole_tile_message(given, number, tile.holders[0], gatherer, ()))
    gathered = tuple(range(len(messages)))
    sent = []
    for number in range(len(given.tiles)):
        sent.append(len(messages))
        messages.append(_whole_tile_message(given, number, gatherer, giver, gathered))
    for receiver in range(given.sources + 1, len(given.workers)):
        for number, tile in enumerate(given.tiles):
            if receiver in tile.needers:
                messages.append(_whole_tile_message(given, number, giver, receiver, tuple(sent)))
    return make_resharding_plan(
        given, in_given_order(given, messages), resharding_lower_bound_s(given), "gather, then send"
    )


def _whole_tile_message(
    given: ReshardingProblem, number: int, sender: int, receiver: int, after: tuple[int, ...]
) -> Message:
    local = given.workers[sender].host == given.workers[receiver].host
    return Message(number, 0, given.tiles[number].elements, sender, receiver, local, after)


DEFAULT_MAX_MESSAGES = 1024
_MAX_CHUNKS = 64
_COARSE_DIVISOR = 8  # the first look at a route may have this part of all messages
_MAX_REFINED_ROUTES = 3


@dataclass(frozen=True)
class _RouteCandidate:
    """Parts, also in the order of matchings where there is one, and the best that is known of them."""

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
        one, two = self.timed, other.timed
        if abs(one.makespan_s - two.makespan_s) > PROOF_TOLERANCE * two.makespan_s:
            return one.makespan_s < two.makespan_s
        return len(one.messages) < len(two.messages)


def plan_resharding(
    tensor: Tensor, source: Layout, target: Layout, links: Links, *, messages: int = DEFAULT_MAX_MESSAGES
) -> ReshardingPlan:
    """The shortest plan found; a function of its arguments alone.

    `messages` limits how finely parts are cut for pipelining; a plan has more only where its parts alone are more.
    """
    given = resharding_problem(tensor, source, target, links)
    bound = resharding_lower_bound_s(given)
    best: _TimedRoute | None = None
    looked: list[tuple[float, int, _RouteCandidate, int]] = []
    for number, route in enumerate(_distinct_routes(given)):
        counts = list(_chunk_counts(route.parts, 1, messages // _COARSE_DIVISOR)) or [1]
        found = _best_order(given, route, counts)
        looked.append((found.timed.makespan_s, number, route, counts[-1]))
        best = found if found.better_than(best) else best
        if best.timed.makespan_s <= bound * (1 + PROOF_TOLERANCE):
            return make_resharding_plan(
                given, best.timed, bound, best.strategy
            )  # styles with fewer messages come first
    for _, _, route, chunks in sorted(looked, key=lambda one: one[:2])[:_MAX_REFINED_ROUTES]:
        if counts := list(_chunk_counts(route.parts, 2 * chunks, messages)):
            found = _best_order(given, route, counts)
            best = found if found.better_than(best) else best
    assert best is not None
    return make_resharding_plan(given, best.timed, bound, best.strategy)


def _best_order(given: ReshardingProblem, route: _RouteCandidate, counts: list[int]) -> _TimedRoute:
    best: _TimedRoute | None = None
    for chunks in counts:
        how = f"{route.strategy}, {chunks} chunks" if chunks > 1 else route.strategy
        cut = cut_into_messages(route.parts, chunks)
        found = [_TimedRoute(list_schedule(given, cut, tails_first=first), how) for first in (False, True)]
        if route.matched is not None:
            ordered = in_given_order(given, cut_into_messages(route.matched, chunks))
            found.append(_TimedRoute(ordered, f"{how}, in matchings"))
        for one in found:
            best = one if one.better_than(best) else best
    assert best is not None
    return best


def _distinct_routes(given: ReshardingProblem) -> Iterator[_RouteCandidate]:
    seen = set()
    links = given.links
    slow_hosts = links.local_bytes_per_s is not None and links.local_bytes_per_s < links.card_bytes_per_s
    for style in SLOW_HOST_ROUTE_STYLES if slow_hosts else ROUTE_STYLES:
        parts = make_routes(given, style)
        if parts not in seen:
            seen.add(parts)
            yield _RouteCandidate(str(style), parts, in_matching_order(given, parts))


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
    "ReshardingPlan",
    "Tensor",
    "mesh_layout",
    "plan_gather_then_send",
    "plan_resharding",
    "plan_send_and_receive",
]
