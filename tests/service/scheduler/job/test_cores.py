"""Workers that share processor cores: the plan takes as long as the cores need, by closed forms and a simulation."""

import heapq
from dataclasses import replace

import pytest

from service.scheduler.job.cores import (
    SharedCores,
    core_bound_step_s,
    nodes_with_shared_cores,
    processor_seconds,
    with_slower_actions,
)
from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.joint import JointSearchRequest, plan_jointly
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import MeshSpec, NetworkSpec, RecomputeSpec
from service.scheduler.problem.spec_checks import load_spec
from tests.service.scheduler.specs import chain
from worker.contract.profile import LayerCost, LayerEdge, LayerProfile


def profile(layers, *, seconds=0.001):
    """Equal layers in a chain with small tensors."""
    costs = [
        LayerCost(f"l{i}", seconds, seconds, seconds, 8, 4, 4, (f"p{i}",), (), 2 * seconds)
        for i in range(layers)
    ]
    edges = [LayerEdge(i, i + 1, f"t{i}", 4, True, i) for i in range(layers - 1)]
    sizes = {f"p{i}": 4 for i in range(layers)}
    return LayerProfile(tuple(costs), tuple(edges), "cpu", "", sizes)


def planned(cores, *, meshes=4, workers=1, layers=8, microbatches=8):
    nodes = nodes_with_shared_cores((f"m{i}", "n", cores) for i in range(meshes) for _ in range(workers))
    return plan_jointly(
        JointSearchRequest(
            {microbatches: profile(layers)},
            PipelineSetup(
                [MeshSpec(name=f"m{i}") for i in range(meshes)],
                NetworkSpec(contention="link", latency_s=1e-5),
            ),
            stages=[meshes],
            shared=nodes,
        ),
        budget_s=1.0,
    )


def test_with_a_core_for_each_worker_nothing_is_slowed():
    assert planned(4.0).slowdown == 1.0
    assert planned(4.0).plan.makespan_s == pytest.approx(planned(1000.0).plan.makespan_s)


@pytest.mark.parametrize("cores", [1.0, 2.0, 3.0])
def test_the_makespan_is_what_the_cores_need_or_what_the_pipeline_needs(cores):
    alone, shared = planned(4.0), planned(cores)
    needs = 8 * 8 * 0.003 / cores  # layers, microbatches, seconds
    assert shared.plan.makespan_s >= needs * (1 - 2e-3)
    assert shared.plan.makespan_s <= max(needs, alone.plan.makespan_s) * 1.05
    assert shared.slowdown == pytest.approx(max(1.0, needs / alone.plan.makespan_s), rel=0.05)


def test_two_workers_a_mesh_share_as_four_meshes_do():
    one, two = planned(1.0, meshes=2, workers=1), planned(1.0, meshes=2, workers=2)
    assert two.plan.makespan_s == pytest.approx(2 * one.plan.makespan_s, rel=0.05)


def test_a_balanced_cut_is_taken_also_where_the_cores_decide():
    assert planned(1.0).partition.stage_starts == ["l0", "l2", "l4", "l6"]


def processor_sharing(spec, plan, cores):
    """The step as workers on shared cores run it: all running actions go on at the same speed, in the plan's orders."""
    lanes = {}
    for slot in plan.slots:
        if slot.lane == "compute":
            lanes.setdefault(slot.mesh, []).append((slot.action, int(slot.stage[1:]), slot.microbatch))
    costs = {"F": "forward_s", "I": "backward_input_s", "W": "backward_weight_s"}
    stages, done, now = spec.stages, {}, 0.0
    left, arrivals = {}, []

    def seconds(action, stage):
        return stages[stage].whole_backward_s if action == "B" else getattr(stages[stage], costs[action])

    def ready(action, stage, m):
        if action == "F":
            return stage == 0 or done.get(("sent", stage - 1, m), 1e9) <= now
        if action == "W":
            return True
        return stage == len(stages) - 1 or done.get(("back", stage + 1, m), 1e9) <= now

    while any(lanes.values()) or left:
        for mesh, lane in lanes.items():
            if lane and mesh not in left and ready(*lane[0]):
                left[mesh] = [seconds(*lane[0][:2]), lane.pop(0)]
        speed = min(1.0, cores / len(left)) if left else 1.0
        ends = min((one[0] / speed for one in left.values()), default=float("inf"))
        step = min(ends, arrivals[0] - now if arrivals else float("inf"))
        assert step < float("inf"), "the orders do not fit together"
        now += step
        while arrivals and arrivals[0] <= now:
            heapq.heappop(arrivals)
        for mesh in list(left):
            left[mesh][0] -= step * speed
            if left[mesh][0] <= 1e-12:
                action, stage, m = left.pop(mesh)[1]
                if action != "W":
                    done["sent" if action == "F" else "back", stage, m] = now + 1e-5
                    heapq.heappush(arrivals, now + 1e-5)
    return now


@pytest.mark.parametrize("cores", [1.0, 2.0, 3.0])
def test_a_simulation_of_processor_sharing_agrees(cores):
    """Not the model of the plan: there every action is slowed alike, here only while others run."""
    shared = planned(cores)
    spec = with_slower_actions(shared.partition.spec, 1 / shared.slowdown)
    assert processor_sharing(spec, shared.plan, cores) == pytest.approx(shared.plan.makespan_s, rel=0.15)


@pytest.mark.slow
def test_where_the_cores_decide_backwards_run_in_the_way_that_takes_less_of_them():
    """Split ones fill the pipeline better and cost half as much again: with enough cores they win, on one core not."""

    def forms(cores):
        costs = profile(8)
        layers = tuple(replace(layer, backward_s=0.0014) for layer in costs.layers)
        nodes = nodes_with_shared_cores((f"m{i}", "n", cores) for i in range(4))
        found = plan_jointly(
            JointSearchRequest(
                {4: replace(costs, layers=layers)},
                PipelineSetup(
                    [MeshSpec(name=f"m{i}") for i in range(4)], NetworkSpec(contention="link", latency_s=1e-5)
                ),
                stages=[4],
                shared=nodes,
            ),
            budget_s=1.0,
        )
        return {slot.action for slot in found.plan.slots} & {"B", "I"}, found

    (split, alone), (whole, shared) = forms(4.0), forms(1.0)
    assert "I" in split and whole == {"B"}
    assert shared.plan.makespan_s == pytest.approx(8 * 4 * 0.0024, rel=0.02)
    assert alone.plan.makespan_s < shared.plan.makespan_s


def test_only_nodes_with_more_workers_than_cores_count():
    workers = [("m0", "a", 2.0), ("m1", "a", 2.0), ("m2", "b", 1.0), ("m3", "b", 1.0), ("m4", None, None)]
    assert nodes_with_shared_cores(workers) == [SharedCores({"m2": 1, "m3": 1}, 1.0)]
    assert core_bound_step_s({"m2": 3.0, "m3": 1.0}, nodes_with_shared_cores(workers)) == 4.0


def test_a_slowed_spec_keeps_its_transfers_and_its_processor_seconds_grow_by_the_factor():
    spec = load_spec(chain(3, 4, schedule="1f1b", contention="link", transfer=0.5))
    options = {
        "recompute": RecomputeSpec(activation_bytes=0, extra_s=0.5),
        "recompute_selectively": RecomputeSpec(activation_bytes=0, extra_s=0.125, selective=True),
        "recompute_by_block": RecomputeSpec(activation_bytes=0, extra_s=0.25, by_block=True),
    }
    spec = spec.model_copy(update={"stages": [stage.model_copy(update=options) for stage in spec.stages]})
    double = with_slower_actions(spec, 2.0)
    for stage in double.stages:
        assert (stage.recompute.extra_s, stage.recompute_selectively.extra_s) == (1.0, 0.25)
        assert stage.recompute_by_block.extra_s == 0.5
    assert double.edges == spec.edges
    assert processor_seconds(double) == {mesh: 2 * s for mesh, s in processor_seconds(spec).items()}
    assert make_plan(double).makespan_s < 2 * make_plan(spec).makespan_s
