"""REST bodies for artifacts of jobs, their removal, and storage usage of owners.

Values only, shared by the routes and service.client.client: no web framework, no database, no Ray.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field


class ArtifactView(BaseModel):
    """Something that a job has left. `place` is a path of this API, or where it lies in storage."""

    kind: Literal["export", "postmortem", "log", "plan", "timelines", "package"]
    name: str
    place: str
    attempt: int | None = None
    step: int | None = None
    size_bytes: int | None = Field(description="null: it is not counted")
    made_at: datetime | None
    expires_at: datetime | None = Field(description="When it goes; null: not before the job ends, or never")


class ArtifactList(BaseModel):
    """`stored_bytes` is what the job's folder in storage takes, as its driver last said; null: it has not. `notes` tell
    what could not be looked at."""

    items: list[ArtifactView]
    stored_bytes: int | None
    notes: list[str]


class RemovedView(BaseModel):
    """Removed folders, refused ones with the reason of each, and the steps of the whole checkpoints that are left."""

    removed: list[str]
    refused: dict[str, str]
    left: list[int]
    freed_bytes: int


class RemovingView(BaseModel):
    state: Literal["REMOVING"]
    message: str


class OwnerUsage(BaseModel):
    """Storage of an owner's jobs, plans and packages. A package counts for everybody who uploaded it."""

    owner: str
    jobs: int = Field(description="That have files in storage")
    storage_bytes: int = Field(description="Checkpoints and exports, as drivers last said")
    plan_bytes: int
    package_bytes: int
    total_bytes: int


class UsageList(BaseModel):
    items: list[OwnerUsage]
