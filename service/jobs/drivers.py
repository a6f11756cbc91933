"""The control plane's side of an attempt's driver: its assignment, layer profiles, plans, and its reports.

Every call of an attempt that is over, or no longer its job's current one, is refused with StaleAttemptError. A driver
whose protocol is too old ends its attempt with VERSION_MISMATCH.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from service.jobs.problems import ProblemCode, ProblemError
from service.jobs.saved_plans import saved_plan_for_planner
from service.jobs.service import RunWork, Service, with_fields
from service.jobs.views import checkpoint_view
from service.observability.tracing import Span, attempt_context, exporting, record_span
from service.orchestrator.attempts import outcome
from service.orchestrator.attempts.outcome import check_current, end_attempt
from service.orchestrator.planning.pool import PlanTimeoutError
from service.schemas.drivers import AttemptInput, ReportAnswer, ReportedSpan, ReportedStep, ReportIn
from service.spec.job import stored_plan_name
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
from worker.contract.versions import driver_too_old_message


async def refuse_old_driver(service: Service, attempt: Attempt, protocol: str | None) -> None:
    """409 for a driver whose protocol is too old: its attempt ends, and the job's reason says why."""
    refusal = driver_too_old_message(protocol)
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


async def read_assignment(service: Service, attempt: Attempt) -> AttemptInput:
    """The attempt's job, device, checkpoint to go on from, and its owner's secrets. 422 where a secret is missing."""
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


async def read_profile(service: Service, attempt: Attempt, key: str) -> dict[str, Any]:
    """The layer profile that an earlier attempt of the same model, code and cluster stored under `key`; else 404."""
    job = await _current_job(service, attempt)
    async with service.database.read() as session:
        profile = await find_profile(
            session, scoped_profile_key(job.spec, key, owner=job.owner, cluster=attempt.cluster)
        )
    if profile is None:
        raise ProblemError(404, f"no profile is stored under {key}: measure one and PUT it here")
    return profile


async def store_profile(service: Service, attempt: Attempt, key: str, profile: dict[str, Any]) -> None:
    """Store a profile for later attempts; 413 where its JSON is longer than the setting allows."""
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


async def plan_attempt(service: Service, attempt: Attempt, costs: dict[str, Any], run: RunWork) -> str:
    """JSON of the JobPlanView for a job with these measured costs, which becomes the job's plan.

    A job that was submitted with a saved plan gets that plan, with what it was made for: the driver compares it with what
    it has traced. `run` awaits the planner.
    """
    job = await _current_job(service, attempt)
    async with service.database.read() as session:
        earlier = await find_job_plan(session, attempt.job_id)
    saved = None
    if job.given_plan is not None:
        saved = await saved_plan_for_planner(service, job.given_plan, stored_plan_name(job.spec))
    try:
        if saved is not None:
            planning = service.planner.plan_from_saved(job.spec, costs, saved, attempt=attempt.id)
        else:
            planning = service.planner.plan_job(
                job.spec,
                costs,
                earlier=None if earlier is None else earlier.body,
                budget_s=service.settings.plan_budget_s,
                attempt=attempt.id,
            )
        plan = await run(planning)
    except PlanTimeoutError as error:  # not 503: a driver that asked again would wait again
        raise ProblemError(422, f"{error}: choose a named pipeline.schedule, or fewer microbatches") from None
    async with service.database.write() as session:
        await _check_current(session, attempt)
        await record_job_plan(session, attempt, plan, at=utc_now())
        digest = scoped_costs_digest(costs_digest(job.spec), job.owner, attempt.cluster)
        await record_costs(session, digest, costs, measured_by=MEASURED_BY_GANG, at=utc_now())
    return plan if saved is None else await with_fields(plan, last={"made_for": json.loads(saved.made_for)})


async def plan_forwards(service: Service, attempt: Attempt, spec: dict[str, Any], run: RunWork) -> str:
    """JSON of the plan of an evaluation: the forwards of a PipelineSpec."""
    await _current_job(service, attempt)
    planning = service.planner.plan_forwards(
        spec, budget_s=service.settings.plan_budget_s, attempt=attempt.id
    )
    try:
        return await run(planning)
    except PlanTimeoutError as error:
        raise ProblemError(422, f"{error}: choose fewer microbatches") from None


async def apply_report(service: Service, attempt: Attempt, body: ReportIn) -> ReportAnswer:
    """Store what happened since the driver's last report; the answer tells it to go on or to end."""
    async with service.database.write() as session:
        command = await outcome.apply_report(
            session,
            attempt.id,
            _driver_report(body),
            at=utc_now(),
            backoff=service.backoff,
            keep=service.settings.timelines_kept,
        )
    if body.state is not None:
        service.wake()
    if body.spans and exporting():
        await _record_spans(service, attempt, body.spans)
    return ReportAnswer(command=command)


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


def _driver_report(body: ReportIn) -> outcome.DriverReport:
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
        evaluations=[EvaluationRecord(**evaluation.model_dump()) for evaluation in body.evaluations],
        best_checkpoint=None
        if body.best_checkpoint is None
        else body.best_checkpoint.model_dump(exclude={"stored_bytes"}),
        checkpoint=None if body.checkpoint is None else (body.checkpoint.step, body.checkpoint.uri),
        model_flops=None
        if body.model_flops is None
        else (body.model_flops.step, body.model_flops.peak_per_s),
        stored_bytes=None if body.checkpoint is None else body.checkpoint.stored_bytes,
    )


def _peak_memory_bytes(steps: Sequence[ReportedStep]) -> dict[str, int]:
    """The most of all steps, by mesh."""
    peaks: dict[str, int] = {}
    for step in steps:
        for mesh, size in step.peak_memory_bytes.items():
            peaks[mesh] = max(size, peaks.get(mesh, 0))
    return peaks
