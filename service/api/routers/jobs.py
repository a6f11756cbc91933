"""Routes to submit, list, read, change, cancel and retry jobs.

A repeated Idempotency-Key with the same body answers with the job that it made before.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Response

from service.api.auth import Caller
from service.api.dependencies import CurrentService, JobId, UtcTime
from service.api.errors import responses
from service.api.middleware import UserRoute
from service.jobs import lifecycle, submit
from service.jobs.problems import ProblemError
from service.jobs.views import job_summary
from service.schemas.jobs import JobChange, JobPage, JobView
from service.spec.job import IDEMPOTENCY_KEY_PATTERN, OWNER_PATTERN, SubmittedJob
from service.spec.names import JOB_ID_PATTERN, NAME_PATTERN
from service.spec.states import JobState
from service.spec.values import LABEL_NAME_PATTERN, LABEL_VALUE_PATTERN, MAX_LABELS
from service.store import jobs as store
from service.store.jobs import JobFilter, LabelFilter, PageKey
from service.store.tables import JobRow

_LABEL_MAX_CHARS = 2 * 63 + 1
router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=UserRoute)
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", pattern=IDEMPOTENCY_KEY_PATTERN, description="The same key submits only once"
    ),
]


async def _job_filter(
    state: Annotated[
        list[JobState] | None, Query(max_length=len(JobState), description="One of these states")
    ] = None,
    name: Annotated[str | None, Query(pattern=NAME_PATTERN, max_length=100)] = None,
    label: Annotated[
        list[Annotated[str, Query(max_length=_LABEL_MAX_CHARS)]] | None,
        Query(max_length=MAX_LABELS, description="name=value, or name for any value; all of them"),
    ] = None,
    since: Annotated[UtcTime | None, Query(description="Submitted then or later, with its zone")] = None,
    until: Annotated[UtcTime | None, Query(description="Submitted before, with its zone")] = None,
    project: Annotated[str | None, Query(pattern=NAME_PATTERN, max_length=100)] = None,
) -> JobFilter:
    return JobFilter(
        states=state or (),
        name=name,
        labels=[_label_filter(text) for text in label or ()],
        since=since,
        until=until,
        project=project,
    )


def _label_filter(text: str) -> LabelFilter:
    name, equals, value = text.partition("=")
    if not re.fullmatch(LABEL_NAME_PATTERN, name) or not re.fullmatch(LABEL_VALUE_PATTERN, value):
        message = f"label {text!r} is no label: write name=value, or the name alone"
        raise ProblemError(422, message, errors=[{"field": "label", "value": text, "message": message}])
    return LabelFilter(name, value if equals else None)


JobFilterQuery = Annotated[JobFilter, Depends(_job_filter)]


@router.post("", status_code=201, responses=responses(403, 409, 422))
async def submit_job(
    spec: SubmittedJob,
    caller: Caller,
    service: CurrentService,
    response: Response,
    idempotency_key: IdempotencyKey = None,
    traceparent: Annotated[
        str | None, Header(description="W3C trace context of the caller: the job's logs carry its trace")
    ] = None,
) -> JobView:
    """Queue a job. With an Idempotency-Key that the caller has used, and the same body, its job is answered again."""
    job = await submit.submit_job(
        service, spec, caller, idempotency_key=idempotency_key, traceparent=traceparent
    )
    response.headers["Location"] = f"/api/v1/jobs/{job.id}"
    return job


@router.get("", responses=responses(422))
async def read_jobs(
    caller: Caller,
    service: CurrentService,
    wanted: JobFilterQuery,
    queue: Annotated[str | None, Query(pattern=NAME_PATTERN, max_length=100)] = None,
    owner: Annotated[
        str | None, Query(max_length=200, pattern=OWNER_PATTERN, description="Only this principal's jobs")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    page_token: Annotated[str | None, Query(max_length=200)] = None,
) -> JobPage:
    """Jobs of the caller's projects, newest first; pass `next_page_token` on to see more."""
    after = None if page_token is None else _parse_page_token(page_token)
    async with service.database.read() as session:
        jobs = await store.list_jobs(
            session,
            queue=queue,
            owner=owner,
            limit=limit + 1,
            after=after,
            wanted=wanted,
            projects=caller.visible_projects,
        )
    token = _page_token(jobs[limit - 1]) if len(jobs) > limit else None
    return JobPage(items=[job_summary(job) for job in jobs[:limit]], next_page_token=token)


@router.get("/{job_id}", responses=responses(404, 422))
async def read_job(job_id: JobId, service: CurrentService) -> JobView:
    """State, reason, attempts and progress of a job."""
    return await lifecycle.read_job(service, job_id)


@router.post("/{job_id}/cancel", status_code=202, responses=responses(404, 409, 422))
async def cancel_job(job_id: JobId, caller: Caller, service: CurrentService) -> JobView:
    """End a job: at once when it waits, else by way of its driver."""
    return await lifecycle.cancel_job(service, job_id, caller)


@router.post("/{job_id}/retry", status_code=202, responses=responses(403, 404, 409, 422))
async def retry_job(job_id: JobId, caller: Caller, service: CurrentService) -> JobView:
    """Queue a failed or cancelled job again, with its retries as new, from its last checkpoint."""
    return await lifecycle.retry_job(service, job_id, caller)


@router.patch("/{job_id}", responses=responses(403, 404, 409, 422))
async def change_job(job_id: JobId, body: JobChange, caller: Caller, service: CurrentService) -> JobView:
    """Move a job that waits to another queue or priority; in its new line it is as old as it was in the old one. One that
    has begun stays on its cluster. One that trains with other than its new `meshes` saves a checkpoint and goes on with
    these."""
    return await lifecycle.change_job(service, job_id, caller, body)


def _page_token(job: JobRow) -> str:
    return urlsafe_b64encode(json.dumps([job.created_at.isoformat(), job.id]).encode()).decode()


def _parse_page_token(token: str) -> PageKey:
    try:
        created_at, job_id = json.loads(urlsafe_b64decode(token))
        if not re.fullmatch(JOB_ID_PATTERN, job_id):
            raise ValueError(job_id)
        return PageKey(datetime.fromisoformat(created_at).astimezone(UTC), job_id)
    except (ValueError, TypeError, OverflowError):
        raise ProblemError(
            422,
            f"page_token {token!r} is not one that this server gave: leave it out to begin at the first page",
        ) from None
