"""Submission: checks of a specification against this server, and storing the job once for each Idempotency-Key.

The planner's previews and the retries of jobs pass the same checks.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from sqlalchemy.exc import IntegrityError

from service.jobs.problems import ProblemCode, ProblemError, field_problem
from service.jobs.saved_plans import plan_named_by, request_digest
from service.jobs.service import Service
from service.jobs.views import current_view, job_view
from service.observability.tracing import REQUEST_SPAN
from service.orchestrator.notify.webhook import is_known_private
from service.schemas.jobs import JobView
from service.settings.settings import Settings
from service.spec.job import (
    PACKAGE_PREFIX,
    JobSpec,
)
from service.spec.principals import Principal, Role
from service.store.database import utc_now
from service.store.files import find_package
from service.store.jobs import NewJob, find_by_idempotency_key
from service.store.plans import mark_saved_plan_used
from service.store.secrets import missing_secrets
from service.store.tables import Job
from worker.contract.logs import TraceParent

_ABSOLUTE_URI = re.compile(r"/|~/|[a-z][a-z0-9+.-]*:/")


async def submit_job(
    service: Service,
    spec: JobSpec,
    caller: Principal,
    *,
    idempotency_key: str | None,
    traceparent: str | None,
) -> JobView:
    """Queue a job, or answer the one that the caller has submitted with this key and the same body.

    409 for a key that was used for another body. The job's trace is the present request's, else `traceparent`, else new.
    """
    digest = request_digest(spec)
    job = await _find_by_key(service, caller, idempotency_key)
    if job is None:
        await check_references(service, spec, caller)
        saved_plan = await plan_named_by(service, spec, caller)
        trace = REQUEST_SPAN.get() or TraceParent.read(traceparent) or TraceParent.new()
        new = NewJob(
            spec,
            utc_now(),
            caller.name,
            idempotency_key,
            digest,
            str(trace),
            None if saved_plan is None else saved_plan.id,
        )
        job = await _create_once(service, new, caller)
        if saved_plan is not None:
            async with service.database.write() as session:
                await mark_saved_plan_used(session, saved_plan.id, at=utc_now())
    if job.request_digest != digest:
        raise ProblemError(
            409,
            f"Idempotency-Key {idempotency_key} was used for another job ({job.id}): choose a new key",
            code=ProblemCode.IDEMPOTENCY_KEY_REUSED,
        )
    service.wake()
    return job_view(job, []) if idempotency_key is None else await current_view(service.database, job)


async def _find_by_key(service: Service, caller: Principal, key: str | None) -> Job | None:
    if key is None:
        return None
    async with service.database.read() as session:
        return await find_by_idempotency_key(session, key, owner=caller.name)


async def _create_once(service: Service, new: NewJob, caller: Principal) -> Job:
    """A new job, or the one that another request stores with this key at the same moment."""
    try:
        return await service.submissions.store(new)
    except IntegrityError:
        job = await _find_by_key(service, caller, new.idempotency_key)
        if job is None:
            raise
        return job


async def check_references(service: Service, spec: JobSpec, caller: Principal) -> None:
    """Refuse a job that names what is not there, or is too large to be planned.

    It may name a queue, an absolute place of checkpoints and weights, secrets, webhooks, and a package of the caller's.
    """
    _check_plan_size(spec, service.settings)
    check_queue(service.settings, spec.queue, caller)
    _check_checkpoint_uri(spec)
    await _check_secrets(service, spec, caller)
    _check_notifications(service.settings, spec)
    _check_weights(spec)
    await _check_package(service, spec, caller)


def _check_plan_size(spec: JobSpec, settings: Settings) -> None:
    stages, microbatches = spec.pipeline.stages, spec.training.microbatches
    least = stages if stages != "auto" else spec.resources.meshes or 1
    actions = (1 if microbatches == "auto" else microbatches) * (2 * least - 1)  # a chain has an edge less
    if actions > (limit := settings.plan_action_limit):
        raise field_problem(
            "training.microbatches",
            str(microbatches),
            f"with {least} stages that is {actions} actions to plan, the limit is {limit}: "
            "set fewer microbatches, or fewer pipeline.stages",
        )


def check_queue(settings: Settings, name: str, caller: Principal) -> None:
    """422 for a queue that is not configured, 403 for one that does not admit the caller."""
    if name not in settings.queues:
        known = ", ".join(sorted(settings.queues))
        raise field_problem("queue", name, f"there is no such queue: use one of {known}")
    check_admitted(settings, name, caller)


def check_admitted(settings: Settings, name: str, caller: Principal) -> None:
    """403 where the queue does not admit the caller; operators use every queue."""
    queue = settings.queues.get(name)
    if queue is None or queue.admits(caller.name) or caller.role.includes(Role.OPERATOR):
        return
    admitting = sorted(name for name, queue in settings.queues.items() if queue.admits(caller.name))
    way_out = f"use one of {', '.join(admitting)}" if admitting else "ask an operator for one that does"
    raise ProblemError(
        403, f"queue {name} takes no jobs of {caller.name}: {way_out}", code=ProblemCode.QUEUE_NOT_YOURS
    )


def _check_checkpoint_uri(spec: JobSpec) -> None:
    if spec.checkpoint is not None and not _ABSOLUTE_URI.match(spec.checkpoint.uri):
        raise field_problem(
            "checkpoint.uri",
            spec.checkpoint.uri,
            "is relative, and every worker has another current folder: "
            "give an absolute path that all of them see, or a URL such as s3://bucket/folder",
        )


async def _check_secrets(service: Service, spec: JobSpec, caller: Principal) -> None:
    signing = [notification.secret for notification in spec.notifications]
    if not spec.secrets and not signing:
        return
    async with service.database.read() as session:
        missing = await missing_secrets(session, caller.name, [*spec.secrets, *signing])
    if missing:
        field = "secrets" if missing[0] in spec.secrets else "notifications.secret"
        raise field_problem(
            field, missing[0], f"you have no such secret: `slotline secret set {missing[0]}` first"
        )


def _check_notifications(settings: Settings, spec: JobSpec) -> None:
    if settings.webhooks_anywhere:
        return
    for number, notification in enumerate(spec.notifications):
        if is_known_private(urlsplit(notification.url).hostname or ""):
            raise field_problem(
                f"notifications.{number}.url",
                notification.url,
                "is of the server's own machine or of a private network, which jobs may not have it call: give a public "
                "one, or ask the operator for SLOTLINE_WEBHOOKS_ANYWHERE",
            )


def _check_weights(spec: JobSpec) -> None:
    if spec.model.weights is not None and not spec.model.weights.startswith(("/", "~/")):
        raise field_problem(
            "model.weights",
            spec.model.weights,
            "is no absolute path: every worker reads its part itself; give one that all of them see",
        )


async def _check_package(service: Service, spec: JobSpec, caller: Principal) -> None:
    place = spec.code.working_dir
    if place is None or not place.startswith(PACKAGE_PREFIX):
        return
    owner = None if caller.role.includes(Role.OPERATOR) else caller.name
    async with service.database.read() as session:
        known = await find_package(session, place.removeprefix(PACKAGE_PREFIX), owner=owner)
    if not known:
        raise field_problem(
            "code.working_dir", place, "you uploaded no such package: POST the zip to /api/v1/packages first"
        )
