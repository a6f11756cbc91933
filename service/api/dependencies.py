"""FastAPI dependencies and parameters that several routers share: the running service, ids, times, and long work.

Times in queries are ISO 8601 with a zone, as `format: date-time` says, and nothing else that could be read as one.
A 202 answer carries Retry-After and asks for the same request again.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Path, Request, Response
from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator
from starlette.requests import HTTPConnection

from service.jobs.problems import ProblemError
from service.jobs.service import RunWork, Service
from service.spec.names import JOB_ID_PATTERN

JobId = Annotated[str, Path(pattern=JOB_ID_PATTERN, description="A job's id, e.g. job-k3j9x2abcd")]


def service_of(app: FastAPI) -> Service:
    """The service behind an application made by `create_app`."""
    return app.state.service


async def _current_service(connection: HTTPConnection) -> Service:  # not async, it would be run in a thread
    return service_of(connection.app)


CurrentService = Annotated[Service, Depends(_current_service)]


async def _run_while_connected(request: Request) -> RunWork:
    return functools.partial(while_connected, request)


RunWhileConnected = Annotated[RunWork, Depends(_run_while_connected)]
"""Awaits a plan or an analysis, and cancels it when the caller disconnects."""
T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the connection ends before it has one."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            raise ProblemError(503, "the caller has gone")  # nobody reads it
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    await request.body()  # it was read already: what comes behind it is the end of the connection
    while (await request.receive())["type"] != "http.disconnect":
        pass


_RETRY_AFTER_S = "1"


def accepted(waiting: BaseModel) -> Response:
    """202: the work is under way, and the same request is to be sent again a second later."""
    return Response(
        waiting.model_dump_json(),
        status_code=202,
        media_type="application/json",
        headers={"Retry-After": _RETRY_AFTER_S},
    )


def json_text(text: str, *, file_name: str | None = None) -> Response:
    """A JSON answer that is serialized already; with `file_name` browsers store it."""
    headers = {} if file_name is None else {"Content-Disposition": f'attachment; filename="{file_name}"'}
    return Response(text, media_type="application/json", headers=headers)


_DATE_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d([.,]\d{1,9})?)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def _check_iso8601(value: object) -> object:
    if isinstance(value, str) and not _DATE_TIME.fullmatch(value):
        raise ValueError(f"{value!r} is no time with a zone: write e.g. 2026-05-17T12:00:00Z")
    return value


def _to_utc(time: datetime) -> datetime:
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{time.isoformat()} is before or after all times: give another") from None


UtcTime = Annotated[AwareDatetime, BeforeValidator(_check_iso8601), AfterValidator(_to_utc)]
"""A time in UTC."""
