"""Figures of jobs and queues for `/metrics`: states, waits, checkpoint ages, and measured slots beside planned ones.

Jobs that wait for their first attempt are counted and have no series: queues may be long, and scrapes are short.
Counted at each scrape: nothing accumulates here, so a restart loses nothing. Only the comparison of measured with
planned slots, and the calibration of the plan, are cached, until another step is profiled: reading thousands of slots
takes tens of milliseconds.
A transfer lasts from when both ends are there until the first is done: the slot of an early end includes its wait.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import ColumnElement, Float, Integer, and_, case, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from service.jobs.explain import read_calibrations
from service.jobs.views import effective_training_ratio
from service.spec.principals import DEFAULT_PROJECT
from service.spec.states import FINAL_STATES, WAITING_STATES, JobState
from service.store.database import Database
from service.store.measurements import SlotRecord, find_timeline
from service.store.plans import find_job_plan
from service.store.tables import AttemptRow, EventRow, JobPlanRow, JobRow, TimelineRow

WAIT_BUCKETS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
_TRAINING_STATES = frozenset({JobState.RUNNING, JobState.RECOVERING})
_BEGUN_STATES = frozenset(JobState) - FINAL_STATES - {JobState.QUEUED}
COMPUTE_ACTIONS = frozenset("FBIW")
MAX_JOB_SERIES = 1_000
"""Jobs with series of their own: those that hold accelerators first, then those that will go on, the newest of each."""
_CALIBRATION_LIMIT_S = 1.0  # of one scrape, for plans of whose jobs another step was profiled
Link = tuple[str, str]
"""The mesh that sends, the mesh that receives."""


@dataclass(frozen=True)
class JobMetrics:
    jobs: tuple[JobSeries, ...] = ()
    waits: dict[str, QueueWaits] = field(default_factory=dict)
    oldest_wait_s: dict[str, float] = field(default_factory=dict)
    left_out: int = 0
    """Jobs beyond MAX_JOB_SERIES."""


@dataclass(frozen=True)
class JobSeries:
    """One job that has begun and is not over; ages in seconds, None where the job makes no checkpoints or does not train."""

    id: str
    name: str
    queue: str
    state: str
    attempt: int
    checkpoint_age_s: float | None
    checkpoint_interval_s: float | None
    over_plan: PlanComparison | None
    owner: str = ""
    project: str = DEFAULT_PROJECT
    calibrated_makespan_s: float | None = None
    """The makespan of its plan with the costs of profiled steps."""
    start_s: dict[str, float] = field(default_factory=dict)
    """Phases of the current attempt's start: until it has its accelerators, until Ray has its driver, until it trains."""
    saved_at: datetime | None = None
    """When its last checkpoint was saved."""
    interruption: InterruptedAttempt | None = None
    """How its last ended attempt ended."""
    effective_training_ratio: float | None = None


@dataclass(frozen=True)
class InterruptedAttempt:
    """The end of an attempt of a job that goes on."""

    at: datetime
    reason: str


@dataclass(frozen=True)
class QueueWaits:
    """Jobs of a queue by how long they waited for their first attempt: one number a bucket, the last beyond all."""

    numbers: tuple[int, ...] = (0,) * (len(WAIT_BUCKETS_S) + 1)
    sum_s: float = 0.0


@dataclass(frozen=True)
class PlanComparison:
    """The last profiled step of a job beside its plan."""

    measured: StepSeconds
    planned: StepSeconds
    link_bytes: dict[Link, int]


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step: of computing on each mesh, of transfers on each directed link."""

    meshes: dict[str, float]
    links: dict[Link, float]


async def read_job_metrics(database: Database, queues: tuple[str, ...], *, at: datetime) -> JobMetrics:
    """Figures at the time `at`; each of `queues` appears, also with no job in it."""
    async with database.read() as session:
        rows = await _begun_jobs(session, MAX_JOB_SERIES)
        begun = await session.scalar(
            select(func.count()).select_from(JobRow).where(JobRow.state.in_(_BEGUN_STATES))
        )
        checkpoints = await _last_checkpoints(session, [row.id for row in rows])
        interruptions = await _last_interruptions(session, [row.id for row in rows])
        over = await _plan_comparisons(
            database, session, [row.id for row in rows if row.state in _TRAINING_STATES]
        )
        waits = dict.fromkeys(queues, QueueWaits()) | await _queue_waits(database, session)
        oldest = dict.fromkeys(queues, 0.0) | await _oldest_waits(session, at)
    calibrations = await read_calibrations(database, over, limit_s=_CALIBRATION_LIMIT_S)
    series = []
    for row in rows:
        saves = row.state in _TRAINING_STATES and row.uri is not None and row.started_at is not None
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
                project=row.project,
                calibrated_makespan_s=None
                if (found := calibrations.get(row.id)) is None
                else found.makespan_s,
                start_s=_start_phases(
                    max(row.queued_at, row.ended_before or row.queued_at),
                    row.created,
                    row.submitted,
                    row.trains,
                ),
                saved_at=checkpoints.get(row.id),
                interruption=interruptions.get(row.id),
                effective_training_ratio=effective_training_ratio(
                    row.trained_s, since=row.first_began, until=at
                ),
            )
        )
    return JobMetrics(tuple(series), waits, oldest, left_out=(begun or 0) - len(series))


async def _begun_jobs(session: AsyncSession, limit: int) -> list[Any]:
    before, first = aliased(AttemptRow), aliased(AttemptRow)
    query = select(
        JobRow.id,
        JobRow.trained_s,
        first.created_at.label("first_began"),
        JobRow.name,
        JobRow.owner,
        JobRow.project,
        AttemptRow.created_at.label("created"),
        AttemptRow.submitted_at.label("submitted"),
        AttemptRow.started_at.label("trains"),
        before.finished_at.label("ended_before"),
        JobRow.queue,
        JobRow.state,
        JobRow.attempts_made,
        JobRow.queued_at,
        JobRow.started_at,
        JobRow.step_s,
        JobRow.spec["checkpoint"]["uri"].as_string().label("uri"),
        cast(JobRow.spec["checkpoint"]["every_steps"].as_string(), Integer).label("every_steps"),
    )
    query = query.outerjoin(AttemptRow, AttemptRow.id == JobRow.current_attempt)
    query = query.outerjoin(before, and_(before.job_id == JobRow.id, before.number == AttemptRow.number - 1))
    query = query.outerjoin(first, and_(first.job_id == JobRow.id, first.number == 1))
    waits = case((JobRow.state == JobState.RECOVERING, 1), else_=0)
    query = (
        query.where(JobRow.state.in_(_BEGUN_STATES))
        .order_by(waits, JobRow.created_at.desc(), JobRow.id)
        .limit(limit)
    )
    return list((await session.execute(query)).all())


async def _oldest_waits(session: AsyncSession, at: datetime) -> dict[str, float]:
    query = select(JobRow.queue, func.min(JobRow.queued_at)).where(JobRow.state.in_(WAITING_STATES))
    found = (await session.execute(query.group_by(JobRow.queue))).all()
    return {queue: max(0.0, (at - since).total_seconds()) for queue, since in found}


def _start_phases(
    waits: datetime, created: datetime | None, submitted: datetime | None, trains: datetime | None
) -> dict[str, float]:
    phases = {"queue": (waits, created), "submit": (created, submitted), "start": (submitted, trains)}
    return {
        phase: max(0.0, (end - begin).total_seconds())
        for phase, (begin, end) in phases.items()
        if begin is not None and end is not None
    }


async def _last_checkpoints(session: AsyncSession, jobs: list[str]) -> dict[str, datetime]:
    """Times of the last checkpoint that each of the jobs reported."""
    query = select(EventRow.job_id, func.max(EventRow.at)).where(
        EventRow.job_id.in_(jobs), EventRow.kind == "checkpoint", EventRow.message.startswith("after step ")
    )
    return {job: at for job, at in (await session.execute(query.group_by(EventRow.job_id))).all()}


async def _last_interruptions(session: AsyncSession, jobs: list[str]) -> dict[str, InterruptedAttempt]:
    query = select(AttemptRow.job_id, AttemptRow.finished_at, AttemptRow.reason).where(
        AttemptRow.job_id.in_(jobs), AttemptRow.finished_at.is_not(None)
    )
    rows = (await session.execute(query.order_by(AttemptRow.number))).all()
    return {job: InterruptedAttempt(at, reason or "") for job, at, reason in rows}


async def _queue_waits(database: Database, session: AsyncSession) -> dict[str, QueueWaits]:
    seconds = _seconds_between(database, JobRow.created_at, AttemptRow.created_at)
    place = case(*((seconds <= limit, number) for number, limit in enumerate(WAIT_BUCKETS_S)), else_=-1)
    query = (
        select(JobRow.queue, place, func.count(), func.sum(seconds))
        .join(AttemptRow, AttemptRow.job_id == JobRow.id)
        .where(AttemptRow.number == 1)
        .group_by(JobRow.queue, place)
    )
    numbers: dict[str, list[int]] = defaultdict(lambda: [0] * (len(WAIT_BUCKETS_S) + 1))
    sums: dict[str, float] = defaultdict(float)
    for queue, number, count, total in (await session.execute(query)).all():
        numbers[queue][number] += count
        sums[queue] += max(0.0, float(total))
    return {queue: QueueWaits(tuple(counts), sums[queue]) for queue, counts in numbers.items()}


def _seconds_between(database: Database, start: Any, end: Any) -> ColumnElement[float]:
    if database.is_sqlite:
        days = func.julianday(end, type_=Float) - func.julianday(start, type_=Float)
        return days * 86400.0
    return cast(func.extract("epoch", end) - func.extract("epoch", start), Float)


_ComparisonKey = tuple[int, int, datetime]
"""Attempt and number of the profiled step, and when the plan was made."""
_comparisons: WeakKeyDictionary[Database, dict[str, tuple[_ComparisonKey, PlanComparison]]] = (
    WeakKeyDictionary()
)


async def _plan_comparisons(
    database: Database, session: AsyncSession, jobs: list[str]
) -> dict[str, PlanComparison]:
    """Comparisons by job, for jobs with a plan and a profiled step of the attempt that made the plan."""
    before, now = _comparisons.get(database, {}), {}
    for job in jobs:
        latest = select(TimelineRow.attempt, TimelineRow.step).where(TimelineRow.job_id == job)
        latest = latest.order_by(TimelineRow.attempt.desc(), TimelineRow.step.desc()).limit(1)
        plan = select(JobPlanRow.attempt, JobPlanRow.created_at).where(JobPlanRow.job_id == job)
        step, planned = (await session.execute(latest)).first(), (await session.execute(plan)).first()
        if step is None or planned is None or step.attempt != planned.attempt:
            continue
        key = step.attempt, step.step, planned.created_at
        if job in before and before[job][0] == key:
            now[job] = before[job]
        elif (over := await _read_comparison(session, job, step.step)) is not None:
            now[job] = key, over
    _comparisons[database] = now
    return {job: over for job, (_, over) in now.items()}


async def _read_comparison(session: AsyncSession, job: str, step: int) -> PlanComparison | None:
    measured, plan = await find_timeline(session, job, step), await find_job_plan(session, job)
    if measured is None or plan is None:
        return None
    return await asyncio.to_thread(_compare_slots, plan.body, measured[1])


def _compare_slots(body: str, slots: list[SlotRecord]) -> PlanComparison:
    stored = json.loads(body)
    planned = [
        SlotRecord._make(slot.get(name) for name in SlotRecord._fields) for slot in stored["plan"]["slots"]
    ]
    return PlanComparison(
        measured=step_seconds(slots),
        planned=step_seconds(planned),
        link_bytes=planned_link_bytes(planned, stored["spec"].get("edges", ())),
    )


def step_seconds(slots: Iterable[SlotRecord]) -> StepSeconds:
    """The sums over planned or measured slots."""
    meshes: dict[str, float] = defaultdict(float)
    ends: dict[tuple[Link, str, int | None, int | None], list[SlotRecord]] = defaultdict(list)
    for slot in slots:
        if slot.action in COMPUTE_ACTIONS:
            meshes[slot.mesh] += slot.end_s - slot.start_s
        elif slot.action.startswith(("SEND_", "RECV_")):
            direction, _, peer = slot.lane.partition(":")
            link = (slot.mesh, peer) if direction == "send" else (peer, slot.mesh)
            ends[link, slot.action[-1], slot.edge, slot.microbatch].append(slot)
    links: dict[Link, float] = defaultdict(float)
    for (link, *_), both in ends.items():
        if len(both) > 1:
            start, end = max(slot.start_s for slot in both), min(slot.end_s for slot in both)
            links[link] += max(0.0, end - start)
    return StepSeconds(dict(meshes), dict(links))


def planned_link_bytes(slots: Iterable[SlotRecord], edges: Sequence[Mapping[str, Any]]) -> dict[Link, int]:
    """Bytes that each link carries in a step of planned slots; `edges` is the spec's list, as JSON.

    A link one of whose transfers was planned in seconds, without a size, is left out.
    """
    sizes: dict[Link, int | None] = {}
    for slot in slots:
        if not slot.action.startswith("RECV_"):
            continue
        link = (slot.lane.partition(":")[2], slot.mesh)
        edge = edges[slot.edge] if slot.edge is not None and slot.edge < len(edges) else {}
        size = edge.get("forward_bytes" if slot.action == "RECV_F" else "backward_bytes")
        before = sizes.get(link, 0)
        sizes[link] = None if size is None or before is None else before + size
    return {link: size for link, size in sizes.items() if size is not None}
