"""REST bodies for saved plans and for the analysis of a slow step; times in seconds.

Values only, shared by the routes and service.client.client: no web framework, no database, no Ray.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from service.schemas.jobs import JobPlanPreview
from service.spec.job import LimitedArguments


class PlanSpec(BaseModel):
    """A PipelineSpec (DESIGN section 4). Its details are checked by the scheduler, not here."""

    model_config = ConfigDict(extra="allow", strict=True)

    microbatches: Annotated[int, Field(ge=1)]
    meshes: Annotated[list[LimitedArguments], Field(min_length=1, fail_fast=True)]
    stages: Annotated[list[LimitedArguments], Field(min_length=1, fail_fast=True)]
    edges: Annotated[list[LimitedArguments], Field(fail_fast=True)] = []

    @property
    def actions(self) -> int:
        return self.microbatches * (len(self.stages) + len(self.edges))


class SavedPlanSummary(BaseModel):
    """A saved plan without its slots and programs; `begins` are the modules that begin its stages."""

    id: str
    owner: str = Field(description="Who keeps it; empty where nobody was asked for a name")
    name: str
    created_at: datetime
    used_at: datetime = Field(description="When it was made, or a job was last submitted with it")
    expires_at: datetime | None = Field(
        description="It goes then, unless a job is submitted with it; null: never"
    )
    size_bytes: int
    job_name: str
    begins: list[str]
    meshes: int
    workers: list[int] = Field(description="Of each mesh")
    microbatches: int
    precision: str
    device: str | None
    schedule: str
    recomputed: list[str] = Field(description="Stages that compute their forward again")
    step_s: float


class SavedPlanList(BaseModel):
    items: list[SavedPlanSummary]
    next_page_token: str | None


class SavedPlanView(SavedPlanSummary):
    """A saved plan, and the job (a JobSpec) that it was made for."""

    job: dict[str, object]
    plan: JobPlanPreview


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
    causes: list[CauseView]
    changes: list[ChangeView]
    left_out: list[str] = Field(description="Kinds of changes that were not tried for want of time")
    notes: list[str]
