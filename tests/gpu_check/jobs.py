"""Losses, faults and checkpoints of whole jobs and engines, a process a worker.

`python -m tests.gpu_check.jobs losses`, `faults` or `checkpoint` prints a finding; with `cpu` behind it the script is
tried on CPU, over gloo.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.gpu_check.runner import Figure, Finding
from tests.worker.actor.test_actor import job
from tests.worker.engine.test_gloo import run_processes
from tests.worker.jobs import test_gpu_jobs
from tests.worker.jobs.test_tensor_parallel import on
from worker.checkpoint import format as checkpoint_format
from worker.contract.job import Job

LOSS_CASES = ("bf16", "tensor 2", "data 2", "shard", test_gpu_jobs.OVERFLOW)
FAULTS: Mapping[str, str] = {
    "killed": "a worker's process is killed in its step",
    "stopped": "a worker's host thread is stopped in its step",
    "sleeps": "a receive is posted whose peer never sends",
    "illegal address": "a kernel reads an address that is none",
}
FAULTY = "m1"
SLOT_LIMIT_S = 3.0
END_LIMIT_S = 30.0
"""How long after the begin of its step a worker may take to raise: the slot's limit, a poll, an abort."""
_FREE_AGAIN_S = 20.0
_FREE_TOLERANCE_BYTES = 256 << 20


def losses(device: str) -> Finding:
    """Each case's largest difference to the plain loop; fails at the first that is too large."""
    figures = []
    for case in LOSS_CASES:
        try:
            difference = test_gpu_jobs.compare(case, device)
        except AssertionError as error:
            return Finding(tuple(figures), f"{case}: {error}")
        allowed = test_gpu_jobs.TOLERANCES.get(case, 1e-4)
        steps = (
            f"largest relative difference of a loss in {test_gpu_jobs.STEPS} steps; {allowed:g} is allowed"
        )
        figures.append(Figure(case, f"{difference:.1e}", steps))
    return Finding(tuple(figures))


def faults(device: str) -> Finding:
    """How the other workers of a chain of four end when one has a fault; fails where one does not, or memory stays held."""
    kinds = [kind for kind in FAULTS if device == "cuda" or kind != "illegal address"]
    figures, failures = [], []
    for kind in kinds:
        held = _held_bytes(device)
        # the third call; on CUDA the first four are the warm-up's
        fault = {"kind": kind, "mesh": FAULTY, "stage": 1, "call": 7 if device == "cuda" else 3}
        given = {
            "graph": "chain",
            "mesh_of_stage": ["m0", "m1", "m2", "m3"],
            "meshes": ["m0", "m1", "m2", "m3"],
            "workers": 1,
            "microbatches": 4,
            "steps": 3,
            "connect_s": 120.0,
            "limit_s": SLOT_LIMIT_S,
            "fault": fault,
            "options": {"device": device},
        }
        never_ends = (FAULTY,) if kind in ("stopped", "sleeps") else ()
        answers = {mesh: answer for (mesh, _), answer in run_processes(given, 240, never_ends).items()}
        more, failure = fault_figures(kind, answers)
        figures += more
        if failure is None and (kept := _kept_bytes(device, held)) > _FREE_TOLERANCE_BYTES:
            failure = f"{kind}: {kept >> 20} MiB of GPU memory are held {_FREE_AGAIN_S:g} s after all processes ended"
        if failure is not None:
            failures.append(failure)
    return Finding(tuple(figures), "; ".join(failures) or None)


def fault_figures(
    kind: str, answers: Mapping[str, Mapping[str, Any] | None]
) -> tuple[list[Figure], str | None]:
    """How each worker ended, and why that is a failure: one that was not at fault has no error, or has it late."""
    figures, failure = [], None
    for mesh, answer in sorted(answers.items()):
        if mesh == FAULTY and (answer is None or kind in ("killed", "stopped", "sleeps")):
            continue
        if answer is None:
            failure = failure or f"{kind}: worker {mesh} died without an answer"
            continue
        seconds, error = answer.get("failed_after_s"), answer["error"]
        if error is None:
            failure = failure or f"{kind}: worker {mesh} did not notice"
            continue
        if seconds > END_LIMIT_S:
            failure = failure or f"{kind}: worker {mesh} ended after {seconds:.1f} s, above {END_LIMIT_S:g}"
        told = f"{error} after {seconds:.1f} s, closed in {answer['closed_s']:.1f} s"
        figures.append(Figure(f"{kind}, {mesh}", told, f"{FAULTS[kind]} ({FAULTY}): {answer['message']}"))
    return figures, failure


def checkpoint(device: str) -> Finding:
    """Losses after a resume beside those of the run that went on, and what a save takes; fails where they differ."""
    layouts = {
        "tensor 2": on([(1, 2)] * 2, job()),
        "shard": test_gpu_jobs.sharded(),
    }
    figures = []
    for name, spec in layouts.items():
        spec["training"]["tf32"] = False
        with tempfile.TemporaryDirectory() as folder:
            uri = checkpoint_format.step_uri(folder, "job", 2)
            through = test_gpu_jobs.run(spec, device, steps=4, save=[uri, 2])
            meshes = [f"m{k}" for k in range(len(Job.from_json(spec).mesh_sizes))]
            checkpoint_format.finish_checkpoint(uri, step=2, shards=meshes, keep=1)
            written = sum(path.stat().st_size for path in Path(uri).iterdir())
            resumed = test_gpu_jobs.run(spec, device, steps=4, restore=uri)
        more, failure = resume_figures(name, through, resumed, written)
        figures += more
        if failure is not None:
            return Finding(tuple(figures), failure)
    return Finding(tuple(figures))


def resume_figures(
    name: str, through: Mapping[Any, Any], resumed: Mapping[Any, Any], written: int
) -> tuple[list[Figure], str | None]:
    """Of a run over steps 1 to 4 that saved after step 2, and of one that went on from there."""
    expected, found = test_gpu_jobs.mean_losses(through)[2:], test_gpu_jobs.mean_losses(resumed)
    difference = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
    saves = [answer["saved"] for answer in through.values()]
    figures = [
        Figure(
            f"{name}: losses after a resume",
            "equal to the bit" if found == expected else f"differ by up to {difference:.1e}",
            "relative to the run that went on; CUDA's atomic additions may differ in the last bits",
        ),
        Figure(f"{name}: written", f"{written / 1e6:.2f} MB", "of a small model"),
        Figure(f"{name}: saving", f"{max(one['save_s'] for one in saves):.2f} s", "of the slowest worker"),
        Figure(
            f"{name}: host memory",
            f"{max(one['host_peak_bytes'] for one in saves) / 1e9:.2f} GB",
            "at most, of a worker",
        ),
    ]
    if saves[0]["held_bytes"] is not None:
        more = max(one["peak_bytes"] - one["held_bytes"] for one in saves)
        meaning = f"at most while saving, beside {max(one['held_bytes'] for one in saves) / 1e6:.2f} MB that it trains with"
        figures.append(Figure(f"{name}: GPU memory", f"{more / 1e6:.2f} MB", meaning))
    failure = f"{name}: losses after a resume are {found}, and were {expected}" if difference > 1e-4 else None
    return figures, failure


def _held_bytes(device: str) -> list[int]:
    """The bytes held of each GPU, by all processes."""
    if device != "cuda":
        return []
    sizes = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    return [total - free for free, total in sizes]


def _kept_bytes(device: str, before: list[int]) -> int:
    """The most bytes of a GPU that are held and were not `before`, once that no longer falls below the tolerance."""
    ends_s = time.monotonic() + _FREE_AGAIN_S
    while True:
        kept = max((now - then for now, then in zip(_held_bytes(device), before, strict=True)), default=0)
        if kept <= _FREE_TOLERANCE_BYTES or time.monotonic() > ends_s:
            return kept
        time.sleep(0.5)


if __name__ == "__main__":
    what, *where = sys.argv[1:]
    names = {"losses": losses, "faults": faults, "checkpoint": checkpoint}
    print(names[what](where[0] if where else "cuda").to_json())
