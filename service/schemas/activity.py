"""REST bodies for the activity of a job: events, logs, steps, evaluations, timelines, causes of a slow step.

Times are ISO 8601 in UTC, or seconds.
Values only, shared by the routes and service.client.client: no web framework, no database, no Ray.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field

from service.schemas.jobs import Metrics
from service.schemas.plans import CalibrationView


class EventView(BaseModel):
    number: int
    at: datetime
    attempt: int | None
    kind: str
    message: str
    principal: str | None = Field(default=None, description="Who asked for it, where somebody did")


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
    metrics: Metrics = {}
    step_s: float | None
    makespan_s: float | None
    bubble_ratio: float | None
    exposed_transfer_s: float | None
    overlap_ratio: float | None
    grad_norm: float | None
    learning_rate: float | None
    started_at: float | None


class StepPage(BaseModel):
    items: list[StepView]
    next_page_token: str | None


class EvaluationView(BaseModel):
    """Loss and metrics of the evaluation after `step` (0: before the first) on `samples` samples."""

    step: int
    attempt: int
    loss: float | None
    metrics: Metrics = {}
    samples: int
    evaluation_s: float | None
    started_at: float | None


class EvaluationPage(BaseModel):
    items: list[EvaluationView]
    next_page_token: str | None


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


class MeshShareView(BaseModel):
    """`idle_s` by reason, as on the job's page."""

    mesh: str
    compute_s: float
    idle_s: dict[str, float]


class LinkShareView(BaseModel):
    """`exposed_s` is how long compute lanes were idle for what the link carried."""

    source: str
    target: str
    transfers: int
    transfer_s: float
    exposed_s: float


class WhySide(BaseModel):
    makespan_s: float
    meshes: list[MeshShareView]
    links: list[LinkShareView]


class CauseView(BaseModel):
    """`cost_s` is how much shorter the step would be without it."""

    kind: str
    subject: str
    cost_s: float
    message: str


class ChangeView(BaseModel):
    """`gain_s` is how much shorter the step would be with it, planned anew; `alone_s` the part that is not the new
    plan's; `step_s` what the step takes then."""

    kind: str
    subject: str
    gain_s: float
    alone_s: float
    step_s: float
    message: str


class WhyView(BaseModel):
    """Causes and changes, by falling cost and gain. `step` is null where none was measured."""

    job_id: str
    attempt: int
    step: int | None
    verdict: str
    healthy: bool
    step_s: float
    planned_step_s: float
    lower_bound_s: float
    planned: WhySide
    measured: WhySide | None
    calibrated: CalibrationView | None = None
    causes: list[CauseView]
    changes: list[ChangeView]
    left_out: list[str] = Field(description="Kinds of changes that were not tried for want of time")
    notes: list[str]
