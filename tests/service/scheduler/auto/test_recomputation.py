"""Recomputation is chosen with the schedule: beside brute force over all choices, and never worse than none or all."""

import json
import random
from itertools import product

import pytest

from service.scheduler.auto.auto import MakespanEstimator
from service.scheduler.auto.recomputation import (
    Recomputation,
    candidate_choices,
    candidate_recomputations,
    cheapest_recomputation,
)
from service.scheduler.planner import make_plan
from service.scheduler.problem.problem import build_problem
from service.scheduler.problem.spec import SpecError
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.search.bounds import lower_bound
from service.scheduler.search.priority_rules import LARGE_PROBLEM_TASKS
from service.scheduler.search.search import search
from tests.service.scheduler.checker import check_plan
from tests.service.scheduler.solver import optimum
from tests.service.scheduler.specs import chain, measured
from tests.tiers import some_by_day

FIELDS = {
    "whole": "recompute",
    "selective": "recompute_selectively",
    "by_block": "recompute_by_block",
}


def decided(data, chosen):
    """The problem in which these stages recompute (by their methods, if any), written out by hand."""
    methods = chosen if isinstance(chosen, dict) else dict.fromkeys(chosen, "whole")
    stages = []
    for stage in data["stages"]:
        option = stage[FIELDS[methods.get(stage["name"], "whole")]]
        stage = {key: value for key, value in stage.items() if not key.startswith("recompute")}
        if stage["name"] in methods:
            brought = option.get("rematerialised_bytes")
            stage["rematerialised_bytes"] = (
                stage["activation_bytes"] - option["activation_bytes"] if brought is None else brought
            )
            stage["activation_bytes"] = option["activation_bytes"]
            stage["backward_input_s"] += option["extra_s"]
        stages.append(stage)
    return {**data, "stages": stages}


def makespan(data, budget_s):
    try:
        return make_plan(load_spec(data), budget_s=budget_s).makespan_s
    except SpecError:
        return float("inf")


def tight(stages, microbatches, seed):
    """A chain with unequal stages whose meshes hold about two microbatches."""
    draw = random.Random(seed)
    data = chain(stages, microbatches, schedule="auto", contention="link", transfer=draw.choice([0, 0.5, 1]))
    for stage in data["stages"]:
        kept = draw.randint(2, 5)
        stage["forward_s"] = draw.randint(1, 3)
        stage["activation_bytes"], stage["weight_stash_bytes"] = kept, draw.randint(0, 2)
        stage["recompute"] = {"activation_bytes": 1, "extra_s": stage["forward_s"]}
    for mesh, stage in zip(data["meshes"], data["stages"], strict=True):
        mesh[draw.choice(["memory_bytes", "activation_limit_bytes"])] = stage[
            "activation_bytes"
        ] + draw.randint(1, 5)
    return data


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5])  # two stages, one or none of them recompute
def test_the_choice_is_the_best_of_all_choices_on_small_problems(seed):
    data = tight(3, 5, seed)
    names = [stage["name"] for stage in data["stages"]]
    every = {}
    for bits in product((False, True), repeat=3):
        chosen = tuple(name for name, bit in zip(names, bits, strict=True) if bit)
        every[chosen] = makespan(decided(data, chosen), 5.0)
    plan = make_plan(load_spec(data))
    assert plan.makespan_s == pytest.approx(min(every.values()), rel=1e-9)
    assert plan.lower_bound_s <= min(every.values()) * (1 + 1e-9)
    chosen = tuple(stage.name for stage in plan.stages if stage.recomputed)
    assert every[chosen] == pytest.approx(plan.makespan_s, rel=1e-9)
    check_plan(decided(data, chosen), json.loads(plan.model_dump_json()))


def chosen_methods(plan):
    """The stages that recompute, and how."""
    return {
        stage.name: "selective" if stage.selective else "by_block" if stage.by_block else "whole"
        for stage in plan.stages
        if stage.recomputed
    }


def with_methods(data, seed):
    """`data` in which every stage may recompute selectively, when it keeps more than wholly and takes less time, and by
    block, when it keeps more and brings back less."""
    draw = random.Random(seed)
    for stage in data["stages"]:
        kept = draw.randint(1, max(1, stage["activation_bytes"] - 1))
        stage["recompute_selectively"] = {
            "activation_bytes": kept,
            "extra_s": stage["recompute"]["extra_s"] * draw.choice([0.1, 0.25, 0.5]),
            "selective": True,
        }
        stage["weight_stash_bytes"] = 0
        stage["recompute_by_block"] = {
            "activation_bytes": draw.randint(1, kept),
            "extra_s": stage["recompute"]["extra_s"],
            "rematerialised_bytes": draw.randint(0, 1),
            "by_block": True,
        }
    return data


@some_by_day("seed", range(12), by_day=3)
def test_each_stage_recomputes_by_the_method_that_is_best_on_small_problems(seed):
    data = with_methods(tight(2, 4, seed), seed)
    names = [stage["name"] for stage in data["stages"]]
    every = {}
    for methods in product((None, *FIELDS), repeat=2):
        chosen = {name: method for name, method in zip(names, methods, strict=True) if method}
        every[tuple(chosen.items())] = makespan(decided(data, chosen), 2.0)
    plan = make_plan(load_spec(data), budget_s=5.0)
    best = min(every.values())
    assert plan.makespan_s == pytest.approx(best, rel=1e-9)
    assert plan.lower_bound_s <= best * (1 + 1e-9)
    chosen = chosen_methods(plan)
    assert every[tuple(chosen.items())] == pytest.approx(plan.makespan_s, rel=1e-9)
    check_plan(decided(data, chosen), json.loads(plan.model_dump_json()))


def test_a_stage_recomputes_by_block_where_only_that_leaves_room():
    data = tight(3, 6, 3)
    for mesh, stage in zip(data["meshes"], data["stages"], strict=True):
        stage |= {"activation_bytes": 10, "weight_stash_bytes": 6}
        stage["recompute"] = {"activation_bytes": 1, "extra_s": 1.0}
        stage["recompute_by_block"] = {
            "activation_bytes": 2,
            "extra_s": 1.0,
            "rematerialised_bytes": 3,
            "by_block": True,
        }
        mesh |= {"memory_bytes": None, "activation_limit_bytes": 60}
    data["meshes"][0]["activation_limit_bytes"] = (
        9  # three in flight by block, and no activations of a whole stage
    )
    data["schedule"] = "1f1b"
    plan = make_plan(load_spec(data))
    assert chosen_methods(plan) == {"s0": "by_block"}
    by_hand = decided(data, {"s0": "by_block"})
    by_hand["stages"][0]["weight_stash_bytes"] = 5  # of a B alone, which the check asks to be there at once
    check_plan(by_hand, json.loads(plan.model_dump_json()))


def test_a_selective_stage_is_taken_where_it_fits_and_a_whole_one_where_it_must_be():
    data = tight(3, 6, 3)
    for mesh, stage in zip(data["meshes"], data["stages"], strict=True):
        stage |= {"forward_s": 1.0, "activation_bytes": 10, "weight_stash_bytes": 0}
        stage["recompute"] = {"activation_bytes": 1, "extra_s": 1.0}
        stage["recompute_selectively"] = {"activation_bytes": 5, "extra_s": 0.1, "selective": True}
        mesh |= {"memory_bytes": None, "activation_limit_bytes": 60}
    data["meshes"][0]["activation_limit_bytes"] = 20 + 5  # three of five bytes in flight, and one whole
    data["meshes"][1]["activation_limit_bytes"] = 12  # none but wholly
    data["schedule"] = "1f1b"
    plan = make_plan(load_spec(data))
    assert chosen_methods(plan) == {"s0": "selective", "s1": "whole"}
    check_plan(decided(data, chosen_methods(plan)), json.loads(plan.model_dump_json()))


@pytest.mark.parametrize("count", [3, 12])
def test_single_stages_change_their_method_where_that_is_estimated_better(count):
    names = [f"s{i}" for i in range(count)]
    wanted = {"s0": "whole", "s1": "selective", "s2": "by_block"}
    weights = {None: 1.0, "whole": 1.0, "selective": 1.5, "by_block": 1.25}

    def estimate(choice):
        methods = dict.fromkeys(choice.stages, "whole") | dict(choice.methods)
        wrong = [methods.get(name) for name in names if methods.get(name) != wanted.get(name)]
        return 100.0 + sum(weights[method] for method in wrong)

    both = ["selective", "by_block"]
    found = candidate_recomputations(names, dict.fromkeys(names[: max(3, count - 1)], both), estimate)
    assert found[0] == Recomputation(frozenset(wanted), frozenset({("s1", "selective"), ("s2", "by_block")}))
    assert [estimate(choice) for choice in found] == sorted(map(estimate, found))
    assert len({*found}) == len(found)


@pytest.mark.parametrize("field", ["recompute_selectively", "recompute_by_block"])
def test_a_choice_between_two_methods_needs_both(field):
    data = with_methods(tight(2, 4, 1), 1)
    for other in {*FIELDS.values()} - {field}:
        del data["stages"][0][other]
    with pytest.raises(SpecError, match=rf"'s0' has {field}, .* beside recompute: give recompute too"):
        load_spec(data)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_on_larger_problems_it_is_never_worse_than_none_or_all(seed):
    data = tight(8, 12, 100 + seed)
    names = [stage["name"] for stage in data["stages"]]
    plan = make_plan(load_spec(data), budget_s=1.0)
    for chosen in ((), names):
        assert plan.makespan_s <= makespan(decided(data, chosen), 0.0) * (1 + 1e-9)


def test_without_a_limit_nothing_is_recomputed():
    data = tight(4, 6, 1)
    for mesh in data["meshes"]:
        del mesh[next(key for key in mesh if key != "name")]
    plan = make_plan(load_spec(data), budget_s=0.5)
    assert not any(stage.recomputed for stage in plan.stages)


def test_where_only_recomputing_fits_it_is_chosen_and_where_nothing_fits_the_message_says_so():
    data = tight(2, 4, 3)
    kept = [5, 4]
    for stage, size in zip(data["stages"], kept, strict=True):
        stage["mesh"], stage["activation_bytes"] = "m0", size
    data["meshes"] = [{"name": "m0", "memory_bytes": 6}]  # 9 for both; 1 of the other beside a whole one: 6
    plan = make_plan(load_spec(data))
    assert any(stage.recomputed for stage in plan.stages)
    chosen = [stage.name for stage in plan.stages if stage.recomputed]
    check_plan(decided(data, chosen), json.loads(plan.model_dump_json()))
    data["meshes"][0]["memory_bytes"] = 4
    with pytest.raises(
        SpecError, match=r"'m0' has memory_bytes 4, less than .* raise memory_bytes to at least 5"
    ):
        load_spec(data)


def several_a_mesh(seed):
    """A chain on fewer meshes than stages, some of them recomputed, with more stash than they keep."""
    draw = random.Random(seed)
    stages = draw.randint(2, 4)
    data = chain(stages, draw.randint(2, 5), schedule="auto", contention="link", transfer=draw.choice([0, 1]))
    meshes = draw.randint(1, stages)
    data["meshes"] = [{"name": f"m{p}"} for p in range(meshes)]
    data["split_backward"] = draw.random() < 0.5
    for index, stage in enumerate(data["stages"]):
        stage["mesh"] = f"m{index % meshes}"
        stage |= {key: draw.randint(1, 2) for key in ("forward_s", "backward_input_s", "backward_weight_s")}
        stage["activation_bytes"] = draw.randint(3, 6)
        stage["weight_stash_bytes"] = draw.randint(0, stage["activation_bytes"])
        option = {"activation_bytes": draw.randint(0, 2), "extra_s": 1}
        stage["recompute"] = {**option, "required": draw.random() < 0.5}
    for mesh in data["meshes"]:
        whole = sum(stage["activation_bytes"] for stage in data["stages"] if stage["mesh"] == mesh["name"])
        key = draw.choice(["memory_bytes", "activation_limit_bytes", None])
        if key is not None:
            mesh[key] = whole + draw.randint(0, 8)
    return data


@some_by_day("seed", range(40), by_day=4)
def test_what_comes_back_for_a_backward_is_counted_and_within_the_limits_wherever_stages_lie(seed):
    data = several_a_mesh(seed)
    plan = make_plan(load_spec(data), budget_s=0.3)
    chosen = [stage.name for stage in plan.stages if stage.recomputed]
    assert set(chosen) >= {s["name"] for s in data["stages"] if s["recompute"]["required"]}
    by_hand = decided(data, chosen)
    check_plan(by_hand, json.loads(plan.model_dump_json()))
    best = optimum(by_hand)
    if best is None:
        return
    assert plan.lower_bound_s <= best * (1 + 1e-9) <= plan.makespan_s * (1 + 2e-9)
    assert not plan.proven_optimal or plan.makespan_s == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("seed", range(4))
def test_a_named_schedule_recomputes_what_it_must_and_more_only_where_its_memory_asks_for_it(schedule, seed):
    data = {**tight(3, 5, seed), "schedule": schedule}
    for mesh in data["meshes"]:
        mesh.update(activation_limit_bytes=None, memory_bytes=None)
    data["stages"][1]["recompute"]["required"] = True
    plan = make_plan(load_spec(data))
    assert [stage.recomputed for stage in plan.stages] == [False, True, False]
    check_plan(decided(data, ["s1"]), json.loads(plan.model_dump_json()))
    peak = plan.meshes[0].peak_activation_bytes
    data["meshes"][0]["activation_limit_bytes"] = peak - 1
    plan = make_plan(load_spec(data))
    assert [stage.recomputed for stage in plan.stages] == [True, True, False]
    check_plan(decided(data, ["s0", "s1"]), json.loads(plan.model_dump_json()))


def test_estimates_end_with_the_work_for_them_and_the_first_of_the_candidates_is_the_best_estimated():
    names = [f"s{i}" for i in range(12)]
    paying = frozenset(names[:5] + names[7:8])
    estimated = []

    def estimate(choice):
        estimated.append(choice)
        return 100.0 + len(choice ^ paying)

    assert candidate_choices(names, estimate) == [paying, frozenset(), frozenset(names)]
    assert len(estimated) == len(set(estimated))
    for allowed in range(2, 12):
        estimated.clear()
        found = candidate_choices(names, estimate, lambda most=allowed: len(estimated) >= most)
        assert len(estimated) == allowed
        assert estimate(found[0]) == min(estimate(choice) for choice in set(estimated))
    assert candidate_choices(names, estimate, relative_error=0.2)[0] == frozenset()


@pytest.mark.slow
@pytest.mark.parametrize(("meshes", "microbatches", "memory"), [(3, 300, 2.5), (6, 12, 3), (40, 200, 20)])
def test_an_estimator_does_its_work_and_little_more_and_is_not_below_what_the_bounds_allow(
    meshes, microbatches, memory
):
    spec = load_spec(measured(meshes, microbatches, 7, memory=memory))
    problem = build_problem(spec, split=True)
    estimator = MakespanEstimator(1.0)
    found = [estimator.makespan(problem, "split", thorough=True)]
    while not estimator.exhausted:
        before = estimator.spent_s
        found.append(estimator.makespan(problem, "split"))
        assert estimator.spent_s > before
    assert estimator.spent_s < 2.0
    assert found[1:] == [found[0]] * (len(found) - 1)  # its few rules contain the best of the many
    assert lower_bound(problem) <= found[0] * (1 + 1e-9)
    if problem.tasks <= LARGE_PROBLEM_TASKS:
        plan = search(problem, [], budget_s=0.0)
        assert plan is not None and plan.timeline.makespan <= found[0] * (1 + 1e-9)


def test_of_a_large_problem_with_a_named_schedule_only_so_many_choices_are_tried_as_take_a_few_seconds():
    names = [f"s{i}" for i in range(8)]
    tried = []

    def makespan(choice):
        tried.append(choice)
        if not choice.stages:
            raise SpecError("too much memory")
        return 9.0 - len(choice.stages)

    everything = Recomputation(frozenset(names))
    assert cheapest_recomputation(names, frozenset(), makespan, tasks=100_000) == everything
    assert len(tried) <= 4
    tried.clear()
    assert cheapest_recomputation(names, frozenset(), makespan, tasks=100) == everything
    assert len(tried) > 4
