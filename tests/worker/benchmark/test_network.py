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
    """Meshes m0, m1, ..., each with a worker on every letter."""
    return {f"m{i}": list(node) for i, node in enumerate(nodes)}


def measured_as(probes, nodes_of, find):
    """The results of the probes, where `find` gives (bandwidth there, bandwidth back, seconds of two transfers at once) of
    the nodes of a pair, or seconds alone of those of a triple."""

    def result(probe: Probe) -> ProbeResult:
        nodes = [
            nodes_of[mesh][int(worker)]
            for mesh, worker in (end.split("/") for end in (probe.hub, *probe.peers))
        ]
        if len(probe.peers) == 2:
            return ProbeResult((), (ConcurrentTransfers("two sends", (1.0, 1.0), find(*nodes)),))
        there, back, together_s = find(*nodes)
        ends = probe.hub, probe.peers[0]
        return ProbeResult(
            (Link(*ends, 1e-4, there), Link(*ends[::-1], 1e-4, back)),
            (ConcurrentTransfers("both ways", (1.0, 1.0), together_s),),
        )

    return [result(probe) for probe in probes]


def bandwidths(network):
    return {(x["source"], x["target"]): x["bandwidth_bytes_per_s"] for x in network["links"]}


def test_a_chain_on_nodes_of_its_own_measures_its_neighbours_and_the_meshes_between_two():
    assert choose_probes(meshes_on("a", "b", "c"), loops=False, skips=False) == [
        Probe("m0/0", ("m1/0",)),
        Probe("m1/0", ("m2/0",)),
        Probe("m1/0", ("m0/0", "m2/0")),
    ]


def test_stages_that_go_round_and_skips_add_the_pairs_that_they_use():
    nodes_of = meshes_on("a", "b", "c", "d")
    looped = choose_probes(nodes_of, loops=True, skips=False)
    assert Probe("m0/0", ("m3/0",)) in looped and Probe("m0/0", ("m2/0",)) not in looped
    skipping = choose_probes(nodes_of, loops=False, skips=True)
    pairs = {(p.hub, p.peers[0]) for p in skipping if len(p.peers) == 1}
    assert pairs == set(itertools.combinations((f"{mesh}/0" for mesh in nodes_of), 2))


def test_pairs_on_the_same_nodes_are_measured_once_and_share_what_was_found():
    nodes_of = meshes_on("a", "a", "a", "b", "b")
    ways = {"loops": True, "skips": False}
    probes = choose_probes(nodes_of, **ways)
    assert [p for p in probes if len(p.peers) == 1] == [
        Probe("m0/0", ("m1/0",)),
        Probe("m2/0", ("m3/0",)),
        Probe("m3/0", ("m4/0",)),
    ]
    inside, between = 1e10, 1e8
    measured = [
        ProbeResult((Link("m0/0", "m1/0", 1e-6, inside), Link("m1/0", "m0/0", 1e-6, inside)), ()),
        ProbeResult((Link("m2/0", "m3/0", 1e-4, between), Link("m3/0", "m2/0", 1e-4, between / 2)), ()),
    ]
    network = network_spec(probes[:2], measured, nodes_of, **ways)
    assert bandwidths(network) == {
        ("m0", "m1"): inside, ("m1", "m0"): inside, ("m1", "m2"): inside, ("m2", "m1"): inside,
        ("m2", "m3"): between, ("m3", "m2"): between / 2, ("m0", "m4"): between, ("m4", "m0"): between / 2,
    }  # fmt: skip
    assert network["bandwidth_bytes_per_s"] == between / 2 and network["latency_s"] == 1e-4
    assert network["nodes"] == [
        {"source": "a", "target": "b", "bandwidth_bytes_per_s": between},
        {"source": "b", "target": "a", "bandwidth_bytes_per_s": between / 2},
    ]


def test_every_pair_of_nodes_over_which_workers_of_a_spread_mesh_send_is_measured():
    """m0 is on node a, m1 on b and c: worker 0 sends over one cable, worker 1 over another, and the slower one counts."""
    nodes_of = meshes_on("aa", "bc")
    ways = {"loops": False, "skips": False}
    probes = choose_probes(nodes_of, **ways)
    assert probes == [Probe("m0/0", ("m1/0",)), Probe("m0/1", ("m1/1",))]
    speeds = {("a", "b"): (5e7, 4e7, 1.0), ("a", "c"): (1.2e7, 1.1e7, 1.0)}
    network = network_spec(probes, measured_as(probes, nodes_of, lambda *n: speeds[n]), nodes_of, **ways)
    assert bandwidths(network) == {("m0", "m1"): 1.2e7, ("m1", "m0"): 1.1e7}
    assert {(x["source"], x["target"]): x["bandwidth_bytes_per_s"] for x in network["nodes"]} == {
        ("a", "b"): 5e7, ("b", "a"): 4e7, ("a", "c"): 1.2e7, ("c", "a"): 1.1e7,
    }  # fmt: skip


def test_meshes_of_other_sizes_measure_all_nodes_between_which_their_workers_exchange_parts():
    probes = choose_probes(meshes_on("ab", "cdd"), loops=False, skips=False)
    assert {(probe.hub, *probe.peers) for probe in probes} == {
        ("m0/0", "m1/0"), ("m0/0", "m1/1"), ("m0/1", "m1/0"), ("m0/1", "m1/1")
    }  # fmt: skip


def test_a_half_duplex_node_does_not_decide_what_links_between_nodes_share():
    """Inside a node both directions wait for each other; the links between nodes are full duplex, and share a card."""
    nodes_of, ways = meshes_on("a", "a", "b", "c"), {"loops": False, "skips": False}
    probes = choose_probes(nodes_of, **ways)
    assert [probe.hub for probe in probes if len(probe.peers) == 2] == ["m2/0"], (
        "m1 sends by memory and by card"
    )

    def find(*nodes):
        return 1.9 if len(nodes) == 3 else (1e8, 1e8, 1.9 if nodes[0] == nodes[1] else 1.0)

    network = network_spec(probes, measured_as(probes, nodes_of, find), nodes_of, **ways)
    assert network["contention"] == "full-duplex", "m2 sends to m1 and m3 on other nodes one after the other"
    own = {(x["source"], x["target"]): x.get("contention") for x in network["links"]}
    assert {pair for pair, word in own.items() if word == "half-duplex"} == {("m0", "m1"), ("m1", "m0")}
    assert {word for pair, word in own.items() if pair[0] in "m2 m3" or pair[1] in "m2 m3"} == {None}
    alone = meshes_on("a", "a")
    probes = choose_probes(alone, **ways)
    inside = network_spec(probes, measured_as(probes, alone, find), alone, **ways)
    assert inside["contention"] == "half-duplex", "on one node its cores are all that there is"


def test_links_that_delay_each_other_at_a_card_have_the_strictest_of_their_models():
    """a - b - c share the card of b, a - b is half-duplex: so is b - c. Node d's link to c shares nothing."""
    nodes_of, ways = meshes_on("a", "b", "c", "d"), {"loops": False, "skips": False}
    probes = choose_probes(nodes_of, **ways)

    def find(*nodes):
        if len(nodes) == 3:
            return 1.9 if nodes[0] == "b" else 1.0
        return 1e8, 1e8, 1.9 if nodes == ("a", "b") else 1.0

    network = network_spec(probes, measured_as(probes, nodes_of, find), nodes_of, **ways)
    words = {(x["source"], x["target"]): x.get("contention", network["contention"]) for x in network["links"]}
    assert words["m0", "m1"] == words["m1", "m2"] == words["m2", "m1"] == "half-duplex"
    assert words["m2", "m3"] == words["m3", "m2"] == "link"


def test_one_mesh_measures_nothing_and_two_meshes_one_pair():
    assert choose_probes(meshes_on("a"), loops=True, skips=True) == []
    assert network_spec([], [], meshes_on("a"), loops=True, skips=True) == {
        "contention": "link",
        "bandwidth_bytes_per_s": None,
        "latency_s": 0.0,
        "links": [],
        "nodes": [],
    }
    assert choose_probes(meshes_on("a", "a"), loops=True, skips=True) == [Probe("m0/0", ("m1/0",))]


def test_measuring_many_nodes_stays_bounded():
    nodes_of = {f"m{i}": [f"n{i}"] for i in range(100)}
    probes = choose_probes(nodes_of, loops=True, skips=True)
    assert len(probes) <= 2 * MAX_PROBES
    assert {(p.hub, p.peers[0]) for p in probes[:MAX_PROBES]} == {
        (f"m{i}/0", f"m{i + 1}/0") for i in range(MAX_PROBES)
    }
