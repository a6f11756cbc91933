"""Submit, list, read, cancel and retry jobs."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Response
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from service.api.context import Current, Service
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.job_filters import Wanted
from service.api.problem_codes import Code
from service.api.schemas import JobPage, JobView
from service.api.views import job_summary, job_view
from service.jobspec import JOB_ID_PATTERN, KEY_PATTERN, NAME_PATTERN, PACKAGE_PREFIX, JobSpec
from service.settings import Settings
from service.store import jobs as store
from service.store.attempts import attempts_of
from service.store.database import utc_now
from service.store.jobs import PageKey
from service.store.packages import find_package
from service.store.tables import Job

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=UserRoute)
_ABSOLUTE = re.compile(r"/|~/|[a-z][a-z0-9+.-]*:/")

JobId = Annotated[str, Path(pattern=JOB_ID_PATTERN, description="A job's id, e.g. job-k3j9x2abcd")]
IdempotencyKey = Annotated[
    str | None,
    Header(alias="Idempotency-Key", pattern=KEY_PATTERN, description="The same key submits only once"),
]


@router.post("", status_code=201, responses=responses(409, 422))
async def submit(
    spec: JobSpec, service: Current, response: Response, idempotency_key: IdempotencyKey = None
) -> JobView:
    """Queue a job. With a used Idempotency-Key and the same body, the job of that key is answered again."""
    # without defaults: a new version knows more fields, and the same body must stay the same
    digest = hashlib.sha256(spec.model_dump_json(exclude_defaults=True).encode()).hexdigest()
    job = await _find_by_key(service, idempotency_key)
    if job is None:
        await check_references(service, spec)
        job = await _create_once(service, spec, idempotency_key, digest)
    if job.request_digest != digest:
        raise ProblemError(
            409,
            f"Idempotency-Key {idempotency_key} was used for another job ({job.id}): choose a new key",
            code=Code.IDEMPOTENCY_KEY_REUSED,
        )
    service.wake()
    response.headers["Location"] = f"/api/v1/jobs/{job.id}"
    return await _view(service, job)


@router.get("", responses=responses(422))
async def list_all(
    service: Current,
    wanted: Wanted,
    queue: Annotated[str | None, Query(pattern=NAME_PATTERN, max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    page_token: Annotated[str | None, Query(max_length=200)] = None,
) -> JobPage:
    """Jobs, newest first; pass `next_page_token` on to see more."""
    after = None if page_token is None else _parse_page_token(page_token)
    async with service.database.read() as session:
        jobs = await store.list_jobs(session, queue=queue, limit=limit + 1, after=after, wanted=wanted)
    token = _page_token(jobs[limit - 1]) if len(jobs) > limit else None
    return JobPage(items=[job_summary(job) for job in jobs[:limit]], next_page_token=token)


@router.get("/{job_id}", responses=responses(404, 422))
async def read(job_id: JobId, service: Current) -> JobView:
    """State, reason, attempts and progress of a job."""
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        return job_view(job, list(await attempts_of(session, job_id)))


@router.post("/{job_id}/cancel", status_code=202, responses=responses(404, 409, 422))
async def cancel(job_id: JobId, service: Current) -> JobView:
    """End a job: at once when it waits, else by way of its driver."""
    async with service.database.write() as session:
        job = found(await store.cancel_job(session, job_id, at=utc_now()), job_id)
    service.wake()
    return await _view(service, job)


@router.post("/{job_id}/retry", status_code=202, responses=responses(404, 409, 422))
async def retry(job_id: JobId, service: Current) -> JobView:
    """Queue a failed or cancelled job again, with its retries as new, from its last checkpoint."""
    async with service.database.write() as session:
        job = found(await store.retry_job(session, job_id, at=utc_now()), job_id)
    service.wake()
    return await _view(service, job)


async def existing_job(session: AsyncSession, job_id: str) -> Job:
    """The job, or 404."""
    return found(await store.find_job(session, job_id), job_id)


def found(job: Job | None, job_id: str) -> Job:
    if job is None:
        raise ProblemError(404, f"there is no job {job_id}: GET /api/v1/jobs lists them")
    return job


async def _view(service: Service, job: Job) -> JobView:
    async with service.database.read() as session:
        return job_view(job, list(await attempts_of(session, job.id)))


async def check_references(service: Service, spec: JobSpec) -> None:
    """What a specification names must exist: its queue, its uploaded code, one place of its checkpoints.

    And it must be small enough to be planned.
    """
    stages, microbatches = spec.pipeline.stages, spec.training.microbatches
    least = stages if stages != "auto" else spec.resources.meshes or 1
    actions = (1 if microbatches == "auto" else microbatches) * (2 * least - 1)  # a chain has an edge less
    if actions > (limit := service.settings.plan_action_limit):
        raise _field_problem(
            "training.microbatches",
            str(microbatches),
            f"with {least} stages that is {actions} actions to plan, the limit is {limit}: "
            "set fewer microbatches, or fewer pipeline.stages",
        )
    check_queue(service.settings, spec.queue)
    if spec.checkpoint is not None and not _ABSOLUTE.match(spec.checkpoint.uri):
        raise _field_problem(
            "checkpoint.uri",
            spec.checkpoint.uri,
            "is relative, and every worker has another current folder: "
            "give an absolute path that all of them see, or a URL such as s3://bucket/folder",
        )
    place = spec.code.working_dir
    if place is None or not place.startswith(PACKAGE_PREFIX):
        return
    async with service.database.read() as session:
        known = await find_package(session, place.removeprefix(PACKAGE_PREFIX))
    if not known:
        raise _field_problem(
            "code.working_dir", place, "no such package was uploaded: POST the zip to /api/v1/packages first"
        )


def check_queue(settings: Settings, queue: str) -> None:
    """422 for a queue that is not there."""
    if queue not in settings.queues:
        known = ", ".join(sorted(settings.queues))
        raise _field_problem("queue", queue, f"there is no such queue: use one of {known}")


async def _create_once(service: Service, spec: JobSpec, key: str | None, digest: str) -> Job:
    """A new job, or the one that is being made with this key at this moment."""
    try:
        async with service.database.write() as session:
            return await store.create_job(
                session, spec, at=utc_now(), idempotency_key=key, request_digest=digest
            )
    except IntegrityError:
        job = await _find_by_key(service, key)
        if job is None:
            raise
        return job


async def _find_by_key(service: Service, key: str | None) -> Job | None:
    if key is None:
        return None
    async with service.database.read() as session:
        return await store.find_by_idempotency_key(session, key)


def _field_problem(field: str, value: str, message: str) -> ProblemError:
    error = {"field": field, "value": value, "message": message}
    return ProblemError(422, f"{field} {value!r}: {message}", errors=[error])


def _page_token(job: Job) -> str:
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
