"""PlannedJob: the control plane's answer to a plan request, with planned times and planned peak memory.

Instructions are counted by their place in a mesh's program; slots name their stage. Slots of gradient buckets
share one key a stage and come in the order of their lane. After an out-of-memory attempt
`corrected_activation_factor` raises profiled activations by at least a quarter, with limits on each step and in
all, so that the next plan differs but no mistake in the memory model makes all plans impossible. A saved plan
carries the ModelSignature of its model, with which a driver compares its own before using it. Pure values, light:
no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.contract.codec import from_json, to_json
from worker.contract.costs import MeshUpdate
from worker.contract.profile import LayerProfile
from worker.contract.program import Program, program_from_json
from worker.contract.resharding import ReshardingPlan

ReshardingPlans = Mapping[tuple[int, bool], ReshardingPlan]
"""By the first edge of a route, and whether it is the way back, of gradients."""


RecomputeMethod = Literal["whole", "selective", "by_block"]
"""How a stage runs its forward again: from its inputs alone, with the results of its products (matrix products,
convolutions, attention) kept besides, or with the inputs of its blocks kept, block after block."""


def recompute_method(stage: Mapping[str, Any]) -> RecomputeMethod:
    """The method by which a stage of a plan, or an option of a spec, recomputes, from its flags."""
    return next((method for method in ("selective", "by_block") if stage.get(method)), "whole")


@dataclass(frozen=True)
class MeshProgram:
    """The instructions that one mesh runs in a step, and what was planned for them.

    `planned_s` and `planned_starts_s` are the planned length and start of each instruction (None: REDUCE and STEP have
    no start); without them every slot has the least limit. The stages `recomputed` run their forward again in B or I,
    each by its method. `reshardings` are the transfers of all meshes that do not go in pairs of workers.
    """

    instructions: Program
    microbatches: int
    planned_s: Sequence[float] | None = None
    planned_starts_s: Sequence[float | None] | None = None
    recomputed: Mapping[int, RecomputeMethod] = field(default_factory=dict)
    reshardings: ReshardingPlans = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("planned_s", "planned_starts_s"):
            times = getattr(self, name)
            if times is not None and len(times) != len(self.instructions):
                raise ValueError(f"{name} has {len(times)} times for {len(self.instructions)} instructions")

    @property
    def trains(self) -> bool:
        """True for a program with backwards."""
        return any(instruction.op in ("B", "I") for instruction in self.instructions)

    @property
    def longest_slot_s(self) -> float:
        """The planned length of the longest instruction; 0 where none was planned."""
        return max(self.planned_s or (0.0,))


@dataclass(frozen=True)
class PlannedJob:
    """The control plane's plan of a job: JSON of a PipelineSpec and a Plan, and the layers that begin stages.

    `update` has the seconds of each mesh's REDUCE and STEP behind the makespan. `slowdown` is how many times as long as
    alone actions take by the plan, where workers share processor cores; `reshardings` are the transfers that do not go
    in pairs of workers, by edge and whether they are of gradients.
    """

    stage_starts: tuple[str, ...]
    spec: Mapping[str, Any]
    plan: Mapping[str, Any]
    update: tuple[MeshUpdate, ...] = ()
    slowdown: float = 1.0
    reshardings: ReshardingPlans = field(default_factory=dict)
    update_s: float | None = None
    notes: tuple[str, ...] = ()
    """What is unusual about the plan, for people."""
    saved_plan: str | None = None
    """The plan that the job was submitted with; `forms` of the model that it was made for, by how many
    workers a microbatch is dealt among."""
    model_signatures: Mapping[int, ModelSignature] = field(default_factory=dict)

    @property
    def provenance(self) -> str:
        """The origin of the plan, for people; empty where it was made for this job."""
        return "" if self.saved_plan is None else f" as the plan {self.saved_plan!r} has it"

    @property
    def microbatches(self) -> int:
        return self.spec["microbatches"]

    @property
    def step_s(self) -> float:
        """The planned length of a step: the makespan, and the longest REDUCE and STEP behind it."""
        longest = max((one.total_s for one in self.update), default=0.0)
        return self.plan["makespan_s"] + (longest if self.update_s is None else self.update_s)

    @property
    def stage_names(self) -> list[str]:
        return [stage["name"] for stage in self.spec["stages"]]

    @property
    def recomputed(self) -> dict[int, RecomputeMethod]:
        """The stages that run their forward again, each with its method."""
        return {
            index: recompute_method(stage)
            for index, stage in enumerate(self.plan.get("stages", ()))
            if stage["recomputed"]
        }

    def programs(self) -> dict[str, MeshProgram]:
        """The program of each mesh in a training step."""
        return mesh_programs(
            self.plan,
            self.stage_names,
            self.microbatches,
            update=self.update,
            recomputed=self.recomputed,
            reshardings=self.reshardings,
        )

    def stages_of(self, mesh: str) -> list[int]:
        """The stages that a mesh runs."""
        return [index for index, other in enumerate(self.mesh_of_stage) if other == mesh]

    @property
    def mesh_of_stage(self) -> list[str]:
        return [stage["mesh"] for stage in self.spec["stages"]]


def parse_planned_job(answer: Mapping[str, Any]) -> PlannedJob:
    """The control plane's answer to a request for a plan, read."""
    return PlannedJob(
        stage_starts=tuple(answer["begins"]),
        spec=answer["spec"],
        plan=answer["plan"],
        update=tuple(from_json(MeshUpdate, one) for one in answer.get("update") or ()),
        slowdown=answer.get("slowdown", 1.0),
        update_s=answer.get("update_s"),
        reshardings=parse_reshardings(answer),
        notes=tuple(answer.get("planning_notes") or ()),
        saved_plan=(answer.get("named") or {}).get("name"),
        model_signatures={
            int(workers): ModelSignature.from_json(form)
            for workers, form in (answer.get("made_for") or {}).get("forms", {}).items()
        },
    )


def parse_reshardings(answer: Mapping[str, Any]) -> dict[tuple[int, bool], ReshardingPlan]:
    """The reshardings in an answer, by edge and whether they are of gradients."""
    return {
        (one["edge"], one["backward"]): ReshardingPlan.from_json(one["plan"])
        for one in answer.get("reshardings") or ()
    }


def mesh_programs(
    plan: Mapping[str, Any],
    stage_names: Sequence[str],
    microbatches: int,
    *,
    update: Sequence[MeshUpdate] = (),
    recomputed: Mapping[int, RecomputeMethod] | None = None,
    reshardings: ReshardingPlans | None = None,
) -> dict[str, MeshProgram]:
    """The programs of a plan (JSON of a Plan) with their planned times, by mesh. See `planned_seconds`."""
    seconds, starts = planned_seconds(plan, stage_names, update), planned_starts(plan, stage_names)
    return {
        mesh: MeshProgram(
            program_from_json(program),
            microbatches,
            planned_s=seconds[mesh],
            planned_starts_s=starts[mesh],
            recomputed=dict(recomputed or {}),
            reshardings=reshardings or {},
        )
        for mesh, program in plan["programs"].items()
    }


def planned_seconds(
    plan: Mapping[str, Any], stage_names: Sequence[str], update: Sequence[MeshUpdate] = ()
) -> dict[str, list[float]]:
    """Planned seconds of every instruction of every mesh's program; those of REDUCE (but for its
    buckets) and STEP are in `update`.

    Slots name their stage, instructions count it: `stage_names` are in that order.
    """
    behind = {
        (one.mesh, op): s for one in update for op, s in (("REDUCE", one.reduce_s), ("STEP", one.step_s))
    }
    slots = _slots_of_instructions(plan, stage_names)
    return {
        mesh: [
            behind.get((mesh, i["op"]), 0.0) if s is None else s["end_s"] - s["start_s"]
            for i, s in zip(plan["programs"][mesh], found, strict=True)
        ]
        for mesh, found in slots.items()
    }


def planned_starts(plan: Mapping[str, Any], stage_names: Sequence[str]) -> dict[str, list[float | None]]:
    """The planned start of every instruction of every mesh's program; None for REDUCE and STEP."""
    slots = _slots_of_instructions(plan, stage_names)
    return {mesh: [None if s is None else s["start_s"] for s in found] for mesh, found in slots.items()}


def _slots_of_instructions(
    plan: Mapping[str, Any], stage_names: Sequence[str]
) -> dict[str, list[Mapping[str, Any] | None]]:
    number = {name: i for i, name in enumerate(stage_names)}
    planned: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for s in plan["slots"]:  # those of buckets have one key a stage: they come in the order of their lane
        key = (s["mesh"], s["action"], number[s["stage"]], s["microbatch"], s.get("edge"))
        planned.setdefault(key, []).append(s)
    for slots in planned.values():
        slots.reverse()
    return {
        mesh: [
            _pop_slot(planned.get((mesh, i["op"], i["stage"], i["microbatch"], i["edge"])))
            for i in instructions
        ]
        for mesh, instructions in plan["programs"].items()
    }


def _pop_slot(slots: list[Mapping[str, Any]] | None) -> Mapping[str, Any] | None:
    return slots.pop() if slots else None


# How much larger than profiled activations are taken to be after an attempt ran out of memory. What was seen
# tells it; but the next plan must differ, and a mistake in the model must not make all plans impossible.
MIN_ACTIVATION_CORRECTION = 1.25
MAX_ACTIVATION_CORRECTION = 4.0
MAX_TOTAL_CORRECTION = 8.0


def static_bytes_by_mesh(spec: Mapping[str, Any]) -> dict[str, int]:
    """The bytes that the stages of each mesh always hold, by the JSON of a PipelineSpec."""
    total = {mesh["name"]: 0 for mesh in spec["meshes"]}
    for stage in spec["stages"]:
        total[stage["mesh"]] += stage.get("static_bytes", 0)
    return total


def planned_peak_bytes(spec: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, int]:
    """The most bytes that each mesh holds by its plan (JSON of a Plan).

    A plan without `peak_memory_bytes` counts static bytes and activations.
    """
    static = static_bytes_by_mesh(spec)
    peaks = {}
    for mesh in plan["meshes"]:
        whole = mesh.get("peak_memory_bytes")
        name = mesh["name"]
        peaks[name] = static.get(name, 0) + mesh["peak_activation_bytes"] if whole is None else whole
    return peaks


def corrected_activation_factor(
    before: float, *, planned_bytes: int, static_bytes: int, seen_bytes: int
) -> float:
    """The factor on profiled activations to plan with after a mesh ran out that was planned with `before`.

    It grows by what was seen above the static bytes against what was planned there, at least by a quarter.
    `seen_bytes` is the most that the mesh held and wanted when it ran out; 0 where nobody saw it.
    """
    activations = planned_bytes - static_bytes
    found = (seen_bytes - static_bytes) / activations if activations > 0 else MIN_ACTIVATION_CORRECTION
    return min(
        before * min(max(found, MIN_ACTIVATION_CORRECTION), MAX_ACTIVATION_CORRECTION), MAX_TOTAL_CORRECTION
    )


@dataclass(frozen=True)
class LayerSignature:
    """A layer, and the bytes of the parameters that it uses, by original name."""

    name: str
    parameters: Mapping[str, int]


@dataclass(frozen=True)
class EdgeSignature:
    """A tensor that layer `source` makes and layer `target` uses, as one microbatch of it travels."""

    source: int
    target: int
    tensor: str
    bytes: int


@dataclass(frozen=True)
class ModelSignature:
    """Layers in execution order, and the tensors between them by source, target and order of production."""

    layers: tuple[LayerSignature, ...]
    edges: tuple[EdgeSignature, ...]

    @classmethod
    def of_profile(cls, profile: LayerProfile, *, whole: bool = True) -> ModelSignature:
        """The signature of measured layers; not `whole`: of tensor-parallel ranks, without their parameters."""
        sizes = profile.parameter_sizes
        return cls(
            tuple(
                LayerSignature(layer.name, {name: sizes[name] for name in layer.parameters if whole})
                for layer in profile.layers
            ),
            tuple(EdgeSignature(edge.source, edge.target, edge.tensor, edge.bytes) for edge in profile.edges),
        )

    def difference(self, wanted: ModelSignature) -> str | None:
        """The first thing in which this is not as it was `wanted`, in words; None where all is."""
        if len(self.layers) != len(wanted.layers):
            return f"the model has {len(self.layers)} layers, and not {len(wanted.layers)}"
        for number, (layer, other) in enumerate(zip(self.layers, wanted.layers, strict=True)):
            if layer.name != other.name:
                return f"layer {number} is {layer.name}, and not {other.name}"
            if dict(layer.parameters) != dict(other.parameters):
                return f"layer {layer.name} has {_describe_parameters(layer)}, and not {_describe_parameters(other)}"
        if len(self.edges) != len(wanted.edges):
            return f"{len(self.edges)} tensors travel between layers, and not {len(wanted.edges)}"
        for edge, other in zip(self.edges, wanted.edges, strict=True):
            if edge != other:
                return f"{self._describe_edge(edge)} travels between layers, and not {wanted._describe_edge(other)}"
        return None

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` is its inverse."""
        return to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSignature:
        """Inverse of `to_json`."""
        return from_json(cls, data, ignore_unknown=True)

    def _describe_edge(self, edge: EdgeSignature) -> str:
        ends = f"{self.layers[edge.source].name} to {self.layers[edge.target].name}"
        return f"{edge.tensor} of {edge.bytes} bytes from {ends}"


def _describe_parameters(layer: LayerSignature) -> str:
    named = ", ".join(f"{name} ({size} bytes)" for name, size in sorted(layer.parameters.items())[:4])
    more = len(layer.parameters) - 4
    return (named or "no parameters") + (f" and {more} more" if more > 0 else "")
