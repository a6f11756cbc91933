"""`make bench-large-model` (Linux, root): the start of a model that is larger than its host's memory, in memory, in files.

A process whose control group may take `--limit` MiB does what the first worker of a job does until every worker has its
stages: it builds a GPT of `--layers` layers, traces it, packs the weights of each of eight stages, and keeps the first
stage. In memory is the way before: the process is killed. Both sides once more without a limit, for the time. The digest
of all weights must be the same each time. Exit status 1 where it is not, or a side ends otherwise than is said here.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.worker.actor.test_actor import job
from worker.actor import model_host
from worker.contract.job import Job
from worker.machine.file_backed import FileBackedTensors

STAGES = 8
LENGTH = 64
SIDES = ("in memory", "in files")
_GROUPS = (("memory", "memory.limit_in_bytes"), (".", "memory.max"))
"""Where control groups of version 1 and 2 have their limits of memory."""


@contextlib.contextmanager
def control_group(limit_bytes: int) -> Iterator[Path]:
    """A control group that may take so much memory, in which nothing runs yet."""
    root = Path("/sys/fs/cgroup")
    part, name = next((part, name) for part, name in _GROUPS if (root / part / "cgroup.procs").exists())
    group = root / part / f"slotline-large-model-{os.getpid()}"
    group.mkdir()
    try:
        (group / name).write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def resident_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def start(side: str, layers: int) -> dict[str, Any]:
    """Start the model in this process, and tell what it took."""
    if side == "in memory":
        model_host.file_backed_tensors = lambda: FileBackedTensors(None, None)
    spec = job(stages=STAGES, meshes=STAGES)
    spec["model"]["args"] = {"layers": layers, "width": 1024, "heads": 8, "length": LENGTH}
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    began = time.perf_counter()
    host = model_host.JobModel(Job.from_json(spec), "cpu")
    # without the comparison of trace and model, for which there is no memory
    notes = host.check((tokens,), tokens, free_bytes=lambda: 1)
    built_s, built_bytes = time.perf_counter() - began, resident_bytes()
    starts = ["embed", *(f"blocks.{k}" for k in range(layers // STAGES, layers, layers // STAGES))]
    digest, size = hashlib.sha256(), 0
    for stage in range(STAGES):
        for name, value in host.weights((tokens,), starts, [stage]).items():
            digest.update(name.encode() + value.tobytes())
            size += value.nbytes
    host.cut((tokens,), starts, [0], None)
    return {
        "bytes": size,
        "built_s": built_s,
        "handed_out_s": time.perf_counter() - began - built_s,
        "resident_bytes": built_bytes,
        "digest": digest.hexdigest(),
        "in_files": any("lie in files" in note for note in notes),
    }


def measured(side: str, layers: int, group: Path | None) -> dict[str, Any] | None:
    """What a process of its own tells that starts the model; None where it was killed."""
    words = [sys.executable, "-m", "tests.benchmarks.large_model", "--layers", str(layers), "--side", side]
    words += ["--group", str(group or "")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    if ended.returncode:
        print(ended.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(ended.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--limit", type=int, default=900, help="MiB")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--group", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        if options.group:
            (Path(options.group) / "cgroup.procs").write_text(str(os.getpid()))
        print(json.dumps(start(options.side, options.layers)))
        return 0
    print("| limit | model | | started | weights handed out | memory of the process then |")
    print("|---|---|---|---|---|---|")
    results = {}
    for limit in (None, options.limit):
        with contextlib.ExitStack() as stack:
            group = None if limit is None else stack.enter_context(control_group(limit << 20))
            for side in SIDES:
                results[limit, side] = found = measured(side, options.layers, group)
                shown = "none" if limit is None else f"{limit} MiB"
                if found is None:
                    print(f"| {shown} | | {side} | killed | | |", flush=True)
                    continue
                where = "in files" if found["in_files"] else "in memory"
                print(
                    f"| {shown} | {found['bytes'] / 2**20:,.0f} MiB | {side}: {where} | {found['built_s']:.1f} s | "
                    f"{found['handed_out_s']:.1f} s | {found['resident_bytes'] / 2**20:,.0f} MiB |",
                    flush=True,
                )
    ended = [found for found in results.values() if found is not None]
    as_said = len(ended) == 3 and results[options.limit, "in memory"] is None
    return 0 if as_said and len({found["digest"] for found in ended}) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
