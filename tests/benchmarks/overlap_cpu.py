"""Overlap benchmark on CPU: Slotline and torch.distributed.pipelining on the same stages and links.

`make bench-overlap` (as root). Four processes in network namespaces with rate-limited ports; stages that
sleep for a calibrated time stand for accelerators. Prints one table for each ratio of transfer to forward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from overlap_net import network, why_not

# Pipelines: (source, target, tensor) of every edge between stages; one stage a mesh.
PIPELINES = {
    "chain": [(k, k + 1, f"h{k}") for k in range(3)],
    # two skip connections, which cross four stages and two
    "unet": [(k, k + 1, f"h{k}") for k in range(5)] + [(0, 5, "skip0"), (1, 4, "skip1")],
}
TORCH = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleavedZeroBubble")


def main() -> int:
    options = _options()
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    for name in options.pipelines:
        for microbatches in options.microbatches:
            edges = PIPELINES[name]
            more = {
                "microbatches": microbatches,
                "edges": edges,
                "meshes": 1 + max(edge[1] for edge in edges),
                "name": name,
            }
            _bench(argparse.Namespace(**{**vars(options), **more}))
    return 0


def _bench(options: argparse.Namespace) -> None:
    """One table for each ratio."""
    from worker.transport.rendezvous import host_store

    seconds = tuple(part * options.stage_ms / 1e3 for part in (1.0, 1.0, 1.0))
    with network(options.meshes) as net:
        net.set_rate(10e9)
        store = host_store()
        job = {
            "count": options.meshes,
            "edges": options.edges,
            "host": net.host,
            "port": store.port,
            "elements": options.elements,
            "seconds": seconds,
            "microbatches": options.microbatches,
            "steps": options.steps,
            "ratios": options.ratios,
        }
        workers = [
            net.run(
                k,
                [
                    sys.executable,
                    str(Path(__file__).parent / "overlap_worker.py"),
                    json.dumps({**job, "rank": k, "address": net.addresses[k]}),
                ],
            )
            for k in range(options.meshes)
        ]
        try:
            for ratio in options.ratios:
                net.set_rate(options.elements * 32 / (ratio * seconds[0]))
                store.set(f"rate/{ratio}", "1")
                _one_ratio(store, workers, ratio, options)
            for worker in workers:
                worker.wait(60)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="transfer / forward"
    )
    parser.add_argument("--pipelines", nargs="+", choices=list(PIPELINES), default=list(PIPELINES))
    parser.add_argument("--stage-ms", type=float, default=50.0, help="forward; I and W take as long each")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[16, 8])
    parser.add_argument("--steps", type=int, default=3, help="measured steps a row, after one warm-up")
    parser.add_argument("--elements", type=int, default=1 << 18, help="float32 elements of one tensor")
    parser.add_argument("--rows", nargs="*", help="only rows whose name contains one of these")
    return parser.parse_args()


def _one_ratio(store, workers, ratio: float, options: argparse.Namespace) -> None:
    measured = [_get(store, workers, f"measured/{ratio}/{k}") for k in range(options.meshes)]
    link_s = statistics.median([t for m in measured for t in m["links"]])
    spread = [min(t for m in measured for t in m["links"]), max(t for m in measured for t in m["links"])]
    stage_s = [statistics.median(m["stage"][k] for m in measured) for k in range(3)]
    print(
        f"\n## c/f = {link_s / stage_s[0]:.2f}: transfer {link_s * 1e3:.1f} ms "
        f"({spread[0] * 1e3:.1f} to {spread[1] * 1e3:.1f}), F {stage_s[0] * 1e3:.1f} ms, "
        f"I {stage_s[1] * 1e3:.1f} ms, W {stage_s[2] * 1e3:.1f} ms, {options.name}, {options.meshes} meshes, "
        f"{options.microbatches} microbatches\n",
        flush=True,
    )
    rows = [row for row in _rows(ratio, stage_s, link_s, options) if _wanted(row, options.rows)]
    store.set(f"rows/{ratio}", json.dumps(rows))
    print("| row | step ms | planned ms | measured/planned | peak activations a mesh |")
    print("|---|---|---|---|---|", flush=True)
    best: dict[str, float] = {}
    for row in rows:
        found = [_get(store, workers, f"result/{row['name']}/{k}") for k in range(options.meshes)]
        steps = [
            max(f[s]["end"] for f in found) - min(f[s]["start"] for f in found) for s in range(options.steps)
        ]
        step_s = statistics.median(steps)
        best[row["label"]] = step_s
        planned = row.get("makespan_s")
        print(
            f"| {row['label']} | {step_s * 1e3:.0f} | "
            + (f"{planned * 1e3:.0f} | {step_s / planned:.3f}" if planned else "- | -")
            + f" | {' '.join(str(f[0]['peak']) for f in found)} |",
            flush=True,
        )
    _summary(best, next((row["bound_s"] for row in rows if row["label"] == "auto"), None))


def _summary(step_s: dict[str, float], bound_s: float | None) -> None:
    theirs = {name: s for name, s in step_s.items() if name.startswith("torch ")}
    ours = {name: s for name, s in step_s.items() if name not in theirs}
    if theirs and "auto" in ours:
        name = min(theirs, key=theirs.get)
        print(
            f"\nauto is {theirs[name] / ours['auto']:.2f} x as fast as torch's best here ({name})", flush=True
        )
        if bound_s:
            most = theirs[name] / bound_s
            print(
                f"no schedule of these stages is faster than {bound_s * 1e3:.0f} ms: {most:.2f} x", flush=True
            )


def _wanted(row: dict, patterns: list[str] | None) -> bool:
    return not patterns or any(pattern in row["label"] for pattern in patterns)


def _rows(ratio: float, stage_s: list[float], link_s: float, options: argparse.Namespace) -> list[dict]:
    rows = [
        {"kind": "torch", "schedule": name, "label": f"torch {name.removeprefix('Schedule')}"}
        for name in TORCH
    ]
    variants = [
        ("1f1b, blocking", {"schedule": "1f1b", "overlap": False}),
        ("1f1b", {"schedule": "1f1b"}),
        ("eager-1f1b", {"schedule": "eager-1f1b"}),
        ("zb-h1", {"schedule": "zb-h1"}),
        ("auto", {"schedule": "auto"}),
        # the memory of torch's best: its zero bubble holds as many activations as there are meshes
        (f"auto, at most {options.meshes} activations", {"schedule": "auto", "limit": options.meshes}),
        (
            f"auto, at most {2 * options.meshes} activations",
            {"schedule": "auto", "limit": 2 * options.meshes},
        ),
        ("onnxruntime's order", {"schedule": "eager-1f1b", "baseline": "lockstep_timeline"}),
        ("alpa's order", {"schedule": "eager-1f1b", "baseline": "definition_order_timeline"}),
    ]
    for label, choice in variants:
        plan = _plan(stage_s, link_s, options, **choice)
        if plan is not None:
            rows.append({"kind": "ours", "label": label, **plan})
    for number, row in enumerate(rows):
        row["name"] = f"{ratio}-{number}"
    return rows


def _plan(stage_s, link_s, options, *, schedule, overlap=True, limit=None, baseline=None) -> dict | None:
    """Programs and planned makespan. A `baseline` of service.scheduler.compare gives its order of
    transfers; its rows in lockstep are part of its plan, but not of the programs."""
    from service.scheduler import compare
    from service.scheduler.planner import make_plan
    from service.scheduler.problem.spec import PipelineSpec, SpecError
    from service.scheduler.programs.codegen import compile_programs

    forward, backward_input, backward_weight = stage_s
    spec = {
        "microbatches": options.microbatches,
        "meshes": [{"name": f"m{k}", "activation_limit_bytes": limit} for k in range(options.meshes)],
        "stages": [
            {
                "name": f"s{k}",
                "mesh": f"m{k}",
                "forward_s": forward,
                # the first stage's input takes no gradient of the pipeline: all of its backward is W
                "backward_input_s": backward_input if k else 0.0,
                "backward_weight_s": backward_weight + (0.0 if k else backward_input),
                "activation_bytes": 1,
                "weight_stash_bytes": 1,
            }
            for k in range(options.meshes)
        ],
        "edges": [
            {
                "source": f"s{source}",
                "target": f"s{target}",
                "forward_s": link_s,
                "backward_s": link_s,
                "tensor": tensor,
            }
            for source, target, tensor in options.edges
        ],
        "network": {"contention": "full-duplex"},
        "overlap": overlap,
        "schedule": schedule,
    }
    checked = PipelineSpec.model_validate(spec)
    try:
        if baseline is not None:
            timeline = getattr(compare, baseline)(checked)
            programs, makespan_s, bound_s = compile_programs(timeline), timeline.makespan, 0.0
        else:
            plan = make_plan(checked, budget_s=10.0)
            programs, makespan_s, bound_s = plan.programs, plan.makespan_s, plan.lower_bound_s
    except (SpecError, ValueError) as error:
        print(f"({schedule} not planned: {error})")
        return None
    return {
        "programs": {
            mesh: [i if isinstance(i, dict) else i.to_json() for i in program]
            for mesh, program in programs.items()
        },
        "makespan_s": makespan_s,
        "bound_s": bound_s,
    }


def _get(store, workers: list[subprocess.Popen], key: str, timeout_s: float = 600.0):
    deadline = time.monotonic() + timeout_s
    while not store.check([key]):
        if any(worker.poll() not in (None, 0) for worker in workers):
            raise RuntimeError(f"a worker of the benchmark died while {key} was awaited")
        if time.monotonic() > deadline:
            raise RuntimeError(f"no answer {key} within {timeout_s:.0f} s")
        time.sleep(0.05)
    store.set_timeout(timedelta(seconds=60))
    return json.loads(store.get(key))


if __name__ == "__main__":
    sys.exit(main())
