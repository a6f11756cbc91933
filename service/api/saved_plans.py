"""Saved plans: storing a plan under a name, finding it for a submission, and checking that it fits the job.

The check compares values only. A job that leaves a field `auto` takes what the plan has. Fields that change no plan
(steps, seeds, learning rates, starting weights, data of the same shape) may differ; layers and memory are compared
later, when the attempt knows them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy.exc import IntegrityError

from service.api.dependencies import Service
from service.api.errors import ProblemCode, ProblemError
from service.orchestrator.planning.work import SavedPlanInput
from service.schemas.plans import SavedPlanSummary
from service.settings.settings import FOR_EVER
from service.spec.job import JobSpec
from service.spec.principals import Principal
from service.store.database import utc_now
from service.store.plans import (
    NewSavedPlan,
    TooManySavedPlansError,
    find_saved_plan,
    saved_plan_by_id,
    store_saved_plan,
)
from service.store.tables import SavedPlan
from worker.contract.job import AUTO, Job


@dataclass(frozen=True)
class PlanDifference:
    """A field of the job (a path with dots), its value, and the one that the plan was made for."""

    field: str
    value: Any
    wanted: Any

    @property
    def message(self) -> str:
        return f"is {self.value!r}, and the plan was made for {self.wanted!r}"


@dataclass(frozen=True)
class PlannedChoice:
    """What a plan has chosen: the modules that begin its stages, its microbatches, and its schedule by both names."""

    stage_starts: tuple[str, ...]
    microbatches: int
    schedules: tuple[str, ...]


def plan_differences(
    spec: Mapping[str, Any], made_for: Mapping[str, Any], chosen: PlannedChoice, device: str | None
) -> list[PlanDifference]:
    """What keeps a job (JSON of a JobSpec) from being trained with a plan that was made for `made_for` on `device`."""
    job, other = Job.from_json(spec), Job.from_json(made_for)
    found = [
        PlanDifference(field, mine, theirs)
        for field, mine, theirs in _fixed_fields(job, other)
        if mine != theirs
    ]
    found += [
        PlanDifference(field, mine, accepted[0])
        for field, mine, accepted in _auto_fields(job, other, chosen)
        if mine != AUTO and mine not in accepted
    ]
    if device is not None and job.resources.device not in (AUTO, device):
        found.append(PlanDifference("resources.device", job.resources.device, device))
    return found


def _fixed_fields(job: Job, other: Job) -> Iterator[tuple[str, Any, Any]]:
    for name in ("factory", "args", "output", "freeze"):
        yield f"model.{name}", _as_list(getattr(job.model, name)), _as_list(getattr(other.model, name))
    yield "loss.factory", job.loss and job.loss.factory, other.loss and other.loss.factory
    yield "optimizer.factory", job.optimizer.factory, other.optimizer.factory
    for name in ("global_batch", "precision", "transfers", "sync_batch_norm", "compile"):
        yield f"training.{name}", getattr(job.training, name), getattr(other.training, name)
    yield "resources.meshes", job.meshes, other.meshes
    if job.meshes == other.meshes:
        yield "resources.workers_per_mesh", list(job.mesh_sizes), list(other.mesh_sizes)
        yield "resources.tensor", list(job.tensors), list(other.tensors)
        yield "resources.shard", list(job.sharded), list(other.sharded)
    yield "resources.tensor_plan", job.resources.tensor_plan, other.resources.tensor_plan
    yield "pipeline.overlap", job.pipeline.overlap, other.pipeline.overlap


def _auto_fields(job: Job, other: Job, chosen: PlannedChoice) -> Iterator[tuple[str, Any, list[Any]]]:
    """Fields that may be auto, and the other values that the plan fits."""
    mine, theirs = job.pipeline, other.pipeline
    yield "training.microbatches", job.training.microbatches, [chosen.microbatches]
    yield "pipeline.stages", AUTO if mine.cut != AUTO else mine.stages, [len(chosen.stage_starts)]
    yield "pipeline.cut", _as_list(mine.cut), [list(chosen.stage_starts), _as_list(theirs.cut)]
    yield "pipeline.schedule", mine.schedule, list(chosen.schedules)
    yield "pipeline.recompute", _as_list(mine.recompute), [_as_list(theirs.recompute)]


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def request_digest(spec: JobSpec) -> str:
    """The same for the same job: who asks again for a plan under the same name gets the same plan."""
    return hashlib.sha256(spec.model_dump_json(exclude_defaults=True).encode()).hexdigest()


async def own_saved_plan(service: Service, caller: Principal, name: str, spec: JobSpec) -> SavedPlan | None:
    """The plan that the caller keeps under this name for this job; 409 where it is another job's."""
    async with service.database.read() as session:
        found = await find_saved_plan(session, caller.name, name)
    if found is not None and found.request_digest != request_digest(spec):
        raise ProblemError(
            409,
            f"you keep a plan of another job as {name!r}: choose another name, or remove it (slotline plans remove "
            f"{name})",
            code=ProblemCode.PLAN_NAME_TAKEN,
        )
    return found


async def save_new_plan(
    service: Service,
    caller: Principal,
    name: str,
    spec: JobSpec,
    costs: Mapping[str, Any],
    plan: str,
    told: Mapping[str, Any],
) -> SavedPlan:
    """Keep the plan that was made of a job with these costs; `told` is what its preview says besides."""
    settings, job = service.settings, spec.model_dump(mode="json")
    if (size := len(plan)) > settings.named_plan_limit_bytes:
        raise ProblemError(
            413,
            f"the plan is JSON of {size} bytes, and one that is kept has at most {settings.named_plan_limit_bytes}: use "
            "fewer microbatches, or raise SLOTLINE_NAMED_PLAN_LIMIT_BYTES",
        )
    made_for = await service.planner.made_for(job, costs, plan)
    new = NewSavedPlan(
        owner=caller.name,
        name=name,
        request_digest=request_digest(spec),
        measured_by=told["measured_by"],
        summary=await asyncio.to_thread(
            _summary_of_plan, job, plan, json.loads(made_for)["device"], told["notes"]
        ),
        made_for=made_for,
        body=plan,
    )
    try:
        async with service.database.write() as session:
            return await store_saved_plan(session, new, at=utc_now(), most=settings.named_plans)
    except TooManySavedPlansError as error:
        raise ProblemError(
            409,
            f"{error}: remove one (slotline plans remove NAME), or raise SLOTLINE_NAMED_PLANS",
            code=ProblemCode.TOO_MANY_PLANS,
        ) from None
    except IntegrityError:  # another request has kept it meanwhile
        if (found := await own_saved_plan(service, caller, name, spec)) is None:
            raise
        return found


def saved_plan_preview(kept: SavedPlan) -> str:
    """JSON of a JobPlanPreview."""
    told = {
        "measured_by": kept.measured_by,
        "notes": kept.summary["notes"],
        "named": saved_plan_reference(kept),
    }
    return f"{json.dumps(told)[:-1]}, {kept.body[1:]}"


def saved_plan_reference(kept: SavedPlan) -> dict[str, Any]:
    """JSON of a NamedPlanRef."""
    return {"id": kept.id, "owner": kept.owner, "name": kept.name}


async def saved_plan_for_planner(service: Service, plan_id: str, name: str) -> SavedPlanInput:
    """What a planning process wants of a plan; `name` is what it was submitted by: it may have none now."""
    async with service.database.read() as session:
        kept = await saved_plan_by_id(session, plan_id)
    if kept is None:
        raise ProblemError(
            422,
            f"the plan {name!r} that the job was submitted with was deleted long ago: make one anew (slotline plan "
            "job.yaml --name ...) and submit the job again",
        )
    return SavedPlanInput({**saved_plan_reference(kept), "name": name}, kept.body, kept.made_for)


async def plan_named_by(service: Service, spec: JobSpec, caller: Principal) -> SavedPlan | None:
    """The caller's plan that a job names, None where it names none; 422 where there is none, 409 where it is for another."""
    if spec.plan is None:
        return None
    async with service.database.read() as session:
        found = await find_saved_plan(session, caller.name, spec.plan, whole=False)
    if found is None:
        message = "you keep no such plan: `slotline plan job.yaml --name ...` makes one, `slotline plans list` lists them"
        error = {"field": "plan", "value": spec.plan, "message": message}
        raise ProblemError(422, f"plan {spec.plan!r}: {message}", errors=[error])
    different = await asyncio.to_thread(_differences_from_plan, spec, found)
    if different:
        raise ProblemError(
            409,
            f"plan {spec.plan!r} was made for another job: "
            + "; ".join(f"{one.field} {one.message}" for one in different),
            errors=[{"field": one.field, "value": one.value, "message": one.message} for one in different],
            code=ProblemCode.PLAN_MISMATCH,
        )
    return found


def saved_plan_summary(kept: SavedPlan, keep_days: float) -> SavedPlanSummary:
    """As lists show it."""
    expires_at = None if keep_days == FOR_EVER else kept.used_at + timedelta(days=keep_days)
    names = ("id", "owner", "name", "created_at", "used_at", "size_bytes")
    return SavedPlanSummary(
        **{name: getattr(kept, name) for name in names}, expires_at=expires_at, **kept.summary
    )


def _differences_from_plan(spec: JobSpec, kept: SavedPlan) -> list[Any]:
    made_for = json.loads(kept.made_for)
    chosen = PlannedChoice(
        tuple(kept.summary["begins"]),
        kept.summary["microbatches"],
        (kept.summary["asked_schedule"], kept.summary["schedule"]),
    )
    return plan_differences(spec.model_dump(mode="json"), made_for["job"], chosen, made_for["device"])


def _summary_of_plan(
    job: Mapping[str, Any], plan: str, device: str | None, notes: list[str]
) -> dict[str, Any]:
    made = json.loads(plan)
    spec = JobSpec.model_validate(job)
    return {
        "job_name": spec.name,
        "begins": made["begins"],
        "meshes": len(made["spec"]["meshes"]),
        "workers": spec.mesh_sizes,
        "microbatches": made["spec"]["microbatches"],
        "precision": spec.training.precision,
        "device": device,
        "schedule": made["plan"]["chosen"],
        "asked_schedule": made["plan"]["schedule"],
        "recomputed": [stage["name"] for stage in made["plan"]["stages"] if stage["recomputed"]],
        "step_s": made["step_s"],
        "notes": notes,
    }
