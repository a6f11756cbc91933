"""What happened in a job: events, logs, steps, plan, timeline. Events and logs also as live streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response

from service.api import streams
from service.api.context import Current, Service
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.manage import JobId, existing_job
from service.api.schemas import (
    EvaluationPage,
    EventPage,
    JobPlanView,
    LogPage,
    SlotView,
    StepPage,
    TimelineSide,
    TimelineView,
)
from service.api.times import Time
from service.api.trace import chrome_trace
from service.api.views import evaluation_view, event_view, step_view
from service.store.evaluations import evaluations_of
from service.store.events import events_of
from service.store.plans import find_plan
from service.store.steps import find_step, steps_of
from service.store.tables import Job, JobPlan, Step, Timeline
from service.store.timelines import SlotRecord, find_timeline, profiled_steps

router = APIRouter(
    prefix="/api/v1/jobs/{job_id}", tags=["jobs"], responses=responses(404, 422), route_class=UserRoute
)

Limit = Annotated[int, Query(ge=1, le=5000)]
Number = Annotated[int | None, Query(ge=0, lt=2**31)]
PageToken = Annotated[str | None, Query(pattern=r"^\d{1,9}$")]
StepToken = Annotated[
    str | None,
    Query(pattern=r"^\d{1,9}:\d{1,9}$", description="attempt:step of the last step seen"),
]
LogToken = Annotated[str | None, Query(pattern=r"^\d{1,9}:\d{1,9}$")]
LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", description="Go on after this event")]
_STREAM = {200: {"content": {streams.MEDIA_TYPE: {"schema": {"type": "string"}}}}}
_AFTER_TIMELINE = ("REDUCE", "STEP")


@router.get("/events", response_model=EventPage, responses=_STREAM)
async def events(
    job_id: JobId,
    request: Request,
    service: Current,
    after: Number = None,
    limit: Limit = 500,
    page_token: PageToken = None,
    last_event_id: LastEventId = None,
) -> Any:
    """The job's event log; with `Accept: text/event-stream` it goes on until the job ends."""
    begin = after if page_token is None else int(page_token)
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        if not streams.wanted(request):
            found = await events_of(session, job_id, after=begin or 0, limit=limit + 1)
            token = str(found[limit - 1].number) if len(found) > limit else None
            return EventPage(items=[event_view(one) for one in found[:limit]], next_page_token=token)
    last = streams.last_number(last_event_id)
    return streams.events(service, job, after=begin or 0 if last is None else last)


@router.get("/logs", response_model=LogPage, responses={**_STREAM, **responses(503)})
async def logs(
    job_id: JobId,
    request: Request,
    service: Current,
    attempt: Annotated[int | None, Query(ge=1, lt=2**31, description="Only this attempt")] = None,
    tail: Annotated[int | None, Query(ge=1, le=5000, description="Only the last lines, so many")] = None,
    since: Annotated[Time | None, Query(description="Only lines written from this time on")] = None,
    search: Annotated[
        str | None, Query(min_length=1, max_length=200, description="Only lines with this text, in any case")
    ] = None,
    limit: Limit = 1000,
    page_token: LogToken = None,
    last_event_id: LastEventId = None,
) -> Any:
    """The drivers' logs, line by line; with `Accept: text/event-stream` until the job ends.

    Of each log its last SLOTLINE_LOG_LIMIT_BYTES; the numbers of the lines say how many came before.
    """
    wanted = streams.LogFilter(attempt=attempt, search=search, since=since, tail=tail)
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
    if streams.wanted(request):
        if last_event_id:  # a stream that goes on: the last lines were sent before it broke
            wanted = replace(wanted, tail=None)
        return streams.logs(service, job, wanted, after=streams.last_line(last_event_id or page_token))
    after = streams.last_line(page_token)
    lines = await streams.log_lines(service, job_id, wanted, after=after, limit=limit + 1)
    if tail is not None:
        return LogPage(items=lines, next_page_token=None)
    token = f"{lines[limit - 1].attempt}:{lines[limit - 1].number}" if len(lines) > limit else None
    return LogPage(items=lines[:limit], next_page_token=token)


@router.get("/steps")
async def steps(
    job_id: JobId,
    service: Current,
    after: Annotated[int | None, Query(ge=0, lt=2**31, description="Only steps above this one")] = None,
    limit: Limit = 1000,
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
    job_id: JobId, service: Current, limit: Limit = 1000, page_token: StepToken = None
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
async def plan(job_id: JobId, service: Current) -> Response:
    """Where the stages begin, the specification that was planned, and the plan."""
    return Response((await _plan(service, job_id)).body, media_type="application/json")


@router.get(
    "/timeline",
    response_model=TimelineView,
    responses={200: {"description": "With format=chrome: a trace for chrome://tracing or Perfetto"}},
)
async def timeline(
    job_id: JobId,
    service: Current,
    step: Annotated[int | None, Query(ge=0, lt=2**31, description="The last profiled step if absent")] = None,
    format: Literal["json", "chrome"] = "json",
) -> Any:
    """Planned and measured slots of one step."""
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        stored = await find_plan(session, job_id)
        profiled = await profiled_steps(session, job_id)
        measured = await find_timeline(session, job_id, step)
        record = await find_step(session, job_id, measured[0].step) if measured else None
    if step is not None and measured is None:
        raise ProblemError(404, f"step {step} of job {job_id} was not profiled: {_choose(profiled)}")
    if stored is None and measured is None:
        raise ProblemError(404, f"job {job_id} has neither a plan nor a profiled step{_no_more_or_yet(job)}")
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
        planned=None if stored is None else _planned(stored.body),
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


async def _plan(service: Service, job_id: str) -> JobPlan:
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        found = await find_plan(session, job_id)
    if found is None:
        raise ProblemError(404, f"job {job_id} has no plan{_no_more_or_yet(job)}")
    return found


def _no_more_or_yet(job: Job) -> str:
    if job.job_state.final:
        return ": it ended before it was planned, or they were removed since; its events say so"
    return " yet: it is planned after its layers are profiled"


def _planned(body: str) -> TimelineSide:
    plan = json.loads(body)["plan"]
    return TimelineSide(makespan_s=plan["makespan_s"], slots=plan["slots"])


def _makespan(slots: Sequence[SlotView], record: Step | None) -> float:
    """As the driver reported it, else from the first start to the last end before REDUCE and STEP."""
    if record is not None and record.makespan_s is not None:
        return record.makespan_s
    timed = [slot for slot in slots if slot.action not in _AFTER_TIMELINE]
    return max((s.end_s for s in timed), default=0.0) - min((s.start_s for s in timed), default=0.0)


def _choose(profiled: Sequence[int]) -> str:
    if not profiled:
        return "no step was yet"
    return f"choose one of {', '.join(map(str, profiled[:20]))}{', ...' if len(profiled) > 20 else ''}"
