"""From measured transfers to the network that a plan assumes."""

from __future__ import annotations

import itertools

import pytest

from worker.benchmark.links import (
    MAX_PROBES,
    ConcurrentTransfers,
    Link,
    Probe,
    ProbeResult,
    choose_probes,
    contention_model,
    network_spec,
    slowest_link,
)

FREE = [
    ConcurrentTransfers("both ways", (0.0100, 0.0104), 0.0109),
    ConcurrentTransfers("both ways", (0.0100, 0.0025), 0.0111),  # a thin way beside a wide one
    ConcurrentTransfers("two sends", (0.0099, 0.0103), 0.0135),
    ConcurrentTransfers("two receives", (0.0101, 0.0098), 0.0094),  # noise: sooner than alone
]
PORT = [
    ConcurrentTransfers("two sends", (0.0100, 0.0103), 0.0196),
    ConcurrentTransfers("two receives", (0.0100, 0.0030), 0.0124),
]
WIRE = [
    ConcurrentTransfers("both ways", (0.0100, 0.0104), 0.0188),
    ConcurrentTransfers("both ways", (0.0100, 0.0025), 0.0118),
]


@pytest.mark.parametrize(
    ("measurements", "contention"),
    [
        ([], "link"),
        (FREE, "link"),
        *(([*FREE, one], "full-duplex") for one in PORT),
        *(([*FREE, one], "half-duplex") for one in WIRE),
        ([*PORT, *WIRE], "half-duplex"),
    ],
)
def test_the_strictest_sharing_that_was_seen_is_planned_with(measurements, contention):
    for order in itertools.islice(itertools.permutations(measurements), 20):
        assert contention_model(order) == contention


def test_the_slowest_link_is_the_one_a_large_transfer_notices():
    quick, thin = Link("a", "b", 1e-3, 1e9), Link("b", "c", 1e-4, 1e6)
    assert slowest_link([quick, thin]) is thin
    assert slowest_link([]) is None


def meshes_on(*nodes):
    return {f"m{i}": node for i, node in enumerate(nodes)}


def test_a_chain_on_nodes_of_its_own_measures_its_neighbours_and_the_meshes_between_two():
    node_of = meshes_on("a", "b", "c")
    assert choose_probes(list(node_of), node_of, loops=False, skips=False) == [
        Probe("m0", ("m1",)),
        Probe("m1", ("m2",)),
        Probe("m1", ("m0", "m2")),
    ]


def test_stages_that_go_round_and_skips_add_the_pairs_that_they_use():
    node_of = meshes_on("a", "b", "c", "d")
    looped = choose_probes(list(node_of), node_of, loops=True, skips=False)
    assert Probe("m0", ("m3",)) in looped and Probe("m0", ("m2",)) not in looped
    skipping = choose_probes(list(node_of), node_of, loops=False, skips=True)
    pairs = {(p.hub, p.peers[0]) for p in skipping if len(p.peers) == 1}
    assert pairs == set(itertools.combinations(node_of, 2))


def test_pairs_on_the_same_nodes_are_measured_once_and_share_what_was_found():
    node_of = meshes_on("a", "a", "a", "b", "b")
    ways = {"loops": True, "skips": False}
    probes = choose_probes(list(node_of), node_of, **ways)
    assert [p for p in probes if len(p.peers) == 1] == [
        Probe("m0", ("m1",)),
        Probe("m2", ("m3",)),
        Probe("m3", ("m4",)),
    ]
    inside, between = 1e10, 1e8
    measured = [
        ProbeResult((Link("m0", "m1", 1e-6, inside), Link("m1", "m0", 1e-6, inside)), ()),
        ProbeResult((Link("m2", "m3", 1e-4, between), Link("m3", "m2", 1e-4, between / 2)), ()),
    ]
    network = network_spec(measured, list(node_of), node_of, **ways)
    bandwidth = {(x["source"], x["target"]): x["bandwidth_bytes_per_s"] for x in network["links"]}
    assert bandwidth == {
        ("m0", "m1"): inside, ("m1", "m0"): inside, ("m1", "m2"): inside, ("m2", "m1"): inside,
        ("m2", "m3"): between, ("m3", "m2"): between / 2, ("m0", "m4"): between, ("m4", "m0"): between / 2,
    }  # fmt: skip
    assert network["bandwidth_bytes_per_s"] == between / 2 and network["latency_s"] == 1e-4


def test_one_mesh_measures_nothing_and_two_meshes_one_pair():
    assert choose_probes(["m0"], {"m0": "a"}, loops=True, skips=True) == []
    assert network_spec([], ["m0"], {"m0": "a"}, loops=True, skips=True) == {
        "contention": "link",
        "bandwidth_bytes_per_s": None,
        "latency_s": 0.0,
        "links": [],
    }
    assert choose_probes(["m0", "m1"], {"m0": "a", "m1": "a"}, loops=True, skips=True) == [
        Probe("m0", ("m1",))
    ]


def test_measuring_many_nodes_stays_bounded():
    node_of = {f"m{i}": f"n{i}" for i in range(100)}
    probes = choose_probes(list(node_of), node_of, loops=True, skips=True)
    assert len(probes) <= 2 * MAX_PROBES
    assert {(p.hub, p.peers[0]) for p in probes[:MAX_PROBES]} == {
        (f"m{i}", f"m{i + 1}") for i in range(MAX_PROBES)
    }
