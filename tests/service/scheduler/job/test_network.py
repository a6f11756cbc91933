"""Workers of a node share its card: each of several pairs has its part of what was measured while all others were silent."""

from __future__ import annotations

import itertools

import pytest

from service.scheduler.job.heterogeneous import MeshGroups, reshard_tensor
from service.scheduler.job.network import cross_mesh_all_reduce_s, network_per_worker_pair
from service.scheduler.problem.spec import LinkSpec, NetworkSpec, link_costs
from service.scheduler.resharding.layout import Links, Tensor, mesh_layout
from service.scheduler.resharding.resharding import plan_resharding
from tests.service.scheduler.job.test_heterogeneous_meshes import ROWS, WIDTH
from tests.service.scheduler.job.test_uniform_meshes import LATENCY_S, SLOW, answer_of

NETWORK = NetworkSpec(bandwidth_bytes_per_s=SLOW, latency_s=LATENCY_S)


def shares(*nodes, tensor=1):
    return [MeshGroups(f"m{k}", len(of) // tensor, tensor, tuple(of)) for k, of in enumerate(nodes)]


def bandwidths(network, meshes=2):
    of_pair = link_costs(network)
    return {pair: of_pair(*pair)[0] for pair in itertools.permutations([f"m{k}" for k in range(meshes)], 2)}


@pytest.mark.parametrize(
    ("nodes", "crowd"),
    [
        (("aa", "bb"), 2),
        (("aabb", "cccc"), 4),
        (("aabb", "ccdd"), 2),
        (("ab", "cd"), 1),
        (("aa", "aa"), 1),
        (("ab", "ab"), 1),
        (("aab", "acc"), 2),
        (("aab", "acd"), 1),
        (("aaa", "abb"), 2),
    ],
    ids=lambda value: " to ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_pair_has_its_part_of_the_fullest_card_on_its_way(nodes, crowd):
    found = bandwidths(network_per_worker_pair(NETWORK, shares(*nodes)))
    assert found == {("m0", "m1"): SLOW / crowd, ("m1", "m0"): SLOW / crowd}


def test_a_network_that_nobody_shares_or_knows_stays_as_it_was():
    assert network_per_worker_pair(NETWORK, shares("a", "b", "c")) is NETWORK
    unknown = NetworkSpec(latency_s=LATENCY_S)
    found = network_per_worker_pair(unknown, shares("aa", "bb"))
    assert (found.bandwidth_bytes_per_s, {*bandwidths(found).values()}) == (None, {None})


def test_links_of_their_own_are_shared_as_they_are_and_what_is_resharded_by_its_own_plan():
    network = NetworkSpec.model_validate(
        {
            "bandwidth_bytes_per_s": 1e9,
            "latency_s": 1e-3,
            "links": [
                {"source": "m0", "target": "m1", "bandwidth_bytes_per_s": 1e8, "latency_s": 5e-3},
            ],
        }
    )
    found = network_per_worker_pair(network, shares("aa", "bb", "c"))
    assert bandwidths(found, 3) == {
        ("m0", "m1"): 5e7,
        ("m1", "m0"): 5e8,
        **dict.fromkeys([("m0", "m2"), ("m2", "m0"), ("m1", "m2"), ("m2", "m1")], 1e9),
    }
    assert [link_costs(found)(*pair)[1] for pair in (("m0", "m1"), ("m1", "m0"))] == [5e-3, 1e-3]
    matrices = shares("aa", "bb", tensor=2)
    assert network_per_worker_pair(NETWORK, matrices) is NETWORK
    assert {*bandwidths(network_per_worker_pair(NETWORK, matrices, sums=True)).values()} == {SLOW / 2}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (("aa", "bc"), 12.0),  # the slower cable; the card of a could carry both
        (("aaaa", "bbcc"), 6.0),  # two pairs on the slower cable
        (("aacc", "bbbb"), 12.0),  # the card of b, as fast as from a, receives four
        (("ab", "ba"), 48.0),
        (("aa", "bd"), 24.0),  # a to d was not measured: half of what first workers have
    ],
    ids=lambda value: " to ".join(value) if isinstance(value, tuple) else str(value),
)
def test_pairs_of_a_spread_mesh_share_the_links_that_were_measured_between_their_nodes(nodes, expected):
    speeds = {"ab": 48.0, "ac": 12.0, "bc": 48.0}
    measured = {tuple(way): speed for pair, speed in speeds.items() for way in (pair, pair[::-1])}
    network = NetworkSpec(bandwidth_bytes_per_s=48.0)
    found = network_per_worker_pair(network, shares(*nodes), measured)
    assert bandwidths(found)["m0", "m1"] == expected


def test_a_links_contention_stays_its_own_where_pairs_share_its_bandwidth():
    link = LinkSpec(source="m0", target="m1", bandwidth_bytes_per_s=1e8, contention="half-duplex")
    network = NetworkSpec(contention="full-duplex", bandwidth_bytes_per_s=1e9, links=[link])
    found = network_per_worker_pair(network, shares("aa", "bb"))
    assert {(x.source, x.target): x.contention for x in found.links} == {
        ("m0", "m1"): "half-duplex",
        ("m1", "m0"): None,
    }


@pytest.mark.parametrize("data", [1, 2, 4])
def test_what_workers_of_one_node_send_in_pairs_takes_as_long_as_all_of_it_over_the_card(data):
    """The same parts as a resharding, which shares the card by its own plan: both take the whole batch's time."""
    answer = answer_of(data, 1, {"m0": "one", "m1": "two"})
    found = {
        round(one["end_s"] - one["start_s"], 9)
        for one in answer["plan"]["slots"]
        if one["action"] == "SEND_F"
    }
    whole_s = ROWS * WIDTH * 4 / SLOW
    assert [*found] == [pytest.approx(LATENCY_S + whole_s, rel=1e-6)]
    sides = [
        mesh_layout(name, mesh=(data,), split=(0,), hosts=(host,) * data)
        for name, host in (("m0", "one"), ("m1", "two"))
    ]
    dealt = plan_resharding(Tensor((ROWS, WIDTH), 4), *sides, Links(SLOW))
    assert dealt.makespan_s == pytest.approx(whole_s)


def test_a_link_inside_a_node_says_nothing_of_the_cards_of_others():
    """The first workers of m0 and m1 are neighbours; those of m2 are elsewhere, and their link is the slowest."""
    network = NetworkSpec.model_validate(
        {
            "bandwidth_bytes_per_s": 1e6,
            "latency_s": 1e-5,
            "links": [
                {"source": source, "target": target, "bandwidth_bytes_per_s": 1e10}
                for source, target in (("m0", "m1"), ("m1", "m0"))
            ],
        }
    )
    apart, beside = (shares("ab", of, "cc") for of in ("ac", "ab"))
    assert bandwidths(network_per_worker_pair(network, apart), 3)["m0", "m1"] == 1e6
    assert bandwidths(network_per_worker_pair(network, beside), 3)["m0", "m1"] == 1e10
    told = {
        "".join(of): reshard_tensor(
            "x", ((4, 8), (4, 8)), 4, tuple(shares("ab", of, tensor=2)), network, differentiable=True
        ).makespan_s
        for of in (("a", "c"), ("a", "a"))
    }
    assert told["ac"] == pytest.approx(4 * 8 * 4 / 1e6 + 1e-5, rel=0.01)
    assert told["aa"] < 1e-3


def test_sums_over_meshes_share_the_cards_too():
    alone, beside = (network_per_worker_pair(NETWORK, shares(*of), sums=True) for of in ("ab", ("aa", "bb")))
    times = [
        cross_mesh_all_reduce_s(network, ["m0", "m1"], 10**6, {"m0": 2, "m1": 2}, uniform=True)
        for network in (alone, beside)
    ]
    assert times[1] - 2 * LATENCY_S == pytest.approx(2 * (times[0] - 2 * LATENCY_S))
