"""Decodes instruction lists into arrays and checks each instruction by itself; the first half of `check_programs`.

Raises PlanError, naming mesh and instruction. Reads only spec and programs, no timeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from service.scheduler import kernels
from service.scheduler.problem.problem import LocalAction, Problem, actions_of_mesh, build_problem
from service.scheduler.problem.spec import PipelineSpec
from worker.contract.program import COMPUTE_LANE, FINAL_OPS, Instruction


class PlanError(ValueError):
    """Programs that would not carry out their spec; the message names mesh and instruction."""


@dataclass(frozen=True, eq=False)
class DecodedProgram:
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

    def describe(self, index: int) -> str:
        return f"mesh {self.name!r}: {self.show(index)} (instruction {index})"


def read_programs(
    spec: PipelineSpec, programs: Mapping[str, Sequence[Instruction]]
) -> tuple[Problem, list[DecodedProgram]]:
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
    problem = problem.with_fused(_fused_backwards(problem, programs))
    meshes = [_read_mesh(problem, index, programs[mesh.name]) for index, mesh in enumerate(spec.meshes)]
    for mesh in meshes:
        _check_complete(problem, mesh)
    return problem, meshes


def _fused_backwards(problem: Problem, programs: Mapping[str, Sequence[Instruction]]) -> np.ndarray:
    fused = np.full((problem.stages, problem.microbatches), problem.inference)
    for program in programs.values():
        for instruction in program:
            if instruction.op == "B":
                stage, microbatch = instruction.stage, instruction.microbatch
                if stage in range(problem.stages) and microbatch in range(problem.microbatches):
                    fused[stage, microbatch] = True
    return fused


def _read_mesh(problem: Problem, mesh: int, instructions: Sequence[Instruction]) -> DecodedProgram:
    name = problem.spec.meshes[mesh].name
    actions = _actions_by_instruction(problem, mesh)
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
            action = actions.get((ins.op, ins.stage, ins.edge, ins.peer))
            if (
                action is None
                or not 0 <= (ins.microbatch if ins.microbatch is not None else -1) < problem.microbatches
            ):
                raise PlanError(
                    f"mesh {name!r}: {ins} (instruction {index}) is nothing that this mesh has to do"
                )
            if ins.lane != action.lane:
                raise PlanError(
                    f"mesh {name!r}: {ins} (instruction {index}) is on lane {ins.lane!r} instead of {action.lane!r}"
                )
            task[index] = action.kind * problem.microbatches + ins.microbatch
            receiving[index] = action.receives
            peer[index] = -1 if action.peer is None else action.peer
            lane[index] = lane_number.setdefault(action.lane, len(lane_number))
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
    before, number = kernels.vector_clocks(lane, len(lane_number), pointer, wait_array)
    return DecodedProgram(
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


def _actions_by_instruction(problem: Problem, mesh: int) -> dict[tuple, LocalAction]:
    """(op, stage, edge, peer) of every instruction that this mesh may have → what it does."""
    names = [mesh.name for mesh in problem.spec.meshes]
    actions: dict[tuple, LocalAction] = {}
    for action in actions_of_mesh(problem, mesh).values():
        peer = None if action.peer is None else names[action.peer]
        for op in ("B", "I") if action.op == "I" else (action.op,):
            actions[op, action.stage, action.edge, peer] = action
    return actions


def _check_complete(problem: Problem, program: DecodedProgram) -> None:
    tasks = program.task[program.task >= 0]
    counts = np.bincount(tasks, minlength=problem.tasks)
    here = (problem.sender_of_kind == program.mesh) | (problem.receiver_of_kind == program.mesh)
    expected = (problem.exists & here[:, None]).reshape(-1)
    extra = np.flatnonzero(counts > expected)
    if len(extra):
        index = int(np.flatnonzero(program.task == extra[0])[-1])
        why = (
            "stands there more than once" if expected[extra[0]] else "must not be there beside the other form"
        )
        raise PlanError(f"{program.describe(index)} {why}")
    missing = np.flatnonzero(counts < expected)
    if len(missing):
        raise PlanError(
            f"mesh {program.name!r} never runs {_missing_name(problem, program, int(missing[0]))}"
        )


def _missing_name(problem: Problem, program: DecodedProgram, task: int) -> str:
    kind, microbatch = divmod(task, problem.microbatches)
    action = actions_of_mesh(problem, program.mesh)[kind]
    peer = None if action.peer is None else problem.spec.meshes[action.peer].name
    return str(Instruction(action.op, action.lane, action.stage, microbatch, action.edge, peer))
