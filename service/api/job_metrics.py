"""What `/metrics` tells of the jobs that are not over, and how long jobs waited for their first attempt.

Read from the store at each scrape; series go when their job is over. Only the comparison with the plan is kept
between scrapes, until another step is profiled: reading thousands of slots takes tens of milliseconds.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import ColumnElement, Float, Integer, case, cast, func, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.api.over_plan import Link, Seconds, bytes_of, seconds_of
from service.job_states import FINAL_STATES, WAITING_STATES, JobState
from service.store.database import Database
from service.store.plans import find_plan
from service.store.tables import Attempt, Event, Job, JobPlan, Timeline
from service.store.timelines import SlotRecord, find_timeline

WAIT_BUCKETS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
_TRAINING = frozenset({JobState.RUNNING, JobState.RECOVERING})


@dataclass(frozen=True)
class OverPlan:
    """The last profiled step of a job beside its plan."""

    measured: Seconds
    planned: Seconds
    link_bytes: dict[Link, int]


@dataclass(frozen=True)
class JobSeries:
    """One job that is not over; ages in seconds, None where the job makes no checkpoints or does not train."""

    id: str
    name: str
    queue: str
    state: str
    attempt: int
    checkpoint_age_s: float | None
    checkpoint_interval_s: float | None
    over_plan: OverPlan | None
    owner: str = ""
    start_s: dict[str, float] = field(default_factory=dict)
    """Phases of the current attempt's start: until Ray has its driver, and from then until it trains."""


@dataclass(frozen=True)
class Waits:
    """Jobs of a queue by how long they waited for their first attempt: one number a bucket, the last beyond all."""

    numbers: tuple[int, ...] = (0,) * (len(WAIT_BUCKETS_S) + 1)
    sum_s: float = 0.0


@dataclass(frozen=True)
class JobCounts:
    jobs: tuple[JobSeries, ...] = ()
    waits: dict[str, Waits] = field(default_factory=dict)
    oldest_wait_s: dict[str, float] = field(default_factory=dict)


async def job_counts(database: Database, queues: tuple[str, ...], *, at: datetime) -> JobCounts:
    """All of it, from one read session; each of `queues` appears, also with no job in it."""
    async with database.read() as session:
        rows = await _jobs(session)
        checkpoints = await _last_checkpoints(session, [row.id for row in rows])
        over = await _over_plans(database, session, [row.id for row in rows if row.state in _TRAINING])
        waits = dict.fromkeys(queues, Waits()) | await _waits(database, session)
    oldest = dict.fromkeys(queues, 0.0)
    series = []
    for row in rows:
        if row.state in WAITING_STATES:
            oldest[row.queue] = max(oldest.get(row.queue, 0.0), (at - row.queued_at).total_seconds())
        saves = row.state in _TRAINING and row.uri is not None and row.started_at is not None
        since = checkpoints.get(row.id) or row.started_at
        interval = row.every_steps * row.step_s if saves and row.every_steps and row.step_s else None
        series.append(
            JobSeries(
                id=row.id,
                name=row.name,
                queue=row.queue,
                state=row.state,
                attempt=row.attempts_made,
                checkpoint_age_s=(at - since).total_seconds() if saves else None,
                checkpoint_interval_s=interval,
                over_plan=over.get(row.id),
                owner=row.owner or "",
                start_s=_start(row.created, row.submitted, row.trains),
            )
        )
    return JobCounts(tuple(series), waits, oldest)


async def _jobs(session: AsyncSession) -> list[Any]:
    query = select(
        Job.id,
        Job.name,
        getattr(Job, "owner", literal("")).label("owner"),  # of whoever submitted it, where jobs have one
        Attempt.created_at.label("created"),
        Attempt.submitted_at.label("submitted"),
        Attempt.started_at.label("trains"),
        Job.queue,
        Job.state,
        Job.attempts_made,
        Job.queued_at,
        Job.started_at,
        Job.step_s,
        Job.spec["checkpoint"]["uri"].as_string().label("uri"),
        cast(Job.spec["checkpoint"]["every_steps"].as_string(), Integer).label("every_steps"),
    )
    query = query.outerjoin(Attempt, Attempt.id == Job.current_attempt)
    query = query.where(Job.state.not_in(FINAL_STATES)).order_by(Job.created_at, Job.id)
    return list((await session.execute(query)).all())


def _start(created: datetime | None, submitted: datetime | None, trains: datetime | None) -> dict[str, float]:
    phases = {"submit": (created, submitted), "start": (submitted, trains)}
    return {
        phase: max(0.0, (end - begin).total_seconds())
        for phase, (begin, end) in phases.items()
        if begin is not None and end is not None
    }


async def _last_checkpoints(session: AsyncSession, jobs: list[str]) -> dict[str, datetime]:
    """When each of the jobs last told of a checkpoint that it saved."""
    query = select(Event.job_id, func.max(Event.at)).where(
        Event.job_id.in_(jobs), Event.kind == "checkpoint", Event.message.startswith("after step ")
    )
    return {job: at for job, at in (await session.execute(query.group_by(Event.job_id))).all()}


async def _waits(database: Database, session: AsyncSession) -> dict[str, Waits]:
    seconds = _seconds_between(database, Job.created_at, Attempt.created_at)
    place = case(*((seconds <= limit, number) for number, limit in enumerate(WAIT_BUCKETS_S)), else_=-1)
    query = (
        select(Job.queue, place, func.count(), func.sum(seconds))
        .join(Attempt, Attempt.job_id == Job.id)
        .where(Attempt.number == 1)
        .group_by(Job.queue, place)
    )
    found: dict[str, Waits] = {}
    numbers: dict[str, list[int]] = defaultdict(lambda: [0] * (len(WAIT_BUCKETS_S) + 1))
    sums: dict[str, float] = defaultdict(float)
    for queue, number, count, total in (await session.execute(query)).all():
        numbers[queue][number] += count
        sums[queue] += max(0.0, float(total))
    for queue, one in numbers.items():
        found[queue] = Waits(tuple(one), sums[queue])
    return found


def _seconds_between(database: Database, start: Any, end: Any) -> ColumnElement[float]:
    if database.is_sqlite:
        days = func.julianday(end, type_=Float) - func.julianday(start, type_=Float)
        return days * 86400.0
    return cast(func.extract("epoch", end) - func.extract("epoch", start), Float)


_Key = tuple[int, int, datetime]
"""Attempt and number of the profiled step, and when the plan was made."""
_known: WeakKeyDictionary[Database, dict[str, tuple[_Key, OverPlan]]] = WeakKeyDictionary()


async def _over_plans(database: Database, session: AsyncSession, jobs: list[str]) -> dict[str, OverPlan]:
    """Of each job that has a plan and a profiled step of the attempt that made it."""
    before, now = _known.get(database, {}), {}
    for job in jobs:
        latest = select(Timeline.attempt, Timeline.step).where(Timeline.job_id == job)
        latest = latest.order_by(Timeline.attempt.desc(), Timeline.step.desc()).limit(1)
        plan = select(JobPlan.attempt, JobPlan.created_at).where(JobPlan.job_id == job)
        step, made = (await session.execute(latest)).first(), (await session.execute(plan)).first()
        if step is None or made is None or step.attempt != made.attempt:
            continue
        key = step.attempt, step.step, made.created_at
        if job in before and before[job][0] == key:
            now[job] = before[job]
        elif (over := await _compare(session, job, step.step)) is not None:
            now[job] = key, over
    _known[database] = now
    return {job: over for job, (_, over) in now.items()}


async def _compare(session: AsyncSession, job: str, step: int) -> OverPlan | None:
    measured, plan = await find_timeline(session, job, step), await find_plan(session, job)
    if measured is None or plan is None:
        return None
    return await asyncio.to_thread(_over_plan, plan.body, measured[1])


def _over_plan(body: str, slots: list[SlotRecord]) -> OverPlan:
    known = json.loads(body)
    planned = [
        SlotRecord._make(slot.get(name) for name in SlotRecord._fields) for slot in known["plan"]["slots"]
    ]
    return OverPlan(
        measured=seconds_of(slots),
        planned=seconds_of(planned),
        link_bytes=bytes_of(planned, known["spec"].get("edges", ())),
    )
