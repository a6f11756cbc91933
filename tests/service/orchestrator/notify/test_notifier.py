"""Who is told of a job's states: signed, again and again, never in the way of anything else, and only outside."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update
from standardwebhooks import Webhook, WebhookVerificationError

from service.orchestrator.notify import webhook
from service.orchestrator.notify.notifier import DeliveryPolicy, Notifier
from service.orchestrator.notify.webhook import WebhookSender, signature_headers, webhook_signature
from service.settings.settings import Settings
from service.spec.job import JobSpec
from service.store.database import Database, utc_now
from service.store.jobs import cancel_job
from service.store.secrets import SecretBox, delete_secret, store_secret
from service.store.tables import DeliveryRow, DeliveryState
from tests.polling import until_async
from tests.service.conftest import create_job, job_body

KEY = "signing-key-of-ann"


@dataclass
class Receiver:
    """An HTTP server on this machine; `answers` are its statuses in turn, the last for ever. None: it hangs."""

    answers: list[int | None] = field(default_factory=lambda: [200])
    heard: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers["content-length"]))
            answer = self.answers[min(len(self.heard), len(self.answers) - 1)]
            self.heard.append((headers, body))
            if answer is None:
                await asyncio.sleep(3600)
            writer.write(f"HTTP/1.1 {answer} X\r\nlocation: /other\r\ncontent-length: 0\r\n\r\n".encode())
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def receiver(*answers: int | None) -> AsyncIterator[Receiver]:
    one = Receiver(list(answers) or [200])
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook?a=b"
    try:
        yield one
    finally:
        server.close()


def settings(tmp_path: Path, **changes: Any) -> Settings:
    # a key of its own: with a database that is given, none is made
    given = {"data_dir": tmp_path, "secrets_key": "k" * 32, "webhooks_anywhere": True}
    return Settings(**{**given, **changes})


@asynccontextmanager
async def notifier_of(database: Database, settings: Settings, **policy: float) -> AsyncIterator[Notifier]:
    """One that looks when a test says so."""
    one = Notifier(settings, database, DeliveryPolicy(**{"backoff_s": 0, **policy}))
    try:
        yield one
    finally:
        await one.close()


async def submitted(database: Database, settings: Settings, *urls: str, **changes: Any) -> str:
    """A job of ann's that tells `urls` of its end and of being queued."""
    async with database.write() as session:
        sealed = SecretBox.of(settings).seal("ann", "HOOK_KEY", KEY)
        await store_secret(session, "ann", "HOOK_KEY", sealed, at=utc_now())
    told = [{"url": url, "secret": "HOOK_KEY", "states": ["QUEUED", "CANCELLED"]} for url in urls]
    spec = JobSpec.model_validate(job_body(notifications=told, labels={"team": "nlp"}, **changes))
    async with database.write() as session:
        return (await create_job(session, spec, at=utc_now(), owner="ann")).id


async def deliveries(database: Database) -> list[DeliveryRow]:
    async with database.read() as session:
        query = select(DeliveryRow).order_by(DeliveryRow.event, DeliveryRow.url)
        return list((await session.execute(query)).scalars())


async def look(notifier: Notifier, times: int = 1) -> None:
    for _ in range(times):
        await notifier.send_due()
        await notifier.settle()


async def test_a_state_is_told_as_it_is_committed_signed_and_once(database: Database, tmp_path: Path):
    given = settings(tmp_path)
    async with receiver() as one, notifier_of(database, given) as notifier:
        job_id = await submitted(database, given, one.url)
        with pytest.raises(RuntimeError, match="rolled back"):
            async with database.write() as session:
                await cancel_job(session, job_id, at=utc_now(), by="ann")
                raise RuntimeError("rolled back: nobody is told")
        await look(notifier, 2)
        assert len(one.heard) == 1
        async with database.write() as session:
            await cancel_job(session, job_id, at=utc_now(), by="ann")
        await look(notifier, 2)
        (_, first), (headers, second) = one.heard
        assert json.loads(first)["data"]["state"] == "QUEUED"
        told = json.loads(second)
        assert told["type"] == "job.state" and told["data"] == {
            **{"job_id": job_id, "name": "small", "owner": "ann", "queue": "default", "labels": {"team": "nlp"}},
            **{"state": "CANCELLED", "reason": "CANCELLED_BY_USER", "message": "cancelled by ann"},
            **{"attempt": None, "event": 2, "step": None, "steps": 10},
        }  # fmt: skip
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + second
        expected = base64.b64encode(hmac.new(KEY.encode(), signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        assert headers["content-type"] == "application/json" and headers["host"] in one.url
        found = await deliveries(database)
        assert {(d.state, d.tries, d.status) for d in found} == {("DELIVERED", 1, 200)}
        assert headers["webhook-id"] == found[1].id


def test_the_library_of_standard_webhooks_takes_what_is_signed_and_nothing_else():
    secret, body = (
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        json.dumps({"state": "FAILED", "job": "ü"}).encode(),
    )
    headers = signature_headers(secret, "msg_1", int(time.time()), body)
    receiver = Webhook(secret)
    assert receiver.verify(body, headers) == {"state": "FAILED", "job": "ü"}
    plain = signature_headers("a text of a user's", "msg_1", int(time.time()), body)
    encoded = "whsec_" + base64.b64encode(b"a text of a user's").decode()
    assert Webhook(encoded).verify(body, plain), "a secret without the prefix is the key itself"
    for wrong_body, wrong in (
        (body + b" ", headers),
        (body, {**headers, "webhook-id": "msg_2"}),
        (body, {**headers, "webhook-timestamp": str(int(headers["webhook-timestamp"]) + 1)}),
        (body, plain),
    ):
        with pytest.raises(WebhookVerificationError):
            receiver.verify(wrong_body, wrong)


async def test_what_fails_is_tried_again_later_and_given_up_at_a_limit(database: Database, tmp_path: Path):
    given, policy = settings(tmp_path), {"tries": 4, "backoff_s": 10}
    async with receiver(500, 302, 404) as one, notifier_of(database, given, **policy) as notifier:
        await submitted(database, given, one.url)
        pauses = []
        for tries in range(1, 5):
            await look(notifier, 2)  # the second look finds nothing due
            (found,) = await deliveries(database)
            assert (found.tries, len(one.heard)) == (tries, tries)
            pauses.append((found.next_at - found.last_at).total_seconds())
            async with database.write() as session:
                await session.execute(update(DeliveryRow).values(next_at=utc_now() - timedelta(seconds=1)))
        assert [round(pause / (10 * 3**n) - 0.1) for n, pause in enumerate(pauses[:3])] == [1, 1, 1]
        assert (found.state, found.status, found.error) == ("GIVEN_UP", 404, "the receiver answered 404")
        assert {headers["webhook-id"] for headers, _ in one.heard} == {found.id}
        await look(notifier)
        assert len(one.heard) == 4


async def test_a_receiver_that_is_gone_is_not_asked_again(database: Database, tmp_path: Path):
    given = settings(tmp_path)
    async with receiver(410) as one, notifier_of(database, given) as notifier:
        await submitted(database, given, one.url)
        await look(notifier, 3)
        (found,) = await deliveries(database)
        assert (found.state, found.tries, found.status, len(one.heard)) == ("GIVEN_UP", 1, 410, 1)


async def test_one_that_hangs_holds_up_nobody_and_is_told_of_in_time(database: Database, tmp_path: Path):
    given = settings(tmp_path)
    slow = notifier_of(database, given, timeout_s=120)
    async with receiver(None) as stuck, receiver() as well, slow as notifier:
        for _ in range(8):
            await submitted(database, given, stuck.url)
        await notifier.send_due()
        await submitted(database, given, well.url)
        await notifier.send_due()
        await until_async(lambda: well.heard)
        async with database.write() as session:  # what it writes, it writes; nothing is locked meanwhile
            await cancel_job(session, await _a_job(database), at=utc_now())
    async with receiver(None) as stuck, notifier_of(database, given, timeout_s=0.2) as notifier:
        await submitted(database, given, stuck.url)
        await look(notifier)
        assert "no answer within 0.2 s" in {found.error for found in await deliveries(database)}


async def _a_job(database: Database) -> str:
    return (await deliveries(database))[0].job_id


async def test_what_was_on_its_way_when_the_process_died_is_sent_by_the_next(
    database: Database, tmp_path: Path
):
    given = settings(tmp_path)
    async with receiver(None, 200) as one:
        async with notifier_of(database, given) as notifier:
            await submitted(database, given, one.url)
            await notifier.send_due()
            await until_async(lambda: one.heard)
        async with notifier_of(database, given) as after:
            await look(after)
            assert len(one.heard) == 1, "it may still be on its way from the other one"
            async with database.write() as session:  # the claim ends
                await session.execute(update(DeliveryRow).values(next_at=utc_now() - timedelta(seconds=1)))
            await look(after)
        assert len(one.heard) == 2 and one.heard[0][0]["webhook-id"] == one.heard[1][0]["webhook-id"]
        (found,) = await deliveries(database)
        assert found.state == DeliveryState.DELIVERED


async def test_two_control_planes_send_each_delivery_once(database: Database, tmp_path: Path):
    given = settings(tmp_path)
    async with (
        receiver() as one,
        notifier_of(database, given) as first,
        notifier_of(database, given) as second,
    ):
        for _ in range(6):
            await submitted(database, given, one.url)
        for _ in range(4):
            await asyncio.gather(look(first), look(second))
        assert len(one.heard) == 6
        assert {found.tries for found in await deliveries(database)} == {1}


@pytest.mark.parametrize(
    "resolved", [["127.0.0.1"], ["10.1.2.3"], ["169.254.169.254"], ["93.184.216.34", "::ffff:192.168.0.1"]]
)
async def test_a_name_that_leads_inside_is_not_called(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resolved: list[str]
):
    given = settings(tmp_path, webhooks_anywhere=False)
    async with receiver() as one, notifier_of(database, given) as notifier:
        port = int(one.url.split(":")[2].split("/")[0])

        async def lookup(host: str, *_: Any, **__: Any) -> list[Any]:
            assert host == "hooks.example.com"
            return [(2, 1, 6, "", (address, port)) for address in resolved]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup, raising=False)
        answer = await notifier._sender.send(
            f"http://hooks.example.com:{port}/", b"{}", {}, anywhere=given.webhooks_anywhere
        )
        assert answer.permanent and answer.status is None and "private network" in str(answer.error)
        assert one.heard == []


async def test_a_name_is_looked_up_once_and_called_where_it_led(monkeypatch: pytest.MonkeyPatch):
    """A name that is public when it is looked at and private when it is called would lead inside."""
    lookups = []
    async with receiver() as one:
        port = int(one.url.split(":")[2].split("/")[0])

        async def lookup(host: str, *_: Any, **__: Any) -> list[Any]:
            lookups.append(host)
            return [(2, 1, 6, "", ("127.0.0.1", port))]

        monkeypatch.setattr(webhook, "is_public", lambda _: True)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup, raising=False)
        sender = WebhookSender(limit_s=30)
        answer = await sender.send(f"http://hooks.example.com:{port}/x", b"{}", {}, anywhere=False)
        await sender.close()
        assert (answer.status, lookups.count("hooks.example.com")) == (200, 1)
        assert one.heard[0][0]["host"] == f"hooks.example.com:{port}"


async def test_the_operators_url_is_told_of_every_job(database: Database, tmp_path: Path):
    async with receiver() as one:
        given = settings(
            tmp_path, webhook_url=one.url, webhook_secret="operator-" + "x" * 16, webhooks_anywhere=False
        )
        async with notifier_of(database, given) as notifier:
            job_id = await submitted(database, given)
            async with database.write() as session:
                await cancel_job(session, job_id, at=utc_now())
            await look(notifier)
            (headers, body) = one.heard[0]
            assert json.loads(body)["data"]["state"] == "CANCELLED" and len(one.heard) == 1
            secret = "operator-" + "x" * 16
            stamp = int(headers["webhook-timestamp"])
            assert headers["webhook-signature"] == webhook_signature(
                secret, headers["webhook-id"], stamp, body
            )


async def test_a_secret_that_is_gone_is_told_and_never_shown(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    given = settings(tmp_path)
    async with receiver() as one, notifier_of(database, given, tries=1) as notifier:
        await submitted(database, given, one.url)
        await look(notifier)
        async with database.write() as session:
            await delete_secret(session, "ann", "HOOK_KEY", at=utc_now())
            await cancel_job(session, await _a_job(database), at=utc_now())
        await look(notifier)
        told, lost = await deliveries(database)
        assert (told.state, lost.state, len(one.heard)) == ("DELIVERED", "GIVEN_UP", 1)
        assert "HOOK_KEY is gone" in str(lost.error)
        everything = repr([vars(one) for one in (told, lost)]) + caplog.text + repr(one.heard)
        assert KEY not in everything
