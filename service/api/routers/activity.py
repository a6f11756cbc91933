"""Routes for a job's activity and diagnosis: events, logs, steps, evaluations, plan, timeline, post-mortem, slow steps.

Events and logs also come as server-sent events. Timelines with thousands of slots are serialized in a thread; they also
come as a Chrome trace for Perfetto.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from service.api.dependencies import CurrentService, JobId, RunWhileConnected, UtcTime, json_text
from service.api.errors import responses
from service.api.middleware import UserRoute
from service.api.streams import (
    SSE_MEDIA_TYPE,
    parse_event_id,
    parse_line_place,
    stream_events,
    stream_logs,
    wants_stream,
)
from service.jobs.explain import explain_step
from service.jobs.lifecycle import existing_job
from service.jobs.log_lines import LogFilter, log_lines
from service.jobs.postmortem import read_post_mortem
from service.jobs.timelines import read_plan, read_timeline, timeline_picture, timeline_trace
from service.jobs.views import evaluation_view, event_view, step_view
from service.schemas.activity import EvaluationPage, EventPage, LogPage, StepPage, TimelineView, WhyView
from service.schemas.plans import JobPlanView
from service.store.events import events_of
from service.store.measurements import evaluations_of, steps_of

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
ProfiledStep = Annotated[int | None, Query(ge=0, lt=2**31, description="The last profiled step if absent")]


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
            rows = await events_of(session, job_id, after=begin or 0, limit=limit + 1)
            token = str(rows[limit - 1].number) if len(rows) > limit else None
            return EventPage(items=[event_view(event) for event in rows[:limit]], next_page_token=token)
    last = parse_event_id(last_event_id)
    return stream_events(service, job, after=begin or 0 if last is None else last)


async def _log_filter(
    attempt: Annotated[int | None, Query(ge=1, lt=2**31, description="Only this attempt")] = None,
    tail: Annotated[int | None, Query(ge=1, le=5000, description="Only the last lines, this many")] = None,
    since: Annotated[UtcTime | None, Query(description="Only lines written from this time on")] = None,
    search: Annotated[
        str | None, Query(min_length=1, max_length=200, description="Only lines with this text, in any case")
    ] = None,
) -> LogFilter:
    return LogFilter(attempt=attempt, search=search, since=since, tail=tail)


@router.get("/logs", response_model=LogPage, responses={**_SSE_RESPONSES, **responses(503)})
async def logs(
    job_id: JobId,
    request: Request,
    service: CurrentService,
    wanted: Annotated[LogFilter, Depends(_log_filter)],
    limit: PageLimit = 1000,
    page_token: LogToken = None,
    last_event_id: LastEventId = None,
) -> Any:
    """The drivers' logs, line by line; with `Accept: text/event-stream` until the job ends.

    Of each log its last MiB; the numbers of the lines say how many came before.
    """
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
    if wants_stream(request):
        if last_event_id:  # a stream that goes on: the last lines were sent before it broke
            wanted = replace(wanted, tail=None)
        return stream_logs(service, job, wanted, after=parse_line_place(last_event_id or page_token))
    after = parse_line_place(page_token)
    lines = await log_lines(service, job_id, wanted, after=after, limit=limit + 1)
    if wanted.tail is not None:
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
    async with service.database.read() as session:
        await existing_job(session, job_id)
        rows = await steps_of(
            session,
            job_id,
            after=-1 if after is None else after,
            behind=_parse_step_token(page_token),
            limit=limit + 1,
        )
    token = f"{rows[limit - 1].attempt}:{rows[limit - 1].step}" if len(rows) > limit else None
    return StepPage(items=[step_view(step) for step in rows[:limit]], next_page_token=token)


@router.get("/evaluations")
async def evaluations(
    job_id: JobId, service: CurrentService, limit: PageLimit = 1000, page_token: StepToken = None
) -> EvaluationPage:
    """Losses and metrics on the job's evaluation data, measured between steps; in the order of `steps`."""
    async with service.database.read() as session:
        await existing_job(session, job_id)
        rows = await evaluations_of(session, job_id, behind=_parse_step_token(page_token), limit=limit + 1)
    token = f"{rows[limit - 1].attempt}:{rows[limit - 1].step}" if len(rows) > limit else None
    return EvaluationPage(items=[evaluation_view(row) for row in rows[:limit]], next_page_token=token)


def _parse_step_token(token: str | None) -> tuple[int, int]:
    """Attempt and step behind which a page begins."""
    if token is None:
        return 0, -1
    attempt, _, step = token.partition(":")
    return int(attempt), int(step)


@router.get("/plan", response_model=JobPlanView)
async def plan(job_id: JobId, service: CurrentService) -> Response:
    """The first module of each stage, the specification that was planned, the plan, and its calibration."""
    return json_text(await read_plan(service, job_id))


@router.get(
    "/timeline",
    response_model=TimelineView,
    responses={200: {"description": "With format=chrome: a trace for Perfetto; with format=svg: a picture"}},
)
async def timeline(
    job_id: JobId,
    service: CurrentService,
    step: ProfiledStep = None,
    format: Literal["json", "chrome", "svg"] = "json",
) -> Any:
    """Planned and measured slots of one step."""
    view = await read_timeline(service, job_id, step)
    if format == "json":
        return json_text(await asyncio.to_thread(view.model_dump_json))
    if format == "svg":
        return Response(await asyncio.to_thread(timeline_picture, view), media_type="image/svg+xml")
    trace = await asyncio.to_thread(timeline_trace, view)
    return json_text(trace, file_name=f"{job_id}-step-{view.step}.json")


postmortem_router = APIRouter(
    prefix="/api/v1/jobs/{job_id}", tags=["jobs"], responses=responses(404, 422), route_class=UserRoute
)


@postmortem_router.get(
    "/postmortem",
    response_class=Response,
    responses={200: {"description": "A zip file", "content": {"application/zip": {}}}},
)
async def postmortem(
    job_id: JobId,
    service: CurrentService,
    attempt: Annotated[
        int | None, Query(ge=1, lt=2**31, description="The last one that failed if absent")
    ] = None,
) -> Response:
    """The traces of a failed attempt: job, plan, programs, last measured slots, who waited for whom, log, events, versions.

    Nothing of it is secret: environments are left out, tokens and passwords replaced.
    """
    number, content = await read_post_mortem(service, job_id, attempt)
    name = f"{job_id}-attempt-{number}-postmortem.zip"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type="application/zip", headers=headers)


why_router = APIRouter(
    prefix="/api/v1/jobs/{job_id}", tags=["jobs"], responses=responses(404, 422, 503), route_class=UserRoute
)


@why_router.get("/why", response_model=WhyView)
async def why(
    job_id: JobId, service: CurrentService, run: RunWhileConnected, step: ProfiledStep = None
) -> Response:
    """Causes of waiting in a step, and the changes that would shorten it most, by the job's plan and the measured slots
    of the step. Before a step was profiled the plan itself is explained."""
    return json_text(await explain_step(service, job_id, step, run))
