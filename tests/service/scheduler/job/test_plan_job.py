"""The plan of a job from its own words and measurements: all that it leaves open, beside brute force."""

import itertools

import pytest

from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.partition import partition
from service.scheduler.job.plan_job import JobCosts, job_plan_json, plan_job
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import NetworkSpec
from tests.service.scheduler.job.test_joint import (
    PLACEMENTS,
    UPDATE,
    longest_update,
    measured,
    meshes,
    trained,
)
from worker.contract.job import Job, microbatch_counts
from worker.contract.profile import OptimizerState

NETWORK = {"contention": "link", "bandwidth_bytes_per_s": 1e6, "latency_s": 1e-4}


def job(**changes):
    return Job.from_json(
        {
            **{name: {"factory": "a:b"} for name in ("model", "data", "loss")},
            "training": {"global_batch": 6, "microbatches": "auto"},
            "pipeline": {"stages": "auto", **changes},
            "resources": {"meshes": 2},
        }
    )


def costs_of(profiles, **changes):
    request = {
        **changes,
        "profiles": [{"microbatches": n, "profile": profile.to_json()} for n, profile in profiles.items()],
        "network": NETWORK,
        "update": UPDATE.to_json(),
    }
    return JobCosts.from_json(request, job())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("schedule", ["auto", "1f1b", "gpipe"])
def test_microbatches_stages_placement_and_cut_of_a_job_are_those_of_brute_force(seed, schedule):
    counts = microbatch_counts(job())
    assert counts == (1, 2, 3, 6)
    profiles = {n: trained(measured(5, seed, microbatch=0.3 + 6 / n), seed) for n in counts}
    found = plan_job(job(schedule=schedule), costs_of(profiles), budget_s=10.0)
    best = float("inf")
    for count, profile in profiles.items():
        for stages in (2, 4) if schedule == "auto" else (2,):
            for placement in PLACEMENTS[stages, 2]:
                for borders in itertools.combinations(range(1, 5), stages - 1):
                    result = partition(
                        profile,
                        PipelineSetup(
                            meshes(2), NetworkSpec(**NETWORK), schedule=schedule, optimizer=OptimizerState()
                        ),
                        stages=stages,
                        cut=[f"l{i}" for i in (0, *borders)],
                        microbatches=count,
                        placement=placement,
                    )
                    behind = longest_update(
                        profile,
                        placement,
                        borders,
                        (UPDATE.reduce, UPDATE.step),
                        2,
                        lambda size: 2e-4 + size / 1e6,
                    )
                    behind += 2e-4  # the norm, over both meshes and back
                    best = min(best, make_plan(result.spec, budget_s=1.0).makespan_s + behind)
    assert found.step_s == pytest.approx(best, rel=1e-6)
    answer = job_plan_json(found)
    assert answer["step_s"] == answer["plan"]["makespan_s"] + answer["update_s"]
    assert answer["begins"] == found.partition.stage_starts


def test_where_the_engine_takes_long_for_an_action_fewer_and_larger_microbatches_are_chosen():
    profiles = {n: measured(5, 1, microbatch=6 / n) for n in (1, 2, 3, 6)}
    work_s = sum(layer.compute_s for layer in profiles[1].layers)
    chosen = []
    for action_s in (0.0, 0.02 * work_s, 0.2 * work_s):
        found = plan_job(job(), costs_of(profiles, action_s=action_s), budget_s=4.0)
        alone = {
            n: plan_job(job(), costs_of({n: profile}, action_s=action_s), budget_s=2.0).step_s
            for n, profile in profiles.items()
        }
        assert found.step_s == pytest.approx(min(alone.values()), rel=1e-6)
        chosen.append(found.partition.spec.microbatches)
    assert chosen[0] == 6 and chosen == sorted(chosen, reverse=True) and chosen[-1] < 6


def test_the_number_of_a_cut_by_hand_is_chosen_too():
    profiles = {n: trained(measured(5, 1, microbatch=0.3 + 6 / n), 1) for n in (1, 2, 3, 6)}
    found = plan_job(job(cut=["l0", "l2", "l4"]), costs_of(profiles), budget_s=4.0)
    alone = {
        n: plan_job(job(cut=["l0", "l2", "l4"]), costs_of({n: profile}), budget_s=2.0).step_s
        for n, profile in profiles.items()
    }
    assert found.partition.stage_starts == ["l0", "l2", "l4"]
    assert found.step_s == pytest.approx(min(alone.values()), rel=1e-6)
    assert max(alone.values()) > 1.1 * min(alone.values()), "the number matters here"


def test_many_microbatches_are_judged_by_few_and_the_choice_is_not_much_longer():
    """Judged by four and two a mesh, and prolonged; searched in full."""
    profiles = {n: measured(12, 3, microbatch=64 / n) for n in (2, 64)}
    found = plan_job(job(), costs_of(profiles), budget_s=3.0)
    assert found.partition.spec.microbatches == 64
    work = sum(x.forward_s + x.backward_input_s + x.backward_weight_s for x in profiles[64].layers)
    assert found.plan.makespan_s < 1.1 * 64 * work / 2
