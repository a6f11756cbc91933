"""REST bodies for jobs, their activity, plans, queues, checkpoints, exports, and errors.

JobSpec itself is in service.spec. Times are ISO 8601 in UTC, or Unix seconds.
Values only, shared by the routes and service.client.client: no web framework, no database, no Ray.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from service.spec.job import Name
from service.spec.states import AttemptState, JobState

Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]

Metrics = Annotated[dict[str, float | None], BeforeValidator(lambda value: value or {})]
"""What the loss returned beside itself, by name: means over microbatches and workers, as the loss is."""


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
    cluster: str = Field(default="default", description="The Ray cluster that it was begun on")
    metrics_endpoint: str | None
    peak_memory_bytes: dict[str, int] | None = Field(
        default=None,
        description="The most that a worker of each mesh held in a step: allocated on CUDA, resident on CPU",
    )


class Progress(BaseModel):
    """Steps done, steps wanted, and the last step's loss, metrics and length."""

    step: int
    steps: int
    loss: float | None
    metrics: Metrics = {}
    step_s: float | None
    model_flops_per_s: float | None = Field(
        default=None, description="Operations of the model's forward and backward a second, in the last step"
    )
    mfu: float | None = Field(
        default=None,
        description="The share of that in what the accelerators could do; null: one is not known",
    )


class CheckpointView(BaseModel):
    step: int
    uri: str


class BestCheckpointView(CheckpointView):
    """The checkpoint that is kept for being the best by the job's evaluation.metric."""

    metric: str
    value: float


class JobSummary(BaseModel):
    id: str
    name: str
    owner: str = Field(default="", description="Who submitted it; empty where nobody was asked for a name")
    queue: str
    priority: int
    accelerators: int
    state: JobState
    reason: str | None
    message: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    max_duration_s: float | None = Field(
        default=None, description="The longest time that it may hold accelerators, all attempts together"
    )
    labels: dict[str, str] = {}
    progress: Progress


class JobView(JobSummary):
    """`spec` is the job's JobSpec as it was stored, perhaps by an older Slotline."""

    spec: dict[str, Any]
    attempts: list[AttemptView]
    checkpoint: CheckpointView | None
    trace_id: str | None = Field(default=None, description="In the job's logs: the trace of who submitted it")
    best_checkpoint: BestCheckpointView | None = None


class JobPage(BaseModel):
    items: list[JobSummary]
    next_page_token: str | None


class JobChange(BaseModel):
    """Another queue or priority for a waiting job; an absent field changes nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    queue: Name | None = None
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_these_change(cls, data: object) -> object:
        if isinstance(data, dict) and (
            others := sorted(ascii(key).strip("'") for key in {*data} - {*cls.model_fields})[:5]
        ):
            raise ValueError(f"{', '.join(others)} cannot be changed: give queue, priority, or both")
        return data

    @model_validator(mode="after")
    def _something_changes(self) -> JobChange:
        if self.queue is None and self.priority is None:
            raise ValueError("nothing would change: give queue, priority, or both")
        return self


# Events, logs, steps, plans, timelines


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


class MeshUpdateView(BaseModel):
    """The planned seconds of one mesh's REDUCE and STEP."""

    mesh: str
    reduce_s: float
    step_s: float


class SavedPlanRef(BaseModel):
    """A plan that its owner has saved under a name."""

    id: str
    owner: str
    name: str


class JobPlanView(BaseModel):
    """`step_s` is the planned step: the plan's makespan, and `update_s`, the longest REDUCE and STEP behind it.
    These are null, and `update` empty, in plans of an older Slotline."""

    begins: list[str]
    spec: dict[str, Any]
    plan: dict[str, Any]
    step_s: float | None = None
    update_s: float | None = None
    update: list[MeshUpdateView] = []
    named: SavedPlanRef | None = Field(
        default=None, description="The saved plan that this is; null where it was made for its job alone"
    )


class JobPlanPreview(JobPlanView):
    """The plan of a job that does not train. `notes` say what was assumed where it was not measured."""

    measured_by: Literal["gang", "one worker"]
    notes: list[str]


class ProfilingView(BaseModel):
    """A job's costs are being measured; the same request, sent again, answers with the plan."""

    state: Literal["PROFILING"]
    message: str


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


# Code, queues


class PackageView(BaseModel):
    uri: str
    digest: str
    size_bytes: int


class QueueView(BaseModel):
    """A queue: its quota of accelerators (null: none), what its jobs hold, and who waits for what."""

    name: str
    quota: int | None
    used: int
    depth: int
    waiting: list[JobSummary]
    cluster: str | None = Field(
        default="default", description="Where its jobs run; null for a queue that is not configured any more"
    )


class QueueQuotaView(BaseModel):
    """The quota in force, and the configured one (null: no quota)."""

    name: str
    quota: int | None
    configured: int | None


class QueueList(BaseModel):
    items: list[QueueView]


# The server, and its errors


class Version(BaseModel):
    version: str
    api: Literal["v1"]


class Health(BaseModel):
    status: Literal["ok"]


class Readiness(Health):
    """`clusters_away`: clusters that do not answer, each with its error; absent where all answer."""

    clusters_away: dict[str, str] = {}


class Problem(BaseModel):
    """The body of every error."""

    type: str = "about:blank"
    title: str
    status: int
    code: str = Field(default="", description="What went wrong, for programs; a code is never renamed")
    detail: str
    errors: list[dict[str, Any]] | None = None


# Checkpoints and final weights


class CheckpointFile(BaseModel):
    """A step's folder as it lies there. `loss` is the training loss of its step; `best`: the lowest of whole ones.

    Without a manifest one is "unfinished", or "being written": its job runs, it is newer than the whole ones, and its
    files changed in the last ten minutes.
    """

    step: int
    uri: str
    saved_at: datetime | None
    size_bytes: int
    state: Literal["complete", "being written", "damaged", "unfinished"]
    damage: str | None = Field(description="What is wrong with it")
    checked: Literal["sizes", "checksums"]
    blocking_s: float | None = Field(None, description="Seconds that training stood still for it")
    writing_s: float | None = Field(None, description="Seconds that the slowest worker wrote")
    loss: float | None
    latest: bool
    best: bool
    kept: list[Literal["latest", "best", "every"]] = Field(
        default=[],
        description="Why it stays, beside being one of the newest: checkpoint.keep_every is `every`",
    )


class CheckpointFiles(BaseModel):
    uri: str
    items: list[CheckpointFile]


class ExportedFile(BaseModel):
    name: str
    bytes: int


class ExportView(BaseModel):
    """Weights as they were written: after which step, where, in which files, how many tensors."""

    step: int
    uri: str
    files: list[ExportedFile]
    tensors: int
    notes: list[str] = []


class ExportingView(BaseModel):
    state: Literal["EXPORTING"]
    message: str
