"""Planning with costs as measurements make them: nothing has a common denominator, links and stages are unequal."""

import json

import pytest

from service.scheduler.auto.auto import plan_auto
from service.scheduler.auto.recomputation import may_recompute, with_recomputation
from service.scheduler.planner import make_plan
from service.scheduler.problem.problem import build_problem
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.search.exact import integer_durations
from tests.service.scheduler.checker import check_plan, run_programs
from tests.service.scheduler.specs import chain, measured


@pytest.mark.slow
@pytest.mark.parametrize("contention", ["link", "full-duplex", "half-duplex"])
@pytest.mark.parametrize(
    ("meshes", "microbatches", "options"),
    [(4, 8, {}), (4, 8, {"memory": 2.5}), (3, 6, {"loops": 2, "memory": 2.0}), (6, 12, {"skips": False})],
    ids=["skips", "memory", "looped", "chain"],
)
def test_a_measured_problem_is_planned_verified_and_checked(meshes, microbatches, options, contention):
    data = measured(meshes, microbatches, 17, contention=contention, **options)
    plan = make_plan(load_spec(data), budget_s=1.0)
    assert not plan.notes
    assert plan.programs_makespan_s == pytest.approx(plan.makespan_s, rel=1e-9)
    written = json.loads(plan.model_dump_json())
    check_plan(data, written)
    run_programs(data, written["programs"], seed=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("meshes", "microbatches", "memory"), [(20, 20, None), (24, 24, 10.0), (40, 64, None)]
)
def test_deep_measured_chains_are_planned_near_their_bound(meshes, microbatches, memory):
    plan = make_plan(load_spec(measured(meshes, microbatches, 5, memory=memory)), budget_s=1.0)
    assert not plan.notes
    assert plan.makespan_s <= 1.25 * plan.lower_bound_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("meshes", "microbatches", "memory"), [(4, 16, 2.4), (8, 32, 5.0), (20, 40, None), (20, 40, 12.0)]
)
def test_choices_of_recomputation_and_whole_backwards_share_the_budget_of_the_search(
    meshes, microbatches, memory
):
    spec = load_spec(measured(meshes, microbatches, 60, memory=memory, as_jobs=True))
    found = plan_auto(spec, 2.0, None)
    assert not found.notes
    assert found.spent_s <= 1.25 * 2.0  # what constructive plans cost may come beside
    for chosen in ((), may_recompute(spec)):
        other = plan_auto(with_recomputation(spec, chosen), 0.0, None)
        assert found.timeline.makespan <= other.timeline.makespan * (1 + 1e-9)


def test_the_scale_of_measured_durations_is_a_number_and_rounds_down():
    problem = build_problem(load_spec(measured(40, 64, 3)), split=True)
    scale, lengths = integer_durations(problem)
    assert 0 < scale < 1e15
    assert (lengths <= problem.duration * scale).all() and (lengths + 1 >= problem.duration * scale).all()


@pytest.mark.parametrize("unit", [1e-300, 1e-12, 1.0, 1e12, 1e290])
def test_durations_of_any_size_are_planned(unit):
    data = measured(3, 4, 2)
    data["network"] = {"contention": "link"}
    for stage in data["stages"]:
        for key in ("forward_s", "backward_input_s", "backward_weight_s"):
            stage[key] *= unit
    for edge in data["edges"]:
        edge["forward_s"], edge["backward_s"] = 0.003 * unit, 0.002 * unit
        del edge["forward_bytes"], edge["backward_bytes"]
    plan = make_plan(load_spec(data), budget_s=0.3)
    assert not plan.notes and plan.makespan_s >= plan.lower_bound_s > 0


@pytest.mark.parametrize(
    "limits", [{}, {"activation_limit_bytes": 8, "receive_buffer_limit": 2}], ids=["", "limits"]
)
@pytest.mark.parametrize("seconds", [3e-8, 1e-8, 1e-9, 1e-12, 1e-300])
@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_transfers_that_take_next_to_nothing_are_planned_as_they_will_run(schedule, seconds, limits):
    # one number between two stages of a second each: shorter than what counts as one instant so late in the step
    data = chain(4, 12, backward=2.0, transfer=seconds, schedule=schedule, split_backward=schedule == "auto")
    for mesh in data["meshes"]:
        mesh.update(limits)
    plan = make_plan(load_spec(data), budget_s=0.05)
    assert not plan.notes
    assert plan.programs_makespan_s == pytest.approx(plan.makespan_s, rel=1e-9)
    written = json.loads(plan.model_dump_json())
    check_plan(data, written)
    run_programs(data, written["programs"], seed=5)


def test_a_step_of_the_search_that_fails_costs_the_plan_nothing_but_its_own_gain(monkeypatch):
    from service.scheduler.problem import defects
    from service.scheduler.search import search

    def broken(*arguments, **options):
        raise OverflowError("integer division result too large for a float")

    monkeypatch.setattr(defects, "strict", False)
    monkeypatch.setattr(search.exact, "solve", broken)
    monkeypatch.setattr(search, "tabu_search", broken)
    data = measured(4, 8, 17, memory=2.5)
    plan = make_plan(load_spec(data), budget_s=0.5)
    check_plan(data, json.loads(plan.model_dump_json()))
    assert any("exact_search failed with OverflowError" in note for note in plan.notes)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_step_that_takes_no_time_at_all_is_planned():
    data = chain(
        3, 4, forward=0.0, backward=0.0, transfer=0.0, schedule="auto", split_backward=True, contention="link"
    )
    for mesh in data["meshes"]:
        mesh.update(memory_bytes=8, receive_buffer_limit=2)
    plan = make_plan(load_spec(data), budget_s=0.05)
    assert not plan.notes and plan.proven_optimal and plan.makespan_s == 0
