"""Placement by topology: compared with brute force on small clusters, bounded on large ones."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.scheduler.node_placement import MeshShape, Node, PlacementError, place, without_noise
from tests.work import Work


def chain(meshes: int, size: float = 1.0) -> dict[tuple[int, int], float]:
    return {(mesh, mesh + 1): size for mesh in range(meshes - 1)}


def idle(count: int, accelerators: int, **labels) -> list[Node]:
    return [Node(f"n{i}", accelerators, accelerators, **labels) for i in range(count)]


def distance(first: Node, second: Node) -> int:
    """The number of levels that two nodes do not share, said directly from their labels."""
    if first.name == second.name:
        return 0
    zones = first.zone == second.zone
    racks = zones and first.rack == second.rack
    if first.nvlink_domain is not None and racks and first.nvlink_domain == second.nvlink_domain:
        return 1
    if first.rack is not None and racks:
        return 2
    return 3 if first.zone is not None and zones else 4


def score(nodes, placed, bytes_between, apart):
    """(nodes of meshes beyond one each, distances within meshes, bytes times distance)."""
    spread = sum(len(set(mesh)) - 1 for mesh in placed)
    inner = sum(apart(a, b) for mesh in placed for a, b in itertools.combinations(sorted(set(mesh)), 2))
    cost = sum(
        size * max(apart(a, b) for a in placed[first] for b in placed[second])
        for (first, second), size in bytes_between.items()
    )
    return spread, inner, cost


def brute_force(nodes, meshes, bytes_between, apart):
    """The best score of all placements; None where there is none."""
    node_of = {node.name: node for node in nodes}

    def ways(mesh):
        for names in itertools.combinations_with_replacement(node_of, mesh.workers):
            counts = Counter(names)
            if all(count % mesh.tensor == 0 for count in counts.values()) and (
                len({node_of[name].accelerator_type for name in counts}) == 1
            ):
                yield names

    best = None
    for placed in itertools.product(*map(ways, meshes)):
        used = Counter(itertools.chain(*placed))
        if all(count <= node_of[name].free for name, count in used.items()):
            found = score(nodes, placed, bytes_between, apart)
            best = found if best is None else min(best, found)
    return best


labels = st.sampled_from([None, "a", "b"])
clusters = st.lists(
    st.tuples(st.integers(0, 4), labels, labels, labels, st.sampled_from([None, None, "H100"])),
    min_size=1,
    max_size=4,
).map(
    lambda rows: [
        Node(f"n{i}", free, 4, accelerator_type=kind, nvlink_domain=domain, rack=rack, zone=zone)
        for i, (free, domain, rack, zone, kind) in enumerate(rows)
    ]
)
shapes = st.lists(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]), min_size=1, max_size=3)
sizes = st.lists(st.integers(0, 3), min_size=3, max_size=3)


@settings(deadline=None, max_examples=60)
@given(clusters, shapes, sizes)
def test_small_clusters_get_the_placement_that_brute_force_finds(nodes, meshes, exchanged):
    meshes = [MeshShape(*shape) for shape in meshes]
    pairs = itertools.combinations(range(len(meshes)), 2)
    bytes_between = dict(zip(pairs, exchanged, strict=False))
    node_of = {node.name: node for node in nodes}

    def apart(a, b):
        return distance(node_of[a], node_of[b])

    best = brute_force(nodes, meshes, bytes_between, apart)
    if best is None:
        with pytest.raises(PlacementError):
            place(nodes, meshes, bytes_between)
        return
    found = place(nodes, meshes, bytes_between)
    assert found.optimal
    assert (
        score(nodes, found.nodes, bytes_between, apart)
        == best
        == (found.spread, best[1], found.bytes_distance)
    )
    assert [len(mesh) for mesh in found.nodes] == [mesh.workers for mesh in meshes]
    used = Counter(itertools.chain(*found.nodes))
    assert all(count <= node_of[name].free for name, count in used.items())
    for mesh, shape in zip(found.nodes, meshes, strict=True):
        assert len({node_of[name].accelerator_type for name in mesh}) == 1
        groups = [mesh[begin : begin + shape.tensor] for begin in range(0, shape.workers, shape.tensor)]
        assert all(len(set(group)) == 1 for group in groups), "a tensor-parallel group is on one node"
    assert place(nodes, meshes, bytes_between) == found


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6).map(random.Random))
def test_no_two_meshes_beyond_exhaustive_search_would_rather_have_each_others_nodes(draw):
    nodes = [Node(f"n{i}", 2, 2, rack=f"r{i // 2}", zone=f"z{i // 6}") for i in range(12)]
    node_of = {node.name: node for node in nodes}
    meshes = [MeshShape(2)] * 12
    bytes_between = {
        pair: draw.uniform(0, 10) for pair in itertools.combinations(range(12), 2) if draw.random() < 0.4
    }

    def cost(placed):
        return score(nodes, placed, bytes_between, lambda a, b: distance(node_of[a], node_of[b]))[2]

    placed = list(place(nodes, meshes, bytes_between).nodes)
    for first, second in itertools.combinations(range(12), 2):
        other = list(placed)
        other[first], other[second] = placed[second], placed[first]
        assert cost(other) >= cost(placed) * (1 - 1e-9)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, 2), min_size=4, max_size=4), st.lists(st.integers(1, 20), min_size=6, max_size=6)
)
def test_measured_links_decide_where_there_are_some(free, costs):
    nodes = [Node(f"n{i}", count, 2) for i, count in enumerate(free)]
    links = dict(
        zip(itertools.combinations([node.name for node in nodes], 2), map(float, costs), strict=True)
    )

    def apart(a, b):
        return 0.0 if a == b else links[min(a, b), max(a, b)]

    meshes, bytes_between = [MeshShape(1)] * 4, {**chain(4), (0, 3): 5.0}
    found = place(
        nodes, meshes, bytes_between, seconds_per_byte={(b, a): cost for (a, b), cost in links.items()}
    )
    assert found.bytes_distance == brute_force(nodes, meshes, bytes_between, apart)[2]


def test_meshes_of_eight_are_whole_on_idle_nodes_of_eight():
    """Ray's PACK put them on nodes [0, 1], [0, 1, 2] and [0, 2]."""
    found = place(idle(3, 8), [MeshShape(8)] * 3, chain(3))
    assert [set(mesh) for mesh in found.nodes] == [{"n0"}, {"n1"}, {"n2"}]
    assert found.spread == 0


def test_a_mesh_larger_than_any_node_spans_as_few_near_nodes_as_hold_it_in_whole_groups():
    racks = ["r0", "r1", "r1", "r0", "r1"]
    nodes = [Node(f"n{i}", 6, 6, rack=rack, zone="z") for i, rack in enumerate(racks)]
    found = place(nodes, [MeshShape(12, tensor=4)], {})
    assert Counter(found.nodes[0]) == {"n1": 4, "n2": 4, "n4": 4}, "three nodes of 6 hold a group of 4 each"
    whole = place(nodes, [MeshShape(12, tensor=2)], {})
    assert Counter(whole.nodes[0]).values() and len(set(whole.nodes[0])) == 2


def test_those_that_exchange_most_are_nearest():
    nodes = [Node(f"n{i}", 1, 1, rack=f"r{i % 2}", zone="z") for i in range(4)]
    found = place(
        nodes, [MeshShape(1)] * 4, {(0, 1): 1.0, (1, 2): 1.0, (2, 3): 1.0, (0, 3): 10.0, (1, 3): 1.0}
    )
    rack = {node.name: node.rack for node in nodes}
    assert rack[found.nodes[0][0]] == rack[found.nodes[3][0]]
    assert rack[found.nodes[1][0]] == rack[found.nodes[2][0]]


def test_a_small_job_leaves_the_large_nodes_to_others():
    nodes = [Node("large", 8, 8), Node("rest", 2, 8), Node("half", 4, 8)]
    assert set(place(nodes, [MeshShape(2)], {}).nodes[0]) == {"rest"}


def test_a_tensor_parallel_group_that_no_node_can_hold_is_refused_by_name():
    with pytest.raises(
        PlacementError, match="group of mesh m1 has 4 workers, and no node can hold it"
    ) as caught:
        place(idle(4, 2), [MeshShape(2, 2), MeshShape(4, 4)], {})
    assert caught.value.final
    with pytest.raises(PlacementError, match=r"do not fit on what is free .*: 1, 1, 1, 1\)") as caught:
        place([Node(f"n{i}", 1, 2) for i in range(4)], [MeshShape(4, 2)], {})
    assert not caught.value.final, "others hold the rest"


def test_accelerator_types_are_not_mixed_in_a_mesh():
    nodes = [Node("a", 3, 4, "A100"), Node("h", 3, 4, "H100")]
    with pytest.raises(PlacementError, match="A100: 3; H100: 3"):
        place(nodes, [MeshShape(4)], {})
    found = place(nodes, [MeshShape(3), MeshShape(3)], chain(2))
    assert [set(mesh) for mesh in found.nodes] == [{"a"}, {"h"}]


def many(nodes, accelerators, workers):
    """A cluster of racks and zones, meshes for all of it, and a chain of them with some skips."""
    cluster = [
        Node(f"n{i}", accelerators, accelerators, rack=f"r{i // 10}", zone=f"z{i // 500}")
        for i in range(nodes)
    ]
    meshes = nodes * accelerators // workers
    skips = {(i, meshes - 1 - i): 1.0 for i in range(min(meshes // 2, 8))}
    return cluster, [MeshShape(workers)] * meshes, {**chain(meshes), **skips}


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [800, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_work_of_a_placement_is_bounded(nodes):
    """About one million calls for 800 nodes and four for 10,000; without the limit of swaps 29 million for 800."""
    with Work() as work:
        place(*many(nodes, 1, 1))
    assert work.calls < (3_000_000 if nodes == 800 else 8_000_000)


@pytest.mark.parametrize(
    ("nodes", "accelerators", "workers"), [(1250, 8, 8), (1250, 8, 1), (1250, 8, 16), (10_000, 1, 1)]
)
@pytest.mark.slow
def test_ten_thousand_accelerators_are_placed_near_each_other(nodes, accelerators, workers):
    cluster, shapes, exchanged = many(nodes, accelerators, workers)
    found = place(cluster, shapes, exchanged)
    meshes = len(shapes)
    assert found.spread == max(0, workers // accelerators - 1) * meshes
    assert max(Counter(itertools.chain(*found.nodes)).values()) == accelerators
    worst = 4.0 * sum(exchanged.values())
    assert found.bytes_distance < 0.65 * worst, "neighbours are near"


def test_links_that_differ_by_noise_are_alike_and_a_slow_one_is_avoided():
    nodes = idle(4, 1)
    noisy = {("n0", "n1"): 1.3e-9, ("n0", "n2"): 1.0e-9, ("n1", "n2"): 0.8e-9, ("n0", "elsewhere"): 1.0}
    meshes, bytes_between = [MeshShape(1)] * 2, chain(2)
    unmeasured = place(nodes, meshes, bytes_between)
    alike = without_noise(nodes, noisy)
    assert set(alike.values()) == {1.0e-9} and ("n0", "elsewhere") not in alike
    assert place(nodes, meshes, bytes_between, seconds_per_byte=alike).nodes == unmeasured.nodes
    slow = without_noise(nodes, noisy | {("n0", "n1"): 1e-8})
    assert slow["n0", "n1"] == 1e-8
    found = place(nodes, meshes, bytes_between, seconds_per_byte=slow)
    assert {"n0", "n1"} != {name for (name,) in found.nodes} and found.bytes_distance == pytest.approx(1e-9)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.75, 1.4), min_size=10, max_size=10), shapes, sizes)
def test_noise_moves_no_job(noise, meshes, exchanged):
    nodes = [Node(f"n{i}", 2, 2, rack=f"r{i // 3}", zone="z") for i in range(5)]
    pairs = list(itertools.combinations(range(5), 2))
    links = {
        (f"n{a}", f"n{b}"): factor * distance(nodes[a], nodes[b]) * 1e-9
        for (a, b), factor in zip(pairs, noise, strict=True)
    }
    meshes = [MeshShape(workers) for workers, _ in meshes]
    bytes_between = dict(zip(itertools.combinations(range(len(meshes)), 2), exchanged, strict=False))
    try:
        expected = place(nodes, meshes, bytes_between)
    except PlacementError:
        return
    alike = without_noise(nodes, links)
    if len({cost for cost in alike.values()}) == 2:  # otherwise the two levels are out of proportion
        found = place(nodes, meshes, bytes_between, seconds_per_byte=alike)
        assert found.spread == expected.spread
        assert score(nodes, found.nodes, bytes_between, lambda a, b: apart(nodes, a, b)) == score(
            nodes, expected.nodes, bytes_between, lambda a, b: apart(nodes, a, b)
        )


def apart(nodes: list[Node], a: str, b: str) -> int:
    node_of = {node.name: node for node in nodes}
    return distance(node_of[a], node_of[b])
