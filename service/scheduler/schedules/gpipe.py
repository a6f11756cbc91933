"""gpipe (all forwards, then all backwards) and inference (forwards only)."""

from __future__ import annotations

import numpy as np

from service.scheduler.model.problem import BACKWARD, FORWARD, Problem
from service.scheduler.schedules.actions import stage_of_mesh, to_lane


def lanes(problem: Problem) -> list[np.ndarray]:
    """Both phases in ascending microbatch order."""
    microbatches = range(problem.microbatches)
    return [
        to_lane(problem, [(stage, op, m) for op in (FORWARD, BACKWARD) for m in microbatches])
        for stage in stage_of_mesh(problem)
    ]


def inference_lanes(problem: Problem) -> list[np.ndarray]:
    """Forwards in rounds of P microbatches: within a round stage by stage, so that loops keep every mesh busy."""
    size = problem.meshes
    rounds = [range(m, min(m + size, problem.microbatches)) for m in range(0, problem.microbatches, size)]
    result: list[list[tuple[int, int, int]]] = [[] for _ in range(problem.meshes)]
    for microbatches in rounds:
        for stage in problem.stage_order:
            result[problem.mesh_of_stage[stage]].extend((stage, FORWARD, m) for m in microbatches)
    return [to_lane(problem, actions) for actions in result]
