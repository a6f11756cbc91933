"""Change the queue or the priority of a job that waits."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator

from service.api.auth import Caller
from service.api.context import Current
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.manage import JobId, check_queue, check_theirs, found
from service.api.problem_codes import Code
from service.api.schemas import JobView
from service.api.views import job_view
from service.jobspec import Name
from service.store.attempts import attempts_of
from service.store.database import utc_now
from service.store.job_changes import NotWaitingError, OtherClusterError, change_waiting_job

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=UserRoute)


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
async def change(job_id: JobId, body: JobChange, caller: Caller, service: Current) -> JobView:
    """Move a job that waits to another queue or priority; in its new line it is as old as it was in the old one. One that
    has begun stays on its cluster."""
    if body.queue is not None:
        check_queue(service.settings, body.queue, caller)
    try:
        async with service.database.write() as session:
            await check_theirs(session, caller, job_id)
            job = found(
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
        raise ProblemError(409, str(error), code=Code.JOB_BEGAN_ELSEWHERE) from None
    except NotWaitingError as error:
        raise ProblemError(
            409, f"{error}: submit it anew (`slotline cancel` ends one that runs)", code=Code.JOB_NOT_WAITING
        ) from None
    service.wake()
    async with service.database.read() as session:
        return job_view(job, list(await attempts_of(session, job_id)))
