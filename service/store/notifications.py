"""Webhook deliveries: enqueued in the transaction of the state change, claimed, retried or given up.

At least once: a process that dies between the receiver's answer and its commit leaves a delivery that is sent again
under the same id.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.leases import LeaseTable
from service.store.tables import DeliveryRow, DeliveryState, EventRow, JobRow

OPERATOR_WEBHOOK_KEY = "slotline_webhook"
"""Key of the operator's URL, if there is one, in the `info` of a session: it is notified of the end of every job."""


def enqueue_deliveries(session: AsyncSession, job: JobRow, event: EventRow) -> None:
    """Store the deliveries of the job's new state, recorded as `event`; they are sent after the session's commit."""
    wanted: list[tuple[str, str | None]] = [
        (hook["url"], hook["secret"]) for hook in job.notifications or () if job.state in hook["states"]
    ]
    operator: str | None = session.info.get(OPERATOR_WEBHOOK_KEY)
    if operator is not None and job.job_state.final:
        wanted.append((operator, None))
    body = _delivery_body(job, event) if wanted else ""
    session.add_all(
        DeliveryRow(
            id=f"msg_{secrets.token_hex(16)}",
            job_id=job.id,
            event=event.number,
            job_state=job.state,
            url=url,
            host=urlsplit(url).netloc.lower()[:300],
            secret=secret,
            body=body,
            state=DeliveryState.PENDING,
            tries=0,
            created_at=event.at,
            next_at=event.at,
        )
        for url, secret in wanted
    )


def _delivery_body(job: JobRow, event: EventRow) -> str:
    body: dict[str, Any] = {
        "type": "job.state",
        "timestamp": event.at.isoformat(),
        "data": {
            "job_id": job.id,
            "name": job.name,
            "owner": job.owner,
            "queue": job.queue,
            "labels": job.labels or {},
            "state": job.state,
            "reason": job.reason,
            "message": job.message,
            "attempt": event.attempt,
            "event": event.number,
            "step": job.step,
            "steps": job.steps_wanted,
        },
    }
    return json.dumps(body)


_CLAIMS = LeaseTable(DeliveryRow, DeliveryRow.id, DeliveryRow.next_at, silence_limit=timedelta(0))
"""A delivery is held until its next try is due: a claim, and the pause before the next try, move that time."""


async def claim_due_deliveries(
    session: AsyncSession,
    *,
    at: datetime,
    until: datetime,
    limit: int,
) -> list[tuple[DeliveryRow, str]]:
    """Due deliveries, the longest due first, with the owner of each job, which no other process claims before `until`."""
    pending = DeliveryRow.state == DeliveryState.PENDING
    due = select(DeliveryRow.id).where(pending, ~_CLAIMS.is_held(at))
    first = due.order_by(DeliveryRow.next_at, DeliveryRow.event, DeliveryRow.id).limit(limit)
    claimed = [
        delivery_id
        for delivery_id in (await session.execute(first)).scalars()
        if await _CLAIMS.acquire(session, delivery_id, pending, now=at, next_at=until)
    ]
    query = (
        select(DeliveryRow, JobRow.owner)
        .join(JobRow, DeliveryRow.job_id == JobRow.id)
        .where(DeliveryRow.id.in_(claimed))
        .execution_options(populate_existing=True)
    )
    return [(delivery, owner) for delivery, owner in (await session.execute(query)).all()]


async def has_due_deliveries(session: AsyncSession, *, at: datetime) -> bool:
    """True if a delivery is due."""
    query = select(DeliveryRow.id).where(DeliveryRow.state == DeliveryState.PENDING, ~_CLAIMS.is_held(at))
    return (await session.execute(query.limit(1))).first() is not None


async def record_delivery_try(
    session: AsyncSession,
    delivery_id: str,
    *,
    state: DeliveryState,
    at: datetime,
    next_at: datetime,
    status: int | None,
    error: str | None,
) -> None:
    """Store the result of a try and the time of the next one."""
    change = (
        update(DeliveryRow)
        .where(DeliveryRow.id == delivery_id)
        .values(
            state=state,
            tries=DeliveryRow.tries + 1,
            last_at=at,
            next_at=next_at,
            status=status,
            error=error,
        )
    )
    await session.execute(change)


async def deliveries_of(
    session: AsyncSession, job_id: str, *, skip: int = 0, limit: int = 500
) -> Sequence[DeliveryRow]:
    """A job's deliveries in the order of its events, without the first `skip`."""
    query = (
        select(DeliveryRow).where(DeliveryRow.job_id == job_id).order_by(DeliveryRow.event, DeliveryRow.id)
    )
    return (await session.execute(query.offset(skip).limit(limit))).scalars().all()
