"""How long planning takes and how much memory, by size; and makespans beside torch's own schedules.

`python -m tests.benchmarks.scheduler [--quick]`; part of `make bench`.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from typing import Any
from unittest import mock

SIZES = [(2, 8), (4, 16), (8, 64), (16, 128), (32, 256), (64, 512), (64, 1024)]
TARGETS = {(32, 256): 1.0, (64, 1024): 10.0}  # seconds of a named schedule with programs and verification
GRID = [
    # forward, input gradient, weight gradient, transfer
    (1.0, 1.0, 1.0, 0.0),
    (1.0, 1.0, 1.0, 0.25),
    (1.0, 1.0, 1.0, 1.0),
    (1.0, 1.3, 0.7, 0.5),
    (1.0, 1.0, 0.5, 2.0),
]


def spec_of(
    placed: list[int],
    microbatches: int,
    costs: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
    *,
    limit: int | None = None,
    contention: str = "full-duplex",
    **fields: Any,
) -> dict[str, Any]:
    """A chain with equal stages on the meshes of `placed`; `limit` in units of one stage's activation."""
    forward, inputs, weights, transfer = costs
    mesh = {} if limit is None else {"activation_limit_bytes": limit}
    return {
        "microbatches": microbatches,
        "meshes": [{"name": f"m{p}", **mesh} for p in range(max(placed) + 1)],
        "stages": [
            {
                "name": f"s{i}",
                "mesh": f"m{p}",
                "forward_s": forward,
                "backward_input_s": inputs,
                "backward_weight_s": weights,
                "activation_bytes": 1,
                "weight_stash_bytes": 1,
            }
            for i, p in enumerate(placed)
        ],
        "edges": [
            {"source": f"s{i}", "target": f"s{i + 1}", "forward_s": transfer, "backward_s": transfer}
            for i in range(len(placed) - 1)
        ],
        "network": {"contention": contention},
        **fields,
    }


def speed(sizes: list[tuple[int, int]]) -> bool:
    """Print time and memory against size; whether every target is met."""
    from service.scheduler.planner import make_plan
    from service.scheduler.problem.spec_checks import load_spec

    began = time.perf_counter()
    make_plan(load_spec(spec_of([0, 1], 2, schedule="eager-1f1b")))
    print(
        f"import and compilation of helpers: {time.perf_counter() - began:.2f} s (the first plan of this process)"
    )
    print(
        f"\n{'P':>3} {'M':>5} {'slots':>7} {'plan s':>7} {'us/slot':>8} {'json s':>7} {'json MB':>8} {'peak MB':>8}"
    )
    met = True
    for meshes, microbatches in sizes:
        spec = load_spec(spec_of(list(range(meshes)), microbatches, schedule="eager-1f1b"))
        make_plan(spec)
        began = time.perf_counter()
        plan = make_plan(spec)
        planned = time.perf_counter() - began
        began = time.perf_counter()
        size = len(plan.model_dump_json())
        written = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        slots = len(plan.slots)
        print(
            f"{meshes:>3} {microbatches:>5} {slots:>7} {planned:>7.3f} {1e6 * planned / slots:>8.2f} {written:>7.3f} "
            f"{size / 1e6:>8.1f} {peak:>8.0f}"
        )
        target = TARGETS.get((meshes, microbatches))
        if target is not None and (planned > target or peak > 4096):
            print(f"    over the target of {target:g} s and 4 GiB")
            met = False
    return met


def constructive() -> bool:
    """`auto` with budget 0 at P=32, M=256, where memory is tight and no named schedule is optimal."""
    from service.scheduler.planner import make_plan
    from service.scheduler.problem.spec_checks import load_spec

    met = True
    print("\nauto, budget 0, P=32, M=256:")
    for contention, limit in (("none", None), ("none", 24), ("full-duplex", 24), ("half-duplex", 40)):
        data = spec_of(list(range(32)), 256, limit=limit, contention=contention, schedule="auto")
        spec = load_spec(data)
        began = time.perf_counter()
        plan = make_plan(spec, budget_s=0)
        took = time.perf_counter() - began
        gap = plan.makespan_s / plan.lower_bound_s - 1
        print(
            f"  {contention:<12} memory {limit or 'free':>5}: {took:.2f} s, at most {gap:.1%} above the optimum"
        )
        met &= took <= 3.0
    return met


def torch_orders(name: str, meshes: int, microbatches: int, rounds: int) -> dict[str, list[str]] | None:
    """The compute order that a schedule class of torch makes, by mesh; None where it refuses the size."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, meshes, meshes * rounds, None
    stage.stage_index_to_group_rank = None
    try:
        made = getattr(schedules, name)(stage if rounds == 1 else [stage] * rounds, microbatches)
        order = made.pipeline_order
    except (ValueError, AssertionError, RuntimeError):
        return None
    rows = {
        rank: [
            (a.stage_index, a.computation_type.value, a.microbatch_index)
            for a in row
            if a is not None and a.computation_type.value in ("F", "B", "I", "W")
        ]
        for rank, row in order.items()
    }
    if name == "Schedule1F1B":
        # Its table numbers the last rank's forwards from 1; its step runs them from 0, in order.
        for row in rows.values():
            forwards = iter(range(microbatches))
            row[:] = [(stage, kind, next(forwards) if kind == "F" else m) for stage, kind, m in row]
    return {f"m{rank}": [f"{stage}{kind}{m}" for stage, kind, m in row] for rank, row in rows.items()}


def against_torch(microbatches: int, budget_s: float) -> bool:
    """Makespans of torch's compute orders and of `auto` in the same memory, over a grid of costs."""
    from service.scheduler.planner import make_plan
    from service.scheduler.problem.spec import SpecError
    from service.scheduler.problem.spec_checks import load_spec

    meshes, never_worse = 4, True
    print(
        f"\nmakespan of torch's compute orders and of auto in the same memory, P={meshes}, M={microbatches}:"
    )
    print(
        f"{'f':>4} {'i':>4} {'w':>4} {'c':>5}  {'torch schedule':<26} {'torch':>8} {'auto':>8} {'torch/auto':>11}"
    )
    refused: dict[str, str] = {}
    loop = [s % meshes for s in range(2 * meshes)]
    vee = [min(s, 2 * meshes - 1 - s) for s in range(2 * meshes)]
    for costs in GRID:
        for name, placed in (
            ("ScheduleGPipe", list(range(meshes))),
            ("Schedule1F1B", list(range(meshes))),
            ("ScheduleInterleaved1F1B", loop),
            ("ScheduleLoopedBFS", loop),
            ("ScheduleInterleavedZeroBubble", loop),
            ("ScheduleZBVZeroBubble", vee),
        ):
            rounds = len(placed) // meshes
            orders = torch_orders(name, meshes, microbatches, rounds)
            if orders is None:
                continue
            part = tuple(cost / rounds for cost in costs[:3])
            base = spec_of(placed, microbatches, (*part, costs[3]))
            try:
                theirs = make_plan(load_spec({**base, "schedule": "csv", "orders": orders}))
            except SpecError as error:
                refused[name] = str(error)
                continue
            for mesh, used in zip(base["meshes"], theirs.meshes, strict=True):
                mesh["activation_limit_bytes"] = used.peak_activation_bytes
            split = any("I" in action for row in orders.values() for action in row)
            ours = make_plan(
                load_spec({**base, "schedule": "auto", "split_backward": split}), budget_s=budget_s
            )
            ratio = theirs.makespan_s / ours.makespan_s
            never_worse &= ratio >= 1 - 1e-9
            print(
                "{:>4g} {:>4g} {:>4g} {:>5g}  ".format(*costs)
                + f"{name:<26.26} {theirs.makespan_s:>8.2f} {ours.makespan_s:>8.2f} {ratio:>11.3f}"
                + ("" if ours.proven_optimal else "  (not proven optimal)")
            )
    for name, reason in refused.items():
        print(f"{name} makes an order that cannot be planned: {reason}")
    return never_worse


def cold_start() -> None:
    """Print what a fresh process pays for imports."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import service.scheduler.planner"], check=True)
    print(f"fresh process, import only: {time.perf_counter() - began:.2f} s")


def main(arguments: list[str] | None = None) -> int:
    """Run everything; exit code 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    quick = parser.parse_args(arguments).quick
    cold_start()
    met = speed([size for size in SIZES if size[0] <= 32] if quick else SIZES)
    met &= constructive()
    met &= against_torch(8, budget_s=1.0 if quick else 5.0)
    print("\nall targets met" if met else "\nsome target was missed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
