"""How long the API takes to answer, by route: measured around everything else."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.instruments import REQUEST_SECONDS

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Timing:
    """Observes each request until its answer begins, under the template of its route: paths have ids in them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                seconds = time.perf_counter() - began
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                status = f"{message['status'] // 100}xx"
                REQUEST_SECONDS.labels(method, route, status).observe(seconds)
            await send(message)

        await self._app(scope, receive, observed)
