"""Clusters with several accelerator types: gangs of one type, types that jobs ask for, and nobody who starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.orchestrator.decisions.admission_and_preemption import admit
from service.orchestrator.decisions.attempt_lifecycle import (
    Capacity,
    Holder,
    Preempt,
    QueueRules,
    Start,
    Wait,
    WaitingJob,
    device_of,
)
from service.spec.principals import ProjectQueue
from worker.contract.reasons import Reason

RULES = QueueRules(preempts=True, grace_s=10.0, patience_s=1e9)


def cluster(left_out: Mapping[str | None, int] | None = None, **types: int) -> Capacity:
    """A cluster with these numbers of GPUs by type; `none` of nodes that tell no type."""
    without, marks = left_out or {}, ("b (draining)",)
    named = {None if name == "none" else name: number for name, number in types.items()}
    parts = {
        name: Capacity({"cuda": number}, left_out={"cuda": without.get(name, 0)}, marks=marks)
        for name, number in named.items()
    }
    return Capacity(
        {"cuda": sum(types.values()), "cpu": 0},
        left_out={"cuda": sum(without.values())},
        marks=marks,
        types=parts,
    )


def job(name: str, accelerators: int, age: float = 0.0, **changes: Any) -> WaitingJob:
    fields = {"queue": "q", "priority": 0, "queued_at": age, "device": "cuda"}
    return WaitingJob(name, accelerators=accelerators, **{**fields, **changes})


def holder(name: str, accelerators: int, accelerator_type: str | None, **changes: Any) -> Holder:
    return Holder(name, "q", accelerators, "cuda", accelerator_type=accelerator_type, **changes)


def decide(
    waiting: Sequence[WaitingJob], holders: Sequence[Holder] = (), *, on: Capacity
) -> list[Start | Wait | Preempt]:
    return admit(waiting, holders, capacity=on, quotas={}, now=100.0, rules=RULES)


def starts(answers: Sequence[Start | Wait | Preempt]) -> dict[str, str | None]:
    return {answer.job_id: answer.accelerator_type for answer in answers if isinstance(answer, Start)}


def wait_of(answers: Sequence[Start | Wait | Preempt], job_id: str) -> Wait:
    return next(answer for answer in answers if isinstance(answer, Wait) and answer.job_id == job_id)


def test_a_job_starts_on_the_type_that_it_asks_for_only():
    asks = job("a", 4, accelerator_type="H100")
    assert starts(decide([asks], on=cluster(A100=8, H100=4))) == {"a": "H100"}
    busy = decide([asks], [holder("x", 1, "H100")], on=cluster(A100=8, H100=4))
    assert wait_of(busy, "a").message == (
        "waits for 4 accelerators of GPU of type H100; 3 of 4 free (job x uses 1)"
    )
    assert wait_of(busy, "a").reason is Reason.WAITS_FOR_ACCELERATORS


def test_a_type_that_the_cluster_lacks_is_told_with_those_that_it_has():
    wait = wait_of(decide([job("a", 4, accelerator_type="h100")], on=cluster(A100=8, H100=4)), "a")
    assert wait.reason is Reason.CLUSTER_TOO_SMALL
    assert wait.message == (
        "needs 4 accelerators of GPU of type h100, all of one type; the cluster has 8 of A100, 4 of H100: add nodes, or "
        "submit with another resources.accelerator"
    )
    untyped = wait_of(decide([job("a", 4, accelerator_type="H100")], on=Capacity({"cuda": 8, "cpu": 0})), "a")
    assert "the cluster has 8 of no type" in untyped.message


def test_a_gang_is_not_mixed():
    on = cluster(A100=8, H100=8)
    held = [holder("x", 3, "A100"), holder("y", 4, "H100")]
    wait = wait_of(decide([job("a", 6)], held, on=on), "a")
    assert wait.reason is Reason.WAITS_FOR_ACCELERATORS
    assert wait.message == (
        "waits for 6 accelerators of GPU of one type; H100: 4 of 8 free, A100: 5 of 8 free (job y uses 4) (job x uses 3)"
    )
    too_large = wait_of(decide([job("a", 12)], on=on), "a")
    assert too_large.reason is Reason.CLUSTER_TOO_SMALL
    assert "all of one type; the cluster has 8 of A100, 8 of H100" in too_large.message


def test_a_job_that_asks_for_no_type_leaves_those_that_others_ask_for():
    on = cluster(A100=8, H100=8)
    waiting = [job("any", 4, age=1), job("typed", 8, age=2, accelerator_type="A100")]
    assert starts(decide(waiting, on=on)) == {"any": "H100", "typed": "A100"}


def test_a_small_job_takes_of_the_type_with_the_least_left():
    assert starts(decide([job("a", 2)], on=cluster(A100=8, H100=4))) == {"a": "H100"}
    assert starts(decide([job("a", 5)], on=cluster(A100=8, H100=4))) == {"a": "A100"}
    assert starts(decide([job("a", 2), job("b", 8, age=1)], on=cluster(A100=8, H100=8, none=2))) == {
        "a": None,
        "b": "A100",
    }


def test_jobs_that_wait_for_one_type_hold_up_nobody_on_another():
    on = cluster(A100=8, H100=8)
    waiting = [job("typed", 8, age=1, accelerator_type="H100"), job("any", 8, age=2), job("late", 1, age=3)]
    answers = decide(waiting, [holder("x", 4, "H100")], on=on)
    assert starts(answers) == {"any": "A100"}
    assert wait_of(answers, "late").reason is Reason.WAITS_BEHIND, "4 of H100 are free, and kept"
    assert "kept for job typed" in wait_of(answers, "late").message


def test_an_endless_line_of_jobs_without_a_type_starves_no_job_with_one():
    """Each round one job ends and two come that would take any type; the typed one needs all of its type at once."""
    on = cluster(A100=4, H100=4)
    held = [holder(f"h{n}", 1, "H100" if n < 4 else "A100") for n in range(8)]
    waiting = [job("typed", 4, age=0, accelerator_type="H100")]
    for number in range(30):
        waiting += [job(f"n{number}{which}", 1, age=1.0 + number) for which in "ab"]
        held = held[1:] if held else held
        answers = decide(waiting, held, on=on)
        started = starts(answers)
        held += [holder(name, 1, kind) for name, kind in started.items() if name != "typed"]
        waiting = [each for each in waiting if each.id not in started]
        if "typed" in started:
            break
    assert started["typed"] == "H100" and number == 3, "as soon as the four that held its type had ended"


def test_preemption_takes_holders_of_the_type():
    held = [holder("x", 4, "A100", priority=1), holder("y", 4, "H100", priority=2)]
    urgent = job("a", 4, priority=9, accelerator_type="H100")
    answers = decide([urgent], held, on=cluster(A100=4, H100=4))
    assert [answer.job_id for answer in answers if isinstance(answer, Preempt)] == ["y"]
    either = decide([replace(urgent, accelerator_type=None)], held, on=cluster(A100=4, H100=4))
    assert len([answer for answer in either if isinstance(answer, Preempt)]) == 1


def test_preemption_finds_the_type_whose_holders_may_be_preempted():
    held = [holder("x", 4, "A100", priority=9, until=150.0), holder("y", 4, "H100", priority=0)]
    answers = decide([job("a", 4, priority=5)], held, on=cluster(A100=4, H100=4))
    assert [answer.job_id for answer in answers if isinstance(answer, Preempt)] == ["y"]


def test_attempts_of_an_older_release_count_against_every_type():
    on = cluster(A100=4, H100=4)
    assert starts(decide([job("a", 2, accelerator_type="H100")], [holder("old", 3, None)], on=on)) == {}
    with_unknown = cluster(A100=4, H100=4, none=4)
    assert starts(
        decide([job("a", 2, accelerator_type="H100")], [holder("x", 3, None)], on=with_unknown)
    ) == {"a": "H100"}
    gone = decide([job("a", 4, accelerator_type="H100")], [holder("x", 4, "B200")], on=on)
    assert starts(gone) == {"a": "H100"}, "nodes of its type are gone"


def test_elastic_jobs_grow_within_their_type_where_none_waits_for_it():
    on = cluster(A100=4, H100=4)
    grows = holder("x", 2, "H100", larger=(4,))
    assert [answer.job_id for answer in decide([], [grows], on=on)] == ["x"]
    full = [grows, holder("y", 2, "H100")]
    assert decide([], full, on=on) == []
    waits = job("a", 4, accelerator_type="H100")
    assert not [answer for answer in decide([waits], [grows], on=on) if isinstance(answer, Preempt)]
    other = [holder("z", 1, "A100")]
    asks_other = job("a", 4, accelerator_type="A100")
    answers = decide([asks_other], [grows, *other], on=on)
    assert [answer.job_id for answer in answers if isinstance(answer, Preempt)] == ["x"]


def test_an_elastic_job_takes_its_largest_gang_of_one_type():
    elastic = job("a", 2, gangs=(6, 4, 2))
    on = cluster(A100=8, H100=8)
    answers = decide([elastic], [holder("x", 3, "A100"), holder("y", 6, "H100")], on=on)
    assert [(one.accelerators, one.accelerator_type) for one in answers if isinstance(one, Start)] == [
        (4, "A100")
    ]


def test_nodes_that_take_no_work_are_told_by_type():
    on = cluster({"H100": 4}, A100=8, H100=4)
    wait = wait_of(decide([job("a", 8, accelerator_type="H100")], on=on), "a")
    assert wait.reason is Reason.WAITS_FOR_ACCELERATORS
    assert "that take work have 4; 4 more on nodes that take none: b (draining)" in wait.message


@pytest.mark.parametrize(
    ("wanted", "accelerator_type", "device"),
    [("auto", "H100", "cuda"), ("auto", "EPYC", "cpu"), ("cpu", "H100", "cpu"), ("auto", "B200", "cuda")],
)
def test_auto_is_the_device_of_the_type(wanted: str, accelerator_type: str, device: str):
    parts = {"H100": Capacity({"cuda": 2}), "EPYC": Capacity({"cpu": 64})}
    whole = Capacity({"cuda": 2, "cpu": 64}, types=parts)
    assert device_of(wanted, 8, whole, accelerator_type=accelerator_type) == device


def test_auto_is_cuda_where_one_type_has_gpus_for_the_whole_gang():
    parts = {"H100": Capacity({"cuda": 4}), "A100": Capacity({"cuda": 4}), None: Capacity({"cpu": 64})}
    whole = Capacity({"cuda": 8, "cpu": 64}, types=parts)
    assert device_of("auto", 4, whole) == "cuda"
    assert device_of("auto", 8, whole) == "cpu"


sizes = st.integers(1, 6)
kinds = st.sampled_from(["A100", "H100"])
ends = st.sampled_from([float("inf"), 130.0, 200.0])


@st.composite
def snapshots(draw: st.DrawFn, types: st.SearchStrategy[Any]) -> tuple[list[WaitingJob], list[Holder]]:
    holders, used = [], Counter[str]()
    for n in range(draw(st.integers(0, 5))):
        size, kind = draw(sizes), draw(kinds)
        if used[kind] + size <= 8:
            used[kind] += size
            holders.append(
                holder(
                    f"h{n}", size, kind, until=draw(ends), priority=draw(st.integers(0, 2)), since=float(n)
                )
            )
    waiting = [
        job(
            f"w{n}",
            draw(sizes),
            age=float(n),
            accelerator_type=draw(types),
            priority=draw(st.integers(0, 2)),
            longest_s=draw(st.sampled_from([20.0, 60.0, float("inf")])),
        )
        for n in range(draw(st.integers(1, 8)))
    ]
    return waiting, holders


@settings(max_examples=300, deadline=None, derandomize=True)
@given(snapshots(st.none() | kinds))
def test_no_type_is_given_out_twice_and_no_job_gets_another_than_it_asks_for(snapshot):
    waiting, holders = snapshot
    answers = decide(waiting, holders, on=cluster(A100=8, H100=8))
    asked = {each.id: each.accelerator_type for each in waiting}
    taken = Counter(
        {
            kind: sum(h.accelerators for h in holders if h.accelerator_type == kind)
            for kind in ("A100", "H100")
        }
    )
    for answer in answers:
        if isinstance(answer, Start):
            taken[answer.accelerator_type] += answer.accelerators
            assert asked[answer.job_id] in (None, answer.accelerator_type)
    assert max(taken.values()) <= 8 and set(taken) == {"A100", "H100"}
    assert {answer.job_id for answer in answers if not isinstance(answer, Preempt)} == set(asked)


_FIELDS: dict[str, Sequence[Any]] = {
    "accelerators": (2, 5, 7, 12),
    "queue": ("q", "r"),
    "project": ("p", "default"),
    "device": ("cuda", "cpu", "auto"),
    "accelerator_type": (None, "H100", "V100"),
    "patient": (False, True),
    "began": (False, True),
    "not_before": (None, 101.0),
}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in _FIELDS.items()}),
    st.sampled_from(
        [None, cluster(H100=8), cluster(A100=4, H100=8), cluster({"H100": 4}, H100=8, none=2)],
    ),
)
def test_why_a_job_cannot_start_at_all_does_not_depend_on_who_else_waits(
    fields: dict[str, Any], on: Capacity | None
):
    """Among those that differ from a job in one field."""
    waiting = [fields, *({**fields, name: value} for name, values in _FIELDS.items() for value in values)]
    named = [job(f"j{number}", **each) for number, each in enumerate(waiting)]
    quotas = {"q": 6, ProjectQueue("p", "r"): 3}

    def answers_to(waiting: Sequence[WaitingJob]) -> dict[str, Start | Wait]:
        answers = admit(waiting, [], capacity=on, quotas=quotas, now=100.0, rules=RULES)
        return {answer.job_id: answer for answer in answers if not isinstance(answer, Preempt)}

    together = answers_to(named)
    for each in named:
        alone = answers_to([each])[each.id]
        if isinstance(alone, Wait):
            assert together[each.id] == alone


@settings(max_examples=200, deadline=None, derandomize=True)
@given(snapshots(st.none()))
def test_a_cluster_of_one_type_is_as_one_that_tells_none(snapshot):
    waiting, holders = snapshot
    alone = [replace(each, accelerator_type="H100") for each in holders]
    typed = decide(waiting, alone, on=cluster(H100=16))
    untyped = decide(
        waiting,
        [replace(each, accelerator_type=None) for each in holders],
        on=Capacity({"cuda": 16, "cpu": 0}),
    )
    assert [
        replace(one, accelerator_type=None) if isinstance(one, Start) else one for one in typed
    ] == untyped
    asking = decide([replace(each, accelerator_type="H100") for each in waiting], alone, on=cluster(H100=16))
    assert starts(asking) == starts(typed)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(snapshots(kinds))
def test_jobs_that_all_ask_are_decided_over_as_on_clusters_of_their_own(snapshot):
    """With every job typed and nobody to preempt, each type is a cluster of its own."""
    waiting, holders = snapshot
    rules = replace(RULES, preempts=False)

    def decided(jobs: Sequence[WaitingJob], held: Sequence[Holder], on: Capacity) -> dict[str, str | None]:
        return starts(admit(jobs, held, capacity=on, quotas={}, now=100.0, rules=rules))

    together = decided(waiting, holders, cluster(A100=8, H100=8))
    for kind in ("A100", "H100"):
        own = decided(
            [each for each in waiting if each.accelerator_type == kind],
            [each for each in holders if each.accelerator_type == kind],
            cluster(**{kind: 8}),
        )
        assert own == {name: each for name, each in together.items() if each == kind}
