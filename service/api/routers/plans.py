"""Routes that plan without training: a PipelineSpec, or a job's model; and the plans saved under names.

Plans are made in the planner's process pool, never in the event loop.
A job whose costs are unknown is profiled by one worker first: 202 until then, the same request is sent again.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from service.api.auth import Caller
from service.api.dependencies import CurrentService, accepted, while_connected
from service.api.errors import ProblemError, responses
from service.api.middleware import PlanRoute, UserRoute
from service.api.routers.jobs import check_references
from service.api.saved_plans import (
    own_saved_plan,
    plan_named_by,
    save_new_plan,
    saved_plan_for_planner,
    saved_plan_preview,
    saved_plan_summary,
)
from service.orchestrator.planning.pool import PLAN_FORMATS, PlanTimeoutError
from service.orchestrator.tasks.profile import ProfileRequest, ProfilingFailedError
from service.orchestrator.tasks.runner import TaskState
from service.schemas.jobs import JobPlanPreview, ProfilingView
from service.schemas.plans import SavedPlanList, SavedPlanView
from service.spec.job import NAME_PATTERN, OWNER_PATTERN, JobSpec, LimitedArguments
from service.store.database import utc_now
from service.store.plans import delete_saved_plan, find_saved_plan, list_saved_plans
from worker.contract.job import Job, microbatch_counts

job_plan_router = APIRouter(prefix="/api/v1/plans", tags=["plans"], route_class=UserRoute)


@job_plan_router.post(
    "/job",
    response_model=JobPlanPreview,
    responses={
        202: {"model": ProfilingView, "description": "Being measured: ask again"},
        **responses(403, 409, 413, 422, 503),
    },
)
async def plan_job(
    request: Request,
    spec: JobSpec,
    caller: Caller,
    service: CurrentService,
    budget_s: Annotated[float | None, Query(ge=0, le=600, description="Search time of auto")] = None,
    name: Annotated[
        str | None,
        Query(
            pattern=NAME_PATTERN,
            max_length=100,
            description="Keep the plan under this name, for jobs that ask for it; the same again answers the kept one",
        ),
    ] = None,
) -> Response:
    """Cut, placement, schedule, memory and expected step time of a job, at once where its costs are known.

    Else one worker measures them, and the answer is 202 until it has: send the same again.
    """
    await check_references(service, spec, caller)
    named = await plan_named_by(service, spec, caller)
    if name is not None:
        if named is not None:
            raise ProblemError(
                422, f"the job names the plan {spec.plan!r}: leave out `plan`, or the new name"
            )
        if (kept := await own_saved_plan(service, caller, name, spec)) is not None:
            return Response(saved_plan_preview(kept), media_type="application/json")
    job = spec.model_dump(mode="json")
    try:
        counts = microbatch_counts(Job.from_json(job))
        known = await service.profiler.result(
            ProfileRequest(job, counts, caller.name), cluster=service.settings.queues[spec.queue].cluster
        )
    except ProfilingFailedError as error:
        raise ProblemError(422, f"the job could not be measured: {error}") from None
    if known is TaskState.RUNNING:
        return accepted(ProfilingView(state="PROFILING", message="one worker measures what the job costs"))
    settings = service.settings
    budget = settings.plan_budget_s if budget_s is None else min(budget_s, settings.plan_budget_s)
    try:
        if named is None:
            planning = service.planner.plan_job(job, known.costs, budget_s=budget)
        else:
            planning = service.planner.plan_from_saved(
                job, known.costs, await saved_plan_for_planner(service, named.id, spec.plan)
            )
        text = await while_connected(request, planning)
    except PlanTimeoutError as error:
        raise ProblemError(422, f"{error}: choose a named pipeline.schedule, or fewer microbatches") from None
    told = {"measured_by": known.measured_by, "notes": known.costs.get("notes") or []}
    if name is not None:
        kept = await save_new_plan(service, caller, name, spec, known.costs, text, told)
        return Response(saved_plan_preview(kept), media_type="application/json")
    # the plan is long: it is passed on as the text that it is
    return Response(f"{json.dumps(told)[:-1]}, {text[1:]}", media_type="application/json")


saved_plans_router = APIRouter(prefix="/api/v1/plans/named", tags=["plans"], route_class=UserRoute)

PlanName = Annotated[str, Path(pattern=NAME_PATTERN, max_length=100, description="A kept plan's name")]
PlanOwner = Annotated[
    str | None, Query(max_length=200, pattern=OWNER_PATTERN, description="Whose; the caller's own if absent")
]


@saved_plans_router.get("", responses=responses(422))
async def read_saved_plans(
    service: CurrentService,
    owner: Annotated[
        str | None, Query(max_length=200, pattern=OWNER_PATTERN, description="Only this principal's plans")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    page_token: Annotated[str | None, Query(pattern=r"^plan-[0-9a-f]{16}$")] = None,
) -> SavedPlanList:
    """Plans that are kept under names."""
    async with service.database.read() as session:
        found = await list_saved_plans(session, owner=owner, after=page_token, limit=limit + 1)
    days = service.settings.keep_plans_days
    token = found[limit - 1].id if len(found) > limit else None
    return SavedPlanList(
        items=[saved_plan_summary(one, days) for one in found[:limit]], next_page_token=token
    )


@saved_plans_router.get("/{name}", responses=responses(404, 422))
async def read_saved_plan(
    name: PlanName, caller: Caller, service: CurrentService, owner: PlanOwner = None
) -> SavedPlanView:
    """A kept plan as a whole, and the job that it was made for."""
    whose = caller.name if owner is None else owner
    async with service.database.read() as session:
        found = await find_saved_plan(session, whose, name)
    if found is None:
        raise _no_plan_problem(name, whose)
    shown = saved_plan_summary(found, service.settings.keep_plans_days)
    return SavedPlanView(
        **shown.model_dump(),
        job=json.loads(found.made_for)["job"],
        plan=JobPlanPreview.model_validate_json(saved_plan_preview(found)),
    )


@saved_plans_router.delete("/{name}", status_code=204, responses=responses(404, 422))
async def remove_saved_plan(
    name: PlanName, caller: Caller, service: CurrentService, owner: PlanOwner = None
) -> Response:
    """Forget a kept plan. Jobs that were submitted with it keep it."""
    whose = caller.name if owner is None else owner
    if whose != caller.name and not caller.may_change(whose):
        raise ProblemError(403, f"plan {name} is {whose}'s, and {caller.name} is no operator: ask one")
    async with service.database.write() as session:
        known = await delete_saved_plan(session, whose, name, by=caller.name, at=utc_now())
    if not known:
        raise _no_plan_problem(name, whose)
    return Response(status_code=204)


def _no_plan_problem(name: str, owner: str) -> ProblemError:
    whose = f"{owner} keeps" if owner else "there is"
    return ProblemError(404, f"{whose} no plan {name}: GET /api/v1/plans/named lists them")


spec_plan_router = APIRouter(prefix="/api/v1/plans", tags=["plans"], route_class=PlanRoute)


class PlanSpec(BaseModel):
    """A PipelineSpec (DESIGN section 4). Its details are checked by the scheduler, not here."""

    model_config = ConfigDict(extra="allow", strict=True)

    microbatches: Annotated[int, Field(ge=1)]
    meshes: Annotated[list[LimitedArguments], Field(min_length=1, fail_fast=True)]
    stages: Annotated[list[LimitedArguments], Field(min_length=1, fail_fast=True)]
    edges: Annotated[list[LimitedArguments], Field(fail_fast=True)] = []

    @property
    def actions(self) -> int:
        return self.microbatches * (len(self.stages) + len(self.edges))


_FORMAT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The plan in the format asked for",
        "content": {media: {} for media in sorted(set(PLAN_FORMATS.values()))},
    }
}


@spec_plan_router.post(
    "", response_class=Response, responses={**_FORMAT_RESPONSES, **responses(413, 422, 503)}
)
async def plan_spec(
    request: Request,
    spec: PlanSpec,
    service: CurrentService,
    format: Literal["json", "csv", "table", "events", "chrome", "svg", "text"] = "json",
    budget_s: Annotated[float | None, Query(ge=0, le=600, description="Search time of auto")] = None,
) -> Response:
    """Schedule one step: timeline, memory and programs of every mesh."""
    settings = service.settings
    if spec.actions > settings.plan_action_limit:
        raise ProblemError(
            413,
            f"microbatches x (stages + edges) is {spec.actions}, the limit is {settings.plan_action_limit}: "
            "send a smaller spec, or use `slotline plan`, which has no limit",
        )
    budget = settings.plan_budget_s if budget_s is None else min(budget_s, settings.plan_budget_s)
    planning = service.planner.plan_spec(spec.model_dump_json(), budget_s=budget, format=format)
    text = await while_connected(request, planning)
    return Response(text, media_type=PLAN_FORMATS[format])
