"""Random problems: every plan passes check_programs and an independent checker, bounds hold, auto is never worse.

The same problems each time, by seeds that are written here; with SLOTLINE_TEST_NIGHTLY set, others each time and
twenty times as many. With SLOTLINE_TEST_SHARE only that share of them, where the same tests run many times over.
"""

import copy
import itertools
import json
import os

import pytest
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import SpecError
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.schedules.registry import SCHEDULES
from tests.service.scheduler.checker import check_plan, run_programs
from tests.service.scheduler.specs import random_specs

NIGHTLY = bool(os.environ.get("SLOTLINE_TEST_NIGHTLY"))
SHARE = 20 if NIGHTLY else float(os.environ.get("SLOTLINE_TEST_SHARE", "1"))


def examples(number, chosen):
    """So many examples from the seed `chosen`."""
    checked = settings(
        max_examples=max(1, round(SHARE * number)),
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return (lambda test: checked(test)) if NIGHTLY else (lambda test: seed(chosen)(checked(test)))


pytestmark = pytest.mark.timeout(7200 if NIGHTLY else 300)


@examples(60, 1)
@given(data=random_specs())
def test_a_searched_plan_is_feasible_and_no_named_schedule_beats_it(data):
    spec = load_spec(data)
    plan = json.loads(make_plan(spec, budget_s=0.05).model_dump_json())
    check_plan(data, plan)
    run_programs(data, plan["programs"], seed=1)
    for name in SCHEDULES:
        if name in ("csv", "inference"):
            continue
        try:
            named = make_plan(load_spec({**data, "schedule": name}))
        except SpecError:
            continue
        assert plan["makespan_s"] <= named.makespan_s * (1 + 1e-9), name
        assert plan["lower_bound_s"] <= named.makespan_s * (1 + 1e-9), name


@examples(40, 2)
@given(data=random_specs(), limits=st.lists(st.integers(1, 3), min_size=6, max_size=6))
def test_with_few_receive_buffers_a_plan_is_feasible_or_refused_with_a_reason(data, limits):
    for mesh, limit in zip(data["meshes"], limits, strict=False):
        mesh["receive_buffer_limit"] = limit
    try:
        plan = json.loads(make_plan(load_spec(data), budget_s=0.2).model_dump_json())
    except SpecError as error:
        assert ":" in str(error)
        return
    check_plan(data, plan)
    run_programs(data, plan["programs"], seed=4)
    unlimited = copy.deepcopy(data)
    for mesh in unlimited["meshes"]:
        del mesh["receive_buffer_limit"]
    free = make_plan(load_spec(unlimited), budget_s=0.2)
    assert free.lower_bound_s <= plan["makespan_s"] * (1 + 1e-9)
    assert not free.proven_optimal or plan["makespan_s"] >= free.makespan_s * (1 - 1e-9)


WORDS = st.sampled_from([None, "link", "full-duplex", "half-duplex"])


# a mesh between two others, whose transfers take longer than computing: one at a time at each port
HALF_DUPLEX_CHAIN = {
    "microbatches": 4,
    "meshes": [{"name": f"m{k}"} for k in range(3)],
    "stages": [
        {"name": f"s{k}", "mesh": f"m{k}", "forward_s": 1, "backward_input_s": 1, "backward_weight_s": 1}
        for k in range(3)
    ],
    "edges": [{"source": f"s{k}", "target": f"s{k + 1}", "forward_s": 4, "backward_s": 4} for k in range(2)],
    "network": {"contention": "link"},
    "schedule": "auto",
}


@pytest.mark.slow
@examples(40, 9)
@example(data=HALF_DUPLEX_CHAIN, words=[("half-duplex", "half-duplex")] * 3)
@given(data=random_specs(), words=st.lists(st.tuples(WORDS, WORDS), min_size=15, max_size=15))
def test_each_link_is_shared_as_its_own_contention_says(data, words):
    """The checker keeps what transfers of each contention occupy apart, and no two of one at the same time."""
    data = copy.deepcopy(data)
    pairs = itertools.combinations([mesh["name"] for mesh in data["meshes"]], 2)
    links = [
        {"source": source, "target": target, "contention": word}
        for pair, both in zip(pairs, words, strict=False)
        for (source, target), word in zip((pair, pair[::-1]), both, strict=True)
        if word is not None
    ]
    if data["network"]["contention"] == "none":
        data["network"]["contention"] = "link"
    costs = {(link["source"], link["target"]): link for link in data["network"].get("links", [])}
    for link in links:
        costs[link["source"], link["target"]] = {**costs.get((link["source"], link["target"]), {}), **link}
    data["network"]["links"] = list(costs.values())
    plan = json.loads(make_plan(load_spec(data), budget_s=0.05).model_dump_json())
    check_plan(data, plan)
    run_programs(data, plan["programs"], seed=9)


PLACED = {
    "gpipe": "one",
    "1f1b": "one",
    "eager-1f1b": "one",
    "zb-h1": "one",
    "interleaved-1f1b": "loop",
    "zb-v": "v",
    "inference": "any",
}


@examples(60, 3)
@given(data=st.data(), name=st.sampled_from(sorted(PLACED)))
def test_a_named_schedule_on_a_placement_that_fits_it_is_feasible(data, name):
    spec = data.draw(random_specs(limits=False, placement=PLACED[name]))
    spec = {**spec, "schedule": name, "split_backward": None, "max_in_flight": None}
    plan = make_plan(load_spec(spec))  # never refused
    assert plan.chosen == name
    check_plan(spec, json.loads(plan.model_dump_json()))
    run_programs(spec, plan.programs, seed=2)


@examples(60, 4)
@given(data=random_specs(), name=st.sampled_from(sorted(PLACED)))
def test_a_named_schedule_with_limits_or_on_another_placement_is_feasible_or_refused_with_a_reason(
    data, name
):
    data = {**data, "schedule": name, "split_backward": None}
    try:
        plan = make_plan(load_spec(data))
    except SpecError as error:
        assert ":" in str(error)
        return
    check_plan(data, json.loads(plan.model_dump_json()))
    run_programs(data, plan.programs, seed=2)


@examples(25, 5)
@given(data=random_specs(limits=False))
def test_a_plan_written_as_orders_and_read_back_is_as_long(data):
    from service.scheduler.views.render import plan_orders

    data = {**data, "network": {"contention": "none"}, "overlap": True}
    spec = load_spec(data)
    plan = make_plan(spec, budget_s=0)
    again = make_plan(load_spec({**data, "schedule": "csv", "orders": plan_orders(spec, plan)}))
    assert abs(again.makespan_s - plan.makespan_s) <= 1e-9 * max(plan.makespan_s, 1e-300)
