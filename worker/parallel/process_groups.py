"""Names the process groups of an attempt: dp and tp groups of a mesh, pp groups, WORLD, tied parameters.

A pure function of topology and stages, the same on every worker. Group names travel through the store: never
change their values. Names and ranks only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worker.transport.base import Topology

PP_GROUP = "meshes"
DP_GROUP = "workers"
WORLD = "everybody"
TP_GROUP = "tensor"
BATCH_NORM_GROUP = "norms"


def reduce_groups(
    topology: Topology,
    tied: Mapping[str, Sequence[int]],
    mesh_of_stage: Sequence[str],
    sharded: bool = False,
    tensor: int = 1,
) -> dict[str, tuple[int, ...]]:
    """The ranks of each group of REDUCE and of tensor parallelism by name, equal on every worker.

    In each mesh `tensor` ranks next to each other are a tp group, and the ranks with equal shards a dp group. Uniform
    meshes have a pp group for each worker number, and one for each tied parameter that several meshes hold; `mesh_of_stage`
    says which hold the stages of `tied`. Heterogeneous meshes have, in place of these, groups of all workers of such
    meshes, and WORLD. Where meshes are `sharded` there is WORLD too, as no rank knows the norm of its mesh. Groups of one
    rank are left out."""
    groups: dict[str, tuple[int, ...]] = {}
    shared = {name: {mesh_of_stage[stage] for stage in stages} for name, stages in tied.items()}
    shared = {name: holders for name, holders in shared.items() if len(holders) > 1}
    for mesh, size in zip(topology.meshes, topology.sizes, strict=True):
        ranks, step = [topology.rank(mesh, w) for w in range(size)], topology.tensor(mesh, tensor)
        for part in range(step):
            groups[dp_group(mesh, part, step)] = tuple(ranks[part::step])
        for first in range(0, size, step):
            groups[tp_group(mesh, first, step)] = tuple(ranks[first : first + step])
    if sharded or not topology.uniform:
        groups[WORLD] = tuple(range(topology.size))
    if not topology.uniform:
        for name, holders in shared.items():
            groups[f"tied/{name}"] = tuple(
                topology.rank(mesh, w)
                for mesh in topology.meshes
                if mesh in holders
                for w in range(topology.workers(mesh))
            )
        return {name: ranks for name, ranks in groups.items() if len(ranks) > 1}
    for w in range(max(topology.sizes)):
        groups[f"{PP_GROUP}/{w}"] = tuple(topology.rank(mesh, w) for mesh in topology.meshes)
        for name, holders in shared.items():
            ranks = (topology.rank(mesh, w) for mesh in topology.meshes if mesh in holders)
            groups[f"tied/{name}/{w}"] = tuple(ranks)
    return {name: ranks for name, ranks in groups.items() if len(ranks) > 1}


def batch_norm_groups(topology: Topology, tensor: int = 1) -> dict[str, tuple[int, ...]]:
    """Ranks that normalise together, by name: the dp ranks of each mesh, with `tensor` parallelism once for each place
    in a tp group. Beside the groups of REDUCE, which sum gradients on another lane meanwhile."""
    return {
        f"{BATCH_NORM_GROUP}/{mesh}/{place}": tuple(
            topology.rank(mesh, worker) for worker in range(place, size, tensor)
        )
        for mesh, size in zip(topology.meshes, topology.sizes, strict=True)
        if size > tensor
        for place in range(tensor)
    }


def dp_group(mesh: str, worker: int, tensor: int) -> str:
    """The name of the dp group of worker `worker` of `mesh`: the workers that sum their gradients."""
    return f"{DP_GROUP}/{mesh}" if tensor == 1 else f"{DP_GROUP}/{mesh}/{worker % tensor}"


def tp_group(mesh: str, worker: int, tensor: int) -> str:
    """The name of the tp group of worker `worker` of `mesh`."""
    return f"{TP_GROUP}/{mesh}/{worker // tensor}"


def batch_norm_group(mesh: str, worker: int, tensor: int) -> str:
    """The name of the group of `mesh` whose workers normalise together with worker `worker`."""
    return f"{BATCH_NORM_GROUP}/{mesh}/{worker % tensor}"


def in_stage_peers(topology: Topology, own: int, groups: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The names of the workers that sum with rank `own` inside actions: of its tp group and of its batch norm group."""
    inside = [
        ranks for name, ranks in groups.items() if name.startswith((f"{TP_GROUP}/", f"{BATCH_NORM_GROUP}/"))
    ]
    return tuple(
        topology.name(rank) for rank in sorted({r for ranks in inside if own in ranks for r in ranks} - {own})
    )
