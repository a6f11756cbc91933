"""Applies a driver's reports and ends attempts: measurements, graceful stops, retries and the job's next state.

Works inside the caller's write session. Reports are idempotent by their sequence number; a replaced or ended attempt
is fenced off with StaleAttemptError. The decision after a failure is `after_failure`; failures that are nobody's
fault count only until a later attempt made them good. A graceful stop is requested by the answer to the driver's next
report, and how the attempt then ends is attributed to the reason that it was stopped for. A job that recovers keeps
its queue place; where it lost a worker, the driver that has the others may be given its next attempt (`hand_over`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from service.orchestrator.decisions.attempt_lifecycle import (
    FailedAttempt,
    FailJob,
    after_failure,
    without_made_good,
)
from service.spec.job import stored_retry
from service.spec.states import AttemptState, JobState
from service.store.attempts import (
    attempts_of,
    create_attempt,
    find_attempt,
    lock_attempt,
    placements_of,
    record_placement,
)
from service.store.events import store_post_mortem
from service.store.measurements import (
    EvaluationRecord,
    SlotRecord,
    StepRecord,
    record_evaluations,
    record_steps,
    record_timeline,
    seconds_of_steps,
)
from service.store.node_states import record_node_failures
from service.store.plans import record_job_plan
from service.store.spans import add_attempt_span
from service.store.tables import AttemptRow, JobRow, PlacedMeshRow
from service.store.transitions import add_event, move_attempt, move_job
from worker.contract.reasons import Cause, Reason, cause_of

ELASTIC_PATIENCE_S = 60.0
"""Time for which an elastic job that lost accelerators waits for as many: a pod is replaced in that time."""
_RELEASE_PATIENCE_S = 10.0
"""The same for one that gave them up: its own are not free at once."""


@dataclass(frozen=True)
class Backoff:
    """The pause before the next attempt, in seconds: twice as long before each later one, none behind a lost process.

    The first lets Ray notice a lost node; the longest keeps a job that fails at once from filling the log.
    """

    base_s: float = 2.0
    limit_s: float = 60.0


@dataclass(frozen=True)
class TimelineRecord:
    """The measured slots of one step; `started_at` is Unix time."""

    step: int
    started_at: float
    uncertainty_s: float | None
    slots: Sequence[SlotRecord]


@dataclass(frozen=True)
class EventRecord:
    """An event of a job that its driver reports."""

    at: datetime
    kind: str
    message: str


@dataclass(frozen=True)
class DriverReport:
    """The news of a driver since its last report; `sequence` counts from 1 and makes it idempotent."""

    sequence: int
    state: AttemptState | None = None
    reason: Reason | None = None
    message: str | None = None
    steps: Sequence[StepRecord] = ()
    peak_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    timelines: Sequence[TimelineRecord] = ()
    events: Sequence[EventRecord] = ()
    metrics_endpoint: str | None = None
    checkpoint: tuple[int, str] | None = None
    stored_bytes: int | None = None
    model_flops: tuple[float | None, float | None] | None = None
    """FLOPs of a step, and peak FLOP/s of all its accelerators."""
    evaluations: Sequence[EvaluationRecord] = ()
    best_checkpoint: Mapping[str, Any] | None = None
    failed_nodes: Sequence[str] = ()
    """Ray ids of the nodes that a failure is due to."""
    running_plan: tuple[int, str] | None = None
    """The first step of a plan that was swapped in, and the plan's JSON."""


class StaleAttemptError(Exception):
    """The attempt is not the job's current one, or it is over: its driver is fenced off."""


async def apply_report(
    session: AsyncSession,
    attempt_id: str,
    report: DriverReport,
    *,
    at: datetime,
    backoff: Backoff,
    keep: int,
) -> str:
    """Store a report and return the command for the driver: continue, stop or cancel. Raises StaleAttemptError.

    Nodes that lost several attempts by their own fault get no work for a time.
    """
    attempt, job = await lock_attempt(session, attempt_id)
    if report.sequence <= attempt.last_sequence:
        return _driver_command(job, attempt)
    check_current(job, attempt)
    attempt.last_sequence, attempt.heartbeat_at = report.sequence, at
    attempt.submitted_at = attempt.submitted_at or at  # Ray has the driver, even where its answer was lost
    await _store_measurements(session, job, attempt, report, keep, at)
    for event in report.events:
        add_event(session, job, event.kind, event.message, at=event.at, attempt=attempt.number)
    if report.state is AttemptState.RUNNING:
        _mark_running(session, job, attempt, at)
    elif report.state is not None and report.state.final:
        await end_attempt(
            session,
            job,
            attempt,
            report.state,
            reason=report.reason,
            message=report.message,
            at=at,
            backoff=backoff,
        )
        if report.failed_nodes and attempt.state == AttemptState.FAILED:
            for mark in await record_node_failures(session, attempt, report.failed_nodes, at=at):
                add_event(session, job, "node", f"node {mark}", at=at, attempt=attempt.number)
    return _driver_command(job, attempt)


def check_current(job: JobRow, attempt: AttemptRow) -> None:
    """Raise StaleAttemptError unless the attempt is the job's own and goes on."""
    if job.current_attempt != attempt.id:
        raise StaleAttemptError(
            f"attempt {attempt.number} of job {job.id} was replaced by attempt {job.attempts_made}: end this driver"
        )
    if attempt.attempt_state.final:
        raise StaleAttemptError(
            f"attempt {attempt.number} of job {job.id} is over ({attempt.state}): end this driver"
        )


async def _store_measurements(
    session: AsyncSession, job: JobRow, attempt: AttemptRow, report: DriverReport, keep: int, at: datetime
) -> None:
    steps = {step.step: step for step in report.steps}
    if steps:
        first, last = min(steps), steps[max(steps)]
        if job.step is not None and first <= job.step:  # behind a checkpoint: what came after it was lost
            job.trained_s -= await seconds_of_steps(session, job.id, first, job.step)
        if attempt.first_step is None:
            attempt.first_step = first
        job.trained_s = max(0.0, job.trained_s + sum(step.step_s or 0.0 for step in steps.values()))
        job.step, job.loss, job.step_s = last.step, last.loss, last.step_s
        job.metrics = last.metrics
    await record_steps(session, attempt, steps.values())
    if report.running_plan is not None:
        since_step, plan = report.running_plan
        await record_job_plan(session, attempt, plan, at=at, since_step=since_step)
    await record_evaluations(session, attempt, report.evaluations)
    if report.best_checkpoint is not None:
        job.best_checkpoint = dict(report.best_checkpoint)
    for timeline in report.timelines:
        await record_timeline(
            session,
            attempt,
            step=timeline.step,
            started_at=timeline.started_at,
            uncertainty_s=timeline.uncertainty_s,
            slots=timeline.slots,
            keep=keep,
        )
    if report.peak_memory_bytes:
        known, new = attempt.peak_memory_bytes or {}, report.peak_memory_bytes
        attempt.peak_memory_bytes = {
            mesh: max(known.get(mesh, 0), new.get(mesh, 0)) for mesh in {**known, **new}
        }
    if report.metrics_endpoint is not None:
        attempt.metrics_endpoint = report.metrics_endpoint
    if report.model_flops is not None:
        job.step_flops, job.peak_flops_per_s = report.model_flops
    if report.checkpoint is not None:
        if report.checkpoint[0] > (job.checkpoint_step or 0):
            job.infrastructure_forgiven = attempt.number - 1  # what was lost then has been made good
        job.checkpoint_step, job.checkpoint_uri = report.checkpoint
        job.stored_bytes = report.stored_bytes


def _mark_running(session: AsyncSession, job: JobRow, attempt: AttemptRow, at: datetime) -> None:
    if attempt.attempt_state is AttemptState.STARTING:
        move_attempt(attempt, AttemptState.RUNNING, at=at)
    if job.job_state is JobState.STARTING:
        move_job(session, job, JobState.RUNNING, at=at, attempt=attempt.number)


def _driver_command(job: JobRow, attempt: AttemptRow) -> str:
    if job.job_state in (JobState.CANCELLING, JobState.CANCELLED):
        return "cancel"
    return "continue" if attempt.end_asked_at is None else "stop"


async def end_attempt(
    session: AsyncSession,
    job: JobRow,
    attempt: AttemptRow,
    state: AttemptState,
    *,
    reason: str | None,
    message: str | None,
    at: datetime,
    backoff: Backoff,
) -> None:
    """Make the attempt final and move its (locked) job on: to an end, or to RECOVERING."""
    number = attempt.number
    job.held_s += max((at - attempt.created_at).total_seconds(), 0.0)
    state, reason, message = outcome_of_graceful_stop(attempt, state, reason, message)
    if state is AttemptState.CANCELLED and job.job_state is not JobState.CANCELLING:
        state, reason = AttemptState.FAILED, Reason.DRIVER_LOST
        message = (
            "the driver was told to end by somebody else than Slotline"
            if attempt.stopped_because is None
            else f"Slotline stopped the driver: {attempt.stopped_because}"
        )
    if state is AttemptState.FAILED:
        reason, message = reason or Reason.INTERNAL, message or "no message was given"
    move_attempt(attempt, state, at=at, reason=reason, message=message)
    add_attempt_span(session, job, attempt, at=at)
    if state is AttemptState.FAILED:
        attempt.failed_step = job.step
        await store_post_mortem(session, attempt, at=at)
    move = partial(move_job, session, job, at=at, attempt=number)
    if state is AttemptState.SUCCEEDED:
        move(JobState.SUCCEEDED, reason=reason, message=message)
        return
    if job.job_state is JobState.CANCELLING:
        move(JobState.CANCELLED, reason=Reason.CANCELLED_BY_USER, message="cancelled by the user")
        return
    if reason == Reason.MAX_DURATION or exceeds_max_duration(job):
        move(JobState.FAILED, reason=Reason.MAX_DURATION, message=max_duration_message(job, message))
        return
    if _changes_size(job, attempt, reason):
        if reason == Reason.PLAN_INFEASIBLE:
            job.fewest_accelerators = attempt.accelerators + job.workers_per_mesh
            message = f"{message}; goes on with {job.fewest_accelerators} accelerators or more"
        _recover(job, at, at, _RELEASE_PATIENCE_S)
        move(JobState.RECOVERING, reason=reason, message=message)
        return
    failure = _failure_of(attempt)
    decision = after_failure(
        failure,
        allowed=stored_retry(job.spec),
        before=without_made_good([*await _counted_failures(session, job, number), failure])[:-1],
        backoff_s=backoff.base_s,
        backoff_limit_s=backoff.limit_s,
    )
    if isinstance(decision, FailJob):
        move(JobState.FAILED, reason=reason, message=decision.message)
        return
    lost = cause_of(reason or Reason.INTERNAL) is Cause.INFRASTRUCTURE
    patience_s = ELASTIC_PATIENCE_S if lost else _RELEASE_PATIENCE_S
    _recover(job, at, at + timedelta(seconds=decision.after_s), patience_s)
    move(JobState.RECOVERING, reason=reason, message=decision.message)


def _recover(job: JobRow, at: datetime, not_before: datetime, patience_s: float) -> None:
    """Queue the job for its next attempt: it keeps its place, and an elastic one waits a while for as many accelerators."""
    job.not_before, job.queued_at = not_before, job.created_at
    if job.is_elastic:
        job.patient_until = at + timedelta(seconds=patience_s)


def _changes_size(job: JobRow, attempt: AttemptRow, reason: str | None) -> bool:
    """True for an attempt that ended so that the job goes on with another number of accelerators, which is no failure: it
    was asked to, or no plan fits its own and the job may have more."""
    may_have_more = job.is_elastic and attempt.accelerators < job.accelerators
    return reason == Reason.RESIZED or (reason == Reason.PLAN_INFEASIBLE and may_have_more)


def outcome_of_graceful_stop(
    attempt: AttemptRow, state: AttemptState, reason: str | None, message: str | None
) -> tuple[AttemptState, str | None, str | None]:
    """(state, reason, message) of an attempt, attributed to the graceful stop that was requested of it, if any.

    A driver's report of that stop, and a driver that was killed since it was too slow, have the reason of the request;
    a failure of another kind keeps its own.
    """
    if attempt.end_asked_for is None:
        return state, reason, message
    requested = Reason.parse(attempt.end_asked_for)
    if state is AttemptState.CANCELLED:  # by Ray's SIGTERM: the driver took longer than it had
        stopped = attempt.stopped_because or "the driver was told to end"
        return AttemptState.FAILED, requested, f"{requested.meaning}; {stopped}"
    if state is AttemptState.FAILED and reason == Reason.PREEMPTED:
        return state, requested, message
    return state, reason, message


def exceeds_max_duration(job: JobRow) -> bool:
    """True where the job has used up its max_duration."""
    return job.max_duration_s is not None and job.held_s >= job.max_duration_s


def max_duration_message(job: JobRow, message: str | None) -> str:
    """The final message of a job that has used up its max_duration."""
    limit = f"max_duration is {job.max_duration_s:g} s: `slotline retry` goes on from the last checkpoint, as long again"
    return f"{message}; {limit}" if message else limit


async def _counted_failures(session: AsyncSession, job: JobRow, number: int) -> list[FailedAttempt]:
    """The failed attempts before `number` since the user's last retry; failures of the infrastructure count only since the
    last attempt that saved a checkpoint."""
    failures = [
        (attempt.number, _failure_of(attempt))
        for attempt in await attempts_of(session, job.id)
        if job.attempts_forgiven < attempt.number < number
        and attempt.state == AttemptState.FAILED
        and not _changes_size(job, attempt, attempt.reason)
    ]
    return [
        failure
        for failed_number, failure in failures
        if failed_number > job.infrastructure_forgiven or cause_of(failure.reason) is not Cause.INFRASTRUCTURE
    ]


def _failure_of(attempt: AttemptRow) -> FailedAttempt:
    return FailedAttempt(
        attempt.reason or Reason.INTERNAL, attempt.message or "", attempt.failed_step, attempt.first_step
    )


async def hand_over(
    session: AsyncSession, attempt_id: str, *, cluster: str | None, left_out: Collection[str], at: datetime
) -> AttemptRow | None:
    """The next attempt of the job, for the driver of `attempt_id`, which has just ended: the same one where the driver asks
    again. None where the job is admitted anew, or does not go on.

    Its job does not wait, and its accelerators are never free in between. Ray has the driver, and what it holds, under the
    id of that driver's first attempt. `cluster` is that of the job's queue by the settings, `left_out` are Ray's ids of the
    nodes that take no work.
    """
    attempt, job = await lock_attempt(session, attempt_id)
    if (given := await _given(session, attempt, job)) is not None:
        return given
    placed = await placements_of(session, [attempt.id])
    usable = bool(placed) and not {mesh.node_id for mesh in placed} & {*left_out}
    if not usable or attempt.cluster != cluster or not _is_retried_at_once(attempt, job, at):
        return None
    following = await create_attempt(
        session,
        job,
        device=attempt.device,
        at=at,
        cluster=attempt.cluster,
        accelerators=attempt.accelerators,
        accelerator_type=attempt.accelerator_type,
        driver_of=attempt.driver_id,
    )
    await session.flush()  # before the rows that name it
    columns = ("job_id", "cluster", "mesh", "node_id", "node", "workers")
    own = [
        PlacedMeshRow(attempt_id=following.id, **{name: getattr(mesh, name) for name in columns})
        for mesh in placed
    ]
    await record_placement(session, following.id, own)
    message = f"the driver of attempt {attempt.number} goes on with attempt {following.number}, and keeps its workers"
    add_event(session, job, "handed_over", message, at=at, attempt=following.number)
    return following


async def _given(session: AsyncSession, attempt: AttemptRow, job: JobRow) -> AttemptRow | None:
    """The attempt that this driver was given and has not begun: the answer that said so was lost."""
    current = None if job.current_attempt is None else await find_attempt(session, job.current_attempt)
    if current is None or current.driver_of != attempt.driver_id or current.number != attempt.number + 1:
        return None
    begun = current.heartbeat_at is not None or current.attempt_state is not AttemptState.STARTING
    return None if begun else current


def _is_retried_at_once(attempt: AttemptRow, job: JobRow, at: datetime) -> bool:
    """True where the attempt lost a worker and nothing else was to end it, and its job goes on without a pause and with as
    many accelerators, or spares."""
    stops = attempt.end_asked_at is not None or attempt.stopped_because is not None
    waits = job.not_before is None or job.not_before > at
    return (
        job.current_attempt == attempt.id
        and attempt.attempt_state is AttemptState.FAILED
        and attempt.reason == Reason.WORKER_LOST
        and job.job_state is JobState.RECOVERING
        and not job.is_elastic
        and (job.fewest_accelerators or job.accelerators) <= attempt.accelerators <= job.accelerators
        and not stops
        and not waits
    )


def attempt_deadline(attempt: AttemptRow, job: JobRow) -> float | None:
    """Unix time at which the attempt has used up its job's max_duration; None where that has no limit."""
    if job.max_duration_s is None:
        return None
    return attempt.created_at.timestamp() + max(job.max_duration_s - job.held_s, 0.0)


async def request_graceful_stop(
    session: AsyncSession, attempt_id: str, reason: Reason, message: str, *, at: datetime
) -> bool:
    """Ask the attempt to save a checkpoint and end; False where it is over, or ends already."""
    attempt, job = await lock_attempt(session, attempt_id)
    if attempt.attempt_state.final or job.current_attempt != attempt_id:
        return False
    if attempt.end_asked_at is not None or job.job_state is JobState.CANCELLING:
        return False
    attempt.end_asked_at, attempt.end_asked_for = at, reason
    job.reason, job.message = reason, f"{message}; saves a checkpoint and ends"
    add_event(session, job, "ending", job.message, at=at, attempt=attempt.number)
    return True
