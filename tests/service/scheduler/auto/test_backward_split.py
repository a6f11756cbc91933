"""Whole backwards or split ones, where B was measured: beside an independent solver, bounds and the old forms."""

import random
from itertools import product

import numpy as np
import pytest

from service.scheduler.auto.backward_split import backward_relaxation, problem_with_whole_backwards
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.search.bounds import lower_bounds
from tests.service.scheduler.checker import check_plan
from tests.service.scheduler.solver import optimum
from tests.service.scheduler.specs import chain, measured
from tests.tiers import some_by_day


def priced(stages, microbatches, seed, **options):
    """A chain with whole unequal costs whose backwards cost more in two parts than in one."""
    draw = random.Random(seed)
    data = chain(
        stages, microbatches, schedule="auto", contention="link", transfer=draw.choice([0, 1, 2]), **options
    )
    for stage in data["stages"]:
        stage["forward_s"], stage["backward_input_s"] = draw.randint(1, 3), draw.randint(1, 3)
        stage["backward_weight_s"] = draw.randint(1, 3)
        both = stage["backward_input_s"] + stage["backward_weight_s"]
        stage["backward_s"] = draw.randint(max(1, both - 2), both)
    return data


def written_out(data, whole):
    """The problem in which these stages run B: as I of that length and a W of none; the others are split."""
    stages = []
    for stage in data["stages"]:
        length = stage["backward_s"]
        stage = {key: value for key, value in stage.items() if key != "backward_s"}
        if stage["name"] in whole:
            stage["backward_input_s"], stage["backward_weight_s"] = length, 0
        stages.append(stage)
    return {**data, "stages": stages, "split_backward": True}


def chosen(plan):
    return {slot.stage for slot in plan.slots if slot.action == "B"}


@some_by_day("seed", range(10), by_day=1)
def test_the_choice_is_the_best_of_all_choices_on_small_problems(seed):
    data = priced(3, 4, seed)
    names = [stage["name"] for stage in data["stages"]]
    every = {}
    for bits in product((False, True), repeat=3):
        whole = frozenset(name for name, bit in zip(names, bits, strict=True) if bit)
        every[whole] = optimum(written_out(data, whole))
    assert None not in every.values()
    plan = make_plan(load_spec(data))
    check_plan(data, plan.model_dump())
    assert plan.makespan_s == pytest.approx(min(every.values()), rel=1e-9)
    assert every[frozenset(chosen(plan))] == pytest.approx(plan.makespan_s, rel=1e-9)
    assert plan.lower_bound_s <= min(every.values()) * (1 + 1e-9)


@pytest.mark.slow
def test_the_drawn_problems_differ_in_what_is_best():
    """Else the test above would pass with one form always taken."""
    forms = {len(chosen(make_plan(load_spec(priced(3, 4, seed)), budget_s=1.0))) for seed in range(10)}
    assert len(forms) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_larger_problems_with_measured_costs_are_never_worse_than_either_form(seed):
    data = measured(6, 12, seed)
    draw = random.Random(seed)
    for stage in data["stages"]:
        both = stage["backward_input_s"] + stage["backward_weight_s"]
        stage["backward_s"] = both * draw.uniform(0.7, 1.05)
    plan = make_plan(load_spec(data), budget_s=1.0)
    check_plan(data, plan.model_dump())
    for split in (False, True):
        other = make_plan(load_spec({**data, "split_backward": split}), budget_s=0.0)
        check_plan({**data, "split_backward": split}, other.model_dump())
        assert plan.makespan_s <= other.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_no_bound_is_above_the_optimum_of_any_form(seed):
    data = priced(2, 3, 100 + seed)
    spec = load_spec(data)
    names = [stage["name"] for stage in data["stages"]]
    for bits in product((False, True), repeat=2):
        whole = frozenset(name for name, bit in zip(names, bits, strict=True) if bit)
        best = optimum(written_out(data, whole))
        for problem in (problem_with_whole_backwards(spec, whole), backward_relaxation(spec)):
            for name, bound in lower_bounds(problem).items():
                assert bound <= best * (1 + 1e-9), (name, whole)


def orders(whole, *, late):
    """1F1B on two meshes, three microbatches, in the forms `whole[stage, microbatch]`; W right behind I, or at the end."""
    base = ["F0 F1 b0 F2 b1 b2", "F0 b0 F1 b1 F2 b2"]
    lanes = {}
    for stage, order in enumerate(base):
        lane, last = [], []
        for action, m in order.split():
            if action == "b" and not whole[stage, int(m)]:
                lane.append(f"{stage}I{m}")
                (last if late else lane).append(f"{stage}W{m}")
            else:
                lane.append(f"{stage}{action.upper()}{m}")
        lanes[f"m{stage}"] = lane + last
    return lanes


@some_by_day("seed", range(60), by_day=2)
def test_no_bound_is_above_a_plan_whose_microbatches_differ_in_form(seed):
    """`auto` takes one form for all backwards of a stage; its bound is for every plan of the spec."""
    data = priced(2, 3, 300 + seed)
    plan = make_plan(load_spec(data), budget_s=1.0)
    for bits in product((False, True), repeat=6):
        for late in (False, True):
            lanes = orders(np.array(bits).reshape(2, 3), late=late)
            mixed = make_plan(load_spec({**data, "schedule": "csv", "orders": lanes}), budget_s=0.1)
            assert plan.lower_bound_s <= mixed.makespan_s * (1 + 1e-9), lanes


def test_a_named_schedule_runs_its_backwards_for_as_long_as_they_were_measured():
    data = {**priced(3, 4, 0), "schedule": "1f1b"}
    plan = make_plan(load_spec(data))
    length = {stage["name"]: stage["backward_s"] for stage in data["stages"]}
    for slot in plan.slots:
        if slot.action == "B":
            assert slot.end_s - slot.start_s == pytest.approx(length[slot.stage], rel=1e-9)
