"""Proves programs from spec and instructions: causality, exclusivity, memory limits, message order, no deadlock.

Takes no timeline, order or wait from the planner: all are derived again from the instructions, under rendezvous
semantics (a transfer starts when both its send and its receive have come up). It does share with the planner what
the spec means: the Problem (dependencies, costs, resources), the accounting of memory, and which resource an
instruction occupies; a mistake there is shared. The checker of the tests reads spec and plan anew and shares
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from service.scheduler import kernels
from service.scheduler.kernels import FORWARD, TOLERANCE
from service.scheduler.problem.memory import (
    buffers_in_use,
    in_flight_violation,
    last_use,
    over_memory,
    peak_activation,
)
from service.scheduler.problem.problem import Problem, local_actions
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.problem.timeline import Timeline, action_name
from service.scheduler.programs.codegen import occupied_resources
from service.scheduler.programs.decode import DecodedProgram, PlanError, read_programs
from service.scheduler.programs.replay import Replay, replay
from worker.contract.program import Instruction

__all__ = ["PlanError", "check_programs", "check_slots"]


def check_programs(spec: PipelineSpec, programs: Mapping[str, Sequence[Instruction]]) -> Replay:
    """The programs played out; raises PlanError, naming instruction and mesh, unless they carry out the step.

    Proves: every action and transfer once and on its lane; every input there before its use by the
    lanes' orders and waits; exclusive resources never shared; forwards of sinks in order, where microbatches are
    interchangeable; both ends of each pair in the same message order; no cycle of waits; activation and
    receive-buffer limits under any timing; receives posted no earlier than the timeline makes safe; no buffer freed
    before its send ends.
    """
    problem, meshes = read_programs(spec, programs)
    for program in meshes:
        _check_forward_order(problem, program)
        _check_local_causes(problem, program)
        _check_step(program)
    _check_message_order(problem, meshes)
    played = replay(problem, meshes)
    for mesh, peak, limit in over_memory(played.timeline):
        raise PlanError(f"mesh {mesh!r} holds {peak} bytes, over its memory_bytes {limit}")
    for program in meshes:
        _check_activations(problem, program)
        _check_in_flight(problem, program)
        _check_receives(problem, program, played)
    return played


def check_slots(planned: Timeline, played: Replay) -> None:
    """Raise PlanError unless the programs start every slot when the plan says.

    With contention `none` nothing is compared: the plan lets the messages of one pair overlap, programs do not.
    """
    problem = planned.problem
    if problem.spec.network.contention == "none" and problem.spec.overlap:
        return
    tolerance = TOLERANCE * max(planned.makespan, played.timeline.makespan)
    late = np.abs(played.timeline.start - planned.start)
    worst = int(np.where(problem.exists.reshape(-1), late, 0.0).argmax())
    if late[worst] > tolerance:
        kind, microbatch = divmod(worst, problem.microbatches)
        action = next(a for a in local_actions(problem) if a.kind == kind)
        raise PlanError(
            f"mesh {problem.spec.meshes[action.mesh].name!r}: {action.op} of stage {action.stage}, microbatch "
            f"{microbatch}, is planned to start at {planned.start[worst]!r} s, but the programs start it at "
            f"{played.timeline.start[worst]!r} s"
        )


def _check_forward_order(problem: Problem, program: DecodedProgram) -> None:
    if not problem.interchangeable:  # their order is part of the plan
        return
    kinds, microbatches = np.divmod(program.compute, problem.microbatches)
    for stage in range(problem.stages):
        if problem.targets[stage] or problem.mesh_of_stage[stage] != program.mesh:
            continue
        order = microbatches[kinds == problem.kind(stage, FORWARD)]
        wrong = np.flatnonzero(np.diff(order) < 0)
        if len(wrong):
            first, second = order[wrong[0]], order[wrong[0] + 1]
            raise PlanError(
                f"mesh {program.name!r}: the last stage {stage} runs forward {first} before {second}; "
                "losses are matched by order, so its forwards must ascend"
            )


def _check_local_causes(problem: Problem, program: DecodedProgram) -> None:
    place = np.full(problem.tasks, -1, dtype=np.int64)
    known = program.task >= 0
    place[program.task[known]] = np.flatnonzero(known)
    kinds = np.where(known, program.task // problem.microbatches, 0)
    local = kernels.MeshInstructions(
        microbatches=problem.microbatches,
        resource_count=problem.resource_count,
        needs=problem.dependency_rows,
        exists=problem.exists.reshape(-1),
        index=place,
        tasks=program.task,
        receiving=program.receiving,
        lane=program.lane,
        resource=occupied_resources(problem, kinds, program.receiving),
    )
    index, needed, reason = kernels.first_unmet_dependency(local, program.before, program.number)
    if reason == 1:
        raise PlanError(
            f"{program.describe(index)} may start before {program.show(needed)} has ended: a wait is missing"
        )
    if reason == 2:
        raise PlanError(
            f"{program.describe(index)} may run at the same time as {program.show(needed)}, but "
            f"contention {problem.contention_of(int(kinds[index]))!r}, overlap {problem.spec.overlap} lets only one of "
            "them run: a wait is missing"
        )


def _check_step(program: DecodedProgram) -> None:
    """STEP ends the step: buffers of the step are freed, so every send must have ended."""
    if not program.trains:
        return
    step = len(program.instructions) - 1
    for lane, name in enumerate(program.lane_names):
        members = np.flatnonzero(program.lane == lane)
        if name.startswith("send:") and program.before[step, lane] < program.number[members[-1]]:
            raise PlanError(
                f"{program.describe(step)} frees the buffer of {program.show(int(members[-1]))} before that send has "
                "ended: a wait is missing"
            )


def _check_message_order(problem: Problem, meshes: list[DecodedProgram]) -> None:
    for sender in meshes:
        for receiver in meshes:
            sent = sender.transfers_to(receiver.mesh)
            received = receiver.transfers_from(sender.mesh)
            if np.array_equal(sent, received):
                continue
            at = next(i for i, (a, b) in enumerate(zip(sent, received, strict=True)) if a != b)
            raise PlanError(
                f"message {at} from {sender.name!r} to {receiver.name!r} is sent as {_transfer_name(problem, sent[at])} "
                f"but received as {_transfer_name(problem, received[at])}: both ends must use one order"
            )


def _transfer_name(problem: Problem, task: int) -> str:
    kind, microbatch = divmod(int(task), problem.microbatches)
    index, backward = problem.transfer_and_direction(kind)
    what = "gradient" if backward else "tensor"
    return f"the {what} of edge {problem.transfers[index].edge}, microbatch {microbatch}"


def _check_activations(problem: Problem, program: DecodedProgram) -> None:
    limit = problem.spec.meshes[program.mesh].activation_limit_bytes
    peak, position = peak_activation(problem, program.compute)
    if limit is not None and limit < peak:
        raise PlanError(
            f"mesh {program.name!r} holds {peak} bytes of activations at "
            f"{action_name(problem, program.compute[position])}, over its activation_limit_bytes {limit}"
        )


def _check_in_flight(problem: Problem, program: DecodedProgram) -> None:
    message = in_flight_violation(problem, program.compute)
    if message is not None:
        raise PlanError(f"mesh {program.name!r}: {message}")


def _check_receives(problem: Problem, program: DecodedProgram, played: Replay) -> None:
    index = np.flatnonzero(program.receiving)
    if not len(index):
        return
    received = program.task[index]
    posted = program.before[index, 0].astype(np.int64) - 1
    position = np.full(problem.tasks, -1, dtype=np.int64)
    position[program.compute] = np.arange(len(program.compute))
    limit = int(problem.receive_limit[program.mesh])
    peak = buffers_in_use(len(program.compute), posted, last_use(problem, received, position))
    if 0 <= limit < peak:
        raise PlanError(
            f"mesh {program.name!r} may hold {peak} received tensors at once, over its receive_buffer_limit {limit}: "
            "a receive is posted too early"
        )
    safe = played.latest_compute(program, received)
    early = np.flatnonzero(posted < safe)
    if len(early):
        compute = program.compute[safe[early[0]]]
        raise PlanError(
            f"{program.describe(int(index[early[0]]))} is posted before {action_name(problem, compute)} has ended and "
            "would spin on the accelerator: a wait is missing"
        )
