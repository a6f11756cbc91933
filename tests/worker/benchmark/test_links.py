"""Links measured on a transport whose latency, bandwidth and sharing are known."""

from __future__ import annotations

import threading

import pytest

from worker.benchmark import links
from worker.benchmark.links import (
    SMALL_BYTES,
    Probe,
    contention_model,
    measure_links,
    probe_groups,
    probe_lanes,
)
from worker.transport.base import Topology
from worker.transport.local import LocalTransport

LATENCY_S, BANDWIDTH = 0.002, 1e8
MESHES = ("m0", "m1", "m2")
PROBES = (Probe("m0", ("m1",)), Probe("m1", ("m2",)), Probe("m1", ("m0", "m2")))

# What a transfer occupies for its whole length, as DESIGN section 4 says it.
OCCUPIED = {
    "link": lambda source, target: [f"{source}>{target}"],
    "full-duplex": lambda source, target: [f"send {source}", f"receive {target}"],
    "half-duplex": lambda source, target: [f"port {source}", f"port {target}"],
}


class Wires:
    """A network on a clock of its own: a transfer begins when both ends are there, takes the latency, waits for
    what `contention` lets it occupy, and takes its bytes' time. Words of a few bytes occupy nothing."""

    def __init__(self, contention, bandwidths):
        self._contention, self._bandwidths = contention, bandwidths
        self._posted: dict[tuple, dict[str, float]] = {}
        self._ends: dict[tuple, float] = {}
        self._free: dict[str, float] = {}
        self._changed = threading.Condition()

    def post(self, transfer, end, at_s, size):
        """`transfer` is (source, target, tag); `end` is "send" or "receive"."""
        with self._changed:
            posted = self._posted.setdefault(transfer, {})
            posted[end] = at_s
            if len(posted) < 2:
                return
            del self._posted[transfer]
            source, target, _ = transfer
            begin_s = max(posted.values()) + LATENCY_S
            occupied = OCCUPIED[self._contention](source, target) if size > SMALL_BYTES else []
            begin_s = max([begin_s, *(self._free.get(name, 0.0) for name in occupied)])
            end_s = begin_s + size / self._bandwidths.get((source, target), BANDWIDTH)
            self._free |= dict.fromkeys(occupied, end_s)
            self._ends[transfer] = end_s
            self._changed.notify_all()

    def wait(self, transfer):
        """When it ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: transfer in self._ends, 60)
            return self._ends[transfer]


class Clock(threading.local):
    """The time of each mesh, which is a thread here: only what it waits for moves it."""

    now_s = 0.0

    def monotonic(self):
        return self.now_s


CLOCK = Clock()


class Wire:
    """One mesh's end of the wires."""

    def __init__(self, local, wires):
        self.topology, self.mesh, self.all_reduce = local.topology, local.mesh, local.all_reduce
        self._wires = wires

    def send(self, peer, tag, tensor):
        return self._start((self.mesh, peer, tag), "send", tensor)

    def receive(self, peer, tag, out):
        return self._start((peer, self.mesh, tag), "receive", out)

    def _start(self, transfer, end, tensor):
        self._wires.post(transfer, end, CLOCK.now_s, tensor.numel())

        def wait():
            CLOCK.now_s = max(CLOCK.now_s, self._wires.wait(transfer))

        return wait


def measure_all(contention, bandwidths, probes=PROBES, meshes=MESHES):
    topology = Topology(meshes)
    group = LocalTransport.group(topology)
    wires = [Wires(contention, bandwidths) for _ in probes]  # tags begin again with each probe
    found: dict[str, list] = {mesh: [] for mesh in meshes}

    def run(mesh):
        transport = group[(mesh, 0)]
        transport.connect(probe_groups(topology), probe_lanes(probes))
        for probe, wire in zip(probes, wires, strict=True):
            found[mesh] += measure_links(Wire(transport, wire), [probe])

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
def clock(monkeypatch):
    monkeypatch.setattr(links, "time", CLOCK)


@pytest.mark.parametrize("contention", list(OCCUPIED))
def test_what_transfers_share_is_found_by_running_two_at_once(contention):
    found = measure_all(contention, {})
    together = [one for measured in found.values() for probe in measured for one in probe.together]
    assert [one.kind for one in together] == ["both ways", "both ways", "two sends", "two receives"]
    assert contention_model(together) == contention, together


def test_each_direction_of_a_pair_has_its_own_bandwidth():
    bandwidths = {("m0", "m1"): BANDWIDTH, ("m1", "m0"): BANDWIDTH / 4}
    (measured,) = measure_all("link", bandwidths, PROBES[:1], MESHES[:2])["m0"]
    there, back = measured.links
    assert (there.source, there.target, back.source, back.target) == ("m0", "m1", "m1", "m0")
    assert there.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH, rel=1e-3)
    assert back.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH / 4, rel=1e-3)
    assert there.latency_s == back.latency_s == pytest.approx(LATENCY_S, rel=1e-3)


def test_a_mesh_that_is_no_part_of_a_probe_finds_nothing_and_waits_for_the_others():
    found = measure_all("link", {}, PROBES[:1])
    assert [len(found[mesh]) for mesh in MESHES] == [1, 0, 0]
