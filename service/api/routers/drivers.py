"""Routes for the driver of an attempt: its assignment, layer profiles, plans, and its reports.

Each call carries the attempt's token: 401 for a wrong one, 409 once the attempt is over or no longer current.
A driver whose protocol is too old is refused with 409, and its attempt ends with VERSION_MISMATCH.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from service.api.auth import DriverAttempt
from service.api.dependencies import CurrentService, RunWhileConnected, json_text
from service.api.errors import responses
from service.api.middleware import DriverRoute
from service.jobs import drivers
from service.schemas.drivers import (
    AttemptInput,
    PlacementAnswer,
    PlacementRequest,
    PlanRequest,
    ReplanRequest,
    ReportAnswer,
    ReportIn,
    StepPlansRequest,
    TokenExchange,
)
from service.schemas.plans import JobPlanView, ReplanView, StepPlansView
from service.spec.job import Arguments
from worker.contract.versions import PROTOCOL_HEADER


async def refuse_old_driver(attempt: DriverAttempt, request: Request, service: CurrentService) -> None:
    """409 for a driver whose protocol is too old."""
    await drivers.refuse_old_driver(service, attempt, request.headers.get(PROTOCOL_HEADER))


router = APIRouter(
    prefix="/api/v1/attempts/{attempt_id}",
    tags=["attempts"],
    responses=responses(401, 409, 422),
    route_class=DriverRoute,
    dependencies=[Depends(refuse_old_driver)],
)
ProfileKey = Annotated[str, Query(pattern=r"^[\x20-\x7e]{1,200}$")]


@router.get("")
@router.get("/", include_in_schema=False)
async def read_attempt(attempt: DriverAttempt, request: Request, service: CurrentService) -> AttemptInput:
    """The job that this attempt runs, its device, the checkpoint to go on from, and its owner's secrets."""
    return await drivers.read_assignment(service, attempt, request.headers.get(PROTOCOL_HEADER))


@router.post("/token", status_code=204)
async def exchange_token(attempt: DriverAttempt, service: CurrentService, request: TokenExchange) -> Response:
    """Exchange the one-time token of the driver's environment, which Ray's API shows, for one that the driver made."""
    await drivers.exchange_token(service, attempt, request.token)
    return Response(status_code=204)


@router.get("/profile", responses=responses(404))
async def read_profile(attempt: DriverAttempt, service: CurrentService, key: ProfileKey) -> dict[str, Any]:
    """The layer profile that an earlier attempt stored under `key`."""
    return await drivers.read_profile(service, attempt, key)


@router.put("/profile", status_code=204, responses=responses(413))
async def write_profile(
    attempt: DriverAttempt, service: CurrentService, key: ProfileKey, profile: Arguments
) -> Response:
    """Store a layer profile for later attempts of jobs with the same model and code, or what links cost, for all."""
    await drivers.store_profile(service, attempt, key, profile)
    return Response(status_code=204)


@router.post("/placement")
async def place_attempt(
    attempt: DriverAttempt, service: CurrentService, request: PlacementRequest
) -> PlacementAnswer:
    """The node of each worker: whole meshes on nodes, and those near to each other that exchange most."""
    return await drivers.place_attempt(service, attempt, request)


@router.post("/plan", response_model=JobPlanView, responses=responses(503))
async def plan_attempt(
    attempt: DriverAttempt, service: CurrentService, request: PlanRequest, run: RunWhileConnected
) -> Response:
    """Partition the profiled layers and schedule them; the plan becomes the job's plan."""
    return json_text(await drivers.plan_attempt(service, attempt, request.model_dump(), run))


@router.post("/replan", response_model=ReplanView, responses=responses(503))
async def replan_attempt(
    attempt: DriverAttempt, service: CurrentService, request: ReplanRequest, run: RunWhileConnected
) -> Response:
    """A shorter order of the running plan at the costs that its steps had, for the driver to swap in."""
    return json_text(await drivers.replan_attempt(service, attempt, request, run))


@router.post("/step-plans", response_model=StepPlansView, responses=responses(503))
async def step_plans(
    attempt: DriverAttempt, service: CurrentService, request: StepPlansRequest, run: RunWhileConnected
) -> Response:
    """The plans of single steps, by the lengths of their microbatches, for the driver to run in place of the job's own."""
    return json_text(await drivers.plan_steps(service, attempt, request, run))


@router.post("/forward-plan", responses=responses(503))
async def forward_plan(
    attempt: DriverAttempt, service: CurrentService, spec: Arguments, run: RunWhileConnected
) -> Response:
    """The plan of an evaluation: of a PipelineSpec, forwards only."""
    return json_text(await drivers.plan_forwards(service, attempt, spec, run))


@router.post("/reports", response_model_exclude_defaults=True)
async def report(attempt: DriverAttempt, service: CurrentService, body: ReportIn) -> ReportAnswer:
    """Store what happened since the last report; the answer tells the driver to go on or to end."""
    return await drivers.apply_report(service, attempt, body)
