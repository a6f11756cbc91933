"""`auto` beside every named schedule with the same budget, on costs as they are measured."""

import random

import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import SpecError
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.schedules.registry import fitting_names
from tests.service.scheduler.checker import check_plan
from tests.service.scheduler.specs import chain, measured
from tests.tiers import some_by_day


def checkpointed(data, *, seed):
    """The same, where about half of the stages come from a model that checkpoints itself, and so must recompute."""
    draw = random.Random(seed)
    for stage in data["stages"]:
        if draw.random() < 0.5:
            stage["recompute"] = {
                "activation_bytes": stage["activation_bytes"] // 10,
                "extra_s": stage["forward_s"],
                "required": True,
            }
    return data


def check_never_worse(data, budget_s):
    auto = make_plan(load_spec({**data, "schedule": "auto"}), budget_s=budget_s)
    assert not auto.notes
    for name in fitting_names(load_spec(data))[:-1]:
        try:
            named = make_plan(load_spec({**data, "schedule": name}), budget_s=budget_s)
        except SpecError:
            continue  # over a limit, which auto keeps
        assert auto.makespan_s <= named.makespan_s * (1 + 1e-9), name
        assert auto.lower_bound_s <= named.makespan_s * (1 + 1e-9), name
        assert not auto.proven_optimal or auto.makespan_s <= auto.lower_bound_s * (1 + 1e-9)
    return auto


@pytest.mark.parametrize("contention", ["link", "half-duplex"])
@some_by_day("seed", [3, 4, 6, 7], by_day=2)
@pytest.mark.parametrize("memory", [None, 2.5])
def test_stages_that_must_recompute_are_split_where_that_is_shorter(memory, seed, contention):
    data = measured(2 + seed % 4, 1 + seed % 6, seed, memory=memory, contention=contention, skips=False)
    check_never_worse(checkpointed(data, seed=seed), 0.0)


def test_a_stage_that_must_recompute_splits_its_backward_where_memory_is_not_short():
    data = chain(2, 1, transfer=0.0, schedule="auto")
    (first, last) = data["stages"]
    last["recompute"] = {"activation_bytes": 0, "extra_s": 1.0, "required": True}
    plan = check_never_worse(data, 0.0)
    # F F, I with the forward again, I beside W: a whole B of the last stage would take one more
    assert plan.makespan_s == pytest.approx(6.0) and plan.proven_optimal
    assert {slot.stage for slot in plan.slots if slot.action == "W"} == {first["name"], last["name"]}


@pytest.mark.slow
def test_transfers_of_a_named_plan_are_ordered_as_well_as_where_it_is_asked_for():
    for seed in (0, 1):
        data = {
            **checkpointed(measured(4, 4, seed, contention="half-duplex", skips=False), seed=seed),
            "overlap": False,
        }
        for mesh in data["meshes"]:
            mesh["receive_buffer_limit"] = 2
        check_never_worse(data, 0.2)


def test_a_backward_that_takes_no_time_by_the_plan_needs_its_memory_all_the_same():
    data = chain(2, 6, schedule="1f1b")
    first = data["stages"][0]
    first.update(backward_s=0.0, backward_input_s=0.0, backward_weight_s=0.0, weight_stash_bytes=0)
    first.update(activation_bytes=10, rematerialised_bytes=6)
    data["meshes"][0]["memory_bytes"] = 23  # two activations, and no room for what comes back in a backward
    with pytest.raises(
        SpecError, match="26 bytes of activations on mesh 'm0', over the 23 that its memory_bytes 23"
    ):
        make_plan(load_spec(data), budget_s=0.0)
    auto = make_plan(load_spec({**data, "schedule": "auto"}), budget_s=0.0)
    assert not auto.notes
    data["meshes"][0]["memory_bytes"] = 26
    named = make_plan(load_spec(data), budget_s=0.0)
    assert not named.notes
    check_plan(data, named.model_dump())


def test_a_whole_backward_that_was_measured_longer_than_its_parts_is_split_though_none_of_it_can_be_moved():
    data = chain(2, 3, transfer=0.0, schedule="auto")
    for stage in data["stages"]:
        stage.update(backward_input_s=1.0, backward_weight_s=0.0, backward_s=1.5, weight_stash_bytes=0)
    plan = check_never_worse(data, 0.0)
    assert plan.makespan_s == pytest.approx(8.0)  # as 1F1B with F and I of 1: 2 (M + S - 1)
