"""The log of what was told to others about a job."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Query

from service.api.auth import Caller
from service.api.context import Current
from service.api.errors import responses
from service.api.guarded import UserRoute
from service.api.manage import JobId, existing_job
from service.api.notification_schemas import DeliveryPage, DeliveryView
from service.principals import Role
from service.store.notification_tables import Delivery, DeliveryState
from service.store.notifications import deliveries_of

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=UserRoute)


@router.get("/{job_id}/notifications", responses=responses(404, 422))
async def list_deliveries(
    job_id: JobId,
    caller: Caller,
    service: Current,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    page_token: Annotated[str | None, Query(pattern=r"^[0-9]{1,9}$")] = None,
) -> DeliveryPage:
    """Who was told of the job's states, and how that went. What the operator's URL is, operators see."""
    skip = int(page_token or 0)
    async with service.database.read() as session:
        await existing_job(session, job_id)
        found = await deliveries_of(session, job_id, skip=skip, limit=limit + 1)
    token = str(skip + limit) if len(found) > limit else None
    operator = caller.role.includes(Role.OPERATOR)
    return DeliveryPage(items=[_view(one, operator) for one in found[:limit]], next_page_token=token)


def _view(delivery: Delivery, operator: bool) -> DeliveryView:
    shown = delivery.secret is not None or operator
    return DeliveryView(
        id=delivery.id,
        job_id=delivery.job_id,
        event=delivery.event,
        job_state=delivery.job_state,
        url=delivery.url if shown else f"{urlsplit(delivery.url).scheme}://(the operator's)",
        secret=delivery.secret,
        state=delivery.state,  # type: ignore[arg-type]
        tries=delivery.tries,
        created_at=delivery.created_at,
        next_at=delivery.next_at if delivery.state == DeliveryState.PENDING else None,
        last_at=delivery.last_at,
        status=delivery.status,
        error=delivery.error if shown else None,
    )
