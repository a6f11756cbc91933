"""Routes for Ray clusters, their nodes and accelerators, queues and their quotas, and Prometheus targets.

A driver runs a user's code: Prometheus is sent only to endpoints on nodes of the driver's own cluster.
Operators set quotas while everything runs; they hold after a restart.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from service.api.auth import Caller
from service.api.dependencies import CurrentService, Service
from service.api.errors import ProblemError, responses
from service.api.middleware import UserRoute
from service.api.views import job_summary
from service.orchestrator.attempts.admit import admission_order
from service.orchestrator.decisions.decide import RAY_RESOURCES
from service.orchestrator.ray.clusters import NamedCluster
from service.schemas.clusters import AcceleratorsView, ClusterState, ClusterView, GangView, NodeView
from service.schemas.jobs import QueueList, QueueQuotaView, QueueView
from service.settings.settings import Settings
from service.spec.job import NAME_PATTERN
from service.store.attempts import active_attempts, attempts_with_metrics
from service.store.database import utc_now
from service.store.jobs import heterogeneous_mesh_sizes, waiting_jobs
from service.store.queues import LARGEST_QUOTA, effective_quotas, reset_quota, set_quota
from service.store.tables import Attempt

_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")

clusters_router = APIRouter(prefix="/api/v1", tags=["cluster"], route_class=UserRoute)


class TargetGroup(BaseModel):
    """An entry of Prometheus's HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


@clusters_router.get("/cluster", responses=responses(404, 422))
async def read_cluster(
    service: CurrentService,
    cluster: Annotated[
        str | None, Query(pattern=NAME_PATTERN, max_length=100, description="Only this one; all if absent")
    ] = None,
) -> ClusterView:
    """The clusters as last seen, and who uses them."""
    async with service.database.read() as session:
        active = await active_attempts(session)
        unlike = await heterogeneous_mesh_sizes(
            session, [job.id for _, job in active if not job.workers_per_mesh]
        )
    wanted = _selected_clusters(service, cluster, {attempt.cluster for attempt, _ in active})
    active = [(attempt, job) for attempt, job in active if attempt.cluster in {one.name for one in wanted}]
    states = [_cluster_state(one, service.settings) for one in wanted]
    away = [state for state in states if not state.available]
    seen = [state.seen_at for state in states]
    return ClusterView(
        available=not away,
        error="; ".join(f"{one.name}: {one.error}" if len(states) > 1 else str(one.error) for one in away)
        or None,
        seen_at=None if None in seen else min((at for at in seen if at is not None), default=None),
        nodes=[
            NodeView(id=node.id, address=node.address, resources=dict(node.resources), cluster=one.name)
            for one in wanted
            for node in one.watcher.snapshot.nodes
        ],
        accelerators=[
            row
            for one in wanted
            for row in _accelerator_views(
                one, [attempt for attempt, _ in active if attempt.cluster == one.name]
            )
        ],
        gangs=[
            GangView(
                job_id=job.id,
                attempt=attempt.number,
                device=attempt.device,
                cluster=attempt.cluster,
                **_gang_meshes(attempt.accelerators, job.workers_per_mesh, unlike.get(job.id)),
            )
            for attempt, job in active
        ],
        clusters=states,
    )


def _selected_clusters(service: Service, name: str | None, used: Collection[str]) -> list[NamedCluster]:
    """The cluster of this name, or all: those of the settings, and others that attempts still name."""
    names = [*service.clusters.names, *sorted({*used} - {*service.clusters.names})]
    if name is not None and name not in names:
        raise ProblemError(
            404, f"there is no cluster {name} (SLOTLINE_CLUSTERS): use one of {', '.join(names)}"
        )
    return [service.clusters.of(one) for one in names if name in (None, one)]


def _cluster_state(cluster: NamedCluster, settings: Settings) -> ClusterState:
    snapshot = cluster.watcher.snapshot
    return ClusterState(
        name=cluster.name,
        available=snapshot.available,
        error=snapshot.error,
        seen_at=None if snapshot.seen_at is None else datetime.fromtimestamp(snapshot.seen_at, UTC),
        queues=[name for name, queue in settings.queues.items() if queue.cluster == cluster.name],
    )


def _accelerator_views(cluster: NamedCluster, active: Sequence[Attempt]) -> list[AcceleratorsView]:
    """What it has, by device; nothing where it does not answer."""
    capacity = cluster.watcher.capacity
    if capacity is None:
        return []
    others = cluster.watcher.others([attempt.id for attempt in active])
    used = {device: sum(a.accelerators for a in active if a.device == device) for device in capacity.total}
    return [
        AcceleratorsView(
            device=device,
            resource=RAY_RESOURCES[device],
            total=total,
            used=used[device],
            free=max(total - used[device] - others[device], 0),
            cluster=cluster.name,
        )
        for device, total in capacity.total.items()
    ]


def _gang_meshes(accelerators: int, workers_per_mesh: int, unlike: list[int] | None) -> dict[str, Any]:
    """The meshes of a gang, and how many workers they have; `unlike` where they are not alike."""
    sizes = unlike or [workers_per_mesh] * (accelerators // max(workers_per_mesh, 1))
    return {"meshes": len(sizes), "workers_per_mesh": max(sizes, default=1), "workers": sizes}


@clusters_router.get("/queues")
async def list_queues(service: CurrentService) -> QueueList:
    """Queues, their quotas, and why each waiting job waits; in the order in which jobs will start."""
    async with service.database.read() as session:
        active = await active_attempts(session)
        waiting = await waiting_jobs(session)
        quotas = await effective_quotas(session, service.settings.quotas)
    waiting = await asyncio.to_thread(
        admission_order, waiting, active, service.clusters.capacities({}), service.settings
    )
    names = dict.fromkeys([*quotas, *(job.queue for job in waiting), *(job.queue for _, job in active)])
    items = []
    for name in names:
        jobs = [job_summary(job) for job in waiting if job.queue == name]
        used = sum(attempt.accelerators for attempt, job in active if job.queue == name)
        cluster = service.settings.cluster_of(name)
        items.append(
            QueueView(
                name=name, quota=quotas.get(name), used=used, depth=len(jobs), waiting=jobs, cluster=cluster
            )
        )
    return QueueList(items=items)


@clusters_router.get("/prometheus/targets")
async def prometheus_targets(service: CurrentService) -> list[TargetGroup]:
    """Drivers that serve metrics, for Prometheus's http_sd_configs: only on nodes of the cluster that they run on.

    A driver runs a user's code, and would else have Prometheus call whatever it names.
    """
    nodes = {
        one.name: {node.address.lower() for node in one.watcher.snapshot.nodes} for one in service.clusters
    }
    since = utc_now() - timedelta(seconds=service.settings.metrics_linger_s)
    async with service.database.read() as session:
        measured = await attempts_with_metrics(session, ended_after=since)
    return [
        TargetGroup(
            targets=[str(attempt.metrics_endpoint)],
            labels={
                "__meta_slotline_job": job.id,
                "__meta_slotline_name": job.name,
                "__meta_slotline_attempt": str(attempt.number),
                "__meta_slotline_cluster": attempt.cluster,
            },
        )
        for attempt, job in measured
        if serves_on(str(attempt.metrics_endpoint), nodes.get(attempt.cluster, ()))
    ]


def serves_on(endpoint: str, addresses: Collection[str]) -> bool:
    """Whether `host:port` is a port of one of the (lower case) addresses."""
    found = _HOST_AND_PORT.fullmatch(endpoint)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        return False
    return (found["v6"] or found["host"]).lower() in addresses


quotas_router = APIRouter(prefix="/api/v1/queues", tags=["cluster"], route_class=UserRoute)

QueueName = Annotated[str, Path(pattern=NAME_PATTERN, max_length=100, description="A configured queue")]


class QuotaChange(BaseModel):
    """How many accelerators the queue's running jobs may hold together."""

    model_config = ConfigDict(extra="forbid", strict=True)

    quota: Annotated[int, Field(ge=0, le=LARGEST_QUOTA)] | None = Field(description="null: no quota")


@quotas_router.put("/{name}/quota", responses=responses(404, 422))
async def change_quota(
    name: QueueName, body: QuotaChange, caller: Caller, service: CurrentService
) -> QueueQuotaView:
    """Set the quota in place of the configured one, also after a restart. What runs already goes on."""
    _check_queue_exists(service, name)
    async with service.database.write() as session:
        await set_quota(session, name, body.quota, at=utc_now(), by=caller.name)
    return await _changed_quota(service, name)


@quotas_router.delete("/{name}/quota", responses=responses(404, 422))
async def reset_queue_quota(name: QueueName, caller: Caller, service: CurrentService) -> QueueQuotaView:
    """Back to the configured quota."""
    _check_queue_exists(service, name)
    async with service.database.write() as session:
        await reset_quota(session, name, at=utc_now(), by=caller.name)
    return await _changed_quota(service, name)


def _check_queue_exists(service: Service, name: str) -> None:
    if name not in service.settings.queues:
        known = ", ".join(sorted(service.settings.queues))
        raise ProblemError(404, f"there is no queue {name} (SLOTLINE_QUEUES): use one of {known}")


async def _changed_quota(service: Service, name: str) -> QueueQuotaView:
    service.wake()  # a job may start now, or be told why not
    configured = service.settings.quotas
    async with service.database.read() as session:
        quotas = await effective_quotas(session, configured)
    return QueueQuotaView(name=name, quota=quotas[name], configured=configured[name])
