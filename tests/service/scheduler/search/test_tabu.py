"""Tabu search on orders: never longer, nothing broken, and from a poor plan to the proven optimum."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from service.scheduler import kernels
from service.scheduler.planner import make_plan
from service.scheduler.problem.memory import keeps_activation_limits
from service.scheduler.problem.problem import build_problem
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.problem.timeline import retime
from service.scheduler.programs.codegen import compile_programs
from service.scheduler.programs.plan import PlanProof, build_plan
from service.scheduler.search import priority_rules
from service.scheduler.search import search as search_search
from service.scheduler.search.search import search
from service.scheduler.search.tabu import tabu_search
from tests.missing import needs
from tests.service.scheduler.checker import check_plan
from tests.service.scheduler.specs import SHARED, chain, random_specs
from tests.tiers import some_by_day

CASES_FILE = SHARED / "cases" / "plans.json"
CASES = json.loads(CASES_FILE.read_text())["cases"] if CASES_FILE.exists() else []
needs_cases = needs(CASES_FILE, "the shared folder beside the checkout has the cases")


def never() -> bool:
    return False


def case_named(name):
    return next(case for case in CASES if case["name"] == name)


def worst_of_the_rules(problem):
    runner = priority_rules.RuleRunner(problem)
    found = [runner.timeline(rule) for rule in priority_rules.standard_rules(problem)]
    return max((timeline for timeline in found if timeline is not None), key=lambda one: one.makespan)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=random_specs())
def test_exchanged_orders_are_no_longer_and_keep_memory_causes_and_resources(data):
    for mesh in data["meshes"]:
        mesh.pop("receive_buffer_limit", None)
    data["schedule"] = "auto"
    problem = build_problem(load_spec(data))
    before = search(problem, [], budget_s=0).timeline
    after = tabu_search(problem, before, goal_s=0.0, iterations=3000, seed=1, stop=never)
    assert after.makespan <= before.makespan
    assert keeps_activation_limits(problem, after.lanes)
    again = retime(problem, after.sequence)
    assert again.makespan == pytest.approx(after.makespan, rel=1e-9)
    assert np.array_equal(np.sort(after.sequence), np.sort(before.sequence))
    plan = build_plan(
        after,
        compile_programs(after),
        PlanProof(
            lower_bound_s=0.0, proven_optimal=False, programs_makespan_s=after.makespan, truncated=False
        ),
        chosen="searched",
        notes=[],
    )
    check_plan(data, json.loads(plan.model_dump_json()))


@needs_cases
@some_by_day("case", CASES, by_day=6, ids=lambda case: case["name"])
def test_the_worst_of_the_rules_is_brought_to_the_optimum(case):
    """At most 2 % off, without the exact solver."""
    spec = load_spec(case["spec"])
    problem = build_problem(spec, split=spec.split_backward is not False)
    worst = worst_of_the_rules(problem)
    assert worst.makespan > 1.2 * case["optimum"]
    better = tabu_search(problem, worst, goal_s=case["optimum"], iterations=40_000, seed=1, stop=never)
    assert case["optimum"] * (1 - 1e-9) <= better.makespan <= case["optimum"] * 1.02


@needs_cases
def test_the_same_seed_gives_the_same_orders_and_stop_is_obeyed():
    problem = build_problem(load_spec(case_named("C_rand0_P4_M8")["spec"]), split=True)
    start = worst_of_the_rules(problem)
    one, two = (
        tabu_search(problem, start, goal_s=0.0, iterations=5000, seed=7, stop=never) for _ in range(2)
    )
    assert np.array_equal(one.start, two.start) and np.array_equal(one.sequence, two.sequence)
    assert one.makespan < start.makespan
    assert tabu_search(problem, start, goal_s=0.0, iterations=5000, seed=7, stop=lambda: True) is start


@needs_cases
def test_a_limit_on_memory_is_kept_where_breaking_it_would_be_shorter():
    case = case_named("H_tinymem_P4_M8")
    spec = load_spec(case["spec"])
    problem = build_problem(spec, split=True)
    start = worst_of_the_rules(problem)
    meshes = [mesh.model_copy(update={"activation_limit_bytes": None}) for mesh in spec.meshes]
    free = replace(problem, spec=spec.model_copy(update={"meshes": meshes}))
    tight, loose = (
        tabu_search(given, replace(start, problem=given), goal_s=0.0, iterations=20_000, seed=1, stop=never)
        for given in (problem, free)
    )
    assert loose.makespan < tight.makespan == pytest.approx(case["optimum"])
    assert keeps_activation_limits(problem, tight.lanes) and not keeps_activation_limits(problem, loose.lanes)


def test_where_nothing_may_change_places_the_iterations_are_used_up_at_once(monkeypatch: pytest.MonkeyPatch):
    problem = build_problem(load_spec(chain(1, 1, schedule="auto")), split=True)
    start = worst_of_the_rules(problem)
    rounds = []

    def counted(*arguments):
        rounds.append(tabu_round(*arguments))
        return rounds[-1]

    tabu_round = kernels.tabu_round
    monkeypatch.setattr(kernels, "tabu_round", counted)
    assert tabu_search(problem, start, goal_s=0.0, iterations=100_000, seed=1, stop=never) is start
    assert sum(used for _, _, used in rounds) >= 100_000 and len(rounds) < 10


def test_what_a_run_starts_from_does_not_depend_on_which_of_two_ends_first(monkeypatch: pytest.MonkeyPatch):
    class OneAfterTheOther:
        """As a pool whose second thread begins when the first result has been used."""

        def __init__(self, threads: int) -> None:
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def map(self, function, items):
            return (function(item) for item in items)

    data = chain(8, 8, schedule="auto", contention="half-duplex", transfer=0.3, split_backward=True)
    data["meshes"] = [{**mesh, "activation_limit_bytes": 12} for mesh in data["meshes"][:4]]
    for number, stage in enumerate(data["stages"]):
        stage["mesh"] = data["meshes"][number % 4]["name"]
    spec = load_spec(data)
    together = make_plan(spec, budget_s=0.2)
    monkeypatch.setattr(search_search, "ThreadPoolExecutor", OneAfterTheOther)
    assert make_plan(spec, budget_s=0.2).model_dump_json() == together.model_dump_json()


def test_max_in_flight_is_kept_and_its_plans_get_shorter_too():
    data = chain(4, 12, schedule="auto", contention="full-duplex", transfer=0.3, split_backward=True)
    spec = load_spec(data | {"max_in_flight": 3})
    problem = build_problem(spec, split=True)
    start = worst_of_the_rules(problem)
    better = tabu_search(problem, start, goal_s=0.0, iterations=20_000, seed=1, stop=never)
    assert better.makespan < start.makespan and keeps_activation_limits(problem, better.lanes)
    assert better.makespan <= make_plan(spec, budget_s=2.0).makespan_s * 1.02
