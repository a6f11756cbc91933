"""From a timeline to programs: lanes, waited and recorded events, one instruction list for each mesh.

Compiles to worker/program.py. Knows nothing of how the timeline was found.
"""

from __future__ import annotations

import numpy as np

from service.scheduler import kernels
from service.scheduler.memory import latest_compute
from service.scheduler.problem import Problem
from service.scheduler.timeline import Timeline
from worker.program import COMPUTE_LANE, Instruction, receive_lane, send_lane


def compile_programs(timeline: Timeline) -> dict[str, list[Instruction]]:
    """The program of every mesh; each training program ends with REDUCE and STEP."""
    rank = np.empty(timeline.problem.tasks, dtype=np.int64)
    rank[timeline.sequence] = np.arange(len(timeline.sequence))
    local = np.full(timeline.problem.tasks, -1, dtype=np.int64)
    return {
        mesh.name: _compile_mesh(timeline, index, rank, local)
        for index, mesh in enumerate(timeline.problem.spec.meshes)
    }


def _compile_mesh(timeline: Timeline, mesh: int, rank: np.ndarray, local: np.ndarray) -> list[Instruction]:
    problem = timeline.problem
    kinds = timeline.sequence // problem.microbatches
    sends, receives = problem.sender_of_kind[kinds] == mesh, problem.receiver_of_kind[kinds] == mesh
    tasks = timeline.sequence[sends | receives]
    kinds = tasks // problem.microbatches
    transfer = kinds >= 3 * problem.stages
    receiving = transfer & (problem.receiver_of_kind[kinds] == mesh)
    lane, names = number_lanes(problem, mesh, kinds, receiving)
    local[tasks] = np.arange(len(tasks))
    compute = timeline.lanes[mesh]
    latest = np.full(len(tasks), -1, dtype=np.int64)
    behind = latest_compute(timeline, compute, tasks[receiving], rank)
    latest[receiving] = np.where(behind >= 0, local[compute[behind]] if len(compute) else -1, -1)
    pointer, waits = kernels.compile_waits(
        tasks,
        receiving,
        lane,
        len(names),
        problem.microbatches,
        3 * problem.stages,
        *problem.dependency_arrays,
        problem.exists.reshape(-1),
        occupied_here(problem, kinds, receiving),
        problem.resource_count,
        latest,
        local,
    )
    final = [] if problem.inference else _final_waits(lane, names, pointer, waits)
    program = _instructions(problem, mesh, tasks, lane, names, pointer, waits, final)
    local[tasks] = -1
    return program


def number_lanes(
    problem: Problem, mesh: int, kinds: np.ndarray, receiving: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Lane number of each local instruction and the lanes' names: compute first, then by peer, sends before receives."""
    peer = np.where(receiving, problem.sender_of_kind[kinds], problem.receiver_of_kind[kinds])
    code = np.where(kinds < 3 * problem.stages, -1, 2 * peer + receiving)
    codes = np.union1d(code, [-1])
    meshes = problem.spec.meshes
    names = [COMPUTE_LANE]
    for value in codes[1:].tolist():
        name = meshes[value // 2].name
        names.append(receive_lane(name) if value % 2 else send_lane(name))
    return np.searchsorted(codes, code), names


def occupied_here(problem: Problem, kinds: np.ndarray, receiving: np.ndarray) -> np.ndarray:
    """The resource of this mesh that each local instruction occupies, −1 for none."""
    side = problem.resources[kinds]
    here = np.where(receiving, side[:, 1], side[:, 0])
    # a link belongs to the pair, and its lane already keeps its order
    link = problem.spec.network.contention == "link" and problem.spec.overlap
    return np.where((kinds >= 3 * problem.stages) & link, -1, here)


def _final_waits(lane: np.ndarray, names: list[str], pointer: np.ndarray, waits: np.ndarray) -> list[int]:
    """STEP ends the step and every buffer with it: it waits for the last send of each lane, unless implied."""
    before, number = kernels.clocks(lane, len(names), pointer, waits)
    known = np.zeros(len(names), dtype=np.int32)
    compute = np.flatnonzero(lane == 0)
    if len(compute):
        known = before[compute[-1]].copy()
        known[0] = number[compute[-1]]
    final = []
    for index, name in enumerate(names):
        members = np.flatnonzero(lane == index)
        if name.startswith("send:") and len(members) and known[index] < number[members[-1]]:
            final.append(int(members[-1]))
    # a send may wait for another: keep those that no other one implies
    return [i for i in final if not any(before[j, lane[i]] >= number[i] for j in final if j != i)]


def _instructions(
    problem: Problem,
    mesh: int,
    tasks: np.ndarray,
    lane: np.ndarray,
    names: list[str],
    pointer: np.ndarray,
    waits: np.ndarray,
    final: list[int],
) -> list[Instruction]:
    waited = np.zeros(len(tasks), dtype=bool)
    waited[waits] = True
    waited[final] = True
    event = (np.cumsum(waited) - 1).tolist()
    records = [number if flag else None for number, flag in zip(event, waited.tolist(), strict=True)]
    events = [event[index] for index in waits.tolist()]
    bounds = pointer.tolist()
    labels = [_label(problem, mesh, kind) for kind in range(problem.kinds)]
    fused = problem.fused.tolist()
    program = []
    for index, (task, number) in enumerate(zip(tasks.tolist(), lane.tolist(), strict=True)):
        kind, microbatch = divmod(task, problem.microbatches)
        op, stage, edge, peer = labels[kind]
        if op == "I" and fused[stage][microbatch]:
            op = "B"
        wait = tuple(sorted(events[bounds[index] : bounds[index + 1]]))
        program.append(Instruction(op, names[number], stage, microbatch, edge, peer, wait, records[index]))
    if not problem.inference:
        program.append(Instruction("REDUCE", COMPUTE_LANE))
        program.append(Instruction("STEP", COMPUTE_LANE, wait=tuple(sorted(event[index] for index in final))))
    return program


def _label(problem: Problem, mesh: int, kind: int) -> tuple[str, int, int | None, str | None]:
    """(op, stage, edge, peer) of a kind as this mesh sees it; a fused backward is called I here."""
    if kind < 3 * problem.stages:
        stage, op = divmod(kind, 3)
        return "FIW"[op], stage, None, None
    index, backward = divmod(kind - 3 * problem.stages, 2)
    transfer = problem.transfers[index]
    at_source = transfer.source_mesh == mesh
    op = ("SEND" if at_source != bool(backward) else "RECV") + ("_B" if backward else "_F")
    peer = transfer.target_mesh if at_source else transfer.source_mesh
    stage = transfer.source if at_source else transfer.targets[0]
    return op, stage, transfer.edge, problem.spec.meshes[peer].name
