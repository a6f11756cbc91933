"""Whole jobs over real NCCL: matrices shared, meshes of unlike sizes, states shared. One GPU is enough, where all workers
share it; with as many as workers each has its own. Skips itself elsewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.worker.actor.test_actor import job, plain
from tests.worker.jobs import test_sync_batch_norm_jobs
from tests.worker.jobs.test_fp16_jobs import fp16
from tests.worker.jobs.test_heterogeneous_meshes import on as on_sizes
from tests.worker.jobs.test_tensor_parallel import LOSSES, on, unet
from tests.worker.plain_job import plain_losses
from tests.worker.workers import Workers
from worker.contract.job import Job
from worker.transport.rendezvous import host_store

STEPS = 3
PROCESS = Path(__file__).with_name("job_process.py")


def sharded():
    spec = job(workers_per_mesh=2)
    spec["resources"]["shard"] = "optimizer"
    return spec


def sharded_unlike():
    """The list of DESIGN section 12."""
    shares = {"shard": ["none", "optimizer"]}
    return on([(2, 2), (2, 1)], job(), **shares)


def plain_of(name):
    return lambda: plain({"gpt": job, "unet": unet}[name](), range(1, STEPS + 1), LOSSES[name])[0]


def with_whole_batches():
    """Batch statistics of one worker."""
    with Workers(test_sync_batch_norm_jobs.spec_of(1)) as workers:
        return workers.losses(range(1, STEPS + 1))


def bf16():
    spec = job(stages=3, meshes=3)
    spec["training"]["precision"] = "bf16"
    return spec


def in_autocast(spec):
    return lambda: plain_losses(spec(), range(1, STEPS + 1))


OVERFLOW = "fp16 with an overflow"
CASES = {
    "bf16": (in_autocast(bf16), bf16),
    OVERFLOW: (in_autocast(fp16), fp16),
    "data 2": (plain_of("gpt"), lambda: on([(2, 1)] * 2, job())),
    "tensor 2": (plain_of("gpt"), lambda: on([(1, 2)] * 2, job())),
    "data 2, tensor 2": (plain_of("unet"), lambda: on([(2, 2)] * 2, unet())),
    "2 to 1 workers": (plain_of("unet"), lambda: on_sizes((2, 1), unet())),
    "1 to 2 workers": (plain_of("gpt"), lambda: on_sizes((1, 2), job())),
    "shard": (plain_of("gpt"), sharded),
    "data 2, tensor 2 to data 2, shard": (plain_of("gpt"), sharded_unlike),
    "sync_batch_norm": (with_whole_batches, lambda: test_sync_batch_norm_jobs.spec_of(2)),
}
TOLERANCES = {"bf16": 5e-3, OVERFLOW: 1e-3}
"""Relative, where it is not 1e-4: the plain loop rounds on the CPU, in another order."""


class Planned(Workers):
    """The plan of a job; nothing is loaded."""

    def _load(self, *_):
        """Its workers are other processes."""

    def __exit__(self, *_):
        """Nothing was opened."""


def run(spec, device, nodes=None, **more):
    """What each worker of the job, a process each, answers; its plan takes the meshes to be on these nodes. `more` is
    what job_process.py takes besides."""
    planned, store = Planned(spec, nodes).planned, host_store("127.0.0.1")
    places = [
        (f"m{k}", index) for k, size in enumerate(Job.from_json(spec).mesh_sizes) for index in range(size)
    ]
    given = {"job": spec, "planned": planned, "device": device, "port": store.port, "steps": STEPS, **more}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{PROCESS.parents[1]}{os.pathsep}{PROCESS.parents[3]}"},
        )
        for _ in places
    ]
    for process, place in zip(processes, places, strict=True):
        process.stdin.write(json.dumps({**given, "place": place}))
        process.stdin.close()
        process.stdin = None
    ends = [process.communicate(timeout=280) for process in processes]
    told = [error[-3000:] for process, (_, error) in zip(processes, ends, strict=True) if process.returncode]
    assert told == []
    return dict(zip(places, (json.loads(out.splitlines()[-1]) for out, _ in ends), strict=True))


def mean_losses(answers):
    """The mean loss of each step over all workers."""
    steps = zip(*(answer["losses"] for answer in answers.values()), strict=True)
    means = []
    for step in steps:
        found = [loss for losses in step for loss in losses]
        means.append(sum(found) / len(found))
    return means


def check_replicas(answers, rel):
    """AssertionError where workers of a mesh differ in a parameter, or a shard of one, that they have in common."""
    known = {}
    for (mesh, _), answer in answers.items():
        for name, square in answer["squares"].items():
            assert square == pytest.approx(known.setdefault((mesh, name), square), rel=rel), (mesh, name)


def compare(case, device):
    """The largest relative difference of a step's loss to the plain loop's. AssertionError where it is too large, where
    workers of a mesh differ in their parameters, or where no step overflowed that should."""
    expected, spec = CASES[case]
    spec = spec()
    spec["training"]["tf32"] = False
    answers = run(spec, device)
    losses, wanted = mean_losses(answers), expected()
    assert losses == pytest.approx(wanted, rel=TOLERANCES.get(case, 1e-4)), case
    check_replicas(answers, rel=1e-9)
    for answer in answers.values():
        assert answer["skipped"][0] == (case == OVERFLOW)
    return max(abs(loss / value - 1) for loss, value in zip(losses, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy is not installed")
@pytest.mark.parametrize("case", CASES)
def test_losses_on_gpus_are_those_of_a_plain_loop(case):
    compare(case, "cuda")
