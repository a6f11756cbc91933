"""ASGI middleware and guarded route classes: body limits, JSON limits, allowed hosts, timing and tracing.

FastAPI reads and parses a body before any dependency runs: a token checked by a dependency alone protects the answer,
not the server. So `UserRoute` and `DriverRoute` authenticate first, and parse long JSON in a thread.
`BodyLimit` refuses bodies that are too long or never end, when they are read, which is after authentication.
`LocalOriginsOnly` protects a server without tokens from foreign web pages, also by DNS rebinding: the Host header
must name this machine, and a change must not come from another origin.
A request has a span if it carries `traceparent` or submits a job; pages, scrapes and drivers' reports have none.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api import auth
from service.api.dependencies import service_of
from service.api.errors import problem_response
from service.jobs.problems import ProblemError
from service.observability.instruments import REQUEST_SECONDS
from service.observability.tracing import REQUEST_SPAN, Span, exporting, record_span
from service.settings.settings import Settings, is_loopback
from worker.contract.logs import TraceParent, bind_task_fields

CLOSE_CONNECTION = {"Connection": "close"}
"""Header of an answer that leaves the rest of a body unread."""
BODY_LIMIT_BYTES = 32 << 20
"""Length of any request's body at most; the longest are drivers' reports of a step's slots."""
JOB_LIMIT_BYTES = 256 << 10
"""Length of the specification of a job at most."""
PLAN_LIMIT_BYTES = 1 << 20
"""Length of the specification of `POST /api/v1/plans` at most."""
_BODY_TIMEOUT_S = 30.0
_SLOWEST_BYTES_PER_S = 65536


class BodyLimit:
    """ASGI middleware: 413 for a body over `limit_bytes` (over `limits[path]` where a path has its own).

    408 for one that has not come 30 s after it was first asked for, and what 64 KiB a second need.
    GET and HEAD are let through: no route reads a body there.
    """

    def __init__(self, app: ASGIApp, *, limit_bytes: int, limits: Mapping[str, int]) -> None:
        self._app, self._limit_bytes, self._limits = app, limit_bytes, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        body = _LimitedBody(receive, self._limits.get(scope["path"], self._limit_bytes))
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        body.declared_bytes = int(declared) if declared.isdigit() else 0
        await self._app(scope, body.receive, send)


class _LimitedBody:
    def __init__(self, receive: Receive, limit_bytes: int) -> None:
        self._receive, self._limit_bytes = receive, limit_bytes
        self._received, self._complete = 0, False
        self._begun_at: float | None = None
        self.declared_bytes = 0

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()  # the end of the connection: may take as long as it likes
        self._check(self.declared_bytes)
        clock = asyncio.get_running_loop()
        if self._begun_at is None:
            self._begun_at = clock.time()
        deadline = self._begun_at + _BODY_TIMEOUT_S + self._received / _SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout_at(deadline):
                part = await self._receive()
        except TimeoutError:
            problem = f"{self._received} bytes of the body came in {clock.time() - self._begun_at:.0f} s, and no end"
            raise HTTPException(408, f"{problem}: send it whole", headers=CLOSE_CONNECTION) from None
        self._received += len(part.get("body", b""))
        self._check(self._received)
        self._complete = not part.get("more_body", False)
        return part

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self._limit_bytes:
            message = f"the body is longer than {self._limit_bytes} bytes: send less"
            raise HTTPException(413, message, headers=CLOSE_CONNECTION)


_PARSE_IN_THREAD_BYTES = 16384
"""A body longer than this is parsed in a thread: parsing is many times as long as the way there."""


@dataclass(frozen=True)
class JsonLimits:
    """Limits of a JSON body: its length as text, its depth, and the number of all values in it (None: no limit)."""

    size_bytes: int
    depth: int = 64
    elements: int | None = 10_000


class UserRoute(APIRoute):
    """A route of users: 401 before the body is read. Who has had an answer to a request that changes something reads nothing
    from before it (Database.changes)."""

    counts_changes = True

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            await _admit(self.admit, request)
            try:
                return await handler(_LimitedJsonRequest(request, self.json_limits(request)))
            finally:
                if self.counts_changes and request.method not in ("GET", "HEAD"):
                    service_of(request.app).database.changes += 1

        return guarded

    async def admit(self, request: Request) -> None:
        """Let the request through, or raise the 401."""
        await auth.require_user(request, service_of(request.app))

    def json_limits(self, request: Request) -> JsonLimits:
        """The limits of the JSON that the caller may send."""
        return JsonLimits(PLAN_LIMIT_BYTES)


class PlanRoute(UserRoute):
    """A route of users that takes a PipelineSpec, of a thousand stages with a dozen numbers each."""

    def json_limits(self, request: Request) -> JsonLimits:
        return JsonLimits(PLAN_LIMIT_BYTES, elements=50_000)


class DriverRoute(UserRoute):
    """A route of drivers, who report thousands of slots at once; what they move is counted with its transaction."""

    counts_changes = False

    async def admit(self, request: Request) -> None:
        await auth.require_driver(request.path_params["attempt_id"], request, service_of(request.app))

    def json_limits(self, request: Request) -> JsonLimits:
        return JsonLimits(BODY_LIMIT_BYTES, elements=None)


async def _admit(admit: Callable[[Request], Coroutine[Any, Any, None]], request: Request) -> None:
    try:
        await admit(request)
    except ProblemError as error:
        if "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0":
            error.headers = {**(error.headers or {}), **CLOSE_CONNECTION}
        raise


class _LimitedJsonRequest(Request):
    """A request whose JSON is checked against limits when it is read."""

    def __init__(self, request: Request, limits: JsonLimits) -> None:
        super().__init__(request.scope, request.receive)
        self._limits = limits

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            if len(body) > _PARSE_IN_THREAD_BYTES:
                self._json = await asyncio.to_thread(read_json, body, self._limits)
            else:
                self._json = read_json(body, self._limits)
        return self._json


def read_json(body: bytes, limits: JsonLimits) -> Any:
    """The value of a JSON text. HTTPException: 413 for too long a text or too many values, 422 for one too deep."""
    if len(body) > limits.size_bytes:
        raise HTTPException(413, f"the body is JSON of more than {limits.size_bytes} bytes: send less")
    too_deep = HTTPException(422, f"the body is nested more than {limits.depth} deep: flatten it")
    try:
        value = json.loads(body)
    except RecursionError:
        raise too_deep from None
    if limits.elements is None:
        return value
    level, depth, count = [value], 0, 0
    while level:
        depth, count = depth + 1, count + len(level)
        if depth > limits.depth:
            raise too_deep
        if count > limits.elements:
            raise HTTPException(413, f"the body holds more than {limits.elements} values: send fewer")
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return value


_HOST_HEADER = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:]*))(?::\d*)?")


class LocalOriginsOnly:
    """ASGI middleware: 403 unless the Host header names this machine or is one of `names`."""

    def __init__(self, app: ASGIApp, *, names: Collection[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._problem(scope)):
            await problem_response(403, problem)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> str | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        name = _host_name(headers.get(b"host", "localhost"))
        if not (is_loopback(name) or name.endswith(".localhost") or name in self._names):
            return (
                f"this server without tokens answers to names of this machine, not to {name!r}: call it by "
                "127.0.0.1, set SLOTLINE_PUBLIC_URL to the address that is used, or SLOTLINE_REQUIRE_TOKEN=true"
            )
        if scope["method"] not in ("GET", "HEAD") and not _is_same_origin(headers):
            return "a page of another origin may change nothing here: set SLOTLINE_REQUIRE_TOKEN=true and send a token"
        return None


def allowed_hosts(settings: Settings) -> set[str] | None:
    """Names besides the names of this machine; None where everybody may call: with a token, or by a setting."""
    if settings.authenticates or settings.open_access:
        return None
    return {httpx.URL(settings.url).host, httpx.URL(settings.control_url).host, settings.host}


def _is_same_origin(headers: Mapping[bytes, str]) -> bool:
    """False where a page of another origin asks; another port of this machine is another origin, though the same site."""
    if (site := headers.get(b"sec-fetch-site")) is not None:
        return site in ("none", "same-origin")
    origin = headers.get(b"origin")  # of browsers that do not send the other, and of no program
    return origin is None or origin.partition("://")[2].lower() == headers.get(b"host", "").lower()


def _host_name(host: str) -> str:
    """The name in a Host header, without port and brackets of IPv6; the whole header where it has another form."""
    match = _HOST_HEADER.fullmatch(host)
    return (match["v6"] or match["name"]).lower() if match else host


_LABELLED_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestTiming:
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
                method = scope["method"] if scope["method"] in _LABELLED_METHODS else "other"
                status = f"{message['status'] // 100}xx"
                REQUEST_SECONDS.labels(method, route, status).observe(seconds)
            await send(message)

        await self._app(scope, receive, observed)


_SUBMIT_PATH = "/api/v1/jobs"
_REPORTS_SUFFIX = "/reports"


class RequestTracing:
    """Reads W3C's `traceparent`; what is none is ignored, as the specification asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        caller = TraceParent.read(Headers(scope=scope).get("traceparent"))
        # for the whole task of the request: what logs an unexpected error stands further out than this
        bind_task_fields(trace_id=None if caller is None else caller.trace_id)
        context = _request_span(scope, caller)
        REQUEST_SPAN.set(context)
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
            record_span(
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


def _request_span(scope: Scope, caller: TraceParent | None) -> TraceParent | None:
    if scope["path"].endswith(_REPORTS_SUFFIX):
        return None
    if caller is not None:
        return caller.child()
    submits = scope["method"] == "POST" and scope["path"].rstrip("/") == _SUBMIT_PATH
    return TraceParent.new() if submits else None
