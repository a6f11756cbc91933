"""Measured timelines in the store: the slots of profiled steps, of each job the last ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.tables import Attempt, Slot, Timeline

_LATEST_FIRST = (Timeline.attempt.desc(), Timeline.step.desc())
"""An attempt that goes on from a checkpoint has lower steps than the dead one before it."""


class SlotRecord(NamedTuple):
    """One measured slot; times in seconds from the start of its step. A tuple: there are thousands a step."""

    mesh: str
    lane: str
    action: str
    stage: str | None
    peer_stage: str | None
    peer_mesh: str | None
    edge: int | None
    microbatch: int | None
    start_s: float
    end_s: float


async def record_timeline(
    session: AsyncSession,
    attempt: Attempt,
    *,
    step: int,
    started_at: float,
    uncertainty_s: float | None,
    slots: Iterable[SlotRecord],
    keep: int,
) -> None:
    """Store the measured slots of one step; of each job the last `keep` timelines stay."""
    job_id = attempt.job_id
    await _delete_timelines(session, job_id, [step])
    session.add(
        Timeline(
            job_id=job_id,
            step=step,
            attempt=attempt.number,
            started_at=started_at,
            uncertainty_s=uncertainty_s,
        )
    )
    await session.flush()
    await _insert_slots(session, [(job_id, step, *slot) for slot in slots])
    query = select(Timeline.step).where(Timeline.job_id == job_id).order_by(*_LATEST_FIRST).offset(keep)
    if old := (await session.execute(query)).scalars().all():
        await _delete_timelines(session, job_id, old)


async def profiled_steps(session: AsyncSession, job_id: str) -> Sequence[int]:
    """Numbers of the steps whose slots are stored, by attempt, then step: the latest is the last."""
    return [step for _, step in await profiled_places(session, job_id)]


async def profiled_places(session: AsyncSession, job_id: str) -> Sequence[tuple[int, int]]:
    """(attempt, step) of the steps whose slots are stored, in this order."""
    query = select(Timeline.attempt, Timeline.step).where(Timeline.job_id == job_id)
    rows = await session.execute(query.order_by(Timeline.attempt, Timeline.step))
    return [(attempt, step) for attempt, step in rows]


async def find_timeline(
    session: AsyncSession, job_id: str, step: int | None
) -> tuple[Timeline, list[SlotRecord]] | None:
    """The measured timeline of `step`, with its slots as reported; the latest one of the latest attempt if None."""
    query = select(Timeline).where(Timeline.job_id == job_id).order_by(*_LATEST_FIRST).limit(1)
    if step is not None:
        query = query.where(Timeline.step == step)
    timeline = (await session.execute(query)).scalar_one_or_none()
    if timeline is None:
        return None
    columns = [getattr(Slot, name) for name in SlotRecord._fields]
    slots = select(*columns).where(Slot.job_id == job_id, Slot.step == timeline.step).order_by(Slot.id)
    return timeline, [SlotRecord._make(row) for row in await session.execute(slots)]


async def _delete_timelines(session: AsyncSession, job_id: str, steps: Sequence[int]) -> None:
    for table in (Slot, Timeline):
        await session.execute(delete(table).where(table.job_id == job_id, table.step.in_(steps)))


async def _insert_slots(session: AsyncSession, rows: list[tuple[Any, ...]]) -> None:
    """`rows` as the driver takes them: SQLAlchemy would turn each of thousands into parameters of its own."""
    if not rows:
        return
    columns = ("job_id", "step", *SlotRecord._fields)
    mark = "?" if session.get_bind().dialect.name == "sqlite" else "%s"
    statement = f"INSERT INTO slots ({', '.join(columns)}) VALUES ({', '.join([mark] * len(columns))})"
    await (await session.connection()).exec_driver_sql(statement, rows)
