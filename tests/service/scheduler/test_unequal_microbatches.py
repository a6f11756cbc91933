"""Random problems of microbatches of unequal lengths: feasible plans within memory, proofs that notice what is wrong."""

import copy
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.scheduler.planner import make_plan, replan
from service.scheduler.problem.problem import build_problem
from service.scheduler.problem.spec import SpecError
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.programs.check_programs import PlanError, check_programs, check_slots
from service.scheduler.programs.decode import read_programs
from service.scheduler.programs.replay import replay
from service.scheduler.schedules.registry import SCHEDULES
from service.scheduler.search.bounds import lower_bounds
from service.scheduler.views.render import FORMATS, plan_orders, render
from tests.service.scheduler.checker import check_plan, run_programs
from tests.service.scheduler.solver import optimum
from tests.service.scheduler.specs import chain, in_buckets, measured, random_specs, scaled_buckets
from tests.service.scheduler.test_properties import PLACED, examples
from tests.tiers import some_by_day


def drawn_buckets(data, seed):
    """Every cost of three buckets by itself, as far as one microbatch of each fits; edges of one tensor alike."""
    draw = random.Random(seed)
    shares = {}

    def cost(bucket, field, value):
        share = draw.choice([0, 0.37, 0.8, 1]) if bucket else 1
        return int(value * share) if field.endswith("bytes") else value * share

    data = in_buckets(data, [draw.randrange(3) for _ in range(data["microbatches"] - 1)] + [2], cost)
    for number, bucket in enumerate(data["length_buckets"]):
        for stage in bucket["stages"]:
            stage["weight_stash_bytes"] = min(stage["weight_stash_bytes"], stage["activation_bytes"])
        mesh_of = {stage["name"]: stage["mesh"] for stage in data["stages"]}
        for edge, costs in zip(data["edges"], bucket["edges"], strict=True):
            if edge.get("tensor") is not None:
                key = number, edge["source"], edge["tensor"], mesh_of[edge["target"]]
                costs.update(shares.setdefault(key, dict(costs)))
    return data


@examples(40, 21)
@given(data=random_specs(), seed=st.integers(0, 10**6))
def test_a_searched_plan_is_feasible_and_no_named_schedule_beats_it(data, seed):
    data = drawn_buckets(data, seed)
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


@examples(30, 22)
@given(data=st.data(), name=st.sampled_from(sorted(PLACED)), seed=st.integers(0, 10**6))
def test_a_named_schedule_on_a_placement_that_fits_it_is_feasible(data, name, seed):
    spec = data.draw(random_specs(limits=False, placement=PLACED[name]))
    spec = drawn_buckets({**spec, "schedule": name, "split_backward": None, "max_in_flight": None}, seed)
    plan = make_plan(load_spec(spec))
    assert plan.chosen == name
    check_plan(spec, json.loads(plan.model_dump_json()))
    run_programs(spec, plan.programs, seed=2)


@pytest.mark.parametrize("seed", range(6))
def test_memory_for_everything_holds_with_tensors_of_every_size(seed):
    draw = random.Random(seed)
    data = measured(
        3, 8, seed, memory=2.2, loops=1 + seed % 2, contention=draw.choice(["link", "full-duplex"])
    )
    for edge in data["edges"]:
        for way in ("forward_bytes", "backward_bytes"):
            edge[way] *= draw.choice([1, 8])
    data = scaled_buckets(data, [draw.randrange(4) for _ in range(8)], [0.37, 0.61, 1.0, 1.23])
    if seed % 3 == 0:
        for mesh in data["meshes"]:
            mesh["receive_buffer_limit"] = 4
    plan = make_plan(load_spec(data), budget_s=0.3)
    assert not plan.notes
    check_plan(data, json.loads(plan.model_dump_json()))
    run_programs(data, plan.programs, seed=seed)


def short_of_memory(seed):
    """Whole costs of a chain by bucket, tensors of one byte a second, and little memory for everything."""
    draw = random.Random(seed)
    stages, microbatches = draw.choice([2, 3]), draw.choice([3, 4])
    contention, split = draw.choice(["link", "full-duplex"]), draw.random() < 0.5
    data = chain(stages, microbatches, schedule="auto", contention=contention, split_backward=split)
    data["network"]["bandwidth_bytes_per_s"] = 1
    for stage in data["stages"]:
        for field in ("forward_s", "backward_input_s", "activation_bytes"):
            stage[field] = draw.randint(1, 6)
        stage["backward_weight_s"], stage["static_bytes"] = draw.randint(0, 4), draw.randint(0, 3)
        stage["weight_stash_bytes"] = draw.randint(0, stage["activation_bytes"])
        stage["rematerialised_bytes"] = draw.choice([0, 0, 2])
    for edge in data["edges"]:
        edge.update(forward_s=None, backward_s=None)
        edge.update(forward_bytes=draw.randint(1, 5), backward_bytes=draw.randint(1, 5))
    bucket_of = [0, *(draw.randrange(3) for _ in range(microbatches - 1))]
    data = in_buckets(
        data, bucket_of, lambda b, field, most: draw.randint(1, int(most)) if b and most else most
    )
    for stage in (stage for bucket in data["length_buckets"] for stage in bucket["stages"]):
        stage["weight_stash_bytes"] = min(stage["weight_stash_bytes"], stage["activation_bytes"])
    for stage, mesh in zip(data["stages"], data["meshes"], strict=True):
        needed = stage["activation_bytes"] + stage["rematerialised_bytes"]
        mesh["memory_bytes"] = stage["static_bytes"] + needed + 10 + draw.randint(0, 8)
        if draw.random() < 0.3:
            mesh["activation_limit_bytes"] = needed + draw.randint(0, 6)
    return data


@some_by_day("seed", range(40), by_day=8)
def test_within_memory_for_everything_no_plan_or_bound_passes_the_optimum(seed):
    data = short_of_memory(seed)
    best, spec = optimum(data), load_spec(data)
    assert best is not None
    for name, bound in lower_bounds(build_problem(spec, split=data["split_backward"])).items():
        assert bound <= best * (1 + 1e-9), name
    plan = make_plan(spec, budget_s=0.5)
    assert not plan.notes
    check_plan(data, json.loads(plan.model_dump_json()))
    run_programs(data, plan.programs, seed=seed)
    assert plan.lower_bound_s <= best * (1 + 1e-9) and plan.makespan_s >= best * (1 - 1e-9)
    if plan.proven_optimal:
        assert plan.makespan_s == pytest.approx(best, rel=1e-9)


def limited(limit, bucket_of=(0, 1, 1, 0, 1, 1)):
    data = chain(3, len(bucket_of), schedule="auto", transfer=0.3)
    for stage, mesh in zip(data["stages"], data["meshes"], strict=True):
        stage.update(activation_bytes=100, weight_stash_bytes=40)
        mesh["activation_limit_bytes"] = limit
    return scaled_buckets(data, list(bucket_of), [1.0, 0.37])


def programs_of(plan):
    return {name: plan.program(name) for name in plan.programs}


def test_the_proof_counts_the_bytes_of_the_microbatches_that_are_there():
    plan = make_plan(load_spec(limited(137)))
    assert max(mesh.peak_activation_bytes for mesh in plan.meshes) == 137
    check_programs(load_spec(limited(137)), programs_of(plan))
    # the same programs with one short microbatch more that is long
    for bucket_of in ((0, 0, 1, 0, 1, 1), (0, 1, 0, 0, 1, 1), (0, 1, 1, 0, 0, 0)):
        with pytest.raises(
            PlanError, match=r"bytes of activations at .* over its activation_limit_bytes 137"
        ):
            check_programs(load_spec(limited(137, bucket_of)), programs_of(plan))
    everything = limited(None)
    for mesh in everything["meshes"]:
        mesh["memory_bytes"] = 136
    with pytest.raises(PlanError, match="holds 137 bytes, over its memory_bytes 136"):
        check_programs(load_spec(everything), programs_of(plan))


def test_the_proof_times_each_microbatch_by_its_costs():
    plan = make_plan(load_spec(limited(237)))
    problem, meshes = read_programs(load_spec(limited(237)), programs_of(plan))
    planned = replay(problem, meshes)
    check_slots(planned.timeline, planned)
    for bucket_of in ((1, 1, 1, 0, 1, 0), (0, 1, 0, 1, 1, 1)):
        problem, meshes = read_programs(load_spec(limited(237, bucket_of)), programs_of(plan))
        with pytest.raises(PlanError, match="is planned to start at"):
            check_slots(planned.timeline, replay(problem, meshes))


def test_a_source_keeps_no_more_in_flight_than_it_may_in_whatever_order():
    for cap in (1, 2, 3):
        data = {**limited(None), "max_in_flight": cap}
        plan = make_plan(load_spec(data), budget_s=1)
        slots = [s for s in plan.slots if s.lane == "compute" and s.stage == "s0"]
        begun = sorted(s.start_s for s in slots if s.action == "F")
        ended = sorted(s.end_s for s in slots if s.action in "BW")
        assert all(start >= end - 1e-9 for start, end in zip(begun[cap:], ended, strict=False))
        with pytest.raises(PlanError, match=rf"against max_in_flight {cap}"):
            gpipe = make_plan(load_spec({**limited(None), "schedule": "gpipe"}))
            check_programs(load_spec(data), programs_of(gpipe))


def test_every_view_shows_a_plan_and_its_orders_read_back_are_as_long():
    data = limited(237)
    spec = load_spec(data)
    plan = make_plan(spec, budget_s=0.2)
    for format in set(FORMATS) - {"table", "events"}:
        assert render(spec, plan, format)
    text, orders = render(spec, plan, "text"), plan_orders(spec, plan)
    begun = [action.removeprefix("0F") for action in orders["m0"] if action.startswith("0F")]
    assert f"order         {' '.join(begun)}\n" in text and begun != sorted(begun)
    again = make_plan(load_spec({**data, "schedule": "csv", "orders": orders}))
    assert again.makespan_s == pytest.approx(plan.makespan_s, rel=1e-9)
    assert "order  " not in render(load_spec(chain(3, 4)), make_plan(load_spec(chain(3, 4))), "text")


def test_a_running_plan_is_replaced_by_a_shorter_order_of_unequal_microbatches():
    data = limited(237)
    running = make_plan(load_spec({**data, "schedule": "1f1b"}))
    shorter = replan(load_spec(data), programs_of(running), budget_s=0.5)
    assert shorter is not None and shorter.planned_s < running.makespan_s
    assert shorter.planned_s == pytest.approx(make_plan(load_spec(data), budget_s=0.5).makespan_s, rel=0.02)
    check_plan(data, json.loads(shorter.plan.model_dump_json()))


def test_the_same_spec_gives_the_same_plan_byte_for_byte():
    data = limited(237, tuple(np.random.default_rng(3).integers(0, 2, 9).tolist()))
    first = make_plan(load_spec(data), budget_s=0.5).model_dump_json()
    assert make_plan(load_spec(copy.deepcopy(data)), budget_s=0.5).model_dump_json() == first
