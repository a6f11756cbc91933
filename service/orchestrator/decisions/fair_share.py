"""Order of waiting jobs: by priority, then age, with max-min fair turns among the owners of one queue.

Pure functions. The turns of a queue are those of its jobs by age, so that no queue gains from having many owners;
each goes to the owner who holds the fewest accelerators of that device in the queue. An owner without a start for
`patience_s` goes first whatever they hold, so that every job starts in the end.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from service.orchestrator.decisions.attempt_lifecycle import Holder, WaitingJob

QueueAndDevice = tuple[str, str]
"""Name of a queue, and a device: owners take turns within each such pair."""


@dataclass(frozen=True)
class _OwnerShare:
    """Accelerators that an owner holds of one queue and device, and the time at which the last were taken."""

    accelerators: int = 0
    since: float = float("-inf")


def fair_order(
    waiting: Sequence[WaitingJob],
    holders: Sequence[Holder],
    *,
    device_of: Callable[[WaitingJob], str],
    now: float,
    patience_s: float,
    out_of_line: Collection[str] = (),
) -> list[WaitingJob]:
    """All waiting jobs in the order of their turns.

    An owner who has waited for `patience_s`, with no start in between, has the next turn whatever they hold: with
    others who come and go for ever, every job starts in the end. Jobs `out_of_line` (ids) cannot start whoever ends,
    and take no turn.
    """
    shares = defaultdict[QueueAndDevice, dict[str, _OwnerShare]](dict)
    for holder in holders:
        lane_shares = shares[holder.queue, holder.device]
        before = lane_shares.get(holder.owner, _OwnerShare())
        lane_shares[holder.owner] = _OwnerShare(
            before.accelerators + holder.accelerators, max(before.since, holder.since)
        )
    levels = defaultdict[int, dict[QueueAndDevice | None, list[WaitingJob]]](lambda: defaultdict(list))
    for job in sorted(waiting, key=_by_age):
        lane = None if job.id in out_of_line else (job.queue, device_of(job))
        levels[job.priority][lane].append(job)
    ordered = list[WaitingJob]()
    for priority in sorted(levels, reverse=True):
        turns = [
            zip(
                map(_by_age, jobs),
                jobs if lane is None else _interleave_owners(jobs, shares[lane], now, patience_s),
                strict=True,
            )
            for lane, jobs in levels[priority].items()
        ]
        ordered += [job for _, job in heapq.merge(*turns, key=lambda turn: turn[0])]
    return ordered


def _interleave_owners(
    jobs: Sequence[WaitingJob], shares: dict[str, _OwnerShare], now: float, patience_s: float
) -> Iterator[WaitingJob]:
    """Jobs of one lane and priority (given oldest first) as their owners take turns; `shares` grow with them."""
    jobs_by_owner = defaultdict[str, list[WaitingJob]](list)
    for job in reversed(jobs):
        jobs_by_owner[job.owner].append(job)  # the oldest one last, to be popped
    ranks = [_owner_rank(owned[-1], shares, now, patience_s) for owned in jobs_by_owner.values()]
    heapq.heapify(ranks)
    while ranks:
        *_, owner = heapq.heappop(ranks)
        job = jobs_by_owner[owner].pop()
        shares[owner] = _OwnerShare(shares.get(owner, _OwnerShare()).accelerators + job.accelerators, now)
        if jobs_by_owner[owner]:
            heapq.heappush(ranks, _owner_rank(jobs_by_owner[owner][-1], shares, now, patience_s))
        yield job


def _owner_rank(
    oldest: WaitingJob, shares: dict[str, _OwnerShare], now: float, patience_s: float
) -> tuple[bool, int, tuple[float, str], str]:
    """Sort key of an owner by their oldest job; the lowest has the next turn."""
    share = shares.get(oldest.owner, _OwnerShare())
    patient = now - max(oldest.queued_at, share.since) < patience_s
    return patient, share.accelerators, _by_age(oldest), oldest.owner


def _by_age(job: WaitingJob) -> tuple[float, str]:
    return job.queued_at, job.id
