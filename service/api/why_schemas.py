"""The answer to "why is my step slow?". Values only, for the route and for service.client; seconds."""

from __future__ import annotations

from pydantic import BaseModel, Field


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
    """Causes and changes begin with those that cost or bring most. `step` is null where none was measured."""

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
