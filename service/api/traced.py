"""The caller's trace in every line that is logged while a request is answered."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from worker.logs import TraceParent, bind_task


class Traced:
    """Reads W3C's `traceparent`; what is none is ignored, as the specification asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        trace = TraceParent.read(Headers(scope=scope).get("traceparent"))
        # for the whole task of the request: what logs an unexpected error stands further out than this
        bind_task(trace_id=None if trace is None else trace.trace_id)
        return await self._app(scope, receive, send)
