"""Maps every exception to `application/problem+json` (RFC 9457): field, value, cause and remedy.

Routes and the rules that they call raise ProblemError (service/jobs/problems.py); other exceptions have a handler here.
Text that is no valid Unicode is escaped, not refused.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, get_args

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException

from service.jobs.problems import ProblemCode, ProblemError
from service.orchestrator.attempts.outcome import StaleAttemptError
from service.orchestrator.planning.pool import PlannerBusyError, PlanRefusedError, PlanTimeoutError
from service.orchestrator.ray.jobs_api import ClusterError
from service.spec.job import JobSpec
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
_VALUE_LIMIT = 200
_INLINE_VALUE_LIMIT = 80  # longer ones stand in `errors` only
_ERRORS_SHOWN = 50  # each unknown name is compared with all known ones
_UNION_TAG = re.compile(r"(list|dict|literal|function-\w+|constrained-\w+|tagged-\w+)\[.*\]", re.DOTALL)
"""Pydantic's name, in the location of an error, for one of a field's several forms. No name of ours has brackets."""
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

    async def problem(_: Request, error: ProblemError) -> Response:
        return problem_response(
            error.status, error.detail, errors=error.errors, headers=error.headers, code=error.code
        )

    async def http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400 and error.detail == _UNREADABLE:
            return problem_response(422, "the body is not JSON in UTF-8: send it so")
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_allowed_methods(request, headers.get("Allow")))
        return problem_response(error.status_code, _http_detail(request, error, headers), headers=headers)

    async def invalid(_: Request, error: RequestValidationError) -> Response:
        details = error.errors()
        errors = [_field_error(detail) for detail in details[:_ERRORS_SHOWN]]
        errors = [shown for k, shown in enumerate(errors) if shown not in errors[:k]]
        message = "; ".join(f"{shown['field']}: {shown['message']}" for shown in errors)
        if len(details) > len(errors):
            message += f"; and {len(details) - len(errors)} more"
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


def _field_error(error: Mapping[str, Any]) -> dict[str, Any]:
    where, *path = error["loc"] or ("body",)
    path = [part for part in path if not _UNION_TAG.fullmatch(str(part))]
    field = ".".join(str(part) for part in path) or str(where)
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = _unknown_field(path)
    elif error["type"] == "missing":
        return {"field": field, "value": None, "message": "is missing: give it"}
    elif error["type"] in ("model_attributes_type", "dict_type", "model_type") and not path:
        message = "is no JSON object: send one, with Content-Type: application/json"
    elif error["type"] == "string_pattern_mismatch" and field.endswith("factory"):
        message = "is no import path: write package.module:attribute"
    elif error["type"] == "string_pattern_mismatch" and field in ("name", "queue"):
        message = "is no name: begin with a letter or digit, go on with letters, digits, '.', '_' and '-'"
    elif error["type"] == "json_invalid":
        field, message = "body", f"is not JSON: {error.get('ctx', {}).get('error', 'syntax error')}"
    return {
        "field": field,
        "value": _json_value(error.get("input")),
        "message": message + _refused_value(error),
    }


def _refused_value(error: Mapping[str, Any]) -> str:
    """The value that a rule of a type refused, where it is short; our own rules name what they refuse themselves."""
    if error["type"] in (
        "value_error",
        "assertion_error",
        "extra_forbidden",
        "json_invalid",
        "finite_number",
    ):
        return ""
    shown = json.dumps(error.get("input"), default=str, ensure_ascii=False)
    return f", not {shown}" if len(shown) <= _INLINE_VALUE_LIMIT else ""


def _unknown_field(path: Sequence[Any]) -> str:
    known = sorted(_fields_at(JobSpec, path[:-1]))
    unknown = str(path[-1]) if path else ""
    begun = [
        name for name in known if unknown and name.startswith(f"{unknown}_")
    ]  # every for every_steps, not keep_every
    near = begun or (difflib.get_close_matches(unknown, known, n=1) if path else [])
    if near:
        return f"unknown field: did you mean {near[0]}?"
    known_here = f"; known here: {', '.join(known)}" if known else ""
    return f"unknown field: remove it{known_here}"


def _fields_at(model: type[BaseModel], path: Sequence[Any]) -> set[str]:
    """Names of the fields of a job specification below `path`; empty where the path is not of a job."""
    for part in path:
        field = model.model_fields.get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()  # also X of `X | None`
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if inner is None:
            return set()
        model = inner
    return set(model.model_fields)


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _VALUE_LIMIT else f"{text[:_VALUE_LIMIT]}..."
