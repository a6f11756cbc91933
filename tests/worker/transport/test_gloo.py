"""The gloo transport between threads of one process: how waiting operations end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from worker.transport.base import Topology
from worker.transport.gloo import GlooTransport, host_store

MESHES = ("m0", "m1", "m2", "m3")


@pytest.fixture
def transports():
    """One for each mesh, all connected, with one group of all."""
    store = host_store("127.0.0.1")
    topology = Topology(MESHES)
    made = [
        GlooTransport(
            topology,
            mesh=mesh,
            worker=0,
            host="127.0.0.1",
            store_host="127.0.0.1",
            store_port=store.port,
            connect_timeout_s=120.0,
        )
        for mesh in MESHES
    ]
    with ThreadPoolExecutor(len(made)) as threads:
        list(threads.map(lambda one: one.connect({"all": (0, 1, 2, 3)}, ()), made))
    yield dict(zip(MESHES, made, strict=True))
    for transport in made:
        transport.abort()
        transport.close()


@pytest.mark.parametrize("gone", [(), ("m3",), ("m3", "m0")], ids=["nobody", "m3", "m3 and m0"])
def test_an_all_reduce_that_waits_for_a_silent_member_ends_with_abort_whoever_left_before(transports, gone):
    """m1 is there and says nothing, as a stopped process; those gone have aborted first."""
    failed: list[Exception] = []

    def wait() -> None:
        try:
            transports["m2"].all_reduce("all", torch.ones(4))
        except Exception as error:
            failed.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(0.5)
    for mesh in gone:
        transports[mesh].abort()
    transports["m2"].abort()
    waiting.join(60.0)  # by itself it would end after 120 s
    assert not waiting.is_alive() and failed
