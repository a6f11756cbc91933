"""Changes of a job that was submitted: cancel, retry, another queue or priority; and who may make them.

Queue and priority change only while a job waits; a job that began stays on its cluster.
"""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncSession

from service.jobs.problems import ProblemCode, ProblemError
from service.jobs.service import Service
from service.jobs.submit import check_admitted, check_queue
from service.jobs.views import current_view, view_in
from service.schemas.jobs import JobView
from service.spec.principals import Principal
from service.store import jobs as store
from service.store.database import utc_now
from service.store.files import StorageInUseError, check_no_removal
from service.store.tables import JobRow


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


async def change_job(
    service: Service, job_id: str, caller: Principal, *, queue: str | None, priority: int | None
) -> JobView:
    """Move a waiting job to another queue or priority; None leaves either. 409 for a job that does not wait, and for a
    queue of another cluster than the one that the job began on."""
    if queue is not None:
        check_queue(service.settings, queue, caller)
    cluster = None if queue is None else service.settings.cluster_of(queue)
    try:
        async with service.database.write() as session:
            await check_may_change(session, caller, job_id)
            changed = await store.change_waiting_job(
                session, job_id, queue=queue, priority=priority, at=utc_now(), by=caller.name, cluster=cluster
            )
            job = require_job(changed, job_id)
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


async def check_may_change(session: AsyncSession, caller: Principal, job_id: str) -> None:
    """404 for no job, 403 for another owner's, unless the caller is an operator."""
    owner = await store.owner_of(session, job_id)
    if owner is None:
        raise _no_job_problem(job_id)
    if not caller.may_change(owner):
        possessive = f"{owner}'s" if owner else "nobody's that is known"
        raise ProblemError(403, f"job {job_id} is {possessive}, and {caller.name} is no operator: ask one")


def _no_job_problem(job_id: str) -> ProblemError:
    return ProblemError(
        404, f"there is no job {job_id}: `slotline jobs` lists them, as GET /api/v1/jobs does"
    )
