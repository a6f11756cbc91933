"""`python -m tests.benchmarks.microbatch_orders`: microbatches of unequal lengths in three orders (a minute).

Four stages, 16 microbatches, log-normal lengths (sigma 0.8) in four buckets, padded to the longest of their bucket; a
third of the cost of a mean microbatch is attention's, which grows with the square of the length. Makespans by the same
priority rules with the order as given, with the longest first, and with every order that `auto` tries; then plans of
`auto` without and with a budget, and the processor time of the one without, all in, once kernels are compiled.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from service.scheduler.planner import compile_kernels, make_plan
from service.scheduler.problem.problem import Problem, build_problem
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.search.microbatch_orders import candidate_orders
from service.scheduler.search.priority_rules import ConstructivePlanner, standard_rules

STAGES, MICROBATCHES, BUCKETS = 4, 16, 4
SIGMA, ATTENTION = 0.8, 1 / 3
TRANSFER_S = 0.25  # of a mean microbatch, whose forward takes about a second
MEAN_BYTES = 1000  # of activations of a mean microbatch
LIMITS = (None, 4.0, 2.5)  # mean microbatches that fit into a mesh
SEEDS = range(6)
BUDGET_S, ROUNDS = 3.0, 5


def spec_of(seed: int, limit: float | None) -> dict[str, Any]:
    """A PipelineSpec of buckets by quantiles of the drawn lengths."""
    draw = random.Random(seed)
    lengths = [draw.lognormvariate(0.0, SIGMA) for _ in range(MICROBATCHES)]
    ordered, share = sorted(lengths), MICROBATCHES // BUCKETS
    longest = [ordered[(bucket + 1) * share - 1] for bucket in range(BUCKETS)]
    mean = statistics.fmean(lengths)
    speeds = [draw.lognormvariate(0.0, 0.1) for _ in range(STAGES)]

    def costs(length: float) -> dict[str, Any]:
        relative = length / mean
        seconds = (1 - ATTENTION) * relative + ATTENTION * relative**2
        stages = [
            {
                "forward_s": speed * seconds,
                "backward_input_s": 1.1 * speed * seconds,
                "backward_weight_s": 0.9 * speed * seconds,
                "activation_bytes": round(MEAN_BYTES * relative),
                "weight_stash_bytes": round(0.3 * MEAN_BYTES * relative),
            }
            for speed in speeds
        ]
        transfer_s = TRANSFER_S * relative
        return {
            "stages": stages,
            "edges": [{"forward_s": transfer_s, "backward_s": transfer_s}] * (STAGES - 1),
        }

    most = costs(longest[-1])
    room = {} if limit is None else {"activation_limit_bytes": max(round(MEAN_BYTES * limit), held(most))}
    return {
        "microbatches": MICROBATCHES,
        "meshes": [{"name": f"m{s}", **room} for s in range(STAGES)],
        "stages": [{"name": f"s{s}", "mesh": f"m{s}", **stage} for s, stage in enumerate(most["stages"])],
        "edges": [{"source": f"s{s}", "target": f"s{s + 1}", **edge} for s, edge in enumerate(most["edges"])],
        "network": {"contention": "full-duplex"},
        "schedule": "auto",
        "length_buckets": [costs(length) for length in longest],
        "bucket_of": [next(b for b, most in enumerate(longest) if length <= most) for length in lengths],
    }


def held(costs: dict[str, Any]) -> int:
    return max(stage["activation_bytes"] for stage in costs["stages"])


def best_of_rules(problem: Problem, orders: Iterable[np.ndarray]) -> float:
    """The least makespan of the priority rules with these orders, in seconds."""
    rules = ConstructivePlanner(problem)
    timelines = (
        rules.follow(replace(rule, order=order)) for order in orders for rule in standard_rules(problem)
    )
    return min(timeline.makespan for timeline in timelines if timeline is not None)


def main() -> int:
    compile_kernels()
    print(
        "| room | seed | as given | longest first | best order | auto, no budget | auto | bound | order of buckets | ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for limit in LIMITS:
        gains = []
        for seed in SEEDS:
            spec = load_spec(spec_of(seed, limit))
            problem = build_problem(spec, split=True)
            longest_first = np.argsort(-problem.duration.sum(axis=0), kind="stable")
            orders = candidate_orders(problem)
            given_s, longest_s = (best_of_rules(problem, [o]) for o in (orders[0], longest_first))
            best_s = best_of_rules(problem, orders)
            seconds = []
            for _ in range(ROUNDS):
                began = time.process_time()
                quick = make_plan(spec, budget_s=0)
                seconds.append(time.process_time() - began)
            plan = make_plan(spec, budget_s=BUDGET_S)
            begun = sorted(
                (s.start_s, s.microbatch) for s in plan.slots if (s.action, s.stage) == ("F", "s0")
            )
            order = "".join(str(spec.bucket_of[m]) for _, m in begun)
            gains.append((given_s / quick.makespan_s, longest_s / quick.makespan_s))
            print(
                f"| {limit or 'all'} | {seed} | {given_s:.2f} | {longest_s:.2f} | {best_s:.2f} | {quick.makespan_s:.2f} "
                f"| {plan.makespan_s:.2f} | {plan.lower_bound_s:.2f} | {order} | {1000 * statistics.median(seconds):.0f} |"
            )
        given, longest = (statistics.geometric_mean(ratios) for ratios in zip(*gains, strict=True))
        print(f"| {limit or 'all'} | mean | {given:.3f} | {longest:.3f} | | 1 | | | | |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
