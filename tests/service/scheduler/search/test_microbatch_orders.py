"""The order of microbatches of different lengths: against Johnson's rule, all orders, and an independent solver."""

import itertools
import json
import random

import numpy as np
import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.problem import build_problem
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.search import search as search_module
from service.scheduler.search.bounds import lower_bounds
from service.scheduler.search.microbatch_orders import begun_order, candidate_orders, johnson_order
from service.scheduler.search.search import search
from tests.service.scheduler.checker import check_plan, run_programs
from tests.service.scheduler.search.test_bounds import random_graph
from tests.service.scheduler.solver import optimum
from tests.service.scheduler.specs import chain, in_buckets, scaled_buckets
from tests.tiers import some_by_day


def flow_shop(seconds, order, transfer=0.0):
    """The makespan of forwards alone, stage by stage in one order: `seconds[m]` by stage."""
    ends = [0.0] * len(seconds[0])
    for m in order:
        before = 0.0
        for stage, length in enumerate(seconds[m]):
            ready = before + (transfer if stage else 0.0)
            ends[stage] = before = max(ready, ends[stage]) + length
    return ends[-1]


def forwards(seconds, **fields):
    """A chain of a stage for each column of `seconds`, a bucket for each row, backwards of no length."""
    stages = len(seconds[0])
    data = chain(stages, len(seconds), transfer=0.0, backward=0.0, contention="none", **fields)
    data = scaled_buckets(data, list(range(len(seconds))), [1.0] * len(seconds))
    for stage in range(stages):
        for bucket, row in zip(data["length_buckets"], seconds, strict=True):
            bucket["stages"][stage]["forward_s"] = row[stage]
        data["stages"][stage]["forward_s"] = max(row[stage] for row in seconds)
    return data


@pytest.mark.parametrize("seed", range(6))
def test_on_two_meshes_forwards_take_as_long_as_in_johnsons_order(seed):
    """Johnson's rule: those that are shorter on the first mesh, ascending there; then the rest, descending on the second."""
    draw = random.Random(seed)
    seconds = [(draw.lognormvariate(0, 0.8), draw.lognormvariate(0, 0.8)) for _ in range(6)]
    ahead = sorted((m for m in range(6) if seconds[m][0] < seconds[m][1]), key=lambda m: seconds[m][0])
    behind = sorted((m for m in range(6) if seconds[m][0] >= seconds[m][1]), key=lambda m: -seconds[m][1])
    best = flow_shop(seconds, ahead + behind)
    assert best == pytest.approx(min(flow_shop(seconds, o) for o in itertools.permutations(range(6))))
    assert johnson_order(*np.array(seconds).T).tolist() == ahead + behind
    # backwards of no length wait until the last forward of a mesh: nothing but the flow shop is left
    plan = make_plan(load_spec(forwards(seconds, schedule="auto")), budget_s=0)
    assert plan.makespan_s == pytest.approx(best, rel=1e-12)


def test_on_one_mesh_every_order_takes_the_sum():
    data = scaled_buckets(chain(2, 5, meshes=[0, 0], schedule="auto"), [0, 1, 2, 1, 0], [0.73, 1.31, 2.17])
    plan = make_plan(load_spec(data))
    assert plan.makespan_s == pytest.approx(2 * 3 * (2 * 0.73 + 2 * 1.31 + 2.17), rel=1e-12)
    assert plan.proven_optimal


def test_a_schedule_with_a_name_keeps_the_order_as_given():
    draw = random.Random(4)
    seconds = [[draw.lognormvariate(0, 0.8) for _ in range(3)] for _ in range(7)]
    data = forwards(seconds, schedule="inference")
    for edge in (*data["edges"], *(e for bucket in data["length_buckets"] for e in bucket["edges"])):
        edge["forward_s"] = 0.37
    plan = make_plan(load_spec(data))
    assert plan.makespan_s == pytest.approx(flow_shop(seconds, range(7), 0.37), rel=1e-12)
    for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1"):
        data = scaled_buckets(chain(3, 6, schedule=name, transfer=0.2), [0, 2, 1, 2, 0, 1], [0.7, 1.3, 2.9])
        plan = json.loads(make_plan(load_spec(data)).model_dump_json())
        check_plan(data, plan)
        run_programs(data, plan["programs"], seed=1)
        for stage in ("s0", "s1", "s2"):
            for action in ("F", "BI", "W"):
                started = [
                    s["microbatch"]
                    for s in plan["slots"]
                    if s["lane"] == "compute" and s["stage"] == stage and s["action"] in action
                ]
                assert started == sorted(started)


def unequal_graph(seed):
    """A random graph whose costs are drawn anew for each of three buckets, in whole numbers."""
    data, draw = random_graph(seed), random.Random(seed + 1000)
    bucket_of = [0, *(draw.randrange(3) for _ in range(data["microbatches"] - 1))]
    data = in_buckets(
        data, bucket_of, lambda b, field, value: draw.randint(0, int(value)) if b and value else value
    )
    for stage in (stage for bucket in data["length_buckets"] for stage in bucket["stages"]):
        stage["weight_stash_bytes"] = min(stage["weight_stash_bytes"], stage["activation_bytes"])
    return data


@some_by_day("seed", range(80), by_day=12)
def test_no_bound_is_above_the_optimum_over_all_orders_and_a_proven_plan_reaches_it(seed):
    data = unequal_graph(seed)
    best = optimum(data)
    assert best is not None
    spec = load_spec(data)
    for name, bound in lower_bounds(build_problem(spec, split=data["split_backward"])).items():
        assert bound <= best * (1 + 1e-9), name
    plan = make_plan(spec, budget_s=0.5)
    check_plan(data, json.loads(plan.model_dump_json()))
    run_programs(data, plan.programs, seed=seed)
    assert best * (1 - 1e-9) <= plan.makespan_s <= best * 1.05
    assert plan.lower_bound_s <= best * (1 + 1e-9)
    if plan.proven_optimal:
        assert plan.makespan_s == pytest.approx(best, rel=1e-9)


def test_whichever_order_is_given_the_plan_is_as_long():
    scales, found = [0.71, 1.13, 2.57], set()
    for bucket_of in itertools.islice(itertools.permutations([0, 0, 1, 2, 2]), 0, 120, 17):
        data = chain(3, 5, schedule="auto", transfer=0.4, split_backward=False)
        for mesh in data["meshes"]:
            mesh["activation_limit_bytes"] = 700
        for stage in data["stages"]:
            stage["activation_bytes"] = 200
        plan = make_plan(load_spec(scaled_buckets(data, list(bucket_of), scales)), budget_s=3)
        assert plan.proven_optimal
        found.add(round(plan.makespan_s, 9))
    assert len(found) == 1


def skewed(seed, limit=None, microbatches=12):
    """Four stages, four buckets of log-normal lengths, of which a third of a layer's cost is attention's."""
    draw = random.Random(seed)
    lengths = sorted(draw.lognormvariate(0, 0.8) for _ in range(4))
    seconds = [2 / 3 * x + x * x / 3 for x in lengths]
    data = chain(4, microbatches, schedule="auto", transfer=0.25)
    for stage, mesh in zip(data["stages"], data["meshes"], strict=True):
        stage.update(activation_bytes=1000, weight_stash_bytes=300)
        if limit is not None:
            mesh["activation_limit_bytes"] = max(round(1000 * limit), round(1000 * lengths[-1]))
    return in_buckets(
        data,
        [draw.randrange(3) for _ in range(microbatches - 1)] + [3],
        lambda b, field, value: round(value * lengths[b]) if field.endswith("bytes") else value * seconds[b],
    )


@pytest.mark.parametrize("limit", [None, 2.5])
def test_rules_try_other_orders_and_keep_the_best(limit, monkeypatch):
    shorter = 0
    for seed in range(6):
        problem = build_problem(load_spec(skewed(seed, limit)), split=True)
        best = search(problem, [], budget_s=0)
        with monkeypatch.context() as patched:
            patched.setattr(search_module, "candidate_orders", lambda problem: candidate_orders(problem)[:1])
            patched.setattr(search_module, "_CONSTRUCTIVE_ORDER_CHANGES", 0)
            given = search(problem, [], budget_s=0)
        assert begun_order(given.timeline).tolist() == list(range(problem.microbatches))
        assert best.timeline.makespan <= given.timeline.makespan * (1 + 1e-9)
        shorter += best.timeline.makespan < 0.99 * given.timeline.makespan
    assert shorter >= 3


def test_the_candidates_are_permutations_of_which_no_two_have_the_same_costs():
    problem = build_problem(load_spec(skewed(3)))
    orders = candidate_orders(problem)
    assert orders[0].tolist() == list(range(12)) and len(orders) > 6
    assert all(sorted(order.tolist()) == list(range(12)) for order in orders)
    assert len({tuple(problem.bucket_of_microbatch[order]) for order in orders}) == len(orders)
    alike = build_problem(load_spec(chain(3, 5, schedule="auto")))
    assert [order.tolist() for order in candidate_orders(alike)] == [list(range(5))]


def test_two_that_do_not_fit_together_go_round_one_after_the_other():
    data = chain(2, 4, forward=30, backward=60, transfer=69, schedule="auto", contention="link")
    for stage, mesh in zip(data["stages"], data["meshes"], strict=True):
        stage["activation_bytes"], mesh["activation_limit_bytes"] = 300, 599
    spec = load_spec(scaled_buckets(data, [0, 0, 0, 1], [1.0, 1 / 3]))
    bounds = lower_bounds(build_problem(spec, split=False))
    assert bounds["memory time"] == pytest.approx(3 * (30 + 69 + 30 + 60 + 69 + 60), rel=1e-12)
    fitting = [mesh.model_copy(update={"activation_limit_bytes": 600}) for mesh in spec.meshes]
    bounds = lower_bounds(build_problem(spec.model_copy(update={"meshes": fitting}), split=False))
    assert bounds["memory time"] < 2 * 318


def test_longest_first_is_no_rule_under_a_limit_of_memory():
    """Two long ones do not fit together; beside a long one there is room for a short one, if that comes next."""
    data = chain(2, 4, forward=30, backward=60, transfer=69, schedule="auto", contention="link")
    for stage, mesh in zip(data["stages"], data["meshes"], strict=True):
        stage["activation_bytes"], mesh["activation_limit_bytes"] = 300, 400
    data = scaled_buckets({**data, "split_backward": False}, [0, 0, 1, 1], [1.0, 1 / 3])
    order = ["0F0", "0B0", "0F1", "0B1", "0F2", "0F3", "0B2", "0B3"]
    orders = {"m0": order, "m1": [f"1{action[1:]}" for action in order]}
    longest_first = make_plan(load_spec({**data, "schedule": "csv", "orders": orders}))
    plan = make_plan(load_spec(data))
    # a long one goes there and back in 318 s, the two short ones together in 152; the forward of one comes before all
    assert longest_first.makespan_s == pytest.approx(2 * 318 + 152, rel=1e-12)
    assert plan.proven_optimal and plan.makespan_s == pytest.approx(2 * 318 + 10, rel=1e-12)
