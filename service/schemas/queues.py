"""REST bodies for queues: their quotas of accelerators, and the jobs that wait.

Values only, shared by the routes and service.client.client: no web framework, no database, no Ray.
"""

from __future__ import annotations

from pydantic import BaseModel, Field

from service.schemas.jobs import JobSummary


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


class QueueList(BaseModel):
    items: list[QueueView]


class QueueQuotaView(BaseModel):
    """The quota in force, and the configured one (null: no quota)."""

    name: str
    quota: int | None
    configured: int | None
