"""Whose is what, and who did what: owners of jobs, packages and keys; tokens; the audit list."""

from __future__ import annotations

import io
import zipfile
from base64 import b64encode
from collections.abc import AsyncIterator

import httpx
import pytest
from sqlalchemy import text

from service.store.database import utc_now
from service.store.measurements import scoped_costs_digest
from service.store.transitions import lock_job
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.conftest import job_body

ROOT = {"Authorization": "Bearer secret"}


@pytest.fixture
async def api(make_api: ApiMaker, database_url: str) -> AsyncIterator[Api]:
    """A server that asks for tokens, on each kind of database."""
    async with make_api(database_url=database_url, api_token="secret") as api:
        yield api


async def token(api: Api, name: str, role: str = "submitter", **more) -> dict[str, str]:
    """Headers of a new token."""
    body = {"name": name, "role": role, **more}
    answer = await api.client.post("/api/v1/tokens", json=body, headers=ROOT)
    assert answer.status_code == 201, answer.text
    return {"Authorization": f"Bearer {answer.json()['token']}"}


async def submitted(api: Api, headers: dict[str, str], **changes) -> dict:
    answer = await api.client.post("/api/v1/jobs", json=job_body(**changes), headers=headers)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def change(api: Api, job_id: str, verb: str, headers: dict[str, str]) -> httpx.Response:
    return await api.client.post(f"/api/v1/jobs/{job_id}/{verb}", headers=headers)


async def test_a_job_is_its_submitters_to_cancel_and_retry_and_an_operators(api: Api):
    alice, bob = await token(api, "alice"), await token(api, "bob")
    viewer, operator = await token(api, "eve", "viewer"), await token(api, "olga", "operator")
    job = await submitted(api, alice)
    assert job["owner"] == "alice"
    for verb in ("cancel", "retry"):
        told = problem(await change(api, job["id"], verb, bob), 403)["detail"]
        assert "alice's" in told and "bob is no operator" in told
        problem(await change(api, job["id"], verb, viewer), 403)
        problem(await change(api, "job-none", verb, bob), 404)
    assert (await change(api, job["id"], "cancel", alice)).status_code == 202
    assert (await change(api, job["id"], "retry", operator)).status_code == 202
    assert (await change(api, job["id"], "cancel", operator)).status_code == 202
    assert (await change(api, job["id"], "retry", ROOT)).status_code == 202
    read = (await api.client.get(f"/api/v1/jobs/{job['id']}", headers=viewer)).json()
    assert (read["state"], read["owner"]) == ("QUEUED", "alice")


async def test_what_is_older_than_owners_is_for_operators(api: Api):
    alice, olga = await token(api, "alice"), await token(api, "olga", "operator")
    job = await submitted(api, alice)
    async with api.service.database.write() as session:
        (await lock_job(session, job["id"])).owner = ""
    assert "nobody's" in problem(await change(api, job["id"], "cancel", alice), 403)["detail"]
    assert (await change(api, job["id"], "cancel", olga)).status_code == 202


async def test_jobs_are_listed_by_owner(api: Api):
    alice, bob = await token(api, "alice"), await token(api, "bob")
    jobs = [await submitted(api, who) for who in (alice, bob, alice)]

    async def listed(owner: str) -> list[str]:
        answer = await api.client.get("/api/v1/jobs", params={"owner": owner}, headers=bob)
        return [one["id"] for one in answer.json()["items"]]

    assert await listed("alice") == [jobs[2]["id"], jobs[0]["id"]]
    assert await listed("bob") == [jobs[1]["id"]]
    assert await listed("carol") == []


async def test_two_owners_may_use_the_same_idempotency_key(api: Api):
    alice, bob = await token(api, "alice"), await token(api, "bob")
    key = {"Idempotency-Key": "nightly"}
    first = await submitted(api, alice | key)
    other = await submitted(api, bob | key, name="bobs")
    assert other["id"] != first["id"] and other["name"] == "bobs"
    assert (await submitted(api, alice | key))["id"] == first["id"]
    answer = await api.client.post("/api/v1/jobs", json=job_body(name="x"), headers=bob | key)
    assert other["id"] in problem(answer, 409)["detail"]


async def test_a_package_is_used_by_those_who_uploaded_it_and_by_operators(api: Api):
    alice, bob = await token(api, "alice"), await token(api, "bob")
    olga = await token(api, "olga", "operator")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("mine.py", "x = 1")

    async def upload(headers: dict[str, str]) -> httpx.Response:
        kind = {"Content-Type": "application/zip"}
        return await api.client.post("/api/v1/packages", content=buffer.getvalue(), headers=headers | kind)

    made = await upload(alice)
    assert made.status_code == 201
    code = {"working_dir": made.json()["uri"]}
    assert (await submitted(api, alice, code=code))["owner"] == "alice"
    refused = await api.client.post("/api/v1/jobs", json=job_body(code=code), headers=bob)
    assert "you uploaded no such package" in problem(refused, 422)["detail"]
    planned = await api.client.post("/api/v1/plans/job", json=job_body(code=code), headers=bob)
    assert "you uploaded no such package" in problem(planned, 422)["detail"]
    await submitted(api, olga, code=code)
    assert (await upload(bob)).status_code == 201, "that somebody else has the same is not told"
    assert (await upload(bob)).status_code == 200
    assert (await submitted(api, bob, code=code))["owner"] == "bob"


async def test_events_and_the_audit_list_say_who_did_what(api: Api):
    alice, olga = await token(api, "alice"), await token(api, "olga", "operator")
    job = await submitted(api, alice)
    await change(api, job["id"], "cancel", olga)
    await change(api, job["id"], "cancel", olga)  # twice is once
    await change(api, job["id"], "retry", alice)
    answer = await api.client.get(f"/api/v1/jobs/{job['id']}/events", headers=alice)
    events = [(one["principal"], one["message"]) for one in answer.json()["items"]]
    assert events == [
        ("alice", "QUEUED: submitted by alice"),
        ("olga", "CANCELLED: CANCELLED_BY_USER: cancelled by olga"),
        ("alice", "QUEUED: retried by alice"),
    ]
    assert (await api.client.delete("/api/v1/tokens/olga", headers=ROOT)).status_code == 204

    async def audit(**params) -> list[tuple[str, str, str, str]]:
        answer = await api.client.get("/api/v1/audit", params=params, headers=ROOT)
        items = answer.raise_for_status().json()["items"]
        return [(one["principal"], one["action"], one["subject"], one["detail"]) for one in items]

    everything = await audit()
    assert everything == [
        ("slotline:root", "token.revoke", "olga", ""),
        ("alice", "job.retry", job["id"], "CANCELLED"),
        ("olga", "job.cancel", job["id"], "QUEUED"),
        ("alice", "job.submit", job["id"], "small"),
        ("slotline:root", "token.create", "olga", "operator for ever"),
        ("slotline:root", "token.create", "alice", "submitter for ever"),
    ]
    assert await audit(principal="olga") == [everything[2]]
    assert await audit(subject=job["id"]) == everything[1:4]


async def test_the_audit_list_comes_in_pages(api: Api):
    for number in range(5):
        await token(api, f"t{number}")
    found, page_token = [], None
    while True:
        params = {"limit": 2} | ({"page_token": page_token} if page_token else {})
        page = (await api.client.get("/api/v1/audit", params=params, headers=ROOT)).json()
        found += [one["subject"] for one in page["items"]]
        if (page_token := page["next_page_token"]) is None:
            break
        assert len(page["items"]) == 2
    assert found == ["t4", "t3", "t2", "t1", "t0"]


async def test_tokens_are_made_listed_and_revoked_and_the_store_has_only_their_digests(api: Api):
    alice = await token(api, "alice", "viewer", days=1)
    assert (await api.client.get("/api/v1/whoami", headers=alice)).json() == {
        "name": "alice",
        "role": "viewer",
    }
    again = await api.client.post("/api/v1/tokens", json={"name": "alice"}, headers=ROOT)
    assert "already" in problem(again, 409)["detail"]
    listed = await api.client.get("/api/v1/tokens", headers=ROOT)
    secret = alice["Authorization"].removeprefix("Bearer ")
    assert [(one["name"], one["role"]) for one in listed.json()["items"]] == [("alice", "viewer")]
    assert "token" not in listed.json()["items"][0] and secret not in listed.text
    async with api.service.database.read() as session:
        rows = (await session.execute(text("SELECT * FROM tokens"))).all()
    assert secret not in str(rows) and secret.removeprefix("slotline_") not in str(rows)
    assert (await api.client.delete("/api/v1/tokens/alice", headers=ROOT)).status_code == 204
    problem(await api.client.get("/api/v1/whoami", headers=alice), 401)
    problem(await api.client.delete("/api/v1/tokens/alice", headers=ROOT), 404)


async def test_a_token_opens_nothing_once_it_has_expired(api: Api):
    late = await token(api, "late", "admin", days=0)
    problem(await api.client.get("/api/v1/jobs", headers=late), 401)
    ends = (await api.client.get("/api/v1/tokens", headers=ROOT)).json()["items"][0]["expires_at"]
    assert ends <= utc_now().isoformat()


async def test_a_server_that_asks_nobody_makes_no_tokens(make_api: ApiMaker):
    """Else whoever reaches it now could open it when it asks later."""
    async with make_api() as api:
        answer = await api.client.post("/api/v1/tokens", json={"name": "later", "role": "admin"})
        assert "SLOTLINE_REQUIRE_TOKEN" in problem(answer, 409)["detail"]
        assert (await api.client.get("/api/v1/tokens")).json() == {"items": []}
        assert (await api.client.get("/api/v1/whoami")).json() == {"name": "", "role": "admin"}
        job_id = await api.submit()
        assert (await api.job(job_id))["owner"] == ""


@pytest.mark.parametrize("name", ["slotline:root", "oidc:alice", "a b", ""])
async def test_no_token_can_be_named_as_another_kind_of_principal(api: Api, name: str):
    problem(await api.client.post("/api/v1/tokens", json={"name": name}, headers=ROOT), 422)


async def test_the_pages_open_with_any_viewers_token_as_password(api: Api):
    viewer, alice = await token(api, "eve", "viewer"), await token(api, "alice")
    scraper = await token(api, "prometheus", "metrics")
    job = await submitted(api, alice)

    def as_browser(headers: dict[str, str], **more: str) -> dict[str, str]:
        password = headers["Authorization"].removeprefix("Bearer ")
        return {"Authorization": f"Basic {b64encode(f'me:{password}'.encode()).decode()}", **more}

    for page in ("/", f"/jobs/{job['id']}"):
        assert (await api.client.get(page, headers=as_browser(viewer))).status_code == 200
        problem(await api.client.get(page, headers=as_browser(scraper)), 403)
    own_page = {"Sec-Fetch-Site": "same-origin"}
    problem(await change(api, job["id"], "cancel", as_browser(viewer, **own_page)), 403)
    problem(await change(api, job["id"], "cancel", as_browser(alice)), 401)
    assert (await change(api, job["id"], "cancel", as_browser(alice, **own_page))).status_code == 202


async def test_what_one_owners_driver_measured_is_not_another_owners(api: Api):
    """A driver runs its owner's code, which can say of a model what it likes."""
    alice, bob = await token(api, "alice"), await token(api, "bob")
    jobs = [await submitted(api, who, pipeline={"stages": 2}) for who in (alice, alice, bob)]
    api.cluster.workers = 8
    for job in jobs:
        await api.rounds(job["id"])
    mine, later, others = [job["id"] for job in jobs]
    key = {"params": {"key": "of the layers"}}
    stored = await api.driver(mine, "PUT", "/profile", json={"layers": []}, **key)
    assert stored.status_code == 204
    assert (await api.driver(later, "GET", "/profile", **key)).json() == {"layers": []}
    problem(await api.driver(others, "GET", "/profile", **key), 404)


def test_costs_are_known_by_owner():
    assert scoped_costs_digest("d", "") == "d"
    assert len({scoped_costs_digest("d", owner) for owner in ("", "alice", "bob")}) == 3


async def test_a_token_with_a_role_of_a_newer_slotline_opens_nothing(api: Api):
    alice = await token(api, "alice")
    async with api.service.database.write() as session:
        await session.execute(text("UPDATE tokens SET role = 'emperor' WHERE name = 'alice'"))
    problem(await api.client.get("/api/v1/whoami", headers=alice), 401)
