"""Converts rows of the store to the response models of the API."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from service.schemas.activity import EvaluationView, EventView, StepView
from service.schemas.jobs import AttemptView, CheckpointView, JobSummary, JobView, PlacedMeshView, Progress
from service.spec.states import JobState
from service.store.attempts import attempts_of, placements_of
from service.store.database import Database, utc_now
from service.store.events import LaunchPhase, launch_phases
from service.store.tables import AttemptRow, EvaluationRow, EventRow, JobRow, PlacedMeshRow, StepRow


def job_summary(job: JobRow) -> JobSummary:
    return JobSummary(**_summary_fields(job))


def job_view(
    job: JobRow,
    attempts: Sequence[AttemptRow],
    placements: Sequence[PlacedMeshRow] = (),
    phases: Mapping[int, Sequence[LaunchPhase]] | None = None,
) -> JobView:
    """`phases` are those that drivers reported of their launches, by the attempt's number."""
    placed = defaultdict[str, list[PlacedMeshView]](list)
    for mesh in placements:
        placed[mesh.attempt_id].append(PlacedMeshView.model_validate(mesh, from_attributes=True))
    launches = launch_seconds(job, attempts, phases or {})
    views = [AttemptView.model_validate(attempt, from_attributes=True) for attempt in attempts]
    return JobView(
        **_summary_fields(job),
        spec=job.spec,
        attempts=[
            view.model_copy(update={"placed": placed[view.id], "launch_s": launches[view.number]})
            for view in views
        ],
        checkpoint=checkpoint_view(job),
        trace_id=job.trace_id,
        best_checkpoint=job.best_checkpoint,
        effective_training_ratio=effective_training_ratio(
            job.trained_s,
            since=min((attempt.created_at for attempt in attempts), default=None),
            until=job.finished_at or utc_now(),
        ),
    )


def effective_training_ratio(trained_s: float, *, since: datetime | None, until: datetime) -> float | None:
    """The share of the time from `since` to `until` that steps took (ETTR); None before the first."""
    if since is None or not trained_s or until <= since:
        return None
    return min(1.0, trained_s / (until - since).total_seconds())


async def current_view(database: Database, job: JobRow) -> JobView:
    """The job with its attempts, which are read now."""
    async with database.read() as session:
        return await view_in(session, job)


async def view_in(session: AsyncSession, job: JobRow) -> JobView:
    """The job with its attempts and their placements, read in this session."""
    attempts = await attempts_of(session, job.id)
    placements = await placements_of(session, [attempt.id for attempt in attempts])
    return job_view(job, attempts, placements, await launch_phases(session, job.id))


def launch_seconds(
    job: JobRow, attempts: Sequence[AttemptRow], phases: Mapping[int, Sequence[LaunchPhase]]
) -> dict[int, dict[str, float]]:
    """Seconds by phase, in order, from the wait for accelerators to the end of the first step, by the attempt's number.

    A job waits from its submission, its retry or the end of the attempt before.
    """
    found: dict[int, dict[str, float]] = {}
    waits = [job.created_at, job.queued_at]
    for attempt in sorted(attempts, key=lambda attempt: attempt.number):
        since = max((at for at in waits if at <= attempt.created_at), default=attempt.created_at)
        own = phases.get(attempt.number, ())
        begun = own[0].ended_at - timedelta(seconds=own[0].seconds) if own else None
        seconds = {"queue": (attempt.created_at - since).total_seconds()}
        if attempt.submitted_at is not None:
            seconds["submit"] = (attempt.submitted_at - attempt.created_at).total_seconds()
            if begun is not None:
                seconds["driver"] = max(0.0, (begun - attempt.submitted_at).total_seconds())
        for phase in own:
            seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
        found[attempt.number] = seconds
        if attempt.finished_at is not None:
            waits.append(attempt.finished_at)
    return found


def checkpoint_view(job: JobRow) -> CheckpointView | None:
    if job.checkpoint_step is None or job.checkpoint_uri is None:
        return None
    return CheckpointView(step=job.checkpoint_step, uri=job.checkpoint_uri)


def _summary_fields(job: JobRow) -> dict[str, Any]:
    columns = JobSummary.model_fields.keys() - {"progress", "labels"}
    per_s = job.step_flops / job.step_s if job.step_flops is not None and job.step_s else None
    left = job.steps_wanted - (job.step or 0)
    progress = Progress(
        step=job.step or 0,
        steps=job.steps_wanted,
        loss=job.loss,
        metrics=job.metrics,
        step_s=job.step_s,
        model_flops_per_s=per_s,
        mfu=None if per_s is None or not job.peak_flops_per_s else per_s / job.peak_flops_per_s,
        left_s=left * job.step_s if job.step_s is not None and job.state == JobState.RUNNING else None,
    )
    return {
        **{name: getattr(job, name) for name in columns},
        "progress": progress,
        "labels": job.labels or {},
    }


def event_view(event: EventRow) -> EventView:
    return EventView.model_validate(event, from_attributes=True)


def evaluation_view(evaluation: EvaluationRow) -> EvaluationView:
    return EvaluationView.model_validate(evaluation, from_attributes=True)


def step_view(step: StepRow) -> StepView:
    return StepView.model_validate(step, from_attributes=True)
