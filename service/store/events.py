"""Events in the store: the log of what happened to a job, read in pages; states.py writes it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.tables import Event


async def events_of(
    session: AsyncSession, job_id: str, *, after: int = 0, limit: int = 500
) -> Sequence[Event]:
    """Events numbered above `after`, in order."""
    query = (
        select(Event).where(Event.job_id == job_id, Event.number > after).order_by(Event.number).limit(limit)
    )
    return (await session.execute(query)).scalars().all()
