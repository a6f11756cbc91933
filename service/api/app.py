"""The application: routes, limits and errors over the parts that a process has."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from fastapi import Depends, FastAPI

from service.api import (
    artifacts,
    auth,
    cluster,
    docs,
    drivers,
    errors,
    job_changes,
    job_plans,
    manage,
    metrics,
    named_plans,
    notifications,
    observe,
    openapi,
    packages,
    pages,
    people,
    plans,
    postmortem,
    queue_quotas,
    secrets,
    system,
    weights,
    why,
)
from service.api.context import Service
from service.api.hosts import OwnPagesOnly, own_names
from service.api.limits import BodyLimit
from service.api.timing import Timing
from service.api.traced import Traced
from service.settings import Settings


def create_app(settings: Settings, serving: Callable[[], AbstractAsyncContextManager[Service]]) -> FastAPI:
    """The API over what `serving` gives, which is entered at the start and left at the end."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                app.state.service = await stack.enter_async_context(serving())
            except Exception as error:
                app.state.start_error = error  # for the command, which tells it in one line
                raise
            yield

    app = FastAPI(
        title="Slotline",
        summary="Pipeline-parallel training on Ray with communication as scheduled slots",
        version="1",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own loads its scripts from elsewhere
        redoc_url=None,
    )
    app.add_middleware(
        BodyLimit,
        limit_bytes=settings.body_limit_bytes,
        limits={
            "/api/v1/packages": settings.package_limit_bytes + 65536,
            "/api/v1/jobs": min(settings.job_limit_bytes, settings.body_limit_bytes),
            "/api/v1/plans/job": min(settings.job_limit_bytes, settings.body_limit_bytes),
            "/api/v1/plans": min(settings.plan_limit_bytes, settings.body_limit_bytes),
        },
        timeout_s=settings.body_timeout_s,
    )
    app.add_middleware(Traced)
    if (names := own_names(settings)) is not None:
        app.add_middleware(OwnPagesOnly, names=names)
    app.add_middleware(Timing)  # the outermost: what comes after it counts
    errors.install(app)
    for router in (
        job_plans.router,
        manage.router,
        job_changes.router,
        observe.router,
        notifications.router,
        queue_quotas.router,
        plans.router,
        named_plans.router,
        packages.router,
        cluster.router,
        people.router,
        secrets.router,
        why.router,
        postmortem.router,
        weights.router,
        artifacts.jobs,
        artifacts.usage_router,
    ):
        app.include_router(router, dependencies=[Depends(auth.user)], responses=errors.responses(401, 403))
    app.include_router(pages.router, dependencies=[Depends(auth.user)])
    app.include_router(metrics.router)
    app.include_router(drivers.router)
    app.include_router(system.router)
    app.include_router(docs.router)
    openapi.install(app, authenticates=settings.authenticates)
    return app
