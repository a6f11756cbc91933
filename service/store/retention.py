"""What ended jobs leave behind, and when it goes: first measured slots, later steps, logs and plan.

Jobs, attempts and events stay. Each piece of work is a short transaction of its own, so that nobody
waits long for it; it is safe to stop between two and to begin again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, exists, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.job_states import FINAL_STATES
from service.jobspec import PACKAGE_PREFIX
from service.store.database import Sessions
from service.store.named_plans import forget_plans
from service.store.notification_tables import Delivery
from service.store.pulse import forget_pulses
from service.store.short_runs import forget_runs
from service.store.states import add_event, lock_job
from service.store.tables import Attempt, Evaluation, Job, JobPlan, Package, PostMortem, Slot, Step, Timeline

FOR_EVER = -1
_TIMELINES_AT_ONCE = 20
_JOBS_AT_ONCE = 100


@dataclass(frozen=True)
class Keep:
    """For how many days after a job's end, or after a package's last upload; FOR_EVER removes nothing.

    Packages are those that no job names.
    """

    timelines_days: float
    history_days: float
    packages_days: float
    plans_days: float = FOR_EVER


async def remove_old(database: Sessions, keep: Keep, *, now: datetime) -> None:
    """Remove what has been kept for longer than `keep` says."""
    if keep.timelines_days != FOR_EVER:
        await _remove_timelines(database, keep.timelines_days, now)
    if keep.history_days != FOR_EVER:
        await _remove_history(database, keep.history_days, now)
    if keep.packages_days != FOR_EVER:
        await _remove_packages(database, keep.packages_days, now)
    async with database.write() as session:
        await forget_pulses(session, at=now)
        await forget_runs(session)
        await forget_plans(session, unused_days=keep.plans_days, history_days=keep.history_days, at=now)


async def _remove_timelines(database: Sessions, days: float, now: datetime) -> None:
    while jobs := await _ended_jobs(database, days, now, exists().where(Timeline.job_id == Job.id)):
        for job_id in jobs:
            while await _remove_some_timelines(database, job_id, days, now):
                pass


async def _remove_some_timelines(database: Sessions, job_id: str, days: float, now: datetime) -> bool:
    """Whether the job may have more of them."""
    async with database.write() as session:
        job = await _still_ended(session, job_id, days, now)
        if job is None:
            return False
        query = select(Timeline.step).where(Timeline.job_id == job_id).limit(_TIMELINES_AT_ONCE)
        steps = (await session.execute(query)).scalars().all()
        for table in (Slot, Timeline):
            await session.execute(delete(table).where(table.job_id == job_id, table.step.in_(steps)))
        if len(steps) == _TIMELINES_AT_ONCE:
            return True
        _add_removal_event(session, job, "measured slots", days, "TIMELINES", now)
        return False


async def _remove_history(database: Sessions, days: float, now: datetime) -> None:
    some = or_(
        exists().where(Step.job_id == Job.id),
        exists().where(JobPlan.job_id == Job.id),
        exists().where(PostMortem.job_id == Job.id),
        exists().where(Delivery.job_id == Job.id),
        exists().where(Attempt.job_id == Job.id, Attempt.log != ""),
    )
    while jobs := await _ended_jobs(database, days, now, some):
        for job_id in jobs:
            async with database.write() as session:
                if job := await _still_ended(session, job_id, days, now):
                    for table in (Step, Evaluation, JobPlan, PostMortem, Delivery):
                        await session.execute(delete(table).where(table.job_id == job_id))
                    # not NULL: Ray would be asked for the log again
                    await session.execute(update(Attempt).where(Attempt.job_id == job_id).values(log=""))
                    _add_removal_event(session, job, "steps, plan and logs", days, "HISTORY", now)


async def _remove_packages(database: Sessions, days: float, now: datetime) -> None:
    named = Job.spec["code"]["working_dir"].as_string() == literal(PACKAGE_PREFIX) + Package.digest
    unused = delete(Package).where(Package.created_at < now - timedelta(days=days), ~exists().where(named))
    async with database.write() as session:
        await session.execute(unused)


async def _ended_jobs(database: Sessions, days: float, now: datetime, some: ColumnElement[bool]) -> list[str]:
    query = (
        select(Job.id)
        .where(Job.state.in_(FINAL_STATES), Job.finished_at < now - timedelta(days=days), some)
        .limit(_JOBS_AT_ONCE)
    )
    async with database.read() as session:
        return list((await session.execute(query)).scalars())


async def _still_ended(session: AsyncSession, job_id: str, days: float, now: datetime) -> Job | None:
    """The job, locked, unless somebody has begun it again."""
    job = await lock_job(session, job_id)
    if job is None or job.finished_at is None or not job.job_state.final:
        return None
    return job if job.finished_at < now - timedelta(days=days) else None


def _add_removal_event(
    session: AsyncSession, job: Job, what: str, days: float, setting: str, now: datetime
) -> None:
    message = f"{what} were removed {days:g} days after the end (SLOTLINE_KEEP_{setting}_DAYS)"
    add_event(session, job, "removed", message, at=now)
