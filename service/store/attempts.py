"""Attempts in the store, and everything that a driver reports about its attempt.

The latest report of a step wins: an attempt that goes on from a checkpoint repeats steps.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import delete, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from service.jobspec import AttemptState, JobState
from service.store.states import move_job
from service.store.tables import Attempt, Base, Job, JobPlan, Profile, Slot, Step, Timeline


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


async def create_attempt(session: AsyncSession, job: Job, *, device: str, at: datetime) -> Attempt:
    """The next attempt of a locked job that waits: the job is STARTING afterwards."""
    job.attempts_made += 1
    attempt = Attempt(
        id=f"{job.id}-{job.attempts_made}",
        job_id=job.id,
        number=job.attempts_made,
        state=AttemptState.STARTING,
        token=secrets.token_urlsafe(32),
        device=device,
        accelerators=job.accelerators,
        created_at=at,
        last_sequence=0,
        log_first_line=1,
    )
    session.add(attempt)
    job.current_attempt, job.not_before = attempt.id, None
    move_job(
        session,
        job,
        JobState.STARTING,
        at=at,
        message=f"attempt {attempt.number} takes {job.accelerators} accelerators ({device})",
        attempt=attempt.number,
    )
    return attempt


async def find_attempt(session: AsyncSession, attempt_id: str) -> Attempt | None:
    return await session.get(Attempt, attempt_id)


async def active_attempts(session: AsyncSession) -> list[tuple[Attempt, Job]]:
    """Attempts that hold accelerators, oldest first, each with its job."""
    query = (
        select(Attempt, Job)
        .join(Job, Attempt.job_id == Job.id)
        .where(Attempt.state.in_([AttemptState.STARTING, AttemptState.RUNNING]))
        .order_by(Attempt.created_at, Attempt.id)
    )
    return [(attempt, job) for attempt, job in (await session.execute(query)).all()]


async def attempts_without_log(session: AsyncSession, *, ended_before: datetime) -> list[Attempt]:
    """Attempts that are over and whose driver's log is not kept yet."""
    query = select(Attempt).where(
        Attempt.log.is_(None), Attempt.submitted_at.is_not(None), Attempt.finished_at < ended_before
    )
    return list((await session.execute(query)).scalars())


async def measured_attempts(session: AsyncSession, *, ended_after: datetime) -> list[tuple[Attempt, Job]]:
    """Attempts whose driver serves metrics: they run, or ended after `ended_after`."""
    query = (
        select(Attempt, Job)
        .join(Job, Attempt.job_id == Job.id)
        .where(
            Attempt.metrics_endpoint.is_not(None),
            or_(Attempt.finished_at.is_(None), Attempt.finished_at > ended_after),
        )
        .order_by(Attempt.created_at, Attempt.id)
    )
    return [(attempt, job) for attempt, job in (await session.execute(query)).all()]


async def record_steps(session: AsyncSession, attempt: Attempt, steps: Iterable[StepRecord]) -> None:
    rows = [{"job_id": attempt.job_id, "attempt": attempt.number, **vars(step)} for step in steps]
    await _upsert(session, Step, rows)


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
    query = select(Timeline.step).where(Timeline.job_id == job_id).order_by(Timeline.step.desc()).offset(keep)
    if old := (await session.execute(query)).scalars().all():
        await _delete_timelines(session, job_id, old)


async def record_plan(session: AsyncSession, attempt: Attempt, body: str, *, at: datetime) -> None:
    """Make `body`, JSON with begins, spec and plan, the job's plan."""
    row = {"job_id": attempt.job_id, "attempt": attempt.number, "created_at": at, "body": body}
    await _upsert(session, JobPlan, [row])


async def record_profile(session: AsyncSession, key: str, body: dict[str, Any], *, at: datetime) -> None:
    await _upsert(session, Profile, [{"key": key, "created_at": at, "body": body}])


async def find_profile(session: AsyncSession, key: str) -> dict[str, Any] | None:
    profile = await session.get(Profile, key)
    return None if profile is None else profile.body


async def find_plan(session: AsyncSession, job_id: str) -> JobPlan | None:
    return await session.get(JobPlan, job_id)


async def steps_of(
    session: AsyncSession, job_id: str, *, after: int = -1, limit: int = 1000
) -> Sequence[Step]:
    """Steps numbered above `after`, in order."""
    query = select(Step).where(Step.job_id == job_id, Step.step > after).order_by(Step.step).limit(limit)
    return (await session.execute(query)).scalars().all()


async def find_step(session: AsyncSession, job_id: str, step: int) -> Step | None:
    return await session.get(Step, (job_id, step))


async def profiled_steps(session: AsyncSession, job_id: str) -> Sequence[int]:
    """Numbers of the steps whose slots are stored, in order."""
    query = select(Timeline.step).where(Timeline.job_id == job_id).order_by(Timeline.step)
    return (await session.execute(query)).scalars().all()


async def find_timeline(
    session: AsyncSession, job_id: str, step: int | None
) -> tuple[Timeline, list[SlotRecord]] | None:
    """The measured timeline of `step`, or of the last profiled step, with its slots as reported."""
    query = select(Timeline).where(Timeline.job_id == job_id).order_by(Timeline.step.desc()).limit(1)
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


async def _upsert(session: AsyncSession, table: type[Base], rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    key = [column.name for column in table.__table__.primary_key]
    statement = dialect.insert(table)
    others = {name: statement.excluded[name] for name in rows[0] if name not in key}
    await session.execute(statement.on_conflict_do_update(index_elements=key, set_=others), rows)
