"""Costs of a running plan from measured steps: known costs are given back, and its programs take as long with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import fmean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import PipelineSpec, edge_costs
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.programs.plan import Plan
from service.scheduler.why import calibration
from service.scheduler.why.calibration import Calibration, calibrate
from service.scheduler.why.explain import explain
from service.scheduler.why.measured import measured_spec
from service.scheduler.why.step_graph import StepGraph
from tests.service.scheduler.specs import chain, measured
from tests.service.scheduler.why.simulation import RanSlot, World, makespan, planned_step, run

MODELS = {
    "skips": lambda: measured(4, 8, 1),
    "two stages a mesh": lambda: measured(2, 6, 2, loops=2),
    "split backwards": lambda: chain(4, 6, transfer=0.2, schedule="zb-h1", contention="link"),
    "even stages": lambda: chain(4, 8, transfer=0.2, schedule="1f1b", contention="link"),
    "one microbatch": lambda: measured(3, 1, 5, skips=False),
}


@cache
def planned(model: str) -> tuple[PipelineSpec, Plan]:
    spec = load_spec(MODELS[model]())
    return spec, make_plan(spec, budget_s=0.0)


def calibrated(model: str, steps: Sequence[Sequence[RanSlot]]) -> tuple[Calibration, StepGraph]:
    spec, plan = planned(model)
    found = calibrate(spec, planned_step(spec, plan).programs, plan.slots, steps)
    assert found is not None
    return found


FACTORS = st.floats(0.3, 4.0)


@settings(max_examples=10, deadline=None)
@given(
    model=st.sampled_from(sorted(MODELS)),
    meshes=st.lists(FACTORS, min_size=4, max_size=4),
    stage=FACTORS,
    link=FACTORS,
    late_s=st.floats(0.0, 0.005),
    disturbed=st.integers(0, 2),
)
def test_known_costs_are_given_back_whatever_some_of_the_steps_were_disturbed_by(
    model, meshes, stage, link, late_s, disturbed
):
    spec, plan = planned(model)
    world = World(
        meshes={f"m{number}": factor for number, factor in enumerate(meshes)},
        stages={"s1": stage},
        links={("m0", "m1"): link},
        late_s={"m1": late_s},
    )
    quiet = run(spec, plan, world)
    noisy = [run(spec, plan, World(noise=0.8, seed=seed)) for seed in range(disturbed)]
    found, _ = calibrated(model, [*noisy, quiet, quiet, quiet])
    stages, of_edge = {stage.name: stage for stage in spec.stages}, edge_costs(spec)
    for cost in found.costs:
        if cost.target is not None:
            planned_s = of_edge(cost.edge)[cost.action == "B"]
            factor = world.links.get((cost.mesh, cost.target), 1.0)
        else:
            of = stages[cost.stage]
            planned_s = {
                "F": of.forward_s,
                "B": of.whole_backward_s,
                "I": of.backward_input_s,
                "W": of.backward_weight_s,
            }[cost.action]
            factor = world.meshes[cost.mesh] * world.stages.get(cost.stage, 1.0)
            assert cost.late_s == pytest.approx(world.late_s.get(cost.mesh, 0.0), abs=1e-9)
        assert cost.seconds == pytest.approx(planned_s * factor, rel=1e-9)
        assert cost.spread_s == pytest.approx(0.0, abs=1e-9 * cost.seconds)
    kinds = {(s.mesh, s.action, s.stage) for s in plan.slots if s.lane == "compute"}
    assert {(cost.mesh, cost.action, cost.stage) for cost in found.costs if cost.target is None} == kinds


@pytest.mark.parametrize("model", MODELS)
def test_the_makespan_of_steps_without_noise_is_the_recorded_one(model):
    spec, plan = planned(model)
    slots = run(spec, plan, World(meshes={"m0": 1.7}, links={("m1", "m0"): 3.0}, late_s={"m1": 0.002}))
    found, usual = calibrated(model, [slots, slots])
    assert found.makespan_s == pytest.approx(makespan(slots), rel=1e-9)
    assert found.measured_makespan_s == pytest.approx(makespan(slots), rel=1e-9)
    assert usual.makespan_s == pytest.approx(makespan(slots), rel=1e-9)
    assert found.spread_s == 0.0 and found.steps == 2


@pytest.mark.parametrize("model", ["even stages", "split backwards"])
def test_where_costs_vary_the_makespan_has_the_waits_that_their_means_alone_do_not_cause(model):
    """Beside the median of other steps of the same world, which the calibrations have not seen."""
    spec, plan = planned(model)
    ran = [run(spec, plan, World(noise=0.4, seed=seed)) for seed in range(50)]
    found = [calibrated(model, ran[first : first + 5]) for first in range(0, 20, 5)]
    unseen_s = median(makespan(slots) for slots in ran[20:])
    assert fmean(each.makespan_s for each, _ in found) == pytest.approx(unseen_s, rel=0.05)
    assert fmean(usual.makespan_s for _, usual in found) < 0.95 * unseen_s


def test_the_makespan_is_the_mean_over_the_order_in_which_the_lengths_of_microbatches_might_have_come():
    """Two stages, forwards alone, transfers take no time: lengths 1, 3 and 5, 1 end after 7; 3, 1 and 1, 5 after 9."""
    spec = load_spec(chain(2, 2, transfer=0.0, schedule="inference", contention="link"))
    plan = make_plan(spec, budget_s=0.0)
    times = {"s0": [(0.0, 1.0), (1.0, 4.0)], "s1": [(1.0, 6.0), (6.0, 7.0)]}
    slots = []
    for slot in plan.slots:
        made_s = times["s0"][slot.microbatch][1]
        start_s, end_s = times[slot.stage][slot.microbatch] if slot.lane == "compute" else (made_s, made_s)
        slots.append(
            RanSlot(slot.mesh, slot.lane, slot.action, slot.stage, slot.microbatch, slot.edge, start_s, end_s)
        )
    found, _ = calibrate(spec, planned_step(spec, plan).programs, plan.slots, [slots])
    assert found.measured_makespan_s == pytest.approx(7.0)
    assert found.makespan_s == pytest.approx((7.0 + 9.0) / 2)


def test_reduce_and_step_are_costs_of_their_mesh_and_the_longest_stands_behind_the_makespan():
    spec, plan = planned("skips")
    slots = run(spec, plan, World())
    end_s = max(slot.end_s for slot in slots)
    update = [
        RanSlot("m0", "reduce", "REDUCE", None, None, None, end_s - 0.5, end_s + 0.25),
        RanSlot("m0", "compute", "STEP", None, None, None, end_s + 0.25, end_s + 1.0),
        RanSlot("m1", "compute", "STEP", None, None, None, end_s, end_s + 0.125),
    ]
    found, _ = calibrated("skips", [[*slots, *update]])
    behind = {
        (cost.mesh, cost.action): cost.seconds for cost in found.costs if cost.action in ("REDUCE", "STEP")
    }
    assert behind == pytest.approx({("m0", "REDUCE"): 0.75, ("m0", "STEP"): 0.75, ("m1", "STEP"): 0.125})
    assert found.update_s == pytest.approx(1.0)
    assert found.measured_makespan_s == pytest.approx(plan.makespan_s)


def test_steps_of_another_plan_are_left_out():
    spec, plan = planned("skips")
    slots = run(spec, plan, World())
    found, _ = calibrated("skips", [slots[:-1], slots])
    assert found.steps == 1
    assert calibrate(spec, planned_step(spec, plan).programs, plan.slots, [slots[:-1]]) is None
    assert calibrate(spec, planned_step(spec, plan).programs, plan.slots, []) is None


def test_a_long_plan_is_replayed_fewer_times(monkeypatch):
    spec, plan = planned("skips")
    steps = [run(spec, plan, World(noise=0.1, seed=seed)) for seed in range(2)]
    whole, usual = calibrated("skips", steps)
    replays = []
    replay = StepGraph.replay
    monkeypatch.setattr(StepGraph, "replay", lambda graph, *times: replays.append(1) or replay(graph, *times))
    calibrated("skips", steps)
    assert len(replays) == 2 + 2 * spec.microbatches, "each step as it was, and by each shift"
    replays.clear()
    monkeypatch.setattr(calibration, "_REPLAYED_TASKS", 2 * 5 * len(usual.tasks))
    found, _ = calibrated("skips", steps)
    assert len(replays) == 2 + 2 * 4
    assert found.makespan_s == pytest.approx(whole.makespan_s, rel=0.1)


def test_changes_are_planned_with_the_costs_of_all_measured_steps():
    spec, plan = planned("skips")
    usual = [run(spec, plan, World(meshes={"m2": 1.5}, noise=0.02, seed=seed)) for seed in range(4)]
    disturbed = run(spec, plan, World(meshes={"m1": 4.0}))
    found = explain(planned_step(spec, plan), disturbed, calibrated_by=[disturbed, *usual])
    assert found.causes[0].subject == "m1", "the causes are those of the step that was asked for"
    (faster,) = [change.subject for change in found.changes if change.kind == "faster mesh"]
    assert faster == "m2"
    assert found.calibrated is not None and found.calibrated.steps == 5
    assert "calibrated by 5 measured steps" in found.verdict
    alone = explain(planned_step(spec, plan), disturbed)
    assert [change.subject for change in alone.changes if change.kind == "faster mesh"] == ["m1"]
    assert "calibrated by 1 measured step it" in alone.verdict


def test_the_calibrated_step_gives_the_spec_its_costs():
    spec, plan = planned("two stages a mesh")
    _, usual = calibrated("two stages a mesh", [run(spec, plan, World(stages={"s1": 2.0}))])
    for before, after in zip(spec.stages, measured_spec(spec, usual).stages, strict=True):
        factor = 2.0 if before.name == "s1" else 1.0
        assert after.forward_s == pytest.approx(factor * before.forward_s)


@pytest.mark.parametrize(
    ("planned_s", "spread_s", "clearly"),
    [
        (0.97, 0.0, True),  # exactly 3 %
        (0.9701, 0.0, False),
        (0.90, 0.0999, True),
        (0.90, 0.1001, False),  # within what steps deviate
        (1.20, 0.0, False),
    ],
)
def test_a_plan_is_taken_for_three_percent_and_more_than_the_measured_steps_deviate(
    planned_s, spread_s, clearly
):
    assert calibration.is_clearly_shorter(planned_s, 1.0, spread_s=spread_s) == clearly
