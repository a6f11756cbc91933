"""Converts rows of the store to the response models of the API."""

from __future__ import annotations

from typing import Any

from service.schemas.jobs import (
    AttemptView,
    CheckpointView,
    EvaluationView,
    EventView,
    JobSummary,
    JobView,
    Progress,
    StepView,
)
from service.store.attempts import attempts_of
from service.store.database import Database
from service.store.tables import Attempt, Evaluation, Event, Job, Step


def job_summary(job: Job) -> JobSummary:
    return JobSummary(**_summary_fields(job))


def job_view(job: Job, attempts: list[Attempt]) -> JobView:
    return JobView(
        **_summary_fields(job),
        spec=job.spec,
        attempts=[AttemptView.model_validate(attempt, from_attributes=True) for attempt in attempts],
        checkpoint=checkpoint_view(job),
        trace_id=job.trace_id,
        best_checkpoint=job.best_checkpoint,
    )


async def current_view(database: Database, job: Job) -> JobView:
    """The job with its attempts, which are read now."""
    async with database.read() as session:
        return job_view(job, list(await attempts_of(session, job.id)))


def checkpoint_view(job: Job) -> CheckpointView | None:
    if job.checkpoint_step is None or job.checkpoint_uri is None:
        return None
    return CheckpointView(step=job.checkpoint_step, uri=job.checkpoint_uri)


def _summary_fields(job: Job) -> dict[str, Any]:
    columns = JobSummary.model_fields.keys() - {"progress", "labels"}
    per_s = job.step_flops / job.step_s if job.step_flops is not None and job.step_s else None
    progress = Progress(
        step=job.step or 0,
        steps=job.steps_wanted,
        loss=job.loss,
        metrics=job.metrics,
        step_s=job.step_s,
        model_flops_per_s=per_s,
        mfu=None if per_s is None or not job.peak_flops_per_s else per_s / job.peak_flops_per_s,
    )
    return {
        **{name: getattr(job, name) for name in columns},
        "progress": progress,
        "labels": job.labels or {},
    }


def event_view(event: Event) -> EventView:
    return EventView.model_validate(event, from_attributes=True)


def evaluation_view(evaluation: Evaluation) -> EvaluationView:
    return EvaluationView.model_validate(evaluation, from_attributes=True)


def step_view(step: Step) -> StepView:
    return StepView.model_validate(step, from_attributes=True)
