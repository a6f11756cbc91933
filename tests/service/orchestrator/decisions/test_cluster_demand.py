"""The accelerators that a cluster must have in all for the gangs that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.orchestrator.decisions.attempt_lifecycle import AcceleratorKind, Capacity, Holder, WaitingJob
from service.orchestrator.decisions.cluster_demand import (
    GANGS_LIMIT,
    ClusterDemand,
    WaitingGang,
    cluster_demand,
)
from service.spec.principals import ProjectQueue

FOUR = Capacity({"cpu": 4, "cuda": 0})
CPU, CUDA = AcceleratorKind("cpu"), AcceleratorKind("cuda")


def waiting(
    job_id: str, accelerators: int, *, queue: str = "default", device: str = "cpu", **fields: Any
) -> WaitingJob:
    return WaitingJob(job_id, queue, 0, 0.0, accelerators, device, **fields)


def running(
    job_id: str, accelerators: int, *, queue: str = "default", device: str = "cpu", **fields: Any
) -> Holder:
    return Holder(job_id, queue, accelerators, device, **fields)


def demand(
    turns: Sequence[WaitingJob],
    holders: Sequence[Holder] = (),
    *,
    cluster: str = "default",
    capacity: Capacity = FOUR,
    others: Mapping[AcceleratorKind, int] | None = None,
    quotas: Mapping[Any, int | None] | None = None,
    ceilings: Mapping[Any, int] | None = None,
    starting: Sequence[str] = (),
) -> ClusterDemand:
    return cluster_demand(
        turns,
        holders,
        cluster=cluster,
        capacity=capacity,
        others=others or {},
        quotas=quotas or {},
        ceilings=ceilings or {},
        starting=starting,
    )


def jobs(found: ClusterDemand) -> list[str]:
    return [gang.job_id for gang in found.gangs]


def test_what_runs_is_part_of_the_demand_for_what_waits():
    found = demand([waiting("b", 4)], [running("a", 4)])
    assert found == ClusterDemand({CPU: 4}, (WaitingGang("b", CPU, 4),))
    assert found.totals == {CPU: 8}


def test_nothing_is_needed_where_nothing_waits():
    found = demand([], [running("a", 4)], others={CPU: 2})
    assert not found and found.totals == {}


def test_a_job_that_starts_keeps_what_was_asked_for_until_its_workers_hold_it():
    found = demand([], [running("a", 4), running("b", 2)], starting=["a"])
    assert found.totals == {CPU: 6} and found.gangs == ()


def test_a_start_changes_no_total():
    before = demand([waiting("b", 4)], [running("a", 4)])
    after = demand([], [running("a", 4), running("b", 4)], starting=["b"])
    assert before.totals == after.totals


def test_what_no_gang_gets_comes_on_top():
    holders = [running("a", 2, left_out=1)]  # one of its workers is on a node that takes no more work
    assert demand([waiting("b", 4)], holders, others={CPU: 8}).totals == {CPU: 4 + 1 + 8}


def test_only_devices_that_are_wanted_are_asked_for():
    found = demand([waiting("b", 4)], [running("a", 4, device="cuda")], others={CUDA: 1})
    assert found.totals == {CPU: 4}


def test_a_job_that_ends_leaves_its_accelerators_to_the_next():
    assert demand([waiting("b", 4)], [running("a", 4, stopping=True)]).totals == {CPU: 4}


def test_a_queue_asks_for_its_quota_at_most_and_in_order():
    turns = [waiting("a", 2, queue="small"), waiting("b", 4, queue="small"), waiting("c", 1, queue="small")]
    found = demand(turns, [running("r", 2, queue="small")], quotas={"small": 6})
    assert jobs(found) == ["a"]  # b would be above, and c does not overtake it


def test_a_job_above_the_whole_quota_holds_nobody_up():
    turns = [waiting("a", 8, queue="small"), waiting("b", 2, queue="small")]
    assert jobs(demand(turns, quotas={"small": 6})) == ["b"]


def test_behind_a_project_without_quota_left_others_of_its_queue_ask_for_theirs():
    nlp = {"queue": "small", "project": "nlp"}
    turns = [waiting("a", 4, **nlp), waiting("b", 1, **nlp), waiting("c", 4, queue="small")]
    holders = [running("r", 2, **nlp)]
    assert jobs(demand(turns, holders, quotas={ProjectQueue("nlp", "small"): 5})) == ["c"]
    assert jobs(demand(turns, holders, quotas={ProjectQueue("nlp", "small"): 5, "small": 5})) == []
    assert jobs(demand(turns, holders, quotas={ProjectQueue("nlp", "small"): 3})) == ["b", "c"], "never a"
    both_short = [turns[0], waiting("d", 1, queue="small")]
    assert jobs(demand(both_short, holders, quotas={ProjectQueue("nlp", "small"): 5, "small": 5})) == ["d"]


def test_what_a_queue_holds_on_another_cluster_counts_for_its_quota_alone():
    holders = [running("r", 4, queue="small", cluster="west")]
    assert jobs(demand([waiting("a", 4, queue="small")], holders, quotas={"small": 6})) == []
    assert demand([waiting("a", 4, queue="small")], holders, quotas={"small": 8}).totals == {CPU: 4}


def test_jobs_of_other_clusters_are_left_to_them():
    turns = [waiting("a", 4, cluster="west"), waiting("b", 4, began_on="west"), waiting("c", 4)]
    assert jobs(demand(turns)) == ["c"]
    assert jobs(demand(turns, cluster="west")) == ["a"]


def test_a_gang_above_the_ceiling_is_left_out_and_a_smaller_one_behind_it_is_not():
    turns = [waiting("a", 4), waiting("b", 2), waiting("c", 2)]
    found = demand(turns, [running("r", 4)], ceilings={CPU: 7})
    assert jobs(found) == ["b"] and found.totals == {CPU: 6}
    assert not demand(turns, [running("r", 4)], ceilings={CPU: 0})


def test_auto_means_gpus_where_there_are_enough_or_no_cpu_workers_either():
    def device(capacity: Capacity) -> str:
        return demand([waiting("a", 4, device="auto")], capacity=capacity).gangs[0].kind.device

    assert device(Capacity({"cpu": 4, "cuda": 4})) == "cuda"
    assert device(Capacity({"cpu": 4, "cuda": 2})) == "cpu"
    assert device(Capacity({"cpu": 0, "cuda": 0})) == "cuda"


def test_a_long_line_is_cut():
    turns = [waiting(f"job-{number}", 1) for number in range(GANGS_LIMIT + 3)]
    assert jobs(demand(turns)) == [job.id for job in turns[:GANGS_LIMIT]]


def test_a_cluster_is_to_grow_for_the_gangs_that_do_not_fit_into_what_it_has():
    found = demand([waiting("a", 2), waiting("b", 4), waiting("c", 1)], [running("r", 2)])
    assert [gang.job_id for gang in found.grown_for(FOUR)] == ["b", "c"]
    assert found.grown_for(Capacity({"cpu": 5}, left_out={"cpu": 4})) == []


H100, A100 = AcceleratorKind("cuda", "H100"), AcceleratorKind("cuda", "A100")
TYPED = Capacity({"cuda": 16}, types={"H100": Capacity({"cuda": 8}), "A100": Capacity({"cuda": 8})})


def test_what_is_held_counts_by_the_types_that_gangs_ask_for():
    holders = [
        running("h", 8, device="cuda", accelerator_type="H100"),
        running("a", 4, device="cuda", accelerator_type="A100"),
    ]
    typed = waiting("t", 8, device="cuda", accelerator_type="H100")
    found = demand([typed, waiting("u", 2, device="cuda")], holders, capacity=TYPED, others={A100: 1})
    assert found == ClusterDemand({H100: 8, CUDA: 5}, (WaitingGang("t", H100, 8), WaitingGang("u", CUDA, 2)))
    assert [gang.job_id for gang in found.grown_for(TYPED)] == ["t", "u"], "t grows it, and u comes behind"
    untyped = demand([waiting("u", 4, device="cuda")], holders, capacity=TYPED, others={A100: 1})
    assert untyped == ClusterDemand({CUDA: 13}, (WaitingGang("u", CUDA, 4),)), "as a cluster without types"


def test_a_gang_of_a_type_that_is_full_grows_the_cluster_though_others_are_free():
    typed = waiting("t", 4, device="auto", accelerator_type="H100")
    found = demand([typed], [running("h", 6, device="cuda", accelerator_type="H100")], capacity=TYPED)
    assert found.gangs == (WaitingGang("t", H100, 4),)
    assert found.grown_for(TYPED) == [WaitingGang("t", H100, 4)]
    fits = demand([typed], [running("a", 6, device="cuda", accelerator_type="A100")], capacity=TYPED)
    assert fits.gangs and fits.grown_for(TYPED) == []


def test_a_ceiling_is_of_one_type():
    turns = [waiting(name, 4, device="cuda", accelerator_type=name) for name in ("H100", "A100")]
    assert jobs(demand(turns, capacity=TYPED, ceilings={H100: 3})) == ["A100"]


gangs = st.tuples(st.integers(1, 16), st.sampled_from(["x", "y"]), st.sampled_from(["cpu", "cuda"]))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    turns=st.lists(gangs, max_size=12),
    holders=st.lists(st.tuples(gangs, st.booleans()), max_size=6),
    quotas=st.fixed_dictionaries({name: st.none() | st.integers(0, 40) for name in ("x", "y")}),
    ceilings=st.dictionaries(st.sampled_from([CPU, CUDA]), st.integers(0, 60)),
)
def test_no_demand_goes_beyond_quota_or_ceiling_and_none_is_less_than_what_runs(
    turns: list[Any], holders: list[Any], quotas: dict[str, int | None], ceilings: dict[AcceleratorKind, int]
):
    wait = [waiting(f"w{i}", n, queue=q, device=d) for i, (n, q, d) in enumerate(turns)]
    hold = [
        running(f"h{i}", n, queue=q, device=d, stopping=ends) for i, ((n, q, d), ends) in enumerate(holders)
    ]
    found = demand(wait, hold, quotas=quotas, ceilings=ceilings)
    asked = Counter[str]()
    for job in wait:
        if job.id in jobs(found):
            asked[job.queue] += job.accelerators
    for queue, quota in quotas.items():
        held = sum(holder.accelerators for holder in hold if holder.queue == queue)
        assert quota is None or not asked[queue] or asked[queue] + held <= quota
    for kind, total in found.totals.items():
        kept = sum(h.accelerators for h in hold if h.device == kind.device and not h.stopping)
        assert kept <= total <= ceilings.get(kind, total)
    assert jobs(found) == [job.id for job in wait if job.id in jobs(found)]
    if not ceilings:
        unbounded = {job.id for job in wait if quotas[job.queue] is None}
        assert unbounded <= set(jobs(found))
