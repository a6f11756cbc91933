"""Plans an evaluation: the stages of a trained pipeline, forwards only, from a driver's request.

Tensors are resharded between the same meshes as in training, and messages of all workers are checked against
deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.scheduler.job.heterogeneous import MeshParallelism, reshard_tensor
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import EdgeSpec, PipelineSpec, SpecError, load_spec
from service.scheduler.programs.messages import check_messages
from service.scheduler.programs.plan import Plan
from service.scheduler.resharding.resharding_plan import ReshardingPlan

_MAX_WORKERS = 1024
WorkerCount = Annotated[int, Field(ge=1, le=_MAX_WORKERS)]
DimensionLength = Annotated[int, Field(ge=0, lt=2**53)]
Reshardings = dict[tuple[int, bool], ReshardingPlan]


class _RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MeshRequest(_RequestModel):
    """A mesh whose workers share a microbatch in `data` parts, each on `tensor` workers; one node a worker."""

    name: str
    data: WorkerCount
    tensor: WorkerCount = 1
    nodes: Annotated[list[str], Field(min_length=1, max_length=_MAX_WORKERS)]


class PartShape(_RequestModel):
    """The shape that each worker has of a tensor where `data` of them share a microbatch."""

    data: WorkerCount
    shape: Annotated[list[DimensionLength], Field(max_length=64)]


class TensorRequest(_RequestModel):
    shapes: Annotated[list[PartShape], Field(max_length=_MAX_WORKERS)]
    element_bytes: Annotated[int, Field(ge=1, le=64)]


class HeterogeneousRequest(_RequestModel):
    """What a driver tells of meshes of unlike sizes, or that share matrices; `tensors` are those of the edges, in their
    order."""

    meshes: Annotated[list[MeshRequest], Field(max_length=_MAX_WORKERS)]
    tensors: Annotated[list[TensorRequest], Field(max_length=100_000)]


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
    told = _checked_request(unlike, spec)
    shares = {
        one.name: MeshParallelism(one.name, one.data, one.tensor, tuple(one.nodes)) for one in told.meshes
    }
    spec, reshardings = _with_reshardings(spec, told, shares)
    plan = make_plan(spec, budget_s=budget_s, expired=expired)
    programs = {name: plan.program(name) for name in plan.programs}
    check_messages(programs, reshardings, {name: len(one.nodes) for name, one in shares.items()})
    return ForwardPlan(spec, plan, reshardings)


def _checked_request(unlike: Any, spec: PipelineSpec) -> HeterogeneousRequest:
    try:
        told = HeterogeneousRequest.model_validate(unlike)
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


def _with_reshardings(
    spec: PipelineSpec, told: HeterogeneousRequest, shares: Mapping[str, MeshParallelism]
) -> tuple[PipelineSpec, Reshardings]:
    """The spec whose transfers last as long as their reshardings, where there are some, and these."""
    mesh_of = {stage.name: stage.mesh for stage in spec.stages}
    edges: list[EdgeSpec] = []
    reshardings: Reshardings = {}
    for index, (edge, tensor) in enumerate(zip(spec.edges, told.tensors, strict=True)):
        sides = shares[mesh_of[edge.source]], shares[mesh_of[edge.target]]
        if sides[0].transfers_in_pairs(sides[1]) or not sides[0].needs_resharding(
            sides[1], _part_shape(tensor, sides[0])
        ):
            edges.append(edge)
            continue
        plan = reshardings[index, False] = reshard_tensor(
            edge.tensor or f"of edge {index}",
            (_part_shape(tensor, sides[0]), _part_shape(tensor, sides[1])),
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


def _part_shape(tensor: TensorRequest, mesh: MeshParallelism) -> tuple[int, ...]:
    for one in tensor.shapes:
        if one.data == mesh.data:
            return tuple(one.shape)
    raise SpecError(
        f"no shape is told of a tensor where {mesh.data} workers share a microbatch, as on {mesh.name}"
    )
