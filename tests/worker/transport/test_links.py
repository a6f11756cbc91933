"""Links measured on a transport whose latency and bandwidth are known."""

from __future__ import annotations

import threading

import pytest

from worker.transport import Topology
from worker.transport.links import LARGE_BYTES, SMALL_BYTES, Link, measure_links, neighbour_lanes, slowest
from worker.transport.local import LocalTransport


class Clock:
    """A clock that only a transfer moves; one pair of meshes measures at a time."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Slow:
    """A transport on which a send takes `latency_s` and the bytes' time."""

    def __init__(self, inner, clock: Clock, latency_s: float, bandwidth: float):
        self._inner, self._clock, self._latency_s, self._bandwidth = inner, clock, latency_s, bandwidth
        self.topology, self.mesh = inner.topology, inner.mesh

    def send(self, peer, tag, tensor):
        self._clock.now_s += self._latency_s + tensor.numel() * tensor.element_size() / self._bandwidth
        return self._inner.send(peer, tag, tensor)

    def receive(self, peer, tag, out):
        return self._inner.receive(peer, tag, out)


def measure_all(meshes, clock, latency_s, bandwidth):
    topology = Topology(meshes)
    group = LocalTransport.group(topology)
    lanes = neighbour_lanes(meshes)
    found = {}

    def run(mesh):
        transport = group[(mesh, 0)]
        transport.connect({}, lanes)
        found[mesh] = measure_links(Slow(transport, clock, latency_s, bandwidth))

    threads = [threading.Thread(target=run, args=(m,)) for m in meshes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for transport in group.values():
        transport.close()
    return found


def test_latency_and_bandwidth_of_a_known_link_are_found(monkeypatch):
    clock, bandwidth = Clock(), LARGE_BYTES / 0.05
    monkeypatch.setattr("worker.transport.links.time", clock)
    found = measure_all(("m0", "m1", "m2"), clock, 0.002, bandwidth)
    assert found["m2"] is None
    for mesh in ("m0", "m1"):
        assert found[mesh].latency_s == pytest.approx(0.002 + SMALL_BYTES / bandwidth)
        assert found[mesh].bandwidth_bytes_per_s == pytest.approx(bandwidth)


def test_the_slowest_link_is_the_one_a_large_transfer_notices():
    quick, thin = Link("a", "b", 1e-3, 1e9), Link("b", "c", 1e-4, 1e6)
    assert slowest([quick, thin]) is thin
    assert slowest([]) is None
