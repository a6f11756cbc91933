"""Plans: each job's current plan, from its last attempt, and the saved plans that users store under names.

A saved plan is its owner's and never changes. Deleting it takes its name away; the row goes when no job needs it: a
job needs its plan until it has ended and as long as its history is kept, since it may be retried. Bodies are long
texts, passed on without parsing and left out of lists.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.settings.settings import FOR_EVER
from service.spec.states import FINAL_STATES
from service.store.database import upsert
from service.store.events import add_audit
from service.store.tables import WITHOUT_PLAN_BODY, AttemptRow, JobPlanRow, JobRow, SavedPlanRow


@dataclass(frozen=True)
class NewSavedPlan:
    """A plan to be stored under a name; fields as of SavedPlan."""

    owner: str
    project: str
    name: str
    request_digest: str
    measured_by: str
    summary: dict[str, Any]
    made_for: str
    body: str


class TooManySavedPlansError(Exception):
    """The owner has the greatest number of saved plans that an owner may have; the message names it."""


async def store_saved_plan(
    session: AsyncSession, new: NewSavedPlan, *, at: datetime, most: int
) -> SavedPlanRow:
    """Store a plan. Raises TooManySavedPlansError, and sqlalchemy's IntegrityError for a name that the owner has used."""
    count = select(func.count()).where(SavedPlanRow.owner == new.owner, SavedPlanRow.name.is_not(None))
    if (saved := (await session.execute(count)).scalar_one()) >= most:
        raise TooManySavedPlansError(f"{saved} plans are saved already, and an owner may save {most}")
    plan = SavedPlanRow(
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
) -> SavedPlanRow | None:
    """The owner's plan of this name, without its long body unless `whole`."""
    query = select(SavedPlanRow).where(SavedPlanRow.owner == owner, SavedPlanRow.name == name)
    if not whole:
        query = query.options(WITHOUT_PLAN_BODY[0])
    return (await session.execute(query)).scalar_one_or_none()


async def saved_plan_by_id(session: AsyncSession, plan_id: str) -> SavedPlanRow | None:
    """The plan with its body, also a deleted one that jobs still need."""
    return await session.get(SavedPlanRow, plan_id)


async def list_saved_plans(
    session: AsyncSession,
    *,
    owner: str | None,
    after: str | None,
    limit: int,
    projects: Collection[str] | None = None,
) -> Sequence[SavedPlanRow]:
    """Plans without their bodies, ordered by id, with ids above `after`; of `owner`, or of all owners; of these `projects`,
    or of all."""
    query = select(SavedPlanRow).options(*WITHOUT_PLAN_BODY).where(SavedPlanRow.name.is_not(None))
    if projects is not None:
        query = query.where(SavedPlanRow.project.in_(projects))
    if owner is not None:
        query = query.where(SavedPlanRow.owner == owner)
    if after is not None:
        query = query.where(SavedPlanRow.id > after)
    return (await session.execute(query.order_by(SavedPlanRow.id).limit(limit))).scalars().all()


async def mark_saved_plan_used(session: AsyncSession, plan_id: str, *, at: datetime) -> None:
    """Record the time at which a job was submitted with the plan."""
    await session.execute(update(SavedPlanRow).where(SavedPlanRow.id == plan_id).values(used_at=at))


async def delete_saved_plan(session: AsyncSession, owner: str, name: str, *, by: str, at: datetime) -> bool:
    """Take the plan's name away; its row is deleted when no job needs it. Returns whether the plan existed."""
    same = (SavedPlanRow.owner == owner, SavedPlanRow.name == name)
    unnamed = await session.execute(update(SavedPlanRow).where(*same).values(name=None))
    if unnamed.rowcount:
        add_audit(session, by, "plan.remove", name, at=at, detail="" if by == owner else f"of {owner}")
    return unnamed.rowcount > 0


async def delete_unused_saved_plans(
    session: AsyncSession, *, unused_days: float, history_days: float, at: datetime
) -> None:
    """Delete plans that no job needs and that have no name or were not used for `unused_days`.

    A job needs its plan until it has ended, and as long as its history is kept, since it may be retried.
    """
    needing = JobRow.state.not_in(FINAL_STATES)
    if history_days == FOR_EVER:
        needing = JobRow.id.is_not(None)
    else:
        needing = or_(needing, JobRow.finished_at >= at - timedelta(days=history_days))
    unneeded = ~exists().where(JobRow.saved_plan_id == SavedPlanRow.id, needing)
    old = SavedPlanRow.name.is_(None)
    if unused_days != FOR_EVER:
        old = or_(old, SavedPlanRow.used_at < at - timedelta(days=unused_days))
    await session.execute(delete(SavedPlanRow).where(old, unneeded))


async def record_job_plan(
    session: AsyncSession, attempt: AttemptRow, body: str, *, at: datetime, since_step: int | None = None
) -> None:
    """Store `body`, JSON with begins, spec and plan, as the job's current plan; `since_step` is the first step that ran by
    it, where it was swapped in."""
    row = {
        "job_id": attempt.job_id,
        "attempt": attempt.number,
        "created_at": at,
        "body": body,
        "since_step": since_step,
    }
    await upsert(session, JobPlanRow, [row])


async def find_job_plan(session: AsyncSession, job_id: str) -> JobPlanRow | None:
    return await session.get(JobPlanRow, job_id)
