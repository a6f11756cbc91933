"""Events in the store: the log of what happened to a job, read in pages; states.py writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.job_states import JobState
from service.store.tables import Event, Job


@dataclass(frozen=True)
class Glance:
    """As much of a job as tells whether it has news: its state, and the number of its last event."""

    state: JobState
    last_event: int


async def glances(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, Glance]:
    """Of those jobs that exist."""
    query = select(Job.id, Job.state, Job.last_event).where(Job.id.in_(job_ids))
    found = (await session.execute(query)).all()
    return {job_id: Glance(JobState(state), last) for job_id, state, last in found}


async def events_of(
    session: AsyncSession, job_id: str, *, after: int = 0, limit: int = 500
) -> Sequence[Event]:
    """Events numbered above `after`, in order."""
    query = (
        select(Event).where(Event.job_id == job_id, Event.number > after).order_by(Event.number).limit(limit)
    )
    return (await session.execute(query)).scalars().all()
