"""Why a step takes as long as it does, planned in the process pool with what was measured."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from service.api.callers import while_connected
from service.api.context import Current
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.manage import JobId, existing_job
from service.api.why_schemas import WhyView
from service.cluster_settings import DEFAULT
from service.orchestrator.explaining import StoredStep
from service.store.plans import find_plan
from service.store.profiles import known_costs, owned_digest
from service.store.steps import find_step
from service.store.timelines import find_timeline
from worker.costs import costs_digest

router = APIRouter(
    prefix="/api/v1/jobs/{job_id}", tags=["jobs"], responses=responses(404, 422, 503), route_class=UserRoute
)


@router.get("/why", response_model=WhyView)
async def why(
    request: Request,
    job_id: JobId,
    service: Current,
    step: Annotated[int | None, Query(ge=0, lt=2**31, description="The last profiled step if absent")] = None,
) -> Response:
    """What a step waits for, what is to blame, and which changes would shorten it most, by the job's plan and the
    measured slots of the step. Before a step was profiled the plan itself is explained."""
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        plan = await find_plan(session, job_id)
        measured = await find_timeline(session, job_id, step)
        record = None if measured is None else await find_step(session, job_id, measured[0].step)
        costs = await known_costs(
            session, owned_digest(costs_digest(job.spec), job.owner, job.began_on or DEFAULT)
        )
    if plan is None:
        raise ProblemError(404, f"job {job_id} has no plan: nothing of it can be explained")
    if step is not None and measured is None:
        raise ProblemError(
            404, f"step {step} of job {job_id} was not profiled: its page lists those that were"
        )
    notes = []
    if measured is not None and measured[0].attempt != plan.attempt:
        notes.append(
            f"step {measured[0].step} was measured by attempt {measured[0].attempt}, under another plan than that of "
            f"attempt {plan.attempt}: the plan alone is explained"
        )
        measured = None
    stored = StoredStep(
        job=job.spec,
        plan=plan.body,
        slots=[] if measured is None else measured[1],
        step_s=None if measured is None or record is None else record.step_s,
        costs=costs,
        notes=tuple(notes),
    )
    text = await while_connected(request, service.planner.explain(stored))
    told = {"job_id": job_id, "attempt": plan.attempt, "step": None if measured is None else measured[0].step}
    return Response(f"{json.dumps(told)[:-1]}, {text[1:]}", media_type="application/json")
