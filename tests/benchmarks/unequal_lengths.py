"""Samples per second of microbatches padded to their own buckets, beside all of them padded to the longest sample.

`python -m tests.benchmarks.unequal_lengths`: a GPT in four meshes, 16 microbatches, log-normal lengths (σ 0.8), all workers
in this process. Both jobs are loaded at once and make their steps in turn, so that what else the machine does meets both;
the ratio is of the medians. They train on the same samples by the same seed, and their losses are compared. Then steps by
plans for their own lengths beside the same steps by the job's one plan, and the time of planning each.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from service.scheduler.job.step_plans import StepPlanner
from service.scheduler.planner import compile_kernels
from tests.worker.workers import Workers, mean_loss
from worker.contract.planned import parse_planned_job

STAGES, MICROBATCHES, ROWS = 4, 16, 4
LONGEST, SIGMA, MEDIAN = 256, 0.8, 40.0
SAMPLES = 2048


class LogNormalTexts:
    """Random tokens of log-normal lengths, cut at the longest."""

    def __init__(self) -> None:
        draws = np.random.default_rng(1).lognormal(np.log(MEDIAN), SIGMA, SAMPLES)
        self.lengths = [int(np.clip(round(draw), 1, LONGEST)) for draw in draws]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 256, (self.lengths[index] + 1,), generator=draw)
        return tokens[:-1], tokens[1:]


def job(buckets: Any, schedule: str = "1f1b") -> dict[str, Any]:
    """The job with these buckets."""
    return {
        "model": {
            "factory": "worker.examples.gpt:build",
            "args": {"layers": 8, "width": 128, "heads": 4, "length": LONGEST},
        },
        "data": {"factory": f"{Path(__file__).stem}:LogNormalTexts", "lengths": {"buckets": buckets}},
        "loss": {"factory": "torch.nn:CrossEntropyLoss"},
        "optimizer": {"factory": "torch.optim:SGD", "args": {"lr": 0.01}},
        "training": {
            "steps": 100,
            "global_batch": MICROBATCHES * ROWS,
            "microbatches": MICROBATCHES,
            "seed": 3,
            "loss_reduction": "tokens",
        },
        "pipeline": {"stages": STAGES, "schedule": schedule},
        "resources": {"meshes": STAGES},
    }


def timed(run: Workers, step: int, programs: Any = None) -> tuple[float, list[Any]]:
    """Seconds of a step, and its results."""
    began = time.perf_counter()
    results = run.step(step, programs)
    return time.perf_counter() - began, results


def compare_paddings(steps: int) -> None:
    """Print both paddings and their ratio."""
    seconds: tuple[list[float], list[float]] = ([], [])
    tokens, padded = [0, 0], [0, 0]
    with Workers(job("auto")) as own, Workers(job([LONGEST])) as longest:
        print(f"buckets {own.workers[0].batches.buckets}, beside {longest.workers[0].batches.buckets}")
        for step in range(1, steps + 3):
            losses = []
            for side, run in enumerate((own, longest)):
                taken, results = timed(run, step)
                losses.append(mean_loss(results))
                if step > 2:
                    seconds[side].append(taken)
                    tokens[side] += results[0].lengths.tokens
                    padded[side] += results[0].lengths.padded_tokens
            assert abs(losses[0] - losses[1]) <= 1e-4 * losses[1], losses
    rates = [MICROBATCHES * ROWS / median(taken) for taken in seconds]
    for name, rate, real, all_tokens in zip(("own bucket", "longest"), rates, tokens, padded, strict=True):
        print(f"{name:>10}: {rate:7.1f} samples/s, padding {1 - real / all_tokens:.1%}")
    print(f"ratio {rates[0] / rates[1]:.2f} over {steps} steps each")


def compare_plans(steps: int) -> None:
    """Print the steps by plans of their own beside those by the job's plan, planned and measured, and the time of
    planning each. All workers share the cores of this machine, so what is measured is the cores' where they are few."""
    sides = {"job's plan": None, "own plans": True}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    planned_s: list[float] = []
    ratios, differs = [], 0
    with Workers(job("auto", schedule="auto")) as own, Workers(job("auto", schedule="auto")) as other:
        planner = StepPlanner.from_json(own.planned["step_planner"])
        for step in range(1, steps + 3):
            spec = planner.spec_of(own.workers[0].batches.buckets_of(step))
            began = time.perf_counter()
            answer = own.plan_step(step)
            planned_s.append(time.perf_counter() - began)
            by_job_s = planner.makespan_by_job_plan(spec)
            ratios.append(1.0 if answer is None else answer["plan"]["makespan_s"] / by_job_s)
            differs += answer is not None
            programs = None if answer is None else parse_planned_job(answer).programs()
            taken = {"job's plan": timed(other, step), "own plans": timed(own, step, programs)}
            losses = [mean_loss(results) for _, results in taken.values()]
            assert abs(losses[0] - losses[1]) <= 1e-4 * losses[1], losses
            if step > 2:
                for side, (of_step, _) in taken.items():
                    seconds[side].append(of_step)
    print(
        f"{differs} of {len(ratios)} steps have a plan of their own; planned makespan {fmean(ratios):.3f} of the job's"
    )
    for side, of_steps in seconds.items():
        print(f"{side:>10}: {1e3 * median(of_steps):7.1f} ms a step")
    print(
        f"planning a step takes {1e3 * median(planned_s[1:]):.0f} ms, the longest {1e3 * max(planned_s[1:]):.0f}"
    )


def main() -> int:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    sys.path.insert(0, str(Path(__file__).parent))
    compile_kernels()
    compare_paddings(steps)
    compare_plans(steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
