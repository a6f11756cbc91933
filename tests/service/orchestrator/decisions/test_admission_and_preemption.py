"""Queues: who starts, who waits, who gives way. Properties over snapshots, and over whole runs in simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.orchestrator.decisions.admission_and_preemption import RESERVATION_LIMIT, admit
from service.orchestrator.decisions.attempt_lifecycle import (
    Capacity,
    Holder,
    Preempt,
    QueueRules,
    Start,
    Wait,
    WaitingJob,
)
from service.spec.principals import ProjectQueue

RULES = QueueRules(preempts=True, grace_s=10.0, patience_s=1e9)


def job(name: str, accelerators: int = 1, age: float = 0.0, **changes) -> WaitingJob:
    """A job submitted at `age`."""
    fields = {"queue": "q", "priority": 0, "queued_at": age, "device": "cpu"}
    return WaitingJob(name, accelerators=accelerators, **{**fields, **changes})


def holder(name: str, accelerators: int, **changes) -> Holder:
    return Holder(name, **{"queue": "q", "accelerators": accelerators, "device": "cpu", **changes})


def decide(waiting, holders=(), total=4, quotas=None, now=100.0, rules=RULES):
    capacity = Capacity({"cpu": total, "cuda": 0})
    return admit(waiting, holders, capacity=capacity, quotas=quotas or {}, now=now, rules=rules)


def started(answers) -> list[str]:
    return [one.job_id for one in answers if isinstance(one, Start)]


def preempted(answers) -> list[str]:
    return [one.job_id for one in answers if isinstance(one, Preempt)]


# Owners


def test_owners_of_a_queue_take_turns_however_many_jobs_one_of_them_has():
    many = [job(f"a{n}", age=n, owner="a") for n in range(10)]
    few = [job(f"b{n}", age=50 + n, owner="b") for n in range(2)]
    assert started(decide([*many, *few])) == ["a0", "b0", "a1", "b1"]


def test_who_holds_less_already_comes_first():
    waiting = [job("a", age=1, owner="a"), job("b", age=2, owner="b")]
    assert started(decide(waiting, [holder("x", 3, owner="a")])) == ["b"]
    elsewhere = [holder("x", 2, owner="a", queue="other"), holder("y", 1, queue="other")]
    assert started(decide(waiting, elsewhere)) == ["a"], "what is held in another queue counts there"


def test_a_queue_gains_nothing_by_having_many_owners():
    one = [job(f"a{n}", age=2 * n, queue="one", owner="a") for n in range(6)]
    many = [job(f"b{n}", age=2 * n + 1, queue="many", owner=f"o{n}") for n in range(6)]
    assert started(decide([*many, *one])) == ["a0", "b0", "a1", "b1"]


def test_an_owner_who_waited_long_enough_has_the_next_turn():
    waiting = [job("a", age=1, owner="a"), job("b", age=50, owner="b")]
    held = [holder("x", 3, owner="a", since=30.0)]
    assert started(decide(waiting, held, rules=replace(RULES, patience_s=70.0))) == ["a"]
    assert started(decide(waiting, held, rules=replace(RULES, patience_s=71.0))) == ["b"]


def test_a_job_that_can_never_start_takes_no_turn_of_its_owner():
    waiting = [job("huge", 9, age=0, owner="a"), job("a", age=1, owner="a"), job("b", age=2, owner="b")]
    assert started(decide(waiting, [holder("x", 3)], rules=replace(RULES, patience_s=1.0))) == ["a"]


# Overtaking


def test_a_job_overtakes_where_it_ends_before_the_first_in_line_can_start():
    held = [holder("x", 3, until=200.0)]
    waiting = [job("large", 4, age=1), job("short", 1, age=2, longest_s=100.0)]
    assert started(decide(waiting, held)) == ["short"]
    waiting[1] = replace(waiting[1], longest_s=100.5)
    large, late = decide(waiting, held)
    assert (large.reason, late.reason) == ("WAITS_FOR_ACCELERATORS", "WAITS_BEHIND")
    assert "kept for job large" in late.message


def test_nothing_overtakes_a_job_whose_start_nobody_can_tell():
    waiting = [job("large", 4, age=1), job("short", 1, age=2, longest_s=1.0)]
    assert started(decide(waiting, [holder("x", 3)])) == []
    late = [holder("x", 3, until=99.0)]
    assert started(decide(waiting, late)) == [], "one that should have ended may hold on for ever"


def test_a_job_overtakes_on_what_the_first_in_line_leaves_over():
    waiting = [job("large", 3, age=1), job("endless", 1, age=2), job("more", 1, age=3)]
    assert started(decide(waiting, [holder("x", 2, until=200.0)], total=4)) == ["endless"]


def test_nobody_overtakes_a_second_in_line_either():
    held = [holder("x", 2, until=200.0)]
    waiting = [
        job("first", 4, age=1, longest_s=50.0),
        job("second", 3, age=2, longest_s=50.0),
        job("third", 2, age=3, longest_s=120.0),
    ]
    assert started(decide(waiting, held)) == [], "third would hold up first"
    assert started(decide([*waiting[1:]], held)) == [], "third would hold up second"
    assert started(decide([waiting[2]], held)) == ["third"]


def test_a_quota_is_kept_for_the_first_of_its_queue():
    held = [holder("x", 2)]
    waiting = [job("large", 3, age=1), job("small", 1, age=2), job("other", 1, age=3, queue="r")]
    answers = decide(waiting, held, quotas={"q": 4}, total=9)
    assert started(answers) == ["other"], "small ones would hold up large for ever"
    assert [one.reason for one in answers if isinstance(one, Wait)] == ["WAITS_FOR_QUOTA", "WAITS_BEHIND"]
    assert "kept for job large" in answers[1].message
    bounded = [replace(held[0], until=200.0)]
    waiting[1] = replace(waiting[1], longest_s=90.0)
    assert started(decide(waiting, bounded, quotas={"q": 4}, total=9)) == ["small", "other"]


def test_behind_so_many_promises_nobody_overtakes():
    held = [holder("x", 3, until=200.0)]
    line = [job(f"l{n}", 4, age=n, longest_s=10.0) for n in range(RESERVATION_LIMIT)]
    short = job("short", 1, age=10_000, longest_s=5.0)
    assert started(decide([*line, short], held)) == ["short"]
    more = job("one-more", 4, age=9_000, longest_s=10.0)
    assert started(decide([*line, more, short], held)) == []


# Giving way


def test_a_job_of_a_lower_priority_gives_way_the_lowest_and_latest_first():
    held = [
        holder("old", 1, priority=1, since=1.0),
        holder("new", 1, priority=1, since=2.0),
        holder("low", 1, priority=0, since=0.0),
        holder("same", 1, priority=2, since=9.0),
    ]
    answers = decide([job("urgent", 2, priority=2)], held)
    assert preempted(answers) == ["low", "new"] and started(answers) == []
    assert answers[1].message == "gives way to job urgent, whose priority 2 is above 0"


def test_nobody_gives_way_in_vain():
    held = [holder("low", 2), holder("same", 2, priority=5)]
    assert preempted(decide([job("urgent", 3, priority=5)], held)) == []
    assert preempted(decide([job("urgent", 2, priority=5)], held, rules=replace(RULES, preempts=False))) == []
    assert preempted(decide([job("urgent", 2, priority=5)], held)) == ["low"]


def test_nobody_gives_way_where_enough_comes_free_in_the_grace():
    soon = [holder("a", 2, until=109.0), holder("low", 2)]
    assert preempted(decide([job("urgent", 2, priority=5)], soon)) == []
    leaving = [holder("a", 2, until=110.0, stopping=True), holder("low", 2)]
    assert preempted(decide([job("urgent", 2, priority=5)], leaving)) == []
    assert preempted(decide([job("urgent", 4, priority=5)], leaving)) == ["low"]


def test_only_those_that_are_needed_give_way():
    held = [holder("one", 1, since=9.0), holder("three", 3, since=1.0)]
    assert preempted(decide([job("urgent", 3, priority=5)], held)) == ["three"]


def test_what_gives_way_to_one_is_not_given_to_another():
    held = [holder("low", 4)]
    answers = decide([job("u", 3, age=1, priority=5), job("v", 2, age=2, priority=5)], held)
    assert preempted(answers) == ["low"]
    leaving = [replace(held[0], stopping=True, until=110.0)]
    assert started(decide([job("u", 3, priority=5), job("w", 1, age=2, priority=4)], leaving, total=5)) == [
        "w"
    ]
    assert started(decide([job("u", 3, priority=5), job("w", 2, age=2, priority=4)], leaving, total=5)) == []


def test_a_full_quota_is_made_room_in_by_its_own_queue_only():
    held = [holder("mine", 2, priority=1), holder("theirs", 2, queue="r", priority=0)]
    answers = decide([job("urgent", 2, priority=5)], held, quotas={"q": 2}, total=8)
    assert preempted(answers) == ["mine"]


NLP = ProjectQueue("nlp", "q")


def test_a_project_without_quota_left_holds_up_its_own_jobs_only():
    """In its queue; in others, and for other projects, nothing is kept."""
    held = [holder("x", 2, project="nlp"), holder("y", 1)]
    waiting = [
        job("large", 3, age=1, project="nlp"),
        job("small", 1, age=2, project="nlp"),
        job("others", 1, age=3),
        job("elsewhere", 1, age=4, queue="r", project="nlp"),
    ]
    answers = decide(waiting, held, quotas={NLP: 4, "q": 9}, total=9)
    assert started(answers) == ["others", "elsewhere"], "small would hold up large for ever"
    large, small = (answer for answer in answers if isinstance(answer, Wait))
    assert large.reason == "WAITS_FOR_QUOTA"
    assert large.message == (
        "waits for 3 accelerators of project nlp in queue q; 2 of its quota of 4 free (job x uses 2)"
    )
    assert small.reason == "WAITS_BEHIND" and "kept for job large" in small.message
    assert started(decide(waiting, held, quotas={NLP: 5, "q": 9}, total=9)) == [
        "large",
        "others",
        "elsewhere",
    ]


def test_a_job_waits_for_the_quotas_of_its_project_and_of_its_queue():
    held = [holder("x", 2, project="nlp", until=150.0), holder("y", 2, until=130.0)]
    waiting = [job("both", 2, age=1, project="nlp", longest_s=50.0), job("short", 1, age=2, longest_s=20.0)]
    quotas = {NLP: 3, "q": 4}
    assert started(decide(waiting, held, quotas=quotas, total=9)) == [], "the queue's is used up"
    assert started(decide(waiting, held[:1], quotas=quotas, total=9)) == ["short"], "its project's is used up"
    assert started(decide(waiting, held[1:], quotas=quotas, total=9)) == ["both"]
    assert started(decide(waiting, [], quotas=quotas, total=9)) == ["both", "short"]


def test_a_job_above_the_whole_quota_of_its_project_says_what_raises_it_and_holds_nobody_up():
    answers = decide([job("large", 3, project="nlp"), job("small", 1, age=1, project="nlp")], quotas={NLP: 2})
    assert started(answers) == ["small"]
    (wait,) = (answer for answer in answers if isinstance(answer, Wait))
    assert "raise it by `slotline quota q NUMBER --project nlp`" in wait.message


def test_a_full_quota_of_a_project_is_made_room_in_by_its_own_jobs_only():
    held = [holder("mine", 2, priority=1, project="nlp"), holder("theirs", 2, priority=0)]
    answers = decide([job("urgent", 2, priority=5, project="nlp")], held, quotas={NLP: 2, "q": 8}, total=8)
    assert preempted(answers) == ["mine"]


def test_messages_name_no_job_that_members_of_their_project_do_not_see():
    """A job of another project is one of another project; those of the default one have names for everybody."""
    held = [holder("hidden", 2, project="vision", priority=1), holder("open", 1)]
    first, second = job("first", 3, age=1, project="vision"), job("second", 1, age=2, project="nlp")
    answers = decide([first, second], held, total=4, rules=replace(RULES, preempts=False))
    texts = {answer.job_id: answer.message for answer in answers}
    assert "job hidden uses 2" in texts["first"] and "job open uses 1" in texts["first"]
    assert texts["second"].endswith(
        "kept for a job of another project, which is before it; with max_duration it "
        "could start where it ends in time"
    )
    crowded = decide([replace(second, accelerators=2)], held, total=4)
    assert crowded[0].message.endswith("(job open uses 1, jobs of other projects use 2)")
    ends = decide([replace(second, accelerators=3, priority=5)], held, total=4)
    assert {end.job_id: end.message for end in ends if isinstance(end, Preempt)}["hidden"] == (
        "gives way to a job of another project, whose priority 5 is above 1"
    )


# Properties of one round


lengths = st.sampled_from([3.0, 10.0, 40.0, math.inf])
waiting_jobs = st.lists(
    st.builds(
        WaitingJob,
        id=st.uuids().map(str),
        queue=st.sampled_from(["q", "r"]),
        priority=st.integers(0, 2),
        queued_at=st.integers(0, 99).map(float),
        accelerators=st.integers(1, 6),
        device=st.sampled_from(["cpu", "cuda", "auto"]),
        owner=st.sampled_from("abc"),
        project=st.sampled_from(["default", "nlp"]),
        longest_s=lengths,
    ),
    max_size=9,
    unique_by=lambda one: one.id,
)
holding = st.lists(
    st.builds(
        Holder,
        job_id=st.uuids().map(str),
        queue=st.sampled_from(["q", "r"]),
        accelerators=st.integers(1, 3),
        device=st.sampled_from(["cpu", "cuda"]),
        owner=st.sampled_from("abc"),
        project=st.sampled_from(["default", "nlp"]),
        priority=st.integers(0, 2),
        since=st.integers(0, 99).map(float),
        until=lengths.map(lambda length: 100.0 + length),
        stopping=st.booleans(),
    ),
    max_size=5,
    unique_by=lambda one: one.job_id,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    waiting_jobs,
    holding,
    st.integers(0, 4),
    st.integers(0, 4),
    st.fixed_dictionaries({"q": st.none() | st.integers(0, 8), NLP: st.none() | st.integers(0, 6)}),
)
def test_never_over_quota_never_a_part_of_a_gang_and_nobody_ends_in_vain(waiting, held, cpu, cuda, quotas):
    """Whatever is held: what starts fits whole beside it, and who gives way has a lower priority than whom for."""
    of = {d: sum(one.accelerators for one in held if one.device == d) for d in ("cpu", "cuda")}
    capacity = Capacity({"cpu": of["cpu"] + cpu, "cuda": of["cuda"] + cuda})
    answers = admit(waiting, held, capacity=capacity, quotas=quotas, now=100.0, rules=RULES)
    known = {one.id: one for one in waiting}
    told = sorted(one.job_id for one in answers if not isinstance(one, Preempt))
    assert told == sorted(known), "one answer each"
    starts = [(known[one.job_id], one.device) for one in answers if isinstance(one, Start)]
    for device, free in (("cpu", cpu), ("cuda", cuda)):
        assert sum(one.accelerators for one, where in starts if where == device) <= free
    for bounded in (q := lambda one: one.queue == "q", lambda one: q(one) and one.project == "nlp"):
        quota = quotas["q" if bounded is q else NLP]
        used = sum(one.accelerators for one in held if bounded(one))
        new = sum(one.accelerators for one, _ in starts if bounded(one))
        assert quota is None or new == 0 or used + new <= quota
    running = {one.job_id: one for one in held}
    ends = preempted(answers)
    assert len(ends) == len(set(ends)) and not any(running[name].stopping for name in ends)
    for one in answers:
        if isinstance(one, Preempt):
            assert running[one.job_id].priority < known[one.for_job].priority
            assert one.for_job not in started(answers)
    if ends:  # when the grace is over the first of those that they gave way to starts
        left = [one for one in held if one.job_id not in ends]
        left += [
            holder(
                one.id,
                one.accelerators,
                queue=one.queue,
                device=device,
                until=100.0 + one.longest_s,
                project=one.project,
            )
            for one, device in starts
            if one.longest_s > 10.0
        ]
        still = [one for one in waiting if one.id not in started(answers)]
        later = admit(still, left, capacity=capacity, quotas=quotas, now=110.0, rules=RULES)
        best = max(
            (known[one.for_job] for one in answers if isinstance(one, Preempt)), key=lambda j: j.priority
        )
        alone = [one for one in still if one.priority >= best.priority] == [best]
        if alone and not any(one.stopping or one.until < 111.0 for one in held):
            assert best.id in started(later), "in vain"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 4)), max_size=30),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 4)), max_size=5),
    st.integers(1, 24),
)
def test_shares_of_owners_who_wait_are_fair_within_one_gang(line, held, free):
    """Who got a gang held no more, before it, than anybody has who is left waiting."""
    waiting = [job(f"j{n}", size, age=n, owner=owner) for n, (owner, size) in enumerate(line)]
    holders = [holder(f"h{n}", size, owner=owner) for n, (owner, size) in enumerate(held)]
    total = free + sum(size for _, size in held)
    answers = decide(waiting, holders, total=total)
    starts = set(started(answers))
    has = {o: sum(size for owner, size in held if owner == o) for o in "abcd"}
    for one in waiting:
        has[one.owner] += one.accelerators if one.id in starts else 0
    left = {one.owner for one in waiting if one.id not in starts and one.accelerators <= total}
    for owner in "abcd":
        gangs = [one.accelerators for one in waiting if one.owner == owner and one.id in starts]
        if gangs:
            assert all(has[owner] - gangs[-1] <= has[other] for other in left), (owner, has)


# Properties of whole runs


def run(
    jobs: Sequence[tuple[WaitingJob, float]],
    total: int,
    *,
    until: float = 10_000.0,
    newcomers: Callable[[float], list[tuple[WaitingJob, float]]] = lambda now: [],
    rules: QueueRules = RULES,
) -> dict[str, float]:
    """Simulated time in whole seconds: when each job, with the time that it runs for, started."""
    lasts = {one.id: length for one, length in jobs}
    waiting, running, starts, now = [one for one, _ in jobs], list[Holder](), dict[str, float](), 0.0
    ends = dict[str, float]()
    while now < until:
        running = [one for one in running if ends[one.job_id] > now]
        for one, length in newcomers(now):
            waiting.append(one)
            lasts[one.id] = length
        due = [one for one in waiting if one.queued_at <= now]
        for name in started(decide(due, running, total=total, now=now, rules=rules)):
            one = next(w for w in waiting if w.id == name)
            waiting.remove(one)
            starts[name], ends[name] = now, now + lasts[name]
            running.append(
                holder(name, one.accelerators, owner=one.owner, since=now, until=now + one.longest_s)
            )
        if not waiting and newcomers(now) == []:
            break
        now += 1.0
    return starts


def promised(line: Sequence[WaitingJob], total: int) -> dict[str, float]:
    """The reference: each job in line as early as it can be without moving those before it, second by second."""
    free = [total] * 2000
    begins = {}
    for one in line:
        length = int(one.longest_s)
        begin = next(t for t in range(2000) if all(f >= one.accelerators for f in free[t : t + length]))
        for t in range(begin, begin + length):
            free[t] -= one.accelerators
        begins[one.id] = float(begin)
    return begins


gangs = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 12)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(gangs)
def test_backfill_never_delays_a_job_that_it_overtakes(sizes):
    """Every job starts exactly when it would with nobody behind it: the reference never looks behind."""
    line = [job(f"j{n:02}", size, age=-100 + n, longest_s=float(s)) for n, (size, s) in enumerate(sizes)]
    starts = run([(one, one.longest_s) for one in line], total=5)
    assert starts == promised(line, total=5)
    for last in range(len(line)):
        assert promised(line[: last + 1], total=5)[line[last].id] == starts[line[last].id]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(gangs, st.data())
def test_the_first_in_line_starts_no_later_than_promised_where_others_end_early(sizes, data):
    line = [job(f"j{n:02}", size, age=-100 + n, longest_s=float(s)) for n, (size, s) in enumerate(sizes)]
    lasts = [data.draw(st.integers(1, int(one.longest_s))) for one in line]
    starts = run([(one, float(s)) for one, s in zip(line, lasts, strict=True)], total=5)
    at_limits = promised(line, total=5)
    blocked = next((one for one in line if at_limits[one.id] > 0), None)
    if blocked is not None:
        assert starts[blocked.id] <= at_limits[blocked.id]
    assert len(starts) == len(line), "every one starts"


@pytest.mark.parametrize(("size", "limited"), [(1, False), (6, False), (6, True), (7, True)])
def test_no_job_starves_though_new_owners_come_for_ever(size: int, limited: bool):
    """New owners hold nothing and go before who holds something: patience gives the old one its turn."""

    def newcomers(now: float) -> list[tuple[WaitingJob, float]]:
        return [
            (
                job(f"n{now:g}-{n}", 1, now, owner=f"o{now:g}-{n}", longest_s=5.0 if limited else math.inf),
                5.0,
            )
            for n in range(3)
        ]

    mine = [(job("long", 1, -2, owner="me"), 1e6), (job("mine", size, -1, owner="me"), 5.0)]
    patient = run(mine, 8, until=80.0, newcomers=newcomers, rules=replace(RULES, patience_s=40.0))
    assert patient["mine"] <= 40.0 + 6.0
    if size > 1:
        without = run(mine, 8, until=80.0, newcomers=newcomers, rules=replace(RULES, patience_s=1e9))
        assert "mine" not in without, "or this test shows nothing"


# Nodes that take no work


def test_accelerators_of_nodes_that_take_no_work_come_back_to_nobody():
    half_out = [holder("x", 6, left_out=4, until=200.0)]
    assert started(decide([job("a", 2)], half_out)) == ["a"], "x has two of the four that count"
    assert started(decide([job("a", 3)], half_out)) == []
    large, small = job("large", 4, age=1), job("small", 2, age=2, longest_s=50.0)
    assert started(decide([large, small], half_out)) == ["small"], (
        "large starts when x ends, and small is over then"
    )
    assert started(decide([large, replace(small, longest_s=500.0)], half_out)) == []


def test_a_job_on_nodes_that_take_no_work_gives_way_to_nobody():
    held = [holder("out", 4, left_out=4, since=50.0), holder("here", 4, since=10.0)]
    assert preempted(decide([job("urgent", 4, priority=5)], held)) == ["here"]


def test_a_job_that_would_fit_with_the_nodes_that_take_no_work_waits_for_them_and_holds_nobody_up():
    capacity = Capacity({"cpu": 8, "cuda": 0}, left_out={"cuda": 8}, marks=("n1 is draining (fan)",))
    waiting = [job("any", 8, age=1, device="auto"), job("small", 1, age=2, device="cpu")]
    wait, start = admit(waiting, [], capacity=capacity, quotas={}, now=100.0)
    assert (wait.job_id, wait.reason) == ("any", "WAITS_FOR_ACCELERATORS"), "auto goes on waiting for GPUs"
    assert "8 more on nodes that take none: n1 is draining (fan)" in wait.message
    assert start == Start("small", "cpu", 1)
    (too_small,) = admit([job("any", 9, device="cuda")], [], capacity=capacity, quotas={}, now=100.0)
    assert too_small.reason == "CLUSTER_TOO_SMALL"


# Elastic jobs


def elastic(name: str, *sizes: int, **changes) -> WaitingJob:
    """A job that takes any of these sizes, the most first."""
    return job(name, sizes[-1], **{"gangs": sizes, **changes})


def sizes(answers) -> dict[str, int]:
    return {one.job_id: one.accelerators for one in answers if isinstance(one, Start)}


@pytest.mark.parametrize(("held", "size"), [(0, 4), (1, 3), (2, 2), (3, None)])
def test_an_elastic_job_starts_with_as_many_as_are_free_and_never_with_fewer_than_its_least(held, size):
    answers = decide([elastic("e", 4, 3, 2)], [holder("x", held)] if held else [])
    assert sizes(answers) == ({} if size is None else {"e": size})
    if size is None:
        (wait,) = answers
        assert wait.reason == "WAITS_FOR_ACCELERATORS" and "waits for 2 accelerators" in wait.message


def test_whoever_comes_behind_an_elastic_job_gets_what_it_leaves():
    waiting = [job("first", 1, age=1), elastic("e", 6, 4, 2, age=2), job("last", 1, age=3)]
    assert sizes(decide(waiting, total=6)) == {"first": 1, "e": 4, "last": 1}
    assert sizes(decide(waiting, total=6, quotas={"q": 3})) == {"first": 1, "e": 2}


def test_a_cluster_that_holds_its_least_is_large_enough_for_an_elastic_job():
    assert sizes(decide([elastic("e", 8, 4)], total=4)) == {"e": 4}
    (wait,) = decide([elastic("e", 8, 5)], total=4)
    assert wait.reason == "CLUSTER_TOO_SMALL" and "needs 5 accelerators" in wait.message
    (wait,) = decide([elastic("e", 4, 3, patient=True)], [holder("x", 2)])
    assert (
        "waits for 3 accelerators" in wait.message
        and "within a minute of its end it goes on with fewer" in wait.message
    )


def test_an_elastic_job_grows_into_what_nobody_waits_for():
    running = holder("e", 2, larger=(4, 3))
    (grows,) = decide([], [running])
    assert (grows.job_id, grows.for_job) == ("e", "e") and "goes on with 4 accelerators" in grows.message
    (grows,) = decide([], [running, holder("x", 1)])
    assert "goes on with 3 accelerators, as 1 more than its 2 are free" in grows.message
    assert decide([], [running, holder("x", 2)]) == []
    assert decide([], [replace(running, stopping=True)]) == []
    assert decide([], [running], quotas={"q": 2}) == []


def test_no_job_grows_where_another_waits_for_accelerators_but_for_one_that_never_starts():
    running = holder("e", 2, larger=(4, 3))
    assert preempted(decide([job("w", 3)], [running])) == []
    assert preempted(decide([job("w", 1, not_before=200.0)], [running])) == [], "it starts in a moment"
    assert preempted(decide([job("w", 9)], [running])) == ["e"]
    assert preempted(decide([job("w", 3, queue="small")], [running], quotas={"small": 2})) == ["e"]
    answers = decide([job("w", 1)], [running])
    assert (started(answers), preempted(answers)) == (["w"], ["e"]), "one is left beside it"


def test_two_jobs_never_grow_into_the_same_accelerators():
    running = [holder("young", 1, larger=(3, 2), since=9.0), holder("old", 1, larger=(3, 2), since=5.0)]
    answers = decide([], running, total=5)
    assert [(one.job_id, one.message[:31]) for one in answers] == [
        ("old", "goes on with 3 accelerators, as"),
        ("young", "goes on with 2 accelerators, as"),
    ]
