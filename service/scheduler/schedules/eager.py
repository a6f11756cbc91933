"""eager-1f1b: forwards run ahead so that their transfers get slack.

With max_in_flight = stages it is ONNX Runtime's compute table, without it Alpa's schedule.
"""

from __future__ import annotations

import numpy as np

from service.scheduler.model.problem import BACKWARD, FORWARD, Problem
from service.scheduler.schedules.actions import Action, cap, to_lane


def lanes(problem: Problem) -> list[np.ndarray]:
    """In unit clocks every stage takes a ready backward, else a forward while fewer than 2d−1 are in flight."""
    result: list[list[Action]] = [[] for _ in range(problem.meshes)]
    for clock in unit_clocks(problem):
        for stage, op, microbatch in clock:
            result[problem.mesh_of_stage[stage]].append((stage, op, microbatch))
    return [to_lane(problem, actions) for actions in result]


def unit_clocks(problem: Problem) -> list[list[Action]]:
    """What every stage runs in each clock when F and B take one clock and transfers none."""
    microbatches, most = problem.microbatches, cap(problem)
    forwards, backwards = [0] * problem.stages, [0] * problem.stages
    limits = [
        min(2 * int(depth) - 1, most if not problem.sources[stage] else microbatches)
        for stage, depth in enumerate(problem.depth)
    ]
    active = list(range(problem.stages))
    clocks = []
    while active:
        clock: list[Action] = []
        for stage in active:
            done, returned = forwards[stage], backwards[stage]
            if done > returned and all(backwards[target] > returned for target in problem.targets[stage]):
                clock.append((stage, BACKWARD, returned))
            elif (
                done < microbatches
                and done - returned < limits[stage]
                and all(forwards[source] > done for source in problem.sources[stage])
            ):
                clock.append((stage, FORWARD, done))
        for stage, op, _ in clock:
            (forwards if op == FORWARD else backwards)[stage] += 1
        active = [stage for stage in active if backwards[stage] < microbatches]
        clocks.append(clock)
    return clocks
