"""zb-h1 and zb-v: split backwards, W in the bubbles, at the memory of 1F1B (Qi et al. 2023, 2024)."""

from __future__ import annotations

import numpy as np

from service.scheduler.model.problem import BACKWARD, FORWARD, WEIGHT, Problem
from service.scheduler.schedules.actions import Action, cap, stage_of_mesh, to_lane


def h1_lanes(problem: Problem) -> list[np.ndarray]:
    """1F1B in which the W of a stage lags behind its I by as many microbatches as stages precede it."""
    return [_h1_lane(problem, stage) for stage in stage_of_mesh(problem)]


def _h1_lane(problem: Problem, stage: int) -> np.ndarray:
    microbatches, depth = problem.microbatches, int(problem.depth[stage])
    warmup = min(depth, cap(problem))
    lag = max(0, min(int(problem.depth.max()), cap(problem)) - warmup)
    actions: list[Action] = [(stage, FORWARD, m) for m in range(warmup)]
    for m in range(microbatches):
        actions.append((stage, BACKWARD, m))
        if m >= lag:
            actions.append((stage, WEIGHT, m - lag))
        if warmup + m < microbatches:
            actions.append((stage, FORWARD, warmup + m))
    actions += [(stage, WEIGHT, m) for m in range(max(0, microbatches - lag), microbatches)]
    return to_lane(problem, actions)


def v_lanes(problem: Problem) -> list[np.ndarray]:
    """On mesh p the outer stage p and the inner stage 2P−1−p; in unit costs 6M + P − 1 long from M = 2P on.

    Warm-up: 2(P−p)−1 outer forwards, p times inner and outer forward, P−p times inner F I W. Then in turn
    outer F I W and inner F I W; at the end the W of the last p microbatches come after the I of both stages.
    """
    return [_v_lane(problem, mesh) for mesh in range(problem.meshes)]


def _v_lane(problem: Problem, mesh: int) -> np.ndarray:
    microbatches, meshes = problem.microbatches, problem.meshes
    outer, inner = mesh, 2 * meshes - 1 - mesh
    actions: list[Action] = []
    count = {(stage, op): 0 for stage in (outer, inner) for op in (FORWARD, BACKWARD, WEIGHT)}

    def run(stage: int, *ops: int) -> None:
        for op in ops:
            m = count[stage, op]
            before = microbatches if op == FORWARD else count[stage, op - 1]
            if m < before:
                actions.append((stage, op, m))
                count[stage, op] = m + 1

    for _ in range(2 * (meshes - mesh) - 1):
        run(outer, FORWARD)
    for _ in range(mesh):
        run(inner, FORWARD)
        run(outer, FORWARD)
    for _ in range(meshes - mesh):
        run(inner, FORWARD, BACKWARD, WEIGHT)
    while count[inner, FORWARD] < microbatches or count[outer, FORWARD] < microbatches:
        run(outer, FORWARD, BACKWARD, WEIGHT)
        run(inner, FORWARD, BACKWARD, WEIGHT)
    for _ in range(mesh):
        run(outer, BACKWARD)
        run(inner, BACKWARD)
    while count[outer, WEIGHT] < microbatches or count[inner, WEIGHT] < microbatches:
        run(outer, BACKWARD, WEIGHT)
        run(inner, BACKWARD, WEIGHT)
    return to_lane(problem, actions)
