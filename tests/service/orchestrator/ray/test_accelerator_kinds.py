"""The accelerator types of a cluster, from the labels and resources of its nodes."""

from __future__ import annotations

from datetime import UTC, datetime

from service.orchestrator.decisions.attempt_lifecycle import AcceleratorKind, Capacity
from service.orchestrator.ray.clusters import ClusterWatcher
from service.orchestrator.ray.jobs_api import RayNode, ResourceUse
from service.spec.states import NodeMark, NodeState
from tests.service.fake_cluster import FakeCluster
from worker.contract.job import placement_group_name

NODES = [
    RayNode("a", "10.0.0.1", {"GPU": 8.0, "accelerator_type:H100": 1.0, "slotline_worker": 4.0}),
    RayNode("b", "10.0.0.2", {"GPU": 8.0}, labels={"ray.io/accelerator-type": "A100"}),
    RayNode("c", "10.0.0.3", {"GPU": 4.0, "accelerator_type:A100": 1.0}),
    RayNode("d", "10.0.0.4", {"slotline_worker": 16.0}),
]
DRAINED = NodeMark("default", "c", NodeState.DRAINING, "ops", datetime(2026, 1, 1, tzinfo=UTC), "fans")


async def watcher_of(nodes: list[RayNode], in_use: list[ResourceUse]) -> ClusterWatcher:
    cluster = FakeCluster()

    async def answer() -> list[RayNode]:
        return nodes

    cluster.nodes, cluster.others = answer, in_use
    watcher = ClusterWatcher(cluster, refresh_s=600, workers_per_gpu=2)
    await watcher.refresh()
    return watcher


async def test_each_type_has_its_total_what_others_hold_and_the_nodes_that_are_left_out():
    watcher = await watcher_of(
        NODES,
        [
            ResourceUse("someone", {"GPU": 0.5}, "a"),
            ResourceUse("someone", {"GPU": 2.0}, "b"),
            ResourceUse(placement_group_name("ours"), {"GPU": 4.0}, "b"),
            ResourceUse("someone", {"GPU": 4.0}, "c"),
        ],
    )
    capacity = watcher.capacity_without({"c": DRAINED}, ["ours"])
    assert (capacity.total, capacity.others) == ({"cpu": 20, "cuda": 32}, {"cpu": 0, "cuda": 5})
    assert capacity.types == {
        "H100": Capacity({"cpu": 0, "cuda": 16}, {"cpu": 0, "cuda": 1}, {"cpu": 0, "cuda": 0}),
        "A100": Capacity(
            {"cpu": 0, "cuda": 16}, {"cpu": 0, "cuda": 4}, {"cpu": 0, "cuda": 8}, (str(DRAINED),)
        ),
        None: Capacity({"cpu": 20, "cuda": 0}, {"cpu": 0, "cuda": 0}, {"cpu": 0, "cuda": 0}),
    }, "the CPU workers of a node with GPUs have no type"
    assert watcher.capacity.types.keys() == {"H100", "A100", None}


async def test_nodes_that_tell_no_type_are_one_pool():
    watcher = await watcher_of([RayNode("d", "10.0.0.4", {"slotline_worker": 16.0, "GPU": 2.0})], [])
    assert watcher.capacity_without({}, ()).types == {}


async def test_the_nodes_without_accelerators_of_some_kinds():
    watcher = await watcher_of(NODES, [])
    assert watcher.nodes_without([AcceleratorKind("cuda", "A100")]) == ("a", "d")
    assert watcher.nodes_without([AcceleratorKind("cuda", "H100"), AcceleratorKind("cpu")]) == ("b", "c")
    assert watcher.nodes_without([]) == ("a", "b", "c", "d")
