"""What a job would be planned to do, without training it."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from service.api.asking_again import ask_again
from service.api.auth import Caller
from service.api.callers import while_connected
from service.api.context import Current
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.kept_plans import given_of, keep, kept_under, plan_for, preview
from service.api.manage import check_references
from service.api.schemas import JobPlanPreview, ProfilingView
from service.jobspec import NAME_PATTERN, JobSpec
from service.orchestrator.planning import PlanTimeoutError
from service.orchestrator.profiling import ProfilingFailedError
from worker.choices import microbatch_counts
from worker.job import Job

router = APIRouter(prefix="/api/v1/plans", tags=["plans"], route_class=UserRoute)


@router.post(
    "/job",
    response_model=JobPlanPreview,
    responses={
        202: {"model": ProfilingView, "description": "Being measured: ask again"},
        **responses(403, 409, 413, 422, 503),
    },
)
async def plan(
    request: Request,
    spec: JobSpec,
    caller: Caller,
    service: Current,
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
    named = await plan_for(service, spec, caller)
    if name is not None:
        if named is not None:
            raise ProblemError(
                422, f"the job names the plan {spec.plan!r}: leave out `plan`, or the new name"
            )
        if (kept := await kept_under(service, caller, name, spec)) is not None:
            return Response(preview(kept), media_type="application/json")
    job = spec.model_dump(mode="json")
    try:
        counts = microbatch_counts(Job.from_json(job))
        known = await service.profiler.costs(
            job, counts, owner=caller.name, cluster=service.settings.queues[spec.queue].cluster
        )
    except ProfilingFailedError as error:
        raise ProblemError(422, f"the job could not be measured: {error}") from None
    if known is None:
        return ask_again(ProfilingView(state="PROFILING", message="one worker measures what the job costs"))
    settings = service.settings
    budget = settings.plan_budget_s if budget_s is None else min(budget_s, settings.plan_budget_s)
    try:
        if named is None:
            planning = service.planner.plan_job(job, known.costs, budget_s=budget)
        else:
            planning = service.planner.plan_given(
                job, known.costs, await given_of(service, named.id, spec.plan)
            )
        text = await while_connected(request, planning)
    except PlanTimeoutError as error:
        raise ProblemError(422, f"{error}: choose a named pipeline.schedule, or fewer microbatches") from None
    told = {"measured_by": known.measured_by, "notes": known.costs.get("notes") or []}
    if name is not None:
        kept = await keep(service, caller, name, spec, known.costs, text, told)
        return Response(preview(kept), media_type="application/json")
    # the plan is long: it is passed on as the text that it is
    return Response(f"{json.dumps(told)[:-1]}, {text[1:]}", media_type="application/json")
