"""Plan: the scheduler's answer (DESIGN section 4), with slots, programs, metrics and bounds of a timeline.

Slots and programs are plain data; nothing here decides anything. Field names are JSON of stored plans and of
REST: they stay, and fields that older plans lack are None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, field_serializer

from service.scheduler.problem.memory import peak_activation, peak_memory, peak_receive_buffers
from service.scheduler.problem.problem import LocalAction, local_actions
from service.scheduler.problem.timeline import Timeline
from worker.contract.planned import RecomputeMethod
from worker.contract.program import Instruction, Program, program_from_json


@dataclass(frozen=True, slots=True)
class Slot:
    """One operation on one lane of one mesh, in seconds from the start of the step."""

    mesh: str
    lane: str
    action: str
    stage: str
    microbatch: int | None  # None: the sum of a bucket of gradients
    start_s: float
    end_s: float
    peer_stage: str | None = None
    peer_mesh: str | None = None
    edge: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON object of DESIGN section 4; compute slots have no peer fields."""
        out: dict[str, Any] = {
            "mesh": self.mesh,
            "lane": self.lane,
            "action": self.action,
            "stage": self.stage,
        }
        if self.edge is not None:
            out |= {"peer_stage": self.peer_stage, "peer_mesh": self.peer_mesh, "edge": self.edge}
        return out | {"microbatch": self.microbatch, "start_s": self.start_s, "end_s": self.end_s}


class MeshPlan(BaseModel):
    """A mesh under the plan: its peaks of memory and its times."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    peak_activation_bytes: int
    compute_s: float
    exposed_transfer_s: float
    peak_receive_buffers: int
    peak_memory_bytes: int | None = (
        None  # static, activations, stashes and buffers; None in plans of the past
    )


class StagePlan(BaseModel):
    """A stage under the plan."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    recomputed: bool
    selective: bool = False  # it recomputes, and keeps the results of its products
    by_block: bool = False  # it recomputes block after block, and keeps the inputs of these


class PlanOrigin(BaseModel):
    """The budget, seeds and versions of a plan: with equal ones the same spec gives the same plan."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget_s: float
    seeds: dict[str, int]
    versions: dict[str, str]


class Plan(BaseModel):
    """A timed, proven schedule with the programs that run it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schedule: str
    chosen: str
    makespan_s: float
    span_s: float
    lower_bound_s: float
    proven_optimal: bool
    truncated: bool = False
    programs_makespan_s: float | None = None  # what the programs reach: more only with contention none
    made_with: PlanOrigin | None = None  # None in plans of the past
    notes: list[str] = []  # what went wrong while planning, and what was done instead
    bubble_ratio: float
    overlap_ratio: float
    meshes: list[MeshPlan]
    stages: list[StagePlan] = []
    slots: list[Slot]
    programs: dict[str, list[dict[str, Any]]]

    @field_serializer("slots")
    def _slots_json(self, slots: list[Slot]) -> list[dict[str, Any]]:
        return [slot.to_json() for slot in slots]

    def program(self, mesh: str) -> Program:
        """The instructions of one mesh."""
        return program_from_json(self.programs[mesh])


@dataclass(frozen=True, kw_only=True)
class PlanProof:
    """The proof of a plan: no step is shorter than `lower_bound_s`, the programs take `programs_makespan_s`, and
    whether the plan is optimal; `truncated`: the search ended at its deadline."""

    lower_bound_s: float
    proven_optimal: bool
    programs_makespan_s: float
    truncated: bool


def build_plan(
    timeline: Timeline,
    programs: Mapping[str, Sequence[Instruction]],
    proof: PlanProof,
    *,
    chosen: str,
    notes: Sequence[str],
    recomputed: Mapping[str, RecomputeMethod] | None = None,
    made_with: PlanOrigin | None = None,
) -> Plan:
    """The plan of a timeline and its programs by mesh, which came from the schedule `chosen`."""
    problem, methods = timeline.problem, recomputed or {}
    metrics = plan_metrics(timeline)
    buffers, memory = peak_receive_buffers(timeline), peak_memory(timeline)
    lanes = timeline.lanes
    meshes = []
    for index, mesh in enumerate(problem.spec.meshes):
        of_mesh = metrics.meshes[mesh.name]
        meshes.append(
            MeshPlan(
                name=mesh.name,
                peak_activation_bytes=peak_activation(problem, lanes[index])[0],
                compute_s=of_mesh.compute_s,
                exposed_transfer_s=of_mesh.exposed_transfer_s,
                peak_receive_buffers=buffers[index],
                peak_memory_bytes=int(memory[index]),
            )
        )
    return Plan.model_construct(
        schedule=problem.spec.schedule,
        chosen=chosen,
        makespan_s=timeline.makespan,
        programs_makespan_s=max(proof.programs_makespan_s, timeline.makespan),
        span_s=metrics.span_s,
        lower_bound_s=proof.lower_bound_s,
        proven_optimal=proof.proven_optimal,
        truncated=proof.truncated,
        made_with=made_with,
        notes=list(notes),
        bubble_ratio=metrics.bubble_ratio,
        overlap_ratio=metrics.overlap_ratio,
        meshes=meshes,
        stages=[
            StagePlan(
                name=stage.name,
                recomputed=stage.name in methods,
                selective=methods.get(stage.name) == "selective",
                by_block=methods.get(stage.name) == "by_block",
            )
            for stage in problem.spec.stages
        ],
        slots=make_slots(timeline),
        programs={name: [_instruction_json(ins) for ins in program] for name, program in programs.items()},
    )


def _instruction_json(ins: Instruction) -> dict[str, Any]:
    # the same as Instruction.to_json, which is slow for hundreds of thousands of instructions
    return {
        "op": ins.op,
        "lane": ins.lane,
        "stage": ins.stage,
        "microbatch": ins.microbatch,
        "edge": ins.edge,
        "peer": ins.peer,
        "wait": list(ins.wait),
        "record": ins.record,
    }


def plan_metrics(timeline: Timeline) -> TimelineMetrics:
    """The metrics of a planned timeline, mesh by mesh."""
    problem = timeline.problem
    moves = timeline.transfers
    kinds = moves // problem.microbatches
    result = {}
    for index, (mesh, lane) in enumerate(zip(problem.spec.meshes, timeline.lanes, strict=True)):
        here = moves[(problem.sender_of_kind[kinds] == index) | (problem.receiver_of_kind[kinds] == index)]
        result[mesh.name] = mesh_metrics(_intervals(timeline, lane), _intervals(timeline, here))
    return combine_metrics(result, timeline.makespan)


def _intervals(timeline: Timeline, tasks: np.ndarray) -> np.ndarray:
    return np.column_stack((timeline.start[tasks], timeline.end[tasks]))


def make_slots(timeline: Timeline) -> list[Slot]:
    """All slots by mesh and lane (compute first, then by peer, sends before receives), each lane by start."""
    problem = timeline.problem
    spec, microbatches, fused = problem.spec, problem.microbatches, problem.fused.tolist()
    meshes, stages = [mesh.name for mesh in spec.meshes], [stage.name for stage in spec.stages]
    lanes: dict[tuple[int, int], dict[int, LocalAction]] = {}
    for action in local_actions(problem):
        lanes.setdefault((action.mesh, action.lane_rank), {})[action.kind] = action
    kinds = timeline.sequence // microbatches
    slots: list[Slot] = []
    for key in sorted(lanes):
        actions = lanes[key]
        chosen = np.zeros(problem.kinds, dtype=bool)
        chosen[list(actions)] = True
        tasks = timeline.sequence[chosen[kinds]]
        starts, ends = timeline.start[tasks].tolist(), timeline.end[tasks].tolist()
        for task, start, end in zip(tasks.tolist(), starts, ends, strict=True):
            kind, microbatch = divmod(task, microbatches)
            action = actions[kind]
            op = "B" if action.op == "I" and fused[action.stage][microbatch] else action.op
            slots.append(
                Slot(
                    meshes[action.mesh],
                    action.lane,
                    op,
                    stages[action.stage],
                    microbatch,
                    start,
                    end,
                    None if action.peer_stage is None else stages[action.peer_stage],
                    None if action.peer is None else meshes[action.peer],
                    action.edge,
                )
            )
    return slots


@dataclass(frozen=True)
class MeshMetrics:
    """Seconds of one mesh. `span_s` runs from the start of its first to the end of its last compute action;
    `exposed_transfer_s` is the part of it with an idle compute lane and a running transfer."""

    compute_s: float
    span_s: float
    transfer_s: float
    exposed_transfer_s: float


@dataclass(frozen=True)
class TimelineMetrics:
    """`bubble_ratio` = 1 − compute / (meshes × makespan); `overlap_ratio` = 1 − exposed / time with a transfer."""

    makespan_s: float
    span_s: float
    bubble_ratio: float
    overlap_ratio: float
    exposed_transfer_s: float
    meshes: dict[str, MeshMetrics]


def mesh_metrics(compute: np.ndarray, transfers: np.ndarray) -> MeshMetrics:
    """Metrics of one mesh from float[n, 2] arrays of starts and ends."""
    transfer_s = _union_length(transfers)
    if not len(compute):
        return MeshMetrics(0.0, 0.0, transfer_s, 0.0)
    first, last = float(compute[:, 0].min()), float(compute[:, 1].max())
    inside = np.clip(transfers, first, last)
    exposed = _union_length(np.concatenate((compute, inside))) - _union_length(compute)
    if exposed <= 1e-9 * (last - first):
        exposed = 0.0
    return MeshMetrics(float((compute[:, 1] - compute[:, 0]).sum()), last - first, transfer_s, exposed)


def combine_metrics(meshes: dict[str, MeshMetrics], makespan: float) -> TimelineMetrics:
    """Metrics of all meshes together."""
    compute = sum(mesh.compute_s for mesh in meshes.values())
    exposed = sum(mesh.exposed_transfer_s for mesh in meshes.values())
    moving = sum(mesh.transfer_s for mesh in meshes.values())
    return TimelineMetrics(
        makespan_s=makespan,
        span_s=max((mesh.span_s for mesh in meshes.values()), default=0.0),
        bubble_ratio=1.0 - compute / (len(meshes) * makespan) if makespan > 0 else 0.0,
        overlap_ratio=1.0 - exposed / moving if moving > 0 else 1.0,
        exposed_transfer_s=exposed,
        meshes=meshes,
    )


def _union_length(intervals: np.ndarray) -> float:
    """Length of the union of intervals."""
    if not len(intervals):
        return 0.0
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    begin = np.maximum(ordered[1:, 0], reached[:-1])
    return float(ordered[0, 1] - ordered[0, 0] + np.maximum(ordered[1:, 1] - begin, 0.0).sum())
