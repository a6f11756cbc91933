"""Converts (stage, operation, microbatch) triples into tasks of a lane, for the named schedules.

Where a backward is split and no W is listed, W follows its I at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from service.scheduler.kernels import BACKWARD, FORWARD, WEIGHT
from service.scheduler.problem.problem import Problem

Action = tuple[int, int, int]


def to_lane(problem: Problem, actions: Iterable[Action]) -> np.ndarray:
    """Tasks of the actions; where a backward is split and W is not listed anywhere, W follows its I."""
    listed = list(actions)
    if not problem.splits or any(op == WEIGHT for _, op, _ in listed):
        return np.array([problem.task(s, op, m) for s, op, m in listed], dtype=np.int64)
    tasks = []
    for stage, op, microbatch in listed:
        tasks.append(problem.task(stage, op, microbatch))
        if op == BACKWARD and not problem.fused[stage, microbatch]:
            tasks.append(problem.task(stage, WEIGHT, microbatch))
    return np.array(tasks, dtype=np.int64)


def one_f_one_b_actions(stage: int, warmup: int, microbatches: int) -> list[Action]:
    """`warmup` forwards, then one backward, one forward, … of one stage."""
    actions = [(stage, FORWARD, m) for m in range(warmup)]
    for m in range(microbatches):
        actions.append((stage, BACKWARD, m))
        if warmup + m < microbatches:
            actions.append((stage, FORWARD, warmup + m))
    return actions


def in_flight_cap(problem: Problem) -> int:
    """Most microbatches that may be in flight at a source stage."""
    limit = problem.spec.max_in_flight
    return problem.microbatches if limit is None else min(limit, problem.microbatches)


def stage_of_mesh(problem: Problem) -> list[int]:
    """The stage of every mesh, where each holds one."""
    stages = [0] * problem.meshes
    for stage, mesh in enumerate(problem.mesh_of_stage.tolist()):
        stages[mesh] = stage
    return stages
