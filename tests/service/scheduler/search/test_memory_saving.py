"""Of equally long plans auto keeps one that holds less: never longer, never more memory."""

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.scheduler.auto import auto
from service.scheduler.planner import make_plan
from service.scheduler.problem.memory import (
    keeps_activation_limits,
    peak_activation,
    peak_memory,
    peak_receive_buffers,
)
from service.scheduler.problem.problem import build_problem
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.search.memory_saving import save_memory
from service.scheduler.search.search import search
from tests.service.scheduler.checker import check_plan
from tests.service.scheduler.specs import chain, random_specs


def peaks(timeline):
    return [peak_activation(timeline.problem, lane)[0] for lane in timeline.lanes]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=random_specs())
def test_saving_memory_makes_no_plan_longer_and_no_mesh_hold_more(data):
    problem = build_problem(load_spec(data))
    found = search(problem, [], budget_s=0)
    if found is None:  # the limits on receive buffers can be too tight for every rule
        return
    before = found.timeline
    after = save_memory(before)
    assert after.makespan <= before.makespan * (1 + 1e-9)
    assert all(new <= old for new, old in zip(peaks(after), peaks(before), strict=True))
    assert sum(peak_receive_buffers(after)) <= sum(peak_receive_buffers(before))
    assert keeps_activation_limits(problem, after.lanes)
    assert (save_memory(before).start == after.start).all()
    assert save_memory(before, peak_memory(before).tolist()) is before


def test_a_plan_that_holds_more_than_enough_holds_less():
    problem = build_problem(load_spec(chain(4, 16, contention="none", transfer=0.25, split_backward=True)))
    before = search(problem, [], budget_s=0).timeline
    after = save_memory(before)
    held, least = peak_memory(before), peak_memory(after)
    assert (least < held).any(), "the least is to be less, or nothing is tried"
    assert (peak_memory(save_memory(before, least.tolist())) <= least).all()
    assert (peak_memory(save_memory(before, (held - 1).clip(least).tolist())) < held).any()


def test_half_the_microbatches_are_enough_where_a_limit_says_so():
    data = chain(4, 16, schedule="auto", contention="none", transfer=0.25, split_backward=True)
    plan = make_plan(load_spec(data))
    limited = copy.deepcopy(data)
    for mesh in limited["meshes"]:
        mesh["activation_limit_bytes"] = 8 * 2  # of 16 microbatches of two bytes
    assert plan.proven_optimal
    assert make_plan(load_spec(limited)).makespan_s == pytest.approx(plan.makespan_s)


@pytest.mark.slow
def test_where_a_limit_asks_for_it_the_optimum_is_found_with_the_fewest_microbatches():
    data = chain(4, 16, schedule="auto", contention="full-duplex", transfer=0.25, split_backward=True)
    plan = make_plan(load_spec(data))
    assert plan.proven_optimal
    for mesh in data["meshes"]:
        mesh["activation_limit_bytes"] = 5 * 2
    as_short = make_plan(load_spec(data))
    assert as_short.makespan_s == pytest.approx(plan.makespan_s, rel=1e-9)
    assert max(mesh.peak_activation_bytes for mesh in as_short.meshes) <= 5 * 2
    for mesh in data["meshes"]:
        mesh["activation_limit_bytes"] = 4 * 2
    fewer = make_plan(load_spec(data))
    assert fewer.lower_bound_s > plan.makespan_s * (1 + 1e-9)


def test_slack_for_longer_transfers_takes_a_few_microbatches_and_not_all_of_them():
    data = chain(4, 32, schedule="auto", contention="full-duplex", transfer=0.0138, split_backward=True)
    for stage in data["stages"]:
        stage.update(forward_s=0.0513, backward_input_s=0.0506, backward_weight_s=0.0506)
    data["stages"][0].update(backward_input_s=0.0, backward_weight_s=0.1012)
    plan = make_plan(load_spec(data))
    assert plan.proven_optimal
    found = [mesh.peak_activation_bytes / 2 for mesh in plan.meshes]
    assert max(found) <= 12, "of 32 microbatches"


def test_a_plan_whose_search_for_less_memory_was_cut_short_says_so(monkeypatch):
    late, search_once = [], auto.search

    def search_then_late(*arguments, **options):
        found = search_once(*arguments, **options)
        late.append(True)
        return found

    monkeypatch.setattr(auto, "search", search_then_late)
    data = chain(4, 16, schedule="auto", contention="full-duplex", transfer=0.25, split_backward=True)
    plan = make_plan(load_spec(data), expired=lambda: bool(late))
    assert plan.truncated and plan.proven_optimal


def unequal_chain(costs, microbatches, contention, transfer=0.0):
    """No limits; each cost is (F, I, W, weight stash bytes)."""
    return {
        "microbatches": microbatches,
        "meshes": [{"name": f"m{p}"} for p in range(len(costs))],
        "stages": [
            {
                "name": f"s{p}",
                "mesh": f"m{p}",
                "forward_s": forward,
                "backward_input_s": inputs,
                "backward_weight_s": weights,
                "activation_bytes": 4,
                "weight_stash_bytes": stash,
            }
            for p, (forward, inputs, weights, stash) in enumerate(costs)
        ],
        "edges": [
            {"source": f"s{p}", "target": f"s{p + 1}", "forward_s": transfer, "backward_s": transfer}
            for p in range(len(costs) - 1)
        ],
        "network": {"contention": contention},
        "schedule": "auto",
    }


def test_less_memory_by_splitting_the_backwards_of_a_plan_that_did_not_split_them():
    data = unequal_chain([(7, 3, 5, 2), (6, 4, 2, 0), (1, 7, 2, 2)], 8, "full-duplex")
    plan = make_plan(load_spec(data), budget_s=0.5)
    check_plan(data, json.loads(plan.model_dump_json()))
    assert plan.proven_optimal


whole = st.integers(1, 9)
stages = st.tuples(whole, whole, st.sampled_from([0, 1, 2, 5]), st.sampled_from([0, 2]))


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    costs=st.lists(stages, min_size=2, max_size=4),
    microbatches=st.sampled_from([4, 6, 8]),
    contention=st.sampled_from(["none", "full-duplex", "half-duplex"]),
    transfer=st.sampled_from([0.0, 1.0, 2.0]),
)
def test_a_plan_that_was_searched_again_for_less_memory_is_a_plan(costs, microbatches, contention, transfer):
    data = unequal_chain(costs, microbatches, contention, transfer)
    check_plan(data, json.loads(make_plan(load_spec(data), budget_s=0.5).model_dump_json()))
