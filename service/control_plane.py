"""One control plane in this process: its parts put together, started and ended in order.

The only place that knows both the API and the orchestrator; either could run without the other.
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
from service.api.context import Service
from service.api.oidc import IdentityProvider
from service.cluster_settings import DEFAULT
from service.orchestrator.clusters import Clusters, named_clusters, ray_cluster
from service.orchestrator.exporting import JobExporter
from service.orchestrator.local_ray import LocalRay
from service.orchestrator.logs import LogReader
from service.orchestrator.loop import Orchestrator
from service.orchestrator.notifying import Notifier
from service.orchestrator.planning import Planner
from service.orchestrator.profiling import JobProfiler
from service.orchestrator.ray_jobs import Cluster, RayCluster
from service.orchestrator.removing import JobRemover
from service.settings import Settings
from service.store.database import Database
from service.store.sole_user import sole_user
from service.trace_export import exported

_STOP_LIMIT_S = 10.0


@dataclass
class ControlPlane(Service):
    """What the API works with, and the orchestrator beside it."""

    orchestrator: Orchestrator = field(kw_only=True)
    notifier: Notifier = field(kw_only=True)


def control_plane_app(
    settings: Settings, cluster: Cluster | None = None, others: Mapping[str, Cluster] = MappingProxyType({})
) -> FastAPI:
    """The API with its orchestrator. With no `cluster` given it uses `settings.ray_address`, else a local Ray, and those
    of `settings.clusters`; `others` are given in place of these, by name."""
    return create_app(settings, lambda: run_control_plane(settings, cluster, others))


@contextlib.asynccontextmanager
async def run_control_plane(
    settings: Settings, cluster: Cluster | None = None, others: Mapping[str, Cluster] = MappingProxyType({})
) -> AsyncIterator[ControlPlane]:
    """A control plane that works until the context is left."""
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(exported())
        database = Database(settings.sqlalchemy_url)
        stack.push_async_callback(database.close)
        await stack.enter_async_context(sole_user(database))
        await database.start()
        served_for_real = cluster is None
        clusters = await _clusters(settings, cluster, others, stack)
        stack.push_async_callback(clusters.close)
        planner = Planner(
            processes=settings.plan_processes,
            queue=settings.plan_queue,
            timeout_s=settings.plan_timeout_s,
            memory_bytes=settings.plan_memory_bytes,
        )
        stack.callback(planner.close)
        if served_for_real:
            planner.warm()
        logs = LogReader(database, clusters, limit_bytes=settings.log_limit_bytes)
        stack.push_async_callback(logs.close)
        orchestrator = Orchestrator(settings, database, clusters)
        profiler = JobProfiler(database, clusters, orchestrator.submitter, limit_s=settings.profile_timeout_s)
        stack.push_async_callback(profiler.close)
        identity = None if settings.oidc_issuer is None else IdentityProvider(settings)
        if identity is not None:
            stack.push_async_callback(identity.close)
        exporter = JobExporter(database, clusters, orchestrator.submitter, limit_s=settings.export_timeout_s)
        stack.push_async_callback(exporter.close)
        remover = JobRemover(database, clusters, orchestrator.submitter, limit_s=settings.removal_timeout_s)
        stack.push_async_callback(remover.close)
        notifier = Notifier(settings, database)
        stack.push_async_callback(notifier.close)
        notifier.start()
        clusters.start()
        stack.push_async_callback(clusters.stop)
        if settings.orchestrator:
            loop = asyncio.create_task(orchestrator.run())
            stack.push_async_callback(_end, orchestrator, loop)
        else:
            stack.push_async_callback(_cancelled, asyncio.create_task(orchestrator.pulse.beat_for_ever()))
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
            problem=lambda: orchestrator.pulse.problem,
            identity=identity,
            lag_s=lambda: orchestrator.pulse.lag_s if settings.orchestrator else None,
            leads=lambda: orchestrator.lease.token is not None,
            orchestrator=orchestrator,
            notifier=notifier,
        )


async def _clusters(
    settings: Settings,
    default: Cluster | None,
    others: Mapping[str, Cluster],
    stack: contextlib.AsyncExitStack,
) -> Clusters:
    """Those of the settings; `default` and `others` (by name) in place of Ray."""
    python = "python" if default is not None or settings.ray_address is not None else sys.executable
    found = dict[str, Cluster]()
    if default is not None:
        found[DEFAULT] = default
    elif settings.has_default_cluster:
        given = settings.ray_address is not None
        found[DEFAULT] = ray_cluster(settings, DEFAULT) if given else await _local(settings, stack)
    for name in settings.clusters:
        found[name] = others.get(name) or ray_cluster(settings, name)
    return named_clusters(settings, found, refresh_s=settings.cluster_refresh_s, python=python)


async def _local(settings: Settings, stack: contextlib.AsyncExitStack) -> Cluster:
    local = LocalRay(settings)
    stack.push_async_callback(local.stop)
    await local.start()
    settings.driver_ray_address = local.gcs_address
    keeping = asyncio.create_task(local.keep())
    stack.push_async_callback(_cancelled, keeping)
    return RayCluster(local.address, timeout_s=settings.ray_timeout_s, token=local.token)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _end(orchestrator: Orchestrator, running: asyncio.Task[None]) -> None:
    """In order: a round that is cut off in the middle of a query leaves a connection behind."""
    orchestrator.stop()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(running, _STOP_LIMIT_S)
