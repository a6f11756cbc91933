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
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.programs.decode import PlanError
from service.scheduler.programs.plan import Plan, Slot
from worker.contract.buckets import REDUCE_LANE, Gradient, is_bucket, with_buckets
from worker.contract.costs import UpdateCosts, mesh_update
from worker.contract.profile import LayerProfile
from worker.contract.program import COMPUTE_LANE, Instruction, Program

ReduceSeconds = Callable[[int, int], float]
"""Of the sum of so many tensors of so many bytes in all."""


@dataclass(frozen=True)
class MeshReduces:
    """What a mesh sums as soon as it can: the gradients, and how long it takes."""

    gradients: Sequence[Gradient]
    seconds: ReduceSeconds


def place_reduces(spec: PipelineSpec, plan: Plan, sums: Mapping[str, MeshReduces]) -> Plan:
    """`plan` with the slots and instructions of the buckets of the meshes of `sums`; checked."""
    slots: list[Slot] = []
    programs = dict(plan.programs)
    for mesh in spec.meshes:
        here = [slot for slot in plan.slots if slot.mesh == mesh.name]
        slots += here
        if mesh.name in sums:
            found, program = _place_buckets(spec, plan.program(mesh.name), here, sums[mesh.name])
            slots += found
            programs[mesh.name] = [one.to_json() for one in program]
    made = plan.model_copy(update={"slots": slots, "programs": programs})
    check_reduces(spec, made)
    return made


def reduces_end_s(plan: Plan) -> float:
    """When the last bucket is summed; 0 without any."""
    return max((slot.end_s for slot in plan.slots if slot.lane == REDUCE_LANE), default=0.0)


def _place_buckets(
    spec: PipelineSpec, program: Program, here: Sequence[Slot], sums: MeshReduces
) -> tuple[list[Slot], list[Instruction]]:
    bucketed = with_buckets(program, sums.gradients)
    of = {gradient.name: gradient for gradient in sums.gradients}
    slot_of = _slot_by_instruction(spec, bucketed.program, here)
    out = list(bucketed.program)
    free = 1 + max((one.record for one in out if one.record is not None), default=-1)
    busy = sorted((slot.start_s, slot.end_s) for slot in here if _excludes_reduce(spec, slot))
    made: list[Slot] = []
    lane_s, recorder = 0.0, {one.record: k for k, one in enumerate(out) if one.record is not None}
    behind: dict[int, int] = {}
    for index, names in sorted(bucketed.buckets.items()):
        ready_s = max(lane_s, *(slot_of[recorder[event]].end_s for event in out[index].wait))
        length_s = sums.seconds(len(names), sum(of[name].size_bytes for name in names))
        start_s = _earliest_start_s(busy, ready_s, length_s)
        stage = spec.stages[out[index].stage].name
        made.append(Slot(here[0].mesh, REDUCE_LANE, "REDUCE", stage, None, start_s, start_s + length_s))
        delaying = _delaying_instructions(spec, out, slot_of, ready_s, start_s) if start_s > ready_s else []
        for before in delaying:
            if out[before].record is None:
                out[before], free = replace(out[before], record=free), free + 1
            out[index] = replace(out[index], wait=tuple(sorted({*out[index].wait, out[before].record})))
        behind[index] = max([index, *delaying, *behind.values()])
        lane_s = start_s + length_s
    return made, _enqueue_behind(out, behind)


def _enqueue_behind(program: Sequence[Instruction], behind: Mapping[int, int]) -> list[Instruction]:
    """Every bucket enqueued behind what it waits for: a stream does not wait for an event that nobody has recorded."""
    moved: dict[int, list[Instruction]] = {}
    for index, at in behind.items():
        moved.setdefault(at, []).append(program[index])
    found: list[Instruction] = []
    for index, one in enumerate(program):
        if index not in behind:
            found.append(one)
        found += moved.get(index, [])
    return found


def _slot_by_instruction(spec: PipelineSpec, program: Program, here: Sequence[Slot]) -> dict[int, Slot]:
    number = {stage.name: index for index, stage in enumerate(spec.stages)}
    planned = {(s.action, number[s.stage], s.microbatch, s.edge): s for s in here}
    found = {
        index: planned.get((one.op, one.stage, one.microbatch, one.edge)) for index, one in enumerate(program)
    }
    return {index: slot for index, slot in found.items() if slot is not None}


def _excludes_reduce(spec: PipelineSpec, slot: Slot) -> bool:
    """Whether a slot of the pipeline takes what a sum on its mesh needs."""
    if slot.lane == COMPUTE_LANE:
        return not spec.overlap
    return slot.lane != REDUCE_LANE and (
        spec.network.contention in ("full-duplex", "half-duplex") or not spec.overlap
    )


def _earliest_start_s(busy: Sequence[tuple[float, float]], ready_s: float, length_s: float) -> float:
    """The first instant from `ready_s` on from which nothing is busy for so long."""
    start_s = ready_s
    for begin_s, end_s in busy:
        if begin_s < start_s + length_s and end_s > start_s:
            start_s = end_s
    return start_s


def _delaying_instructions(
    spec: PipelineSpec,
    out: Sequence[Instruction],
    slot_of: Mapping[int, Slot],
    ready_s: float,
    start_s: float,
) -> list[int]:
    """Of every lane the last that was in the way between the two instants."""
    last: dict[str, int] = {}
    for index, slot in slot_of.items():
        if _excludes_reduce(spec, slot) and slot.end_s > ready_s and slot.end_s <= start_s:
            last[out[index].lane] = index
    return sorted(last.values())


def check_reduces(spec: PipelineSpec, plan: Plan) -> None:
    """Raise PlanError unless the buckets of a plan are what they are meant to be, by its programs and slots alone.

    Proves: a bucket comes behind the last W or B of its stage; all collectives of a mesh are in one order (its buckets on
    one lane, the REDUCE of the rest behind the last of them, STEP behind that), which all its workers run; nothing else
    waits for a bucket, so that no worker is kept from coming to its own; slots are where the programs and what is
    exclusive allow.
    """
    for mesh, instructions in plan.programs.items():
        program = plan.program(mesh)
        if not any(is_bucket(one) for one in program):
            continue
        del instructions
        _check_reduce_program(mesh, program)
        _check_reduce_slots(spec, mesh, program, [slot for slot in plan.slots if slot.mesh == mesh])


def _check_reduce_program(mesh: str, program: Program) -> None:
    buckets = [k for k, one in enumerate(program) if is_bucket(one)]
    compute = [k for k, one in enumerate(program) if one.lane == COMPUTE_LANE]
    recorder = {one.record: k for k, one in enumerate(program) if one.record is not None}
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
    for k, one in enumerate(program):
        if k != final and not is_bucket(one) and events & {*one.wait}:
            raise PlanError(
                f"mesh {mesh!r}: {one} waits for a bucket, which waits for other workers: only REDUCE may"
            )
        if is_bucket(one) and any(recorder.get(event, k) > k for event in one.wait):
            raise PlanError(f"mesh {mesh!r}: {one} waits for what its program enqueues later")


def _check_reduce_slots(spec: PipelineSpec, mesh: str, program: Program, here: Sequence[Slot]) -> None:
    slots = [slot for slot in here if slot.lane == REDUCE_LANE]
    buckets = [spec.stages[one.stage].name for one in program if is_bucket(one)]
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
            if (
                _excludes_reduce(spec, other)
                and other.start_s < slot.end_s - slack
                and other.end_s > slot.start_s + slack
            ):
                raise PlanError(
                    f"mesh {mesh!r}: a sum of stage {slot.stage} and {other.action} of {other.stage} are planned at one "
                    f"time, and contention {spec.network.contention!r}, overlap {spec.overlap} lets only one of them run"
                )


def plan_gradient_reduces(
    found: JobPlan,
    profile: LayerProfile,
    costs: UpdateCosts,
    workers: Mapping[str, int],
    across: CrossMeshAllReduce | None = None,
) -> JobPlan:
    """`found` with the sums over the `workers` of each mesh as slots of its plan; as it is where nobody measured sums.

    What several meshes hold is summed over them first, as `across` tells, and stays behind the last backward.
    """
    spec = found.partition.spec
    names = [layer.name for layer in profile.layers]
    begins = [names.index(begin) for begin in found.partition.stage_starts]
    layers: dict[str, list[int]] = {mesh.name: [] for mesh in spec.meshes}
    users: dict[str, list[int]] = {}
    for index, (stage, (first, end)) in enumerate(
        zip(spec.stages, layer_ranges(begins, len(names)), strict=True)
    ):
        layers[stage.mesh].extend(range(first, end))
        for layer in profile.layers[first:end]:
            for name in layer.parameters:
                if index not in users.setdefault(name, []):
                    users[name].append(index)
    number = {mesh.name: index for index, mesh in enumerate(spec.meshes)}
    sums: dict[str, MeshReduces] = {}
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
            sums[mesh] = MeshReduces(gradients, cost.seconds)
    if not sums:
        return found
    plan = place_reduces(spec, found.plan, sums)
    update = tuple(
        mesh_update(
            mesh,
            of_mesh,
            profile_of_mesh(profile, number[mesh]),
            costs,
            early={g.name for g in sums[mesh].gradients} if mesh in sums else (),
        )
        for mesh, of_mesh in layers.items()
    )
    if across is not None:
        update = across.with_all_reduces(update, profile, list(layers.values()))
    tail_s = max(0.0, reduces_end_s(plan) - plan.makespan_s)
    return replace(found, plan=plan, update=update, update_s=tail_s + longest_update_s(update))
