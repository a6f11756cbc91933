"""Refuses request bodies that are too long, or that never end: when they are read, so after who asks is known."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CLOSE = {"Connection": "close"}
"""What an answer carries that leaves the rest of a body unread."""
_SLOWEST_BYTES_PER_S = 65536


class BodyLimit:
    """ASGI middleware: 413 for a body over `limit_bytes` (over `limits[path]` where a path has its own).

    408 for one that has not come `timeout_s` after it was first asked for, and what 64 KiB a second need.
    GET and HEAD are let through: no route reads a body there.
    """

    def __init__(
        self, app: ASGIApp, *, limit_bytes: int, limits: Mapping[str, int], timeout_s: float
    ) -> None:
        self._app, self._limit_bytes, self._limits, self._timeout_s = app, limit_bytes, limits, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        body = _Body(receive, self._limits.get(scope["path"], self._limit_bytes), self._timeout_s)
        told = dict(scope["headers"]).get(b"content-length", b"0")
        body.told_bytes = int(told) if told.isdigit() else 0
        await self._app(scope, body.receive, send)


class _Body:
    def __init__(self, receive: Receive, limit_bytes: int, timeout_s: float) -> None:
        self._receive, self._limit_bytes, self._timeout_s = receive, limit_bytes, timeout_s
        self._received, self._complete = 0, False
        self._begun_at: float | None = None
        self.told_bytes = 0

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()  # the end of the connection: may take as long as it likes
        self._check(self.told_bytes)
        clock = asyncio.get_running_loop()
        if self._begun_at is None:
            self._begun_at = clock.time()
        deadline = self._begun_at + self._timeout_s + self._received / _SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout_at(deadline):
                part = await self._receive()
        except TimeoutError:
            problem = f"{self._received} bytes of the body came in {clock.time() - self._begun_at:.0f} s, and no end"
            raise HTTPException(408, f"{problem}: send it whole", headers=CLOSE) from None
        self._received += len(part.get("body", b""))
        self._check(self._received)
        self._complete = not part.get("more_body", False)
        return part

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self._limit_bytes:
            message = f"the body is longer than {self._limit_bytes} bytes: send less"
            raise HTTPException(413, message, headers=CLOSE)
