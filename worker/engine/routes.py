"""Maps a stage graph's edges to routes between meshes, transfer tags and the wiring of each stage.

Pure values; reads of an edge only its fields. Must not know lanes, transports or autograd.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Edge(Protocol):
    """The fields of a worker.model.stages.StageEdge that the engine reads."""

    source: int
    target: int
    tensor: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True)
class Route:
    """One tensor from one stage to one other mesh: one transfer a microbatch and direction.

    `index` is its first edge, `consumers` the stages on `target_mesh` that use it, ascending.
    """

    index: int
    source: int
    tensor: str
    source_mesh: str
    target_mesh: str
    consumers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    differentiable: bool


@dataclass(frozen=True)
class ModelInput:
    """An input of a stage that is the k-th input of the model."""

    position: int


@dataclass(frozen=True)
class LocalInput:
    """An input of a stage that another stage of the same mesh makes."""

    source: int
    tensor: str


@dataclass(frozen=True)
class RemoteInput:
    """An input of a stage that arrives over a route."""

    route: Route


@dataclass(frozen=True)
class OutputWiring:
    """One output of a stage: its traced shape and its consumers."""

    tensor: str
    is_model_output: bool
    shape: tuple[int, ...] | None
    local_consumers: tuple[int, ...]
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class StageWiring:
    """The sources of one stage's inputs and the consumers of its outputs."""

    stage: int
    inputs: tuple[ModelInput | LocalInput | RemoteInput, ...]
    outputs: tuple[OutputWiring, ...]

    @property
    def model_outputs(self) -> tuple[int, ...]:
        """The indices in `outputs` of the model's outputs, where this stage makes them."""
        return tuple(i for i, output in enumerate(self.outputs) if output.is_model_output)


def find_routes(edges: Sequence[Edge], mesh_of_stage: Sequence[str]) -> dict[int, Route]:
    """The routes of a stage graph, by the index of their first edge. Edges inside a mesh make none."""
    members: dict[tuple[int, str, str], list[int]] = {}
    for index, edge in enumerate(edges):
        source_mesh, target_mesh = mesh_of_stage[edge.source], mesh_of_stage[edge.target]
        if source_mesh != target_mesh:
            members.setdefault((edge.source, edge.tensor, target_mesh), []).append(index)
    routes = {}
    for (source, tensor, target_mesh), indices in members.items():
        first = edges[indices[0]]
        routes[indices[0]] = Route(
            index=indices[0],
            source=source,
            tensor=tensor,
            source_mesh=mesh_of_stage[source],
            target_mesh=target_mesh,
            consumers=tuple(sorted(edges[i].target for i in indices)),
            shape=tuple(first.shape),
            dtype=first.dtype,
            differentiable=first.differentiable,
        )
    return routes


def directed_pairs(
    routes: Mapping[int, Route], training: bool, resharded: Container[tuple[int, bool]] = ()
) -> tuple[tuple[str, str], ...]:
    """The directed pairs of meshes whose workers exchange tensors in pairs, in the order in which all workers connect.
    Transfers in `resharded` (the first edge of a route, and whether it carries gradients) go another way."""
    forward = {
        (route.source_mesh, route.target_mesh)
        for route in routes.values()
        if (route.index, False) not in resharded
    }
    back = {
        (route.target_mesh, route.source_mesh)
        for route in routes.values()
        if training and route.differentiable and (route.index, True) not in resharded
    }
    return tuple(sorted(forward | back))


def wire_stage(
    stage: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    edges: Sequence[Edge],
    mesh_of_stage: Sequence[str],
    routes: Mapping[int, Route],
) -> StageWiring:
    """Connect the named inputs and outputs of `stage`. ValueError when the edges do not provide an input."""
    route_of = {(route.source, route.tensor, route.target_mesh): route for route in routes.values()}
    wired: list[ModelInput | LocalInput | RemoteInput] = []
    for name in inputs:
        if name.startswith("input:"):
            wired.append(ModelInput(int(name.removeprefix("input:"))))
            continue
        edge = next((e for e in edges if e.target == stage and e.tensor == name), None)
        if edge is None:
            raise ValueError(f"stage {stage} uses tensor {name!r}, but no edge brings it")
        if mesh_of_stage[edge.source] == mesh_of_stage[stage]:
            wired.append(LocalInput(edge.source, name))
        else:
            wired.append(RemoteInput(route_of[edge.source, name, mesh_of_stage[stage]]))
    return StageWiring(
        stage,
        tuple(wired),
        tuple(_wire_output(stage, name, edges, mesh_of_stage, routes) for name in outputs),
    )


def transfer_tag(route: int, backward: bool, microbatch: int, microbatches: int) -> int:
    """A number that no other transfer of the same step has."""
    return (route * 2 + backward) * microbatches + microbatch


def _wire_output(
    stage: int,
    name: str,
    edges: Sequence[Edge],
    mesh_of_stage: Sequence[str],
    routes: Mapping[int, Route],
) -> OutputWiring:
    uses = [edge for edge in edges if edge.source == stage and edge.tensor == name]
    here = mesh_of_stage[stage]
    return OutputWiring(
        tensor=name,
        is_model_output=name.partition(":")[0] == "output",
        shape=tuple(uses[0].shape) if uses else None,
        local_consumers=tuple(sorted(e.target for e in uses if mesh_of_stage[e.target] == here)),
        routes=tuple(r for _, r in sorted(routes.items()) if r.source == stage and r.tensor == name),
    )
