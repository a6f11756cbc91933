"""What the API takes and answers, beside service.jobspec.JobSpec. Times are ISO 8601 in UTC, or Unix seconds."""

from __future__ import annotations

import math
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from service.jobspec import Arguments, AttemptState, JobState, stored
from service.store.states import printable
from service.store.tables import Attempt, Event, Job, Step


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


Number = Annotated[float | None, AfterValidator(_finite_or_none)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Sequence64 = Annotated[int, Field(ge=1, lt=2**63)]
UnixTime = Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]
Clean = AfterValidator(printable)
CleanLabel = AfterValidator(lru_cache(10_000)(printable))  # thousands of slots name the same few things
Label = Annotated[str, Field(max_length=100), CleanLabel]


# Jobs


class AttemptView(BaseModel):
    id: str
    number: int
    state: AttemptState
    reason: str | None
    message: str | None
    device: str
    accelerators: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    heartbeat_at: datetime | None
    metrics_endpoint: str | None


class Progress(BaseModel):
    """Steps done, steps wanted, and the last step's loss and length."""

    step: int
    steps: int
    loss: float | None
    step_s: float | None


class CheckpointView(BaseModel):
    step: int
    uri: str


class JobSummary(BaseModel):
    id: str
    name: str
    queue: str
    priority: int
    accelerators: int
    state: JobState
    reason: str | None
    message: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    progress: Progress


class JobView(JobSummary):
    """`spec` is the job's JobSpec as it was stored, perhaps by an older Slotline."""

    spec: dict[str, Any]
    attempts: list[AttemptView]
    checkpoint: CheckpointView | None


class JobPage(BaseModel):
    items: list[JobSummary]
    next_page_token: str | None


def job_summary(job: Job) -> JobSummary:
    return JobSummary(**_summary(job))


def job_view(job: Job, attempts: list[Attempt]) -> JobView:
    return JobView(
        **_summary(job),
        spec=job.spec,
        attempts=[AttemptView.model_validate(one, from_attributes=True) for one in attempts],
        checkpoint=checkpoint_view(job),
    )


def checkpoint_view(job: Job) -> CheckpointView | None:
    if job.checkpoint_step is None or job.checkpoint_uri is None:
        return None
    return CheckpointView(step=job.checkpoint_step, uri=job.checkpoint_uri)


def _summary(job: Job) -> dict[str, Any]:
    columns = JobSummary.model_fields.keys() - {"progress"}
    steps = stored(job.spec, "training", "steps", 0)
    progress = Progress(step=job.step or 0, steps=steps, loss=job.loss, step_s=job.step_s)
    return {**{name: getattr(job, name) for name in columns}, "progress": progress}


# Events, logs, steps, plans, timelines


class EventView(BaseModel):
    number: int
    at: datetime
    attempt: int | None
    kind: str
    message: str


class EventPage(BaseModel):
    items: list[EventView]
    next_page_token: str | None


class LogLine(BaseModel):
    attempt: int
    number: int
    text: str


class LogPage(BaseModel):
    items: list[LogLine]
    next_page_token: str | None


class StepView(BaseModel):
    step: int
    attempt: int
    loss: float | None
    step_s: float | None
    makespan_s: float | None
    bubble_ratio: float | None
    exposed_transfer_s: float | None
    overlap_ratio: float | None
    grad_norm: float | None
    started_at: float | None


class StepPage(BaseModel):
    items: list[StepView]
    next_page_token: str | None


class JobPlanView(BaseModel):
    begins: list[str]
    spec: dict[str, Any]
    plan: dict[str, Any]


class SlotView(BaseModel):
    """One slot of a timeline; times in seconds from the start of the step."""

    mesh: str
    lane: str
    action: str
    stage: str | None = None
    peer_stage: str | None = None
    peer_mesh: str | None = None
    edge: int | None = None
    microbatch: int | None = None
    start_s: float
    end_s: float


class TimelineSide(BaseModel):
    makespan_s: float
    slots: list[SlotView]


class TimelineView(BaseModel):
    """Planned and measured slots of one step; `profiled_steps` are the steps that can be asked for."""

    job_id: str
    step: int | None
    started_at: float | None
    uncertainty_s: float | None
    planned: TimelineSide | None
    measured: TimelineSide | None
    profiled_steps: list[int]


def event_view(event: Event) -> EventView:
    return EventView.model_validate(event, from_attributes=True)


def step_view(step: Step) -> StepView:
    return StepView.model_validate(step, from_attributes=True)


# Attempts: what drivers ask and report. Unknown fields are ignored: a driver may be newer than we are.


class AttemptGiven(BaseModel):
    """`job` is the job's JobSpec as it was stored."""

    attempt_id: str
    job_id: str
    number: int
    job: dict[str, Any]
    device: str
    resume: CheckpointView | None


class _FromDriver(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class ReportedStep(_FromDriver):
    step: Integer
    loss: Number = None
    step_s: Number = None
    makespan_s: Number = None
    bubble_ratio: Number = None
    exposed_transfer_s: Number = None
    overlap_ratio: Number = None
    grad_norm: Number = None
    started_at: Number = None


class ReportedSlot(_FromDriver):
    mesh: Label
    lane: Annotated[str, Field(max_length=120), CleanLabel]
    action: Annotated[str, Field(max_length=20), CleanLabel]
    stage: Label | None = None
    peer_stage: Label | None = None
    peer_mesh: Label | None = None
    edge: Integer | None = None
    microbatch: Integer | None = None
    start_s: Finite
    end_s: Finite


class ReportedTimeline(_FromDriver):
    step: Integer
    started_at: UnixTime
    uncertainty_s: Number = None
    slots: Annotated[list[ReportedSlot], Field(max_length=200_000)]


class ReportedEvent(_FromDriver):
    at: UnixTime
    kind: Label
    message: str


class ReportedCheckpoint(_FromDriver):
    step: Integer
    uri: Annotated[str, Clean]


class ReportIn(_FromDriver):
    sequence: Sequence64
    state: Literal["RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"] | None = None
    reason: Label | None = None
    message: str | None = None
    steps: Annotated[list[ReportedStep], Field(max_length=100_000)] = []
    timelines: Annotated[list[ReportedTimeline], Field(max_length=100)] = []
    events: Annotated[list[ReportedEvent], Field(max_length=10_000)] = []
    metrics_endpoint: Annotated[str, Field(max_length=300), Clean] | None = None
    checkpoint: ReportedCheckpoint | None = None


class ReportAnswer(BaseModel):
    command: Literal["continue", "cancel"]


class Network(_FromDriver):
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class PlacedWorker(_FromDriver):
    mesh: Label
    worker: Integer
    node: str | None = None
    device: str | None = None


class PlanRequest(_FromDriver):
    profile: Arguments
    network: Network = Network()
    workers: Annotated[list[PlacedWorker], Field(max_length=100_000)] = []


class Version(BaseModel):
    version: str
    api: Literal["v1"]


class Health(BaseModel):
    status: Literal["ok"]
