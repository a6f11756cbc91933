"""Event logs of jobs, the audit log of user actions, and post-mortems of failed attempts.

Job events are written by transitions.py and read here in pages; an audit entry is written in the transaction of the
change that a user asked for. A post-mortem keeps the plan and the last profiled step of a failed attempt before the
next attempt replaces them: copied inside the database, limited in slots, the last few of each job.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, insert, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.spec.states import JobState
from service.spec.values import storable_text
from service.store.measurements import SlotRecord
from service.store.tables import (
    AttemptRow,
    AuditEntryRow,
    EventRow,
    JobPlanRow,
    JobRow,
    PostMortemRow,
    SlotRow,
    TimelineRow,
)
from worker.contract.timeline import LAUNCH_EVENT, read_launch_message


def add_audit(
    session: AsyncSession, principal: str, action: str, subject: str, *, at: datetime, detail: str = ""
) -> None:
    """Record that `principal` did `action` (e.g. `job.cancel`) to `subject` (a job's id, a token's name)."""
    session.add(
        AuditEntryRow(
            at=at, principal=principal, action=action, subject=subject, detail=storable_text(detail) or ""
        )
    )


async def list_audit(
    session: AsyncSession,
    *,
    principal: str | None = None,
    subject: str | None = None,
    before: int | None = None,
    limit: int = 100,
) -> Sequence[AuditEntryRow]:
    """Entries numbered below `before`, newest first."""
    query = select(AuditEntryRow).order_by(AuditEntryRow.number.desc()).limit(limit)
    if principal is not None:
        query = query.where(AuditEntryRow.principal == principal)
    if subject is not None:
        query = query.where(AuditEntryRow.subject == subject)
    if before is not None:
        query = query.where(AuditEntryRow.number < before)
    return (await session.execute(query)).scalars().all()


@dataclass(frozen=True)
class JobVersion:
    """State and last event number of a job, by which a reader sees whether it changed."""

    state: JobState
    last_event: int


@dataclass(frozen=True)
class LaunchPhase:
    name: str
    seconds: float
    ended_at: datetime


async def job_versions(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, JobVersion]:
    """The versions of the jobs that exist, by id."""
    query = select(JobRow.id, JobRow.state, JobRow.last_event).where(JobRow.id.in_(job_ids))
    rows = (await session.execute(query)).all()
    return {job_id: JobVersion(JobState(state), last) for job_id, state, last in rows}


async def events_of(
    session: AsyncSession, job_id: str, *, after: int = 0, limit: int = 500
) -> Sequence[EventRow]:
    """Events numbered above `after`, in order."""
    query = (
        select(EventRow)
        .where(EventRow.job_id == job_id, EventRow.number > after)
        .order_by(EventRow.number)
        .limit(limit)
    )
    return (await session.execute(query)).scalars().all()


async def launch_phases(session: AsyncSession, job_id: str) -> dict[int, list[LaunchPhase]]:
    """The phases that drivers reported between their start and their first step, in order, by the attempt's number."""
    query = select(EventRow.attempt, EventRow.message, EventRow.at).where(
        EventRow.job_id == job_id, EventRow.kind == LAUNCH_EVENT, EventRow.attempt.is_not(None)
    )
    found: dict[int, list[LaunchPhase]] = {}
    for number, message, at in (await session.execute(query.order_by(EventRow.number))).all():
        if (phase := read_launch_message(message)) is not None:
            found.setdefault(number, []).append(LaunchPhase(*phase, ended_at=at))
    return found


_POST_MORTEMS_PER_JOB = 5
_POST_MORTEM_SLOT_LIMIT = 20_000
"""The latest slots of the step; they are copied in the transaction that ends the attempt, which must be short."""


async def store_post_mortem(session: AsyncSession, attempt: AttemptRow, *, at: datetime) -> None:
    """Store the plan and the last profiled step of an attempt that has just failed.

    The plan is copied inside the database, and only where it is this attempt's own.
    """
    await session.flush()
    job_id, number = attempt.job_id, attempt.number
    await session.execute(delete(PostMortemRow).where(PostMortemRow.attempt_id == attempt.id))
    own = (
        select(JobPlanRow.body)
        .where(JobPlanRow.job_id == job_id, JobPlanRow.attempt == number)
        .scalar_subquery()
    )
    latest = select(TimelineRow.step).where(TimelineRow.job_id == job_id, TimelineRow.attempt == number)
    step = (await session.execute(latest.order_by(TimelineRow.step.desc()).limit(1))).scalar_one_or_none()
    slots = None if step is None else await _post_mortem_slots_json(session, job_id, step)
    row = select(
        literal(attempt.id),
        literal(job_id),
        literal(at, PostMortemRow.at.type),
        own,
        literal(step, PostMortemRow.step.type),
        literal(slots, PostMortemRow.slots.type),
    )
    await session.execute(
        insert(PostMortemRow).from_select(["attempt_id", "job_id", "at", "plan", "step", "slots"], row)
    )
    newest = select(PostMortemRow.attempt_id).where(PostMortemRow.job_id == job_id)
    newest = newest.order_by(PostMortemRow.at.desc(), PostMortemRow.attempt_id.desc()).limit(
        _POST_MORTEMS_PER_JOB
    )
    newest_ids = (await session.execute(newest)).scalars().all()
    await session.execute(
        delete(PostMortemRow).where(
            PostMortemRow.job_id == job_id, PostMortemRow.attempt_id.not_in(newest_ids)
        )
    )


async def find_post_mortem(session: AsyncSession, attempt_id: str) -> PostMortemRow | None:
    return await session.get(PostMortemRow, attempt_id)


async def _post_mortem_slots_json(session: AsyncSession, job_id: str, step: int) -> str:
    columns = [getattr(SlotRow, name) for name in SlotRecord._fields]
    query = select(*columns).where(SlotRow.job_id == job_id, SlotRow.step == step)
    rows = await session.execute(query.order_by(SlotRow.end_s.desc()).limit(_POST_MORTEM_SLOT_LIMIT))
    return json.dumps([dict(zip(SlotRecord._fields, row, strict=True)) for row in rows])
