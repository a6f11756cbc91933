"""Links measured on a transport whose latency, bandwidth and sharing are known."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from worker.transport import Topology, links
from worker.transport.links import groups_of, lanes_of, measure_links
from worker.transport.local import LocalTransport
from worker.transport.network import Probe, contention_of

LATENCY_S, BANDWIDTH, LARGE_BYTES = 0.002, 1e6, 25_000
MESHES = ("m0", "m1", "m2")
PROBES = (Probe("m0", ("m1",)), Probe("m1", ("m2",)), Probe("m1", ("m0", "m2")))

# What a transfer occupies for its whole length, as DESIGN section 4 says it.
OCCUPIED = {
    "link": lambda source, target: [f"{source}>{target}"],
    "full-duplex": lambda source, target: [f"send {source}", f"receive {target}"],
    "half-duplex": lambda source, target: [f"port {source}", f"port {target}"],
}


class Wire:
    """A transport on which a send takes the latency and then its bytes' time, and occupies `resources`."""

    def __init__(self, inner, contention, bandwidths, resources):
        self._inner, self._contention, self._bandwidths = inner, contention, bandwidths
        self._resources = resources
        self.topology, self.mesh = inner.topology, inner.mesh
        self.receive, self.all_reduce = inner.receive, inner.all_reduce

    def send(self, peer, tag, tensor):
        arrived: list = []
        mover = threading.Thread(target=self._move, args=(peer, tag, tensor, arrived))
        mover.start()

        def wait():
            mover.join()
            arrived[0]()

        return wait

    def _move(self, peer, tag, tensor, arrived):
        time.sleep(LATENCY_S)
        with contextlib.ExitStack() as stack:
            for name in OCCUPIED[self._contention](self.mesh, peer):
                stack.enter_context(self._resources[name])
            time.sleep(tensor.numel() / self._bandwidths.get((self.mesh, peer), BANDWIDTH))
        arrived.append(self._inner.send(peer, tag, tensor))


def measure_all(contention, bandwidths, probes=PROBES, meshes=MESHES):
    topology = Topology(meshes)
    group = LocalTransport.group(topology)
    resources = {
        name: threading.Lock()
        for a in meshes
        for b in meshes
        for occupied in OCCUPIED.values()
        for name in occupied(a, b)
    }
    found: dict[str, list] = {}

    def run(mesh):
        transport = group[(mesh, 0)]
        transport.connect(groups_of(topology), lanes_of(probes))
        found[mesh] = measure_links(Wire(transport, contention, bandwidths, resources), probes)

    threads = [threading.Thread(target=run, args=(m,)) for m in meshes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for transport in group.values():
        transport.close()
    return found


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setitem(links.LARGE_BYTES, "cpu", LARGE_BYTES)
    monkeypatch.setattr(links, "SMALL_ROUNDS", 4)
    monkeypatch.setattr(links, "LARGE_ROUNDS", 3)
    monkeypatch.setattr(links, "WARM_UP_ROUNDS", 1)


@pytest.mark.parametrize("contention", list(OCCUPIED))
def test_what_transfers_share_is_found_by_running_two_at_once(contention):
    found = measure_all(contention, {})
    together = [one for measured in found.values() for probe in measured for one in probe.together]
    assert [one.kind for one in together] == ["both ways", "both ways", "two sends", "two receives"]
    assert contention_of(together) == contention, together


def test_each_direction_of_a_pair_has_its_own_bandwidth():
    bandwidths = {("m0", "m1"): BANDWIDTH, ("m1", "m0"): BANDWIDTH / 4}
    (measured,) = measure_all("link", bandwidths, PROBES[:1], MESHES[:2])["m0"]
    there, back = measured.links
    assert (there.source, there.target, back.source, back.target) == ("m0", "m1", "m1", "m0")
    assert there.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH, rel=0.3)
    assert back.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH / 4, rel=0.3)
    assert there.latency_s == back.latency_s == pytest.approx(LATENCY_S, abs=0.002)


def test_a_mesh_that_is_no_part_of_a_probe_finds_nothing_and_waits_for_the_others():
    found = measure_all("link", {}, PROBES[:1])
    assert [len(found[mesh]) for mesh in MESHES] == [1, 0, 0]
