"""REST bodies for jobs: their attempts, progress, state and changes.

JobSpec itself is in service.spec. Times are ISO 8601 in UTC, or Unix seconds.
Values only, shared by the routes and service.client.client: no web framework, no database, no Ray.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, computed_field, model_validator

from service.spec.job import Name
from service.spec.principals import DEFAULT_PROJECT
from service.spec.resources import MeshCount, MeshRange
from service.spec.states import AttemptState, JobState

Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]


Metrics = Annotated[dict[str, float | None], BeforeValidator(lambda value: value or {})]
"""Metrics that the loss returned beside itself, by name: means over microbatches and workers, as the loss is."""


class PlacedMeshView(BaseModel):
    """The workers of a mesh on one node: its name, and Ray's id."""

    mesh: str
    node: str
    node_id: str
    workers: int


class AttemptView(BaseModel):
    id: str
    number: int
    state: AttemptState
    reason: str | None
    message: str | None
    device: str
    accelerators: int
    accelerator_type: str | None = Field(
        default=None, description="The type of all of them; null where their nodes tell none"
    )
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
    placed: list[PlacedMeshView] = Field(
        default=[], description="Which mesh is on which node; empty before the attempt has its accelerators"
    )
    launch_s: dict[str, float] = Field(
        default={},
        description="Seconds by phase, in order, up to the end of its first step: `queue` from the submission or the end "
        "of the attempt before, `submit` until Ray has the driver, `driver` until it runs, then the driver's own phases",
    )


class Progress(BaseModel):
    """Steps done, steps wanted, and the last step's loss, metrics and length; the time that is left, as it trains."""

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
    left_s: float | None = Field(
        default=None,
        description="Seconds that the steps left take at the last one's length; null: it does not train",
    )

    @computed_field(description="Steps done of those wanted, whole percents")
    @property
    def percent(self) -> int:
        return min(100, 100 * self.step // self.steps) if self.steps else 0


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
    project: str = Field(default=DEFAULT_PROJECT, description="Whose members see it")
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
    effective_training_ratio: float | None = Field(
        default=None,
        description="The share of the time since its first attempt began, waits between attempts included, that its steps "
        "took: without those that were lost, launches, checkpoints and evaluations; null before the first step",
    )


class JobPage(BaseModel):
    items: list[JobSummary]
    next_page_token: str | None


class JobChange(BaseModel):
    """Another queue or priority for a waiting job, other meshes for one that has not ended; an absent field changes
    nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    queue: Name | None = None
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    meshes: MeshCount | MeshRange | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_these_change(cls, data: object) -> object:
        if isinstance(data, dict) and (
            others := sorted(ascii(key).strip("'") for key in {*data} - {*cls.model_fields})[:5]
        ):
            raise ValueError(f"{', '.join(others)} cannot be changed: give queue, priority or meshes")
        return data

    @model_validator(mode="after")
    def _something_changes(self) -> JobChange:
        if self.queue is None and self.priority is None and self.meshes is None:
            raise ValueError("nothing would change: give queue, priority or meshes")
        return self
