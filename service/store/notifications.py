"""Webhook deliveries: enqueued in the transaction of the state change, claimed per host, retried or given up.

At least once: a process that dies between the receiver's answer and its commit leaves a delivery that is sent again
under the same id. A claim takes a limited number for each host, so that a receiver that hangs does not block the
others.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.tables import Delivery, DeliveryState, Event, Job

OPERATOR_WEBHOOK_KEY = "slotline_webhook"
"""Where a session's `info` has the operator's EveryJob, if there is one."""


@dataclass(frozen=True)
class OperatorWebhook:
    """The operator's URL, which is told of every job."""

    url: str
    states: Sequence[str]


def enqueue_deliveries(session: AsyncSession, job: Job, event: Event) -> None:
    """Write what is to be told of the job's new state, which `event` is; sent when the caller's session is committed."""
    wanted: list[tuple[str, str | None]] = [
        (one["url"], one["secret"]) for one in job.notifications or () if job.state in one["states"]
    ]
    everybody: OperatorWebhook | None = session.info.get(OPERATOR_WEBHOOK_KEY)
    if everybody is not None and job.state in everybody.states:
        wanted.append((everybody.url, None))
    body = _delivery_body(job, event) if wanted else ""
    session.add_all(
        Delivery(
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


def _delivery_body(job: Job, event: Event) -> str:
    told: dict[str, Any] = {
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
    return json.dumps(told)


async def claim_due_deliveries(
    session: AsyncSession,
    *,
    at: datetime,
    until: datetime,
    for_host: int,
    busy: Mapping[str, int] = MappingProxyType({}),
    limit: int,
) -> list[tuple[Delivery, str]]:
    """Deliveries that are due, with the owner of each job, which nobody else claims before `until`.

    At most `for_host` of one host, with those on their way to it (`busy`): one that hangs must not take the places of
    the others.
    """
    full = [host for host, number in busy.items() if number >= for_host]
    due = (
        Delivery.state == DeliveryState.PENDING,
        Delivery.next_at <= at,
        Delivery.host.not_in(full),
    )
    in_line = func.row_number().over(
        partition_by=Delivery.host, order_by=(Delivery.next_at, Delivery.event, Delivery.id)
    )
    places = (
        select(Delivery.id.label("id"), Delivery.host.label("host"), in_line.label("place"))
        .where(*due)
        .subquery()
    )
    first = select(places.c.id, places.c.host).where(places.c.place <= for_host).order_by(places.c.place)
    claimed, going = [], Counter(busy)
    for delivery_id, host in (await session.execute(first.limit(limit))).all():
        if going[host] >= for_host:
            continue
        taken = update(Delivery).where(Delivery.id == delivery_id, *due).values(next_at=until)
        if (await session.execute(taken)).rowcount:  # type: ignore[attr-defined]
            claimed.append(delivery_id)
            going[host] += 1
    query = (
        select(Delivery, Job.owner)
        .join(Job, Delivery.job_id == Job.id)
        .where(Delivery.id.in_(claimed))
        .execution_options(populate_existing=True)
    )
    return [(delivery, owner) for delivery, owner in (await session.execute(query)).all()]


async def has_due_deliveries(session: AsyncSession, *, at: datetime) -> bool:
    """Whether there is something to claim."""
    query = select(Delivery.id).where(Delivery.state == DeliveryState.PENDING, Delivery.next_at <= at)
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
    """How a try went."""
    change = (
        update(Delivery)
        .where(Delivery.id == delivery_id)
        .values(
            state=state,
            tries=Delivery.tries + 1,
            last_at=at,
            next_at=next_at,
            status=status,
            error=error,
        )
    )
    await session.execute(change)


async def deliveries_of(
    session: AsyncSession, job_id: str, *, skip: int = 0, limit: int = 500
) -> Sequence[Delivery]:
    """A job's deliveries that come after the first `skip`, in the order of its events."""
    query = select(Delivery).where(Delivery.job_id == job_id).order_by(Delivery.event, Delivery.id)
    return (await session.execute(query.offset(skip).limit(limit))).scalars().all()
