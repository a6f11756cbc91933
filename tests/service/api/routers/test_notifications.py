"""Notifications of a job by REST: what is refused, and the log of what was told."""

from __future__ import annotations

from typing import Any

import pytest

from service.orchestrator.notify.webhook import is_known_private, is_public
from service.settings.settings import Settings
from tests.service.api.conftest import ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.conftest import job_body
from tests.tiers import some_by_day

KEY = "a-signing-key"


def told(url: Any = "https://hooks.example.com/x", **changes: Any) -> dict[str, Any]:
    return job_body(notifications=[{"url": url, "secret": "HOOK_KEY", **changes}])


@some_by_day(
    "url",
    [
        *("http://127.0.0.1/", "http://127.1.2.3:8000/api/v1/jobs", "http://[::1]/", "http://localhost/x"),
        *("http://10.0.0.1/", "http://192.168.1.1/", "http://172.16.0.9/", "http://169.254.169.254/latest"),
        *("http://[fe80::1]/", "http://[::ffff:10.0.0.1]/", "http://0.0.0.0/", "http://metadata.google.internal/"),
        *("ftp://example.com/", "file:///etc/passwd", "https://", "https://user:password@example.com/", "x"),
        *("https://exa mple.com/", "https://example.com:99999/", "http://example.com:0/"),
    ], by_day=6)  # fmt: skip
async def test_urls_that_lead_inside_or_nowhere_are_refused(make_api: ApiMaker, url: str):
    async with make_api() as api:
        await api.client.put("/api/v1/secrets/HOOK_KEY", content=KEY)
        refused = problem(await api.client.post("/api/v1/jobs", json=told(url)), 422)
        assert refused["errors"][0]["field"] == "notifications.0.url" and refused["code"] == "INVALID"
        assert (await api.client.get("/api/v1/jobs")).json()["items"] == []


async def test_an_operator_may_let_jobs_call_their_own_network(make_api: ApiMaker):
    async with make_api(webhooks_anywhere=True) as api:
        await api.client.put("/api/v1/secrets/HOOK_KEY", content=KEY)
        assert (await api.client.post("/api/v1/jobs", json=told("http://10.0.0.1/"))).status_code == 201


async def test_a_secret_that_is_not_there_is_refused(make_api: ApiMaker):
    async with make_api() as api:
        refused = problem(await api.client.post("/api/v1/jobs", json=told()), 422)
        assert (
            refused["errors"][0]["field"] == "notifications.secret"
            and "slotline secret set" in refused["detail"]
        )


@pytest.mark.parametrize(
    "changes", [{"states": ["DONE"]}, {"states": []}, {"secret": None}, {"method": "GET"}, {"url": 3}]
)
async def test_what_is_no_notification_is_refused(make_api: ApiMaker, changes: dict[str, Any]):
    async with make_api() as api:
        await api.client.put("/api/v1/secrets/HOOK_KEY", content=KEY)
        refused = problem(await api.client.post("/api/v1/jobs", json=told(**changes)), 422)
        assert refused["errors"][0]["field"].startswith("notifications.0")


async def test_the_log_says_who_is_told_in_pages_and_never_with_what(make_api: ApiMaker, monkeypatch):
    async with make_api() as api:
        await api.service.notifier.close()  # nothing leaves this machine
        await api.client.put("/api/v1/secrets/HOOK_KEY", content=KEY)
        job_id = (await api.client.post("/api/v1/jobs", json=told(states=["QUEUED", "CANCELLED"]))).json()[
            "id"
        ]
        await api.client.post(f"/api/v1/jobs/{job_id}/cancel")
        path = f"/api/v1/jobs/{job_id}/notifications"
        page = (await api.client.get(path, params={"limit": 1})).json()
        (first,) = page["items"]
        assert (first["job_state"], first["state"], first["tries"], first["secret"]) == (
            *("QUEUED", "PENDING", 0),
            "HOOK_KEY",
        )
        rest = (await api.client.get(path, params={"page_token": page["next_page_token"]})).json()
        assert [one["job_state"] for one in rest["items"]] == ["CANCELLED"] and rest[
            "next_page_token"
        ] is None
        shown = (await api.client.get(path)).text + (await api.client.get(f"/api/v1/jobs/{job_id}")).text
        assert KEY not in shown
        problem(await api.client.get("/api/v1/jobs/job-none/notifications"), 404)


async def test_the_operators_url_is_told_of_the_end_and_shown_to_nobody(make_api: ApiMaker):
    url, secret = "https://ops.example.com/hidden-path", "s" * 20
    async with make_api(webhook_url=url, webhook_secret=secret) as api:
        await api.service.notifier.close()
        job_id = await api.submit()
        await api.client.post(f"/api/v1/jobs/{job_id}/cancel")
        (seen,) = (await api.client.get(f"/api/v1/jobs/{job_id}/notifications")).json()["items"]
        assert (seen["job_state"], seen["url"], seen["secret"]) == (
            "CANCELLED",
            "https://(the operator's)",
            None,
        )


def test_an_operators_url_without_a_secret_is_refused():
    with pytest.raises(ValueError, match="SLOTLINE_WEBHOOK_SECRET"):
        Settings(webhook_url="https://ops.example.com/")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *[("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("100.64.0.1", False)],
        *[("224.0.1.1", False), ("::", False), ("fc00::1", False), ("fe80::1%eth0", False)],
        *[("::ffff:8.8.8.8", True), ("::ffff:127.0.0.1", False), ("64:ff9b::a00:1", False)],
        *[("64:ff9b::808:808", True), ("2002:0a00:0001::", False), ("198.18.0.1", False)],
    ],
)
def test_addresses_of_private_networks_are_known_also_inside_of_others(address: str, public: bool):
    assert is_public(address) is public


def test_names_are_private_only_where_that_is_certain():
    assert (
        not is_known_private("example.com") and is_known_private("LOCALHOST.") and is_known_private("a.local")
    )
