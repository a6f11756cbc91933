"""Routes that plan without training: a PipelineSpec, or a job's model; and the plans saved under names.

Plans are made in the planner's process pool, never in the event loop.
A job whose costs are unknown is profiled by one worker first: 202 until then, the same request is sent again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response

from service.api.auth import Caller
from service.api.dependencies import CurrentService, RunWhileConnected, accepted, json_text
from service.api.errors import responses
from service.api.middleware import PlanRoute, UserRoute
from service.jobs import saved_plans
from service.jobs.problems import ProblemError
from service.jobs.submit import check_references
from service.orchestrator.planning.pool import PLAN_FORMATS
from service.schemas.plans import (
    ACTION_LIMIT,
    JobPlanPreview,
    PlanSpec,
    ProfilingView,
    SavedPlanList,
    SavedPlanView,
)
from service.spec.job import OWNER_PATTERN, SubmittedJob
from service.spec.names import NAME_PATTERN

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
    spec: SubmittedJob,
    caller: Caller,
    service: CurrentService,
    run: RunWhileConnected,
    budget_s: Annotated[float | None, Query(ge=0, le=600, description="Search time of auto")] = None,
    name: Annotated[
        str | None,
        Query(
            pattern=NAME_PATTERN,
            max_length=100,
            description="Save the plan under this name, for jobs that ask for it; the same again answers the saved one",
        ),
    ] = None,
) -> Response:
    """Cut, placement, schedule, memory and expected step time of a job, at once where its costs are known.

    Else one worker measures them, and the answer is 202 until it has: send the same again.
    """
    await check_references(service, spec, caller)
    plan = await saved_plans.preview_plan(service, spec, caller, name=name, budget_s=budget_s, run=run)
    if plan is None:
        return accepted(ProfilingView(state="PROFILING", message="one worker measures what the job costs"))
    return json_text(plan)


saved_plans_router = APIRouter(prefix="/api/v1/plans/named", tags=["plans"], route_class=UserRoute)
PlanName = Annotated[str, Path(pattern=NAME_PATTERN, max_length=100, description="A saved plan's name")]
PlanOwner = Annotated[
    str | None, Query(max_length=200, pattern=OWNER_PATTERN, description="Whose; the caller's own if absent")
]


@saved_plans_router.get("", responses=responses(422))
async def read_saved_plans(
    caller: Caller,
    service: CurrentService,
    owner: Annotated[
        str | None, Query(max_length=200, pattern=OWNER_PATTERN, description="Only this principal's plans")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    page_token: Annotated[str | None, Query(pattern=r"^plan-[0-9a-f]{16}$")] = None,
) -> SavedPlanList:
    """Plans that are saved under names, of the caller's projects."""
    return await saved_plans.list_summaries(service, caller, owner=owner, after=page_token, limit=limit)


@saved_plans_router.get("/{name}", responses=responses(404, 422))
async def read_saved_plan(
    name: PlanName, caller: Caller, service: CurrentService, owner: PlanOwner = None
) -> SavedPlanView:
    """A saved plan as a whole, and the job that it was made for."""
    return await saved_plans.read_saved_plan(service, name, caller.name if owner is None else owner, caller)


@saved_plans_router.delete("/{name}", status_code=204, responses=responses(404, 422))
async def remove_saved_plan(
    name: PlanName, caller: Caller, service: CurrentService, owner: PlanOwner = None
) -> Response:
    """Forget a saved plan. Jobs that were submitted with it keep it."""
    await saved_plans.remove_saved_plan(service, name, caller.name if owner is None else owner, caller)
    return Response(status_code=204)


spec_plan_router = APIRouter(prefix="/api/v1/plans", tags=["plans"], route_class=PlanRoute)
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
    spec: PlanSpec,
    service: CurrentService,
    run: RunWhileConnected,
    format: Literal["json", "csv", "table", "events", "chrome", "svg", "text"] = "json",
    budget_s: Annotated[float | None, Query(ge=0, le=600, description="Search time of auto")] = None,
) -> Response:
    """Schedule one step: timeline, memory and programs of every mesh."""
    settings = service.settings
    if spec.actions > ACTION_LIMIT:
        raise ProblemError(
            413,
            f"microbatches x (stages + edges) is {spec.actions}, the limit is {ACTION_LIMIT}: "
            "send a smaller spec, or use `slotline plan`, which has no limit",
        )
    budget = settings.plan_budget_s if budget_s is None else min(budget_s, settings.plan_budget_s)
    planning = service.planner.plan_spec(spec.model_dump_json(), budget_s=budget, format=format)
    return Response(await run(planning), media_type=PLAN_FORMATS[format])
