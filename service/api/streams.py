"""Server-sent events of a job: its event log and its driver logs, until the job ends.

Streams resume by Last-Event-ID, and hold no database session between two polls. A finished job whose events were all
seen is answered with 204, which tells a browser not to come back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from fastapi import Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from service.jobs.log_lines import LinePlace, LogFilter, log_lines
from service.jobs.service import Service
from service.jobs.views import event_view
from service.orchestrator.ray.jobs_api import ClusterError
from service.store.events import JobVersion
from service.store.tables import EventRow, JobRow

SSE_MEDIA_TYPE = "text/event-stream"
_EVENT_POLL_S = 0.4
_LOG_POLL_S = 1.0
_PING_S = 15
_MAX_MISSED_POLLS = 30
_LINES_PER_POLL = 500
_LINES_PER_YIELD = 50


def wants_stream(request: Request) -> bool:
    return SSE_MEDIA_TYPE in request.headers.get("accept", "")


def parse_event_id(text: str | None) -> int | None:
    """The number in a Last-Event-ID of the event log; None when there is none or it is not ours."""
    return int(text) if text and text.isdecimal() and len(text) < 10 else None


def parse_line_place(text: str | None) -> LinePlace:
    """The place in a Last-Event-ID or page token of the log; the beginning when it is not ours."""
    attempt, _, line = (text or "").partition(":")
    return (parse_event_id(attempt) or 0, parse_event_id(line) or 0)


def stream_events(service: Service, job: JobRow, *, after: int) -> Response:
    if job.job_state.final and after >= job.last_event:
        return Response(status_code=204)
    return _sse_response(_event_messages(service, job.id, after))


def stream_logs(service: Service, job: JobRow, wanted: LogFilter, *, after: LinePlace) -> Response:
    return _sse_response(_log_messages(service, job.id, wanted, after))


async def _event_messages(service: Service, job_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
    version = await service.feed.now(job_id)
    while True:
        events: Sequence[EventRow] = ()
        if version is not None and version.last_event > after:
            events = await service.feed.events(job_id, after=after)
        for event in events:
            after = event.number
            yield ServerSentEvent(data=event_view(event).model_dump_json(), event=event.kind, id=str(after))
        if version is None or (version.state.final and after >= version.last_event):
            yield _end_message(version)
            return
        if not events or after >= version.last_event:
            version = await service.feed.next(job_id, within_s=_EVENT_POLL_S)


async def _log_messages(
    service: Service, job_id: str, wanted: LogFilter, after: LinePlace
) -> AsyncIterator[ServerSentEvent]:
    missed, read = 0, set[str]()
    version = await service.feed.now(job_id)
    while True:
        try:
            running = version is not None and not version.state.final
            lines = await log_lines(
                service, job_id, wanted, after=after, limit=_LINES_PER_POLL, follow=running, read=read
            )
            missed, wanted = 0, replace(wanted, tail=None)  # the last ones, and then all that come
        except ClusterError:
            lines, missed = [], missed + 1
        for count, line in enumerate(lines):
            if count % _LINES_PER_YIELD == 0:
                await asyncio.sleep(0)  # sending does not wait while the connection takes it: others do
            after = (line.attempt, line.number)
            yield ServerSentEvent(
                data=line.model_dump_json(), event="line", id=f"{line.attempt}:{line.number}"
            )
        if len(lines) >= _LINES_PER_POLL:
            continue
        if version is None or (version.state.final and not 0 < missed < _MAX_MISSED_POLLS):
            yield _end_message(version)
            return
        version = await service.feed.next(job_id, within_s=_LOG_POLL_S)


def _end_message(version: JobVersion | None) -> ServerSentEvent:
    return ServerSentEvent(
        data=json.dumps({"state": None if version is None else version.state}), event="end"
    )


def _sse_response(content: AsyncIterator[ServerSentEvent]) -> Response:
    return EventSourceResponse(content, ping=_PING_S)
