"""Steps in the store: loss and times of each, as drivers reported them.

The latest report of a step wins: an attempt that goes on from a checkpoint repeats steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.tables import Attempt, Step
from service.store.upsert import upsert

StepPlace = tuple[int, int]
"""Number of the attempt, number of the step."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step as the driver saw it; `started_at` is Unix time in seconds."""

    step: int
    loss: float | None
    step_s: float | None
    makespan_s: float | None
    bubble_ratio: float | None
    exposed_transfer_s: float | None
    overlap_ratio: float | None
    grad_norm: float | None
    started_at: float | None
    metrics: dict[str, float | None] = field(default_factory=dict)


async def record_steps(session: AsyncSession, attempt: Attempt, steps: Iterable[StepRecord]) -> None:
    rows = [{"job_id": attempt.job_id, "attempt": attempt.number, **vars(step)} for step in steps]
    await upsert(session, Step, rows)


async def steps_of(
    session: AsyncSession, job_id: str, *, after: int = -1, behind: StepPlace = (0, -1), limit: int = 1000
) -> Sequence[Step]:
    """Steps numbered above `after`, by attempt, then step; only those that come behind `behind` in this order.

    An attempt that goes on from a checkpoint comes last, though an earlier one went further.
    """
    query = (
        select(Step)
        .where(Step.job_id == job_id, Step.step > after, tuple_(Step.attempt, Step.step) > behind)
        .order_by(Step.attempt, Step.step)
        .limit(limit)
    )
    return (await session.execute(query)).scalars().all()


async def losses_at(session: AsyncSession, job_id: str, steps: Sequence[int]) -> dict[int, float]:
    """The training losses of those of the steps that have one."""
    query = select(Step.step, Step.loss).where(
        Step.job_id == job_id, Step.step.in_(steps), Step.loss.is_not(None)
    )
    return {step: loss for step, loss in (await session.execute(query)).all()}


async def find_step(session: AsyncSession, job_id: str, step: int) -> Step | None:
    return await session.get(Step, (job_id, step))


async def last_steps(session: AsyncSession, job_id: str, attempt: int, *, limit: int) -> list[Step]:
    """The last steps that this attempt did and no later one repeated, in order."""
    query = select(Step).where(Step.job_id == job_id, Step.attempt == attempt)
    rows = await session.execute(query.order_by(Step.step.desc()).limit(limit))
    return list(rows.scalars())[::-1]
