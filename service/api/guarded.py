"""Routes that know who asks before they read what is asked, and read it where it holds up nobody.

FastAPI reads and parses a body before any dependency runs: a token that is looked at by a dependency
alone protects the answer, not the server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from service.api import auth
from service.api.context import service_of
from service.api.errors import ProblemError
from service.api.limits import CLOSE

_LONG_BYTES = 16384
"""A body longer than this is parsed in a thread: parsing is many times as long as the way there."""


@dataclass(frozen=True)
class Shape:
    """How deep JSON may be nested, and how many values it may hold in all; `size_bytes` for it as text."""

    size_bytes: int
    depth: int = 64
    elements: int | None = 10_000


class UserRoute(APIRoute):
    """A route of users: 401 before the body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            await _admit(self.admit, request)
            return await handler(_ShapedRequest(request, self.shape(request)))

        return guarded

    async def admit(self, request: Request) -> None:
        """Let the request through, or raise the 401."""
        await auth.user(request, service_of(request.app))

    def shape(self, request: Request) -> Shape:
        """What JSON the caller may send."""
        return Shape(service_of(request.app).settings.plan_limit_bytes)


class PlanRoute(UserRoute):
    """A route of users that takes a PipelineSpec, of a thousand stages with a dozen numbers each."""

    def shape(self, request: Request) -> Shape:
        return Shape(service_of(request.app).settings.plan_limit_bytes, elements=50_000)


class DriverRoute(UserRoute):
    """A route of drivers, who report thousands of slots at once."""

    async def admit(self, request: Request) -> None:
        await auth.driver(request.path_params["attempt_id"], request, service_of(request.app))

    def shape(self, request: Request) -> Shape:
        return Shape(service_of(request.app).settings.body_limit_bytes, elements=None)


async def _admit(admit: Callable[[Request], Coroutine[Any, Any, None]], request: Request) -> None:
    try:
        await admit(request)
    except ProblemError as error:
        if "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0":
            error.headers = {**(error.headers or {}), **CLOSE}
        raise


class _ShapedRequest(Request):
    """The same request, whose JSON is of a shape that the server can take."""

    def __init__(self, request: Request, shape: Shape) -> None:
        super().__init__(request.scope, request.receive)
        self._shape = shape

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            if len(body) > _LONG_BYTES:
                self._json = await asyncio.to_thread(read_json, body, self._shape)
            else:
                self._json = read_json(body, self._shape)
        return self._json


def read_json(body: bytes, shape: Shape) -> Any:
    """The value of a JSON text. HTTPException: 413 for too long a text or too many values, 422 for one too deep."""
    if len(body) > shape.size_bytes:
        raise HTTPException(413, f"the body is JSON of more than {shape.size_bytes} bytes: send less")
    too_deep = HTTPException(422, f"the body is nested more than {shape.depth} deep: flatten it")
    try:
        value = json.loads(body)
    except RecursionError:
        raise too_deep from None
    if shape.elements is None:
        return value
    level, depth, count = [value], 0, 0
    while level:
        depth, count = depth + 1, count + len(level)
        if depth > shape.depth:
            raise too_deep
        if count > shape.elements:
            raise HTTPException(413, f"the body holds more than {shape.elements} values: send fewer")
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return value
