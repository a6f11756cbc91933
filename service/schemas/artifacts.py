"""REST bodies for packages, checkpoints, exports and other artifacts of jobs, and for the storage of owners.

Values only, shared by the routes and service.client.client: no web framework, no database, no Ray.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field


class PackageView(BaseModel):
    uri: str
    digest: str
    size_bytes: int


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
