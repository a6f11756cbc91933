"""Plans in the store: of each job the one that its last attempt made."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from service.store.tables import Attempt, JobPlan
from service.store.upsert import upsert


async def record_plan(session: AsyncSession, attempt: Attempt, body: str, *, at: datetime) -> None:
    """Make `body`, JSON with begins, spec and plan, the job's plan."""
    row = {"job_id": attempt.job_id, "attempt": attempt.number, "created_at": at, "body": body}
    await upsert(session, JobPlan, [row])


async def find_plan(session: AsyncSession, job_id: str) -> JobPlan | None:
    return await session.get(JobPlan, job_id)
