"""Changes of a job that waits: its queue and its priority."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from service.job_states import WAITING_STATES
from service.principals import NOBODY
from service.store.audit import add_audit
from service.store.states import add_event, lock_job
from service.store.tables import Job


class OtherClusterError(ValueError):
    """The job has begun on a cluster that the queue does not belong to."""

    def __init__(self, job: Job, queue: str, cluster: str) -> None:
        super().__init__(
            f"job {job.id} began on cluster {job.began_on}, where its checkpoints and its device are, and queue {queue} "
            f"belongs to cluster {cluster}: move it to a queue of {job.began_on}, or cancel it and submit it anew"
        )


class NotWaitingError(ValueError):
    """The job is not in a queue any more, or was not put back."""

    def __init__(self, job: Job) -> None:
        super().__init__(
            f"job {job.id} is {job.state}, and only a job that waits can change its queue or priority"
        )


async def change_waiting_job(
    session: AsyncSession,
    job_id: str,
    *,
    queue: str | None,
    priority: int | None,
    at: datetime,
    by: str = NOBODY,
    cluster: str | None = None,
) -> Job | None:
    """Move a waiting job to another queue or priority; it keeps its age. None: no such job. Raises NotWaitingError, and
    OtherClusterError for one that has begun elsewhere than on the new queue's `cluster` (None: wherever).

    `by` asks.
    """
    job = await lock_job(session, job_id)
    if job is None:
        return None
    if job.job_state not in WAITING_STATES:
        raise NotWaitingError(job)
    if queue is not None and cluster is not None and job.began_on not in (None, cluster):
        raise OtherClusterError(job, queue, cluster)
    changes = []
    if queue is not None and queue != job.queue:
        changes.append(f"queue {job.queue} becomes {queue}")
        job.queue = queue
    if priority is not None and priority != job.priority:
        changes.append(f"priority {job.priority} becomes {priority}")
        job.priority = priority
    if changes:
        add_event(session, job, "changed", ", ".join(changes), at=at, by=by)
        add_audit(session, by, "job.change", job.id, at=at, detail=", ".join(changes))
    return job
