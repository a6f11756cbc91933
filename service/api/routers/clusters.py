"""Routes for Ray clusters, their nodes and accelerators, queues and their quotas, and Prometheus targets.

Operators set quotas and states of nodes while everything runs; they hold after a restart.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from service.api.auth import Caller
from service.api.dependencies import CurrentService
from service.api.errors import responses
from service.api.middleware import UserRoute
from service.jobs import admin, clusters
from service.schemas.admin import ProjectView
from service.schemas.clusters import ClusterView, NodeChange, NodeList, TargetGroup
from service.schemas.queues import QueueList, QueueQuotaView, QuotaChange
from service.spec.names import NAME_PATTERN
from service.spec.principals import ProjectQueue

clusters_router = APIRouter(prefix="/api/v1", tags=["cluster"], route_class=UserRoute)
ClusterName = Annotated[
    str | None, Query(pattern=NAME_PATTERN, max_length=100, description="Only this one; all if absent")
]


@clusters_router.get("/cluster", responses=responses(404, 422))
async def read_cluster(caller: Caller, service: CurrentService, cluster: ClusterName = None) -> ClusterView:
    """The clusters as last seen, and which of the caller's jobs use them."""
    return await clusters.read_clusters(service, cluster, caller.visible_projects)


@clusters_router.get("/nodes", responses=responses(404, 422))
async def list_nodes(caller: Caller, service: CurrentService, cluster: ClusterName = None) -> NodeList:
    """Nodes with their names, labels, states, accelerators and the caller's jobs, as last seen."""
    return await clusters.list_nodes(service, cluster, caller.visible_projects)


@clusters_router.put("/nodes/{name}", responses=responses(404, 409, 422))
async def change_node(
    name: Annotated[
        str, Path(max_length=253, description="Its name, Kubernetes node, host name, address or Ray's id")
    ],
    body: NodeChange,
    caller: Caller,
    service: CurrentService,
    cluster: ClusterName = None,
) -> NodeList:
    """Drain or exclude a node, or put it back, also after a restart; the answer is its Ray nodes."""
    return await clusters.change_node(service, name, body, caller, cluster=cluster)


@clusters_router.get("/queues")
async def list_queues(caller: Caller, service: CurrentService) -> QueueList:
    """Queues, their quotas, and why each waiting job waits; in the order in which jobs will start."""
    return await clusters.list_queues(service, caller.visible_projects)


@clusters_router.get("/prometheus/targets")
async def prometheus_targets(caller: Caller, service: CurrentService) -> list[TargetGroup]:
    """Drivers that serve metrics, for Prometheus's http_sd_configs: only on nodes of the cluster that they run on.

    A driver runs a user's code, and would else have Prometheus call whatever it names.
    """
    return await clusters.prometheus_targets(service, caller)


quotas_router = APIRouter(prefix="/api/v1", tags=["cluster"], route_class=UserRoute)
QueueName = Annotated[str, Path(pattern=NAME_PATTERN, max_length=100, description="A configured queue")]


@quotas_router.put("/queues/{name}/quota", responses=responses(404, 422))
async def change_quota(
    name: QueueName, body: QuotaChange, caller: Caller, service: CurrentService
) -> QueueQuotaView:
    """Set the quota in place of the configured one, also after a restart. What runs already goes on."""
    return await clusters.change_quota(service, name, body.quota, caller)


@quotas_router.delete("/queues/{name}/quota", responses=responses(404, 422))
async def reset_queue_quota(name: QueueName, caller: Caller, service: CurrentService) -> QueueQuotaView:
    """Back to the configured quota."""
    return await clusters.reset_to_configured_quota(service, name, caller)


@quotas_router.put("/projects/{name}/quotas/{queue}", responses=responses(404, 422))
async def change_project_quota(
    name: Annotated[str, Path(pattern=NAME_PATTERN, max_length=100, description="A project")],
    queue: QueueName,
    body: QuotaChange,
    caller: Caller,
    service: CurrentService,
) -> ProjectView:
    """Limit the accelerators that the project's running jobs hold together in a queue, beside the queue's own quota. What
    runs already goes on."""
    return await admin.change_project_quota(service, ProjectQueue(name, queue), body.quota, caller)
