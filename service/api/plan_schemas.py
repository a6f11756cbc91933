"""What the API answers about plans that are kept under names. Values only, as in schemas.py."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field

from service.api.schemas import JobPlanPreview


class NamedPlanSummary(BaseModel):
    """A kept plan without its slots and programs; `begins` are the modules that begin its stages."""

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


class NamedPlanList(BaseModel):
    items: list[NamedPlanSummary]
    next_page_token: str | None


class NamedPlanView(NamedPlanSummary):
    """A kept plan, and the job (a JobSpec) that it was made for."""

    job: dict[str, object]
    plan: JobPlanPreview
