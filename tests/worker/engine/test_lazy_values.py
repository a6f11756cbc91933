"""Complex tensors between meshes: torch conjugates and negates them lazily, and transports move what lies in memory."""

from __future__ import annotations

import pytest
import torch

from tests.worker.engine.engine_support import (
    SHAPE,
    WIDTH,
    Edge,
    Graph,
    LocalPipeline,
    Plain,
    batch,
    linear,
    make_stage,
    serial_programs,
)
from worker.transport.gloo import GlooTransport
from worker.transport.local import LocalTransport
from worker.transport.rendezvous import host_store


@pytest.fixture
def over_gloo(monkeypatch):
    store = host_store("127.0.0.1")

    def group(topology):
        where = {"store": ("127.0.0.1", store.port), "host": "127.0.0.1", "worker": 0}
        return {(mesh, 0): GlooTransport(topology, mesh=mesh, **where) for mesh in topology.meshes}

    monkeypatch.setattr(LocalTransport, "group", group)


def spectral():
    """The first makes a conjugate that nobody has computed yet; so does the gradient of what the second does."""
    torch.manual_seed(6)
    stages = [
        make_stage(
            0, ["input:0"], ["z"], lambda m, x: (torch.complex(m.l(x), 2 * x + 1).conj(),), l=linear()
        ),
        make_stage(1, ["z"], ["output"], lambda m, z: (m.l(z.conj().imag) + z.real * 3,), l=linear()),
    ]
    return Graph(stages, (Edge(0, 1, "z", SHAPE, torch.complex128),))


@pytest.mark.parametrize("split", [False, True])
def test_a_conjugate_arrives_as_one(over_gloo, split):
    graph, inputs = spectral(), batch(2)
    assert spectral().stages[0](inputs[0][0][0])[0].is_conj() and WIDTH
    losses, gradients = Plain(graph).step(*inputs)
    programs = serial_programs(graph, ["m0", "m1"], 2, split=split)
    with LocalPipeline(graph, ["m0", "m1"], programs, 2) as pipeline:
        results = pipeline.step(1, [inputs])
        assert results["m1", 0].losses == pytest.approx(losses, rel=1e-12)
        for name, gradient in pipeline.gradients().items():
            assert torch.allclose(gradient, gradients[name], rtol=1e-12), name
