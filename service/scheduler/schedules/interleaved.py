"""interleaved-1f1b: several stages a mesh, microbatches in rounds (Narayanan et al. 2021, Megatron-LM)."""

from __future__ import annotations

import numpy as np

from service.scheduler.model.problem import BACKWARD, FORWARD, Problem
from service.scheduler.schedules.actions import Action, to_lane


def lanes(problem: Problem) -> list[np.ndarray]:
    """M microbatches go in max(1, M // P) rounds of nearly equal size.

    Warm-up of mesh p: (stages a mesh − 1) · (largest round) + 2(P − 1 − p) forwards, then one forward, one backward.
    """
    meshes, microbatches = problem.meshes, problem.microbatches
    chunks = problem.stages // meshes
    sizes = _round_sizes(microbatches, max(1, microbatches // meshes))
    result = []
    for mesh in range(meshes):
        forwards: list[Action] = []
        backwards: list[Action] = []
        first = 0
        for size in sizes:
            members = range(first, first + size)
            for chunk in range(chunks):
                forwards += [(chunk * meshes + mesh, FORWARD, m) for m in members]
                backwards += [((chunks - 1 - chunk) * meshes + mesh, BACKWARD, m) for m in members]
            first += size
        warmup = min(len(forwards), (chunks - 1) * sizes[0] + 2 * (meshes - 1 - mesh))
        result.append(to_lane(problem, _alternate(forwards, backwards, warmup)))
    return result


def _round_sizes(microbatches: int, rounds: int) -> list[int]:
    small, larger = divmod(microbatches, rounds)
    return [small + (index < larger) for index in range(rounds)]


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    actions = forwards[:warmup]
    for index, backward in enumerate(backwards):
        actions += forwards[warmup + index : warmup + index + 1]
        actions.append(backward)
    return actions
