"""What the driver asks the workers to measure of their links, and what it takes as known."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.worker.driver.fake_gang import FakeActor, FakeGang
from tests.worker.driver.test_planning import JOB
from worker.benchmark.links import ConcurrentTransfers, Link, ProbeResult
from worker.benchmark.slowdowns import MeshPace
from worker.contract.costs import LINK_CACHE_S, EngineCosts, LinearCost, UpdateCosts
from worker.contract.job import Code
from worker.driver import benchmarks
from worker.driver.benchmarks import PROCESSOR_CACHE_S, GangMeasurements
from worker.driver.limits import Limits
from worker.machine.node import WorkerAddress

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
    """Meshes with a worker on each letter of `nodes`, who find BANDWIDTH; `measured` lists the probes that ran."""

    def __init__(self, nodes, prefix="m"):
        self.measured = []
        self.addresses = [
            WorkerAddress(f"{prefix}{mesh}", worker, node, f"id of {node}", 7, "cpu")
            for mesh, own in enumerate(nodes)
            for worker, node in enumerate(own)
        ]
        self.workers_sharing_memory = lambda address: 1
        self._node_of = {f"{a.mesh}/{a.worker}": a.node for a in self.addresses}
        self.workers = [self._worker(name) for name in self._node_of]

    def _worker(self, name):
        def measure(*, probes, topology, **_):
            assert name in topology.meshes
            own = [probe for probe in probes if probe.hub == name]
            self.measured += own
            return [self._find(probe) for probe in own]

        return FakeActor(measure_links=measure)

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
    found = GangMeasurements(
        JOB,
        gang,
        control=control,
        reporter=SimpleNamespace(event=lambda *event: events.append(event)),
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
    assert len(first.measured) == 2, "one pair inside a node, one between two"
    assert named(network, "m") == {("0", "1"): 9e9, ("1", "0"): 9e9, ("1", "2"): 2e9, ("2", "1"): 1e9}
    assert network["contention"] == "link"
    assert [kind for kind, _ in events] == ["links_measured"]
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
    assert [(probe.hub, probe.peers) for probe in gang.measured] == [
        ("m1/0", ("m2/0",)),
        ("m1/0", ("m0/0", "m2/0")),
    ]
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


def acting(nodes, measured):
    """A gang whose workers take these seconds for an action, and a byte for each microsecond of it; each of them is asked
    once where it is measured."""
    gang, asked = Gang(nodes), []
    for worker, seconds in zip(gang.workers, measured, strict=True):
        own = EngineCosts(seconds, round(seconds * 1e6))
        worker.answers["measure_engine"] = lambda own=own, **_: asked.append(own.action_s) or own
    return gang, asked


def test_the_engines_own_time_is_the_mean_over_the_meshes_and_kept_for_their_nodes(clock):
    """On CPU as long as what else runs there may be taken to be the same."""
    control, measured = Control(), (1e-4, 2e-4, 6e-4)
    for device, times in (("cpu", 2), ("cuda", 1)):
        asked = []
        for later_s in (0.0, PROCESSOR_CACHE_S, 1.0):
            clock.s += later_s
            gang, own = acting(["a", "a", "b"], measured)
            found, _ = costs(gang, control)
            found._device = device
            assert found.engine_costs() == EngineCosts(pytest.approx(3e-4), 600)
            asked += own
        assert asked == [*measured] * times
    gang, asked = acting(["a", "c", "b"], measured)
    found, _ = costs(gang, control)
    found._device = "cuda"
    assert found.engine_costs().action_s == pytest.approx(3e-4) and asked, "another node has other processors"


@pytest.mark.parametrize(
    "kept",
    [
        {"format": 2, "measured_at": 1e9, "action_s": 5e-4, "connection_bytes": 1},
        {"format": 3, "action_s": 5e-4, "connection_bytes": 1},
        {"format": 3, "measured_at": 1e9 + 1, "action_s": 5e-4, "connection_bytes": 1},
        {"format": 3, "measured_at": 1e9, "action_s": -1.0, "connection_bytes": 1},
        {"format": 3, "measured_at": 1e9, "action_s": 5e-4, "connection_bytes": -1},
        {"format": 3, "measured_at": 1e9, "action_s": 5e-4},
    ],
)
def test_kept_costs_of_the_engine_that_are_of_no_use_are_measured_again(clock, kept):
    control = Control()
    gang, asked = acting(["a"], (1e-4,))
    found, _ = costs(gang, control)
    found._device = "cuda"
    control.store_profile(found._engine_key(), kept)
    assert found.engine_costs() == EngineCosts(1e-4, 100) and asked


@pytest.mark.parametrize(("workers_per_mesh", "found_bytes"), [(1, 300), (2, 600)])
def test_workers_of_one_gpu_find_each_others_connections_where_all_of_them_connect(
    clock, workers_per_mesh, found_bytes
):
    """With two workers a mesh only the first of each connects, and it is not known how many of these share a GPU."""
    gang, _ = acting(["a", "a"], (1e-4, 6e-4))
    gang.workers_sharing_memory = lambda address: 2
    found, _ = costs(gang, Control())
    found._device = "cuda"
    found._job = replace(JOB, resources=replace(JOB.resources, workers_per_mesh=workers_per_mesh))
    assert found.engine_costs().connection_bytes == found_bytes


def on_processors(control, nodes, shares, step_s):
    """The measurements of a gang whose workers get these shares of a processor, and of which a STEP takes `step_s`."""
    gang = Gang(nodes)
    for worker, share in zip(gang.workers, shares, strict=True):
        worker.answers["processor_share"] = lambda share=share: share
        worker.answers["update_costs"] = lambda: UpdateCosts(step=LinearCost(step_s, 1e-6, 1e-9))
    return costs(gang, control)[0]


def test_shares_of_processors_and_costs_of_the_optimizer_are_kept_for_minutes(clock):
    control = Control()

    def measured(found):
        return [worker["cores"] for worker in found.workers()], found.update_costs().step.fixed_s

    first = [0.5, 0.5, 1.0], 0.25
    assert measured(on_processors(control, ["aa", "b"], (0.25, 0.25, 1.0), 0.25)) == first
    clock.s += PROCESSOR_CACHE_S
    assert measured(on_processors(control, ["aa", "b"], (0.5, 0.5, 0.5), 0.125)) == first
    other = on_processors(control, ["ba", "b"], (0.5, 0.5, 0.5), 0.125)
    assert measured(other) == ([1.0, 0.5, 1.0], 0.125), "workers on other nodes"
    clock.s += 1.0
    assert measured(on_processors(control, ["aa", "b"], (0.5, 0.5, 0.5), 0.125)) == ([1.0, 1.0, 0.5], 0.125)


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": replace(JOB.optimizer, args={"lr": 0.5})},
        {"code": Code("elsewhere")},
        {"training": replace(JOB.training, clip_grad_norm=0.5)},
        {"training": replace(JOB.training, precision="bf16")},
    ],
)
def test_kept_costs_of_an_optimizer_are_those_of_that_optimizer(clock, change):
    control = Control()
    assert on_processors(control, ["a"], (1.0,), 0.25).update_costs().step.fixed_s == 0.25
    found = on_processors(control, ["a"], (1.0,), 0.125)
    assert found.update_costs().step.fixed_s == 0.25
    found._job = replace(JOB, **change)
    assert found.update_costs().step.fixed_s == 0.125


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: body | {"shares": [1.0], "costs": None},
        lambda body: body | {"shares": [0.0, 1.0], "costs": {"step": {"fixed_s": -1.0}}},
        lambda body: body | {"shares": "??", "costs": {"step": {"fixed_s": math.nan}}},
        lambda body: {"format": 1, "measured_at": 1e9},
    ],
)
def test_kept_shares_and_costs_that_are_of_no_use_are_measured_again(clock, spoil):
    control = Control()
    found = on_processors(control, ["aa"], (0.25, 0.25), 0.25)
    found.workers(), found.update_costs()
    assert len(control.profiles) == 2
    control.profiles = {key: spoil(body) for key, body in control.profiles.items()}
    found = on_processors(control, ["aa"], (0.5, 0.5), 0.125)
    assert found.workers()[0]["cores"] == 1.0 and found.update_costs().step.fixed_s == 0.125


def test_a_stale_link_is_measured_again_by_the_next_attempt_and_others_are_not(clock):
    control = Control()
    found, events = costs(Gang(["a", "b", "c"]), control)
    found.network(loops=False, skips=False)
    found.link_is_stale("m1", "m0", 0.5, 0.02)
    for thread in threading.enumerate():
        if thread.name == "slotline-links":
            thread.join(30)
    assert events[-1] == (
        "links_stale",
        "transfers from m1 to m0 take 0.5 s where 0.02 were planned: the next attempt measures the links between b and a "
        "again",
    )
    next_gang = Gang(["a", "b", "c"])
    costs(next_gang, control)[0].network(loops=False, skips=False)
    assert [(probe.hub, probe.peers) for probe in next_gang.measured] == [
        ("m0/0", ("m1/0",)),
        ("m1/0", ("m0/0", "m2/0")),
    ]


def test_a_mesh_that_becomes_slow_is_an_event_with_its_nodes():
    found, events = costs(Gang(["ab", "c"]), Control())
    found.report_pace(MeshPace("m0", 2.0, 1.25, 0.625), True)
    found.report_pace(MeshPace("m0", 1.0, 0.625, 0.625), False)
    (slow, said), (back, then) = events
    assert (slow, back) == ("mesh_slow", "mesh_recovered")
    assert said.startswith(
        "mesh m0 on a, b computes 2.00 times as long as it did: 1.25 s a step for actions that took 0.625 s in its "
        "first steps. "
    )
    assert (
        then
        == "mesh m0 on a, b is as quick as before: 0.625 s a step for actions that took 0.625 s in its first steps"
    )


def test_transfers_inside_one_node_make_no_link_stale():
    found, events = costs(Gang(["ab", "a", "a"]), Control())
    found.link_is_stale("m1", "m2", 0.5, 0.02)
    assert events == []
    found.link_is_stale("m0", "m1", 0.5, 0.02)
    assert [kind for kind, _ in events] == ["links_stale"]


def test_training_goes_on_where_the_control_plane_does_not_take_that_a_link_is_stale(clock, caplog):
    found, events = costs(Gang(["a", "b"]), control := Control())
    found.network(loops=False, skips=False)

    def away(key, profile):
        raise ConnectionError("no route")

    control.store_profile = away
    found.link_is_stale("m0", "m1", 0.5, 0.02)
    for thread in threading.enumerate():
        if thread.name == "slotline-links":
            thread.join(30)
    assert "no route" in caplog.text and events[-1][0] == "links_stale"


class CheckedGang(FakeGang):
    """Two workers with GPUs, of which the second has a note; `calls` are those that came, in order."""

    def __init__(self):
        self.calls = []
        self.addresses = [WorkerAddress(f"m{k}", 0, "a", "id of a", 7, "cuda") for k in range(2)]
        self.workers = [self._worker(notes) for notes in ([], ["GPU-1 of node a: 3 ECC errors"])]

    def _worker(self, notes):
        def answer(name, value):
            return lambda: self.calls.append(name) or value

        return FakeActor(
            check_accelerator=answer("check_accelerator", notes),
            prepare=answer("prepare", None),
            profile_keys=answer("profile_keys", {8: "key"}),
        )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gpus_are_checked_before_anything_is_built_and_their_faults_are_told(device):
    gang, events = CheckedGang(), []
    measurements = GangMeasurements(
        JOB,
        gang,
        control=Control(),
        reporter=SimpleNamespace(event=lambda *event: events.append(event)),
        device=device,
        limits=Limits(),
    )
    measurements.prepare()
    checks = ["check_accelerator"] * 2 if device == "cuda" else []
    assert gang.calls == [*checks, *["prepare"] * 2, *["profile_keys"] * 2]
    told = ("accelerator_fault", "mesh m1, worker 0: GPU-1 of node a: 3 ECC errors")
    assert events == ([told] if device == "cuda" else [])
