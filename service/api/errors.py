"""Maps every exception to `application/problem+json` (RFC 9457): field, value, cause and remedy.

Routes and the rules that they call raise ProblemError (service/jobs/problems.py); other exceptions have a handler here.
Text that is no valid Unicode is escaped, not refused.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException

from service.api.pages.router import is_for_a_reader, missing_page
from service.api.sso import sso_of
from service.jobs.problems import ProblemCode, ProblemError
from service.orchestrator.attempts.outcome import StaleAttemptError
from service.orchestrator.planning.pool import PlannerBusyError, PlanRefusedError, PlanTimeoutError
from service.orchestrator.ray.jobs_api import ClusterError
from service.spec.field_errors import field_errors
from service.store.transitions import TransitionError

_CODE_OF_STATUS = {
    401: ProblemCode.UNAUTHENTICATED,
    403: ProblemCode.FORBIDDEN,
    404: ProblemCode.NOT_FOUND,
    405: ProblemCode.METHOD_NOT_ALLOWED,
    408: ProblemCode.TIMED_OUT,
    409: ProblemCode.CONFLICT,
    413: ProblemCode.TOO_LARGE,
    422: ProblemCode.INVALID,
    500: ProblemCode.INTERNAL_ERROR,
    503: ProblemCode.UNAVAILABLE,
}


def code_of(status: int) -> ProblemCode:
    """The code of a problem that has none of its own."""
    return _CODE_OF_STATUS.get(status, ProblemCode.INTERNAL_ERROR if status >= 500 else ProblemCode.REFUSED)


logger = logging.getLogger(__name__)

PROBLEM_MEDIA_TYPE = "application/problem+json"
_UNREADABLE = "There was an error parsing the body"  # FastAPI's words


def problem_response(
    status: int,
    detail: str,
    *,
    errors: Sequence[Mapping[str, Any]] | None = None,
    headers: Mapping[str, str] | None = None,
    code: ProblemCode | None = None,
) -> Response:
    """A problem as a response; text that is no valid Unicode is escaped, not refused."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code or code_of(status),
        "detail": detail,
    }
    if errors:
        body["errors"] = errors
    content = json.dumps(body, default=str).encode("ascii")
    return Response(content, status_code=status, media_type=PROBLEM_MEDIA_TYPE, headers=dict(headers or {}))


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of the errors of a route."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in statuses
    }


@dataclass(frozen=True)
class _Answer:
    """The problem that an exception of the rooms below is answered with: its message, and a way out behind it."""

    error: type[Exception]
    status: int
    code: ProblemCode
    way_out: str = ""
    retry_after_s: int | None = None

    async def handle(self, _: Request, error: Exception) -> Response:
        headers = None if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return problem_response(self.status, f"{error}{self.way_out}", headers=headers, code=self.code)


_ANSWERS = (
    _Answer(TransitionError, 409, ProblemCode.STATE_FORBIDS, "; read the job to see its state"),
    _Answer(StaleAttemptError, 409, ProblemCode.ATTEMPT_OVER),
    _Answer(PlanRefusedError, 422, ProblemCode.PLAN_REFUSED),
    _Answer(PlannerBusyError, 503, ProblemCode.PLANNER_BUSY, ": try again", retry_after_s=5),
    _Answer(
        PlanTimeoutError,
        503,
        ProblemCode.PLAN_TOO_SLOW,
        ": lower the budget, choose a named schedule, or shrink the spec",
        retry_after_s=30,
    ),
    _Answer(ClusterError, 503, ProblemCode.CLUSTER_AWAY, retry_after_s=5),
)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception with a problem."""

    async def problem(request: Request, error: ProblemError) -> Response:
        if error.status == 401 and (address := _login_address(request)) is not None:
            return RedirectResponse(address, 303, headers={"Cache-Control": "no-store"})
        if error.status == 404 and is_for_a_reader(request):
            return missing_page(request)
        return problem_response(
            error.status, error.detail, errors=error.errors, headers=error.headers, code=error.code
        )

    async def http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400 and error.detail == _UNREADABLE:
            return problem_response(422, "the body is not JSON in UTF-8: send it so")
        if error.status_code == 404 and is_for_a_reader(request):
            return missing_page(request)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_allowed_methods(request, headers.get("Allow")))
        return problem_response(error.status_code, _http_detail(request, error, headers), headers=headers)

    async def invalid(_: Request, error: RequestValidationError) -> Response:
        details = error.errors()
        errors, message = field_errors(details)
        return problem_response(422, message, errors=errors)

    async def no_database(request: Request, error: DBAPIError) -> Response:
        request.app.state.service.database.outage.away(error.orig or error)
        detail = "the database does not answer: try again"
        return problem_response(503, detail, headers={"Retry-After": "5"}, code=ProblemCode.DATABASE_AWAY)

    async def no_connection(request: Request, _: PoolTimeoutError) -> Response:
        logger.warning("%s %s: no connection to the database was free", request.method, request.url.path)
        detail = "all connections to the database are in use: try again"
        return problem_response(503, detail, headers={"Retry-After": "5"}, code=ProblemCode.DATABASE_BUSY)

    async def too_deep(_: Request, __: RecursionError) -> Response:
        return problem_response(422, "the body is nested too deeply: flatten it")

    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem_response(500, "the server failed; its log says why")

    handlers: list[tuple[type[Exception], Any]] = [
        (ProblemError, problem),
        (HTTPException, http),
        (RequestValidationError, invalid),
        (OperationalError, no_database),
        (InterfaceError, no_database),
        (PoolTimeoutError, no_connection),
        (RecursionError, too_deep),
        (Exception, unexpected),
        *((answer.error, answer.handle) for answer in _ANSWERS),
    ]
    for kind, handler in handlers:
        app.add_exception_handler(kind, handler)


def _login_address(request: Request) -> str | None:
    """The page that logs a visitor of a page in; None for a program, and for who sends a token or wants to (`?token`)."""
    sso = sso_of(request.app)
    wants_token = "authorization" in request.headers or "token" in request.query_params
    if sso is None or wants_token or request.method != "GET" or not is_for_a_reader(request):
        return None
    return sso.login_address(request)


def _http_detail(request: Request, error: HTTPException, headers: Mapping[str, str]) -> str:
    if error.detail != HTTPStatus(error.status_code).phrase:
        return str(error.detail)
    if error.status_code == 404:
        return f"nothing is at {request.url.path}; /docs lists the routes"
    if error.status_code == 405:
        return f"{request.method} does not work at {request.url.path}: use {headers['Allow']}"
    return str(error.detail)


def _allowed_methods(request: Request, named: str | None) -> list[str]:
    """The methods of all routes at this path; the router itself names the methods of one route only."""
    methods = {method.strip() for method in (named or "").split(",")} - {""}
    for path, operations in request.app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), request.url.path):
            methods |= {method.upper() for method in operations}
    return sorted(methods)
