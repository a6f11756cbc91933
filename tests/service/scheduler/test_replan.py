"""Plans for costs that changed while a plan runs: beside a simulation of the running programs, and the checker."""

import json

import pytest

from service.scheduler.auto.auto import plan_from_running
from service.scheduler.auto.recomputation import with_recomputation
from service.scheduler.planner import make_plan, replan
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.programs.decode import PlanError, read_programs
from service.scheduler.programs.replay import replay
from service.scheduler.why.measured import scale_meshes
from tests.service.scheduler.checker import check_plan, run_programs
from tests.service.scheduler.specs import chain, measured
from tests.service.scheduler.why.simulation import World, makespan, run
from tests.tiers import some_by_day


def programs_of(plan):
    return {mesh: plan.program(mesh) for mesh in plan.programs}


def recomputed_of(plan):
    return [stage.name for stage in plan.stages if stage.recomputed]


@some_by_day("contention", ["link", "half-duplex"], by_day=1)
@pytest.mark.parametrize("options", [{"memory": 2.5}, {"memory": 2.4, "as_jobs": True}])
def test_a_mesh_that_became_slow_is_planned_around(options, contention):
    spec = load_spec(measured(3, 5, 17, contention=contention, **options))
    running = make_plan(spec, budget_s=0.0)
    now = scale_meshes(spec, {"m1": 2.5}, {})
    shorter = replan(now, programs_of(running), recomputed=recomputed_of(running), budget_s=0.0)
    slowed_s = makespan(run(spec, running, World(meshes={"m1": 2.5})))
    assert shorter.running_s == pytest.approx(slowed_s, rel=1e-9)
    assert shorter.plan.makespan_s < shorter.running_s
    assert shorter.plan.lower_bound_s <= shorter.plan.makespan_s <= make_plan(now, budget_s=0.0).makespan_s
    decided = json.loads(with_recomputation(now, recomputed_of(shorter.plan)).model_dump_json())
    written = json.loads(shorter.plan.model_dump_json())
    check_plan(decided, written)
    run_programs(decided, written["programs"], seed=3)


def test_the_search_starts_from_the_running_order():
    """Constructive plans alone are longer than the order that runs."""
    spec = load_spec(measured(4, 8, 17, memory=2.5, contention="full-duplex"))
    running = make_plan(spec, budget_s=0.5)
    assert running.makespan_s < make_plan(spec, budget_s=0.0).makespan_s
    assert replan(spec, programs_of(running), budget_s=0.0) is None
    problem, meshes = read_programs(spec, programs_of(running))
    found = plan_from_running(spec, replay(problem, meshes).timeline, frozenset(), 0.0, None)
    assert found.timeline.makespan == pytest.approx(running.makespan_s, rel=1e-9)


def test_a_named_schedule_keeps_its_order_of_actions_and_only_its_transfers_move():
    spec = load_spec(chain(4, 8, schedule="1f1b", contention="half-duplex", skips=((0, 3),)))
    running = make_plan(spec, budget_s=0.0)
    now = scale_meshes(spec, {"m0": 3.0, "m2": 2.0}, {})
    shorter = replan(now, programs_of(running), budget_s=0.1)
    assert shorter.plan.makespan_s < shorter.running_s
    for mesh in running.programs:
        before, after = (
            [(i.op, i.stage, i.microbatch) for i in plan.program(mesh) if i.lane == "compute"]
            for plan in (running, shorter.plan)
        )
        assert before == after


def test_programs_of_another_pipeline_are_refused():
    running = make_plan(load_spec(chain(3, 4, schedule="auto")), budget_s=0.0)
    with pytest.raises(PlanError, match="never runs"):
        replan(load_spec(chain(3, 5, schedule="auto")), programs_of(running), budget_s=0.0)
