"""Places the same gangs by Ray's PACK and by Slotline's placement, on clusters of a real Ray whose nodes are partly taken.

`python -m tests.benchmarks.placed`, about a minute: nodes of `ray.cluster_utils.Cluster` that offer accelerators and run
nothing. Prints a table: how many meshes are whole, on one node each, and how many pairs of workers of neighbouring meshes
are on one node. Ray gets one bundle a worker, in the order of the meshes, as a driver without a placement asks for them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.cluster_utils import Cluster

from service.scheduler.node_placement import MeshShape, Node, place

RESOURCE = "accelerator"
LIMIT_S = 60.0


@dataclass(frozen=True)
class Case:
    """A gang of `meshes` meshes of `workers` each, on nodes with so many accelerators `free`."""

    free: tuple[int, ...]
    meshes: int
    workers: int

    def __str__(self) -> str:
        return f"{self.meshes} meshes of {self.workers} on {', '.join(map(str, self.free))} free"


CASES = (
    Case((8, 8, 8), 3, 8),
    Case((8, 8, 8, 8), 4, 8),
    Case((8, 8, 8, 8), 8, 4),
    Case((4, 8, 8), 5, 4),
    Case((6, 6, 4), 4, 4),
    Case((6, 6, 4), 8, 2),
    Case((3, 5, 8, 7), 5, 4),
    Case((2, 8, 3, 8, 5, 4), 6, 4),
)

Placed = list[list[str]]
"""The node of each worker of each mesh."""


def packed(case: Case, nodes: Sequence[str]) -> Placed:
    """The nodes that PACK gives the bundles of this gang."""
    blockers = [
        ray.util.placement_group([{f"on-{node}": 1, RESOURCE: 8 - free}])
        for node, free in zip(nodes, case.free, strict=False)
        if free < 8
    ]
    blockers += [
        ray.util.placement_group([{f"on-{node}": 1, RESOURCE: 8}]) for node in nodes[len(case.free) :]
    ]
    ray.get([group.ready() for group in blockers], timeout=LIMIT_S)
    group = ray.util.placement_group([{RESOURCE: 1}] * (case.meshes * case.workers), strategy="PACK")
    ray.get(group.ready(), timeout=LIMIT_S)
    node_of = ray.util.placement_group_table(group)["bundles_to_node_id"]
    for one in (group, *blockers):
        ray.util.remove_placement_group(one)
    names = {
        node["NodeID"]: name for node in ray.nodes() for name in nodes if f"on-{name}" in node["Resources"]
    }
    placed = [names[node_of[bundle]] for bundle in sorted(node_of)]
    return [placed[mesh * case.workers : (mesh + 1) * case.workers] for mesh in range(case.meshes)]


def ours(case: Case, nodes: Sequence[str]) -> Placed:
    """The nodes of Slotline's placement, each mesh exchanging as much with the next."""
    offered = [Node(name, free, 8) for name, free in zip(nodes, case.free, strict=False)]
    neighbours = {(mesh, mesh + 1): 1.0 for mesh in range(case.meshes - 1)}
    return [list(mesh) for mesh in place(offered, [MeshShape(case.workers)] * case.meshes, neighbours).nodes]


def whole(placed: Placed) -> int:
    """The number of meshes that are on one node each."""
    return sum(len({*mesh}) == 1 for mesh in placed)


def together(placed: Placed) -> str:
    """How many pairs of workers of neighbouring meshes are on one node, of all."""
    pairs = [pair for one, other in itertools.pairwise(placed) for pair in zip(one, other, strict=True)]
    return f"{sum(one == other for one, other in pairs)} of {len(pairs)}"


def main() -> int:
    """Print the table."""
    most = max(len(case.free) for case in CASES)
    nodes = [f"n{index}" for index in range(most)]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for node in nodes:
            cluster.add_node(num_cpus=0, resources={RESOURCE: 8, f"on-{node}": 1})
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        print("| gang | whole meshes: Ray's PACK | Slotline | neighbours on one node: PACK | Slotline |")
        print("|---|---|---|---|---|")
        total = [0, 0, 0]
        for case in CASES:
            theirs, own = packed(case, nodes), ours(case, nodes)
            total = [
                n + more for n, more in zip(total, (whole(theirs), whole(own), case.meshes), strict=True)
            ]
            print(
                f"| {case} | {whole(theirs)} of {case.meshes} | {whole(own)} of {case.meshes} "
                f"| {together(theirs)} | {together(own)} |",
                flush=True,
            )
        print(f"| all | {total[0]} of {total[2]} | {total[1]} of {total[2]} | | |")
        print(f"\nRay {ray.__version__}")
    finally:
        ray.shutdown()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
