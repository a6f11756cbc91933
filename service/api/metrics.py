"""Prometheus's text format for `/metrics`: jobs, queues, attempts, clusters, and this process.

A series with a job's id is a gauge that goes with the job; scrapers must keep that label (honor_labels). The metrics
that this process has of itself follow (observability/instruments.py).
"""

from __future__ import annotations

import functools
import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.jobs.clusters import list_nodes
from service.jobs.metrics import MAX_JOB_SERIES, WAIT_BUCKETS_S, JobMetrics, read_job_metrics
from service.jobs.service import Service
from service.observability import instruments
from service.orchestrator.planning.pool import PlannerLoad
from service.schemas.clusters import NodeView
from service.spec.principals import DEFAULT_PROJECT
from service.store.database import utc_now
from service.store.leases import read_lease_status
from service.store.queues import ControlPlaneCounts, count_jobs_and_attempts


async def scrape(service: Service, *, whole: bool) -> bytes:
    """The text of one scrape, made about every _EVERY_S for all who scrape; with single jobs of all projects, or only of the
    one that everybody is in."""
    make = functools.partial(_scrape, service, whole=whole)
    kind = "metrics of all projects" if whole else "metrics"
    return await service.shared_reads.read(kind, make, every_s=_EVERY_S)


_EVERY_S = 1.0


async def _scrape(service: Service, *, whole: bool) -> bytes:
    queues = tuple(service.settings.queues)
    counts = await count_jobs_and_attempts(service.database, queues)
    jobs = await read_job_metrics(service.database, queues, at=utc_now())
    if not whole:
        jobs = replace(jobs, jobs=tuple(job for job in jobs.jobs if job.project == DEFAULT_PROJECT))
    lease = await read_lease_status(service.database)
    process = ProcessState(
        service.settings.url,
        service.lag_s(),
        service.planner.load,
        leads=service.leads(),
        lease_left_s=-1.0 if lease is None else lease.left_s,
        clusters=await _cluster_gauges(service),
    )
    return exposition(counts, jobs, process)


@dataclass(frozen=True)
class ClusterGauge:
    """A Ray cluster as this process last saw it: whether it answers, its nodes, its accelerators by device."""

    name: str
    up: bool
    nodes: int
    accelerators: Mapping[str, int]
    node_views: Sequence[NodeView] = ()


async def _cluster_gauges(service: Service) -> list[ClusterGauge]:
    """A gauge for each cluster; one that is away has no nodes and accelerators, as they are not known."""
    gauges = []
    views = (await list_nodes(service, None)).items
    for cluster in service.clusters:
        capacity = cluster.watcher.capacity
        nodes = 0 if capacity is None else len(cluster.watcher.snapshot.nodes)
        accelerators = {} if capacity is None else capacity.total
        of_it = [] if capacity is None else [view for view in views if view.cluster == cluster.name]
        gauges.append(ClusterGauge(cluster.name, capacity is not None, nodes, accelerators, of_it))
    return gauges


@dataclass(frozen=True)
class ProcessState:
    """The state of this process. `lag_s` None: no orchestrator runs in it; `leads`: it has the lease, of which the
    database says `lease_left_s`, whichever process has it."""

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
        for cluster in self._clusters:
            up.add_metric([cluster.name], float(cluster.up))
            if cluster.up:
                nodes.add_metric([cluster.name], cluster.nodes)
            for device, number in cluster.accelerators.items():
                accelerators.add_metric([cluster.name, device], number)
        yield from (up, nodes, accelerators, *self._of_nodes())

    def _of_nodes(self) -> Iterator[Metric]:
        """Ray nodes of one name are counted together."""
        states = GaugeMetricFamily(
            "slotline_node_state",
            "1, with the state of a node: READY, DRAINING, EXCLUDED or QUARANTINED.",
            labels=["cluster", "node", "state"],
        )
        labels = ["cluster", "node", "device"]
        totals = GaugeMetricFamily("slotline_node_accelerators", "Accelerators of a node.", labels=labels)
        used = GaugeMetricFamily("slotline_node_accelerators_used", "Those that are held.", labels=labels)
        seen = dict[tuple[str, str, str], None]()
        counted = defaultdict[tuple[str, str, str], list[int]](lambda: [0, 0])
        for cluster in self._clusters:
            for node in cluster.node_views:
                seen[cluster.name, node.name, node.state] = None
                for kind in node.accelerators:
                    numbers = counted[cluster.name, node.name, kind.device]
                    numbers[0] += kind.total
                    numbers[1] += kind.used
        for key in seen:
            states.add_metric(key, 1)
        for key, (total, held) in counted.items():
            totals.add_metric(key, total)
            used.add_metric(key, held)
        yield from (states, totals, used)


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
        yield GaugeMetricFamily(
            "slotline_jobs_without_series",
            f"Jobs that have begun, beyond the {MAX_JOB_SERIES} that have series of their own.",
            self._jobs.left_out,
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
            "1 for each job that has begun and is not over.",
            labels=["job", "name", "owner", "queue", "state", "attempt", "project"],
        )
        attempts = _job_gauge("job_attempts", "Attempts that the job has made.")
        age = _job_gauge("checkpoint_age_seconds", "Since a training job's last checkpoint, or its start.")
        interval = _job_gauge(
            "checkpoint_interval_seconds", "Steps between checkpoints, at the last step's length."
        )
        start = _job_gauge(
            "job_start_seconds", "Phases of the attempt's start, as the control plane sees it.", "phase"
        )
        saved = _job_gauge(
            "checkpoint_timestamp_seconds", "When the job's last checkpoint was saved, in seconds since 1970."
        )
        ended = _job_gauge(
            "attempt_end_timestamp_seconds",
            "When the last attempt that ended did, of a job that is not over, in seconds since 1970.",
            "reason",
        )
        effective = _job_gauge(
            "job_effective_training_ratio",
            "Share of the time since the job's first attempt began that its steps took, without those that were lost.",
        )
        for job in self._jobs.jobs:
            if job.effective_training_ratio is not None:
                effective.add_metric([job.id], job.effective_training_ratio)
            if job.saved_at is not None:
                saved.add_metric([job.id], job.saved_at.timestamp())
            if job.interruption is not None:
                ended.add_metric([job.id, job.interruption.reason], job.interruption.at.timestamp())
            for phase, seconds in job.start_s.items():
                start.add_metric([job.id, phase], seconds)
            described = (job.id, job.name, job.owner, job.queue, job.state, str(job.attempt), job.project)
            info.add_metric(described, 1)
            attempts.add_metric([job.id], job.attempt)
            if job.checkpoint_age_s is not None:
                age.add_metric([job.id], job.checkpoint_age_s)
            if job.checkpoint_interval_s is not None:
                interval.add_metric([job.id], job.checkpoint_interval_s)
        yield from (info, attempts, age, interval, start, saved, ended, effective)

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
        calibrated = _job_gauge(
            "calibrated_makespan_seconds", "Makespan of the plan with the costs that profiled steps gave."
        )
        for job in self._jobs.jobs:
            if job.calibrated_makespan_s is not None:
                calibrated.add_metric([job.id], job.calibrated_makespan_s)
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
        yield from (meshes, measured, planned, ratio, size, rate, promised_rate, calibrated)


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
