"""`make bench-sharded-saves`: peak memory of four workers at a save and a restore, gathered beside each its own part.

Four processes over gloo hold what a worker has of a model with Adam: slices of its matrices (tensor parallel), or whole
matrices and a partition of the optimizer's state (ZeRO-1). Own parts are saved and restored by worker/actor/saver.py and
worker/checkpoint. Gathered is the way before: with tensor parallelism all workers gather every tensor and the first writes
all, with ZeRO-1 the first gathers the optimizer's state; each reads the one file that was written. Peak: the process's
resident memory (VmHWM, reset before) above what it held; a process of its own for each save and restore.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from worker.actor.saver import ShardSaver
from worker.checkpoint.format import HeldParts, finish_checkpoint, load_parts
from worker.engine.optim.zero1 import FlatPartition
from worker.parallel.shard_spec import ShardSpec

WORKERS = 4
STEP = 1
SHARD = "m0"
KINDS = ("tensor", "zero1")
TITLES = {"tensor": f"tensor parallel, T = {WORKERS}", "zero1": f"ZeRO-1 over {WORKERS}"}


def shapes_of(width: int) -> dict[str, tuple[int, int]]:
    return {"embed": (8 * width, width), **{f"w{k}": (4 * width, width) for k in range(3)}}


class WorkerPart:
    """What one worker holds of the model."""

    def __init__(self, kind: str, rank: int, width: int):
        self.kind, self.rank = kind, rank
        self.shapes = shapes_of(width)
        slices, runs = {}, {}
        self.state: dict[str, dict] = {"parameters": {}, "buffers": {}, "optimizer": {}}
        generator = torch.Generator().manual_seed(rank)
        for name, (rows, columns) in self.shapes.items():
            if kind == "tensor":
                slices[name] = ShardSpec(name, 0, (rows,), rank, WORKERS)
                own: tuple[int, ...] = (rows // WORKERS, columns)
                moment = own
            else:
                own = (rows, columns)
                runs[name] = FlatPartition(rank, WORKERS).run(torch.empty(own, device="meta"))
                moment = (runs[name].end - runs[name].begin,)
            self.state["parameters"][name] = torch.randn(own, generator=generator)
            moments = (torch.randn(moment, generator=generator) for _ in range(2))
            self.state["optimizer"][name] = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
        self.held = HeldParts(slices, runs)

    def bytes(self) -> int:
        moments = [t.nbytes for entry in self.state["optimizer"].values() for t in entry.values()]
        return sum(t.nbytes for t in self.state["parameters"].values()) + sum(moments)

    def written(self) -> dict[str, dict]:
        """The state that this worker writes itself."""
        if self.kind == "tensor" or self.rank == 0:
            return self.state
        return {"optimizer": self.state["optimizer"]}

    def gathered(self) -> dict[str, dict]:
        """The whole state, of all workers, or with ZeRO-1 of the first."""
        keeps = self.kind == "tensor" or self.rank == 0
        whole: dict[str, dict] = {"parameters": {}, "optimizer": {}}
        for name, shape in self.shapes.items():
            entries = {**self.state["optimizer"][name]}
            if self.kind == "tensor":
                entries["parameter"] = self.state["parameters"][name]
            else:
                whole["parameters"][name] = self.state["parameters"][name]
            for key, own in entries.items():
                out = torch.empty(WORKERS, own.numel())
                dist.all_gather([*out], own.reshape(-1))
                if keeps and key == "parameter":
                    whole["parameters"][name] = out.view(shape)
                elif keeps:
                    whole["optimizer"].setdefault(name, {})[key] = out.view(shape)
        return whole


def status_bytes(name: str) -> int:
    line = next(
        one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(f"{name}:")
    )
    return int(line.split()[1]) * 1024


def peak(action: Callable[[], object]) -> tuple[int, float]:
    """The most bytes that the process had beside what it holds while it ran, and the seconds."""
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.monotonic()
    action()
    return max(0, status_bytes("VmHWM") - before), time.monotonic() - began


def work(kind: str, how: str, task: str, rank: int, width: int, folder: str) -> dict[str, float]:
    """One worker's save or restore."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/{kind}-{how}-{task}", WORKERS), rank=rank, world_size=WORKERS
    )
    dist.all_reduce(torch.zeros(1))
    part = WorkerPart(kind, rank, width)
    torch.save(torch.zeros(1), f"{folder}/warm-{rank}")
    torch.load(f"{folder}/warm-{rank}")
    uri, file = f"{folder}/{kind}/step-{STEP:010d}", f"{folder}/{kind}.pt"

    def save_own() -> None:
        ShardSaver(SHARD, lambda _: part.written(), {}, held=part.held, rank=rank, ranks=WORKERS).save(
            uri, STEP
        )

    def save_gathered() -> None:
        whole = part.gathered()
        if rank == 0:
            torch.save(whole, file)

    def restore_own() -> None:
        loaded = load_parts(uri, part.shapes.keys(), part.held).state
        for name, entry in loaded["optimizer"].items():
            for key, value in entry.items():
                assert torch.equal(value, part.state["optimizer"][name][key]), (name, key)

    def restore_gathered() -> None:
        whole = torch.load(file)
        for name, entry in whole["optimizer"].items():
            for key, value in entry.items():
                own = value.chunk(WORKERS)[rank] if kind == "tensor" else part.held.runs[name].of(value)
                assert torch.equal(own, part.state["optimizer"][name][key]), (name, key)

    actions = {
        ("own", "save"): save_own,
        ("own", "restore"): restore_own,
        ("gathered", "save"): save_gathered,
        ("gathered", "restore"): restore_gathered,
    }
    bytes_, seconds = peak(actions[how, task])
    dist.barrier()
    if (how, task, rank) == ("own", "save", 0):
        finish_checkpoint(uri, step=STEP, shards=[SHARD], keep=1)
    dist.destroy_process_group()
    return {"own": part.bytes(), "peak": bytes_, "seconds": seconds}


@dataclass(frozen=True)
class Row:
    """The bytes that a worker holds, and the greatest peak of a worker above them."""

    own: float
    peak: float
    seconds: float


def run(kind: str, how: str, task: str, width: int, folder: str) -> Row:
    """All workers at once."""
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.sharded_saves",
        "--width",
        str(width),
        "--folder",
        folder,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [*command, "--worker", kind, how, task, str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(WORKERS)
    ]
    found = [json.loads(worker.communicate(timeout=300)[0].splitlines()[-1]) for worker in workers]
    return Row(*(max(one[name] for one in found) for name in ("own", "peak", "seconds")))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--width", type=int, default=1536)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--folder")
    arguments.add_argument("--worker", nargs=4)
    given = arguments.parse_args()
    if given.worker:
        kind, how, task, rank = given.worker
        print(json.dumps(work(kind, how, task, int(rank), given.width, given.folder)))
        return
    print(f"load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores; medians of {given.rounds}\n")
    print("| workers | a worker holds | at | gathered | each its own part | ratio |")
    print("|---|---|---|---|---|---|")
    for kind in KINDS:
        found: dict[tuple[str, str], list[Row]] = {}
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory(dir=os.environ.get("SLOTLINE_BENCH_DIR")) as folder:
                for how in ("gathered", "own"):
                    for task in ("save", "restore"):
                        found.setdefault((how, task), []).append(run(kind, how, task, given.width, folder))
        for task in ("save", "restore"):
            before, after = (
                statistics.median(row.peak for row in found[how, task]) for how in ("gathered", "own")
            )
            own = found["own", task][0].own
            print(
                f"| {TITLES[kind]} | {own / 1e6:.0f} MB | {task} | {before / 1e6:.0f} MB ({before / own:.2f} times) | "
                f"{after / 1e6:.0f} MB ({after / own:.2f} times) | {before / after:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
