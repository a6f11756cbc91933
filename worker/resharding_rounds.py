"""The messages of a resharding in rounds: those of a round go at once, and none of them needs another of it.

For a transport that carries messages on one stream: a worker's round is over when all of its messages are, and then
comes its next. Rounds follow from the plan alone and are the same on every worker, so that none waits in a circle: a
worker that is in the first unfinished round waits only for others that come to it, since what they do before is over.
Light: no torch at import.
"""

from __future__ import annotations

from collections import defaultdict

from worker.resharding_plan import Message, ReshardingPlan


def rounds_of(plan: ReshardingPlan) -> tuple[tuple[Message, ...], ...]:
    """One round where no message waits for another. Where workers pass on what they got, each sends one message a
    round to its host and one to others, and receives as many: what has come leaves while the next comes."""
    passed_on = any(message.after for message in plan.messages)
    round_of: dict[int, int] = {}
    free: dict[tuple[str, bool, bool], int] = defaultdict(int)
    found: dict[int, list[Message]] = defaultdict(list)
    for one in plan.messages:
        first = max((round_of[before] + 1 for before in one.after), default=0)
        ports = [(one.sender, True, one.local), (one.receiver, False, one.local)]
        if passed_on:
            first = max(first, *(free[port] for port in ports))
            for port in ports:
                free[port] = first + 1
        round_of[one.number] = first
        found[first].append(one)
    return tuple(tuple(found[number]) for number in sorted(found))
