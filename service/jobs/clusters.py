"""State of the Ray clusters and queues as this control plane last saw them, and Prometheus targets.

A driver runs a user's code: Prometheus is sent only to endpoints on nodes of the driver's own cluster.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from service.jobs.problems import ProblemError
from service.jobs.service import Service
from service.jobs.views import job_summary
from service.orchestrator.attempts.admit import admission_order
from service.orchestrator.decisions.attempt_lifecycle import RAY_RESOURCES
from service.orchestrator.ray.clusters import NamedCluster
from service.schemas.clusters import (
    AcceleratorsView,
    ClusterState,
    ClusterView,
    GangView,
    NodeView,
    TargetGroup,
)
from service.schemas.jobs import QueueList, QueueQuotaView, QueueView
from service.settings.settings import Settings
from service.spec.principals import Principal
from service.store.attempts import active_attempts, attempts_with_metrics
from service.store.database import utc_now
from service.store.jobs import heterogeneous_mesh_sizes, waiting_jobs
from service.store.queues import effective_quotas, reset_quota, set_quota
from service.store.tables import Attempt

_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")


async def read_clusters(service: Service, name: str | None) -> ClusterView:
    """Nodes, accelerators and gangs of the cluster of this name, or of all; 404 for an unknown name."""
    async with service.database.read() as session:
        active = await active_attempts(session)
        heterogeneous = await heterogeneous_mesh_sizes(
            session, [job.id for _, job in active if not job.workers_per_mesh]
        )
    clusters = _selected_clusters(service, name, {attempt.cluster for attempt, _ in active})
    names = {cluster.name for cluster in clusters}
    active = [(attempt, job) for attempt, job in active if attempt.cluster in names]
    states = [_cluster_state(cluster, service.settings) for cluster in clusters]
    away = [state for state in states if not state.available]
    seen = [state.seen_at for state in states]
    errors = [f"{state.name}: {state.error}" if len(states) > 1 else str(state.error) for state in away]
    return ClusterView(
        available=not away,
        error="; ".join(errors) or None,
        seen_at=None if None in seen else min((at for at in seen if at is not None), default=None),
        nodes=[
            NodeView(id=node.id, address=node.address, resources=dict(node.resources), cluster=cluster.name)
            for cluster in clusters
            for node in cluster.watcher.snapshot.nodes
        ],
        accelerators=[
            view
            for cluster in clusters
            for view in _accelerator_views(
                cluster, [attempt for attempt, _ in active if attempt.cluster == cluster.name]
            )
        ],
        gangs=[
            GangView(
                job_id=job.id,
                attempt=attempt.number,
                device=attempt.device,
                cluster=attempt.cluster,
                **_gang_meshes(attempt.accelerators, job.workers_per_mesh, heterogeneous.get(job.id)),
            )
            for attempt, job in active
        ],
        clusters=states,
    )


def _selected_clusters(service: Service, name: str | None, used: Collection[str]) -> list[NamedCluster]:
    """The cluster of this name, or all: configured ones, and others that attempts still name."""
    names = [*service.clusters.names, *sorted({*used} - {*service.clusters.names})]
    if name is not None and name not in names:
        raise ProblemError(
            404, f"there is no cluster {name} (SLOTLINE_CLUSTERS): use one of {', '.join(names)}"
        )
    return [service.clusters.of(known) for known in names if name in (None, known)]


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
    """The cluster's accelerators, by device; none where it does not answer."""
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


def _gang_meshes(accelerators: int, workers_per_mesh: int, heterogeneous: list[int] | None) -> dict[str, Any]:
    """A gang's meshes and their workers; `heterogeneous` holds the sizes of meshes that differ."""
    sizes = heterogeneous or [workers_per_mesh] * (accelerators // max(workers_per_mesh, 1))
    return {"meshes": len(sizes), "workers_per_mesh": max(sizes, default=1), "workers": sizes}


async def list_queues(service: Service) -> QueueList:
    """Queues with quota, use and waiting jobs, in the order in which jobs will start."""
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


async def prometheus_targets(service: Service) -> list[TargetGroup]:
    """Endpoints of drivers that serve metrics on a node of their own cluster, also a while after their end."""
    nodes = {
        cluster.name: {node.address.lower() for node in cluster.watcher.snapshot.nodes}
        for cluster in service.clusters
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
    """True where `host:port` is a port of one of the (lower case) addresses."""
    match = _HOST_AND_PORT.fullmatch(endpoint)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        return False
    return (match["v6"] or match["host"]).lower() in addresses


async def change_quota(service: Service, name: str, quota: int | None, caller: Principal) -> QueueQuotaView:
    """Set a queue's quota in place of the configured one; None is no quota. 404 for a queue that is not configured."""
    _check_queue_exists(service, name)
    async with service.database.write() as session:
        await set_quota(session, name, quota, at=utc_now(), by=caller.name)
    return await _changed_quota(service, name)


async def reset_to_configured_quota(service: Service, name: str, caller: Principal) -> QueueQuotaView:
    """Put the configured quota in force again. 404 for a queue that is not configured."""
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
