"""What a resharding costs without a plan of its own, in the same model: for comparison.

*Send and receive*: every worker of the target, one after the other, asks for its tiles; of several holders receiver r
asks holder r modulo their number; a host serves one request after the other in that order, in each direction. Each
worker gets its own copy over the network. In units of the whole tensor over one card this model gives 2, 2, 3.75,
0.94, 3.5, 4, 8, 8 and 3.75 for the nine layouts of the literature (Zhuang et al., "On Optimizing the Communication of
Model Parallelism", 2022).

*Gather, then send*: one worker of the source gathers the tensor, one of the target gets it whole, and gives each
its tiles.
"""

from __future__ import annotations

from service.scheduler.resharding.bound import lower_bound_s
from service.scheduler.resharding.layout import Layout, Links, Problem, Tensor, problem
from service.scheduler.resharding.order import Message, in_given_order
from service.scheduler.resharding.plan import ReshardingPlan, plan_of


def plan_send_and_receive(tensor: Tensor, source: Layout, target: Layout, links: Links) -> ReshardingPlan:
    """Every worker of the target gets its tiles one by one, from the holder whose turn it is."""
    given = problem(tensor, source, target, links)
    messages = []
    for receiver in range(given.sources, len(given.workers)):
        for number, tile in enumerate(given.tiles):
            if receiver in tile.needers:
                sender = tile.holders[(receiver - given.sources) % len(tile.holders)]
                messages.append(_message(given, number, sender, receiver, ()))
    return plan_of(given, in_given_order(given, messages), lower_bound_s(given), "send and receive")


def plan_gather_then_send(tensor: Tensor, source: Layout, target: Layout, links: Links) -> ReshardingPlan:
    """The first worker of the source gathers, the first of the target gets everything, then gives it out."""
    given = problem(tensor, source, target, links)
    gatherer, giver = 0, given.sources
    messages: list[Message] = []
    for number, tile in enumerate(given.tiles):
        if gatherer not in tile.holders:
            messages.append(_message(given, number, tile.holders[0], gatherer, ()))
    gathered = tuple(range(len(messages)))
    sent = []
    for number in range(len(given.tiles)):
        sent.append(len(messages))
        messages.append(_message(given, number, gatherer, giver, gathered))
    for receiver in range(given.sources + 1, len(given.workers)):
        for number, tile in enumerate(given.tiles):
            if receiver in tile.needers:
                messages.append(_message(given, number, giver, receiver, tuple(sent)))
    return plan_of(given, in_given_order(given, messages), lower_bound_s(given), "gather, then send")


def _message(given: Problem, number: int, sender: int, receiver: int, after: tuple[int, ...]) -> Message:
    local = given.workers[sender].host == given.workers[receiver].host
    return Message(number, 0, given.tiles[number].elements, sender, receiver, local, after)
