"""Events and logs as server-sent events: resumable by Last-Event-ID, ended with the job.

A stream holds no database session between two looks. An ended job whose events were all seen is
answered with 204, which tells a browser not to come back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from fastapi import Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from service.api.context import Service
from service.api.schemas import LogLine
from service.api.views import event_view
from service.orchestrator.ray_jobs import ClusterError
from service.store.attempts import attempts_of
from service.store.events import events_of
from service.store.jobs import find_job
from service.store.tables import Job

MEDIA_TYPE = "text/event-stream"
_LOOK_EVERY_S = 0.4
_LOG_LOOK_EVERY_S = 1.0
_PING_S = 15
_MISSED_LOOKS = 30

LinePlace = tuple[int, int]
"""Number of the attempt, number of the line."""


def wanted(request: Request) -> bool:
    return MEDIA_TYPE in request.headers.get("accept", "")


def last_number(text: str | None) -> int | None:
    """The number in a Last-Event-ID of the event log; None when there is none or it is not ours."""
    return int(text) if text and text.isdecimal() and len(text) < 10 else None


def last_line(text: str | None) -> LinePlace:
    """The place in a Last-Event-ID or page token of the log; the beginning when it is not ours."""
    attempt, _, line = (text or "").partition(":")
    return (last_number(attempt) or 0, last_number(line) or 0)


def events(service: Service, job: Job, *, after: int) -> Response:
    if job.job_state.final and after >= job.last_event:
        return Response(status_code=204)
    return _stream(_events(service, job.id, after))


def logs(service: Service, job: Job, *, attempt: int | None, after: LinePlace) -> Response:
    return _stream(_logs(service, job.id, attempt, after))


async def log_lines(service: Service, job_id: str, *, attempt: int | None, after: LinePlace) -> list[LogLine]:
    """Lines of the drivers' logs behind `after`. Raises ClusterError when Ray is needed and away."""
    async with service.database.read() as session:
        attempts = await attempts_of(session, job_id)
    lines: list[LogLine] = []
    for one in attempts:
        if one.number < after[0] or attempt not in (None, one.number):
            continue
        first, text = await service.logs.read(one)
        skip = max(after[1] + 1 - first, 0) if one.number == after[0] else 0
        for number, line in enumerate(_lines(text, ended=one.attempt_state.final)[skip:], first + skip):
            lines.append(LogLine(attempt=one.number, number=number, text=line))
    return lines


def _lines(text: str, *, ended: bool) -> list[str]:
    """Lines of a log; the last one only when it is complete, or nothing will be added to it."""
    *lines, rest = text.split("\n")
    return [*lines, rest] if rest and ended else lines


async def _events(service: Service, job_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
    while True:
        async with service.database.read() as session:
            job = await find_job(session, job_id)
            found = await events_of(session, job_id, after=after)
        for event in found:
            after = event.number
            yield ServerSentEvent(data=event_view(event).model_dump_json(), event=event.kind, id=str(after))
        if job is None or (job.job_state.final and after >= job.last_event):
            yield _end(job)
            return
        if not found:
            await asyncio.sleep(_LOOK_EVERY_S)


async def _logs(
    service: Service, job_id: str, attempt: int | None, after: LinePlace
) -> AsyncIterator[ServerSentEvent]:
    missed = 0
    while True:
        async with service.database.read() as session:
            job = await find_job(session, job_id)
        try:
            lines, missed = await log_lines(service, job_id, attempt=attempt, after=after), 0
        except ClusterError:
            lines, missed = [], missed + 1
        for line in lines:
            after = (line.attempt, line.number)
            yield ServerSentEvent(
                data=line.model_dump_json(), event="line", id=f"{line.attempt}:{line.number}"
            )
        if job is None or (job.job_state.final and not 0 < missed < _MISSED_LOOKS):
            yield _end(job)
            return
        await asyncio.sleep(_LOG_LOOK_EVERY_S)


def _end(job: Job | None) -> ServerSentEvent:
    return ServerSentEvent(data=json.dumps({"state": None if job is None else job.state}), event="end")


def _stream(content: AsyncIterator[ServerSentEvent]) -> Response:
    return EventSourceResponse(content, ping=_PING_S)
