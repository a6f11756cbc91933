"""One control plane in this process: its parts put together, started and ended in order.

The only place that knows both the API and the orchestrator; either could run without the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from fastapi import FastAPI

from service.api.app import create_app
from service.api.context import Service
from service.api.oidc import IdentityProvider
from service.orchestrator.cluster_view import ClusterWatcher
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


def control_plane_app(settings: Settings, cluster: Cluster | None = None) -> FastAPI:
    """The API with its orchestrator. With no `cluster` given it uses `settings.ray_address`, else a local Ray."""
    return create_app(settings, lambda: run_control_plane(settings, cluster))


@contextlib.asynccontextmanager
async def run_control_plane(
    settings: Settings, cluster: Cluster | None = None
) -> AsyncIterator[ControlPlane]:
    """A control plane that works until the context is left."""
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(exported())
        database = Database(settings.sqlalchemy_url)
        stack.push_async_callback(database.close)
        await stack.enter_async_context(sole_user(database))
        await database.start()
        local = cluster is None and settings.ray_address is None
        served_for_real = cluster is None
        if cluster is None:
            cluster = await _cluster(settings, stack)
        stack.push_async_callback(cluster.close)
        planner = Planner(
            processes=settings.plan_processes,
            queue=settings.plan_queue,
            timeout_s=settings.plan_timeout_s,
            memory_bytes=settings.plan_memory_bytes,
        )
        stack.callback(planner.close)
        if served_for_real:
            planner.warm()
        watcher = ClusterWatcher(
            cluster, refresh_s=settings.cluster_refresh_s, workers_per_gpu=settings.workers_per_gpu
        )
        logs = LogReader(database, cluster, limit_bytes=settings.log_limit_bytes)
        stack.push_async_callback(logs.close)
        orchestrator = Orchestrator(settings, database, cluster, watcher, local=local)
        profiler = JobProfiler(
            database, cluster, watcher, orchestrator.submitter, limit_s=settings.profile_timeout_s
        )
        stack.push_async_callback(profiler.close)
        identity = None if settings.oidc_issuer is None else IdentityProvider(settings)
        if identity is not None:
            stack.push_async_callback(identity.close)
        exporter = JobExporter(
            cluster, orchestrator.submitter, limit_s=settings.export_timeout_s, database=database
        )
        stack.push_async_callback(exporter.close)
        remover = JobRemover(database, cluster, orchestrator.submitter, limit_s=settings.removal_timeout_s)
        stack.push_async_callback(remover.close)
        notifier = Notifier(settings, database)
        stack.push_async_callback(notifier.close)
        notifier.start()
        watcher.start()
        stack.push_async_callback(watcher.stop)
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
            cluster=watcher,
            logs=logs,
            wake=orchestrator.wake,
            problem=lambda: orchestrator.pulse.problem,
            identity=identity,
            lag_s=lambda: orchestrator.pulse.lag_s if settings.orchestrator else None,
            leads=lambda: orchestrator.lease.token is not None,
            orchestrator=orchestrator,
            notifier=notifier,
        )


async def _cluster(settings: Settings, stack: contextlib.AsyncExitStack) -> Cluster:
    if settings.ray_address is not None:
        return RayCluster(settings.ray_address, timeout_s=settings.ray_timeout_s, token=settings.ray_token)
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
