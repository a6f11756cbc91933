"""Checks that a saved plan still fits a job as measured now (PlanKey), and proves it again with today's memory.

Pure. Nothing is chosen again: cut, orders, programs, times and recomputation stay. Only the bytes that stages
hold are counted again, from the new measurements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from service.scheduler.auto.recomputation import with_recomputation
from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.partition import partition
from service.scheduler.job.plan_job import (
    JobCosts,
    job_memory_bytes,
    job_optimizer_state,
    job_recompute,
    measured_profile,
)
from service.scheduler.problem.memory import peak_activation, peak_memory
from service.scheduler.problem.spec import MeshSpec, PipelineSpec, RecomputeSpec, SpecError, StageSpec
from service.scheduler.programs.check_programs import check_programs
from service.scheduler.programs.decode import PlanError
from worker.contract.buckets import with_buckets
from worker.contract.job import Job
from worker.contract.planned import ModelSignature, recompute_method
from worker.contract.program import program_from_json


@dataclass(frozen=True)
class PlanKey:
    """The job (JSON of a JobSpec), the model signatures by workers of a mesh, and the device that a plan is valid for.

    `device` is None where it is not known.
    """

    job: Mapping[str, Any]
    signatures: Mapping[int, ModelSignature] = field(default_factory=dict)
    device: str | None = None

    @classmethod
    def of(cls, job: Mapping[str, Any], costs: Mapping[str, Any], microbatches: int) -> PlanKey:
        """The key of a plan with `microbatches`, made with `costs` (JSON of a driver's request)."""
        read = Job.from_json(job)
        devices = {worker.get("device") for worker in costs.get("workers") or ()} - {None}
        return cls(
            job,
            _model_signatures(read, JobCosts.from_json(costs, read), microbatches),
            devices.pop() if len(devices) == 1 else None,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` is its inverse."""
        signatures = {str(workers): signature.to_json() for workers, signature in self.signatures.items()}
        return {"job": self.job, "forms": signatures, "device": self.device}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanKey:
        """Inverse of `to_json`."""
        signatures = {int(workers): ModelSignature.from_json(item) for workers, item in data["forms"].items()}
        return cls(data["job"], signatures, data["device"])


def saved_plan_answer(
    name: str, body: str, made_for: PlanKey, job: Job, costs: Mapping[str, Any]
) -> dict[str, Any]:
    """The saved plan `name` (JSON of `job_plan_json`) for a job with these costs, its memory as measured now.

    Raises SpecError, which says what differs, where the layers or the device are not those of its key, and where it
    does not fit into memory.
    """
    answer = json.loads(body)
    count = answer["spec"]["microbatches"]
    now = PlanKey.of(made_for.job, costs, count)
    if made_for.device is not None and now.device not in (None, made_for.device):
        raise SpecError(
            _refusal_message(name, f"it was made for {made_for.device}, and the workers are on {now.device}")
        )
    for workers, signature in made_for.signatures.items():
        if workers not in now.signatures:
            raise SpecError(_refusal_message(name, f"nothing was measured with its {count} microbatches"))
        if (different := now.signatures[workers].difference(signature)) is not None:
            raise SpecError(_refusal_message(name, f"it was made for other layers: {different}"))
    return {**answer, **_proven_again(name, answer, made_for, job, JobCosts.from_json(costs, job))}


def _model_signatures(job: Job, costs: JobCosts, count: int) -> dict[int, ModelSignature]:
    """Signatures of the measured profiles by data-parallel workers; of whole layers where a mesh without tensor parallelism
    was measured."""
    kinds = sorted({*zip(job.mesh_sizes, job.tensors, strict=True)}, key=lambda kind: kind[1], reverse=True)
    signatures = {}
    for workers, tensor in kinds:
        profile = (
            costs.mesh_profiles.get((count, workers, tensor))
            if job.heterogeneous
            else costs.profiles.get(count)
        )
        if profile is not None:
            signatures[workers // tensor] = ModelSignature.of_profile(profile, whole=tensor == 1)
    return dict(sorted(signatures.items()))


def _proven_again(
    name: str, answer: Mapping[str, Any], made_for: PlanKey, job: Job, costs: JobCosts
) -> dict[str, Any]:
    """The spec with the bytes of stages and meshes as measured now, and the plan with the peaks that follow."""
    before, plan = PipelineSpec.model_validate(answer["spec"]), dict(answer["plan"])
    names = [mesh.name for mesh in before.meshes]
    meshes = [
        mesh.model_copy(update={"memory_bytes": job_memory_bytes(job, costs, mesh.name)})
        for mesh in before.meshes
    ]
    stages = _stages_with_measured_bytes(before, answer["begins"], made_for, job, costs, meshes)
    spec = before.model_copy(update={"meshes": meshes, "stages": stages})
    programs = {mesh: with_buckets(program_from_json(p), ()).program for mesh, p in plan["programs"].items()}
    recomputed = [stage["name"] for stage in plan["stages"] if stage["recomputed"]]
    try:
        played = check_programs(with_recomputation(spec, recomputed), programs)
    except PlanError as error:
        raise SpecError(_refusal_message(name, f"it no longer fits: {error}")) from None
    memory = dict(zip(names, peak_memory(played.timeline).tolist(), strict=True))
    lanes = dict(zip(names, played.timeline.lanes, strict=True))
    plan["meshes"] = [
        {
            **mesh,
            "peak_memory_bytes": memory[mesh["name"]],
            "peak_activation_bytes": peak_activation(played.timeline.problem, lanes[mesh["name"]])[0],
        }
        for mesh in plan["meshes"]
    ]
    return {"spec": spec.model_dump(mode="json"), "plan": plan}


def _stages_with_measured_bytes(
    before: PipelineSpec,
    stage_starts: list[str],
    made_for: PlanKey,
    job: Job,
    costs: JobCosts,
    meshes: list[MeshSpec],
) -> list[StageSpec]:
    """The stages with their own times, and the bytes that were measured now."""
    place = {mesh.name: index for index, mesh in enumerate(before.meshes)}
    now = partition(
        measured_profile(job, costs, before.microbatches),
        PipelineSetup(
            meshes,
            costs.network,
            schedule=before.schedule,
            overlap=before.overlap,
            recompute=job_recompute(Job.from_json(made_for.job)),
            optimizer=job_optimizer_state(job, costs),
            action_s=costs.action_s,
        ),
        stages=len(before.stages),
        microbatches=before.microbatches,
        cut=stage_starts,
        placement=[place[stage.mesh] for stage in before.stages],
    ).spec.stages
    sizes = ("activation_bytes", "weight_stash_bytes", "static_bytes")
    return [
        stage.model_copy(
            update={name: getattr(measured, name) for name in sizes}
            | {"recompute": _with_measured_bytes(stage.recompute, measured)}
        )
        for stage, measured in zip(before.stages, now, strict=True)
    ]


def _with_measured_bytes(option: RecomputeSpec | None, measured: StageSpec) -> RecomputeSpec | None:
    """The way in which a stage may recompute, with the bytes that were measured now where the stage still has it."""
    if option is None:
        return None
    now = measured.recompute_options.get(recompute_method(dict(option)))
    kept = {"extra_s": option.extra_s, "required": option.required}
    return option if now is None else now.model_copy(update=kept)


def _refusal_message(name: str, why: str) -> str:
    return (
        f"the plan {name!r} cannot be used: {why}; make it anew (slotline plan job.yaml --name ...), or submit the job "
        "without one"
    )
