"""What the driver asks the workers to measure of their links, and what it takes as known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.worker.driver.fake_gang import FakeGang
from worker.actor.device import WorkerAddress
from worker.benchmark.links import ConcurrentTransfers, Link, ProbeResult
from worker.driver import benchmarks
from worker.driver.benchmarks import LINK_CACHE_S, GangBenchmarks
from worker.driver.limits import Limits

# Bytes a second and what sharing costs between the nodes of this test.
BANDWIDTH = {
    ("a", "a"): 9e9,
    ("a", "b"): 2e9,
    ("b", "a"): 1e9,
    ("b", "b"): 8e9,
    ("b", "c"): 5e8,
    ("c", "b"): 4e8,
}


class Control:
    def __init__(self):
        self.profiles = {}

    def cached_profile(self, key):
        return self.profiles.get(key)

    def store_profile(self, key, profile):
        self.profiles[key] = profile


class Gang(FakeGang):
    """Meshes on `nodes`, whose workers find BANDWIDTH; `measured` lists the probes that ran."""

    def __init__(self, nodes, prefix="m"):
        self.measured = []
        names = [f"{prefix}{k}" for k in range(len(nodes))]
        self._node_of = dict(zip(names, nodes, strict=True))
        self.addresses = [
            WorkerAddress(name, worker, node, f"id of {node}", 7, "cpu")
            for name, node in self._node_of.items()
            for worker in range(2)
        ]
        self.meshes = [SimpleNamespace(name=name, workers=[self._worker(name)]) for name in names]

    def _worker(self, name):
        def measure(*, probes, **_):
            own = [probe for probe in probes if probe.hub == name]
            self.measured += own
            return [self._find(probe) for probe in own]

        return SimpleNamespace(measure_links=SimpleNamespace(remote=measure))

    def _find(self, probe):
        hub, peers = self._node_of[probe.hub], [self._node_of[peer] for peer in probe.peers]
        if len(peers) == 2:
            return ProbeResult((), (ConcurrentTransfers("two sends", (1.0, 1.0), 1.9),))
        ways = (probe.hub, probe.peers[0], hub, peers[0]), (probe.peers[0], probe.hub, peers[0], hub)
        found = tuple(
            Link(source, target, 1e-4, BANDWIDTH[one, other]) for source, target, one, other in ways
        )
        return ProbeResult(found, (ConcurrentTransfers("both ways", (1.0, 1.0), 1.1),))


def costs(gang, control):
    events = []
    found = GangBenchmarks(
        control=control,
        reporter=SimpleNamespace(event=lambda *event: events.append(event)),
        gang=gang,
        device="cpu",
        limits=Limits(),
    )
    return found, events


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=1e9)
    monkeypatch.setattr(benchmarks.time, "time", lambda: now.s)
    monkeypatch.setattr(benchmarks, "own_node_address", lambda: "127.0.0.1")
    return now


def named(network, prefix):
    """Bandwidths by the numbers of the meshes."""
    return {
        (link["source"].removeprefix(prefix), link["target"].removeprefix(prefix)): link[
            "bandwidth_bytes_per_s"
        ]
        for link in network["links"]
    }


def test_nodes_that_were_measured_are_known_to_the_next_job_whatever_its_meshes_are_called(clock):
    control, first = Control(), Gang(["a", "a", "b"])
    found, events = costs(first, control)
    network = found.network(loops=False, skips=False)
    assert len(first.measured) == 3, "two pairs and one hub with two peers"
    assert named(network, "m") == {("0", "1"): 9e9, ("1", "0"): 9e9, ("1", "2"): 2e9, ("2", "1"): 1e9}
    assert network["contention"] == "full-duplex" and [kind for kind, _ in events] == ["links_measured"]
    clock.s += LINK_CACHE_S
    second = Gang(["a", "a", "b"], prefix="other ")
    found, events = costs(second, control)
    again = found.network(loops=False, skips=False)
    assert second.measured == [] and [kind for kind, _ in events] == ["links_known"]
    assert named(again, "other ") == named(network, "m")
    assert {key: again[key] for key in again if key != "links"} == {
        key: network[key] for key in network if key != "links"
    }


def test_only_what_is_not_known_yet_is_measured(clock):
    control = Control()
    costs(Gang(["a", "a", "b"]), control)[0].network(loops=False, skips=False)
    gang = Gang(["a", "b", "c"])
    found, events = costs(gang, control)
    network = found.network(loops=False, skips=False)
    assert [(probe.hub, probe.peers) for probe in gang.measured] == [("m1", ("m2",)), ("m1", ("m0", "m2"))]
    assert named(network, "m") == {("0", "1"): 2e9, ("1", "0"): 1e9, ("1", "2"): 5e8, ("2", "1"): 4e8}
    assert events[0][1].endswith("2 of 3 measurements are new")


def test_one_direction_is_not_taken_for_the_other(clock):
    control = Control()
    costs(Gang(["a", "b"]), control)[0].network(loops=False, skips=False)
    gang = Gang(["b", "a"])
    network = costs(gang, control)[0].network(loops=False, skips=False)
    assert len(gang.measured) == 1
    assert named(network, "m") == {("0", "1"): 1e9, ("1", "0"): 2e9}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: body | {"measured_at": body["measured_at"] - LINK_CACHE_S - 1},
        lambda body: body | {"measured_at": body["measured_at"] + 60},
        lambda body: body | {"format": 0},
        lambda body: {},
        lambda body: body | {"links": [[0, 1, 1e-4, float("nan")]]},
        lambda body: body | {"links": [[0, 5, 1e-4, 1e9]]},
        lambda body: body | {"links": "fast"},
    ],
    ids=["old", "from the future", "another format", "empty", "not a number", "no such role", "text"],
)
def test_what_is_too_old_or_no_measurement_is_measured_again(clock, spoil):
    control = Control()
    network = costs(Gang(["a", "b"]), control)[0].network(loops=False, skips=False)
    (key,) = control.profiles
    control.profiles[key] = spoil(control.profiles[key])
    gang = Gang(["a", "b"])
    assert costs(gang, control)[0].network(loops=False, skips=False) == network
    assert len(gang.measured) == 1


def test_the_same_address_on_another_node_is_not_the_same_node(clock):
    control = Control()
    costs(Gang(["a", "b"]), control)[0].network(loops=False, skips=False)
    gang = Gang(["a", "b"])
    gang.addresses = [
        WorkerAddress(one.mesh, one.worker, one.node, f"new {one.node_id}", 7, "cpu")
        for one in gang.addresses
    ]
    costs(gang, control)[0].network(loops=False, skips=False)
    assert len(gang.measured) == 1


def test_one_mesh_has_no_links(clock):
    gang = Gang(["a"])
    found, events = costs(gang, Control())
    assert found.network(loops=True, skips=True)["links"] == [] and not gang.measured and not events


def test_the_engines_own_time_is_the_mean_over_the_meshes_and_nothing_on_accelerators(clock):
    gang = Gang(["a", "a", "b"])
    for mesh, seconds in zip(gang.meshes, (1e-4, 2e-4, 6e-4), strict=True):
        mesh.workers[0].measure_action = SimpleNamespace(remote=lambda seconds=seconds, **_: seconds)
    found, _ = costs(gang, Control())
    assert found.action_s() == pytest.approx(3e-4)
    found._device = "cuda"
    assert found.action_s() == 0.0
