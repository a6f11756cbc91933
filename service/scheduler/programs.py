"""Instruction lists read back into arrays, every instruction checked by itself; for verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from service.scheduler import kernels
from service.scheduler.problem import Problem, build_problem
from service.scheduler.spec import PipelineSpec
from worker.program import COMPUTE_LANE, COMPUTE_OPS, FINAL_OPS, Instruction, receive_lane, send_lane


class PlanError(ValueError):
    """Programs that would not carry out their spec; the message names mesh and instruction."""


@dataclass(frozen=True, eq=False)
class MeshProgram:
    """One mesh's program as arrays over its instructions.

    `task` is −1 for REDUCE and STEP; `before[i, l]` counts the instructions of lane l that have
    ended, by this mesh's own lanes and waits, when i starts; `number[i]` is i's own count on its lane.
    """

    mesh: int
    name: str
    instructions: Sequence[Instruction]
    trains: bool
    microbatches: int
    task: np.ndarray
    receiving: np.ndarray
    lane: np.ndarray
    lane_names: list[str]
    wait_pointer: np.ndarray
    waits: np.ndarray
    peer: np.ndarray
    before: np.ndarray
    number: np.ndarray

    @cached_property
    def compute(self) -> np.ndarray:
        """Compute tasks in lane order."""
        return self.task[(self.lane == 0) & (self.task >= 0)]

    def transfers_to(self, mesh: int) -> np.ndarray:
        return self.task[(self.peer == mesh) & ~self.receiving]

    def transfers_from(self, mesh: int) -> np.ndarray:
        return self.task[(self.peer == mesh) & self.receiving]

    def show(self, index: int) -> str:
        return str(self.instructions[index])

    def tell(self, index: int) -> str:
        return f"mesh {self.name!r}: {self.show(index)} (instruction {index})"


def read_programs(
    spec: PipelineSpec, programs: Mapping[str, Sequence[Instruction]]
) -> tuple[Problem, list[MeshProgram]]:
    """The problem (with B or I and W as the programs have them) and each mesh's checked program."""
    problem = build_problem(spec)
    names = {mesh.name for mesh in spec.meshes}
    if unknown := sorted(set(programs) - names):
        raise PlanError(f"there is a program for mesh {unknown[0]!r}, which does not exist")
    if missing := sorted(names - set(programs)):
        raise PlanError(f"mesh {missing[0]!r} has no program")
    if spec.schedule == "csv":
        backward = any(ins.op in ("B", "I") for program in programs.values() for ins in program)
        problem = build_problem(spec, inference=not backward)
    problem = problem.with_fused(_fused(problem, programs))
    meshes = [_read_mesh(problem, index, programs[mesh.name]) for index, mesh in enumerate(spec.meshes)]
    for mesh in meshes:
        _check_complete(problem, mesh)
    return problem, meshes


def _fused(problem: Problem, programs: Mapping[str, Sequence[Instruction]]) -> np.ndarray:
    fused = np.full((problem.stages, problem.microbatches), problem.inference)
    for program in programs.values():
        for instruction in program:
            if instruction.op == "B":
                stage, microbatch = instruction.stage, instruction.microbatch
                if stage in range(problem.stages) and microbatch in range(problem.microbatches):
                    fused[stage, microbatch] = True
    return fused


def _read_mesh(problem: Problem, mesh: int, instructions: Sequence[Instruction]) -> MeshProgram:
    name = problem.spec.meshes[mesh].name
    places = _places(problem, mesh)
    count = len(instructions)
    task = np.full(count, -1, dtype=np.int64)
    receiving = np.zeros(count, dtype=bool)
    lane = np.zeros(count, dtype=np.int64)
    peer = np.full(count, -1, dtype=np.int64)
    lane_number = {COMPUTE_LANE: 0}
    recorded: dict[int, int] = {}
    waits: list[int] = []
    pointer = np.zeros(count + 1, dtype=np.int64)
    for index, ins in enumerate(instructions):
        if ins.op not in FINAL_OPS:
            place = places.get((ins.op, ins.stage, ins.edge, ins.peer))
            if (
                place is None
                or not 0 <= (ins.microbatch if ins.microbatch is not None else -1) < problem.microbatches
            ):
                raise PlanError(
                    f"mesh {name!r}: {ins} (instruction {index}) is nothing that this mesh has to do"
                )
            kind, receives, other, wanted_lane = place
            if ins.lane != wanted_lane:
                raise PlanError(
                    f"mesh {name!r}: {ins} (instruction {index}) is on lane {ins.lane!r} instead of {wanted_lane!r}"
                )
            task[index] = kind * problem.microbatches + ins.microbatch
            receiving[index] = receives
            peer[index] = other
            lane[index] = lane_number.setdefault(wanted_lane, len(lane_number))
        elif ins.lane != COMPUTE_LANE:
            raise PlanError(f"mesh {name!r}: {ins.op} is on lane {ins.lane!r} instead of {COMPUTE_LANE!r}")
        for event in ins.wait:
            if event not in recorded:
                raise PlanError(
                    f"mesh {name!r}: {ins} (instruction {index}) waits for event {event}, which nothing before it "
                    "records"
                )
            waits.append(recorded[event])
        pointer[index + 1] = len(waits)
        if ins.record is not None:
            if ins.record in recorded:
                raise PlanError(
                    f"mesh {name!r}: {ins} (instruction {index}) records event {ins.record} again"
                )
            recorded[ins.record] = index
    final = [ins.op for ins in instructions if ins.op in FINAL_OPS]
    wanted = [] if problem.inference else list(FINAL_OPS)
    if final != wanted or [ins.op for ins in instructions[count - len(wanted) :]] != wanted:
        raise PlanError(
            f"mesh {name!r} ends with {final or 'nothing'}: it must end with {wanted or 'its last action'}"
        )
    wait_array = np.array(waits, dtype=np.int64)
    before, number = kernels.clocks(lane, len(lane_number), pointer, wait_array)
    return MeshProgram(
        mesh=mesh,
        name=name,
        instructions=instructions,
        trains=not problem.inference,
        microbatches=problem.microbatches,
        task=task,
        receiving=receiving,
        lane=lane,
        lane_names=list(lane_number),
        wait_pointer=pointer,
        waits=wait_array,
        peer=peer,
        before=before,
        number=number,
    )


def _places(problem: Problem, mesh: int) -> dict[tuple, tuple[int, bool, int, str]]:
    """(op, stage, edge, peer) of everything this mesh may do → (kind, whether it receives, peer mesh, lane)."""
    places: dict[tuple, tuple[int, bool, int, str]] = {}
    for stage in np.flatnonzero(problem.mesh_of_stage == mesh).tolist():
        for op, number in zip(COMPUTE_OPS, (0, 1, 1, 2), strict=True):
            places[op, stage, None, None] = (problem.kind(stage, number), False, -1, COMPUTE_LANE)
    for index, transfer in enumerate(problem.transfers):
        for backward in (0, 1):
            kind = problem.transfer_kind(index, backward)
            sender, receiver = int(problem.sender_of_kind[kind]), int(problem.receiver_of_kind[kind])
            if mesh not in (sender, receiver):
                continue
            receives = mesh == receiver
            other = sender if receives else receiver
            name = problem.spec.meshes[other].name
            op = ("RECV" if receives else "SEND") + ("_B" if backward else "_F")
            stage = transfer.source if mesh == transfer.source_mesh else transfer.targets[0]
            lane = receive_lane(name) if receives else send_lane(name)
            places[op, stage, transfer.edge, name] = (kind, receives, other, lane)
    return places


def _check_complete(problem: Problem, program: MeshProgram) -> None:
    tasks = program.task[program.task >= 0]
    counts = np.bincount(tasks, minlength=problem.tasks)
    kinds = np.arange(problem.kinds)
    here = (problem.sender_of_kind[kinds] == program.mesh) | (problem.receiver_of_kind[kinds] == program.mesh)
    expected = (problem.exists & here[:, None]).reshape(-1)
    extra = np.flatnonzero(counts > expected)
    if len(extra):
        index = int(np.flatnonzero(program.task == extra[0])[-1])
        why = (
            "stands there more than once" if expected[extra[0]] else "must not be there beside the other form"
        )
        raise PlanError(f"{program.tell(index)} {why}")
    missing = np.flatnonzero(counts < expected)
    if len(missing):
        raise PlanError(
            f"mesh {program.name!r} never runs {_missing_name(problem, program, int(missing[0]))}"
        )


def _missing_name(problem: Problem, program: MeshProgram, task: int) -> str:
    kind, microbatch = divmod(task, problem.microbatches)
    for (op, stage, edge, peer), place in _places(problem, program.mesh).items():
        if place[0] == kind and op != "B":
            return str(Instruction(op, place[3], stage, microbatch, edge, peer))
    raise AssertionError(f"kind {kind} has no place on mesh {program.name}")
