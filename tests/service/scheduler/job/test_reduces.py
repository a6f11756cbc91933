"""Sums of gradients as slots of a plan: where they are placed, what they wait for, and what a plan may not say."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from service.scheduler.job.plan_job import JobCosts, job_plan_json, plan_job
from service.scheduler.job.reduces import MeshReduces, check_reduces, place_reduces, reduces_end_s
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.programs.decode import PlanError
from service.scheduler.views.render import render
from worker.contract.buckets import BUCKET_BYTES, Gradient, is_bucket
from worker.contract.costs import LinearCost, UpdateCosts
from worker.contract.job import Job
from worker.contract.planned import parse_planned_job, planned_seconds, planned_starts
from worker.contract.profile import LayerCost, LayerEdge, LayerProfile

MIB = 1 << 20


def spec_of(seed: int, contention: str, overlap: bool = True) -> PipelineSpec:
    """A chain of two stages a mesh on three meshes, with costs drawn from `seed`."""
    draw = random.Random(seed)
    stages = [
        {
            "name": f"s{k}",
            "mesh": f"m{k % 3}",
            "forward_s": draw.uniform(0.5, 2),
            "backward_input_s": draw.uniform(0.5, 2),
            "backward_weight_s": draw.uniform(0.5, 2),
            "activation_bytes": 1,
        }
        for k in range(6)
    ]
    edges = [
        {"source": f"s{k}", "target": f"s{k + 1}", "forward_s": 0.4, "backward_s": draw.uniform(0.2, 1.5)}
        for k in range(5)
    ]
    return PipelineSpec.model_validate(
        {
            "microbatches": 3,
            "meshes": [{"name": f"m{k}"} for k in range(3)],
            "stages": stages,
            "edges": edges,
            "network": {"contention": contention},
            "overlap": overlap,
            "schedule": "interleaved-1f1b",
        }
    )


def gradients(stages, size=20 * MIB, count=3):
    return [Gradient(f"{s}.{k}", (s,), size, "") for s in stages for k in range(count)]


def sums_of(spec, per_byte=1 / (100 * MIB), latency_s=0.01):
    numbers = {
        mesh.name: [k for k, s in enumerate(spec.stages) if s.mesh == mesh.name] for mesh in spec.meshes
    }
    return {
        name: MeshReduces(gradients(stages), lambda tensors, size: latency_s + size * per_byte)
        for name, stages in numbers.items()
        if name != "m1"
    }


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("contention", ["link", "full-duplex", "half-duplex"])
@pytest.mark.parametrize("seed", range(3))
def test_each_sum_begins_as_early_as_its_gradients_and_what_it_needs_allow(seed, contention, overlap):
    spec = spec_of(seed, contention, overlap)
    bare = make_plan(spec, budget_s=0.2)
    plan = place_reduces(spec, bare, sums_of(spec))
    assert plan.makespan_s == bare.makespan_s
    assert [slot for slot in plan.slots if slot.lane != "reduce"] == bare.slots
    assert plan.programs["m1"] == bare.programs["m1"]
    for mesh in ("m0", "m2"):
        here = [slot for slot in plan.slots if slot.mesh == mesh]
        reduces = [slot for slot in here if slot.lane == "reduce"]
        assert len(reduces) == 6 and all(slot.action == "REDUCE" for slot in reduces)
        transfers = [s for s in here if s.lane.startswith(("send:", "recv:"))]
        computes = [s for s in here if s.lane == "compute"]
        busy = {
            ("link", True): [],
            ("full-duplex", True): transfers,
            ("half-duplex", True): transfers,
        }.get((contention, overlap), transfers + computes)
        before_s = 0.0
        for slot in reduces:
            assert slot.end_s - slot.start_s == pytest.approx(0.01 + 0.2, rel=1e-9)
            made = max(s.end_s for s in computes if s.stage == slot.stage and s.action in ("B", "W"))
            # every instant at which it could have begun earlier is one at which something is in its way
            candidates = [made, before_s, *(s.end_s for s in busy)]
            length = slot.end_s - slot.start_s
            possible = [
                at
                for at in candidates
                if at >= max(made, before_s) - 1e-12
                and not any(s.start_s < at + length - 1e-9 and s.end_s > at + 1e-9 for s in busy)
            ]
            assert slot.start_s == pytest.approx(min(possible), rel=1e-9)
            before_s = slot.end_s
    assert reduces_end_s(plan) == max(slot.end_s for slot in plan.slots if slot.lane == "reduce")


def test_a_plan_without_sums_is_what_it_was_to_the_letter():
    spec = spec_of(0, "link")
    bare = make_plan(spec, budget_s=0.2)
    assert place_reduces(spec, bare, {}).model_dump_json() == bare.model_dump_json()


def test_gradients_share_buckets_as_the_engine_fills_them():
    spec = spec_of(1, "link")
    bare = make_plan(spec, budget_s=0.2)
    small = MeshReduces(
        gradients([0, 3], size=BUCKET_BYTES // 4, count=5), lambda tensors, size: 1e-3 * tensors
    )
    plan = place_reduces(spec, bare, {"m0": small})
    lengths = [s.end_s - s.start_s for s in plan.slots if s.lane == "reduce"]
    assert lengths == pytest.approx([4e-3, 1e-3, 4e-3, 1e-3])


def test_a_sum_that_transfers_delay_waits_for_them_in_its_program():
    spec = spec_of(2, "full-duplex")
    plan = place_reduces(spec, make_plan(spec, budget_s=0.2), sums_of(spec))
    program = plan.program("m0")
    recorded = {one.record: one for one in program if one.record is not None}
    waited = {recorded[e].lane.partition(":")[0] for one in program if is_bucket(one) for e in one.wait}
    assert "compute" in waited and waited & {"send", "recv"}


def test_planned_times_of_buckets_are_those_of_their_slots():
    spec = spec_of(0, "link")
    plan = place_reduces(spec, make_plan(spec, budget_s=0.2), sums_of(spec))
    names = [stage.name for stage in spec.stages]
    answer = plan.model_dump(mode="json")
    lengths, starts = planned_seconds(answer, names), planned_starts(answer, names)
    for mesh in ("m0", "m2"):
        places = [k for k, one in enumerate(plan.program(mesh)) if is_bucket(one)]
        slots = [slot for slot in plan.slots if slot.mesh == mesh and slot.lane == "reduce"]
        assert [starts[mesh][k] for k in places] == [slot.start_s for slot in slots]
        assert [lengths[mesh][k] for k in places] == [slot.end_s - slot.start_s for slot in slots]


@pytest.mark.parametrize("format", ["json", "chrome", "svg", "text", "csv"])
def test_every_view_takes_a_plan_with_sums(format):
    spec = spec_of(0, "link")
    plan = place_reduces(spec, make_plan(spec, budget_s=0.2), sums_of(spec))
    shown = render(spec, plan, format)
    if format in ("json", "chrome", "svg"):
        assert shown.count("REDUCE s0") == 3 or shown.count('"action":"REDUCE"') == 12


def without_wait(plan):
    def change(program):
        at = next(k for k, one in enumerate(program) if is_bucket(one))
        program[at] = replace(program[at], wait=())

    return change, "does not wait for the last backward of its stage"


def without_the_end(plan):
    def change(program):
        at = next(k for k, one in enumerate(program) if one.op == "REDUCE" and not is_bucket(one))
        program[at] = replace(program[at], wait=())

    return change, "could meet the sums of the mesh in different orders"


def a_send_behind_a_bucket(plan):
    def change(program):
        event = next(one.record for one in reversed(program) if is_bucket(one) and one.record is not None)
        at = next(k for k, one in enumerate(program) if one.op == "SEND_F")
        program[at] = replace(program[at], wait=(*program[at].wait, event))

    return change, "waits for a bucket, which waits for other workers"


@pytest.mark.parametrize("defect", [without_wait, without_the_end, a_send_behind_a_bucket])
def test_programs_that_could_meet_in_two_orders_are_no_plan(defect):
    spec = spec_of(0, "link")
    plan = place_reduces(spec, make_plan(spec, budget_s=0.2), sums_of(spec))
    check_reduces(spec, plan)
    change, said = defect(plan)
    program = list(plan.program("m0"))
    change(program)
    wrong = plan.model_copy(update={"programs": {**plan.programs, "m0": [one.to_json() for one in program]}})
    with pytest.raises(PlanError, match=said):
        check_reduces(spec, wrong)


@pytest.mark.parametrize(
    ("moved_s", "said"), [(-1e3, "is planned at"), (-1e-3, "overlap on their lane|is planned at|at one time")]
)
def test_slots_that_begin_too_early_are_no_plan(moved_s, said):
    spec = spec_of(0, "full-duplex")
    plan = place_reduces(spec, make_plan(spec, budget_s=0.2), sums_of(spec))
    at = max(k for k, slot in enumerate(plan.slots) if slot.lane == "reduce")
    slots = list(plan.slots)
    slots[at] = replace(slots[at], start_s=slots[at].start_s + moved_s, end_s=slots[at].end_s + moved_s)
    with pytest.raises(PlanError, match=said):
        check_reduces(spec, plan.model_copy(update={"slots": slots}))


def job_costs(sums: bool):
    layers = tuple(LayerCost(f"l{k}", 0.1, 0.1, 0.1, 1000, 0, 0, parameters=(f"w{k}", "tied")[: 1 + (k in (0, 3))])
                   for k in range(4))  # fmt: skip
    profile = LayerProfile(
        layers=layers,
        edges=tuple(LayerEdge(k, k + 1, f"t{k}", 1000, True, order=k) for k in range(3)),
        device_type="cpu",
        microbatch="[1]",
        parameter_sizes={**{f"w{k}": 10 * MIB for k in range(4)}, "tied": 2 * MIB},
        frozen_parameters=("w2",),
    )
    update = UpdateCosts(reduce=LinearCost(0.001, 0.0, 0.0), step=LinearCost(0.002, 0.0, 0.0))
    if sums:
        update = update.with_all_reduce(0.01, 100 * MIB)
    return {
        "profile": profile.to_json(),
        "microbatches": 4,
        "network": {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-5},
        "update": update.to_json(),
    }


def job():
    return Job.from_json(
        {
            "model": {"factory": "a:b"},
            "data": {"factory": "a:b"},
            "training": {"global_batch": 8, "microbatches": 4},
            "pipeline": {"stages": 4, "cut": ["l0", "l1", "l2", "l3"], "schedule": "interleaved-1f1b"},
            "resources": {"meshes": 2, "workers_per_mesh": 2},
        }
    )


def test_the_plan_of_a_job_has_its_sums_and_its_step_what_is_left_of_them():
    """Layers 0 and 2 on m0, 1 and 3 on m1: w2 is frozen, and `tied` is summed over both meshes first."""
    costs = JobCosts.from_json(job_costs(sums=True), job())
    found = plan_job(job(), costs, budget_s=0.2)
    reduces = [slot for slot in found.plan.slots if slot.lane == "reduce"]
    assert sorted((s.mesh, s.stage) for s in reduces) == [("m0", "s0"), ("m1", "s1"), ("m1", "s3")]
    assert [s.end_s - s.start_s for s in reduces] == pytest.approx([0.11] * 3)
    tail_s = max(s.end_s for s in reduces) - found.plan.makespan_s
    across_s = 2 * 2e-5 + 2 * MIB / 1e9  # of the norm and of `tied`, between the meshes
    assert [one.reduce_s for one in found.update] == pytest.approx([0.001 + 0.01 + 0.02 + across_s] * 2)
    assert found.step_s == pytest.approx(found.plan.makespan_s + max(tail_s, 0.0) + 0.031 + across_s + 0.002)
    answer = job_plan_json(found)
    assert parse_planned_job(answer).step_s == pytest.approx(found.step_s)
    # one sum behind everything takes longer
    behind = 0.001 + 0.01 + 0.22 + across_s + 0.002
    assert found.step_s < found.plan.makespan_s + behind


def test_a_driver_that_measured_no_sums_gets_the_plan_that_it_always_got():
    found = plan_job(job(), JobCosts.from_json(job_costs(sums=False), job()), budget_s=0.2)
    assert all(slot.lane != "reduce" for slot in found.plan.slots) and found.update_s is None
