"""The plan of an evaluation: the stages of a trained pipeline, forwards only, from what a driver asks.

Its tensors are resharded between the meshes between which they are in training; the programs are proven worker by worker
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.scheduler.cut.unlike import MeshShare, resharding_of
from service.scheduler.model.spec import EdgeSpec, PipelineSpec, SpecError, load_spec
from service.scheduler.plan import Plan
from service.scheduler.planner import make_plan
from service.scheduler.programs.messages import check_messages
from service.scheduler.resharding import ReshardingPlan

_LARGEST = 1024
Count = Annotated[int, Field(ge=1, le=_LARGEST)]
Length = Annotated[int, Field(ge=0, lt=2**53)]
Reshardings = dict[tuple[int, bool], ReshardingPlan]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SharedMesh(_Asked):
    """A mesh whose workers share a microbatch in `data` parts, each on `tensor` workers; one node a worker."""

    name: str
    data: Count
    tensor: Count = 1
    nodes: Annotated[list[str], Field(min_length=1, max_length=_LARGEST)]


class ShapeOfPart(_Asked):
    """The shape that each worker has of a tensor where `data` of them share a microbatch."""

    data: Count
    shape: Annotated[list[Length], Field(max_length=64)]


class SharedTensor(_Asked):
    shapes: Annotated[list[ShapeOfPart], Field(max_length=_LARGEST)]
    element_bytes: Annotated[int, Field(ge=1, le=64)]


class Unlike(_Asked):
    """What a driver tells of meshes of unlike sizes, or that share matrices; `tensors` are those of the edges, in their
    order."""

    meshes: Annotated[list[SharedMesh], Field(max_length=_LARGEST)]
    tensors: Annotated[list[SharedTensor], Field(max_length=100_000)]


@dataclass(frozen=True)
class ForwardPlan:
    """The plan of a spec, forwards only, and the transfers that do not go in pairs of workers."""

    spec: PipelineSpec
    plan: Plan
    reshardings: Reshardings = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The plan's JSON, with the reshardings where there are some."""
        found = [
            {"edge": edge, "backward": backward, "plan": one.to_json()}
            for (edge, backward), one in self.reshardings.items()
        ]
        return {**self.plan.model_dump(mode="json"), **({"reshardings": found} if found else {})}


def plan_forwards(
    request: Mapping[str, Any], *, budget_s: float = 10.0, expired: Callable[[], bool] | None = None
) -> ForwardPlan:
    """The plan of a PipelineSpec (JSON), which `request` is; besides it may say how meshes that are `unlike`, or share
    matrices, share a microbatch. SpecError where there is none."""
    given = dict(request)
    unlike = given.pop("unlike", None)
    spec = load_spec({**given, "schedule": "inference"})
    if unlike is None:
        return ForwardPlan(spec, make_plan(spec, budget_s=budget_s, expired=expired))
    told = _told(unlike, spec)
    shares = {one.name: MeshShare(one.name, one.data, one.tensor, tuple(one.nodes)) for one in told.meshes}
    spec, reshardings = _resharded(spec, told, shares)
    plan = make_plan(spec, budget_s=budget_s, expired=expired)
    programs = {name: plan.program(name) for name in plan.programs}
    check_messages(programs, reshardings, {name: len(one.nodes) for name, one in shares.items()})
    return ForwardPlan(spec, plan, reshardings)


def _told(unlike: Any, spec: PipelineSpec) -> Unlike:
    try:
        told = Unlike.model_validate(unlike)
    except ValidationError as error:
        raise SpecError(f"what is said of unlike meshes cannot be read: {error}") from None
    if sorted(one.name for one in told.meshes) != sorted(mesh.name for mesh in spec.meshes):
        raise SpecError("what is said of unlike meshes is of other meshes than those of the pipeline")
    if len(told.tensors) != len(spec.edges):
        raise SpecError(f"{len(told.tensors)} tensors are told, and the pipeline has {len(spec.edges)} edges")
    for one in told.meshes:
        if one.data * one.tensor != len(one.nodes):
            raise SpecError(
                f"mesh {one.name} has {len(one.nodes)} workers, which are not data {one.data} x tensor {one.tensor}"
            )
    return told


def _resharded(
    spec: PipelineSpec, told: Unlike, shares: Mapping[str, MeshShare]
) -> tuple[PipelineSpec, Reshardings]:
    """The spec whose transfers last as long as their reshardings, where there are some, and these."""
    mesh_of = {stage.name: stage.mesh for stage in spec.stages}
    edges: list[EdgeSpec] = []
    reshardings: Reshardings = {}
    for index, (edge, tensor) in enumerate(zip(spec.edges, told.tensors, strict=True)):
        sides = shares[mesh_of[edge.source]], shares[mesh_of[edge.target]]
        if sides[0].in_pairs(sides[1]) or not sides[0].deals(sides[1], _shape(tensor, sides[0])):
            edges.append(edge)
            continue
        plan = reshardings[index, False] = resharding_of(
            edge.tensor or f"of edge {index}",
            (_shape(tensor, sides[0]), _shape(tensor, sides[1])),
            tensor.element_bytes,
            sides,
            spec.network,
            differentiable=False,
        )
        known = spec.network.bandwidth_bytes_per_s is not None
        edges.append(
            edge.model_copy(
                update={
                    "forward_s": plan.makespan_s if known else spec.network.latency_s,
                    "forward_bytes": None,
                    "held_bytes": edge.forward_bytes,
                }
            )
        )
    return spec.model_copy(update={"edges": edges}), reshardings


def _shape(tensor: SharedTensor, mesh: MeshShare) -> tuple[int, ...]:
    for one in tensor.shapes:
        if one.data == mesh.data:
            return tuple(one.shape)
    raise SpecError(
        f"no shape is told of a tensor where {mesh.data} workers share a microbatch, as on {mesh.name}"
    )
