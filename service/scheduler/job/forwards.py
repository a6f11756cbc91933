"""Plans an evaluation: the stages of a trained pipeline, forwards only, from a driver's request.

Tensors are resharded between the same meshes as in training, and messages of all workers are checked against
deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.scheduler.job.heterogeneous import MeshGroups, reshard_tensor
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import EdgeSpec, PipelineSpec, SpecError
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.programs.messages import check_messages
from service.scheduler.programs.plan import Plan
from service.scheduler.resharding.resharding_plan import PlannedResharding

_MAX_WORKERS = 1024
WorkerCount = Annotated[int, Field(ge=1, le=_MAX_WORKERS)]
DimensionLength = Annotated[int, Field(ge=0, lt=2**53)]
Reshardings = dict[tuple[int, bool], PlannedResharding]


class _RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MeshRequest(_RequestModel):
    """A mesh with `data` parts of a microbatch, each on `tensor` workers; `nodes` holds the node of every worker."""

    name: str
    data: WorkerCount
    tensor: WorkerCount = 1
    nodes: Annotated[list[str], Field(min_length=1, max_length=_MAX_WORKERS)]


class PartShape(_RequestModel):
    """The shape of each worker's part of a tensor on a mesh with `data` parts of a microbatch."""

    data: WorkerCount
    shape: Annotated[list[DimensionLength], Field(max_length=64)]


class TensorRequest(_RequestModel):
    shapes: Annotated[list[PartShape], Field(max_length=_MAX_WORKERS)]
    element_bytes: Annotated[int, Field(ge=1, le=64)]


class HeterogeneousRequest(_RequestModel):
    """The sizes of heterogeneous or tensor-parallel meshes, from a driver; `tensors` are those of the edges, in order."""

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
        reshardings = [
            {"edge": edge, "backward": backward, "plan": plan.to_json()}
            for (edge, backward), plan in self.reshardings.items()
        ]
        return {**self.plan.model_dump(mode="json"), **({"reshardings": reshardings} if reshardings else {})}


def plan_forwards(
    request: Mapping[str, Any], *, budget_s: float = 10.0, expired: Callable[[], bool] | None = None
) -> ForwardPlan:
    """The forwards-only plan of `request`, a PipelineSpec (JSON); its key `unlike` describes heterogeneous or
    tensor-parallel meshes. SpecError where there is no plan."""
    spec_json = dict(request)
    heterogeneous = spec_json.pop("unlike", None)
    spec = load_spec({**spec_json, "schedule": "inference"})
    if heterogeneous is None:
        return ForwardPlan(spec, make_plan(spec, budget_s=budget_s, expired=expired))
    checked = _checked_request(heterogeneous, spec)
    parallelism = {
        mesh.name: MeshGroups(mesh.name, mesh.data, mesh.tensor, tuple(mesh.nodes)) for mesh in checked.meshes
    }
    spec, reshardings = _with_reshardings(spec, checked, parallelism)
    plan = make_plan(spec, budget_s=budget_s, expired=expired)
    programs = {name: plan.program(name) for name in plan.programs}
    check_messages(programs, reshardings, {name: len(mesh.nodes) for name, mesh in parallelism.items()})
    return ForwardPlan(spec, plan, reshardings)


def _checked_request(data: Any, spec: PipelineSpec) -> HeterogeneousRequest:
    try:
        request = HeterogeneousRequest.model_validate(data)
    except ValidationError as error:
        raise SpecError(f"the description of heterogeneous meshes (unlike) cannot be read: {error}") from None
    if sorted(mesh.name for mesh in request.meshes) != sorted(mesh.name for mesh in spec.meshes):
        raise SpecError(
            "the description of heterogeneous meshes (unlike) is of other meshes than the pipeline's"
        )
    if len(request.tensors) != len(spec.edges):
        raise SpecError(
            f"{len(request.tensors)} tensors are described, and the pipeline has {len(spec.edges)} edges"
        )
    for mesh in request.meshes:
        if mesh.data * mesh.tensor != len(mesh.nodes):
            raise SpecError(
                f"mesh {mesh.name} has {len(mesh.nodes)} workers, which are not data {mesh.data} x tensor {mesh.tensor}"
            )
    return request


def _with_reshardings(
    spec: PipelineSpec, request: HeterogeneousRequest, parallelism: Mapping[str, MeshGroups]
) -> tuple[PipelineSpec, Reshardings]:
    """(the spec whose resharded transfers last as long as their plans, these plans)."""
    mesh_of = {stage.name: stage.mesh for stage in spec.stages}
    edges: list[EdgeSpec] = []
    reshardings: Reshardings = {}
    for index, (edge, tensor) in enumerate(zip(spec.edges, request.tensors, strict=True)):
        sides = parallelism[mesh_of[edge.source]], parallelism[mesh_of[edge.target]]
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
                    "held_bytes": edge.forward_bytes if edge.held_bytes is None else edge.held_bytes,
                }
            )
        )
    return spec.model_copy(update={"edges": edges}), reshardings


def _part_shape(tensor: TensorRequest, mesh: MeshGroups) -> tuple[int, ...]:
    for part in tensor.shapes:
        if part.data == mesh.data:
            return tuple(part.shape)
    raise SpecError(f"a tensor has no shape for {mesh.data} parts of a microbatch, as on mesh {mesh.name}")
