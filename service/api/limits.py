"""Refuses request bodies that are too long: before reading them when the length is told, else on the way."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.errors import problem_response


class BodyLimit:
    """ASGI middleware: 413 for a body over `limit_bytes` (over `limits[path]` where a path has its own)."""

    def __init__(self, app: ASGIApp, *, limit_bytes: int, limits: dict[str, int]) -> None:
        self._app, self._limit_bytes, self._limits = app, limit_bytes, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limits.get(scope["path"], self._limit_bytes)
        message = f"the body is longer than {limit} bytes: send less"
        told = dict(scope["headers"]).get(b"content-length", b"0")
        if told.isdigit() and int(told) > limit:
            await problem_response(413, message)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > limit:
                raise HTTPException(413, message)
            return part

        await self._app(scope, counted, send)
