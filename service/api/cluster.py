"""Nodes and accelerators, queues and why jobs wait, and where Prometheus finds the drivers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from service.api.context import Current
from service.api.guarded import UserRoute
from service.api.schemas import AcceleratorsView, ClusterView, GangView, NodeView, QueueList, QueueView
from service.api.views import job_summary
from service.orchestrator.decide import RESOURCES
from service.orchestrator.snapshot import in_line
from service.store.attempts import active_attempts, measured_attempts
from service.store.database import utc_now
from service.store.jobs import unlike_meshes, waiting_jobs
from service.store.queue_quotas import quotas_in_force

_ENDPOINT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")

router = APIRouter(prefix="/api/v1", tags=["cluster"], route_class=UserRoute)


class TargetGroup(BaseModel):
    """An entry of Prometheus's HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


@router.get("/cluster")
async def read_cluster(service: Current) -> ClusterView:
    """The cluster as last seen, and who uses it."""
    snapshot, capacity = service.cluster.snapshot, service.cluster.capacity
    async with service.database.read() as session:
        active = await active_attempts(session)
        unlike = await unlike_meshes(session, [job.id for _, job in active if not job.workers_per_mesh])
    used = {
        device: sum(a.accelerators for a, _ in active if a.device == device) for device in ("cpu", "cuda")
    }
    others = service.cluster.others([attempt.id for attempt, _ in active])
    accelerators = (
        []
        if capacity is None
        else [
            AcceleratorsView(
                device=device,
                resource=RESOURCES[device],
                total=total,
                used=used[device],
                free=max(total - used[device] - others[device], 0),
            )
            for device, total in capacity.total.items()
        ]
    )
    return ClusterView(
        available=snapshot.available,
        error=snapshot.error,
        seen_at=None if snapshot.seen_at is None else datetime.fromtimestamp(snapshot.seen_at, UTC),
        nodes=[NodeView(id=n.id, address=n.address, resources=dict(n.resources)) for n in snapshot.nodes],
        accelerators=accelerators,
        gangs=[
            GangView(
                job_id=job.id,
                attempt=attempt.number,
                device=attempt.device,
                **_meshes(attempt.accelerators, job.workers_per_mesh, unlike.get(job.id)),
            )
            for attempt, job in active
        ],
    )


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
        quotas = await quotas_in_force(session, service.settings.queues)
    waiting = await asyncio.to_thread(in_line, waiting, active, service.cluster.capacity, service.settings)
    names = dict.fromkeys([*quotas, *(job.queue for job in waiting), *(job.queue for _, job in active)])
    items = []
    for name in names:
        jobs = [job_summary(job) for job in waiting if job.queue == name]
        used = sum(attempt.accelerators for attempt, job in active if job.queue == name)
        items.append(QueueView(name=name, quota=quotas.get(name), used=used, depth=len(jobs), waiting=jobs))
    return QueueList(items=items)


@router.get("/prometheus/targets")
async def prometheus_targets(service: Current) -> list[TargetGroup]:
    """Drivers that serve metrics, for Prometheus's http_sd_configs: only on nodes of the cluster.

    A driver runs a user's code, and would else have Prometheus call whatever it names.
    """
    nodes = {node.address.lower() for node in service.cluster.snapshot.nodes}
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
            },
        )
        for attempt, job in measured
        if serves_on(str(attempt.metrics_endpoint), nodes)
    ]


def serves_on(endpoint: str, addresses: Collection[str]) -> bool:
    """Whether `host:port` is a port of one of the (lower case) addresses."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        return False
    return (found["v6"] or found["host"]).lower() in addresses
