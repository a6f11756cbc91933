"""REST bodies for queues: their quotas of accelerators, and the jobs that wait.

Values only, shared by the routes and service.client.client: no web framework, no database, no Ray.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from service.schemas.jobs import JobSummary

LARGEST_QUOTA = 1_000_000


class WaitReason(BaseModel):
    """The caller's jobs of a queue that wait for one reason (null: not looked at yet), and the oldest of them; of all
    projects that the caller sees."""

    reason: str | None
    jobs: int
    first: JobSummary


class QueueView(BaseModel):
    """A queue: its quota of accelerators (null: none), what its jobs hold, and who waits for what. The numbers are of all
    jobs, the jobs are of projects that the caller sees."""

    name: str
    quota: int | None
    used: int
    depth: int = Field(description="Jobs that wait")
    reasons: list[WaitReason] = Field(default=[], description="Why they wait, the most common reason first")
    waiting: list[JobSummary] = Field(
        description="The first 100 of them, in the order of their turns; all are in the pages of "
        "`GET /api/v1/jobs?state=QUEUED&state=RECOVERING&queue=NAME`"
    )
    cluster: str | None = Field(
        default="default", description="Where its jobs run; null for a queue that is not configured any more"
    )


class QueueList(BaseModel):
    items: list[QueueView]


class QueueQuotaView(BaseModel):
    """The quota in force, and the configured one (null: no quota)."""

    name: str
    quota: int | None
    configured: int | None


class QuotaChange(BaseModel):
    """The accelerators that the running jobs of a queue, or of a project in a queue, may hold together."""

    model_config = ConfigDict(extra="forbid", strict=True)

    quota: Annotated[int, Field(ge=0, le=LARGEST_QUOTA)] | None = Field(description="null: no quota")
