"""Plans of jobs that do not train: previews, and plans saved under names, which jobs may be submitted with.

Whether a saved plan fits a job is a comparison of values. A job that leaves a field `auto` takes what the plan has.
Fields that change no plan (steps, seeds, learning rates, starting weights, data of the same shape) may differ; layers
and memory are compared later, when the attempt knows them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from pydantic_core import from_json
from sqlalchemy.exc import IntegrityError

from service.jobs.problems import ProblemCode, ProblemError, field_problem
from service.jobs.service import RunWork, Service, with_fields
from service.orchestrator.planning.pool import PlanTimeoutError
from service.orchestrator.planning.work import SavedPlanInput
from service.orchestrator.tasks.profile import ProfileRequest, ProfilingFailedError, usual_kind
from service.orchestrator.tasks.runner import TaskState
from service.scheduler.why.calibration import FEWEST_RUNS, forecast
from service.schemas.plans import JobPlanPreview, SavedPlanList, SavedPlanSummary, SavedPlanView
from service.spec.job import JobSpec
from service.spec.principals import Principal
from service.store.database import utc_now
from service.store.files import KEEP_PLANS_DAYS
from service.store.measurements import has_unequal_lengths, model_key, past_runs
from service.store.plans import (
    NewSavedPlan,
    TooManySavedPlansError,
    delete_saved_plan,
    find_saved_plan,
    list_saved_plans,
    saved_plan_by_id,
    store_saved_plan,
)
from service.store.tables import SavedPlanRow
from worker.contract.job import AUTO, Job, microbatch_counts

PLANS_OF_ONE_OWNER = 100
"""Saved plans of one owner at most: they are kept for months."""
PLAN_SIZE_LIMIT_BYTES = 32 << 20
"""JSON of one saved plan at most."""


@dataclass(frozen=True)
class PlanProvenance:
    """The origin of a preview's costs: their measurement, and assumptions where there was none."""

    measured_by: str
    notes: list[str]


async def preview_plan(
    service: Service,
    spec: JobSpec,
    caller: Principal,
    *,
    name: str | None,
    budget_s: float | None,
    run: RunWork,
) -> str | None:
    """JSON of a JobPlanPreview for a job that `check_references` accepted; None while one worker measures its costs.

    With `name` the plan is saved; the same job again answers the saved one. `run` awaits the planner.
    """
    named = await plan_named_by(service, spec, caller)
    job, cluster = spec.model_dump(mode="json"), service.settings.queues[spec.queue].cluster
    if name is not None:
        if named is not None:
            raise ProblemError(
                422, f"the job names the plan {spec.plan!r}: leave out `plan`, or the new name"
            )
        if (saved := await _own_saved_plan(service, caller, name, spec)) is not None:
            return await _with_forecast(service, job, caller, await saved_plan_preview(saved), cluster)
    try:
        counts = microbatch_counts(Job.from_json(job))
        known = await service.profiler.result(ProfileRequest(job, counts, caller.name), cluster=cluster)
    except ProfilingFailedError as error:
        raise ProblemError(422, f"the job could not be measured: {error}") from None
    if known is TaskState.RUNNING:
        return None
    limit_s = service.settings.plan_budget_s
    try:
        if named is None:
            budget = limit_s if budget_s is None else min(budget_s, limit_s)
            planning = service.planner.plan_job(job, known.costs, budget_s=budget)
        else:
            planning = service.planner.plan_from_saved(
                job, known.costs, await saved_plan_for_planner(service, named.id, spec.plan)
            )
        plan = await run(planning)
    except PlanTimeoutError as error:
        raise planning_timeout_problem(error) from None
    provenance = PlanProvenance(known.measured_by, known.costs.get("notes") or [])
    if name is None:
        preview = await with_fields(plan, first=asdict(provenance))
    else:
        preview = await saved_plan_preview(
            await _save_new_plan(service, caller, name, spec, known.costs, plan, provenance)
        )
    return await _with_forecast(service, job, caller, preview, cluster)


async def _with_forecast(
    service: Service, job: Mapping[str, Any], caller: Principal, preview: str, cluster: str
) -> str:
    return await with_fields(
        preview, last={"forecast": await _forecast(service, job, caller, preview, cluster)}
    )


async def _forecast(
    service: Service, job: Mapping[str, Any], caller: Principal, plan: str, cluster: str
) -> dict[str, Any] | None:
    """JSON of a ForecastView of what the attempts of the same model, or else of any, made of their plans on such
    accelerators; None where these are too few. Jobs with data.lengths stand apart: their steps are shorter than planned."""
    capacity = service.clusters.of(cluster).watcher.capacity
    kind = None if capacity is None else usual_kind(job, capacity)
    step_s, peak_bytes = await asyncio.to_thread(planned_values, plan)
    if kind is None or step_s is None:
        return None
    async with service.database.read() as session:
        runs = await past_runs(
            session, cluster=cluster, device=kind.device, accelerator_type=kind.accelerator_type
        )
    model = model_key(job, caller.name, cluster)
    own = [run for run in runs if run.model == model]
    others = [] if has_unequal_lengths(job) else [run for run in runs if not run.shorter]
    like, chosen = ("this model", own) if len(own) >= FEWEST_RUNS else ("these accelerators", others)
    expected_s = forecast(step_s, [run.step for run in chosen])
    if expected_s is None:
        return None
    peaks = [run.peak for run in chosen if run.peak is not None]
    peak = None if peak_bytes is None else forecast(peak_bytes, peaks)
    return {
        "runs": len(chosen),
        "of": like,
        "step_s": asdict(expected_s),
        "peak_bytes": None if peak is None else asdict(peak),
    }


def planned_values(plan: str) -> tuple[float | None, int | None]:
    """The planned step in seconds, and the most memory in bytes that a worker needs, in the JSON of a JobPlanView."""
    body = from_json(plan)
    peaks = [mesh.get("peak_memory_bytes") for mesh in body["plan"].get("meshes") or ()]
    return body.get("step_s"), max((peak for peak in peaks if peak), default=None)


def planning_timeout_problem(error: PlanTimeoutError) -> ProblemError:
    """422 PLANNING_TIMEOUT for a job's plan that took too long without a search too: who asked again would wait again."""
    return ProblemError(
        422,
        f"{error}: try again when it is not, or give the planner less to do: a named "
        "pipeline.schedule, fixed pipeline.stages and training.microbatches, fewer microbatches",
        code=ProblemCode.PLANNING_TIMEOUT,
    )


async def plan_named_by(service: Service, spec: JobSpec, caller: Principal) -> SavedPlanRow | None:
    """The caller's plan that a job names, without its body; None where it names none.

    422 where the caller has no such plan, 409 where it was made for another job.
    """
    if spec.plan is None:
        return None
    async with service.database.read() as session:
        plan = await find_saved_plan(session, caller.name, spec.plan, whole=False)
    if plan is None or not caller.sees(plan.project):
        raise field_problem(
            "plan",
            spec.plan,
            "you have no such saved plan: `slotline plan job.yaml --name ...` makes one, `slotline plans list` lists all",
        )
    differences = await asyncio.to_thread(_differences_from_plan, spec, plan)
    if differences:
        raise ProblemError(
            409,
            f"plan {spec.plan!r} was made for another job: "
            + "; ".join(f"{difference.field} {difference.message}" for difference in differences),
            errors=[
                {"field": difference.field, "value": difference.value, "message": difference.message}
                for difference in differences
            ],
            code=ProblemCode.PLAN_MISMATCH,
        )
    return plan


async def saved_plan_for_planner(service: Service, plan_id: str, name: str) -> SavedPlanInput:
    """The input of a planning process; `name` is the plan's at the submission, as it may have none now. 422 where the
    plan is gone."""
    async with service.database.read() as session:
        plan = await saved_plan_by_id(session, plan_id)
    if plan is None:
        raise ProblemError(
            422,
            f"the plan {name!r} that the job was submitted with was deleted long ago: make one anew (slotline plan "
            "job.yaml --name ...) and submit the job again",
        )
    return SavedPlanInput({**_plan_reference(plan), "name": name}, plan.body, plan.made_for)


async def list_summaries(
    service: Service, caller: Principal, *, owner: str | None, after: str | None, limit: int
) -> SavedPlanList:
    """A page of the saved plans that the caller sees, by id, behind the id `after`; of one owner or of all."""
    projects = caller.visible_projects
    async with service.database.read() as session:
        plans = await list_saved_plans(session, owner=owner, after=after, limit=limit + 1, projects=projects)
    return SavedPlanList(
        items=[_plan_summary(plan) for plan in plans[:limit]],
        next_page_token=plans[limit - 1].id if len(plans) > limit else None,
    )


async def read_saved_plan(service: Service, name: str, owner: str, caller: Principal) -> SavedPlanView:
    """A saved plan as a whole, and the job that it was made for; 404 where the owner has none of this name that the caller
    sees."""
    async with service.database.read() as session:
        plan = await find_saved_plan(session, owner, name)
    if plan is None or not caller.sees(plan.project):
        raise _no_plan_problem(name, owner)
    summary = _plan_summary(plan)
    return SavedPlanView(
        **summary.model_dump(),
        job=json.loads(plan.made_for)["job"],
        plan=JobPlanPreview.model_validate_json(await saved_plan_preview(plan)),
    )


async def remove_saved_plan(service: Service, name: str, owner: str, caller: Principal) -> None:
    """Take a plan's name away: jobs that were submitted with it keep it. 403 for another owner's, unless by an operator or
    an admin of its project; 404 for one that the caller does not see."""
    own = owner == caller.name  # removed also by who has left its project
    async with service.database.write() as session:
        plan = await find_saved_plan(session, owner, name, whole=False)
        if plan is None or not (own or caller.sees(plan.project)):
            raise _no_plan_problem(name, owner)
        if not own and not caller.may_change(owner, plan.project):
            raise ProblemError(403, f"plan {name} is {caller.why_not(owner, plan.project)}: ask one")
        await delete_saved_plan(session, owner, name, by=caller.name, at=utc_now())


def _no_plan_problem(name: str, owner: str) -> ProblemError:
    subject = f"{owner} has" if owner else "there is"
    return ProblemError(
        404, f"{subject} no plan {name}: GET /api/v1/plans/named lists them, as does `slotline plans list`"
    )


async def _own_saved_plan(
    service: Service, caller: Principal, name: str, spec: JobSpec
) -> SavedPlanRow | None:
    """The caller's plan of this name for this job, or None; 409 where it was made for another job."""
    async with service.database.read() as session:
        plan = await find_saved_plan(session, caller.name, name)
    if plan is not None and plan.request_digest != request_digest(spec):
        raise ProblemError(
            409,
            f"you have saved a plan of another job as {name!r}: choose another name, or remove it (slotline plans remove "
            f"{name})",
            code=ProblemCode.PLAN_NAME_TAKEN,
        )
    return plan


async def _save_new_plan(
    service: Service,
    caller: Principal,
    name: str,
    spec: JobSpec,
    costs: Mapping[str, Any],
    plan: str,
    provenance: PlanProvenance,
) -> SavedPlanRow:
    """Store the plan (JSON) that was made for `spec` with these costs. 413 for a long one, 409 for one too many."""
    job = spec.model_dump(mode="json")
    if (size := len(plan)) > PLAN_SIZE_LIMIT_BYTES:
        raise ProblemError(
            413,
            f"the plan is JSON of {size} bytes, and a saved one has at most {PLAN_SIZE_LIMIT_BYTES}: use fewer microbatches",
        )
    made_for = await service.planner.made_for(job, costs, plan)
    new = NewSavedPlan(
        owner=caller.name,
        project=spec.project,
        name=name,
        request_digest=request_digest(spec),
        measured_by=provenance.measured_by,
        summary=await asyncio.to_thread(
            _stored_summary, job, plan, json.loads(made_for)["device"], provenance.notes
        ),
        made_for=made_for,
        body=plan,
    )
    try:
        async with service.database.write() as session:
            return await store_saved_plan(session, new, at=utc_now(), most=PLANS_OF_ONE_OWNER)
    except TooManySavedPlansError as error:
        raise ProblemError(
            409,
            f"{error}: remove one (slotline plans remove NAME)",
            code=ProblemCode.TOO_MANY_PLANS,
        ) from None
    except IntegrityError:  # another request has saved it meanwhile
        if (saved := await _own_saved_plan(service, caller, name, spec)) is None:
            raise
        return saved


def request_digest(spec: JobSpec) -> str:
    """SHA-256 of a job, by which a repeated request is known and answered as the first was.

    Defaults are left out: a newer Slotline knows more fields, and the same body must keep its digest.
    """
    return hashlib.sha256(spec.model_dump_json(exclude_defaults=True).encode()).hexdigest()


async def saved_plan_preview(plan: SavedPlanRow) -> str:
    """JSON of a JobPlanPreview."""
    provenance = PlanProvenance(plan.measured_by, plan.summary["notes"])
    return await with_fields(plan.body, first={**asdict(provenance), "named": _plan_reference(plan)})


def _plan_reference(plan: SavedPlanRow) -> dict[str, Any]:
    """JSON of a SavedPlanRef."""
    return {"id": plan.id, "owner": plan.owner, "name": plan.name}


def _plan_summary(plan: SavedPlanRow) -> SavedPlanSummary:
    expires_at = plan.used_at + timedelta(days=KEEP_PLANS_DAYS)
    names = ("id", "owner", "project", "name", "created_at", "used_at", "size_bytes")
    return SavedPlanSummary(
        **{name: getattr(plan, name) for name in names}, expires_at=expires_at, **plan.summary
    )


def _stored_summary(
    job: Mapping[str, Any], plan: str, device: str | None, notes: list[str]
) -> dict[str, Any]:
    planned = json.loads(plan)
    spec = JobSpec.model_validate(job)
    return {
        "job_name": spec.name,
        "begins": planned["begins"],
        "meshes": len(planned["spec"]["meshes"]),
        "workers": spec.mesh_sizes,
        "microbatches": planned["spec"]["microbatches"],
        "precision": spec.training.precision,
        "device": device,
        "schedule": planned["plan"]["chosen"],
        "asked_schedule": planned["plan"]["schedule"],
        "recomputed": [stage["name"] for stage in planned["plan"]["stages"] if stage["recomputed"]],
        "step_s": planned["step_s"],
        "notes": notes,
    }


@dataclass(frozen=True)
class PlanDifference:
    """A field of the job (a path with dots), its value, and the value that the plan was made for."""

    field: str
    value: Any
    wanted: Any

    @property
    def message(self) -> str:
        return f"is {self.value!r}, and the plan was made for {self.wanted!r}"


@dataclass(frozen=True)
class PlannedChoice:
    """The choices of a plan: the first modules of its stages, its microbatches, and its schedule by both names."""

    stage_starts: tuple[str, ...]
    microbatches: int
    schedules: tuple[str, ...]


def _differences_from_plan(spec: JobSpec, plan: SavedPlanRow) -> list[PlanDifference]:
    made_for = json.loads(plan.made_for)
    chosen = PlannedChoice(
        tuple(plan.summary["begins"]),
        plan.summary["microbatches"],
        (plan.summary["asked_schedule"], plan.summary["schedule"]),
    )
    return plan_differences(spec.model_dump(mode="json"), made_for["job"], chosen, made_for["device"])


def plan_differences(
    spec: Mapping[str, Any], made_for: Mapping[str, Any], chosen: PlannedChoice, device: str | None
) -> list[PlanDifference]:
    """Fields in which a job differs from the job `made_for` so that it cannot train with that job's plan on `device`.

    Both jobs are JSON of a JobSpec; `chosen` is what the plan has for fields that are `auto`.
    """
    job, planned_job = Job.from_json(spec), Job.from_json(made_for)
    differences = [
        PlanDifference(field, value, planned)
        for field, value, planned in _fixed_fields(job, planned_job)
        if value != planned
    ]
    differences += [
        PlanDifference(field, value, accepted[0])
        for field, value, accepted in _auto_fields(job, planned_job, chosen)
        if value != AUTO and value not in accepted
    ]
    if device is not None and job.resources.device not in (AUTO, device):
        differences.append(PlanDifference("resources.device", job.resources.device, device))
    return differences


def _fixed_fields(job: Job, planned_job: Job) -> Iterator[tuple[str, Any, Any]]:
    """Fields that must be equal, with the values of both jobs."""
    for name in ("factory", "args", "output", "freeze"):
        yield f"model.{name}", _as_list(getattr(job.model, name)), _as_list(getattr(planned_job.model, name))
    yield "loss.factory", job.loss and job.loss.factory, planned_job.loss and planned_job.loss.factory
    yield "optimizer.factory", job.optimizer.factory, planned_job.optimizer.factory
    for name in ("global_batch", "precision", "transfers", "sync_batch_norm", "compile"):
        yield f"training.{name}", getattr(job.training, name), getattr(planned_job.training, name)
    yield "resources.meshes", job.meshes, planned_job.meshes
    if job.meshes == planned_job.meshes:
        yield "parallelism.dp", list(job.dp_sizes), list(planned_job.dp_sizes)
        yield "parallelism.tp", list(job.tensors), list(planned_job.tensors)
        yield "resources.shard", list(job.sharded), list(planned_job.sharded)
    yield "resources.tensor_plan", job.resources.tensor_plan, planned_job.resources.tensor_plan
    yield "pipeline.overlap", job.pipeline.overlap, planned_job.pipeline.overlap


def _auto_fields(job: Job, planned_job: Job, chosen: PlannedChoice) -> Iterator[tuple[str, Any, list[Any]]]:
    """Fields that may be auto, with the job's value and the values that the plan fits."""
    pipeline, planned = job.pipeline, planned_job.pipeline
    yield "training.microbatches", job.training.microbatches, [chosen.microbatches]
    yield "pipeline.stages", AUTO if pipeline.cut != AUTO else pipeline.stages, [len(chosen.stage_starts)]
    yield "pipeline.cut", _as_list(pipeline.cut), [list(chosen.stage_starts), _as_list(planned.cut)]
    yield "pipeline.schedule", pipeline.schedule, list(chosen.schedules)
    yield "pipeline.recompute", _as_list(pipeline.recompute), [_as_list(planned.recompute)]


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
