"""Evaluations in the store: what was measured between steps on the job's evaluation data.

As with steps the latest report wins: an attempt that goes on from a checkpoint repeats evaluations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.steps import StepPlace
from service.store.tables import Attempt, Evaluation
from service.store.upsert import upsert


@dataclass(frozen=True)
class EvaluationRecord:
    """What the evaluation after `step` (0: before the first) found; `started_at` is Unix time in seconds."""

    step: int
    loss: float | None
    samples: int
    evaluation_s: float | None
    started_at: float | None
    metrics: dict[str, float | None] = field(default_factory=dict)


async def record_evaluations(
    session: AsyncSession, attempt: Attempt, evaluations: Iterable[EvaluationRecord]
) -> None:
    of_step = {one.step: one for one in evaluations}
    rows = [{"job_id": attempt.job_id, "attempt": attempt.number, **vars(one)} for one in of_step.values()]
    await upsert(session, Evaluation, rows)


async def evaluations_of(
    session: AsyncSession, job_id: str, *, behind: StepPlace = (0, -1), limit: int = 1000
) -> Sequence[Evaluation]:
    """By attempt, then step; only those that come behind `behind` in this order."""
    query = (
        select(Evaluation)
        .where(Evaluation.job_id == job_id, tuple_(Evaluation.attempt, Evaluation.step) > behind)
        .order_by(Evaluation.attempt, Evaluation.step)
        .limit(limit)
    )
    return (await session.execute(query)).scalars().all()
