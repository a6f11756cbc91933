"""Submit, list, read, cancel and retry jobs."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import UTC, datetime
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Header, Path, Query, Response
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from service.api.auth import Caller
from service.api.context import Current, Service
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.job_filters import Wanted
from service.api.kept_plans import plan_for
from service.api.problem_codes import Code
from service.api.schemas import JobPage, JobView
from service.api.views import job_summary, job_view
from service.jobspec import JOB_ID_PATTERN, KEY_PATTERN, NAME_PATTERN, OWNER_PATTERN, PACKAGE_PREFIX, JobSpec
from service.principals import Principal, Role
from service.public_addresses import is_known_private
from service.settings import Settings
from service.store import jobs as store
from service.store.attempts import attempts_of
from service.store.database import utc_now
from service.store.jobs import NewJob, PageKey
from service.store.named_plans import use_plan
from service.store.packages import find_package
from service.store.secrets import missing_secrets
from service.store.storage_uses import InUseError, check_not_removing
from service.store.tables import Job
from service.tracing import REQUEST
from worker.logs import TraceParent

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=UserRoute)
_ABSOLUTE = re.compile(r"/|~/|[a-z][a-z0-9+.-]*:/")

JobId = Annotated[str, Path(pattern=JOB_ID_PATTERN, description="A job's id, e.g. job-k3j9x2abcd")]
IdempotencyKey = Annotated[
    str | None,
    Header(alias="Idempotency-Key", pattern=KEY_PATTERN, description="The same key submits only once"),
]


@router.post("", status_code=201, responses=responses(403, 409, 422))
async def submit(
    spec: JobSpec,
    caller: Caller,
    service: Current,
    response: Response,
    idempotency_key: IdempotencyKey = None,
    traceparent: Annotated[
        str | None, Header(description="W3C trace context of the caller: the job's logs carry its trace")
    ] = None,
) -> JobView:
    """Queue a job. With an Idempotency-Key that the caller has used, and the same body, its job is answered again."""
    # without defaults: a new version knows more fields, and the same body must stay the same
    digest = hashlib.sha256(spec.model_dump_json(exclude_defaults=True).encode()).hexdigest()
    job = await _find_by_key(service, caller, idempotency_key)
    if job is None:
        await check_references(service, spec, caller)
        kept = await plan_for(service, spec, caller)
        trace = REQUEST.get() or TraceParent.read(traceparent) or TraceParent.new()
        new = NewJob(
            spec,
            utc_now(),
            caller.name,
            idempotency_key,
            digest,
            str(trace),
            None if kept is None else kept.id,
        )
        job = await _create_once(service, new, caller)
        if kept is not None:
            async with service.database.write() as session:
                await use_plan(session, kept.id, at=utc_now())
    if job.request_digest != digest:
        raise ProblemError(
            409,
            f"Idempotency-Key {idempotency_key} was used for another job ({job.id}): choose a new key",
            code=Code.IDEMPOTENCY_KEY_REUSED,
        )
    service.wake()
    response.headers["Location"] = f"/api/v1/jobs/{job.id}"
    return job_view(job, []) if idempotency_key is None else await _view(service, job)


@router.get("", responses=responses(422))
async def list_all(
    service: Current,
    wanted: Wanted,
    queue: Annotated[str | None, Query(pattern=NAME_PATTERN, max_length=100)] = None,
    owner: Annotated[
        str | None, Query(max_length=200, pattern=OWNER_PATTERN, description="Only this principal's jobs")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    page_token: Annotated[str | None, Query(max_length=200)] = None,
) -> JobPage:
    """Jobs, newest first; pass `next_page_token` on to see more."""
    after = None if page_token is None else _parse_page_token(page_token)
    async with service.database.read() as session:
        jobs = await store.list_jobs(
            session, queue=queue, owner=owner, limit=limit + 1, after=after, wanted=wanted
        )
    token = _page_token(jobs[limit - 1]) if len(jobs) > limit else None
    return JobPage(items=[job_summary(job) for job in jobs[:limit]], next_page_token=token)


@router.get("/{job_id}", responses=responses(404, 422))
async def read(job_id: JobId, service: Current) -> JobView:
    """State, reason, attempts and progress of a job."""
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        return job_view(job, list(await attempts_of(session, job_id)))


@router.post("/{job_id}/cancel", status_code=202, responses=responses(404, 409, 422))
async def cancel(job_id: JobId, caller: Caller, service: Current) -> JobView:
    """End a job: at once when it waits, else by way of its driver."""
    async with service.database.write() as session:
        await check_theirs(session, caller, job_id)
        job = found(await store.cancel_job(session, job_id, at=utc_now(), by=caller.name), job_id)
    service.wake()
    return await _view(service, job)


@router.post("/{job_id}/retry", status_code=202, responses=responses(403, 404, 409, 422))
async def retry(job_id: JobId, caller: Caller, service: Current) -> JobView:
    """Queue a failed or cancelled job again, with its retries as new, from its last checkpoint."""
    async with service.database.write() as session:
        await check_theirs(session, caller, job_id)
        if (queue := await store.queue_of(session, job_id)) is not None:
            check_admitted(service.settings, queue, caller)
        try:
            await check_not_removing(session, job_id, at=utc_now())
        except InUseError as error:
            raise ProblemError(409, str(error), code=Code.CHECKPOINT_IN_USE) from None
        job = found(await store.retry_job(session, job_id, at=utc_now(), by=caller.name), job_id)
    service.wake()
    return await _view(service, job)


async def existing_job(session: AsyncSession, job_id: str) -> Job:
    """The job, or 404."""
    return found(await store.find_job(session, job_id), job_id)


def found(job: Job | None, job_id: str) -> Job:
    if job is None:
        raise _no_job(job_id)
    return job


def _no_job(job_id: str) -> ProblemError:
    return ProblemError(404, f"there is no job {job_id}: GET /api/v1/jobs lists them")


async def check_theirs(session: AsyncSession, caller: Principal, job_id: str) -> None:
    """404 for no job, 403 for one that is another's, unless the caller is an operator."""
    owner = await store.owner_of(session, job_id)
    if owner is None:
        raise _no_job(job_id)
    if not caller.may_change(owner):
        whose = f"{owner}'s" if owner else "nobody's that is known"
        raise ProblemError(403, f"job {job_id} is {whose}, and {caller.name} is no operator: ask one")


async def _view(service: Service, job: Job) -> JobView:
    async with service.database.read() as session:
        return job_view(job, list(await attempts_of(session, job.id)))


async def check_references(service: Service, spec: JobSpec, caller: Principal) -> None:
    """What a specification names must exist: its queue, the caller's uploaded code, one place of its checkpoints.

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
    check_queue(service.settings, spec.queue, caller)
    if spec.checkpoint is not None and not _ABSOLUTE.match(spec.checkpoint.uri):
        raise _field_problem(
            "checkpoint.uri",
            spec.checkpoint.uri,
            "is relative, and every worker has another current folder: "
            "give an absolute path that all of them see, or a URL such as s3://bucket/folder",
        )
    await _check_secrets(service, spec, caller)
    _check_notifications(service.settings, spec)
    if spec.model.weights is not None and not spec.model.weights.startswith(("/", "~/")):
        raise _field_problem(
            "model.weights",
            spec.model.weights,
            "is no absolute path: every worker reads its part itself; give one that all of them see",
        )
    place = spec.code.working_dir
    if place is None or not place.startswith(PACKAGE_PREFIX):
        return
    owner = None if caller.role.includes(Role.OPERATOR) else caller.name
    async with service.database.read() as session:
        known = await find_package(session, place.removeprefix(PACKAGE_PREFIX), owner=owner)
    if not known:
        raise _field_problem(
            "code.working_dir", place, "you uploaded no such package: POST the zip to /api/v1/packages first"
        )


def check_queue(settings: Settings, queue: str, caller: Principal) -> None:
    """422 for a queue that is not there, 403 for one that is not for the caller."""
    if queue not in settings.queues:
        known = ", ".join(sorted(settings.queues))
        raise _field_problem("queue", queue, f"there is no such queue: use one of {known}")
    check_admitted(settings, queue, caller)


def check_admitted(settings: Settings, queue: str, caller: Principal) -> None:
    """403 where the queue's cluster is not for the caller; operators use every queue."""
    found = settings.queues.get(queue)
    if found is None or found.admits(caller.name) or caller.role.includes(Role.OPERATOR):
        return
    theirs = [name for name, one in settings.queues.items() if one.admits(caller.name)]
    way_out = f"use one of {', '.join(sorted(theirs))}" if theirs else "ask an operator for one that does"
    raise ProblemError(
        403, f"queue {queue} takes no jobs of {caller.name}: {way_out}", code=Code.QUEUE_NOT_YOURS
    )


async def _check_secrets(service: Service, spec: JobSpec, caller: Principal) -> None:
    signing = [one.secret for one in spec.notifications]
    if not spec.secrets and not signing:
        return
    async with service.database.read() as session:
        missing = await missing_secrets(session, caller.name, [*spec.secrets, *signing])
    if missing:
        field = "secrets" if missing[0] in spec.secrets else "notifications.secret"
        raise _field_problem(
            field, missing[0], f"you have no such secret: `slotline secret set {missing[0]}` first"
        )


def _check_notifications(settings: Settings, spec: JobSpec) -> None:
    for number, one in enumerate(spec.notifications):
        if not settings.webhooks_anywhere and is_known_private(urlsplit(one.url).hostname or ""):
            raise _field_problem(
                f"notifications.{number}.url",
                one.url,
                "is of the server's own machine or of a private network, which jobs may not have it call: give a public "
                "one, or ask the operator for SLOTLINE_WEBHOOKS_ANYWHERE",
            )


async def _create_once(service: Service, new: NewJob, caller: Principal) -> Job:
    """A new job, or the one that is being made with this key at this moment."""
    try:
        return await service.submissions.store(new)
    except IntegrityError:
        job = await _find_by_key(service, caller, new.idempotency_key)
        if job is None:
            raise
        return job


async def _find_by_key(service: Service, caller: Principal, key: str | None) -> Job | None:
    if key is None:
        return None
    async with service.database.read() as session:
        return await store.find_by_idempotency_key(session, key, owner=caller.name)


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
