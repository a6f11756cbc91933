"""Routes for the driver of an attempt: its assignment, layer profiles, plans, and its reports.

Each call carries the attempt's token: 401 for a wrong one, 409 once the attempt is over or no longer current.
A driver whose protocol is too old is refused with 409, and its attempt ends with VERSION_MISMATCH.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from service.api.auth import DriverAttempt
from service.api.dependencies import CurrentService, Service, while_connected
from service.api.errors import ProblemCode, ProblemError, responses
from service.api.middleware import DriverRoute
from service.api.saved_plans import saved_plan_for_planner
from service.api.views import checkpoint_view
from service.observability.tracing import Span, attempt_context, exporting, record_span
from service.orchestrator.attempts import outcome
from service.orchestrator.attempts.outcome import check_current, end_attempt
from service.orchestrator.planning.pool import PlanTimeoutError
from service.schemas.drivers import (
    AttemptInput,
    PlanRequest,
    ReportAnswer,
    ReportedSpan,
    ReportedStep,
    ReportIn,
)
from service.schemas.jobs import JobPlanView
from service.spec.job import Arguments, stored_plan_name
from service.spec.states import AttemptState
from service.store.attempts import lock_attempt
from service.store.database import utc_now
from service.store.jobs import find_job
from service.store.measurements import (
    MEASURED_BY_GANG,
    EvaluationRecord,
    SlotRecord,
    StepRecord,
    find_profile,
    record_costs,
    record_driver_profile,
    scoped_costs_digest,
    scoped_profile_key,
)
from service.store.plans import find_job_plan, record_job_plan
from service.store.secrets import (
    MissingSecretError,
    NoSecretsKeyError,
    SecretBox,
    open_secrets,
    spec_secret_names,
)
from service.store.tables import Attempt, Job
from worker.contract.costs import costs_digest
from worker.contract.reasons import Reason
from worker.contract.versions import PROTOCOL_HEADER, driver_too_old_message


async def refuse_old_driver(attempt: DriverAttempt, request: Request, service: CurrentService) -> None:
    """Raise 409 for a driver that is too old. It hears that nobody wants its attempt, and the job why that ended."""
    refusal = driver_too_old_message(request.headers.get(PROTOCOL_HEADER))
    if refusal is None:
        return
    async with service.database.write() as session:
        fresh, job = await lock_attempt(session, attempt.id)
        check_current(job, fresh)
        await end_attempt(
            session,
            job,
            fresh,
            AttemptState.FAILED,
            reason=Reason.VERSION_MISMATCH,
            message=refusal,
            at=utc_now(),
            backoff=service.backoff,
        )
    service.wake()
    raise ProblemError(409, refusal, code=ProblemCode.VERSION_MISMATCH)


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
async def read_attempt(attempt: DriverAttempt, service: CurrentService) -> AttemptInput:
    """The job that this attempt runs, its device, the checkpoint to go on from, and its owner's secrets."""
    job = await _current_job(service, attempt)
    secrets = await _job_secrets(service, job)
    return AttemptInput(
        attempt_id=attempt.id,
        job_id=job.id,
        number=attempt.number,
        job=job.spec,
        device=attempt.device,
        resume=checkpoint_view(job),
        secrets=secrets,
    )


@router.get("/profile", responses=responses(404))
async def read_profile(attempt: DriverAttempt, service: CurrentService, key: ProfileKey) -> dict[str, Any]:
    """The layer profile that an earlier attempt stored under `key`."""
    job = await _current_job(service, attempt)
    async with service.database.read() as session:
        profile = await find_profile(
            session, scoped_profile_key(job.spec, key, owner=job.owner, cluster=attempt.cluster)
        )
    if profile is None:
        raise ProblemError(404, f"no profile is stored under {key}: measure one and PUT it here")
    return profile


@router.put("/profile", status_code=204, responses=responses(413))
async def write_profile(
    attempt: DriverAttempt, service: CurrentService, key: ProfileKey, profile: Arguments
) -> Response:
    """Store a layer profile for later attempts of jobs with the same model and code, or what links cost, for all."""
    job = await _current_job(service, attempt)
    size = len(await asyncio.to_thread(json.dumps, profile))
    limit = service.settings.profile_limit_bytes
    if size > limit:
        raise ProblemError(
            413,
            f"the profile is JSON of {size} bytes, the limit is {limit}: raise SLOTLINE_PROFILE_LIMIT_BYTES",
        )
    async with service.database.write() as session:
        await record_driver_profile(
            session, job.spec, key, profile, at=utc_now(), owner=job.owner, cluster=attempt.cluster
        )
    return Response(status_code=204)


@router.post("/plan", response_model=JobPlanView, responses=responses(503))
async def plan_attempt(
    attempt: DriverAttempt, service: CurrentService, request: PlanRequest, connection: Request
) -> Response:
    """Partition the profiled layers and schedule them; the plan becomes the job's plan."""
    job = await _current_job(service, attempt)
    async with service.database.read() as session:
        earlier = await find_job_plan(session, attempt.job_id)
    costs, given = request.model_dump(), None
    if job.given_plan is not None:
        given = await saved_plan_for_planner(service, job.given_plan, stored_plan_name(job.spec))
    try:
        if given is not None:
            planning = service.planner.plan_from_saved(job.spec, costs, given, attempt=attempt.id)
        else:
            planning = service.planner.plan_job(
                job.spec,
                costs,
                earlier=None if earlier is None else earlier.body,
                budget_s=service.settings.plan_budget_s,
                attempt=attempt.id,
            )
        planned = await while_connected(connection, planning)
    except PlanTimeoutError as error:  # not 503: a driver that asked again would wait again
        raise ProblemError(422, f"{error}: choose a named pipeline.schedule, or fewer microbatches") from None
    async with service.database.write() as session:
        await _check_current(session, attempt)
        await record_job_plan(session, attempt, planned, at=utc_now())
        digest = scoped_costs_digest(costs_digest(job.spec), job.owner, attempt.cluster)
        await record_costs(session, digest, costs, measured_by=MEASURED_BY_GANG, at=utc_now())
    if given is not None:  # the driver compares what it has traced with what the plan was made for
        planned = f'{planned[:-1]}, "made_for": {given.made_for}}}'
    return Response(planned, media_type="application/json")


@router.post("/forward-plan", responses=responses(503))
async def forward_plan(
    attempt: DriverAttempt, service: CurrentService, spec: Arguments, connection: Request
) -> Response:
    """The plan of an evaluation: of a PipelineSpec, forwards only."""
    await _current_job(service, attempt)
    planning = service.planner.plan_forwards(
        spec, budget_s=service.settings.plan_budget_s, attempt=attempt.id
    )
    try:
        planned = await while_connected(connection, planning)
    except PlanTimeoutError as error:
        raise ProblemError(422, f"{error}: choose fewer microbatches") from None
    return Response(planned, media_type="application/json")


@router.post("/reports")
async def report(attempt: DriverAttempt, service: CurrentService, body: ReportIn) -> ReportAnswer:
    """Store what happened since the last report; the answer tells the driver to go on or to end."""
    async with service.database.write() as session:
        command = await outcome.apply_report(
            session,
            attempt.id,
            _report_from_body(body),
            at=utc_now(),
            backoff=service.backoff,
            keep=service.settings.timelines_kept,
        )
    if body.state is not None:
        service.wake()
    if body.spans and exporting():
        await _record_spans(service, attempt, body.spans)
    return ReportAnswer(command=command)


async def _record_spans(service: Service, attempt: Attempt, spans: Sequence[ReportedSpan]) -> None:
    """Export what the driver says that it did; a report that comes twice has the same spans."""
    async with service.database.read() as session:
        job = await find_job(session, attempt.job_id)
    context = None if job is None else attempt_context(job.traceparent, attempt.id)
    if context is None:
        return
    for span in spans:
        record_span(
            Span(
                span.name,
                replace(context, span_id=span.span_id),
                span.started_at,
                span.ended_at,
                parent_id=span.parent_id or context.span_id,
                attributes={
                    **span.attributes,
                    "slotline.job": attempt.job_id,
                    "slotline.attempt": attempt.number,
                },
                of_driver=True,
            )
        )


async def _job_secrets(service: Service, job: Job) -> dict[str, str]:
    if not (names := spec_secret_names(job.spec)):
        return {}
    try:
        async with service.database.read() as session:
            return await open_secrets(session, SecretBox.of(service.settings), job.owner, names)
    except (MissingSecretError, NoSecretsKeyError) as error:
        raise ProblemError(422, str(error)) from None


async def _current_job(service: Service, attempt: Attempt) -> Job:
    async with service.database.read() as session:
        return await _check_current(session, attempt)


async def _check_current(session: Any, attempt: Attempt) -> Job:
    job = await find_job(session, attempt.job_id)
    assert job is not None, attempt.job_id
    outcome.check_current(job, attempt)
    return job


def _peak_memory_bytes(steps: Sequence[ReportedStep]) -> dict[str, int]:
    """The most of all steps, by mesh."""
    peaks: dict[str, int] = {}
    for step in steps:
        for mesh, size in step.peak_memory_bytes.items():
            peaks[mesh] = max(size, peaks.get(mesh, 0))
    return peaks


def _report_from_body(body: ReportIn) -> outcome.DriverReport:
    reason, message = Reason.read(body.reason, body.message)  # a driver may be newer than this control plane
    return outcome.DriverReport(
        sequence=body.sequence,
        state=None if body.state is None else AttemptState(body.state),
        reason=reason,
        message=message,
        steps=[StepRecord(**step.model_dump(exclude={"peak_memory_bytes"})) for step in body.steps],
        peak_memory_bytes=_peak_memory_bytes(body.steps),
        timelines=[
            outcome.TimelineRecord(
                step=timeline.step,
                started_at=timeline.started_at,
                uncertainty_s=timeline.uncertainty_s,
                slots=[SlotRecord(**slot.__dict__) for slot in timeline.slots],
            )
            for timeline in body.timelines
        ],
        events=[
            outcome.EventRecord(datetime.fromtimestamp(event.at, UTC), event.kind, event.message)
            for event in body.events
        ],
        metrics_endpoint=body.metrics_endpoint,
        evaluations=[EvaluationRecord(**one.model_dump()) for one in body.evaluations],
        best_checkpoint=None
        if body.best_checkpoint is None
        else body.best_checkpoint.model_dump(exclude={"stored_bytes"}),
        checkpoint=None if body.checkpoint is None else (body.checkpoint.step, body.checkpoint.uri),
        model_flops=None
        if body.model_flops is None
        else (body.model_flops.step, body.model_flops.peak_per_s),
        stored_bytes=None if body.checkpoint is None else body.checkpoint.stored_bytes,
    )
