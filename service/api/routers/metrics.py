"""Route `/metrics`: Prometheus metrics of jobs, queues, attempts and clusters, counted at each scrape.

Nothing accumulates here, so a restart loses nothing; a series with a job's id is a gauge that goes with the job.
Scrapers must keep that label (honor_labels). The metrics that this process has of itself follow
(observability/instruments.py). Only the comparison of measured with planned slots is cached, until another step is
profiled: reading thousands of slots takes tens of milliseconds.
A transfer lasts from when both ends are there until the first is done: the slot of an early end includes its wait.
"""

from __future__ import annotations

import asyncio
import json
import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import ColumnElement, Float, Integer, case, cast, func, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.api.dependencies import CurrentService
from service.observability import instruments
from service.orchestrator.planning.pool import PlannerLoad
from service.orchestrator.ray.clusters import Clusters
from service.spec.states import FINAL_STATES, WAITING_STATES, JobState
from service.store.database import Database, utc_now
from service.store.leases import read_lease_status
from service.store.measurements import SlotRecord, find_timeline
from service.store.plans import find_job_plan
from service.store.queues import ControlPlaneCounts, count_jobs_and_attempts
from service.store.tables import Attempt, Event, Job, JobPlan, Timeline

COMPUTE_ACTIONS = frozenset("FBIW")
Link = tuple[str, str]
"""The mesh that sends, the mesh that receives."""


@dataclass(frozen=True)
class StepSeconds:
    """Of one step: computing of each mesh, carrying of each directed link."""

    meshes: dict[str, float]
    links: dict[Link, float]


def step_seconds(slots: Iterable[SlotRecord]) -> StepSeconds:
    """What these slots, planned or measured, come to."""
    meshes: dict[str, float] = defaultdict(float)
    ends: dict[tuple[Link, str, int | None, int | None], list[SlotRecord]] = defaultdict(list)
    for slot in slots:
        if slot.action in COMPUTE_ACTIONS:
            meshes[slot.mesh] += slot.end_s - slot.start_s
        elif slot.action.startswith(("SEND_", "RECV_")):
            way, _, peer = slot.lane.partition(":")
            link = (slot.mesh, peer) if way == "send" else (peer, slot.mesh)
            ends[link, slot.action[-1], slot.edge, slot.microbatch].append(slot)
    links: dict[Link, float] = defaultdict(float)
    for (link, *_), both in ends.items():
        if len(both) > 1:
            start, end = max(slot.start_s for slot in both), min(slot.end_s for slot in both)
            links[link] += max(0.0, end - start)
    return StepSeconds(dict(meshes), dict(links))


def planned_link_bytes(slots: Iterable[SlotRecord], edges: Sequence[Mapping[str, Any]]) -> dict[Link, int]:
    """What each link carries in a step of these planned slots; `edges` are those of the spec, as JSON.

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


WAIT_BUCKETS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
_TRAINING_STATES = frozenset({JobState.RUNNING, JobState.RECOVERING})


@dataclass(frozen=True)
class PlanComparison:
    """The last profiled step of a job beside its plan."""

    measured: StepSeconds
    planned: StepSeconds
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
    over_plan: PlanComparison | None
    owner: str = ""
    start_s: dict[str, float] = field(default_factory=dict)
    """Phases of the current attempt's start: until Ray has its driver, and from then until it trains."""


@dataclass(frozen=True)
class QueueWaits:
    """Jobs of a queue by how long they waited for their first attempt: one number a bucket, the last beyond all."""

    numbers: tuple[int, ...] = (0,) * (len(WAIT_BUCKETS_S) + 1)
    sum_s: float = 0.0


@dataclass(frozen=True)
class JobMetrics:
    jobs: tuple[JobSeries, ...] = ()
    waits: dict[str, QueueWaits] = field(default_factory=dict)
    oldest_wait_s: dict[str, float] = field(default_factory=dict)


async def read_job_metrics(database: Database, queues: tuple[str, ...], *, at: datetime) -> JobMetrics:
    """All of it, from one read session; each of `queues` appears, also with no job in it."""
    async with database.read() as session:
        rows = await _unfinished_jobs(session)
        checkpoints = await _last_checkpoints(session, [row.id for row in rows])
        over = await _plan_comparisons(
            database, session, [row.id for row in rows if row.state in _TRAINING_STATES]
        )
        waits = dict.fromkeys(queues, QueueWaits()) | await _queue_waits(database, session)
    oldest = dict.fromkeys(queues, 0.0)
    series = []
    for row in rows:
        if row.state in WAITING_STATES:
            oldest[row.queue] = max(oldest.get(row.queue, 0.0), (at - row.queued_at).total_seconds())
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
                start_s=_start_phases(row.created, row.submitted, row.trains),
            )
        )
    return JobMetrics(tuple(series), waits, oldest)


async def _unfinished_jobs(session: AsyncSession) -> list[Any]:
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


def _start_phases(
    created: datetime | None, submitted: datetime | None, trains: datetime | None
) -> dict[str, float]:
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


async def _queue_waits(database: Database, session: AsyncSession) -> dict[str, QueueWaits]:
    seconds = _seconds_between(database, Job.created_at, Attempt.created_at)
    place = case(*((seconds <= limit, number) for number, limit in enumerate(WAIT_BUCKETS_S)), else_=-1)
    query = (
        select(Job.queue, place, func.count(), func.sum(seconds))
        .join(Attempt, Attempt.job_id == Job.id)
        .where(Attempt.number == 1)
        .group_by(Job.queue, place)
    )
    found: dict[str, QueueWaits] = {}
    numbers: dict[str, list[int]] = defaultdict(lambda: [0] * (len(WAIT_BUCKETS_S) + 1))
    sums: dict[str, float] = defaultdict(float)
    for queue, number, count, total in (await session.execute(query)).all():
        numbers[queue][number] += count
        sums[queue] += max(0.0, float(total))
    for queue, one in numbers.items():
        found[queue] = QueueWaits(tuple(one), sums[queue])
    return found


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
    """Of each job that has a plan and a profiled step of the attempt that made it."""
    before, now = _comparisons.get(database, {}), {}
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
    known = json.loads(body)
    planned = [
        SlotRecord._make(slot.get(name) for name in SlotRecord._fields) for slot in known["plan"]["slots"]
    ]
    return PlanComparison(
        measured=step_seconds(slots),
        planned=step_seconds(planned),
        link_bytes=planned_link_bytes(planned, known["spec"].get("edges", ())),
    )


router = APIRouter(include_in_schema=False)


@router.get("/metrics")
async def read_metrics(service: CurrentService) -> Response:
    """The metrics in Prometheus's text format."""
    queues = tuple(service.settings.queues)
    counts = await count_jobs_and_attempts(service.database, queues)
    jobs = await read_job_metrics(service.database, queues, at=utc_now())
    lease = await read_lease_status(service.database)
    process = ProcessState(
        service.settings.url,
        service.lag_s(),
        service.planner.load,
        leads=service.leads(),
        lease_left_s=-1.0 if lease is None else lease.left_s,
        clusters=cluster_gauges(service.clusters),
    )
    return Response(exposition(counts, jobs, process), media_type=CONTENT_TYPE_LATEST)


@dataclass(frozen=True)
class ClusterGauge:
    """A Ray cluster as this process last saw it: whether it answers, its nodes, its accelerators by device."""

    name: str
    up: bool
    nodes: int
    accelerators: Mapping[str, int]


def cluster_gauges(clusters: Clusters) -> list[ClusterGauge]:
    """Those of all clusters; what one that is away has is not known."""
    found = []
    for one in clusters:
        capacity = one.watcher.capacity
        nodes = 0 if capacity is None else len(one.watcher.snapshot.nodes)
        found.append(
            ClusterGauge(one.name, capacity is not None, nodes, {} if capacity is None else capacity.total)
        )
    return found


@dataclass(frozen=True)
class ProcessState:
    """What this process is at now. `lag_s` None: no orchestrator runs in it; `leads`: it has the lease, of which the
    database says `lease_left_s`, whoever has it."""

    url: str
    lag_s: float | None
    planning: PlannerLoad
    leads: bool = False
    lease_left_s: float = -1.0
    clusters: Sequence[ClusterGauge] = ()


def exposition(
    counts: ControlPlaneCounts, jobs: JobMetrics = JobMetrics(), process: ProcessState | None = None
) -> bytes:
    """The text of one scrape; its registry is made and forgotten here."""
    registry = CollectorRegistry()
    registry.register(_JobCollector(counts, jobs))
    if process is not None:
        registry.register(_ProcessStateCollector(process))
        registry.register(_ClusterCollector(process.clusters))
    ProcessCollector(registry=registry)
    return generate_latest(registry) + generate_latest(instruments.REGISTRY)


class _ProcessStateCollector(Collector):
    def __init__(self, state: ProcessState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "slotline_control_plane_info", "1, with the address of the pages and the API.", labels=["url"]
        )
        info.add_metric([self._state.url], 1)
        yield info
        if self._state.lag_s is not None:
            yield GaugeMetricFamily(
                "slotline_orchestrator_lag_seconds",
                "Since the orchestrator of this process last came round.",
                self._state.lag_s,
            )
        yield GaugeMetricFamily(
            "slotline_orchestrator_leads",
            "1 in the process that starts jobs, 0 in the others.",
            float(self._state.leads),
        )
        yield GaugeMetricFamily(
            "slotline_lease_left_seconds",
            "Of the lease to start jobs, by the database's clock; negative: nobody has one.",
            self._state.lease_left_s,
        )
        plans = GaugeMetricFamily(
            "slotline_planning_plans", "Plans that are made (running) and that wait, now.", labels=["state"]
        )
        plans.add_metric(["running"], self._state.planning.running)
        plans.add_metric(["waiting"], self._state.planning.waiting)
        yield plans
        yield GaugeMetricFamily(
            "slotline_planning_processes", "Plans that can be made at once.", self._state.planning.processes
        )


class _ClusterCollector(Collector):
    def __init__(self, clusters: Sequence[ClusterGauge]) -> None:
        self._clusters = clusters

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "slotline_cluster_up", "1 where the Ray cluster answers, else 0.", labels=["cluster"]
        )
        nodes = GaugeMetricFamily("slotline_cluster_nodes", "Its living nodes.", labels=["cluster"])
        accelerators = GaugeMetricFamily(
            "slotline_cluster_accelerators", "Those of its living nodes.", labels=["cluster", "device"]
        )
        for one in self._clusters:
            up.add_metric([one.name], float(one.up))
            if one.up:
                nodes.add_metric([one.name], one.nodes)
            for device, number in one.accelerators.items():
                accelerators.add_metric([one.name, device], number)
        yield from (up, nodes, accelerators)


class _JobCollector(Collector):
    def __init__(self, counts: ControlPlaneCounts, jobs: JobMetrics) -> None:
        self._counts, self._jobs = counts, jobs

    def collect(self) -> Iterator[Metric]:
        yield _labelled_family(
            GaugeMetricFamily, "jobs", "Jobs by state.", "state", self._counts.jobs_by_state
        )
        yield _labelled_family(
            GaugeMetricFamily, "queue_depth", "Jobs that wait.", "queue", self._counts.queue_depth
        )
        yield _labelled_family(
            CounterMetricFamily,
            "attempts",
            "Ended attempts by cause.",
            "cause",
            self._counts.attempts_by_cause,
        )
        build = GaugeMetricFamily(
            "slotline_build_info", "1, with the control plane's version.", labels=["version", "python"]
        )
        build.add_metric([_slotline_version(), platform.python_version()], 1)
        yield build
        yield self._queue_wait()
        yield _labelled_family(
            GaugeMetricFamily,
            "queue_oldest_wait_seconds",
            "How long the first of the jobs that wait has waited, since it was queued last.",
            "queue",
            self._jobs.oldest_wait_s,
        )
        yield from self._of_jobs()
        yield from self._over_plan()

    def _queue_wait(self) -> Metric:
        family = HistogramMetricFamily(
            "slotline_queue_wait_seconds", "From a job's submission to its first attempt.", labels=["queue"]
        )
        limits = [*(f"{limit:g}" for limit in WAIT_BUCKETS_S), "+Inf"]
        for queue, waits in sorted(self._jobs.waits.items()):
            family.add_metric([queue], list(zip(limits, accumulate(waits.numbers), strict=True)), waits.sum_s)
        return family

    def _of_jobs(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "slotline_job_info",
            "1 for each job that is not over.",
            labels=["job", "name", "owner", "queue", "state", "attempt"],
        )
        attempts = _job_gauge("job_attempts", "Attempts that the job has made.")
        age = _job_gauge("checkpoint_age_seconds", "Since a training job's last checkpoint, or its start.")
        interval = _job_gauge(
            "checkpoint_interval_seconds", "Steps between checkpoints, at the last step's length."
        )
        start = _job_gauge(
            "job_start_seconds", "Phases of the attempt's start, as the control plane sees it.", "phase"
        )
        for job in self._jobs.jobs:
            for phase, seconds in job.start_s.items():
                start.add_metric([job.id, phase], seconds)
            info.add_metric([job.id, job.name, job.owner, job.queue, job.state, str(job.attempt)], 1)
            attempts.add_metric([job.id], job.attempt)
            if job.checkpoint_age_s is not None:
                age.add_metric([job.id], job.checkpoint_age_s)
            if job.checkpoint_interval_s is not None:
                interval.add_metric([job.id], job.checkpoint_interval_s)
        yield from (info, attempts, age, interval, start)

    def _over_plan(self) -> Iterator[Metric]:
        meshes = _job_gauge(
            "mesh_compute_seconds_over_plan", "Computing of a mesh, measured over planned.", "mesh"
        )
        link = "source", "target"
        measured = _job_gauge("link_seconds", "Transfers of a link in the last profiled step.", *link)
        planned = _job_gauge("plan_link_seconds", "Transfers of a link in a step, by the plan.", *link)
        size = _job_gauge("link_bytes", "Bytes that a link carries in a step, by the plan's sizes.", *link)
        rate = _job_gauge(
            "link_bandwidth_bytes_per_second", "Bytes of a link over its seconds, as measured.", *link
        )
        promised_rate = _job_gauge(
            "plan_link_bandwidth_bytes_per_second", "Bytes of a link over its seconds, by the plan.", *link
        )
        ratio = _job_gauge("link_seconds_over_plan", "Transfers of a link, measured over planned.", *link)
        for job in self._jobs.jobs:
            if (over := job.over_plan) is None:
                continue
            for mesh, seconds in sorted(over.planned.meshes.items()):
                if seconds > 0 and mesh in over.measured.meshes:
                    meshes.add_metric([job.id, mesh], over.measured.meshes[mesh] / seconds)
            for ends, seconds in sorted(over.measured.links.items()):
                measured.add_metric([job.id, *ends], seconds)
                if promised := over.planned.links.get(ends):
                    ratio.add_metric([job.id, *ends], seconds / promised)
            for ends, seconds in sorted(over.planned.links.items()):
                planned.add_metric([job.id, *ends], seconds)
            for ends, carried in sorted(over.link_bytes.items()):
                size.add_metric([job.id, *ends], carried)
                for family, links in ((rate, over.measured.links), (promised_rate, over.planned.links)):
                    if seconds := links.get(ends):
                        family.add_metric([job.id, *ends], carried / seconds)
        yield from (meshes, measured, planned, ratio, size, rate, promised_rate)


def _labelled_family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: dict[str, int] | dict[str, float],
) -> Metric:
    family = kind(f"slotline_{name}", text, labels=[label])
    for value, number in sorted(values.items()):
        family.add_metric([value], number)
    return family


def _job_gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"slotline_{name}", text, labels=["job", *labels])


@cache
def _slotline_version() -> str:
    try:
        return version("slotline")
    except PackageNotFoundError:  # run from its sources
        return "unknown"
