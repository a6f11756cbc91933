"""Rows that control planes write again and again: the database takes writes, so it takes reports too.

One row a process: a single one would be locked by whoever is frozen while it writes.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.tables import Pulse
from service.store.upsert import upsert

_FORGOTTEN_AFTER = timedelta(hours=1)


async def record_pulse(session: AsyncSession, name: str, *, at: datetime) -> None:
    await upsert(session, Pulse, [{"name": name, "at": at}])


async def forget_pulses(session: AsyncSession, *, at: datetime) -> None:
    """Of processes that have ended."""
    await session.execute(delete(Pulse).where(Pulse.at < at - _FORGOTTEN_AFTER))
