"""State of the Ray clusters, their nodes and queues as this control plane last saw them, and Prometheus targets.

Operators set states of nodes by name; a name stands for every Ray node of that host, also after a restart of either.
A driver runs a user's code: Prometheus is sent only to endpoints on nodes of the driver's own cluster.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
    NodeAccelerators,
    NodeChange,
    NodeJob,
    NodeList,
    NodeView,
    TargetGroup,
)
from service.schemas.queues import QueueList, QueueQuotaView, QueueView, WaitReason
from service.settings.settings import Settings
from service.spec.principals import Principal, Role
from service.spec.states import NodeMark, mark_in_force
from service.spec.values import storable_text
from service.store.attempts import active_attempts, attempts_with_metrics, placements_of
from service.store.database import utc_now
from service.store.jobs import WaitingGroup, specified_mesh_sizes, waiting_front
from service.store.node_states import node_marks, set_node_mark
from service.store.queues import effective_quotas, reset_quota, set_quota
from service.store.tables import AttemptRow, JobRow, PlacedMeshRow
from worker.contract.job import METRICS_LINGER_S

_NODES_NAMED = 20
_LISTED_WAITING = 100
_QUEUES_EVERY_S = 1.0  # about a round of the orchestrator
_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")


async def read_clusters(
    service: Service, name: str | None, projects: Collection[str] | None = None
) -> ClusterView:
    """Nodes, accelerators and gangs of the cluster of this name, or of all; 404 for an unknown name. The jobs are those of
    these `projects`, or all; the numbers are of all."""
    async with service.database.read() as session:
        active = await active_attempts(session)
        specified = await specified_mesh_sizes(
            session, [job.id for _, job in active if not job.workers_per_mesh]
        )
        placements = await placements_of(session, [attempt.id for attempt, _ in active])
        marks = await node_marks(session)
    clusters = _selected_clusters(service, name, {attempt.cluster for attempt, _ in active})
    names = {cluster.name for cluster in clusters}
    active = [(attempt, job) for attempt, job in active if attempt.cluster in names]
    left_out = service.clusters.left_out(marks)
    shown = [(attempt, job) for attempt, job in active if projects is None or job.project in projects]
    shown_ids = {job.id for _, job in shown}
    states = [_cluster_state(cluster, service.settings) for cluster in clusters]
    away = [state for state in states if not state.available]
    seen = [state.seen_at for state in states]
    errors = [f"{state.name}: {state.error}" if len(states) > 1 else str(state.error) for state in away]
    return ClusterView(
        available=not away,
        error="; ".join(errors) or None,
        seen_at=None if None in seen else min((at for at in seen if at is not None), default=None),
        nodes=[
            view.model_copy(update={"jobs": [job for job in view.jobs if job.job_id in shown_ids]})
            for cluster in clusters
            for view in _node_views(cluster, active, placements, marks)
        ],
        accelerators=[
            view
            for cluster in clusters
            for view in _accelerator_views(
                cluster,
                [attempt for attempt, _ in active if attempt.cluster == cluster.name],
                placements,
                left_out.get(cluster.name, {}),
            )
        ],
        gangs=[
            GangView(
                job_id=job.id,
                attempt=attempt.number,
                device=attempt.device,
                cluster=attempt.cluster,
                **_gang_meshes(attempt.accelerators, job.workers_per_mesh, specified.get(job.id)),
            )
            for attempt, job in shown
        ],
        clusters=states,
    )


async def list_nodes(
    service: Service, cluster: str | None, projects: Collection[str] | None = None
) -> NodeList:
    """Nodes of the cluster of this name, or of all, with their states, accelerators and jobs (of these `projects`, or of
    all); 404 for an unknown name."""
    return NodeList(items=(await read_clusters(service, cluster, projects)).nodes)


async def change_node(
    service: Service, name: str, change: NodeChange, caller: Principal, *, cluster: str | None
) -> NodeList:
    """Set the state of the node that is called `name`, by its own name before others that it goes by, and answer it; 404
    where none is, 409 where several are."""
    nodes = (await read_clusters(service, cluster)).nodes
    meant = {(node.cluster, node.name) for node in nodes if name == node.name} or {
        (node.cluster, node.name)
        for node in nodes
        if name in (node.host, node.kubernetes_node, node.address, node.id)
    }
    if not meant:
        known = ", ".join(sorted({node.name for node in nodes})[:_NODES_NAMED])
        raise ProblemError(404, f"there is no node {name}: use one of {known} (`slotline nodes` lists them)")
    if len(meant) > 1:
        found = ", ".join(f"{known} of cluster {of}" for of, known in sorted(meant))
        raise ProblemError(
            409, f"{name} stands for several nodes: {found}: say the name and the cluster of one"
        )
    ((of, known),) = meant
    mark = NodeMark(of, known, change.state, caller.name, utc_now(), storable_text(change.reason) or "")
    async with service.database.write() as session:
        await set_node_mark(session, mark)
    service.wake()
    listed = (await read_clusters(service, of)).nodes
    return NodeList(items=[node for node in listed if node.name == known])


def _node_views(
    cluster: NamedCluster,
    active: Sequence[tuple[AttemptRow, JobRow]],
    placements: Sequence[PlacedMeshRow],
    marks: Sequence[NodeMark],
) -> list[NodeView]:
    """The cluster's living nodes, then those that are gone and kept from work."""
    watcher, now = cluster.watcher, utc_now()
    own = [mark for mark in marks if mark.cluster == cluster.name]
    attempts = {attempt.id: attempt for attempt, _ in active}
    placed = defaultdict(list)
    for mesh in placements:
        if mesh.cluster == cluster.name:
            placed[mesh.node_id].append(mesh)
    used_by_node = watcher.used_by_node()
    views = []
    for node in watcher.snapshot.nodes:
        held = dict.fromkeys(RAY_RESOURCES, 0)
        jobs: dict[str, NodeJob] = {}
        for mesh in placed[node.id]:
            attempt = attempts[mesh.attempt_id]
            held[attempt.device] += mesh.workers
            job = jobs.setdefault(
                attempt.id, NodeJob(job_id=attempt.job_id, attempt=attempt.number, meshes={})
            )
            job.meshes[mesh.mesh] = mesh.workers
        used = {device: max(number, used_by_node[node.id][device]) for device, number in held.items()}
        views.append(
            NodeView(
                id=node.id,
                address=node.address,
                resources=dict(node.resources),
                cluster=cluster.name,
                name=node.name,
                host=node.host,
                kubernetes_node=node.kubernetes_node,
                labels=dict(node.labels),
                **_mark_fields(mark_in_force(own, node.name, node.id, now=now)),
                accelerators=[
                    NodeAccelerators(
                        device=kind.device,
                        accelerator_type=kind.accelerator_type,
                        total=total,
                        used=used[kind.device],
                        free=max(total - used[kind.device], 0),
                    )
                    for kind, total in watcher.kinds(node).items()
                    if total
                ],
                jobs=list(jobs.values()),
            )
        )
    living = {node.name for node in watcher.snapshot.nodes}
    for name in dict.fromkeys(mark.name for mark in own):
        if name not in living and (mark := mark_in_force(own, name, "", now=now)) is not None:
            views.append(
                NodeView(
                    id="", address="", resources={}, cluster=cluster.name, name=name, **_mark_fields(mark)
                )
            )
    return views


def _mark_fields(mark: NodeMark | None) -> dict[str, Any]:
    if mark is None:
        return {}
    return {
        "state": mark.state,
        "reason": mark.reason,
        "by": mark.by,
        "since": mark.since,
        "until": mark.until,
    }


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


def _accelerator_views(
    cluster: NamedCluster,
    active: Sequence[AttemptRow],
    placements: Sequence[PlacedMeshRow],
    left_out: Mapping[str, NodeMark],
) -> list[AcceleratorsView]:
    """The cluster's accelerators, by device; none where it does not answer. Nodes that take no work have none free."""
    capacity = cluster.watcher.capacity_without(left_out, [attempt.driver_id for attempt in active])
    if capacity is None:
        return []
    used = {device: sum(a.accelerators for a in active if a.device == device) for device in capacity.total}
    not_free = dict(used)
    device_of = {attempt.id: attempt.device for attempt in active}
    for mesh in placements:
        if mesh.node_id in left_out and mesh.attempt_id in device_of:
            not_free[device_of[mesh.attempt_id]] -= mesh.workers
    return [
        AcceleratorsView(
            device=device,
            resource=RAY_RESOURCES[device],
            total=total + capacity.left_out[device],
            used=used[device],
            free=max(total - not_free[device] - capacity.others[device], 0),
            left_out=capacity.left_out[device],
            cluster=cluster.name,
        )
        for device, total in capacity.total.items()
    ]


def _gang_meshes(accelerators: int, workers_per_mesh: int, specified: list[int] | None) -> dict[str, Any]:
    """A gang's meshes and their workers; `specified` holds their sizes where accelerators do not say them."""
    sizes = specified or [workers_per_mesh] * (accelerators // max(workers_per_mesh, 1))
    return {"meshes": len(sizes), "workers_per_mesh": max(sizes, default=1), "workers": sizes}


async def list_queues(service: Service, projects: Collection[str] | None = None) -> QueueList:
    """Queues with quota, use, reasons of waiting, and the jobs of these `projects` (None: of all) that have the first turns.
    Read about once a round of the orchestrator for all who ask, whatever the number of jobs that wait."""
    read = functools.partial(_read_queues, service)
    queues = await service.shared_reads.read("queues", read, every_s=_QUEUES_EVERY_S)
    return QueueList(items=[_queue_view(name, queues, service.settings, projects) for name in queues.quotas])


@dataclass(frozen=True)
class _WaitQueues:
    """All queues by name with their quotas, the waiting jobs that have the first turns of each project, all waiting jobs by
    queue, project and reason, and the accelerators that running ones hold."""

    quotas: Mapping[str, int | None]
    front: Sequence[JobRow]
    groups: Sequence[WaitingGroup]
    used: Mapping[str, int]


async def _read_queues(service: Service) -> _WaitQueues:
    async with service.database.read() as session:
        active = await active_attempts(session)
        front, groups = await waiting_front(session, _LISTED_WAITING)
        marks = await node_marks(session)
        quotas = await effective_quotas(session, service.settings.quotas)
    front = await asyncio.to_thread(
        admission_order, front, active, service.clusters.capacities({}, marks), service.settings
    )
    used = Counter[str]()
    for attempt, job in active:
        used[job.queue] += attempt.accelerators
    names = dict.fromkeys([*quotas, *(group.queue for group in groups), *used])
    return _WaitQueues({name: quotas.get(name) for name in names}, front, groups, used)


def _queue_view(
    name: str, queues: _WaitQueues, settings: Settings, projects: Collection[str] | None
) -> QueueView:
    groups = [group for group in queues.groups if group.queue == name]
    reasons = dict[str | None, WaitReason]()
    for group in sorted(groups, key=lambda group: (group.first.queued_at, group.first.id)):
        if projects is not None and group.project not in projects:
            continue
        if (known := reasons.get(group.reason)) is not None:
            known.jobs += group.jobs
        else:
            first = job_summary(group.first)
            reasons[group.reason] = WaitReason(reason=group.reason, jobs=group.jobs, first=first)
    waiting = (job for job in queues.front if job.queue == name)
    shown = (job for job in waiting if projects is None or job.project in projects)
    return QueueView(
        name=name,
        quota=queues.quotas[name],
        used=queues.used.get(name, 0),
        depth=sum(group.jobs for group in groups),
        reasons=sorted(reasons.values(), key=lambda reason: -reason.jobs),
        waiting=[job_summary(job) for job in itertools.islice(shown, _LISTED_WAITING)],
        cluster=settings.cluster_of(name),
    )


async def prometheus_targets(service: Service, caller: Principal) -> list[TargetGroup]:
    """Endpoints of drivers that serve metrics on a node of their own cluster, also a while after their end: of the jobs that
    the caller sees, and of all for a scraper."""
    nodes = {
        cluster.name: {node.address.lower() for node in cluster.watcher.snapshot.nodes}
        for cluster in service.clusters
    }
    since = utc_now() - timedelta(seconds=METRICS_LINGER_S)
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
        if (caller.role is Role.METRICS or caller.sees(job.project))
        and serves_on(str(attempt.metrics_endpoint), nodes.get(attempt.cluster, ()))
    ]


def serves_on(endpoint: str, addresses: Collection[str]) -> bool:
    """True where `host:port` is a port of one of the (lower case) addresses."""
    match = _HOST_AND_PORT.fullmatch(endpoint)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        return False
    return (match["v6"] or match["host"]).lower() in addresses


async def change_quota(service: Service, name: str, quota: int | None, caller: Principal) -> QueueQuotaView:
    """Set a queue's quota in place of the configured one; None is no quota. 404 for a queue that is not configured."""
    check_queue_exists(service, name)
    async with service.database.write() as session:
        await set_quota(session, name, quota, at=utc_now(), by=caller.name)
    return await _changed_quota(service, name)


async def reset_to_configured_quota(service: Service, name: str, caller: Principal) -> QueueQuotaView:
    """Put the configured quota in force again. 404 for a queue that is not configured."""
    check_queue_exists(service, name)
    async with service.database.write() as session:
        await reset_quota(session, name, at=utc_now(), by=caller.name)
    return await _changed_quota(service, name)


def check_queue_exists(service: Service, name: str) -> None:
    """404 for a queue that is not configured."""
    if name not in service.settings.queues:
        known = ", ".join(sorted(service.settings.queues))
        raise ProblemError(404, f"there is no queue {name} (SLOTLINE_QUEUES): use one of {known}")


async def _changed_quota(service: Service, name: str) -> QueueQuotaView:
    service.wake()  # a job may start now, or be told why not
    configured = service.settings.quotas
    async with service.database.read() as session:
        quotas = await effective_quotas(session, configured)
    return QueueQuotaView(name=name, quota=quotas[name], configured=configured[name])
