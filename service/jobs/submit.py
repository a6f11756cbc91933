"""Submission: checks of a specification against this server, and storing the job once for each Idempotency-Key.

The planner's previews and the retries of jobs pass the same checks.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from sqlalchemy.exc import IntegrityError

from service.jobs.problems import ProblemCode, ProblemError, field_problem
from service.jobs.saved_plans import plan_named_by, request_digest
from service.jobs.service import Service
from service.jobs.views import current_view, job_view
from service.observability.tracing import REQUEST_SPAN
from service.orchestrator.notify.webhook import is_known_private
from service.schemas.jobs import JobView
from service.schemas.plans import ACTION_LIMIT
from service.settings.settings import Settings
from service.spec.job import (
    PACKAGE_PREFIX,
    JobSpec,
    parse_job_checkpoint,
    relative_places,
    stored_field,
)
from service.spec.principals import DEFAULT_PROJECT, Principal, Role
from service.spec.values import is_listable
from service.store.database import utc_now
from service.store.files import StorageInUseError, find_package
from service.store.jobs import (
    NewJob,
    ResumedCheckpoint,
    create_resuming_job,
    find_by_idempotency_key,
    find_job,
)
from service.store.plans import mark_saved_plan_used
from service.store.queues import project_members
from service.store.secrets import missing_secrets
from service.store.tables import JobRow
from worker.contract.checkpoint_files import CheckpointError, inspect_checkpoints
from worker.contract.logs import TraceParent

_LIST_LIMIT_S = 20.0


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
    await _check_project(
        service, spec.project, caller
    )  # a key answers nothing of a project that the caller has left
    job = await _find_by_key(service, caller, idempotency_key)
    if job is None:
        await check_references(service, spec, caller)
        saved_plan = await plan_named_by(service, spec, caller)
        spec, resumes = await _resolve_resume(service, spec, caller)
        trace = REQUEST_SPAN.get() or TraceParent.read(traceparent) or TraceParent.new()
        new = NewJob(
            spec,
            utc_now(),
            caller.name,
            idempotency_key=idempotency_key,
            request_digest=digest,
            traceparent=str(trace),
            saved_plan_id=None if saved_plan is None else saved_plan.id,
            resumes=resumes,
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


async def _find_by_key(service: Service, caller: Principal, key: str | None) -> JobRow | None:
    if key is None:
        return None
    async with service.database.read() as session:
        return await find_by_idempotency_key(session, key, owner=caller.name)


async def _create_once(service: Service, new: NewJob, caller: Principal) -> JobRow:
    """A new job, or the one that another request stores with this key at the same moment."""
    try:
        if new.resumes is None:
            return await service.submissions.store(new)
        async with service.database.write() as session:
            return await create_resuming_job(session, new)
    except StorageInUseError as error:
        raise ProblemError(409, str(error), code=ProblemCode.CHECKPOINT_IN_USE) from None
    except IntegrityError:
        job = await _find_by_key(service, caller, new.idempotency_key)
        if job is None:
            raise
        return job


async def check_references(service: Service, spec: JobSpec, caller: Principal) -> None:
    """Refuse a job that names what is not there, or is too large to be planned.

    It may name a queue, an absolute place of checkpoints and weights, secrets, webhooks, and a package of the caller's.
    """
    _check_plan_size(spec)
    await _check_project(service, spec.project, caller)
    check_queue(service.settings, spec.queue, caller)
    _check_places(spec)
    await _check_secrets(service, spec, caller)
    _check_notifications(service.settings, spec)
    await _check_package(service, spec, caller)


def _check_plan_size(spec: JobSpec) -> None:
    stages, microbatches = spec.pipeline.stages, spec.training.microbatches
    least = stages if stages != "auto" else spec.resources.meshes or 1
    actions = (1 if microbatches == "auto" else microbatches) * (2 * least - 1)  # a chain has an edge less
    if actions > ACTION_LIMIT:
        raise field_problem(
            "training.microbatches",
            str(microbatches),
            f"with {least} stages that is {actions} actions to plan, the limit is {ACTION_LIMIT}: "
            "set fewer microbatches, or fewer pipeline.stages",
        )


async def _check_project(service: Service, name: str, caller: Principal) -> None:
    """422 for a project that the caller does not see or that has no members, 403 for one in which it only reads."""
    known = caller.sees(name)
    if caller.visible_projects is None and name != DEFAULT_PROJECT:
        async with service.database.read() as session:
            known = bool(await project_members(session, name))
    if not known:
        own = sorted(caller.visible_projects or ())
        way_out = f"use one of {', '.join(own)}" if own else "GET /api/v1/projects lists those with members"
        raise field_problem("project", name, f"there is no such project that you are in: {way_out}")
    role = caller.role_in(name)
    if role is None or not role.includes(Role.SUBMITTER):
        raise ProblemError(
            403,
            f"{caller.name} is {role} in project {name}, and to submit to it takes submitter: ask an admin",
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


def _check_places(spec: JobSpec) -> None:
    for field, value, message in relative_places(spec):
        raise field_problem(field, value, message)


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


async def _resolve_resume(
    service: Service, spec: JobSpec, caller: Principal
) -> tuple[JobSpec, ResumedCheckpoint | None]:
    """The specification with the step of the job's checkpoint that it begins from, and that checkpoint; None for another
    place or none.

    422 where there is no such checkpoint, or nothing is left to train behind it; 403 for another owner's job.
    """
    text = None if spec.checkpoint is None else spec.checkpoint.resume_from
    if text is None or (reference := parse_job_checkpoint(text)) is None:
        return spec, None
    source_id, step = reference
    async with service.database.read() as session:
        source = await find_job(session, source_id)
    if source is None or not caller.sees(source.project):
        raise _resume_problem(text, f"there is no job {source_id}: `slotline jobs` lists them")
    if not caller.may_change(source.owner, source.project):
        raise ProblemError(
            403,
            f"checkpoint.resume_from {text!r}: job {source_id} is {caller.why_not(source.owner, source.project)}: ask one, "
            "or begin from the weights that its owner has exported (model.weights)",
        )
    step = await _checkpoint_step(source, step, text)
    if step >= spec.training.steps:
        raise field_problem(
            "training.steps",
            str(spec.training.steps),
            f"is not behind step {step} of job {source_id}, from which the job begins, and steps are counted from step 1: "
            f"give more than {step}",
        )
    checkpoint = spec.checkpoint.model_copy(update={"resume_from": f"{source_id}@{step}"})
    return spec.model_copy(update={"checkpoint": checkpoint}), ResumedCheckpoint(source_id, step)


async def _checkpoint_step(source: JobRow, step: int | None, text: str) -> int:
    """`step`, or that of the newest checkpoint of `source`; 422 where it has none of the step.

    Checkpoints that this machine does not see are known by what the job's drivers reported: the workers look then.
    """
    reported = source.checkpoint_step
    steps = await _whole_steps(source)
    newest = max(steps, default=None) or reported
    if newest is None:
        raise _resume_problem(
            text,
            f"job {source.id} is {source.state} and has no checkpoint: submit again when it has one (`slotline checkpoints "
            f"{source.id}`), or leave resume_from out",
        )
    if step is None or step in steps:
        return newest if step is None else step
    if not steps and step <= newest:
        return step
    kept = ", ".join(map(str, sorted(steps))) if steps else f"{newest} as its newest"
    raise _resume_problem(
        text,
        f"job {source.id} has no checkpoint of step {step}; it has {kept}: name one, as {source.id}@{newest}",
    )


async def _whole_steps(source: JobRow) -> list[int]:
    """Steps of the whole checkpoints of a job; none where this machine does not see their place."""
    uri = stored_field(source.spec, "checkpoint", "uri", "")
    if not uri or not is_listable(uri):
        return []
    try:
        looking = asyncio.to_thread(inspect_checkpoints, uri, source.id)
        found = await asyncio.wait_for(looking, _LIST_LIMIT_S)
    except (CheckpointError, TimeoutError):
        return []
    return [checkpoint.step for checkpoint in found if checkpoint.damage is None]


def _resume_problem(text: str, message: str) -> ProblemError:
    return field_problem("checkpoint.resume_from", text, message)
