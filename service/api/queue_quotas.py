"""Quotas of queues, set by operators while everything runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from service.api.auth import Caller
from service.api.context import Current, Service
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.schemas import QueueQuotaView
from service.jobspec import NAME_PATTERN
from service.store.database import utc_now
from service.store.queue_quotas import LARGEST, leave_quota_to_configuration, quotas_in_force, set_quota

router = APIRouter(prefix="/api/v1/queues", tags=["cluster"], route_class=UserRoute)

QueueName = Annotated[str, Path(pattern=NAME_PATTERN, max_length=100, description="A configured queue")]


class QuotaChange(BaseModel):
    """How many accelerators the queue's running jobs may hold together."""

    model_config = ConfigDict(extra="forbid", strict=True)

    quota: Annotated[int, Field(ge=0, le=LARGEST)] | None = Field(description="null: no quota")


@router.put("/{name}/quota", responses=responses(404, 422))
async def change(name: QueueName, body: QuotaChange, caller: Caller, service: Current) -> QueueQuotaView:
    """Set the quota in place of the configured one, also after a restart. What runs already goes on."""
    _check(service, name)
    async with service.database.write() as session:
        await set_quota(session, name, body.quota, at=utc_now(), by=caller.name)
    return await _changed(service, name)


@router.delete("/{name}/quota", responses=responses(404, 422))
async def reset(name: QueueName, caller: Caller, service: Current) -> QueueQuotaView:
    """Back to the configured quota."""
    _check(service, name)
    async with service.database.write() as session:
        await leave_quota_to_configuration(session, name, at=utc_now(), by=caller.name)
    return await _changed(service, name)


def _check(service: Service, name: str) -> None:
    if name not in service.settings.queues:
        known = ", ".join(sorted(service.settings.queues))
        raise ProblemError(404, f"there is no queue {name} (SLOTLINE_QUEUES): use one of {known}")


async def _changed(service: Service, name: str) -> QueueQuotaView:
    service.wake()  # a job may start now, or be told why not
    configured = service.settings.quotas
    async with service.database.read() as session:
        quotas = await quotas_in_force(session, configured)
    return QueueQuotaView(name=name, quota=quotas[name], configured=configured[name])
