"""A row that the control plane writes again and again: the database takes writes, so it takes reports too."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from service.store.tables import Pulse
from service.store.upsert import upsert


async def record_pulse(session: AsyncSession, *, at: datetime) -> None:
    await upsert(session, Pulse, [{"name": "orchestrator", "at": at}])
