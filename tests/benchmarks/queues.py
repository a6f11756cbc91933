"""`make bench-queues`: 10,000 jobs on 10,000 accelerators in simulated time, beside plain first come first served.

The decision is the one that the control plane uses (`admission_and_preemption` of service/orchestrator/decisions), asked at
every arrival and every end. Both policies see the same jobs; how long a job lasts is known to neither, only the limit that
its owner set. Then: how many decisions a second with a long line, and how preemption serves a job of a high priority.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from service.orchestrator.decisions.admission_and_preemption import admit
from service.orchestrator.decisions.attempt_lifecycle import (
    Capacity,
    Holder,
    Preempt,
    QueueRules,
    Start,
    WaitingJob,
)

OWNERS = 20
RULES = QueueRules(preempts=True, grace_s=90.0, patience_s=3600.0)
Policy = Callable[[Sequence[WaitingJob], Sequence[Holder], int, float], list[Start | Preempt]]


@dataclass(frozen=True)
class Arrival:
    """A job as submitted, and how long it will really run."""

    job: WaitingJob
    lasts_s: float


def arrivals(count: int, accelerators: int, load: float, seed: int) -> list[Arrival]:
    """Gangs of 1 to 1024, minutes to a day, limits of one to four times that; one owner of 20 sends a third of all,
    in bursts of a few hundred."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        size = 2 ** min(int(draw.expovariate(0.25)), 10)
        lasts_s = min(max(draw.lognormvariate(math.log(3600), 1.2), 60.0), 86400.0)
        owner = "o00" if draw.random() < 1 / 3 else f"o{draw.randrange(1, OWNERS):02}"
        limit_s = lasts_s * draw.uniform(1.0, 4.0) + RULES.grace_s
        made.append((f"j{number:05}", owner, size, lasts_s, limit_s))
    work = sum(size * lasts_s for _, _, size, lasts_s, _ in made)
    span_s = work / (load * accelerators)
    bursts = sorted(draw.uniform(0, span_s) for _ in range(max(count // 900, 1)))
    found = []
    for name, owner, size, lasts_s, limit_s in made:
        at = draw.choice(bursts) if owner == "o00" else draw.uniform(0, span_s)
        job = WaitingJob(name, "default", 0, at, size, "cuda", owner=owner, longest_s=limit_s)
        found.append(Arrival(job, lasts_s))
    return sorted(found, key=lambda one: (one.job.queued_at, one.job.id))


def ours(
    waiting: Sequence[WaitingJob],
    holders: Sequence[Holder],
    total: int,
    now: float,
    rules: QueueRules = RULES,
) -> list[Start | Preempt]:
    capacity = Capacity({"cpu": 0, "cuda": total})
    answers = admit(waiting, holders, capacity=capacity, quotas={"default": None}, now=now, rules=rules)
    return [one for one in answers if isinstance(one, Start | Preempt)]


def first_come(
    waiting: Sequence[WaitingJob], holders: Sequence[Holder], total: int, now: float
) -> list[Start | Preempt]:
    """The oldest job, whole, when it fits; nobody before it."""
    free = total - sum(holder.accelerators for holder in holders)
    starts: list[Start | Preempt] = []
    for job in sorted(waiting, key=lambda job: (job.queued_at, job.id)):
        if job.accelerators > free:
            break
        free -= job.accelerators
        starts.append(Start(job.id, "cuda"))
    return starts


class Cluster:
    """What waits and what runs in simulated time; every arrival and every end is a round. `owners` (by job) are
    those whose shares are compared, where the jobs do not say."""

    def __init__(
        self, jobs: Sequence[Arrival], total: int, policy: Policy, owners: dict[str, str] | None = None
    ) -> None:
        self._jobs, self._total, self._policy = jobs, total, policy
        self._known = {one.job.id: one.job for one in jobs}
        self._owner = owners or {one.job.id: one.job.owner for one in jobs}
        self._left_s = {one.job.id: one.lasts_s for one in jobs}
        self._waiting, self._running = dict[str, WaitingJob](), dict[str, Holder]()
        self._ends, self._end_of = list[tuple[float, str]](), dict[str, float]()
        self.waits_s = dict[str, float]()
        self.rounds = self.answered = self.longest_line = self.gave_way = 0
        self.deciding_s = self.slowest_s = 0.0
        self._used_s = self._fair_s = self._contended_s = 0.0

    def run(self) -> Cluster:
        """All jobs to their ends."""
        place, begin = 0, self._jobs[0].job.queued_at
        now = begin
        while place < len(self._jobs) or self._ends:
            arrives = self._jobs[place].job.queued_at if place < len(self._jobs) else math.inf
            then = min(arrives, self._ends[0][0] if self._ends else math.inf)
            self._account(then - now)
            now = then
            while self._ends and self._ends[0][0] <= now:
                self._end(*heapq.heappop(self._ends))
            while place < len(self._jobs) and self._jobs[place].job.queued_at <= now:
                self._waiting[self._jobs[place].job.id] = self._jobs[place].job
                place += 1
            if self._waiting:
                self._round(now)
        assert not self._waiting and len(self.waits_s) == len(self._jobs), "every job starts"
        self.utilization = self._used_s / (self._total * (now - begin))
        self.fairness = self._fair_s / self._contended_s if self._contended_s else 1.0
        return self

    def _account(self, passed_s: float) -> None:
        held = defaultdict[str, int](int)
        for holder in self._running.values():
            held[self._owner[holder.job_id]] += holder.accelerators
        self._used_s += sum(held.values()) * passed_s
        who = {self._owner[name] for name in self._waiting}
        if len(who) > 1:
            self._fair_s += jain([held[owner] for owner in who]) * passed_s
            self._contended_s += passed_s

    def _end(self, at: float, name: str) -> None:
        if self._end_of.get(name) != at:
            return  # it gave way before
        del self._end_of[name]
        holder = self._running.pop(name)
        self._left_s[name] -= at - holder.since
        if self._left_s[name] > 1e-6:  # from its checkpoint, when its turn comes
            self._waiting[name] = self._known[name]

    def _round(self, now: float) -> None:
        line, holders = list(self._waiting.values()), list(self._running.values())
        self.longest_line = max(self.longest_line, len(line))
        begun = time.thread_time()
        answers = self._policy(line, holders, self._total, now)
        took_s = time.thread_time() - begun
        self.deciding_s, self.slowest_s = self.deciding_s + took_s, max(self.slowest_s, took_s)
        self.rounds, self.answered = self.rounds + 1, self.answered + len(line)
        for one in answers:
            if isinstance(one, Preempt):
                self.gave_way += 1
                until = min(now + RULES.grace_s, self._end_of[one.job_id])
                self._running[one.job_id] = replace(self._running[one.job_id], stopping=True, until=until)
                self._ends_at(one.job_id, until)
                continue
            job = self._waiting.pop(one.job_id)
            self._running[job.id] = Holder(
                job_id=job.id,
                queue=job.queue,
                accelerators=job.accelerators,
                device="cuda",
                owner=job.owner,
                priority=job.priority,
                since=now,
                until=now + job.longest_s,
            )
            self._ends_at(job.id, now + self._left_s[job.id])
            self.waits_s.setdefault(job.id, now - job.queued_at)
        assert sum(one.accelerators for one in self._running.values()) <= self._total

    def _ends_at(self, name: str, at: float) -> None:
        self._end_of[name] = at
        heapq.heappush(self._ends, (at, name))


def jain(shares: Sequence[float]) -> float:
    """Jain's index: 1 where all have the same, 1/n where one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def long_line(count: int, total: int, *, limited: bool, owners: int, free: int, seed: int = 3) -> float:
    """Rounds a second with so many waiting jobs, `free` accelerators that none of the first can use."""
    draw = random.Random(seed)
    holders = [
        Holder(
            f"h{n}", "default", 16, "cuda", f"o{n % owners}", 0, 0.0, 1e5 + n * 60.0 if limited else math.inf
        )
        for n in range((total - free) // 16)
    ]
    waiting = [
        WaitingJob(
            f"j{n}",
            "default",
            draw.randrange(3) - 3,
            float(n),
            draw.choice([32, 64, 128, 256]) if n < count - 10 else 1,
            "cuda",
            owner=f"o{draw.randrange(owners)}",
            longest_s=draw.uniform(600, 86400) if limited else math.inf,
        )
        for n in range(count)
    ]
    times = []
    for _ in range(5):
        begun = time.thread_time()
        ours(waiting, holders, total, 5e4)
        times.append(time.thread_time() - begun)
    return 1 / statistics.median(times)


def report(name: str, jobs: Sequence[Arrival], cluster: Cluster) -> None:
    waits = sorted(cluster.waits_s.values())
    of_owner = defaultdict[bool, list[float]](list)
    for one in jobs:
        of_owner[one.job.owner == "o00"].append(cluster.waits_s[one.job.id])
    print(
        f"| {name} | {cluster.rounds / cluster.deciding_s:,.0f} | {cluster.answered / cluster.deciding_s:,.0f} | "
        f"{1e3 * cluster.slowest_s:.0f} ({cluster.longest_line:,}) | {hours(statistics.mean(waits))} | "
        f"{hours(waits[len(waits) // 2])} | {hours(waits[int(0.99 * len(waits))])} | "
        f"{hours(statistics.mean(of_owner[True]))} / {hours(statistics.mean(of_owner[False]))} | "
        f"{cluster.fairness:.2f} | {cluster.utilization:.3f} |",
        flush=True,
    )


def hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--accelerators", type=int, default=10_000)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    total = given.accelerators
    jobs = arrivals(given.jobs, total, given.load, given.seed)
    print(
        f"{given.jobs:,} jobs on {total:,} accelerators, load {given.load:g}; waits in hours, rounds and decisions"
    )
    print("a second of processor time\n")
    print(
        "| policy | rounds/s | decisions/s | slowest round ms (line) | mean wait | p50 | p99 | "
        "heavy owner / others | Jain | used |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    report("first come, first served", jobs, Cluster(jobs, total, first_come).run())
    report("Slotline", jobs, Cluster(jobs, total, ours).run())
    nameless = [replace(one, job=replace(one.job, owner="")) for one in jobs]
    owners = {one.job.id: one.job.owner for one in jobs}
    report("Slotline, owners unknown", jobs, Cluster(nameless, total, ours, owners).run())
    unlimited = [replace(one, job=replace(one.job, longest_s=math.inf)) for one in jobs]
    report("Slotline, no max_duration", jobs, Cluster(unlimited, total, ours).run())

    few = arrivals(2_000, total, given.load, given.seed + 1)
    few = [
        replace(one, job=replace(one.job, priority=1)) if n % 50 == 7 else one for n, one in enumerate(few)
    ]
    marked = [one.job.id for one in few if one.job.priority]
    print(f"\n{len(marked)} of 2,000 jobs of priority 1, the others 0:\n")
    print("| preemption | mean wait of priority 1 | their p99 | mean wait of the others | gave way |")
    print("|---|---|---|---|---|")
    for name, rules in (("off", replace(RULES, preempts=False)), ("on", RULES)):
        cluster = Cluster(few, total, functools.partial(ours, rules=rules)).run()
        first = sorted(cluster.waits_s[one] for one in marked)
        others = [wait for one, wait in cluster.waits_s.items() if one not in set(marked)]
        print(
            f"| {name} | {hours(statistics.mean(first))} | {hours(first[int(0.99 * len(first))])} | "
            f"{hours(statistics.mean(others))} | {cluster.gave_way} |",
            flush=True,
        )

    print("\n| line | limits | owners | rounds/s |\n|---|---|---|---|")
    for count in (1_000, 3_000, 10_000):
        for limited in (True, False):
            for owners_count in (1, 50):
                rate = long_line(count, total, limited=limited, owners=owners_count, free=16)
                print(
                    f"| {count:,} | {'yes' if limited else 'no'} | {owners_count} | {rate:.1f} |", flush=True
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
