"""What auto calls optimal is optimal: every order of tiny problems is tried, microbatches in any order."""

import itertools
import random

import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec_checks import load_spec


def tiny(generator, placed, microbatches, edges, split, limits):
    cost = lambda: generator.choice([0, 1, 2, 3, 5])  # noqa: E731
    return {
        "microbatches": microbatches,
        "meshes": [
            {"name": f"m{p}", **({"activation_limit_bytes": limit} if limit else {})}
            for p, limit in enumerate(limits)
        ],
        "stages": [
            {
                "name": f"s{i}",
                "mesh": f"m{p}",
                "forward_s": 1 + cost(),
                "backward_input_s": 1 + cost(),
                "backward_weight_s": cost(),
                "activation_bytes": 2,
                "weight_stash_bytes": 1,
            }
            for i, p in enumerate(placed)
        ],
        "edges": [
            {"source": f"s{a}", "target": f"s{b}", "forward_s": cost(), "backward_s": cost()}
            for a, b in edges
        ],
        "network": {"contention": "none"},
        "split_backward": split,
        "schedule": "auto",
    }


def best_of_all_orders(data):
    """The least makespan over every interleaving on every mesh that keeps dependencies and memory."""
    stages, microbatches = data["stages"], range(data["microbatches"])
    place = {s["name"]: s["mesh"] for s in stages}
    needs, length, lane_actions = {}, {}, {mesh["name"]: [] for mesh in data["meshes"]}
    ops = "FIW" if data["split_backward"] else "FB"
    back = ops[1]
    for s in stages:
        for m in microbatches:
            parts = {"F": s["forward_s"], "I": s["backward_input_s"], "W": s["backward_weight_s"]}
            parts["B"] = parts["I"] + parts["W"]
            for op in ops:
                key = (op, s["name"], m)
                length[key] = parts[op]
                lane_actions[s["mesh"]].append(key)
                before = {"F": None, back: "F", "W": back}[op]
                needs[key] = [] if before is None else [((before, s["name"], m), 0)]
    for e in data["edges"]:
        away = place[e["source"]] != place[e["target"]]
        for m in microbatches:
            needs["F", e["target"], m].append((("F", e["source"], m), e["forward_s"] * away))
            needs[back, e["source"], m].append(((back, e["target"], m), e["backward_s"] * away))
    limits = {mesh["name"]: mesh.get("activation_limit_bytes", 10**9) for mesh in data["meshes"]}
    held = {"F": 2, "B": -2, "I": -1, "W": -1}

    def allowed(order, limit):
        level, seen = 0, set()
        for op, stage, m in order:
            if any(key in lane_set and key not in seen for key, _ in needs[op, stage, m]):
                return False
            seen.add((op, stage, m))
            level += held[op]
            if level > limit:
                return False
        return True

    choices = []
    for mesh, actions in lane_actions.items():
        lane_set = set(actions)
        choices.append([o for o in itertools.permutations(actions) if allowed(o, limits[mesh])])
    best = float("inf")
    for orders in itertools.product(*choices):
        end, position, moved = {}, [0] * len(orders), True
        while moved:
            moved = False
            for lane, order in enumerate(orders):
                while position[lane] < len(order):
                    key = order[position[lane]]
                    if any(need not in end for need, _ in needs[key]):
                        break
                    ready = [end[need] + delay for need, delay in needs[key]]
                    if position[lane]:
                        ready.append(end[order[position[lane] - 1]])
                    end[key] = max(ready, default=0) + length[key]
                    position[lane] += 1
                    moved = True
        if len(end) == len(length):
            best = min(best, max(end.values()))
    return best


SHAPES = [
    ([0, 1], 2, [(0, 1)], True, [2, 3]),
    ([0, 1], 2, [(0, 1)], True, [None, 2]),
    ([0, 1], 3, [(0, 1)], False, [None, 4]),
    ([0, 1, 0], 1, [(0, 1), (1, 2), (0, 2)], True, [4, None]),
    ([0, 0, 1], 2, [(0, 2), (1, 2)], False, [4, None]),
    ([0, 1, 2], 2, [(0, 1), (0, 2)], False, [4, 2, 2]),
    ([0, 1, 1, 0], 1, [(0, 1), (1, 2), (2, 3), (0, 3)], True, [4, None]),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_proven_optimum_is_the_best_of_all_orders(shape):
    generator = random.Random(str(shape))
    for _ in range(3):
        data = tiny(generator, *shape)
        plan = make_plan(load_spec(data))
        # proven in the planning model: with contention none the programs may take longer, and then nothing else is
        assert plan.lower_bound_s == pytest.approx(plan.makespan_s, rel=1e-9)
        assert plan.proven_optimal == (plan.programs_makespan_s <= plan.makespan_s * (1 + 1e-9))
        assert plan.makespan_s == pytest.approx(best_of_all_orders(data)), data
