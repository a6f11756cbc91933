"""Assembles the FastAPI application: middleware, error handlers, routers, and its OpenAPI document."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from service.api import auth, errors
from service.api.errors import PROBLEM_MEDIA_TYPE
from service.api.middleware import (
    BODY_LIMIT_BYTES,
    JOB_LIMIT_BYTES,
    PLAN_LIMIT_BYTES,
    BodyLimit,
    LocalOriginsOnly,
    RequestTiming,
    RequestTracing,
    allowed_hosts,
)
from service.api.pages import router as pages
from service.api.routers import OTHER_ROUTERS, USER_ROUTERS
from service.api.sso import single_sign_on
from service.jobs.artifacts import PACKAGE_LIMIT_BYTES
from service.jobs.service import Service
from service.schemas.system import ProblemDetails
from service.settings.settings import Settings

_BEARER_SCHEME = {"type": "http", "scheme": "bearer"}
_SECURITY_SCHEMES = {
    "user": {**_BEARER_SCHEME, "description": "A user's API token, made by slotline token"},
    "attempt": {**_BEARER_SCHEME, "description": "The token of an attempt, which only its driver has"},
}


def create_app(settings: Settings, serving: Callable[[], AbstractAsyncContextManager[Service]]) -> FastAPI:
    """The API over the service that `serving` makes; it is entered at the start and left at the end."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                service = app.state.service = await stack.enter_async_context(serving())
                stack.push_async_callback(service.shared_reads.close)
                app.state.sso = single_sign_on(settings, service.identity)
            except Exception as error:
                app.state.start_error = error  # for the command, which prints it in one line
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
    app.router.routes.extend(_routes())
    _add_middleware(app, settings)
    errors.install_error_handlers(app)
    _install_openapi(app, authenticates=settings.authenticates)
    return app


def _add_middleware(app: FastAPI, settings: Settings) -> None:
    """The last that is added is the outermost."""
    app.add_middleware(
        BodyLimit,
        limit_bytes=BODY_LIMIT_BYTES,
        limits={
            "/api/v1/packages": PACKAGE_LIMIT_BYTES + 65536,
            "/api/v1/jobs": JOB_LIMIT_BYTES,
            "/api/v1/plans/job": JOB_LIMIT_BYTES,
            "/api/v1/plans": PLAN_LIMIT_BYTES,
        },
    )
    app.add_middleware(RequestTracing)
    if (names := allowed_hosts(settings)) is not None:
        app.add_middleware(LocalOriginsOnly, names=names)
    app.add_middleware(RequestTiming)  # the outermost: what comes after it counts


@functools.cache
def _routes() -> Sequence[BaseRoute]:
    """Routes of users first, for which a token is asked; then routes that ask for another token or none.

    Applications of one process share them: to analyse their signatures takes longer than most requests.
    """
    every = APIRouter()
    for router in USER_ROUTERS:
        every.include_router(
            router, dependencies=[Depends(auth.require_user)], responses=errors.responses(401, 403)
        )
    every.include_router(pages.router, dependencies=[Depends(auth.require_user)])
    for router in (*OTHER_ROUTERS, pages.open_router):
        every.include_router(router)
    return every.routes


def _install_openapi(app: FastAPI, *, authenticates: bool) -> None:
    """Errors are problems in `app.openapi()`, and each call names the token that it carries."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _openapi_document(app, authenticates)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _openapi_document(app: FastAPI, authenticates: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas["Problem"] = ProblemDetails.model_json_schema()
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = _SECURITY_SCHEMES
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if path.startswith("/api/v1/attempts/"):
                operation["security"] = [{"attempt": []}]
            elif authenticates and path.startswith("/api/") and "401" in operation["responses"]:
                operation["security"] = [{"user": []}]
            for status, response in operation["responses"].items():
                if status.startswith(("4", "5")):
                    problem = {"schema": {"$ref": "#/components/schemas/Problem"}}
                    response["content"] = {PROBLEM_MEDIA_TYPE: problem}
    return document
