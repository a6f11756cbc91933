"""Before an evaluation the workers of a mesh take the buffers of its first, whatever their type, to the bit."""

from __future__ import annotations

import pytest
import torch

from tests.worker.at_once import at_once
from tests.worker.transport.fake_nccl import FakeNccl
from worker.actor.evaluation import take_buffers_of_first
from worker.parallel.collectives import Collectives
from worker.parallel.process_groups import reduce_groups
from worker.transport.base import Topology
from worker.transport.gloo import GlooTransport
from worker.transport.nccl import NcclLibrary, NcclTransport
from worker.transport.rendezvous import host_store


def buffers(worker):
    """Those of worker 0 hold what a sum with zeros would not keep."""
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1.5])
    return [
        odd if worker == 0 else torch.ones(5),
        *(
            (torch.arange(6).view(2, 3) - 3 * worker).to(dtype)
            for dtype in (torch.int16, torch.uint8, torch.int64)
        ),
        torch.tensor([True, worker == 1, False]),
        torch.tensor(7 - worker),
        torch.complex(odd, odd).conj() if worker == 0 else torch.zeros(5, dtype=torch.complex64),
        torch.full((4,), 2.0 - worker).to(torch.float8_e4m3fn),
        torch.zeros(0, 3),
        torch.arange(6.0).view(2, 3).t() * (1 - worker),
    ]


@pytest.mark.parametrize("kind", ["gloo", "nccl"])
def test_every_worker_has_the_buffers_of_the_first(kind, monkeypatch):
    monkeypatch.setattr("worker.transport.selftest.LONG", 67)
    store, nccl, topology = host_store("127.0.0.1"), FakeNccl(), Topology(("m0",), 2)
    found = {worker: buffers(worker) for worker in range(2)}

    def run(worker, mine):
        where = {"mesh": "m0", "worker": worker, "store": ("127.0.0.1", store.port)}
        transport = (
            GlooTransport(topology, host="127.0.0.1", **where)
            if kind == "gloo"
            else NcclTransport(topology, library=NcclLibrary(nccl, (2, 28, 9), lambda: 7), **where)
        )
        collectives = Collectives(transport, reduce_groups(topology, {}, ()))
        collectives.connect(())
        take_buffers_of_first(mine, collectives, 1)
        transport.close()

    at_once(found, run)

    def bits(tensor):
        return tensor.resolve_conj().reshape(-1).clone().view(torch.uint8)

    for first, second, given in zip(found[0], found[1], buffers(0), strict=True):
        assert torch.equal(bits(second), bits(given)) and torch.equal(bits(first), bits(given)), given.dtype
