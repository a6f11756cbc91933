"""Planning problems with proven optima: auto reaches and proves every one, the same way each time."""

import json

import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.memory import keeps_activation_limits
from service.scheduler.problem.problem import build_problem
from service.scheduler.problem.spec import SpecError
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.schedules.registry import SCHEDULES
from service.scheduler.search.bounds import lower_bound, lower_bounds
from service.scheduler.search.large_neighbourhoods import large_neighbourhood_search
from service.scheduler.search.search import search
from tests.missing import needs
from tests.service.scheduler.checker import check_plan, run_programs
from tests.service.scheduler.specs import SHARED, chain
from tests.tiers import some_by_day

CASES_FILE = SHARED / "cases" / "plans.json"
CASES = json.loads(CASES_FILE.read_text())["cases"] if CASES_FILE.exists() else []

needs_cases = needs(CASES_FILE, "the shared folder beside the checkout has the cases")


@needs_cases
@some_by_day("case", CASES, ids=[case["name"] for case in CASES], by_day=8)
def test_auto_proves_the_optimum_within_the_default_budget(case):
    plan = make_plan(load_spec(case["spec"]))
    assert plan.makespan_s == pytest.approx(case["optimum"], rel=1e-9)
    assert plan.lower_bound_s == pytest.approx(case["optimum"], rel=1e-9)
    # with contention none transfers of one pair may overlap in the plan, not in its programs: in two of the cases
    # those take longer, and a plan that is not what runs is not called proven
    assert plan.proven_optimal == (plan.programs_makespan_s == pytest.approx(plan.makespan_s, rel=1e-9))
    assert plan.proven_optimal or case["spec"]["network"]["contention"] == "none"
    check_plan(case["spec"], json.loads(plan.model_dump_json()))
    run_programs(case["spec"], plan.programs, seed=3)


@needs_cases
def test_no_bound_is_above_a_proven_optimum_and_together_they_reach_the_listed_bound():
    for case in CASES:
        bounds = lower_bounds(build_problem(load_spec(case["spec"])))
        for name, bound in bounds.items():
            assert bound <= case["optimum"] * (1 + 1e-9), (case["name"], name)
        assert max(bounds.values()) >= case["lower_bound"] * (1 - 1e-9), case["name"]


def tight(stages, microbatches, memory, **fields):
    data = chain(stages, microbatches, schedule="auto", contention="none", split_backward=True, **fields)
    for mesh in data["meshes"]:
        mesh["activation_limit_bytes"] = memory
    return data


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        tight(6, 9, 8, transfer=0.3),
        tight(4, 8, 6, transfer=1 / 3),
        chain(5, 7, schedule="auto", transfer=2.0),
    ],
    ids=["decimal costs", "thirds", "contention"],
)
def test_the_same_spec_gives_the_same_plan_byte_for_byte(data):
    first = make_plan(load_spec(data), budget_s=3).model_dump_json()
    assert make_plan(load_spec(data), budget_s=3).model_dump_json() == first
    # whatever was planned in between
    make_plan(load_spec(tight(3, 5, 6)), budget_s=1)
    assert make_plan(load_spec(data), budget_s=3).model_dump_json() == first


@pytest.mark.parametrize("scale", [1.0, 0.1, 1 / 3, 0.000123456789, 7e6])
def test_the_optimum_scales_with_the_costs(scale):
    data = tight(4, 6, 6, transfer=0.5)
    for stage in data["stages"]:
        for cost in ("forward_s", "backward_input_s", "backward_weight_s"):
            stage[cost] *= scale
    for edge in data["edges"]:
        edge.update(forward_s=edge["forward_s"] * scale, backward_s=edge["backward_s"] * scale)
    plan = make_plan(load_spec(data))
    assert plan.proven_optimal
    assert plan.makespan_s / scale == pytest.approx(
        make_plan(load_spec(tight(4, 6, 6, transfer=0.5))).makespan_s
    )


@pytest.mark.slow
def test_a_deep_v_with_skips_reaches_its_bound():
    folded = [min(s, 15 - s) for s in range(16)]
    skips = tuple((s, 15 - s) for s in range(7))
    data = chain(16, 8, meshes=folded, skips=skips, contention="none", schedule="auto", split_backward=True)
    for stage in data["stages"]:
        stage.update(
            forward_s=10, backward_input_s=10, backward_weight_s=10, activation_bytes=4, weight_stash_bytes=2
        )
    for index, edge in enumerate(data["edges"]):
        edge.update(forward_s=2 if index < 15 else 4, backward_s=2 if index < 15 else 4)
    for mesh in data["meshes"]:
        mesh["activation_limit_bytes"] = 64
    plan = make_plan(load_spec(data))
    # the fullest mesh works 480 s; the first backward and the way out add the rest: no plan is shorter
    assert plan.makespan_s == pytest.approx(lower_bound(build_problem(load_spec(data))))


def test_the_receive_buffers_are_part_of_what_is_proven():
    data = chain(3, 4, schedule="auto", contention="none", transfer=2.0, split_backward=True)
    free = make_plan(load_spec(data))
    assert max(mesh.peak_receive_buffers for mesh in free.meshes) > 1
    for mesh in data["meshes"]:
        mesh["receive_buffer_limit"] = 1
    plan = make_plan(load_spec(data))
    assert plan.proven_optimal and plan.makespan_s > free.makespan_s
    check_plan(data, json.loads(plan.model_dump_json()))


@pytest.mark.slow
def test_with_budget_zero_auto_is_never_worse_than_a_named_schedule():
    for stages, microbatches, transfer in ((2, 3, 0.2), (4, 8, 1.0), (5, 3, 0.7), (8, 16, 2.0)):
        data = chain(stages, microbatches, transfer=transfer, schedule="auto")
        plan = make_plan(load_spec(data), budget_s=0)
        for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1"):
            named = make_plan(load_spec({**data, "schedule": name}))
            assert plan.makespan_s <= named.makespan_s * (1 + 1e-9)


@pytest.mark.slow
def test_a_deadline_cuts_the_search_short_and_says_so():
    data = tight(8, 16, 12, transfer=0.1)
    plan = make_plan(load_spec(data), expired=lambda: True)
    assert plan.truncated and not plan.proven_optimal
    check_plan(data, json.loads(plan.model_dump_json()))
    assert not make_plan(load_spec(data), budget_s=0.5, expired=lambda: False).truncated


def test_the_cap_on_microbatches_in_flight_is_kept_by_the_search():
    for cap in (1, 2):
        data = {**tight(3, 6, 99), "max_in_flight": cap}
        slots = make_plan(load_spec(data), budget_s=1).slots
        end = {s.microbatch: s.end_s for s in slots if (s.stage, s.action) == ("s0", "W")}
        for slot in slots:
            if (slot.stage, slot.action) == ("s0", "F") and slot.microbatch >= cap:
                assert slot.start_s >= end[slot.microbatch - cap] - 1e-9


def test_every_registered_schedule_is_named_in_the_refusal_of_an_unknown_one():
    with pytest.raises(SpecError) as error:
        make_plan(load_spec(chain(2, 2, schedule="unknown")))
    assert all(name in str(error.value) for name in SCHEDULES)


@pytest.mark.slow
def test_rearranging_parts_of_a_plan_shortens_it_and_keeps_every_limit():
    placed = [min(s, 9 - s) for s in range(10)]
    data = chain(10, 8, meshes=placed, schedule="auto", contention="none", transfer=0.4, split_backward=True)
    for mesh in data["meshes"]:
        mesh["activation_limit_bytes"] = 12
    problem = build_problem(load_spec(data))
    first = search(problem, [], budget_s=0)

    def improved():
        return large_neighbourhood_search(
            problem,
            first.timeline,
            lower_bound_s=first.lower_bound_s,
            deterministic_limit=0.05,
            seed=1,
            stop=lambda: False,
        )

    found = improved()
    assert found.makespan < first.timeline.makespan
    assert found.makespan >= lower_bound(problem)
    assert keeps_activation_limits(problem, found.lanes)
    assert (improved().start == found.start).all()
