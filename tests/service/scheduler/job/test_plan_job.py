"""The plan of a job from its own words and measurements: all that it leaves open, beside brute force."""

import itertools
import json
from dataclasses import asdict, replace

import pytest

from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.partition import partition
from service.scheduler.job.plan_job import (
    OFFLINE_SEARCH_SHARE,
    JobCosts,
    cut_notes,
    job_plan_json,
    plan_for_training,
    plan_job,
    replan_job,
)
from service.scheduler.job.saved_plan import PlanKey, saved_plan_answer
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import NetworkSpec, PipelineSpec, SpecError
from service.scheduler.why.measured import scale_meshes
from tests.service.scheduler.job.test_joint import (
    PLACEMENTS,
    UPDATE,
    longest_update,
    measured,
    meshes,
    trained,
)
from tests.tiers import some_by_day
from worker.contract.buckets import is_bucket
from worker.contract.job import Job, microbatch_counts
from worker.contract.profile import LayerEdge, OptimizerState
from worker.contract.program import program_from_json

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


@some_by_day("seed", range(2), by_day=1)
@some_by_day("schedule", ["auto", "1f1b", "gpipe"], by_day=1)
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


@pytest.mark.slow
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


@pytest.mark.parametrize("steps", [1, 1_000, 100_000])
def test_a_job_waits_for_a_search_no_longer_than_a_hundredth_of_what_it_trains(steps, monkeypatch):
    profiles = {n: trained(measured(6, 1, microbatch=0.01 + 0.06 / n), 1) for n in (2, 3)}
    budgets = []

    def watched(*arguments, budget_s, **options):
        budgets.append(budget_s)
        return plan_job(*arguments, budget_s=budget_s, **options)

    monkeypatch.setattr("service.scheduler.job.plan_job.plan_job", watched)
    trains = replace(job(), training=replace(job().training, steps=steps))
    found = plan_for_training(trains, costs_of(profiles), budget_s=1.5)
    constructive = plan_job(trains, costs_of(profiles), budget_s=0.0)
    assert found.score_s <= constructive.score_s
    assert budgets[0] == 0.0 and sum(budgets) <= min(1.5, 0.01 * steps * constructive.step_s)
    assert len(budgets) == (1 if steps == 1 else 2)
    budgets.clear()
    plan_for_training(trains, costs_of(profiles), budget_s=1.5, search_share=OFFLINE_SEARCH_SHARE)
    assert sum(budgets) == pytest.approx(min(1.5, 0.1 * steps * constructive.step_s)) or steps == 1


def test_a_named_schedule_with_a_given_cut_is_not_searched(monkeypatch):
    profiles = {2: measured(6, 1, microbatch=1.0)}
    trains = replace(job(schedule="1f1b", cut=["l0", "l3"]), training=replace(job().training, steps=100_000))
    found = plan_for_training(trains, costs_of(profiles), budget_s=5.0)
    budgets = []
    monkeypatch.setattr(
        "service.scheduler.job.plan_job.plan_job",
        lambda *_, budget_s, **__: budgets.append(budget_s) or found,
    )
    assert plan_for_training(trains, costs_of(profiles), budget_s=5.0) is found and budgets == [0.0]


def test_memory_that_only_a_search_keeps_within_is_searched_for_with_the_whole_budget(monkeypatch):
    budgets = []

    def fits_by_search(*_, budget_s, **__):
        budgets.append(budget_s)
        if budget_s == 0.0:
            raise SpecError("nothing fits")
        return "found"

    monkeypatch.setattr("service.scheduler.job.plan_job.plan_job", fits_by_search)
    assert plan_for_training(job(), costs_of({2: measured(4, 1, microbatch=1.0)}), budget_s=5.0) == "found"
    assert budgets == [0.0, 5.0]
    with pytest.raises(SpecError, match="nothing fits"):
        plan_for_training(job(), costs_of({2: measured(4, 1, microbatch=1.0)}), budget_s=0.0)
    assert budgets == [0.0, 5.0, 0.0], "without a search there is no second try"


def sized(parameters, sizes):
    """Layers of these parameters."""
    profile = measured(len(parameters), 0)
    layers = [
        replace(layer, parameters=names) for layer, names in zip(profile.layers, parameters, strict=True)
    ]
    return replace(profile, layers=tuple(layers), parameter_sizes=sizes)


def test_a_stage_without_parameters_and_one_with_nearly_all_are_noted_with_the_modules_that_are_the_reason():
    siamese = sized([("net", "own"), ("net",), (), ("head",)], {"net": 60, "own": 25, "head": 15})
    again, none = cut_notes(siamese, ["l0", "l1", "l2", "l3"])
    assert again.startswith("stage 1 (l1) has no parameters of its own: its modules are used several times")
    assert none.startswith("stage 2 (l2) has no parameters of its own: none of its modules has any")
    large = sized([("a",), ("b",), ("c",)], {"a": 20, "b": 9800, "c": 180})
    (note,) = cut_notes(large, ["l0", "l2"])
    assert note.startswith("stage 0 (l0 to l1) has 98% of all parameters: module 'l1' alone has 98%")
    (note,) = cut_notes(sized([("a",), ("b",), ("c",)], {"a": 49, "b": 49, "c": 2}), ["l0", "l2"])
    assert "the cut balances measured time" in note
    assert cut_notes(sized([("a",), ("b",), ("c",)], {"a": 50, "b": 30, "c": 20}), ["l0", "l1"]) == ()
    assert cut_notes(large, ["l0"]) == (), "one stage has everything"
    assert cut_notes(measured(3, 0), ["l0", "l1"]) == (), "nothing is known of parameters"


@pytest.mark.parametrize(("pipeline", "noted"), [({"stages": 2}, True), ({}, False)])
def test_a_plan_notes_its_stages_where_the_job_gives_their_number(pipeline, noted):
    profile = sized([("a",), ("a",), ("a",)], {"a": 100})
    read = job(**pipeline)
    read = replace(read, training=replace(read.training, microbatches=2))
    answer = job_plan_json(plan_job(read, costs_of({2: profile}), budget_s=0.1))
    assert any("stage 1" in note for note in answer["planning_notes"]) == noted


@pytest.mark.parametrize(
    ("training", "noted"),
    [
        ({"precision": "bf16"}, True),
        ({"precision": "fp16"}, True),
        ({"precision": "bf16", "transfers": "bf16"}, False),
        ({"precision": "fp32"}, False),
    ],
)
def test_a_plan_notes_what_goes_between_meshes_in_float32_where_the_job_computes_in_less(training, noted):
    """Once where several layers of a mesh use it; not what stays on its mesh, is narrow already, or has no gradient."""
    edges = [
        (0, 1, "stays", 4, True),
        (0, 2, "skip", 4, True),
        (0, 3, "skip", 4, True),
        (1, 2, "wide", 4, True),
        (1, 3, "narrow", 2, True),
        (1, 3, "mask", 4, False),
    ]
    profile = replace(
        measured(4, 0),
        edges=tuple(
            LayerEdge(source, target, name, 6 * wide, gradient, order=order, shape=(2, 3))
            for order, (source, target, name, wide, gradient) in enumerate(edges)
        ),
    )
    read = job(stages=2, cut=["l0", "l2"])
    read = replace(read, training=replace(read.training, microbatches=2, **training))
    notes = job_plan_json(plan_job(read, costs_of({2: profile}), budget_s=0.0))["planning_notes"]
    assert notes == (
        [
            f"2 of the tensors between meshes, 48 bytes a microbatch, are float32 under {training['precision']}: "
            "training.transfers: bf16 halves them and their gradients, and rounds both"
        ]
        if noted
        else []
    )


def test_a_running_job_is_planned_again_for_costs_that_changed_with_its_buckets_of_gradients():
    profile = trained(measured(6, 1, microbatch=1.0), 1)
    trains = Job.from_json(
        {
            **{name: {"factory": "a:b"} for name in ("model", "data", "loss")},
            "training": {"global_batch": 12, "microbatches": 6},
            "pipeline": {"stages": 3},
            "resources": {"meshes": 3, "workers_per_mesh": 2},
        }
    )
    sums = UPDATE.with_all_reduce(1e-4, 1e6)
    request = {"profile": profile.to_json(), "network": NETWORK, "update": sums.to_json()}
    costs = JobCosts.from_json(request, trains)
    running = json.loads(json.dumps(job_plan_json(plan_job(trains, costs, budget_s=0.0))))
    spec = scale_meshes(PipelineSpec.model_validate(running["spec"]), {"m2": 2.5}, {})
    found = replan_job(trains, costs, running, spec, budget_s=0.0)
    answer = json.loads(json.dumps(found.answer))
    assert answer["plan"]["makespan_s"] < found.running_s
    assert answer["begins"] == running["begins"] and answer["spec"] == spec.model_dump(mode="json")
    for mesh, program in answer["plan"]["programs"].items():
        before, after = (
            sum(is_bucket(item) for item in program_from_json(some))
            for some in (running["plan"]["programs"][mesh], program)
        )
        assert before == after > 0
    same = PipelineSpec.model_validate(answer["spec"])
    assert replan_job(trains, costs, answer, same, budget_s=0.0) is None


def selective_costs(products: int, memory_bytes: int) -> dict:
    """What a driver sends: layers whose products take `products` bytes, and meshes of so much memory."""
    layers = tuple(
        replace(
            layer,
            activation_bytes=1000,
            weight_stash_bytes=0,
            selective_s=layer.forward_s / 10,
            selective_bytes=products,
        )
        for layer in measured(4, 3).layers
    )
    profile = replace(measured(4, 3), layers=layers)
    return {
        "profiles": [{"microbatches": 6, "profile": profile.to_json()}],
        "network": NETWORK,
        "update": UPDATE.to_json(),
        "memory": [{"mesh": f"m{i}", "memory_bytes": memory_bytes} for i in range(2)],
    }


def test_a_saved_plan_keeps_the_way_in_which_its_stages_recompute_and_takes_the_bytes_of_now():
    spec = job(stages=2, cut=["l0", "l2"], schedule="gpipe")
    data = json.loads(json.dumps(asdict(spec)))
    memory = next(
        size
        for size in range(2000, 40_000, 500)
        for found in [planned_within(spec, selective_costs(300, size))]
        if found is not None and found.plan.stages[0].selective
    )
    before = planned_within(spec, selective_costs(300, memory))
    key = PlanKey.of(data, selective_costs(300, memory), 6)
    body = json.dumps(job_plan_json(before))
    answer = saved_plan_answer("mine", body, key, spec, selective_costs(310, memory + 1000))
    was, now = before.partition.spec.stages[0].recompute, answer["spec"]["stages"][0]["recompute"]
    assert was.selective and now["selective"] and now["extra_s"] == was.extra_s
    assert now["activation_bytes"] == was.activation_bytes + 2 * 10
    with pytest.raises(SpecError, match="the plan 'mine' cannot be used: it no longer fits"):
        saved_plan_answer("mine", body, key, spec, selective_costs(900, memory))


def planned_within(spec: Job, costs: dict):
    try:
        return plan_job(spec, JobCosts.from_json(costs, spec), budget_s=0.0)
    except SpecError:
        return None
