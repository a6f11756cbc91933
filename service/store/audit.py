"""Who did what: an entry for each change that a person asked for, written with the change itself."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.states import printable
from service.store.tables import AuditEntry


def add_audit(
    session: AsyncSession, principal: str, action: str, subject: str, *, at: datetime, detail: str = ""
) -> None:
    """Note that `principal` did `action` (e.g. `job.cancel`) to `subject` (a job's id, a token's name)."""
    session.add(
        AuditEntry(at=at, principal=principal, action=action, subject=subject, detail=printable(detail) or "")
    )


async def list_audit(
    session: AsyncSession,
    *,
    principal: str | None = None,
    subject: str | None = None,
    before: int | None = None,
    limit: int = 100,
) -> Sequence[AuditEntry]:
    """Entries numbered below `before`, newest first."""
    query = select(AuditEntry).order_by(AuditEntry.number.desc()).limit(limit)
    if principal is not None:
        query = query.where(AuditEntry.principal == principal)
    if subject is not None:
        query = query.where(AuditEntry.subject == subject)
    if before is not None:
        query = query.where(AuditEntry.number < before)
    return (await session.execute(query)).scalars().all()
