"""The published schedules: gpipe, 1f1b, eager-1f1b, interleaved-1f1b, zb-h1, zb-v, and inference.

Each function turns a Problem into the compute order of every mesh; transfers are ordered by the simulator.
eager-1f1b with max_in_flight = stages is ONNX Runtime's compute table, without it Alpa's schedule.
interleaved-1f1b: Narayanan et al. 2021 (Megatron-LM). zb-h1 and zb-v: Qi et al. 2023, 2024: split backwards with
W in the bubbles, at the memory of 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from service.scheduler.kernels import BACKWARD, FORWARD, WEIGHT
from service.scheduler.problem.problem import Problem

Action = tuple[int, int, int]
"""(stage, operation, microbatch)."""


def eager_lanes(problem: Problem) -> list[np.ndarray]:
    """In unit clocks every stage takes a ready backward, else a forward while fewer than 2d−1 are in flight."""
    result: list[list[Action]] = [[] for _ in range(problem.meshes)]
    for clock in eager_unit_clocks(problem):
        for stage, op, microbatch in clock:
            result[problem.mesh_of_stage[stage]].append((stage, op, microbatch))
    return [to_lane(problem, actions) for actions in result]


def eager_unit_clocks(problem: Problem) -> list[list[Action]]:
    """The actions of all stages by clock, when F and B take one clock and transfers none."""
    microbatches, most = problem.microbatches, in_flight_cap(problem)
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


def gpipe_lanes(problem: Problem) -> list[np.ndarray]:
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
    result: list[list[Action]] = [[] for _ in range(problem.meshes)]
    for microbatches in rounds:
        for stage in problem.stage_order:
            result[problem.mesh_of_stage[stage]].extend((stage, FORWARD, m) for m in microbatches)
    return [to_lane(problem, actions) for actions in result]


def interleaved_lanes(problem: Problem) -> list[np.ndarray]:
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
        result.append(to_lane(problem, _interleave(forwards, backwards, warmup)))
    return result


def _round_sizes(microbatches: int, rounds: int) -> list[int]:
    small, larger = divmod(microbatches, rounds)
    return [small + (index < larger) for index in range(rounds)]


def _interleave(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    actions = forwards[:warmup]
    for index, backward in enumerate(backwards):
        actions += forwards[warmup + index : warmup + index + 1]
        actions.append(backward)
    return actions


def one_f_one_b_lanes(problem: Problem) -> list[np.ndarray]:
    """Warm-up of min(M, d, max_in_flight) forwards, d the stages on the longest path to a sink."""
    most = in_flight_cap(problem)
    return [
        to_lane(
            problem, one_f_one_b_actions(stage, min(int(problem.depth[stage]), most), problem.microbatches)
        )
        for stage in stage_of_mesh(problem)
    ]


def zb_h1_lanes(problem: Problem) -> list[np.ndarray]:
    """1F1B in which the W of a stage lags behind its I by as many microbatches as stages precede it."""
    return [_zb_h1_lane(problem, stage) for stage in stage_of_mesh(problem)]


def _zb_h1_lane(problem: Problem, stage: int) -> np.ndarray:
    microbatches, depth = problem.microbatches, int(problem.depth[stage])
    warmup = min(depth, in_flight_cap(problem))
    lag = max(0, min(int(problem.depth.max()), in_flight_cap(problem)) - warmup)
    actions: list[Action] = [(stage, FORWARD, m) for m in range(warmup)]
    for m in range(microbatches):
        actions.append((stage, BACKWARD, m))
        if m >= lag:
            actions.append((stage, WEIGHT, m - lag))
        if warmup + m < microbatches:
            actions.append((stage, FORWARD, warmup + m))
    actions += [(stage, WEIGHT, m) for m in range(max(0, microbatches - lag), microbatches)]
    return to_lane(problem, actions)


def zb_v_lanes(problem: Problem) -> list[np.ndarray]:
    """On mesh p the outer stage p and the inner stage 2P−1−p; in unit costs 6M + P − 1 long from M = 2P on.

    Warm-up: 2(P−p)−1 outer forwards, p times inner and outer forward, P−p times inner F I W. Then in turn
    outer F I W and inner F I W; at the end the W of the last p microbatches come after the I of both stages.
    """
    return [_zb_v_lane(problem, mesh) for mesh in range(problem.meshes)]


def _zb_v_lane(problem: Problem, mesh: int) -> np.ndarray:
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


def to_lane(problem: Problem, actions: Iterable[Action]) -> np.ndarray:
    """int64[n]: the tasks of `actions`. Where backwards are split and no W is listed, each W follows its I at once."""
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
