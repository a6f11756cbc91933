"""Which transfers exist: one for each edge between meshes, a shared tensor once per using mesh.

Their order on the ports is decided by the simulator (timeline.py), by urgency.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.scheduler.model.spec import PipelineSpec, edge_costs


@dataclass(frozen=True)
class Transfer:
    """A tensor that one stage sends to another mesh; its gradient comes back the same way.

    `edges` are the merged edges, first the one that names the transfer; `targets` are their
    target stages, all on `target_mesh`. Stages and meshes are indices, times are seconds.
    """

    source: int
    source_mesh: int
    target_mesh: int
    edges: tuple[int, ...]
    targets: tuple[int, ...]
    forward_s: float
    backward_s: float
    forward_bytes: int  # 0 where the edge is given in seconds only
    backward_bytes: int

    @property
    def edge(self) -> int:
        """The edge whose index stands in slots and instructions."""
        return self.edges[0]


def find_transfers(spec: PipelineSpec) -> tuple[Transfer, ...]:
    """All transfers of one microbatch, in the order of their first edges."""
    stages = {stage.name: i for i, stage in enumerate(spec.stages)}
    meshes = {mesh.name: i for i, mesh in enumerate(spec.meshes)}
    seconds = edge_costs(spec)
    groups: dict[tuple, list[int]] = {}
    for index, edge in enumerate(spec.edges):
        here, there = spec.stages[stages[edge.source]].mesh, spec.stages[stages[edge.target]].mesh
        if here == there:
            continue
        key = (index,) if edge.tensor is None else (edge.source, edge.tensor, there)
        groups.setdefault(key, []).append(index)
    found = []
    for edges in groups.values():
        first = spec.edges[edges[0]]
        source = stages[first.source]
        targets = tuple(stages[spec.edges[edge].target] for edge in edges)
        forward_s, backward_s = seconds(edges[0])
        found.append(
            Transfer(
                source=source,
                source_mesh=meshes[spec.stages[source].mesh],
                target_mesh=meshes[spec.stages[targets[0]].mesh],
                edges=tuple(edges),
                targets=targets,
                forward_s=forward_s,
                backward_s=backward_s,
                forward_bytes=first.forward_bytes or first.held_bytes or 0,
                backward_bytes=first.backward_bytes or (first.held_bytes or 0 if backward_s else 0),
            )
        )
    return tuple(found)
