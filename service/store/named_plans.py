"""Plans under names in the store: an owner's own, never changed, and there as long as a job may want them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.job_states import FINAL_STATES
from service.store.audit import add_audit
from service.store.kept_tables import WITHOUT_BODY, NamedPlan
from service.store.tables import Job

FOR_EVER = -1


@dataclass(frozen=True)
class NewPlan:
    """A plan to be kept; the fields are those of NamedPlan."""

    owner: str
    name: str
    request_digest: str
    measured_by: str
    summary: dict[str, Any]
    made_for: str
    body: str


class TooManyPlansError(Exception):
    """The owner keeps as many plans as an owner may; the message says how many."""


async def store_plan(session: AsyncSession, new: NewPlan, *, at: datetime, most: int) -> NamedPlan:
    """Keep a plan. Raises TooManyPlansError, and sqlalchemy's IntegrityError for a name that the owner has given."""
    count = select(func.count()).where(NamedPlan.owner == new.owner, NamedPlan.name.is_not(None))
    if (kept := (await session.execute(count)).scalar_one()) >= most:
        raise TooManyPlansError(f"{kept} plans are kept already, and an owner may keep {most}")
    plan = NamedPlan(
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


async def named_plan(session: AsyncSession, owner: str, name: str, *, whole: bool = True) -> NamedPlan | None:
    """The owner's plan of this name; not `whole`: without its body, which may be long."""
    query = select(NamedPlan).where(NamedPlan.owner == owner, NamedPlan.name == name)
    if not whole:
        query = query.options(WITHOUT_BODY[0])
    return (await session.execute(query)).scalar_one_or_none()


async def plan_by_id(session: AsyncSession, plan_id: str) -> NamedPlan | None:
    """The plan, whole, also one whose name was taken away."""
    return await session.get(NamedPlan, plan_id)


async def list_plans(
    session: AsyncSession, *, owner: str | None, after: str | None, limit: int
) -> Sequence[NamedPlan]:
    """Plans without their bodies, by id, those behind `after`; of one owner or of all."""
    query = select(NamedPlan).options(*WITHOUT_BODY).where(NamedPlan.name.is_not(None))
    if owner is not None:
        query = query.where(NamedPlan.owner == owner)
    if after is not None:
        query = query.where(NamedPlan.id > after)
    return (await session.execute(query.order_by(NamedPlan.id).limit(limit))).scalars().all()


async def use_plan(session: AsyncSession, plan_id: str, *, at: datetime) -> None:
    """Note that a job was submitted with it."""
    await session.execute(update(NamedPlan).where(NamedPlan.id == plan_id).values(used_at=at))


async def delete_plan(session: AsyncSession, owner: str, name: str, *, by: str, at: datetime) -> bool:
    """Take its name away; it goes when no job wants it any more. Whether there was one."""
    same = (NamedPlan.owner == owner, NamedPlan.name == name)
    found = await session.execute(update(NamedPlan).where(*same).values(name=None))
    if found.rowcount:
        add_audit(session, by, "plan.remove", name, at=at, detail="" if by == owner else f"of {owner}")
    return found.rowcount > 0


async def forget_plans(
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
    unwanted = ~exists().where(Job.given_plan == NamedPlan.id, wanted)
    old = NamedPlan.name.is_(None)
    if unused_days != FOR_EVER:
        old = or_(old, NamedPlan.used_at < at - timedelta(days=unused_days))
    await session.execute(delete(NamedPlan).where(old, unwanted))
