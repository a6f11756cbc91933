"""The engine on real GPUs (one is enough): NCCL through cupy, streams, events. Skips itself elsewhere."""

import functools
import importlib.util

import pytest
import torch

from tests.worker.engine.engine_support import Plain, batch, chain, skips, tied_chain
from tests.worker.engine.test_gloo import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy is not installed"),
]
GRAPHS = {"chain": lambda: chain(4), "skips": skips, "tied": tied_chain}


def job(graph, mesh_of_stage, **more):
    return {
        "graph": graph,
        "mesh_of_stage": mesh_of_stage,
        "meshes": list(dict.fromkeys(mesh_of_stage)),
        "workers": 1,
        "microbatches": 4,
        "steps": 3,
        "connect_s": 120.0,
        "options": {"device": "cuda", "clip_grad_norm": 0.5},
        **more,
    }


@pytest.mark.parametrize(
    ("graph", "mesh_of_stage"),
    [
        ("chain", ["m0", "m1", "m1", "m0"]),
        ("skips", ["m0", "m1", "m2", "m3"]),
        ("tied", ["m0", "m1", "m2"]),
    ],
)
def test_processes_on_gpus_train_as_the_unsplit_model_does(graph, mesh_of_stage):
    answers = run_processes(job(graph, mesh_of_stage), timeout_s=240)
    plain = Plain(GRAPHS[graph](), functools.partial(torch.optim.SGD, lr=0.1), 0.5)
    for step in range(3):
        losses, _ = plain.step(*batch(4, seed=step))
        found = [loss for answer in answers.values() for loss in answer["losses"][step]]
        assert found == pytest.approx(losses, abs=1e-9)
    for answer in answers.values():
        assert answer["error"] is None
        for name, value in answer["parameters"].items():
            expected = plain.parameters[name].data
            torch.testing.assert_close(
                torch.tensor(value, dtype=torch.float64), expected, rtol=1e-9, atol=1e-11
            )


def test_a_killed_worker_ends_the_others_on_gpus():
    fault = {"kind": "killed", "mesh": "m1", "stage": 1, "call": 7}  # the first four are the warm-up's
    answers = run_processes(job("chain", ["m0", "m1", "m2", "m3"], fault=fault, limit_s=3.0), timeout_s=240)
    for (mesh, _), answer in answers.items():
        if mesh != "m1":
            assert answer["error"] in ("PeerLostError", "StallError", "AbortedError")
