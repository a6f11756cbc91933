"""Plans of single steps by the lengths of their microbatches: proved, within memory, and shorter than the job's own."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.scheduler.auto.fixed_schedule import named_timeline
from service.scheduler.job.plan_job import JobCosts, job_plan_json, plan_job, plan_steps
from service.scheduler.job.step_plans import LEAST_GAIN, StepPlanner
from service.scheduler.planner import make_plan
from service.scheduler.problem.problem import build_problem
from service.scheduler.problem.spec import SpecError
from service.scheduler.schedules.registry import SCHEDULES, fitting_names
from tests.service.scheduler.checker import check_plan, run_programs
from tests.service.scheduler.job.test_joint import UPDATE, measured, trained
from tests.service.scheduler.test_properties import examples
from worker.contract.costs import LinearCost
from worker.contract.job import Job
from worker.contract.planned import parse_planned_job, planned_peak_bytes

LENGTHS = (32, 64, 128, 256)
LAYERS, MESHES, COUNT = 6, 3, 8
NETWORK = {"contention": "link", "bandwidth_bytes_per_s": 1e6, "latency_s": 1e-4}


def job(workers=1, **pipeline):
    return Job.from_json(
        {
            **{name: {"factory": "a:b"} for name in ("model", "data", "loss")},
            "training": {"global_batch": 48, "microbatches": COUNT},
            "pipeline": {"stages": MESHES, **pipeline},
            "resources": {"meshes": MESHES, "workers_per_mesh": workers},
        }
    )


def profile_of(length, seed, parameters=True):
    profile = measured(LAYERS, seed, microbatch=length / LENGTHS[-1])
    return trained(profile, seed) if parameters else profile


def costs_of(seed, memory=None, noise=1.0, parameters=True):
    shorter = {length: profile_of(length, seed, parameters) for length in LENGTHS[:-1]}
    first = shorter[LENGTHS[0]]
    slower = [replace(layer, forward_s=noise * layer.forward_s) for layer in first.layers]
    shorter[LENGTHS[0]] = replace(first, layers=tuple(slower))
    return {
        "profile": profile_of(LENGTHS[-1], seed, parameters).to_json(),
        "length_profiles": [
            {"microbatches": COUNT, "length": n, "rows": 4, "profile": one.to_json()}
            for n, one in shorter.items()
        ],
        "network": NETWORK,
        "memory": [{"mesh": f"m{m}", "memory_bytes": memory} for m in range(MESHES)] if memory else [],
        "update": replace(UPDATE, sums=LinearCost(1e-4, 1e-5, 1e-9)).to_json(),
    }


def planned(seed, of=None, **options):
    of = of or job()
    costs = JobCosts.from_json(costs_of(seed, **options), of)
    answer = json.loads(json.dumps(job_plan_json(plan_job(of, costs, budget_s=0.0))))
    return of, costs, answer


def least_bytes(answer):
    """Memory in which every mesh has room for one of the longest microbatches and what it receives and sends."""
    spec = answer["spec"]
    largest = max(edge["forward_bytes"] for edge in spec["edges"])
    return max(stage["activation_bytes"] for stage in spec["stages"]) + 4 * largest


def steps(seed, count=4):
    """The buckets of the microbatches of some steps, by number."""
    draw = random.Random(seed)
    return [sorted(draw.randrange(len(LENGTHS)) for _ in range(COUNT)) for _ in range(count)]


@examples(15, 8)
@given(seed=st.integers(0, 10**6), room=st.sampled_from([None, 1.0, 1.15, 1.6]))
def test_a_step_has_a_plan_of_its_own_that_is_proved_within_memory_and_shorter(seed, room):
    of, costs, answer = planned(seed, parameters=room is None)
    if room is not None:
        of, costs, answer = planned(seed, memory=int(room * least_bytes(answer)), parameters=False)
    running = parse_planned_job(answer)
    planner = StepPlanner.from_json(answer["step_planner"])
    limits = {mesh["name"]: mesh["memory_bytes"] for mesh in answer["spec"]["meshes"]}
    for lengths, found in zip(steps(seed), plan_steps(of, costs, answer, steps(seed)), strict=True):
        by_job_plan_s = planner.makespan_by_job_plan(planner.spec_of(lengths))
        if found is None:
            continue
        found = json.loads(json.dumps(found))
        assert found["plan"]["makespan_s"] <= (1 - LEAST_GAIN) * by_job_plan_s
        check_plan(found["spec"], found["plan"])
        run_programs(found["spec"], found["plan"]["programs"], seed=1)
        of_step = parse_planned_job({**answer, **found})
        for mesh, peak in planned_peak_bytes(of_step.spec, of_step.plan).items():
            assert limits[mesh] is None or peak <= limits[mesh]
        assert of_step.mesh_of_stage == running.mesh_of_stage
        assert of_step.stage_starts == running.stage_starts and of_step.recomputed == running.recomputed


@examples(10, 5)
@given(seed=st.integers(0, 10**6))
def test_a_steps_plan_is_as_short_as_one_of_least_memory_and_holds_no_more_than_the_jobs_where_that_one_does_not(
    seed,
):
    _, _, answer = planned(seed)
    planner = StepPlanner.from_json(answer["step_planner"])
    job_bytes = [mesh["peak_memory_bytes"] for mesh in answer["plan"]["meshes"]]
    for lengths in steps(seed):
        if (found := planner.plan(lengths)) is None:
            continue
        least = make_plan(found[0], budget_s=0.0)
        assert found[1].makespan_s <= least.makespan_s * (1 + 1e-9)
        assert found[1].programs_makespan_s <= 1.005 * least.programs_makespan_s
        peaks = [[mesh.peak_memory_bytes for mesh in plan.meshes] for plan in (found[1], least)]
        if all(peak <= most for peak, most in zip(peaks[1], job_bytes, strict=True)):
            assert all(peak <= most for peak, most in zip(peaks[0], job_bytes, strict=True))


@pytest.mark.parametrize("split", [None, True, False])
def test_a_named_schedule_is_the_same_on_a_problem_that_was_built_for_another_form(split):
    _, _, answer = planned(4)
    planner = StepPlanner.from_json(answer["step_planner"])
    spec = planner.spec_of(steps(4)[0])
    built = build_problem(spec)
    form = spec.model_copy(update={"split_backward": split})
    tried = [name for name in fitting_names(form)[:-1] if not (split is False and SCHEDULES[name].splits)]
    assert {"gpipe", "1f1b", "eager-1f1b"} <= {*tried}
    for name in tried:
        anew, reused = named_timeline(form, name), named_timeline(form, name, built)
        assert reused.problem.spec == form and (reused.problem.fused == anew.problem.fused).all()
        assert (reused.start == anew.start).all() and (reused.sequence == anew.sequence).all()


def test_a_tensor_is_held_in_a_buffer_as_large_as_the_longest_microbatch_needs():
    _, _, answer = planned(3)
    spec = StepPlanner.from_json(answer["step_planner"]).spec
    sizes = [edge["forward_bytes"] for edge in answer["spec"]["edges"]]
    assert [edge.held_bytes for edge in spec.edges] == sizes
    for bucket in spec.length_buckets:
        assert [edge.held_bytes for edge in bucket.edges] == sizes
    seconds = [[edge.forward_s for edge in bucket.edges] for bucket in spec.length_buckets]
    assert all(a < b for short, long in itertools.pairwise(seconds) for a, b in zip(short, long, strict=True))


def test_where_memory_holds_few_of_the_longest_steps_of_shorter_ones_are_much_shorter():
    of = job(recompute="none")
    _, _, answer = planned(5, of, parameters=False)
    _, costs, answer = planned(5, of, memory=least_bytes(answer), parameters=False)
    lengths = [LENGTHS.index(length) for length in [32] * 4 + [64] * 3 + [256]]
    (found,) = plan_steps(of, costs, answer, [lengths])
    planner = StepPlanner.from_json(answer["step_planner"])
    assert found["plan"]["makespan_s"] < 0.85 * planner.makespan_by_job_plan(planner.spec_of(lengths))


def test_a_step_of_the_longest_alone_keeps_the_jobs_plan():
    of, costs, answer = planned(1)
    assert plan_steps(of, costs, answer, [[len(LENGTHS) - 1] * COUNT]) == [None]
    with pytest.raises(SpecError, match=f"in bucket {len(LENGTHS)}, and the job's plan knows 0 to"):
        plan_steps(of, costs, answer, [[len(LENGTHS)] * COUNT])


def test_where_workers_share_cores_that_decide_no_step_has_a_plan_of_its_own():
    of, costs, answer = planned(7)
    assert any(one is not None for one in plan_steps(of, costs, answer, steps(7)))
    few = JobCosts.from_json({**costs_of(7), "workers": workers_on_one_node(cores=1)}, of)
    assert plan_steps(of, few, answer, steps(7)) == [None] * len(steps(7))
    assert "step_planner" not in job_plan_json(plan_job(of, few, budget_s=0.0))
    many = JobCosts.from_json({**costs_of(7), "workers": workers_on_one_node(cores=8)}, of)
    assert plan_steps(of, many, answer, steps(7)) == plan_steps(of, costs, answer, steps(7))


def workers_on_one_node(cores):
    return [{"mesh": f"m{m}", "worker": 0, "node": "here", "cores": cores} for m in range(MESHES)]


def test_a_step_that_does_not_fit_without_a_search_and_lengths_with_other_layers_have_no_plans_of_their_own():
    of, costs, answer = planned(2)
    planner = answer["step_planner"]
    tight = {**planner["spec"], "meshes": [{"name": f"m{m}", "memory_bytes": 1} for m in range(MESHES)]}
    answer["step_planner"] = {**planner, "spec": tight}
    assert plan_steps(of, costs, answer, steps(2)) == [None] * len(steps(2))
    profile = profile_of(64, 2)
    others = replace(profile, layers=tuple(replace(layer, name=f"x{layer.name}") for layer in profile.layers))
    of_length = {"microbatches": COUNT, "length": 64, "rows": 4, "profile": others.to_json()}
    odd = {**costs_of(2), "length_profiles": [of_length]}
    assert "step_planner" not in job_plan_json(plan_job(of, JobCosts.from_json(odd, of), budget_s=0.0))


def test_a_shorter_microbatch_that_was_measured_slower_counts_as_the_longest():
    _, _, answer = planned(2, noise=100.0)
    spec = StepPlanner.from_json(answer["step_planner"]).spec
    assert [stage.forward_s for stage in spec.length_buckets[0].stages] == [
        stage.forward_s for stage in spec.stages
    ]


@pytest.mark.parametrize("method", ["all", "auto"])
def test_stages_that_recompute_do_so_at_every_length(method):
    of = job(recompute=method)
    _, _, answer = planned(4, of, parameters=False)
    _, costs, answer = planned(4, of, parameters=False, memory=int(1.2 * least_bytes(answer)))
    recomputed = parse_planned_job(answer).recomputed
    assert recomputed
    found = [one for one in plan_steps(of, costs, answer, steps(4)) if one is not None]
    assert found and all(parse_planned_job({**answer, **one}).recomputed == recomputed for one in found)
    spec = StepPlanner.from_json(answer["step_planner"]).spec
    for number in recomputed:
        before = answer["spec"]["stages"][number]
        for stage in (spec.stages[number], *(bucket.stages[number] for bucket in spec.length_buckets[-1:])):
            assert stage.backward_s == pytest.approx(before["backward_s"] + before["recompute"]["extra_s"])
            assert stage.activation_bytes == before["recompute"]["activation_bytes"]


def test_gradients_of_several_workers_are_summed_in_the_plan_of_a_step_too():
    of, costs, answer = planned(6, job(workers=2))
    found = next(one for one in plan_steps(of, costs, answer, steps(6)) if one is not None)
    lanes = {mesh: [i["lane"] for i in program] for mesh, program in answer["plan"]["programs"].items()}
    for mesh, program in found["plan"]["programs"].items():
        assert [i["lane"] for i in program].count("reduce") == lanes[mesh].count("reduce") > 0


@pytest.mark.parametrize(
    ("given", "says"), [({"schedule": "1f1b"}, "knows no costs"), ({}, "3 buckets are given for 8")]
)
def test_what_cannot_be_planned_is_refused(given, says):
    of, costs, answer = planned(1, job(**given))
    with pytest.raises(SpecError, match=says):
        plan_steps(of, costs, answer, [[32, 64, 256]])
