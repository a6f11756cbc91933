"""Quotas of queues that operators have set, in place of those of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import String, delete, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from service.store.audit import add_audit
from service.store.tables import Base

LARGEST = 1_000_000


class QueueQuota(Base):
    __tablename__ = "queue_quotas"

    queue: Mapped[str] = mapped_column(String(100), primary_key=True)
    quota: Mapped[int | None]
    """Accelerators; null: no quota, whatever the configuration says."""
    set_at: Mapped[datetime]


async def quotas_in_force(
    session: AsyncSession, configured: Mapping[str, int | None]
) -> dict[str, int | None]:
    """Of the configured queues: what an operator has set, else what is configured."""
    found = (await session.execute(select(QueueQuota.queue, QueueQuota.quota))).all()
    return {**configured, **{queue: quota for queue, quota in found if queue in configured}}


async def set_quota(session: AsyncSession, queue: str, quota: int | None, *, at: datetime, by: str) -> None:
    """Set it for every control plane of the database, until it is set again or left to the configuration."""
    await session.merge(QueueQuota(queue=queue, quota=quota, set_at=at))
    add_audit(session, by, "queue.quota", queue, at=at, detail="none" if quota is None else str(quota))


async def leave_quota_to_configuration(session: AsyncSession, queue: str, *, at: datetime, by: str) -> None:
    """Forget what was set, if anything was."""
    await session.execute(delete(QueueQuota).where(QueueQuota.queue == queue))
    add_audit(session, by, "queue.quota", queue, at=at, detail="as configured")
