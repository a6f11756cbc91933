"""Recomputation is chosen with the schedule: beside brute force over all choices, and never worse than none or all."""

import random
from itertools import product

import pytest

from service.scheduler import SpecError, load_spec, make_plan
from tests.service.scheduler.specs import chain


def decided(data, chosen):
    """The problem in which these stages recompute, written out by hand."""
    stages = []
    for stage in data["stages"]:
        option = stage["recompute"]
        stage = {key: value for key, value in stage.items() if key != "recompute"}
        if stage["name"] in chosen:
            stage["activation_bytes"] = option["activation_bytes"]
            stage["weight_stash_bytes"] = min(stage["weight_stash_bytes"], option["activation_bytes"])
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


@pytest.mark.parametrize("seed", range(8))
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
    for mesh, stage in zip(data["meshes"], data["stages"], strict=True):
        mesh.clear()
        mesh.update(name=stage["mesh"], memory_bytes=stage["activation_bytes"] - 1)
    plan = make_plan(load_spec(data))
    assert all(stage.recomputed for stage in plan.stages)
    data["meshes"][1]["memory_bytes"] = 0
    with pytest.raises(
        SpecError, match=r"'m1' has memory_bytes 0, less than .* raise memory_bytes to at least 1"
    ):
        load_spec(data)
