"""Sums of gradients over rate-limited links: one behind the step, buckets as they end, and the optimizer shared.

`make bench-reduces` (Linux, as root): two meshes of two workers, each worker a process in a network namespace with one
rate-limited card, over gloo; stages that sleep stand for accelerators. Planned beside measured. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from service.scheduler.job.joint import JobPlan
from service.scheduler.job.plan_job import JobCosts, plan_job
from service.scheduler.problem.spec import NetworkSpec
from tests.benchmarks.overlap_net import network, why_not
from worker.contract.costs import LinearCost, UpdateCosts
from worker.contract.job import Job
from worker.contract.profile import LayerCost, LayerEdge, LayerProfile, OptimizerState

STAGES = 4
GANG = 4


def main() -> int:
    """One table for each ratio of a stage's sum to its backward of one microbatch."""
    options = _options()
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    print(
        "| sum of a stage's gradients | way | planned ms | measured ms | measured / planned | behind the last backward, "
        "planned ms | measured ms |\n|---|---|---:|---:|---:|---:|---:|",
        flush=True,
    )
    for ratio in options.ratios:
        _bench(options, ratio)
    return 0


def _bench(options: argparse.Namespace, ratio: float) -> None:
    from worker.transport.rendezvous import host_store

    seconds = [part * options.stage_ms / 1e3 for part in (1.0, 1.0, 1.0)]
    with network(GANG, "slotred", "10.213.81") as net:
        store = host_store()
        job = {
            "host": net.host, "port": store.port, "stages": STAGES, "elements": options.elements,
            "ballast": options.ballast, "seconds": seconds, "microbatches": options.microbatches,
            "steps": options.steps,
        }  # fmt: skip
        script, root = Path(__file__).with_name("reduces_worker.py"), Path(__file__).parents[2]
        workers = [
            net.run(
                k,
                [sys.executable, str(script), json.dumps({**job, "rank": k, "address": net.addresses[k]})],
                env={**os.environ, "PYTHONPATH": str(root)},
            )
            for k in range(GANG)
        ]
        try:
            # over two workers a sum sends as many bytes as there are
            net.set_rate(options.ballast * 32 / (ratio * (seconds[1] + seconds[2])))
            store.set("rate", "1")
            measured = [_get(store, workers, f"measured/{k}") for k in range(GANG)]
            ways = _ways(options, measured)
            rows = [
                {"name": name, "early": early, "sharded": sharded, "programs": found.plan.programs}
                for name, (found, early, sharded) in ways.items()
            ]
            store.set("rows", json.dumps(rows))
            sum_ms = 1e3 * (measured[0]["sums"][0] + 4 * options.ballast / measured[0]["sums"][1])
            for name, (found, _, _) in ways.items():
                _print(
                    f"{sum_ms:.0f} ms",
                    name,
                    found,
                    [_get(store, workers, f"result/{name}/{k}") for k in range(GANG)],
                )
            for worker in workers:
                worker.wait(60)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _ways(options: argparse.Namespace, measured: list[dict]) -> dict[str, tuple[JobPlan, bool, list[str]]]:
    """Of each way its plan, whether buckets are summed early, and the meshes that share the optimizer."""

    def slowest(of) -> float:
        return statistics.median(of(m) for m in measured)

    forward_s, backward_s = (slowest(lambda m, k=k: m["stage"][k]) for k in (0, 1))
    sums = [slowest(lambda m, k=k: m["sums"][k]) for k in range(6)]
    size = 4 * options.ballast
    names = [name for k in range(STAGES) for name in (f"{k}.ballast", f"{k}.weight")]
    profile = LayerProfile(
        layers=tuple(
            LayerCost(
                f"l{k}",
                forward_s,
                backward_s / 2,
                backward_s / 2,
                1000,
                0,
                0,
                parameters=tuple(names[2 * k : 2 * k + 2]),
            )
            for k in range(STAGES)
        ),
        edges=tuple(
            LayerEdge(k, k + 1, f"h{k}", 4 * options.elements, True, order=k) for k in range(STAGES - 1)
        ),
        device_type="cpu",
        microbatch="[1]",
        parameter_sizes={name: size if name.endswith("ballast") else 4 for name in names},
    )
    update = UpdateCosts(
        **{
            action: LinearCost(
                **{part: slowest(lambda m, a=action, p=part: m["update"][a][p]) for part in _PARTS}
            )
            for action in ("reduce", "step")
        }
    )
    link_s = slowest(lambda m: m["link_s"])
    summed = update.with_all_reduce(sums[0], sums[1])
    meshes = ["m0", "m1"]
    behind = UpdateCosts(reduce=summed.reduce, step=summed.step)
    shared = update.with_zero1(dict.fromkeys(meshes, 2), (sums[2], sums[3]), (sums[4], sums[5]))
    ways = {
        "one sum behind": (behind, False, []),
        "buckets as they end": (summed, True, []),
        "shard: optimizer": (shared.with_all_reduce(sums[0], sums[1]), True, meshes),
    }
    return {
        name: (_plan(options, profile, costs, link_s, sharded), early, sharded)
        for name, (costs, early, sharded) in ways.items()
    }


_PARTS = ("fixed_s", "per_tensor_s", "per_byte_s")


def _plan(
    options: argparse.Namespace, profile: LayerProfile, update: UpdateCosts, link_s: float, sharded: list[str]
) -> JobPlan:
    job = Job.from_json(
        {
            "model": {"factory": "a:b"},
            "data": {"factory": "a:b"},
            "training": {"global_batch": 2 * options.microbatches, "microbatches": options.microbatches},
            "pipeline": {
                "stages": STAGES,
                "cut": [f"l{k}" for k in range(STAGES)],
                "schedule": "interleaved-1f1b",
            },
            "resources": {"meshes": 2, "workers_per_mesh": 2, "shard": "optimizer" if sharded else "none"},
        }
    )
    costs = JobCosts(
        profiles={options.microbatches: profile},
        network=NetworkSpec(contention="full-duplex", bandwidth_bytes_per_s=4 * options.elements / link_s),
        memory_bytes={},
        optimizer=OptimizerState(),
        update=update,
    )
    return plan_job(job, costs, budget_s=1.0)


def _print(sums: str, name: str, found: JobPlan, results: list[list[dict]]) -> None:
    steps = []
    for of_workers in zip(*results, strict=True):
        start, end = min(one["start"] for one in of_workers), max(one["end"] for one in of_workers)
        steps.append((end - start, end - max(one["computed"] for one in of_workers)))
    step_s, behind_s = (statistics.median(column) for column in zip(*steps, strict=True))
    planned_behind_s = found.step_s - found.plan.makespan_s
    print(
        f"| {sums} | {name} | {found.step_s * 1e3:.0f} | {step_s * 1e3:.0f} | {step_s / found.step_s:.2f} | "
        f"{planned_behind_s * 1e3:.0f} | {behind_s * 1e3:.0f} |",
        flush=True,
    )


def _get(store, workers: list[subprocess.Popen], key: str):
    """A worker's answer; raises when one has ended with an error."""
    while True:
        if store.check([key]):
            return json.loads(store.get(key))
        if failed := [k for k, worker in enumerate(workers) if worker.poll() not in (None, 0)]:
            raise RuntimeError(f"worker {failed[0]} failed before {key}")
        time.sleep(0.1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="sum / backward")
    parser.add_argument("--stage-ms", type=float, default=50.0, help="forward; I and W take as long each")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="measured steps a row, after one warm-up")
    parser.add_argument("--elements", type=int, default=1 << 15, help="float32 elements of a transfer")
    parser.add_argument(
        "--ballast", type=int, default=1 << 20, help="float32 elements of a stage's parameter"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
