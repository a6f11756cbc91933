"""What is kept beside jobs: plans under names, and who uses their files."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, defer, mapped_column

from service.store.tables import Base


class NamedPlan(Base):
    """A plan that its owner has kept. Jobs go by its id, so that one whose name was taken away stays for those that
    were submitted with it."""

    __tablename__ = "named_plans"
    __table_args__ = (UniqueConstraint("owner", "name"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    owner: Mapped[str] = mapped_column(String(200))
    name: Mapped[str | None] = mapped_column(String(100))
    """Null: deleted, and still wanted by jobs."""
    created_at: Mapped[datetime]
    used_at: Mapped[datetime]
    """When it was made, or a job was last submitted with it."""
    request_digest: Mapped[str] = mapped_column(String(64))
    """Of the job and the budget that it was asked for with."""
    measured_by: Mapped[str] = mapped_column(String(20))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    summary: Mapped[dict[str, Any]]
    """What lists show of it."""
    made_for: Mapped[str] = mapped_column(Text)
    """JSON of a MadeFor."""
    body: Mapped[str] = mapped_column(Text)
    """JSON as in `plans`, and what the preview adds to it."""


WITHOUT_BODY = (defer(NamedPlan.body, raiseload=True), defer(NamedPlan.made_for, raiseload=True))
"""For lists: plans are long."""


class StorageUse(Base):
    """Who reads or deletes what a job has saved, until when at the latest: deleting and reading keep out of each
    other's way over all replicas."""

    __tablename__ = "storage_uses"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    kind: Mapped[str] = mapped_column(String(20))
    folders: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    """Null: any of the job's."""
    until: Mapped[datetime]
