"""memory_bytes: static bytes, activations, stashes and buffers together, beside an independent solver and checker."""

import json
import random

import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.problem import build_problem
from service.scheduler.problem.spec import SpecError
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.search.bounds import lower_bounds
from tests.service.scheduler.checker import check_plan, run_programs
from tests.service.scheduler.search.test_bounds import random_graph
from tests.service.scheduler.solver import optimum
from tests.service.scheduler.specs import chain, measured
from tests.tiers import some_by_day

GRAPHS, PARTS = 64, 4


def limited_graph(seed):
    """A random graph whose edges carry bytes, with memory for one microbatch and a little more on each mesh."""
    draw = random.Random(seed)
    data = random_graph(seed)
    data["network"]["bandwidth_bytes_per_s"] = 1
    for edge in data["edges"]:
        edge["forward_bytes"], edge["backward_bytes"] = edge.pop("forward_s"), edge.pop("backward_s")
    for stage in data["stages"]:
        stage["static_bytes"] = draw.randint(0, 20)
    for mesh in data["meshes"]:
        mesh.pop("activation_limit_bytes", None)
        here = {s["name"] for s in data["stages"] if s["mesh"] == mesh["name"]}
        least = sum(s["static_bytes"] + s["activation_bytes"] for s in data["stages"] if s["name"] in here)
        least += sum(
            max(e["forward_bytes"], e["backward_bytes"])
            for e in data["edges"]
            if (e["source"] in here) != (e["target"] in here)
        )
        mesh["memory_bytes"] = least + draw.choice([0, 1, 2, 4, 8])
    return data


@some_by_day(("seeds", "least_limited"), [(range(5), 4), (range(5, 12), 4)], by_day=1, ids=str)
@some_by_day("recomputed", [True, False], by_day=1)
def test_memory_that_no_timeline_reaches_is_no_limit(recomputed, seeds, least_limited):
    """The plan is that without memory_bytes, to the last slot; with one byte less there is a limit again."""
    limited = 0
    for seed in seeds:
        data = limited_graph(seed)
        for mesh in data["meshes"]:
            del mesh["memory_bytes"]
        for stage in data["stages"]:
            if recomputed:
                stage["rematerialised_bytes"] = 3
        most = build_problem(load_spec(data)).most_bytes.tolist()
        plans = []
        for room in (None, 0, 1_000_000):
            for mesh, held in zip(data["meshes"], most, strict=True):
                mesh["memory_bytes"] = None if room is None else held + room
            assert (build_problem(load_spec(data)).memory_limit == -1).all()
            plan = make_plan(load_spec(data), budget_s=0.03)
            assert all(mesh.peak_memory_bytes <= held for mesh, held in zip(plan.meshes, most, strict=True))
            plans.append((plan.makespan_s, plan.slots, plan.programs))
        assert plans[0] == plans[1] == plans[2], seed
        for mesh, held in zip(data["meshes"], most, strict=True):
            mesh["memory_bytes"] = held - 1
        try:
            problem = build_problem(load_spec(data))
        except SpecError:  # one microbatch fills it
            continue
        assert problem.memory_limit.tolist() == [held - 1 for held in most]
        limited += 1
    assert limited >= least_limited


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_plan_stays_within_memory_and_near_the_optimum_under_it(part):
    checked = optimal = 0
    for seed in range(part, GRAPHS, PARTS):
        data = limited_graph(seed)
        best = optimum(data)
        if best is None:
            continue
        checked += 1
        plan = make_plan(load_spec(data), budget_s=0.5)
        check_plan(data, json.loads(plan.model_dump_json()))
        assert plan.lower_bound_s <= best * (1 + 1e-9) and plan.makespan_s >= best * (1 - 1e-9), seed
        assert not plan.proven_optimal or plan.makespan_s == pytest.approx(best), seed
        # the solver may hold anything back until there is room; programs wait for what ends on their own mesh
        assert plan.makespan_s <= 2 * best, seed
        optimal += plan.makespan_s <= best * (1 + 1e-9)
    assert checked >= 10 and optimal >= 0.55 * checked


def bytes_chain(stages, microbatches, size, **fields):
    data = chain(stages, microbatches, contention="link", **fields)
    data["network"]["bandwidth_bytes_per_s"] = size
    for edge in data["edges"]:
        del edge["forward_s"], edge["backward_s"]
        edge["forward_bytes"] = edge["backward_bytes"] = size
    return data


@pytest.mark.parametrize(
    ("microbatches", "size", "memory", "before"), [(3, 6, 12, 91), (4, 3, 11, 40), (4, 6, 18, 68)]
)
def test_a_forward_waits_until_what_was_sent_before_it_is_gone(microbatches, size, memory, before):
    data = bytes_chain(3, microbatches, 1, schedule="auto")
    for edge in data["edges"]:
        edge["forward_bytes"] = edge["backward_bytes"] = size  # at one byte a second: slower than the stages
    data["meshes"][0]["memory_bytes"] = memory
    plan = make_plan(load_spec(data), budget_s=0.5)
    check_plan(data, json.loads(plan.model_dump_json()))
    run_programs(data, plan.programs, seed=3)
    assert plan.makespan_s < before  # the best order that begins everything as early as it can
    program = plan.programs["m0"]
    sends = {one["record"] for one in program if one["op"].startswith("SEND")}
    assert any(one["op"] == "F" and sends & set(one["wait"]) for one in program)


@pytest.mark.slow
def test_a_plan_within_memory_bytes_is_proven_by_a_solver_that_counts_them():
    data = measured(4, 8, 17, memory=2.4)
    plan = make_plan(load_spec(data), budget_s=3)
    bounds = lower_bounds(build_problem(load_spec(data), split=True))
    assert max(bounds.values()) < 0.99 * plan.makespan_s  # none of those that are known before any plan
    assert plan.proven_optimal
    check_plan(data, json.loads(plan.model_dump_json()))


def test_the_peak_of_a_mesh_is_what_a_hand_count_says():
    # 1f1b, two stages, F = 1, B = 2, transfers of one second and three bytes, activations of two
    data = bytes_chain(2, 2, 3, schedule="1f1b")
    data["stages"][0]["static_bytes"] = 10
    plan = make_plan(load_spec(data))
    first, last = plan.meshes
    # F0 F1 back to back; at 1 F0's output leaves until 2, at 2 that of F1: two activations and one output
    assert first.peak_memory_bytes == 10 + 2 + 2 + 3
    # 2: F0 with its input; 3: the input of F1 arrives (2..3) while B0 runs; 5: B0's gradient leaves while F1 runs
    assert last.peak_memory_bytes == 2 + 3 + 3


@pytest.mark.slow
def test_a_named_schedule_over_memory_is_refused_with_the_bytes_that_it_needs():
    data = bytes_chain(4, 8, 3, schedule="gpipe")
    for mesh in data["meshes"]:
        mesh["memory_bytes"] = 20
    with pytest.raises(
        SpecError, match=r"holds (\d+) bytes on mesh 'm\d', over its memory_bytes 20: raise"
    ) as refused:
        make_plan(load_spec(data))
    assert "use schedule 'auto'" in str(refused.value)
    plan = make_plan(load_spec({**data, "schedule": "auto"}), budget_s=1)
    assert max(mesh.peak_memory_bytes for mesh in plan.meshes) <= 20


def test_a_mesh_too_small_for_its_weights_is_refused_before_anything_is_planned():
    data = bytes_chain(2, 2, 3, schedule="auto")
    data["stages"][1]["static_bytes"] = 50
    data["meshes"][1]["memory_bytes"] = 51
    with pytest.raises(SpecError, match=r"'m1' has memory_bytes 51, less than the 50 .* at least 52"):
        load_spec(data)
