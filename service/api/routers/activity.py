"""Routes for a job's activity: events, logs, steps, evaluations, plan and timeline, also as live streams.

Streams are server-sent events, resumable by Last-Event-ID, and end with the job. A stream holds no database session
between two polls. A finished job whose events were all seen is answered with 204, which tells a browser not to come
back. Timelines with thousands of slots are serialized in a thread; they also come as a Chrome trace for Perfetto.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from service.api.dependencies import CurrentService, Service, UtcTime
from service.api.errors import ProblemError, responses
from service.api.middleware import UserRoute
from service.api.routers.jobs import JobId, existing_job
from service.api.views import evaluation_view, event_view, step_view
from service.orchestrator.ray.jobs_api import ClusterError
from service.scheduler.views.chrome import NANOSECOND_US, TransferArrows
from service.schemas.jobs import (
    EvaluationPage,
    EventPage,
    JobPlanView,
    LogLine,
    LogPage,
    SlotView,
    StepPage,
    TimelineSide,
    TimelineView,
)
from service.store.attempts import log_locations
from service.store.events import JobVersion, events_of
from service.store.measurements import (
    SlotRecord,
    evaluations_of,
    find_step,
    find_timeline,
    profiled_steps,
    steps_of,
)
from service.store.plans import find_job_plan
from service.store.tables import Event, Job, JobPlan, Step, Timeline

SSE_MEDIA_TYPE = "text/event-stream"
_EVENT_POLL_S = 0.4
_LOG_POLL_S = 1.0
_PING_S = 15
_MAX_MISSED_POLLS = 30
_LINES_PER_POLL = 500
_LINES_PER_YIELD = 50

LinePlace = tuple[int, int]
"""Number of the attempt, number of the line."""


def wants_stream(request: Request) -> bool:
    return SSE_MEDIA_TYPE in request.headers.get("accept", "")


def parse_event_id(text: str | None) -> int | None:
    """The number in a Last-Event-ID of the event log; None when there is none or it is not ours."""
    return int(text) if text and text.isdecimal() and len(text) < 10 else None


def parse_line_place(text: str | None) -> LinePlace:
    """The place in a Last-Event-ID or page token of the log; the beginning when it is not ours."""
    attempt, _, line = (text or "").partition(":")
    return (parse_event_id(attempt) or 0, parse_event_id(line) or 0)


def stream_events(service: Service, job: Job, *, after: int) -> Response:
    if job.job_state.final and after >= job.last_event:
        return Response(status_code=204)
    return _sse_response(_event_messages(service, job.id, after))


def stream_logs(service: Service, job: Job, wanted: LogFilter, *, after: LinePlace) -> Response:
    return _sse_response(_log_messages(service, job.id, wanted, after))


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
        places = await log_locations(session, job_id)
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
        for number, text in _filtered_lines(found, wanted, place.created_at):
            lines.append(LogLine(attempt=place.number, number=number, text=text))
            if wanted.tail is None and limit is not None and len(lines) >= limit:
                return list(lines)
        if place.stored and read is not None:
            read.add(place.attempt_id)
    return list(lines)


def _filtered_lines(
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
    """The UTC time at the begin of a line of a driver, as worker/contract/logs.py writes it."""
    line = line.removeprefix('{"time": "')
    if not line[:1].isdigit() or line[19:20] != "." or line[23:24] != "Z":
        return None
    try:
        return datetime.fromisoformat(line[:24])
    except ValueError:
        return None


async def _event_messages(service: Service, job_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
    glance = await service.feed.now(job_id)
    while True:
        found: Sequence[Event] = ()
        if glance is not None and glance.last_event > after:
            found = await service.feed.events(job_id, after=after)
        for event in found:
            after = event.number
            yield ServerSentEvent(data=event_view(event).model_dump_json(), event=event.kind, id=str(after))
        if glance is None or (glance.state.final and after >= glance.last_event):
            yield _end_message(glance)
            return
        if not found or after >= glance.last_event:
            glance = await service.feed.next(job_id, within_s=_EVENT_POLL_S)


async def _log_messages(
    service: Service, job_id: str, wanted: LogFilter, after: LinePlace
) -> AsyncIterator[ServerSentEvent]:
    missed, read = 0, set[str]()
    glance = await service.feed.now(job_id)
    while True:
        try:
            running = glance is not None and not glance.state.final
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
        if glance is None or (glance.state.final and not 0 < missed < _MAX_MISSED_POLLS):
            yield _end_message(glance)
            return
        glance = await service.feed.next(job_id, within_s=_LOG_POLL_S)


def _end_message(glance: JobVersion | None) -> ServerSentEvent:
    return ServerSentEvent(data=json.dumps({"state": None if glance is None else glance.state}), event="end")


def _sse_response(content: AsyncIterator[ServerSentEvent]) -> Response:
    return EventSourceResponse(content, ping=_PING_S)


_MICROSECONDS = 1e6


def chrome_trace(view: TimelineView) -> dict[str, Any]:
    """One process a side and mesh, one thread a lane, an arrow for each transfer; times in microseconds from the
    step's start."""
    events: list[dict[str, Any]] = []
    arrows = TransferArrows()
    number = 0
    for side, timeline in (("planned", view.planned), ("measured", view.measured)):
        slots = [] if timeline is None else timeline.slots
        for mesh in dict.fromkeys(slot.mesh for slot in slots):
            number += 1
            of_mesh = [slot for slot in slots if slot.mesh == mesh]
            events += _mesh_events(number, f"{side} {mesh}", of_mesh, side, arrows)
    events += arrows.events()
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "job": view.job_id,
            "step": view.step,
            "started_at": view.started_at,
            "uncertainty_s": view.uncertainty_s,
        },
    }


def _mesh_events(
    number: int, name: str, slots: list[SlotView], side: str, arrows: TransferArrows
) -> list[dict[str, Any]]:
    lanes = {
        lane: i for i, lane in enumerate(sorted({s.lane for s in slots}, key=lambda x: (x != "compute", x)))
    }
    events = [
        _name_event("process_name", number, 0, name),
        _sort_event("process_sort_index", number, 0, number),
    ]
    for lane, thread in lanes.items():
        events.append(_name_event("thread_name", number, thread, lane))
        events.append(_sort_event("thread_sort_index", number, thread, thread))
    for slot in slots:
        label = "" if slot.microbatch is None else f" {slot.microbatch}"
        start, length = slot.start_s * _MICROSECONDS, (slot.end_s - slot.start_s) * _MICROSECONDS
        if slot.peer_mesh is not None:
            length = max(length, NANOSECOND_US)
        arrows.add(
            side,
            slot.mesh,
            slot.action,
            slot.peer_mesh,
            slot.edge,
            slot.microbatch,
            process=number,
            thread=lanes[slot.lane],
            start=start,
            end=start + length,
        )
        events.append(
            {
                "name": f"{slot.action}{label}",
                "cat": slot.action,
                "ph": "X",
                "pid": number,
                "tid": lanes[slot.lane],
                "ts": start,
                "dur": length,
                "args": slot.model_dump(
                    include={"stage", "peer_stage", "peer_mesh", "edge", "microbatch"}, exclude_none=True
                ),
            }
        )
    return events


def _name_event(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _sort_event(kind: str, process: int, thread: int, index: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"sort_index": index}}


router = APIRouter(
    prefix="/api/v1/jobs/{job_id}", tags=["jobs"], responses=responses(404, 422), route_class=UserRoute
)

PageLimit = Annotated[int, Query(ge=1, le=5000)]
EventNumber = Annotated[int | None, Query(ge=0, lt=2**31)]
PageToken = Annotated[str | None, Query(pattern=r"^\d{1,9}$")]
StepToken = Annotated[
    str | None,
    Query(pattern=r"^\d{1,9}:\d{1,9}$", description="attempt:step of the last step seen"),
]
LogToken = Annotated[str | None, Query(pattern=r"^\d{1,9}:\d{1,9}$")]
LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", description="Go on after this event")]
_SSE_RESPONSES = {200: {"content": {SSE_MEDIA_TYPE: {"schema": {"type": "string"}}}}}
_UPDATE_ACTIONS = ("REDUCE", "STEP")


@router.get("/events", response_model=EventPage, responses=_SSE_RESPONSES)
async def events(
    job_id: JobId,
    request: Request,
    service: CurrentService,
    after: EventNumber = None,
    limit: PageLimit = 500,
    page_token: PageToken = None,
    last_event_id: LastEventId = None,
) -> Any:
    """The job's event log; with `Accept: text/event-stream` it goes on until the job ends."""
    begin = after if page_token is None else int(page_token)
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        if not wants_stream(request):
            found = await events_of(session, job_id, after=begin or 0, limit=limit + 1)
            token = str(found[limit - 1].number) if len(found) > limit else None
            return EventPage(items=[event_view(one) for one in found[:limit]], next_page_token=token)
    last = parse_event_id(last_event_id)
    return stream_events(service, job, after=begin or 0 if last is None else last)


@router.get("/logs", response_model=LogPage, responses={**_SSE_RESPONSES, **responses(503)})
async def logs(
    job_id: JobId,
    request: Request,
    service: CurrentService,
    attempt: Annotated[int | None, Query(ge=1, lt=2**31, description="Only this attempt")] = None,
    tail: Annotated[int | None, Query(ge=1, le=5000, description="Only the last lines, so many")] = None,
    since: Annotated[UtcTime | None, Query(description="Only lines written from this time on")] = None,
    search: Annotated[
        str | None, Query(min_length=1, max_length=200, description="Only lines with this text, in any case")
    ] = None,
    limit: PageLimit = 1000,
    page_token: LogToken = None,
    last_event_id: LastEventId = None,
) -> Any:
    """The drivers' logs, line by line; with `Accept: text/event-stream` until the job ends.

    Of each log its last SLOTLINE_LOG_LIMIT_BYTES; the numbers of the lines say how many came before.
    """
    wanted = LogFilter(attempt=attempt, search=search, since=since, tail=tail)
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
    if wants_stream(request):
        if last_event_id:  # a stream that goes on: the last lines were sent before it broke
            wanted = replace(wanted, tail=None)
        return stream_logs(service, job, wanted, after=parse_line_place(last_event_id or page_token))
    after = parse_line_place(page_token)
    lines = await log_lines(service, job_id, wanted, after=after, limit=limit + 1)
    if tail is not None:
        return LogPage(items=lines, next_page_token=None)
    token = f"{lines[limit - 1].attempt}:{lines[limit - 1].number}" if len(lines) > limit else None
    return LogPage(items=lines[:limit], next_page_token=token)


@router.get("/steps")
async def steps(
    job_id: JobId,
    service: CurrentService,
    after: Annotated[int | None, Query(ge=0, lt=2**31, description="Only steps above this one")] = None,
    limit: PageLimit = 1000,
    page_token: StepToken = None,
) -> StepPage:
    """Loss and times of the job's steps, by attempt, then step: what a resumed attempt repeats comes last."""
    attempt, _, step = (page_token or "0:0").partition(":")
    behind = (int(attempt), int(step)) if page_token else (0, -1)
    async with service.database.read() as session:
        await existing_job(session, job_id)
        found = await steps_of(
            session, job_id, after=-1 if after is None else after, behind=behind, limit=limit + 1
        )
    token = f"{found[limit - 1].attempt}:{found[limit - 1].step}" if len(found) > limit else None
    return StepPage(items=[step_view(step) for step in found[:limit]], next_page_token=token)


@router.get("/evaluations")
async def evaluations(
    job_id: JobId, service: CurrentService, limit: PageLimit = 1000, page_token: StepToken = None
) -> EvaluationPage:
    """What was measured between steps on the job's evaluation data; in the order of `steps`."""
    attempt, _, step = (page_token or "0:0").partition(":")
    behind = (int(attempt), int(step)) if page_token else (0, -1)
    async with service.database.read() as session:
        await existing_job(session, job_id)
        found = await evaluations_of(session, job_id, behind=behind, limit=limit + 1)
    token = f"{found[limit - 1].attempt}:{found[limit - 1].step}" if len(found) > limit else None
    return EvaluationPage(items=[evaluation_view(one) for one in found[:limit]], next_page_token=token)


@router.get("/plan", response_model=JobPlanView)
async def plan(job_id: JobId, service: CurrentService) -> Response:
    """Where the stages begin, the specification that was planned, and the plan."""
    return Response((await _stored_plan(service, job_id)).body, media_type="application/json")


@router.get(
    "/timeline",
    response_model=TimelineView,
    responses={200: {"description": "With format=chrome: a trace for chrome://tracing or Perfetto"}},
)
async def timeline(
    job_id: JobId,
    service: CurrentService,
    step: Annotated[int | None, Query(ge=0, lt=2**31, description="The last profiled step if absent")] = None,
    format: Literal["json", "chrome"] = "json",
) -> Any:
    """Planned and measured slots of one step."""
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        stored = await find_job_plan(session, job_id)
        profiled = await profiled_steps(session, job_id)
        measured = await find_timeline(session, job_id, step)
        record = await find_step(session, job_id, measured[0].step) if measured else None
    if step is not None and measured is None:
        raise ProblemError(
            404, f"step {step} of job {job_id} was not profiled: {_profiled_steps_hint(profiled)}"
        )
    if stored is None and measured is None:
        raise ProblemError(404, f"job {job_id} has neither a plan nor a profiled step{_why_no_plan(job)}")
    return await asyncio.to_thread(_timeline_response, job_id, stored, measured, record, profiled, format)


def _timeline_response(
    job_id: str,
    stored: JobPlan | None,
    measured: tuple[Timeline, list[SlotRecord]] | None,
    record: Step | None,
    profiled: Sequence[int],
    format: str,
) -> Response:
    """Thousands of slots take a while to write down: not in the event loop."""
    view = TimelineView(
        job_id=job_id,
        step=measured[0].step if measured else None,
        started_at=measured[0].started_at if measured else None,
        uncertainty_s=measured[0].uncertainty_s if measured else None,
        planned=None if stored is None else _planned_side(stored.body),
        measured=None,
        profiled_steps=list(profiled),
    )
    if measured:
        slots = [SlotView(**slot._asdict()) for slot in measured[1]]
        view.measured = TimelineSide(makespan_s=_makespan(slots, record), slots=slots)
    if format == "json":
        return Response(view.model_dump_json(), media_type="application/json")
    headers = {"Content-Disposition": f'attachment; filename="{job_id}-step-{view.step}.json"'}
    return Response(json.dumps(chrome_trace(view)), media_type="application/json", headers=headers)


async def _stored_plan(service: Service, job_id: str) -> JobPlan:
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        found = await find_job_plan(session, job_id)
    if found is None:
        raise ProblemError(404, f"job {job_id} has no plan{_why_no_plan(job)}")
    return found


def _why_no_plan(job: Job) -> str:
    if job.job_state.final:
        return ": it ended before it was planned, or they were removed since; its events say so"
    return " yet: it is planned after its layers are profiled"


def _planned_side(body: str) -> TimelineSide:
    plan = json.loads(body)["plan"]
    return TimelineSide(makespan_s=plan["makespan_s"], slots=plan["slots"])


def _makespan(slots: Sequence[SlotView], record: Step | None) -> float:
    """As the driver reported it, else from the first start to the last end before REDUCE and STEP."""
    if record is not None and record.makespan_s is not None:
        return record.makespan_s
    timed = [slot for slot in slots if slot.action not in _UPDATE_ACTIONS]
    return max((s.end_s for s in timed), default=0.0) - min((s.start_s for s in timed), default=0.0)


def _profiled_steps_hint(profiled: Sequence[int]) -> str:
    if not profiled:
        return "no step was yet"
    return f"choose one of {', '.join(map(str, profiled[:20]))}{', ...' if len(profiled) > 20 else ''}"
