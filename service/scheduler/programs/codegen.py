"""Compiles a timeline into programs: one instruction list for each mesh, with lanes, waits and events.

The target is worker/contract's instruction set. Knows nothing of how the timeline was found. STEP frees every
buffer of the step, so it waits for the last send of each lane.
"""

from __future__ import annotations

import numpy as np

from service.scheduler import kernels
from service.scheduler.problem.memory import latest_compute, send_buffer_waits
from service.scheduler.problem.problem import COMPUTE_RANK, LocalAction, Problem, actions_of_mesh
from service.scheduler.problem.timeline import Edges, Timeline
from worker.contract.program import COMPUTE_LANE, Instruction


def compile_programs(timeline: Timeline) -> dict[str, list[Instruction]]:
    """The program of every mesh; each training program ends with REDUCE and STEP."""
    held = send_buffer_waits(timeline)
    return {
        mesh.name: _compile_mesh(timeline, index, held)
        for index, mesh in enumerate(timeline.problem.spec.meshes)
    }


def _compile_mesh(timeline: Timeline, mesh: int, held: Edges) -> list[Instruction]:
    problem = timeline.problem
    actions = actions_of_mesh(problem, mesh)
    here = np.zeros(problem.kinds, dtype=bool)
    here[list(actions)] = True
    tasks = timeline.sequence[here[timeline.sequence // problem.microbatches]]
    kinds = tasks // problem.microbatches
    receiving = (kinds >= problem.compute_kinds) & (problem.receiver_of_kind[kinds] == mesh)
    lane, lane_names = _number_lanes(problem, actions, kinds)
    index = np.full(problem.tasks, -1, dtype=np.int64)
    index[tasks] = np.arange(len(tasks))
    compute = timeline.lanes[mesh]
    latest = np.full(len(tasks), -1, dtype=np.int64)
    behind = latest_compute(timeline, compute, tasks[receiving])
    latest[receiving] = np.where(behind >= 0, index[compute[behind]] if len(compute) else -1, -1)
    sent, waiting = (side[here[held[1] // problem.microbatches]] for side in held)
    latest[index[waiting]] = index[sent]
    local = kernels.MeshInstructions(
        microbatches=problem.microbatches,
        resource_count=problem.resource_count,
        needs=problem.dependency_rows,
        exists=problem.exists.reshape(-1),
        index=index,
        tasks=tasks,
        receiving=receiving,
        lane=lane,
        resource=occupied_resources(problem, kinds, receiving),
    )
    pointer, waits = kernels.compile_waits(local, len(lane_names), latest)
    final = [] if problem.inference else _waits_of_step(lane, lane_names, pointer, waits)
    return _build_instructions(problem, actions, tasks, pointer, waits, final)


def _number_lanes(
    problem: Problem, actions: dict[int, LocalAction], kinds: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """(lane number of each instruction, names of the lanes): compute first, then by peer, sends before receives."""
    names = {COMPUTE_RANK: COMPUTE_LANE} | {action.lane_rank: action.lane for action in actions.values()}
    rank = np.full(problem.kinds, COMPUTE_RANK, dtype=np.int64)
    for action in actions.values():
        rank[action.kind] = action.lane_rank
    ranks = np.union1d(rank[kinds], [COMPUTE_RANK])
    return np.searchsorted(ranks, rank[kinds]), [names[value] for value in ranks.tolist()]


def occupied_resources(problem: Problem, kinds: np.ndarray, receiving: np.ndarray) -> np.ndarray:
    """The resource of this mesh that each local instruction occupies, −1 for none."""
    side = problem.resources[kinds]
    here = np.where(receiving, side[:, 1], side[:, 0])
    # a link belongs to the pair, and its lane already keeps its order
    on_link = (side[:, 0] >= problem.meshes) & (side[:, 1] < 0)
    return np.where(on_link, -1, here)


def _waits_of_step(lane: np.ndarray, names: list[str], pointer: np.ndarray, waits: np.ndarray) -> list[int]:
    """STEP ends the step and every buffer with it: it waits for the last send of each lane, unless implied."""
    before, number = kernels.vector_clocks(lane, len(names), pointer, waits)
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
    # a send may wait for another: keep the waits that no other one implies
    return [i for i in final if not any(before[j, lane[i]] >= number[i] for j in final if j != i)]


def _build_instructions(
    problem: Problem,
    actions: dict[int, LocalAction],
    tasks: np.ndarray,
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
    meshes, fused = [mesh.name for mesh in problem.spec.meshes], problem.fused.tolist()
    program = []
    for index, task in enumerate(tasks.tolist()):
        kind, microbatch = divmod(task, problem.microbatches)
        action = actions[kind]
        op = "B" if action.op == "I" and fused[action.stage][microbatch] else action.op
        peer = None if action.peer is None else meshes[action.peer]
        wait = tuple(sorted(events[bounds[index] : bounds[index + 1]]))
        program.append(
            Instruction(op, action.lane, action.stage, microbatch, action.edge, peer, wait, records[index])
        )
    if not problem.inference:
        program.append(Instruction("REDUCE", COMPUTE_LANE))
        program.append(Instruction("STEP", COMPUTE_LANE, wait=tuple(sorted(event[index] for index in final))))
    return program
