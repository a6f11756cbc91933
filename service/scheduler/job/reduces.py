"""Places the gradient all-reduces of each mesh in a plan: one slot per bucket, on the REDUCE lane.

They are placed when the pipeline's own order stands, and change nothing of it. A slot begins once the last W or
B of its parameters and the bucket before it have ended and what it needs is free for its whole length: with
contention full-duplex or half-duplex the mesh's ports, with `overlap: false` its compute lane too, with link
nothing. The program waits for the instructions that delayed it; only the REDUCE behind the last compute action
waits for a bucket, so no wait closes a circle. Parameters that several meshes hold are summed behind the last
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from service.scheduler.job.cut import layer_ranges
from service.scheduler.job.heterogeneous import profile_of_mesh
from service.scheduler.job.joint import JobPlan, longest_update_s
from service.scheduler.job.network import CrossMeshAllReduce
from service.scheduler.kernels import TOLERANCE
from service.scheduler.problem.spec import PipelineSpec, link_contention
from service.scheduler.programs.decode import PlanError
from service.scheduler.programs.plan import Plan, Slot
from worker.contract.buckets import REDUCE_LANE, Gradient, is_bucket, with_buckets
from worker.contract.costs import UpdateCosts, mesh_update
from worker.contract.profile import LayerProfile
from worker.contract.program import COMPUTE_LANE, Instruction, Program

ReduceSeconds = Callable[[int, int], float]
"""Seconds of the sum of a number of tensors with a number of bytes in all."""


@dataclass(frozen=True)
class MeshReduces:
    """The gradients that a mesh sums before the makespan ends, and the seconds of their sums."""

    gradients: Sequence[Gradient]
    seconds: ReduceSeconds


def place_reduces(spec: PipelineSpec, plan: Plan, reduces: Mapping[str, MeshReduces]) -> Plan:
    """`plan` with the slots and instructions of the buckets of the meshes in `reduces`; checked."""
    slots: list[Slot] = []
    programs = dict(plan.programs)
    for mesh in spec.meshes:
        here = [slot for slot in plan.slots if slot.mesh == mesh.name]
        slots += here
        if mesh.name in reduces:
            bucket_slots, program = _place_buckets(spec, plan.program(mesh.name), here, reduces[mesh.name])
            slots += bucket_slots
            programs[mesh.name] = [instruction.to_json() for instruction in program]
    with_buckets_placed = plan.model_copy(update={"slots": slots, "programs": programs})
    check_reduces(spec, with_buckets_placed)
    return with_buckets_placed


def reduces_end_s(plan: Plan) -> float:
    """Seconds from the start of the step to the end of the last bucket; 0 without any."""
    return max((slot.end_s for slot in plan.slots if slot.lane == REDUCE_LANE), default=0.0)


def _place_buckets(
    spec: PipelineSpec, program: Program, here: Sequence[Slot], reduces: MeshReduces
) -> tuple[list[Slot], list[Instruction]]:
    bucketed = with_buckets(program, reduces.gradients)
    gradient_of = {gradient.name: gradient for gradient in reduces.gradients}
    slot_of = _slot_by_instruction(spec, bucketed.program, here)
    out = list(bucketed.program)
    free_event = 1 + max((item.record for item in out if item.record is not None), default=-1)
    excludes = _reduce_exclusion(spec)
    busy = sorted((slot.start_s, slot.end_s) for slot in here if excludes(slot))
    bucket_slots: list[Slot] = []
    lane_s, recorder = 0.0, {item.record: k for k, item in enumerate(out) if item.record is not None}
    behind: dict[int, int] = {}
    for index, names in sorted(bucketed.buckets.items()):
        ready_s = max(lane_s, *(slot_of[recorder[event]].end_s for event in out[index].wait))
        length_s = reduces.seconds(len(names), sum(gradient_of[name].size_bytes for name in names))
        start_s = _earliest_start_s(busy, ready_s, length_s)
        stage = spec.stages[out[index].stage].name
        bucket_slots.append(
            Slot(here[0].mesh, REDUCE_LANE, "REDUCE", stage, None, start_s, start_s + length_s)
        )
        delaying = (
            _delaying_instructions(excludes, out, slot_of, ready_s, start_s) if start_s > ready_s else []
        )
        for before in delaying:
            if out[before].record is None:
                out[before], free_event = replace(out[before], record=free_event), free_event + 1
            out[index] = replace(out[index], wait=tuple(sorted({*out[index].wait, out[before].record})))
        behind[index] = max([index, *delaying, *behind.values()])
        lane_s = start_s + length_s
    return bucket_slots, _enqueue_behind(out, behind)


def _enqueue_behind(program: Sequence[Instruction], behind: Mapping[int, int]) -> list[Instruction]:
    """The program with every bucket behind the instructions it waits for: a stream does not wait for an event that is not
    recorded yet."""
    moved: dict[int, list[Instruction]] = {}
    for index, at in behind.items():
        moved.setdefault(at, []).append(program[index])
    ordered: list[Instruction] = []
    for index, instruction in enumerate(program):
        if index not in behind:
            ordered.append(instruction)
        ordered += moved.get(index, [])
    return ordered


def _slot_by_instruction(spec: PipelineSpec, program: Program, here: Sequence[Slot]) -> dict[int, Slot]:
    number = {stage.name: index for index, stage in enumerate(spec.stages)}
    planned = {(s.action, number[s.stage], s.microbatch, s.edge): s for s in here}
    slots = {
        index: planned.get((item.op, item.stage, item.microbatch, item.edge))
        for index, item in enumerate(program)
    }
    return {index: slot for index, slot in slots.items() if slot is not None}


def _reduce_exclusion(spec: PipelineSpec) -> Callable[[Slot], bool]:
    """The test for slots of the pipeline that occupy a resource that a sum on their mesh needs."""
    contention = link_contention(spec.network)

    def excludes(slot: Slot) -> bool:
        if slot.lane == COMPUTE_LANE or not spec.overlap:
            return slot.lane != REDUCE_LANE and not spec.overlap
        direction, _, peer = slot.lane.partition(":")
        ends = (slot.mesh, peer) if direction == "send" else (peer, slot.mesh)
        return slot.lane != REDUCE_LANE and contention(*ends) in ("full-duplex", "half-duplex")

    return excludes


def _earliest_start_s(busy: Sequence[tuple[float, float]], ready_s: float, length_s: float) -> float:
    """The first instant at or after `ready_s` from which nothing is busy for `length_s`."""
    start_s = ready_s
    for begin_s, end_s in busy:
        if begin_s < start_s + length_s and end_s > start_s:
            start_s = end_s
    return start_s


def _delaying_instructions(
    excludes: Callable[[Slot], bool],
    out: Sequence[Instruction],
    slot_of: Mapping[int, Slot],
    ready_s: float,
    start_s: float,
) -> list[int]:
    """The last instruction of every lane that occupied a needed resource between `ready_s` and `start_s`."""
    last: dict[str, int] = {}
    for index, slot in slot_of.items():
        if excludes(slot) and slot.end_s > ready_s and slot.end_s <= start_s:
            last[out[index].lane] = index
    return sorted(last.values())


def check_reduces(spec: PipelineSpec, plan: Plan) -> None:
    """Raise PlanError unless the buckets of a plan are correct, by its programs and slots alone.

    Proves: a bucket comes behind the last W or B of its stage; all collectives of a mesh are in one order (its buckets on
    one lane, the REDUCE of the rest behind the last of them, STEP behind that), which all its workers run; nothing else
    waits for a bucket, so that no worker is kept from coming to its own; slots are where the programs and the
    exclusive resources allow.
    """
    for mesh in plan.programs:
        program = plan.program(mesh)
        if not any(is_bucket(item) for item in program):
            continue
        _check_reduce_program(mesh, program)
        _check_reduce_slots(spec, mesh, program, [slot for slot in plan.slots if slot.mesh == mesh])


def _check_reduce_program(mesh: str, program: Program) -> None:
    buckets = [k for k, item in enumerate(program) if is_bucket(item)]
    compute = [k for k, item in enumerate(program) if item.lane == COMPUTE_LANE]
    recorder = {item.record: k for k, item in enumerate(program) if item.record is not None}
    final = next((k for k in compute if program[k].op == "REDUCE"), None)
    for k in buckets:
        behind = [j for j in compute if program[j].op in ("B", "W") and program[j].stage == program[k].stage]
        waited = [recorder[event] for event in program[k].wait if event in recorder]
        if not behind or not any(program[j].lane == COMPUTE_LANE and j >= behind[-1] for j in waited):
            raise PlanError(
                f"mesh {mesh!r}: {program[k]} does not wait for the last backward of its stage: its gradients are not whole"
            )
    if final is None or not any(recorder.get(event) == buckets[-1] for event in program[final].wait):
        raise PlanError(
            f"mesh {mesh!r}: REDUCE does not wait for the last bucket: two workers could meet the sums of the mesh in "
            "different orders"
        )
    if not any(program[k].op == "STEP" and k > final for k in compute):
        raise PlanError(f"mesh {mesh!r}: STEP does not come behind REDUCE")
    events = {program[k].record for k in buckets} - {None}
    for k, item in enumerate(program):
        if k != final and not is_bucket(item) and events & {*item.wait}:
            raise PlanError(
                f"mesh {mesh!r}: {item} waits for a bucket, which waits for other workers: only REDUCE may"
            )
        if is_bucket(item) and any(recorder.get(event, k) > k for event in item.wait):
            raise PlanError(f"mesh {mesh!r}: {item} waits for what its program enqueues later")


def _check_reduce_slots(spec: PipelineSpec, mesh: str, program: Program, here: Sequence[Slot]) -> None:
    slots, excludes = [slot for slot in here if slot.lane == REDUCE_LANE], _reduce_exclusion(spec)
    buckets = [spec.stages[item.stage].name for item in program if is_bucket(item)]
    if [slot.stage for slot in slots] != buckets:
        raise PlanError(f"mesh {mesh!r}: its buckets have other slots than its program has instructions")
    slack = TOLERANCE * max((slot.end_s for slot in here), default=0.0)
    for before, slot in zip([None, *slots], slots, strict=False):
        made = max(s.end_s for s in here if s.stage == slot.stage and s.action in ("B", "W"))
        if slot.start_s < made - slack:
            raise PlanError(
                f"mesh {mesh!r}: a sum of stage {slot.stage} is planned at {slot.start_s!r} s, its last backward ends at "
                f"{made!r} s"
            )
        if before is not None and slot.start_s < before.end_s - slack:
            raise PlanError(
                f"mesh {mesh!r}: sums of stages {before.stage} and {slot.stage} overlap on their lane"
            )
        for other in here:
            if excludes(other) and other.start_s < slot.end_s - slack and other.end_s > slot.start_s + slack:
                raise PlanError(
                    f"mesh {mesh!r}: a sum of stage {slot.stage} and {other.action} of {other.stage} are planned at one "
                    f"time, and contention {spec.network.contention!r}, overlap {spec.overlap} lets only one of them run"
                )


def plan_gradient_reduces(
    planned: JobPlan,
    profile: LayerProfile,
    costs: UpdateCosts,
    workers: Mapping[str, int],
    across: CrossMeshAllReduce | None = None,
) -> JobPlan:
    """`planned` with the all-reduces over the `workers` of each mesh as slots of its plan; unchanged where no costs of
    all-reduces were measured.

    Parameters that several meshes hold are summed over these first, priced by `across`, behind the last backward.
    """
    spec = planned.partition.spec
    names = [layer.name for layer in profile.layers]
    stage_starts = [names.index(name) for name in planned.partition.stage_starts]
    layers: dict[str, list[int]] = {mesh.name: [] for mesh in spec.meshes}
    users: dict[str, list[int]] = {}
    for index, (stage, (first, end)) in enumerate(
        zip(spec.stages, layer_ranges(stage_starts, len(names)), strict=True)
    ):
        layers[stage.mesh].extend(range(first, end))
        for layer in profile.layers[first:end]:
            for name in layer.parameters:
                if index not in users.setdefault(name, []):
                    users[name].append(index)
    number = {mesh.name: index for index, mesh in enumerate(spec.meshes)}
    reduces: dict[str, MeshReduces] = {}
    for mesh, count in workers.items():
        cost = costs.collective_cost(mesh)
        if count < 2 or cost is None:
            continue
        gradients = [
            Gradient(name, tuple(stages), profile_of_mesh(profile, number[mesh]).parameter_sizes[name], "")
            for name, stages in users.items()
            if name not in profile.frozen_parameters and {spec.stages[k].mesh for k in stages} == {mesh}
        ]
        if gradients:
            reduces[mesh] = MeshReduces(gradients, cost.seconds)
    if not reduces:
        return planned
    plan = place_reduces(spec, planned.plan, reduces)
    update = tuple(
        mesh_update(
            mesh,
            mesh_layers,
            profile_of_mesh(profile, number[mesh]),
            costs,
            early={g.name for g in reduces[mesh].gradients} if mesh in reduces else (),
        )
        for mesh, mesh_layers in layers.items()
    )
    if across is not None:
        update = across.with_all_reduces(update, profile, list(layers.values()))
    tail_s = max(0.0, reduces_end_s(plan) - plan.makespan_s)
    return replace(planned, plan=plan, update=update, update_s=tail_s + longest_update_s(update))
