"""What a failed attempt leaves behind, kept before the next attempt replaces it; of each job the last ones."""

from __future__ import annotations

import json
from datetime import datetime

from sqlalchemy import delete, insert, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.tables import Attempt, JobPlan, PostMortem, Slot, Timeline
from service.store.timelines import SlotRecord

_KEPT = 5
_MOST_SLOTS = 20_000
"""The last ones of a step: they are kept inside the transaction that ends the attempt, which must not last."""


async def keep_post_mortem(session: AsyncSession, attempt: Attempt, *, at: datetime) -> None:
    """Keep the plan and the last profiled step of an attempt that has just failed.

    The plan is copied inside the database, and only where it is this attempt's own.
    """
    await session.flush()
    job_id, number = attempt.job_id, attempt.number
    await session.execute(delete(PostMortem).where(PostMortem.attempt_id == attempt.id))
    own = select(JobPlan.body).where(JobPlan.job_id == job_id, JobPlan.attempt == number).scalar_subquery()
    latest = select(Timeline.step).where(Timeline.job_id == job_id, Timeline.attempt == number)
    step = (await session.execute(latest.order_by(Timeline.step.desc()).limit(1))).scalar_one_or_none()
    slots = None if step is None else await _slots(session, job_id, step)
    row = select(
        literal(attempt.id),
        literal(job_id),
        literal(at, PostMortem.at.type),
        own,
        literal(step, PostMortem.step.type),
        literal(slots, PostMortem.slots.type),
    )
    await session.execute(
        insert(PostMortem).from_select(["attempt_id", "job_id", "at", "plan", "step", "slots"], row)
    )
    newest = select(PostMortem.attempt_id).where(PostMortem.job_id == job_id)
    newest = newest.order_by(PostMortem.at.desc(), PostMortem.attempt_id.desc()).limit(_KEPT)
    kept = (await session.execute(newest)).scalars().all()
    await session.execute(
        delete(PostMortem).where(PostMortem.job_id == job_id, PostMortem.attempt_id.not_in(kept))
    )


async def find_post_mortem(session: AsyncSession, attempt_id: str) -> PostMortem | None:
    return await session.get(PostMortem, attempt_id)


async def _slots(session: AsyncSession, job_id: str, step: int) -> str:
    columns = [getattr(Slot, name) for name in SlotRecord._fields]
    query = select(*columns).where(Slot.job_id == job_id, Slot.step == step)
    rows = await session.execute(query.order_by(Slot.end_s.desc()).limit(_MOST_SLOTS))
    return json.dumps([dict(zip(SlotRecord._fields, row, strict=True)) for row in rows])
