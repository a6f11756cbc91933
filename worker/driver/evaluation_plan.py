"""What is asked of the scheduler for an evaluation: the trained pipeline's stages, forwards only. Pure: values in and out.

An evaluation runs between two steps, beside what training holds all along; its gradients are gone then. So it may take
what the training's own plan takes of each mesh, and no more receive buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from worker.driver.planned import PlannedJob, reshardings_of
from worker.driver.planned_times import planned_seconds, planned_starts
from worker.evaluation import EvaluationProgram
from worker.job import Job
from worker.model.evaluating import EvaluationEdge


@dataclass(frozen=True)
class SharedMesh:
    """A mesh whose workers share a microbatch in `data` parts, each on `tensor` workers that share matrices; `nodes` are
    where they run, one a worker."""

    name: str
    data: int
    tensor: int
    nodes: tuple[str, ...]


def shared_meshes(job: Job, nodes: Iterable[tuple[str, str]]) -> tuple[SharedMesh, ...]:
    """How the meshes share a microbatch, where they have unlike sizes or share matrices; `nodes` has mesh and node of each
    worker."""
    if not job.unlike and job.resources.tensor == 1:
        return ()
    of_mesh: dict[str, list[str]] = {}
    for mesh, node in nodes:
        of_mesh.setdefault(mesh, []).append(node)
    return tuple(
        SharedMesh(mesh, len(on) // (tensor := job.tensor_of(mesh)), tensor, tuple(on))
        for mesh, on in of_mesh.items()
    )


def evaluation_spec(
    planned: PlannedJob, edges: Sequence[EvaluationEdge], shares: Sequence[SharedMesh] = ()
) -> dict[str, Any]:
    """JSON of the PipelineSpec of an evaluation by the stages and meshes of `planned`; `shares` says how each mesh shares
    a microbatch, and is part of the request: transfers between them may have to be resharded."""
    spec, names = planned.spec, planned.stage_names
    data = {share.name: share.data for share in shares}
    of_stage = [data.get(mesh, 1) for mesh in planned.mesh_of_stage]
    peaks = {mesh["name"]: mesh for mesh in planned.plan["meshes"]}
    return {
        "microbatches": planned.microbatches,
        "meshes": [
            {
                "name": mesh["name"],
                "memory_bytes": peaks[mesh["name"]].get("peak_memory_bytes"),
                "receive_buffer_limit": max(1, peaks[mesh["name"]]["peak_receive_buffers"]),
            }
            for mesh in spec["meshes"]
        ],
        "stages": [
            {key: stage[key] for key in ("name", "mesh", "forward_s", "activation_bytes", "static_bytes")}
            for stage in spec["stages"]
        ],
        "edges": [
            {
                "source": names[edge.source],
                "target": names[edge.target],
                "tensor": edge.tensor,
                "forward_bytes": max(
                    edge.bytes_of(of_stage[edge.source]), edge.bytes_of(of_stage[edge.target])
                ),
                "backward_bytes": 0,
            }
            for edge in edges
        ],
        "network": spec["network"],
        "overlap": spec.get("overlap", True),
        "schedule": "inference",
        **_unlike(edges, shares),
    }


def _unlike(edges: Sequence[EvaluationEdge], shares: Sequence[SharedMesh]) -> dict[str, Any]:
    if not shares:
        return {}
    tensors = [
        {
            "shapes": [{"data": data, "shape": list(shape)} for data, shape in edge.shapes.items()],
            "element_bytes": edge.element_bytes,
        }
        for edge in edges
    ]
    return {"unlike": {"meshes": [asdict(share) for share in shares], "tensors": tensors}}


def evaluation_programs(planned: PlannedJob, plan: dict[str, Any]) -> dict[str, EvaluationProgram]:
    """The programs of an evaluation's plan, by mesh."""
    seconds, starts = (of(plan, planned.stage_names) for of in (planned_seconds, planned_starts))
    plans = reshardings_of(plan)
    return {
        mesh: EvaluationProgram(program, seconds[mesh], starts[mesh], plans)
        for mesh, program in plan["programs"].items()
    }
