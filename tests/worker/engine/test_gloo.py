"""Engines in processes of their own, over gloo."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiers import some_by_day
from tests.worker.engine.engine_support import Plain, batch, chain, skips, tied_chain
from worker.transport.rendezvous import host_store

SCRIPT = Path(__file__).parent / "process_worker.py"
GRAPHS = {"chain": lambda: chain(4), "skips": skips, "tied": tied_chain}


def run_processes(job, timeout_s=250, never_ends=()):
    """What every worker process had to say (None: it died). Meshes in `never_ends` are
    killed after the others have ended, as the driver does."""
    store = host_store("127.0.0.1")
    arguments = json.dumps({**job, "port": store.port, "never_ends": list(never_ends)})
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, _ = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return {tuple(key): answer for key, answer in json.loads(out.splitlines()[-1])}


@pytest.mark.slow
@some_by_day(
    ("graph", "mesh_of_stage", "workers"),
    [
        ("skips", ["m0", "m1", "m2", "m3"], 1),
        ("tied", ["m0", "m1", "m2"], 1),
        ("chain", ["m0", "m1", "m1", "m0"], 2),
    ],
    by_day=1,
)
def test_processes_train_as_the_unsplit_model_does(graph, mesh_of_stage, workers):
    steps, microbatches, clip = 3, 4, 0.5
    meshes = list(dict.fromkeys(mesh_of_stage))
    answers = run_processes(
        {
            "graph": graph,
            "mesh_of_stage": mesh_of_stage,
            "meshes": meshes,
            "workers": workers,
            "microbatches": microbatches,
            "steps": steps,
            "options": {"clip_grad_norm": clip},
        }
    )
    plain = Plain(GRAPHS[graph](), functools.partial(torch.optim.SGD, lr=0.1), clip)
    for step in range(steps):
        inputs, targets = [], []
        for worker in range(workers):
            more = batch(microbatches, seed=10 * worker + step)
            inputs += more[0]
            targets += more[1]
        losses, _ = plain.step(inputs, targets)
        found = [
            loss
            for worker in range(workers)
            for mesh in meshes
            for loss in answers[mesh, worker]["losses"][step]
        ]
        assert found == pytest.approx(losses, abs=1e-10)
    for answer in answers.values():
        assert answer["error"] is None
        assert answer["norm"] == pytest.approx(plain.norm, rel=1e-10)
        for name, value in answer["parameters"].items():
            torch.testing.assert_close(
                torch.tensor(value, dtype=torch.float64), plain.parameters[name].data, rtol=1e-10, atol=1e-12
            )
