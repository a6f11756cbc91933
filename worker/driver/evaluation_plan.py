"""What is asked of the scheduler for an evaluation: the trained pipeline's stages, forwards only. Pure: values in and out.

An evaluation runs between two steps, beside what training holds all along; its gradients are gone then. So it may take
what the training's own plan takes of each mesh, and no more receive buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.driver.planned_times import planned_seconds, planned_starts
from worker.driver.planning import PlannedJob
from worker.evaluation import EvaluationProgram
from worker.model.evaluating import EvaluationEdge


def evaluation_spec(planned: PlannedJob, edges: Sequence[EvaluationEdge]) -> dict[str, Any]:
    """JSON of the PipelineSpec of an evaluation by the stages and meshes of `planned`."""
    spec, names = planned.spec, planned.stage_names
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
                "forward_bytes": edge.bytes,
                "backward_bytes": 0,
            }
            for edge in edges
        ],
        "network": spec["network"],
        "overlap": spec.get("overlap", True),
        "schedule": "inference",
    }


def evaluation_programs(planned: PlannedJob, plan: dict[str, Any]) -> dict[str, EvaluationProgram]:
    """The programs of an evaluation's plan, by mesh."""
    seconds, starts = (of(plan, planned.stage_names) for of in (planned_seconds, planned_starts))
    return {
        mesh: EvaluationProgram(program, seconds[mesh], starts[mesh])
        for mesh, program in plan["programs"].items()
    }
