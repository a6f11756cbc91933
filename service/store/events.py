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
from service.store.tables import Attempt, AuditEntry, Event, Job, JobPlan, PostMortem, Slot, Timeline
from worker.contract.timeline import LAUNCH_EVENT, read_launch_message


def add_audit(
    session: AsyncSession, principal: str, action: str, subject: str, *, at: datetime, detail: str = ""
) -> None:
    """Record that `principal` did `action` (e.g. `job.cancel`) to `subject` (a job's id, a token's name)."""
    session.add(
        AuditEntry(
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
) -> Sequence[AuditEntry]:
    """Entries numbered below `before`, newest first."""
    query = select(AuditEntry).order_by(AuditEntry.number.desc()).limit(limit)
    if principal is not None:
        query = query.where(AuditEntry.principal == principal)
    if subject is not None:
        query = query.where(AuditEntry.subject == subject)
    if before is not None:
        query = query.where(AuditEntry.number < before)
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
    query = select(Job.id, Job.state, Job.last_event).where(Job.id.in_(job_ids))
    rows = (await session.execute(query)).all()
    return {job_id: JobVersion(JobState(state), last) for job_id, state, last in rows}


async def events_of(
    session: AsyncSession, job_id: str, *, after: int = 0, limit: int = 500
) -> Sequence[Event]:
    """Events numbered above `after`, in order."""
    query = (
        select(Event).where(Event.job_id == job_id, Event.number > after).order_by(Event.number).limit(limit)
    )
    return (await session.execute(query)).scalars().all()


async def launch_phases(session: AsyncSession, job_id: str) -> dict[int, list[LaunchPhase]]:
    """The phases that drivers reported between their start and their first step, in order, by the attempt's number."""
    query = select(Event.attempt, Event.message, Event.at).where(
        Event.job_id == job_id, Event.kind == LAUNCH_EVENT, Event.attempt.is_not(None)
    )
    found: dict[int, list[LaunchPhase]] = {}
    for number, message, at in (await session.execute(query.order_by(Event.number))).all():
        if (phase := read_launch_message(message)) is not None:
            found.setdefault(number, []).append(LaunchPhase(*phase, ended_at=at))
    return found


_POST_MORTEMS_PER_JOB = 5
_POST_MORTEM_SLOT_LIMIT = 20_000
"""The latest slots of the step; they are copied in the transaction that ends the attempt, which must be short."""


async def store_post_mortem(session: AsyncSession, attempt: Attempt, *, at: datetime) -> None:
    """Store the plan and the last profiled step of an attempt that has just failed.

    The plan is copied inside the database, and only where it is this attempt's own.
    """
    await session.flush()
    job_id, number = attempt.job_id, attempt.number
    await session.execute(delete(PostMortem).where(PostMortem.attempt_id == attempt.id))
    own = select(JobPlan.body).where(JobPlan.job_id == job_id, JobPlan.attempt == number).scalar_subquery()
    latest = select(Timeline.step).where(Timeline.job_id == job_id, Timeline.attempt == number)
    step = (await session.execute(latest.order_by(Timeline.step.desc()).limit(1))).scalar_one_or_none()
    slots = None if step is None else await _post_mortem_slots_json(session, job_id, step)
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
    newest = newest.order_by(PostMortem.at.desc(), PostMortem.attempt_id.desc()).limit(_POST_MORTEMS_PER_JOB)
    newest_ids = (await session.execute(newest)).scalars().all()
    await session.execute(
        delete(PostMortem).where(PostMortem.job_id == job_id, PostMortem.attempt_id.not_in(newest_ids))
    )


async def find_post_mortem(session: AsyncSession, attempt_id: str) -> PostMortem | None:
    return await session.get(PostMortem, attempt_id)


async def _post_mortem_slots_json(session: AsyncSession, job_id: str, step: int) -> str:
    columns = [getattr(Slot, name) for name in SlotRecord._fields]
    query = select(*columns).where(Slot.job_id == job_id, Slot.step == step)
    rows = await session.execute(query.order_by(Slot.end_s.desc()).limit(_POST_MORTEM_SLOT_LIMIT))
    return json.dumps([dict(zip(SlotRecord._fields, row, strict=True)) for row in rows])
