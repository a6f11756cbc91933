"""Plans that are kept for jobs: made into rows of the store, found for a submission, shown."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy.exc import IntegrityError

from service.api.context import Service
from service.api.errors import ProblemError
from service.api.plan_schemas import NamedPlanSummary
from service.api.problem_codes import Code
from service.jobspec import JobSpec
from service.orchestrator.given_plans import GivenPlan
from service.plan_match import PlannedChoice, differences
from service.principals import Principal
from service.settings_keeping import FOR_EVER
from service.store.database import utc_now
from service.store.kept_tables import NamedPlan
from service.store.named_plans import NewPlan, TooManyPlansError, named_plan, plan_by_id, store_plan


def request_digest(spec: JobSpec) -> str:
    """The same for the same job: who asks again for a plan under the same name gets the same plan."""
    return hashlib.sha256(spec.model_dump_json(exclude_defaults=True).encode()).hexdigest()


async def kept_under(service: Service, caller: Principal, name: str, spec: JobSpec) -> NamedPlan | None:
    """The plan that the caller keeps under this name for this job; 409 where it is another job's."""
    async with service.database.read() as session:
        found = await named_plan(session, caller.name, name)
    if found is not None and found.request_digest != request_digest(spec):
        raise ProblemError(
            409,
            f"you keep a plan of another job as {name!r}: choose another name, or remove it (slotline plans remove "
            f"{name})",
            code=Code.PLAN_NAME_TAKEN,
        )
    return found


async def keep(
    service: Service,
    caller: Principal,
    name: str,
    spec: JobSpec,
    costs: Mapping[str, Any],
    plan: str,
    told: Mapping[str, Any],
) -> NamedPlan:
    """Keep the plan that was made of a job with these costs; `told` is what its preview says besides."""
    settings, job = service.settings, spec.model_dump(mode="json")
    if (size := len(plan)) > settings.named_plan_limit_bytes:
        raise ProblemError(
            413,
            f"the plan is JSON of {size} bytes, and one that is kept has at most {settings.named_plan_limit_bytes}: use "
            "fewer microbatches, or raise SLOTLINE_NAMED_PLAN_LIMIT_BYTES",
        )
    made_for = await service.planner.made_for(job, costs, plan)
    new = NewPlan(
        owner=caller.name,
        name=name,
        request_digest=request_digest(spec),
        measured_by=told["measured_by"],
        summary=await asyncio.to_thread(_summary, job, plan, json.loads(made_for)["device"], told["notes"]),
        made_for=made_for,
        body=plan,
    )
    try:
        async with service.database.write() as session:
            return await store_plan(session, new, at=utc_now(), most=settings.named_plans)
    except TooManyPlansError as error:
        raise ProblemError(
            409,
            f"{error}: remove one (slotline plans remove NAME), or raise SLOTLINE_NAMED_PLANS",
            code=Code.TOO_MANY_PLANS,
        ) from None
    except IntegrityError:  # another request has kept it meanwhile
        if (found := await kept_under(service, caller, name, spec)) is None:
            raise
        return found


def preview(kept: NamedPlan) -> str:
    """JSON of a JobPlanPreview."""
    told = {"measured_by": kept.measured_by, "notes": kept.summary["notes"], "named": reference(kept)}
    return f"{json.dumps(told)[:-1]}, {kept.body[1:]}"


def reference(kept: NamedPlan) -> dict[str, Any]:
    """JSON of a NamedPlanRef."""
    return {"id": kept.id, "owner": kept.owner, "name": kept.name}


async def given_of(service: Service, plan_id: str, name: str) -> GivenPlan:
    """What a planning process wants of a plan; `name` is what it was submitted by: it may have none now."""
    async with service.database.read() as session:
        kept = await plan_by_id(session, plan_id)
    if kept is None:
        raise ProblemError(
            422,
            f"the plan {name!r} that the job was submitted with was deleted long ago: make one anew (slotline plan "
            "job.yaml --name ...) and submit the job again",
        )
    return GivenPlan({**reference(kept), "name": name}, kept.body, kept.made_for)


async def plan_for(service: Service, spec: JobSpec, caller: Principal) -> NamedPlan | None:
    """The caller's plan that a job names, None where it names none; 422 where there is none, 409 where it is for another."""
    if spec.plan is None:
        return None
    async with service.database.read() as session:
        found = await named_plan(session, caller.name, spec.plan, whole=False)
    if found is None:
        message = "you keep no such plan: `slotline plan job.yaml --name ...` makes one, `slotline plans list` lists them"
        error = {"field": "plan", "value": spec.plan, "message": message}
        raise ProblemError(422, f"plan {spec.plan!r}: {message}", errors=[error])
    different = await asyncio.to_thread(_differences, spec, found)
    if different:
        raise ProblemError(
            409,
            f"plan {spec.plan!r} was made for another job: "
            + "; ".join(f"{one.field} {one.message}" for one in different),
            errors=[{"field": one.field, "value": one.value, "message": one.message} for one in different],
            code=Code.PLAN_MISMATCH,
        )
    return found


def summary(kept: NamedPlan, keep_days: float) -> NamedPlanSummary:
    """As lists show it."""
    expires_at = None if keep_days == FOR_EVER else kept.used_at + timedelta(days=keep_days)
    names = ("id", "owner", "name", "created_at", "used_at", "size_bytes")
    return NamedPlanSummary(
        **{name: getattr(kept, name) for name in names}, expires_at=expires_at, **kept.summary
    )


def _differences(spec: JobSpec, kept: NamedPlan) -> list[Any]:
    made_for = json.loads(kept.made_for)
    chosen = PlannedChoice(
        tuple(kept.summary["begins"]),
        kept.summary["microbatches"],
        (kept.summary["asked_schedule"], kept.summary["schedule"]),
    )
    return differences(spec.model_dump(mode="json"), made_for["job"], chosen, made_for["device"])


def _summary(job: Mapping[str, Any], plan: str, device: str | None, notes: list[str]) -> dict[str, Any]:
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
