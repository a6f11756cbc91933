"""Clusters, their nodes and accelerators, queues and why jobs wait, and where Prometheus finds the drivers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel

from service.api.cluster_schemas import AcceleratorsView, ClusterState, ClusterView, GangView, NodeView
from service.api.context import Current, Service
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.schemas import QueueList, QueueView
from service.api.views import job_summary
from service.jobspec import NAME_PATTERN
from service.orchestrator.clusters import NamedCluster
from service.orchestrator.decide import RESOURCES
from service.orchestrator.snapshot import in_line
from service.settings import Settings
from service.store.attempts import active_attempts, measured_attempts
from service.store.database import utc_now
from service.store.jobs import unlike_meshes, waiting_jobs
from service.store.queue_quotas import quotas_in_force
from service.store.tables import Attempt

_ENDPOINT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")

router = APIRouter(prefix="/api/v1", tags=["cluster"], route_class=UserRoute)


class TargetGroup(BaseModel):
    """An entry of Prometheus's HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


@router.get("/cluster", responses=responses(404, 422))
async def read_cluster(
    service: Current,
    cluster: Annotated[
        str | None, Query(pattern=NAME_PATTERN, max_length=100, description="Only this one; all if absent")
    ] = None,
) -> ClusterView:
    """The clusters as last seen, and who uses them."""
    async with service.database.read() as session:
        active = await active_attempts(session)
        unlike = await unlike_meshes(session, [job.id for _, job in active if not job.workers_per_mesh])
    wanted = _wanted(service, cluster, {attempt.cluster for attempt, _ in active})
    active = [(attempt, job) for attempt, job in active if attempt.cluster in {one.name for one in wanted}]
    states = [_state(one, service.settings) for one in wanted]
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
            for row in _accelerators(one, [attempt for attempt, _ in active if attempt.cluster == one.name])
        ],
        gangs=[
            GangView(
                job_id=job.id,
                attempt=attempt.number,
                device=attempt.device,
                cluster=attempt.cluster,
                **_meshes(attempt.accelerators, job.workers_per_mesh, unlike.get(job.id)),
            )
            for attempt, job in active
        ],
        clusters=states,
    )


def _wanted(service: Service, name: str | None, used: Collection[str]) -> list[NamedCluster]:
    """The cluster of this name, or all: those of the settings, and others that attempts still name."""
    names = [*service.clusters.names, *sorted({*used} - {*service.clusters.names})]
    if name is not None and name not in names:
        raise ProblemError(
            404, f"there is no cluster {name} (SLOTLINE_CLUSTERS): use one of {', '.join(names)}"
        )
    return [service.clusters.of(one) for one in names if name in (None, one)]


def _state(cluster: NamedCluster, settings: Settings) -> ClusterState:
    snapshot = cluster.watcher.snapshot
    return ClusterState(
        name=cluster.name,
        available=snapshot.available,
        error=snapshot.error,
        seen_at=None if snapshot.seen_at is None else datetime.fromtimestamp(snapshot.seen_at, UTC),
        queues=[name for name, queue in settings.queues.items() if queue.cluster == cluster.name],
    )


def _accelerators(cluster: NamedCluster, active: Sequence[Attempt]) -> list[AcceleratorsView]:
    """What it has, by device; nothing where it does not answer."""
    capacity = cluster.watcher.capacity
    if capacity is None:
        return []
    others = cluster.watcher.others([attempt.id for attempt in active])
    used = {device: sum(a.accelerators for a in active if a.device == device) for device in capacity.total}
    return [
        AcceleratorsView(
            device=device,
            resource=RESOURCES[device],
            total=total,
            used=used[device],
            free=max(total - used[device] - others[device], 0),
            cluster=cluster.name,
        )
        for device, total in capacity.total.items()
    ]


def _meshes(accelerators: int, workers_per_mesh: int, unlike: list[int] | None) -> dict[str, Any]:
    """The meshes of a gang, and how many workers they have; `unlike` where they are not alike."""
    sizes = unlike or [workers_per_mesh] * (accelerators // max(workers_per_mesh, 1))
    return {"meshes": len(sizes), "workers_per_mesh": max(sizes, default=1), "workers": sizes}


@router.get("/queues")
async def list_queues(service: Current) -> QueueList:
    """Queues, their quotas, and why each waiting job waits; in the order in which jobs will start."""
    async with service.database.read() as session:
        active = await active_attempts(session)
        waiting = await waiting_jobs(session)
        quotas = await quotas_in_force(session, service.settings.quotas)
    waiting = await asyncio.to_thread(
        in_line, waiting, active, service.clusters.capacities({}), service.settings
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


@router.get("/prometheus/targets")
async def prometheus_targets(service: Current) -> list[TargetGroup]:
    """Drivers that serve metrics, for Prometheus's http_sd_configs: only on nodes of the cluster that they run on.

    A driver runs a user's code, and would else have Prometheus call whatever it names.
    """
    nodes = {
        one.name: {node.address.lower() for node in one.watcher.snapshot.nodes} for one in service.clusters
    }
    since = utc_now() - timedelta(seconds=service.settings.metrics_linger_s)
    async with service.database.read() as session:
        measured = await measured_attempts(session, ended_after=since)
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
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        return False
    return (found["v6"] or found["host"]).lower() in addresses
