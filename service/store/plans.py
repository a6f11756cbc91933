"""Plans: each job's current plan, from its last attempt, and the saved plans that users store under names.

A saved plan is its owner's and never changes. Deleting it takes its name away; the row goes when no job needs it: a
job needs its plan until it has ended and as long as its history is kept, since it may be retried. Bodies are long
texts, passed on without parsing and left out of lists.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.spec.states import FINAL_STATES
from service.store.database import upsert
from service.store.events import add_audit
from service.store.tables import WITHOUT_PLAN_BODY, Attempt, Job, JobPlan, SavedPlan

FOR_EVER = -1


@dataclass(frozen=True)
class NewSavedPlan:
    """A plan to be kept; the fields are those of NamedPlan."""

    owner: str
    name: str
    request_digest: str
    measured_by: str
    summary: dict[str, Any]
    made_for: str
    body: str


class TooManySavedPlansError(Exception):
    """The owner keeps as many plans as an owner may; the message says how many."""


async def store_saved_plan(session: AsyncSession, new: NewSavedPlan, *, at: datetime, most: int) -> SavedPlan:
    """Keep a plan. Raises TooManyPlansError, and sqlalchemy's IntegrityError for a name that the owner has given."""
    count = select(func.count()).where(SavedPlan.owner == new.owner, SavedPlan.name.is_not(None))
    if (kept := (await session.execute(count)).scalar_one()) >= most:
        raise TooManySavedPlansError(f"{kept} plans are kept already, and an owner may keep {most}")
    plan = SavedPlan(
        id=f"plan-{secrets.token_hex(8)}",
        created_at=at,
        used_at=at,
        size_bytes=len(new.body.encode()),
        **vars(new),
    )
    session.add(plan)
    await session.flush()
    add_audit(session, new.owner, "plan.keep", new.name, at=at)
    return plan


async def find_saved_plan(
    session: AsyncSession, owner: str, name: str, *, whole: bool = True
) -> SavedPlan | None:
    """The owner's plan of this name; not `whole`: without its body, which may be long."""
    query = select(SavedPlan).where(SavedPlan.owner == owner, SavedPlan.name == name)
    if not whole:
        query = query.options(WITHOUT_PLAN_BODY[0])
    return (await session.execute(query)).scalar_one_or_none()


async def saved_plan_by_id(session: AsyncSession, plan_id: str) -> SavedPlan | None:
    """The plan, whole, also one whose name was taken away."""
    return await session.get(SavedPlan, plan_id)


async def list_saved_plans(
    session: AsyncSession, *, owner: str | None, after: str | None, limit: int
) -> Sequence[SavedPlan]:
    """Plans without their bodies, by id, those behind `after`; of one owner or of all."""
    query = select(SavedPlan).options(*WITHOUT_PLAN_BODY).where(SavedPlan.name.is_not(None))
    if owner is not None:
        query = query.where(SavedPlan.owner == owner)
    if after is not None:
        query = query.where(SavedPlan.id > after)
    return (await session.execute(query.order_by(SavedPlan.id).limit(limit))).scalars().all()


async def mark_saved_plan_used(session: AsyncSession, plan_id: str, *, at: datetime) -> None:
    """Note that a job was submitted with it."""
    await session.execute(update(SavedPlan).where(SavedPlan.id == plan_id).values(used_at=at))


async def delete_saved_plan(session: AsyncSession, owner: str, name: str, *, by: str, at: datetime) -> bool:
    """Take its name away; it goes when no job wants it any more. Whether there was one."""
    same = (SavedPlan.owner == owner, SavedPlan.name == name)
    found = await session.execute(update(SavedPlan).where(*same).values(name=None))
    if found.rowcount:
        add_audit(session, by, "plan.remove", name, at=at, detail="" if by == owner else f"of {owner}")
    return found.rowcount > 0


async def delete_unused_saved_plans(
    session: AsyncSession, *, unused_days: float, history_days: float, at: datetime
) -> None:
    """Remove plans that no job wants: those without a name, and those that were not used for so many days.

    A job wants its plan until it has ended, and as long as its history is kept, since it may be retried.
    """
    wanted = Job.state.not_in(FINAL_STATES)
    if history_days == FOR_EVER:
        wanted = Job.id.is_not(None)
    else:
        wanted = or_(wanted, Job.finished_at >= at - timedelta(days=history_days))
    unwanted = ~exists().where(Job.given_plan == SavedPlan.id, wanted)
    old = SavedPlan.name.is_(None)
    if unused_days != FOR_EVER:
        old = or_(old, SavedPlan.used_at < at - timedelta(days=unused_days))
    await session.execute(delete(SavedPlan).where(old, unwanted))


async def record_job_plan(session: AsyncSession, attempt: Attempt, body: str, *, at: datetime) -> None:
    """Make `body`, JSON with begins, spec and plan, the job's plan."""
    row = {"job_id": attempt.job_id, "attempt": attempt.number, "created_at": at, "body": body}
    await upsert(session, JobPlan, [row])


async def find_job_plan(session: AsyncSession, job_id: str) -> JobPlan | None:
    return await session.get(JobPlan, job_id)
