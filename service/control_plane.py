"""Assembles one control plane: the FastAPI application, the orchestrator and their parts, started in order.

The only module that knows both the API and the orchestrator's loop; either could run without the other.
Parts end in the reverse order: a round cut off in the middle of a query would leave a connection behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fastapi import FastAPI

from service.api.app import create_app
from service.api.oidc import IdentityProvider
from service.jobs.service import Service
from service.observability.tracing import export_traces
from service.orchestrator.loop import Orchestrator
from service.orchestrator.notify.notifier import Notifier
from service.orchestrator.planning.pool import PlannerPool, container_memory_bytes, process_memory_bytes
from service.orchestrator.ray.clusters import (
    CLUSTER_REFRESH_S,
    Clusters,
    DriverSettings,
    build_clusters,
    ray_cluster,
)
from service.orchestrator.ray.driver_logs import LogReader
from service.orchestrator.ray.jobs_api import Cluster, RayCluster
from service.orchestrator.ray.local_ray import LocalRay
from service.orchestrator.tasks.artifacts import ExportTask, RemovalTask
from service.orchestrator.tasks.check import CheckTask
from service.orchestrator.tasks.profile import ProfileTask
from service.orchestrator.tasks.runner import TaskRunner
from service.settings.clusters import DEFAULT_CLUSTER
from service.settings.settings import Settings
from service.store.database import Database, exclusive_sqlite_lock

_STOP_LIMIT_S = 10.0


@dataclass
class ControlPlane(Service):
    """The parts that the API works with, and the orchestrator and the notifier beside them."""

    orchestrator: Orchestrator = field(kw_only=True)
    notifier: Notifier = field(kw_only=True)


def control_plane_app(
    settings: Settings, cluster: Cluster | None = None, others: Mapping[str, Cluster] = MappingProxyType({})
) -> FastAPI:
    """The API with its orchestrator, on `cluster` or else the Ray of `settings.ray_address` or a local one, and on the
    clusters of `settings.clusters`, in place of which `others` stand by name."""
    return create_app(settings, lambda: run_control_plane(settings, cluster, others))


@contextlib.asynccontextmanager
async def run_control_plane(
    settings: Settings, cluster: Cluster | None = None, others: Mapping[str, Cluster] = MappingProxyType({})
) -> AsyncIterator[ControlPlane]:
    """A control plane that works until the context is left."""
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(export_traces())
        database = Database(settings.sqlalchemy_url)
        stack.push_async_callback(database.close)
        await stack.enter_async_context(exclusive_sqlite_lock(database))
        await database.start()
        served_for_real = cluster is None
        clusters = await _connect_clusters(settings, cluster, others, stack)
        stack.push_async_callback(clusters.close)
        planner = PlannerPool(
            processes=settings.plan_processes,
            memory_bytes=process_memory_bytes(
                settings.plan_memory_bytes, settings.plan_processes, container_memory_bytes()
            ),
        )
        stack.callback(planner.close)
        if served_for_real:
            planner.warm()
        logs = LogReader(database, clusters)
        stack.push_async_callback(logs.close)
        checker = None  # a cluster that stands in for Ray runs no checks
        if served_for_real:
            checker = TaskRunner(database, clusters, CheckTask(database))
            stack.push_async_callback(checker.close)
        orchestrator = Orchestrator(settings, database, clusters, checker)
        profiler = TaskRunner(database, clusters, ProfileTask(database, clusters))
        stack.push_async_callback(profiler.close)
        identity = None if settings.oidc_issuer is None else IdentityProvider(settings)
        if identity is not None:
            stack.push_async_callback(identity.close)
        exporter = TaskRunner(database, clusters, ExportTask(database))
        stack.push_async_callback(exporter.close)
        remover = TaskRunner(database, clusters, RemovalTask(database, clusters))
        stack.push_async_callback(remover.close)
        notifier = Notifier(settings, database)
        stack.push_async_callback(notifier.close)
        notifier.start()
        clusters.start()
        stack.push_async_callback(clusters.stop)
        if settings.orchestrator:
            loop = asyncio.create_task(orchestrator.run())
            stack.push_async_callback(_stop_orchestrator, orchestrator, loop)
        else:
            stack.push_async_callback(_cancel, asyncio.create_task(orchestrator.heartbeat.beat_forever()))
        yield ControlPlane(
            settings=settings,
            database=database,
            planner=planner,
            profiler=profiler,
            exporter=exporter,
            remover=remover,
            clusters=clusters,
            logs=logs,
            wake=orchestrator.wake,
            problem=lambda: orchestrator.heartbeat.problem,
            identity=identity,
            lag_s=lambda: orchestrator.heartbeat.lag_s if settings.orchestrator else None,
            leads=lambda: orchestrator.lease.token is not None,
            orchestrator=orchestrator,
            notifier=notifier,
        )


async def _connect_clusters(
    settings: Settings,
    default: Cluster | None,
    others: Mapping[str, Cluster],
    stack: contextlib.AsyncExitStack,
) -> Clusters:
    """Clusters of the settings; `default` and `others` (by name) stand in place of Ray."""
    connected, drivers = dict[str, Cluster](), DriverSettings()
    if default is not None:
        connected[DEFAULT_CLUSTER] = default
    elif settings.ray_address is not None:
        connected[DEFAULT_CLUSTER] = ray_cluster(settings, DEFAULT_CLUSTER)
    elif settings.has_default_cluster:
        local = await _start_local_ray(settings, stack)
        connected[DEFAULT_CLUSTER] = RayCluster(local.address, token=local.token)
        drivers = DriverSettings(
            python=sys.executable, forks=True, ray_address=local.gcs_address, may_scale=False
        )
    for name in settings.clusters:
        connected[name] = others.get(name) or ray_cluster(settings, name)
    return build_clusters(settings, connected, refresh_s=CLUSTER_REFRESH_S, default=drivers)


async def _start_local_ray(settings: Settings, stack: contextlib.AsyncExitStack) -> LocalRay:
    local = LocalRay(settings)
    stack.push_async_callback(local.stop)
    await local.start()
    keeping = asyncio.create_task(local.keep())
    stack.push_async_callback(_cancel, keeping)
    return local


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _stop_orchestrator(orchestrator: Orchestrator, running: asyncio.Task[None]) -> None:
    """In order: a round that is cut off in the middle of a query leaves a connection behind."""
    orchestrator.stop()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(running, _STOP_LIMIT_S)
