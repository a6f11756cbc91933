"""Random problems: every plan passes verify and an independent checker, bounds hold, auto is never worse.

The same problems each time, by seeds that are written here; with SLOTLINE_TEST_NIGHTLY set, others each time and
twenty times as many. With SLOTLINE_TEST_SHARE only that share of them, where the same tests run many times over.
"""

import copy
import json
import os

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import SpecError, load_spec
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


PLACED = {
    "gpipe": "one",
    "1f1b": "one",
    "eager-1f1b": "one",
    "zb-h1": "one",
    "interleaved-1f1b": "loop",
    "zb-v": "v",
    "inference": "any",
}


@examples(100, 3)
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
