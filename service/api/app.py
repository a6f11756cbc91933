"""The application: parts put together, started and ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from fastapi import Depends, FastAPI

from service.api import (
    auth,
    drivers,
    errors,
    manage,
    metrics,
    observe,
    openapi,
    packages,
    pages,
    plans,
    system,
)
from service.api import (
    cluster as cluster_routes,
)
from service.api.context import Service
from service.api.hosts import OwnPagesOnly, own_names
from service.api.limits import BodyLimit
from service.orchestrator.local_ray import LocalRay
from service.orchestrator.loop import Orchestrator
from service.orchestrator.planning import Planner
from service.orchestrator.ray_jobs import Cluster, RayCluster
from service.settings import Settings
from service.store.database import Database
from service.store.leader import sole_user

logger = logging.getLogger(__name__)
_STOP_LIMIT_S = 10.0


def create_app(settings: Settings, cluster: Cluster | None = None) -> FastAPI:
    """The control plane. With no `cluster` given it uses `settings.ray_address`, else starts a local Ray."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                app.state.service = await _start(settings, cluster, stack)
            except Exception as error:
                app.state.start_error = error  # for the command, which tells it in one line
                raise
            yield

    app = FastAPI(
        title="Slotline",
        summary="Pipeline-parallel training on Ray with communication as scheduled slots",
        version="1",
        lifespan=lifespan,
    )
    app.add_middleware(
        BodyLimit,
        limit_bytes=settings.body_limit_bytes,
        limits={"/api/v1/packages": settings.package_limit_bytes + 65536},
    )
    if (names := own_names(settings)) is not None:
        app.add_middleware(OwnPagesOnly, names=names)
    errors.install(app)
    for router in (manage.router, observe.router, plans.router, packages.router, cluster_routes.router):
        app.include_router(router, dependencies=[Depends(auth.user)], responses=errors.responses(401))
    app.include_router(pages.router, dependencies=[Depends(auth.user)])
    app.include_router(metrics.router)
    app.include_router(drivers.router)
    app.include_router(system.router)
    openapi.install(app, authenticates=settings.authenticates)
    return app


async def _start(settings: Settings, cluster: Cluster | None, stack: contextlib.AsyncExitStack) -> Service:
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
        processes=settings.plan_processes, queue=settings.plan_queue, timeout_s=settings.plan_timeout_s
    )
    stack.callback(planner.close)
    if served_for_real:
        planner.warm()
    orchestrator = Orchestrator(settings, database, cluster, local=local)
    loop = asyncio.create_task(orchestrator.run())
    stack.push_async_callback(_end, orchestrator, loop)
    return Service(settings, database, planner, orchestrator)


async def _cluster(settings: Settings, stack: contextlib.AsyncExitStack) -> Cluster:
    if settings.ray_address is not None:
        return RayCluster(settings.ray_address, timeout_s=settings.ray_timeout_s, token=settings.ray_token)
    local = LocalRay(settings)
    stack.push_async_callback(local.stop)
    await local.start()
    settings.driver_ray_address = local.gcs_address
    return RayCluster(local.address, timeout_s=settings.ray_timeout_s, token=local.token)


async def _end(orchestrator: Orchestrator, running: asyncio.Task[None]) -> None:
    """In order: a round that is cut off in the middle of a query leaves a connection behind."""
    orchestrator.stop()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(running, _STOP_LIMIT_S)
