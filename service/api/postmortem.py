"""The post-mortem of a failed attempt, as one file."""

from __future__ import annotations

import asyncio
import platform
from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Query, Response
from sqlalchemy import make_url

from service.api import streams
from service.api.bundle import PostMortemFacts, bundle
from service.api.context import Current, Service
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.manage import JobId, existing_job
from service.api.views import event_view, step_view
from service.job_states import AttemptState
from service.orchestrator.ray_jobs import ClusterError
from service.store.attempts import attempts_of
from service.store.events import events_of
from service.store.post_mortems import find_post_mortem
from service.store.steps import last_steps
from service.store.tables import Attempt

router = APIRouter(
    prefix="/api/v1/jobs/{job_id}", tags=["jobs"], responses=responses(404, 422), route_class=UserRoute
)

_LINES = 5000
_EVENTS = 500
_STEPS = 200
_ATTEMPT = (
    *("id", "job_id", "number", "state", "reason", "message", "device", "accelerators", "peak_memory_bytes"),
    *("created_at", "submitted_at", "started_at", "heartbeat_at", "finished_at", "stopped_because"),
)


@router.get(
    "/postmortem",
    response_class=Response,
    responses={200: {"description": "A zip file", "content": {"application/zip": {}}}},
)
async def postmortem(
    job_id: JobId,
    service: Current,
    attempt: Annotated[
        int | None, Query(ge=1, lt=2**31, description="The last one that failed if absent")
    ] = None,
) -> Response:
    """What a failed attempt left: job, plan, programs, last measured slots, who waited for whom, log, events, versions.

    Nothing of it is secret: environments are left out, tokens and passwords replaced.
    """
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        attempts = await attempts_of(session, job_id)
        chosen = _chosen(job_id, attempts, attempt)
        kept = await find_post_mortem(session, chosen.id)
        events = await events_of(session, job_id, after=max(0, job.last_event - _EVENTS), limit=_EVENTS)
        steps = await last_steps(session, job_id, chosen.number, limit=_STEPS)
    facts = PostMortemFacts(
        attempt={name: getattr(chosen, name) for name in _ATTEMPT},
        job=job.spec,
        plan=None if kept is None else kept.plan,
        step=None if kept is None else kept.step,
        slots=None if kept is None else kept.slots,
        steps=[step_view(one).model_dump(mode="json") for one in steps],
        events=[event_view(one).model_dump(mode="json") for one in events],
        log=await _log(service, job_id, chosen.number),
        versions={"slotline": version("slotline"), "python": platform.python_version()},
        secrets=_secrets(service, attempts),
    )
    made = await asyncio.to_thread(bundle, facts)
    name = f"{job_id}-attempt-{chosen.number}-postmortem.zip"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(made, media_type="application/zip", headers=headers)


def _chosen(job_id: str, attempts: list[Attempt], number: int | None) -> Attempt:
    failed = [one for one in attempts if one.attempt_state is AttemptState.FAILED]
    if number is None and failed:
        return failed[-1]
    if found := next((one for one in failed if one.number == number), None):
        return found
    said = (
        f"attempt {number} of job {job_id} has not failed"
        if number
        else f"no attempt of job {job_id} has failed"
    )
    which = f": those that did are {', '.join(str(one.number) for one in failed)}" if failed else ""
    raise ProblemError(404, f"{said}{which}")


async def _log(service: Service, job_id: str, number: int) -> list[str]:
    wanted = streams.LogFilter(attempt=number, search=None, since=None, tail=_LINES)
    try:
        lines = await streams.log_lines(service, job_id, wanted, after=(0, 0))
    except ClusterError as error:  # not kept yet, and Ray is away: the rest is worth having
        return [f"[the log could not be read: {error}]"]
    return [line.text for line in lines]


def _secrets(service: Service, attempts: list[Attempt]) -> list[str]:
    settings = service.settings
    held = [settings.api_token, settings.metrics_token]
    found = [one.get_secret_value() for one in held if one is not None]
    found += [one for one in (*settings.ray_tokens, make_url(settings.sqlalchemy_url).password) if one]
    return [*found, *(one.token for one in attempts)]
