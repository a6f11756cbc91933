"""The caller's trace in every line that is logged while a request is answered, and the request as a span of it.

A span has a request that carries a trace or submits a job: pages, scrapes and drivers' reports, which come all the time
and begin nothing, have none.
"""

from __future__ import annotations

import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.tracing import REQUEST, Span, exporting, record
from worker.logs import TraceParent, bind_task

_JOBS = "/api/v1/jobs"
_REPORTS = "/reports"


class Traced:
    """Reads W3C's `traceparent`; what is none is ignored, as the specification asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        caller = TraceParent.read(Headers(scope=scope).get("traceparent"))
        # for the whole task of the request: what logs an unexpected error stands further out than this
        bind_task(trace_id=None if caller is None else caller.trace_id)
        context = _span_of(scope, caller)
        REQUEST.set(context)
        if context is None or not exporting():
            return await self._app(scope, receive, send)
        began, status = time.time(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            return await self._app(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", scope["path"])
            record(
                Span(
                    f"{scope['method']} {route}",
                    context,
                    began,
                    time.time(),
                    parent_id=None if caller is None else caller.span_id,
                    attributes={
                        "http.request.method": scope["method"],
                        "http.route": route,
                        "http.response.status_code": status,
                    },
                    error=f"HTTP {status}" if status >= 500 else None,
                    server=True,
                )
            )


def _span_of(scope: Scope, caller: TraceParent | None) -> TraceParent | None:
    if scope["path"].endswith(_REPORTS):
        return None
    if caller is not None:
        return caller.child()
    submits = scope["method"] == "POST" and scope["path"].rstrip("/") == _JOBS
    return TraceParent.new() if submits else None
