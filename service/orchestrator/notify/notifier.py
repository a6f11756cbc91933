"""Notifier: claims due webhook deliveries from the store and sends them, with retries and exponential backoff.

Shares nothing with the orchestrator's rounds but the database: a receiver that hangs takes a slot here and no time
there. With several control planes a delivery is claimed by one at a time; a delivery that its process left unfinished
is due again when the claim ends.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from datetime import timedelta

from service.orchestrator.notify.webhook import WebhookResponse, WebhookSender, signature_headers
from service.settings.settings import Settings
from service.store.database import DATABASE_UNAVAILABLE, Database, utc_now
from service.store.notifications import (
    OPERATOR_WEBHOOK_KEY,
    claim_due_deliveries,
    has_due_deliveries,
    record_delivery_try,
)
from service.store.secrets import MissingSecretError, NoSecretsKeyError, SecretBox, open_secrets
from service.store.tables import DeliveryRow, DeliveryState

logger = logging.getLogger(__name__)
_DELIVERY_POLL_S = 1.0
_CONCURRENT_DELIVERIES = 64


@dataclass(frozen=True)
class DeliveryPolicy:
    """Limit of one webhook call, calls of one delivery at most, and the pause before the second call.

    Each later pause is three times as long, at most `backoff_limit_s`.
    """

    timeout_s: float = 10.0
    tries: int = 8
    backoff_s: float = 5.0
    backoff_limit_s: float = 3600.0


class Notifier:
    """Sends due deliveries until `close`; each is claimed by one control plane of the database at a time."""

    def __init__(
        self, settings: Settings, database: Database, policy: DeliveryPolicy = DeliveryPolicy()
    ) -> None:
        self._settings, self._database, self._policy = settings, database, policy
        self._sender = WebhookSender(limit_s=policy.timeout_s)
        self._task: asyncio.Task[None] | None = None
        self._sending = set[asyncio.Task[None]]()
        if settings.webhook_url is not None:
            database.session_info[OPERATOR_WEBHOOK_KEY] = settings.webhook_url

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Cancel deliveries in progress; they are due again when their claims end."""
        tasks = [*self._sending, *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sender.close()

    async def _run(self) -> None:
        while True:
            try:
                await self.send_due()
            except DATABASE_UNAVAILABLE as error:
                self._database.outage.away(error)
            except Exception:
                logger.exception("due notifications were not read; the next poll tries again")
            await asyncio.sleep(_DELIVERY_POLL_S)

    async def send_due(self) -> None:
        """Start deliveries that are due, up to the limit of the process."""
        free, now = _CONCURRENT_DELIVERIES - len(self._sending), utc_now()
        async with self._database.read() as session:
            if free <= 0 or not await has_due_deliveries(session, at=now):
                return
        until = now + timedelta(seconds=2 * self._policy.timeout_s + 30)
        async with self._database.write() as session:
            claimed = await claim_due_deliveries(session, at=now, until=until, limit=free)
        for delivery, owner in claimed:
            task = asyncio.create_task(self._deliver(delivery, owner))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def settle(self) -> None:
        """Wait for deliveries in progress (tests)."""
        while self._sending:
            await asyncio.gather(*self._sending, return_exceptions=True)

    async def _deliver(self, delivery: DeliveryRow, owner: str) -> None:
        try:
            response = await self._send(delivery, owner)
            await self._record(delivery, response)
        except DATABASE_UNAVAILABLE as error:
            self._database.outage.away(error)  # it is due again when its claim ends
        except Exception:
            logger.exception("a notification of job %s was not sent; it is tried again", delivery.job_id)

    async def _send(self, delivery: DeliveryRow, owner: str) -> WebhookResponse:
        try:
            secret = await self._secret(delivery, owner)
        except (MissingSecretError, NoSecretsKeyError) as error:
            return WebhookResponse(None, str(error))
        body = delivery.body.encode()
        return await self._sender.send(
            delivery.url,
            body,
            signature_headers(secret, delivery.id, int(time.time()), body),
            anywhere=self._settings.webhooks_anywhere or delivery.secret is None,
        )

    async def _secret(self, delivery: DeliveryRow, owner: str) -> str:
        if delivery.secret is None:
            secret = self._settings.webhook_secret
            if secret is None:
                raise MissingSecretError("SLOTLINE_WEBHOOK_SECRET is not set any more")
            return secret.get_secret_value()
        async with self._database.read() as session:
            values = await open_secrets(session, SecretBox.of(self._settings), owner, [delivery.secret])
        return values[delivery.secret]

    async def _record(self, delivery: DeliveryRow, response: WebhookResponse) -> None:
        now, tries = utc_now(), delivery.tries + 1
        state = DeliveryState.DELIVERED if response.delivered else DeliveryState.PENDING
        if not response.delivered and (response.permanent or tries >= self._policy.tries):
            state = DeliveryState.GIVEN_UP
        pause_s = min(self._policy.backoff_s * 3.0 ** (tries - 1), self._policy.backoff_limit_s)
        async with self._database.write() as session:
            await record_delivery_try(
                session,
                delivery.id,
                state=state,
                at=now,
                next_at=now + timedelta(seconds=pause_s * random.uniform(1.0, 1.2)),
                status=response.status,
                error=response.error,
            )
        if state is DeliveryState.GIVEN_UP:
            logger.warning(
                "job %s: %s was not told of %s after %d tries: %s",
                delivery.job_id,
                delivery.host,
                delivery.job_state,
                tries,
                response.error,
            )
