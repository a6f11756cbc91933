"""Changes of a job that was submitted: cancel, retry, another queue, priority or number of meshes; and who may make them.

Queue and priority change only while a job waits; a job that began stays on its cluster. Meshes change until it ends.
"""

from __future__ import annotations

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncSession

from service.jobs.problems import ProblemCode, ProblemError, field_problem
from service.jobs.service import Service
from service.jobs.submit import check_admitted, check_queue
from service.jobs.views import current_view, view_in
from service.orchestrator.attempts.admit import gang_sizes
from service.orchestrator.attempts.outcome import request_graceful_stop
from service.schemas.jobs import JobChange, JobView
from service.spec.job import JobSpec
from service.spec.principals import Principal
from service.spec.resources import MeshRange
from service.spec.states import JobState
from service.store import jobs as store
from service.store.attempts import find_attempt
from service.store.database import utc_now
from service.store.files import StorageInUseError, check_no_removal
from service.store.jobs import set_meshes
from service.store.tables import JobRow
from service.store.transitions import lock_job
from worker.contract.reasons import Reason


async def cancel_job(service: Service, job_id: str, caller: Principal) -> JobView:
    """End a job: at once where it waits, else by way of its driver."""
    async with service.database.write() as session:
        await check_may_change(session, caller, job_id)
        job = require_job(await store.cancel_job(session, job_id, at=utc_now(), by=caller.name), job_id)
    service.wake()
    return await current_view(service.database, job)


async def retry_job(service: Service, job_id: str, caller: Principal) -> JobView:
    """Queue a failed or cancelled job again. 409 while its checkpoints are being deleted."""
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
    return await current_view(service.database, job)


async def change_job(service: Service, job_id: str, caller: Principal, change: JobChange) -> JobView:
    """Move a waiting job to another queue or priority, or give one that has not ended other meshes. 409 for a job that does
    not wait, for a queue of another cluster than the one that the job began on, and for meshes of a job that has ended or
    trains without checkpoints; 422 for meshes with which its specification is none."""
    if change.queue is not None:
        check_queue(service.settings, change.queue, caller)
    try:
        async with service.database.write() as session:
            await check_may_change(session, caller, job_id)
            if change.queue is not None or change.priority is not None:
                await store.change_waiting_job(
                    session,
                    job_id,
                    queue=change.queue,
                    priority=change.priority,
                    at=utc_now(),
                    by=caller.name,
                    cluster=None if change.queue is None else service.settings.cluster_of(change.queue),
                )
            if change.meshes is not None:
                await _change_meshes(session, job_id, change.meshes, caller)
            job = require_job(await store.find_job(session, job_id), job_id)
    except store.OtherClusterError as error:
        raise ProblemError(409, str(error), code=ProblemCode.JOB_BEGAN_ELSEWHERE) from None
    except store.NotWaitingError as error:
        raise ProblemError(
            409,
            f"{error}: submit it anew (`slotline cancel` ends one that runs)",
            code=ProblemCode.JOB_NOT_WAITING,
        ) from None
    service.wake()
    return await current_view(service.database, job)


async def _change_meshes(
    session: AsyncSession, job_id: str, meshes: int | MeshRange, caller: Principal
) -> None:
    """Give the job these meshes; its attempt, where it has others, saves a checkpoint and ends."""
    job = require_job(await lock_job(session, job_id), job_id)
    if job.job_state.final or job.job_state is JobState.CANCELLING:
        raise ProblemError(409, f"job {job_id} is {job.state}: submit it anew with other meshes")
    spec = _with_meshes(job, meshes)
    attempt = None if job.current_attempt is None else await find_attempt(session, job.current_attempt)
    trains = attempt is not None and not attempt.attempt_state.final
    if trains and spec.checkpoint is None:
        raise ProblemError(
            409,
            f"job {job_id} trains and has no checkpoint.uri, from whose checkpoint it could go on with other meshes",
            code=ProblemCode.STATE_FORBIDS,
        )
    if not set_meshes(session, job, spec, at=utc_now(), by=caller.name) or not trains:
        return
    sizes = gang_sizes(job) or [job.accelerators]
    if attempt.accelerators not in sizes or spec.resources.spares:
        message = f"goes on with other meshes than its {attempt.accelerators} accelerators have"
        await request_graceful_stop(session, attempt.id, Reason.RESIZED, message, at=utc_now())


def _with_meshes(job: JobRow, meshes: int | MeshRange) -> JobSpec:
    """The job's specification with these meshes; 422 where it is none."""
    wanted = meshes if isinstance(meshes, int) else meshes.model_dump()
    resources = dict(job.spec.get("resources") or {})
    if resources.get("workers") or resources.get("tensors"):
        raise field_problem("meshes", str(wanted), "the job's meshes differ in size: submit it anew")
    if job.saved_plan_id is not None:
        raise field_problem(
            "meshes", str(wanted), "the job trains with a saved plan, which has its own meshes"
        )
    changed = {**resources, "meshes": wanted, "fewest_meshes": None}
    try:
        return JobSpec.model_validate({**job.spec, "resources": changed})
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise field_problem("meshes", str(wanted), message) from None


async def read_job(service: Service, job_id: str) -> JobView:
    """The job with its attempts, or 404."""
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        return await view_in(session, job)


async def existing_job(session: AsyncSession, job_id: str) -> JobRow:
    """The job, or 404."""
    return require_job(await store.find_job(session, job_id), job_id)


def require_job(job: JobRow | None, job_id: str) -> JobRow:
    """404 for None."""
    if job is None:
        raise _no_job_problem(job_id)
    return job


async def visible_scope(session: AsyncSession, caller: Principal, job_id: str) -> store.JobScope:
    """Owner and project of a job; 404 for no job, and for one of a project that the caller is not in."""
    scope = await store.scope_of(session, job_id)
    if scope is None or not caller.sees(scope.project):
        raise _no_job_problem(job_id)
    return scope


async def check_may_change(session: AsyncSession, caller: Principal, job_id: str) -> None:
    """404 for no job that the caller sees, 403 for one that it may not change."""
    owner, project = await visible_scope(session, caller, job_id)
    if not caller.may_change(owner, project):
        raise ProblemError(403, f"job {job_id} is {caller.why_not(owner, project)}: ask one")


def _no_job_problem(job_id: str) -> ProblemError:
    return ProblemError(
        404, f"there is no job {job_id}: `slotline jobs` lists them, as GET /api/v1/jobs does"
    )
