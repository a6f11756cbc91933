"""Routes to submit, list, read, change, cancel and retry jobs, and the checks of a submission.

A repeated Idempotency-Key with the same body answers with the job that it made before.
Queue and priority change only while a job waits; a job that began stays on its cluster.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import UTC, datetime
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Header, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from service.api.auth import Caller
from service.api.dependencies import CurrentService, Service, UtcTime
from service.api.errors import ProblemCode, ProblemError, responses
from service.api.middleware import UserRoute
from service.api.saved_plans import plan_named_by
from service.api.views import job_summary, job_view
from service.observability.tracing import REQUEST_SPAN
from service.orchestrator.notify.webhook import is_known_private
from service.schemas.jobs import JobPage, JobView
from service.settings.settings import Settings
from service.spec.job import (
    IDEMPOTENCY_KEY_PATTERN,
    JOB_ID_PATTERN,
    NAME_PATTERN,
    OWNER_PATTERN,
    PACKAGE_PREFIX,
    JobSpec,
    Name,
)
from service.spec.states import JobState, Principal, Role
from service.spec.values import LABEL_NAME_PATTERN, LABEL_VALUE_PATTERN, MAX_LABELS
from service.store import jobs as store
from service.store.attempts import attempts_of
from service.store.database import utc_now
from service.store.files import StorageInUseError, check_no_removal, find_package
from service.store.jobs import (
    JobFilter,
    LabelFilter,
    NewJob,
    NotWaitingError,
    OtherClusterError,
    PageKey,
    change_waiting_job,
)
from service.store.plans import mark_saved_plan_used
from service.store.secrets import missing_secrets
from service.store.tables import Job
from worker.contract.logs import TraceParent

_LABEL_MAX_CHARS = 2 * 63 + 1


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
) -> JobFilter:
    return JobFilter(
        states=state or (),
        name=name,
        labels=[_label_filter(one) for one in label or ()],
        since=since,
        until=until,
    )


JobFilterQuery = Annotated[JobFilter, Depends(_job_filter)]


def _label_filter(text: str) -> LabelFilter:
    name, equals, value = text.partition("=")
    if not re.fullmatch(LABEL_NAME_PATTERN, name) or not re.fullmatch(LABEL_VALUE_PATTERN, value):
        message = f"label {text!r} is no label: write name=value, or the name alone"
        raise ProblemError(422, message, errors=[{"field": "label", "value": text, "message": message}])
    return LabelFilter(name, value if equals else None)


router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=UserRoute)
_ABSOLUTE_URI = re.compile(r"/|~/|[a-z][a-z0-9+.-]*:/")

JobId = Annotated[str, Path(pattern=JOB_ID_PATTERN, description="A job's id, e.g. job-k3j9x2abcd")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", pattern=IDEMPOTENCY_KEY_PATTERN, description="The same key submits only once"
    ),
]


@router.post("", status_code=201, responses=responses(403, 409, 422))
async def submit_job(
    spec: JobSpec,
    caller: Caller,
    service: CurrentService,
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
        kept = await plan_named_by(service, spec, caller)
        trace = REQUEST_SPAN.get() or TraceParent.read(traceparent) or TraceParent.new()
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
                await mark_saved_plan_used(session, kept.id, at=utc_now())
    if job.request_digest != digest:
        raise ProblemError(
            409,
            f"Idempotency-Key {idempotency_key} was used for another job ({job.id}): choose a new key",
            code=ProblemCode.IDEMPOTENCY_KEY_REUSED,
        )
    service.wake()
    response.headers["Location"] = f"/api/v1/jobs/{job.id}"
    return job_view(job, []) if idempotency_key is None else await _current_view(service, job)


@router.get("", responses=responses(422))
async def read_jobs(
    service: CurrentService,
    wanted: JobFilterQuery,
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
async def read_job(job_id: JobId, service: CurrentService) -> JobView:
    """State, reason, attempts and progress of a job."""
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        return job_view(job, list(await attempts_of(session, job_id)))


@router.post("/{job_id}/cancel", status_code=202, responses=responses(404, 409, 422))
async def cancel_job(job_id: JobId, caller: Caller, service: CurrentService) -> JobView:
    """End a job: at once when it waits, else by way of its driver."""
    async with service.database.write() as session:
        await check_may_change(session, caller, job_id)
        job = require_job(await store.cancel_job(session, job_id, at=utc_now(), by=caller.name), job_id)
    service.wake()
    return await _current_view(service, job)


@router.post("/{job_id}/retry", status_code=202, responses=responses(403, 404, 409, 422))
async def retry_job(job_id: JobId, caller: Caller, service: CurrentService) -> JobView:
    """Queue a failed or cancelled job again, with its retries as new, from its last checkpoint."""
    async with service.database.write() as session:
        await check_may_change(session, caller, job_id)
        if (queue := await store.queue_of(session, job_id)) is not None:
            check_admitted(service.settings, queue, caller)
        try:
            await check_no_removal(session, job_id, at=utc_now())
        except StorageInUseError as error:
            raise ProblemError(409, str(error), code=ProblemCode.CHECKPOINT_IN_USE) from None
        job = require_job(await store.retry_job(session, job_id, at=utc_now(), by=caller.name), job_id)
    service.wake()
    return await _current_view(service, job)


async def existing_job(session: AsyncSession, job_id: str) -> Job:
    """The job, or 404."""
    return require_job(await store.find_job(session, job_id), job_id)


def require_job(job: Job | None, job_id: str) -> Job:
    if job is None:
        raise _no_job_problem(job_id)
    return job


def _no_job_problem(job_id: str) -> ProblemError:
    return ProblemError(404, f"there is no job {job_id}: GET /api/v1/jobs lists them")


async def check_may_change(session: AsyncSession, caller: Principal, job_id: str) -> None:
    """404 for no job, 403 for one that is another's, unless the caller is an operator."""
    owner = await store.owner_of(session, job_id)
    if owner is None:
        raise _no_job_problem(job_id)
    if not caller.may_change(owner):
        whose = f"{owner}'s" if owner else "nobody's that is known"
        raise ProblemError(403, f"job {job_id} is {whose}, and {caller.name} is no operator: ask one")


async def _current_view(service: Service, job: Job) -> JobView:
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
    if spec.checkpoint is not None and not _ABSOLUTE_URI.match(spec.checkpoint.uri):
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
        403, f"queue {queue} takes no jobs of {caller.name}: {way_out}", code=ProblemCode.QUEUE_NOT_YOURS
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


class JobChange(BaseModel):
    """What becomes of a waiting job; what is not given stays."""

    model_config = ConfigDict(extra="forbid", strict=True)

    queue: Name | None = None
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_these_change(cls, data: object) -> object:
        if isinstance(data, dict) and (
            others := sorted(ascii(key).strip("'") for key in {*data} - {*cls.model_fields})[:5]
        ):
            raise ValueError(f"{', '.join(others)} cannot be changed: give queue, priority, or both")
        return data

    @model_validator(mode="after")
    def _something_changes(self) -> JobChange:
        if self.queue is None and self.priority is None:
            raise ValueError("nothing would change: give queue, priority, or both")
        return self


@router.patch("/{job_id}", responses=responses(403, 404, 409, 422))
async def change_job(job_id: JobId, body: JobChange, caller: Caller, service: CurrentService) -> JobView:
    """Move a job that waits to another queue or priority; in its new line it is as old as it was in the old one. One that
    has begun stays on its cluster."""
    if body.queue is not None:
        check_queue(service.settings, body.queue, caller)
    try:
        async with service.database.write() as session:
            await check_may_change(session, caller, job_id)
            job = require_job(
                await change_waiting_job(
                    session,
                    job_id,
                    queue=body.queue,
                    priority=body.priority,
                    at=utc_now(),
                    by=caller.name,
                    cluster=None if body.queue is None else service.settings.cluster_of(body.queue),
                ),
                job_id,
            )
    except OtherClusterError as error:
        raise ProblemError(409, str(error), code=ProblemCode.JOB_BEGAN_ELSEWHERE) from None
    except NotWaitingError as error:
        raise ProblemError(
            409,
            f"{error}: submit it anew (`slotline cancel` ends one that runs)",
            code=ProblemCode.JOB_NOT_WAITING,
        ) from None
    service.wake()
    async with service.database.read() as session:
        return job_view(job, list(await attempts_of(session, job_id)))
