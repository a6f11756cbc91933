"""Events and logs as server-sent events: resumable by Last-Event-ID, ended with the job.

A stream holds no database session between two looks. An ended job whose events were all seen is
answered with 204, which tells a browser not to come back.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from fastapi import Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from service.api.context import Service
from service.api.schemas import LogLine
from service.api.views import event_view
from service.orchestrator.ray_jobs import ClusterError
from service.store.attempts import log_places
from service.store.events import Glance
from service.store.tables import Event, Job

MEDIA_TYPE = "text/event-stream"
_LOOK_EVERY_S = 0.4
_LOG_LOOK_EVERY_S = 1.0
_PING_S = 15
_MISSED_LOOKS = 30
_LINES_A_LOOK = 500
_LINES_A_TURN = 50

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


def logs(service: Service, job: Job, wanted: LogFilter, *, after: LinePlace) -> Response:
    return _stream(_logs(service, job.id, wanted, after))


@dataclass(frozen=True)
class LogFilter:
    """Which lines are wanted: of one attempt, with a text in them, written since a time, the last ones only."""

    attempt: int | None = None
    search: str | None = None
    since: datetime | None = None
    tail: int | None = None


async def log_lines(
    service: Service,
    job_id: str,
    wanted: LogFilter,
    *,
    after: LinePlace,
    limit: int | None = None,
    follow: bool = False,
    read: set[str] | None = None,
) -> list[LogLine]:
    """Lines of the drivers' logs behind `after`, `limit` at most. Raises ClusterError when Ray is needed and away.

    Attempts in `read` are passed over; those whose log is kept and has been gone through are added to it.
    """
    async with service.database.read() as session:
        places = await log_places(session, job_id)
    lines: deque[LogLine] = deque(maxlen=wanted.tail)
    for place in places:
        if (
            place.number < after[0]
            or wanted.attempt not in (None, place.number)
            or place.attempt_id in (read or ())
        ):
            continue
        behind = after[1] if place.number == after[0] else 0
        found = await service.logs.lines(place, behind, follow=follow)
        for number, text in _filtered(found, wanted, place.created_at):
            lines.append(LogLine(attempt=place.number, number=number, text=text))
            if wanted.tail is None and limit is not None and len(lines) >= limit:
                return list(lines)
        if place.kept and read is not None:
            read.add(place.attempt_id)
    return list(lines)


def _filtered(
    lines: Iterator[tuple[int, str]], wanted: LogFilter, begin: datetime
) -> Iterator[tuple[int, str]]:
    """A line without a time of its own is as old as the one before it."""
    written, search = begin, None if wanted.search is None else wanted.search.casefold()
    for number, text in lines:
        if wanted.since is not None:
            written = _written_at(text) or written
            if written < wanted.since:
                continue
        if search is None or search in text.casefold():
            yield number, text


def _written_at(line: str) -> datetime | None:
    """The UTC time at the begin of a line of a driver, as worker/logs.py writes it."""
    line = line.removeprefix('{"time": "')
    if not line[:1].isdigit() or line[19:20] != "." or line[23:24] != "Z":
        return None
    try:
        return datetime.fromisoformat(line[:24])
    except ValueError:
        return None


async def _events(service: Service, job_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
    glance = await service.feed.now(job_id)
    while True:
        found: Sequence[Event] = ()
        if glance is not None and glance.last_event > after:
            found = await service.feed.events(job_id, after=after)
        for event in found:
            after = event.number
            yield ServerSentEvent(data=event_view(event).model_dump_json(), event=event.kind, id=str(after))
        if glance is None or (glance.state.final and after >= glance.last_event):
            yield _end(glance)
            return
        if not found or after >= glance.last_event:
            glance = await service.feed.next(job_id, within_s=_LOOK_EVERY_S)


async def _logs(
    service: Service, job_id: str, wanted: LogFilter, after: LinePlace
) -> AsyncIterator[ServerSentEvent]:
    missed, read = 0, set[str]()
    glance = await service.feed.now(job_id)
    while True:
        try:
            running = glance is not None and not glance.state.final
            lines = await log_lines(
                service, job_id, wanted, after=after, limit=_LINES_A_LOOK, follow=running, read=read
            )
            missed, wanted = 0, replace(wanted, tail=None)  # the last ones, and then all that come
        except ClusterError:
            lines, missed = [], missed + 1
        for count, line in enumerate(lines):
            if count % _LINES_A_TURN == 0:
                await asyncio.sleep(0)  # sending does not wait while the connection takes it: others do
            after = (line.attempt, line.number)
            yield ServerSentEvent(
                data=line.model_dump_json(), event="line", id=f"{line.attempt}:{line.number}"
            )
        if len(lines) >= _LINES_A_LOOK:
            continue
        if glance is None or (glance.state.final and not 0 < missed < _MISSED_LOOKS):
            yield _end(glance)
            return
        glance = await service.feed.next(job_id, within_s=_LOG_LOOK_EVERY_S)


def _end(glance: Glance | None) -> ServerSentEvent:
    return ServerSentEvent(data=json.dumps({"state": None if glance is None else glance.state}), event="end")


def _stream(content: AsyncIterator[ServerSentEvent]) -> Response:
    return EventSourceResponse(content, ping=_PING_S)
