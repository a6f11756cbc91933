"""Several clusters: each has its own queues and accelerators, and no decision about one looks at another's."""

from __future__ import annotations

from dataclasses import replace

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
)
from service.orchestrator.decisions.multi_cluster import admit_all_clusters, order_all_clusters
from worker.contract.reasons import Reason

RULES = QueueRules(preempts=True, grace_s=10.0, patience_s=1e9)
CLUSTERS = ("west", "east")


def job(name: str, cluster: str | None = "east", accelerators: int = 1, **changes) -> WaitingJob:
    fields = {"queue": f"q-{cluster}", "priority": 0, "queued_at": 0.0, "device": "cpu"}
    return WaitingJob(name, accelerators=accelerators, cluster=cluster, **{**fields, **changes})


def holder(name: str, cluster: str = "east", accelerators: int = 1, **changes) -> Holder:
    fields = {"queue": f"q-{cluster}", "accelerators": accelerators, "device": "cpu"}
    return Holder(name, cluster=cluster, **{**fields, **changes})


def decide(waiting, holders=(), *, quotas=None, east: int | None = 4, west: int | None = 4):
    totals = {"west": west, "east": east}
    capacities = {
        name: None if n is None else Capacity({"cpu": n, "cuda": 0}, {"cpu": 0}) for name, n in totals.items()
    }
    return admit_all_clusters(
        waiting, holders, capacities=capacities, quotas=quotas or {}, now=100.0, rules=RULES
    )


def by_job(answers) -> dict[str, Start | Wait]:
    return {one.job_id: one for one in answers if not isinstance(one, Preempt)}


places = st.sampled_from(CLUSTERS)
sizes = st.integers(1, 4)
waiting_jobs = st.lists(
    st.builds(
        lambda n, place, size, priority, owner, limit, second: job(
            f"j{n}",
            place,
            size,
            priority=priority,
            owner=owner,
            longest_s=limit,
            queued_at=float(n % 7),
            queue=f"q-{place}-{second}",
        ),
        st.integers(0, 10**6),
        places,
        sizes,
        st.integers(0, 2),
        st.sampled_from("ab"),
        st.sampled_from([20.0, 100.0, float("inf")]),
        st.integers(0, 1),
    ),
    max_size=12,
    unique_by=lambda one: one.id,
)
holding = st.lists(
    st.builds(
        lambda n, place, size, priority, until, second: holder(
            f"h{n}", place, size, priority=priority, until=until, queue=f"q-{place}-{second}"
        ),
        st.integers(0, 10**6),
        places,
        sizes,
        st.integers(0, 2),
        st.sampled_from([110.0, 300.0, float("inf")]),
        st.integers(0, 1),
    ),
    max_size=6,
    unique_by=lambda one: one.job_id,
)
free = st.integers(0, 6)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(waiting_jobs, holding, free, free, st.none() | st.integers(0, 8))
def test_a_job_neither_counts_nor_uses_the_accelerators_of_another_cluster(waiting, held, west, east, quota):
    """Each cluster's answers are those of a control plane that has this cluster alone; gangs fit there, and only those
    who are there give way."""
    has = {c: sum(one.accelerators for one in held if one.cluster == c) for c in CLUSTERS}
    totals = {"west": has["west"] + west, "east": has["east"] + east}
    quotas = {f"q-{c}-{n}": quota for c in CLUSTERS for n in (0, 1)}
    answers = decide(waiting, held, quotas=quotas, **totals)
    known = {one.id: one for one in waiting}
    where = {one.job_id: one.cluster for one in held}
    for cluster in CLUSTERS:
        alone = admit(
            [one for one in waiting if one.cluster == cluster],
            [one for one in held if one.cluster == cluster],
            capacity=Capacity({"cpu": totals[cluster], "cuda": 0}),
            quotas=quotas,
            now=100.0,
            rules=RULES,
        )
        here = [
            one
            for one in answers
            if known[one.for_job if isinstance(one, Preempt) else one.job_id].cluster == cluster
        ]
        assert [type(one) for one in here] == [type(one) for one in alone]
        assert [one.job_id for one in here] == [one.job_id for one in alone]
        starts = [known[one.job_id].accelerators for one in here if isinstance(one, Start)]
        assert sum(starts) <= totals[cluster] - has[cluster]
        assert {where[one.job_id] for one in here if isinstance(one, Preempt)} <= {cluster}
    assert sorted(by_job(answers)) == sorted(known), "one answer each"


def test_a_full_cluster_says_so_by_its_name_and_stops_nobody_elsewhere():
    waiting = [job("e"), job("big", accelerators=9), job("w", "west", 4)]
    answers = by_job(decide(waiting, [holder("h", accelerators=4)]))
    assert isinstance(answers["w"], Start)
    assert answers["e"].reason is Reason.WAITS_FOR_ACCELERATORS and "on cluster east" in answers["e"].message
    assert answers["big"].reason is Reason.CLUSTER_TOO_SMALL
    assert "the cluster east has 4" in answers["big"].message


def test_jobs_of_a_cluster_that_is_away_wait_for_it_by_name_and_others_start():
    answers = by_job(decide([job("e"), job("w", "west")], east=None))
    assert isinstance(answers["w"], Start)
    assert answers["e"].reason is Reason.WAITS_FOR_CLUSTER and "Ray cluster east" in answers["e"].message


def test_what_a_queue_holds_on_the_cluster_that_it_left_counts_for_its_quota_and_takes_no_room():
    """The queue moved from west to east in the settings while a job ran."""
    moved = holder("h", "west", 4, queue="q-east", priority=-1)
    answers = decide([job("e", accelerators=2)], [moved], quotas={"q-east": 8}, east=2)
    assert isinstance(by_job(answers)["e"], Start)
    over = decide([job("e", accelerators=2)], [replace(moved, priority=0)], quotas={"q-east": 5}, east=2)
    assert by_job(over)["e"].reason is Reason.WAITS_FOR_QUOTA


def test_one_that_began_elsewhere_waits_and_is_told_where_its_checkpoints_are():
    left = by_job(decide([job("e", began_on="west", began=True)]))["e"]
    assert left.reason is Reason.WAITS_FOR_CLUSTER
    assert "began on cluster west" in left.message and "move it to a queue of west" in left.message
    gone = by_job(decide([job("e", began_on="north", began=True)]))["e"]
    assert "there is no such cluster any more" in gone.message and "north" in gone.message


def test_one_whose_queue_is_not_configured_any_more_runs_nowhere():
    """Not on the default cluster: that may be another tenant's."""
    answer = by_job(decide([job("e", None, queue="gone")]))["e"]
    assert (
        answer.reason is Reason.WAITS_FOR_CLUSTER and "queue gone is not in SLOTLINE_QUEUES" in answer.message
    )


def test_turns_are_those_of_each_cluster():
    """The owner who holds much on west is first on east."""
    waiting = [job("a", owner="a", queue="q"), job("b", owner="b", queue="q", queued_at=1.0)]
    held = [holder("h", "west", 4, owner="a", queue="q")]
    line = order_all_clusters(waiting, held, capacities={}, now=100.0, patience_s=1e9)
    assert [one.id for one in line] == ["a", "b"]
    here = [replace(held[0], cluster="east")]
    line = order_all_clusters(waiting, here, capacities={}, now=100.0, patience_s=1e9)
    assert [one.id for one in line] == ["b", "a"]
