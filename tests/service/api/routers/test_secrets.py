"""A job's environment: variables by value, and secrets that are written and never read back."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text

from service.settings.settings import Settings
from service.spec.job import JobSpec
from service.store.measurements import scoped_profile_key
from service.store.secrets import NoSecretsKeyError, SealError, SecretBox
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.api.routers.test_people import ROOT, submitted, token
from tests.service.conftest import job_body
from worker.contract.costs import costs_digest

VALUE = "hunter2-and-more"


@pytest.fixture
async def api(make_api: ApiMaker, database_url: str) -> AsyncIterator[Api]:
    """A server that asks for tokens, on each kind of database."""
    async with make_api(database_url=database_url, api_token="secret", secrets_key="k" * 32) as api:
        yield api


async def put(api: Api, headers: dict[str, str], name: str = "HF_TOKEN", value: str | bytes = VALUE):
    kind = {"Content-Type": "text/plain"}
    return await api.client.put(f"/api/v1/secrets/{name}", content=value, headers=headers | kind)


async def test_a_secret_reaches_the_driver_of_its_owners_job_and_nothing_else(api: Api):
    alice, bob = await token(api, "alice"), await token(api, "bob")
    assert (await put(api, alice)).status_code == 204
    job = await submitted(
        api, alice, secrets=["HF_TOKEN"], env={"HF_HOME": "/shared"}, pipeline={"stages": 2}
    )
    assert (job["spec"]["secrets"], job["spec"]["env"]) == (["HF_TOKEN"], {"HF_HOME": "/shared"})
    await api.rounds(job["id"])
    given = (await api.driver(job["id"], "GET")).json()
    assert given["secrets"] == {"HF_TOKEN": VALUE}
    submission = api.cluster.submissions[f"{job['id']}-1"]
    assert submission.env["HF_HOME"] == "/shared"
    assert submission.env["SLOTLINE_ATTEMPT_ID"] == f"{job['id']}-1"
    assert VALUE not in str(submission), "Ray shows what a driver is started with"
    refused = await api.client.post("/api/v1/jobs", json=job_body(secrets=["HF_TOKEN"]), headers=bob)
    assert "slotline secret set HF_TOKEN" in problem(refused, 422)["detail"]
    for path in (
        "/api/v1/secrets",
        "/api/v1/jobs",
        f"/api/v1/jobs/{job['id']}",
        f"/api/v1/jobs/{job['id']}/events",
        "/api/v1/audit",
        "/metrics",
    ):
        for headers in (alice, ROOT):
            assert VALUE not in (await api.client.get(path, headers=headers)).text
    async with api.service.database.read() as session:
        tables = (await session.execute(text("SELECT * FROM secrets"))).all()
        tables += (await session.execute(text("SELECT * FROM jobs"))).all()
    assert VALUE not in str(tables)


async def test_secrets_are_named_set_again_and_removed_by_their_owner(api: Api):
    alice, bob = await token(api, "alice"), await token(api, "bob")
    await put(api, alice)
    await put(api, alice, "OTHER_KEY")
    await put(api, bob, value="the-one-of-bob")
    first = (await api.client.get("/api/v1/secrets", headers=alice)).json()["items"]
    assert [one["name"] for one in first] == ["HF_TOKEN", "OTHER_KEY"] and set(first[0]) == {"name", "set_at"}
    assert (await put(api, alice, value="another-value")).status_code == 204
    job = await submitted(api, alice, secrets=["HF_TOKEN"], pipeline={"stages": 2})
    await api.rounds(job["id"])
    assert (await api.driver(job["id"], "GET")).json()["secrets"] == {"HF_TOKEN": "another-value"}
    gone = "/api/v1/secrets/HF_TOKEN"
    assert (await api.client.delete(gone, headers=alice)).status_code == 204
    problem(await api.client.delete(gone, headers=alice), 404)
    left = (await api.client.get("/api/v1/secrets", headers=bob)).json()["items"]
    assert [one["name"] for one in left] == ["HF_TOKEN"]
    audit = (await api.client.get("/api/v1/audit", params={"principal": "alice"}, headers=ROOT)).json()
    done = [(one["action"], one["subject"]) for one in audit["items"] if one["action"] != "job.submit"]
    assert done == [
        ("secret.remove", "HF_TOKEN"),
        ("secret.set", "HF_TOKEN"),
        ("secret.set", "OTHER_KEY"),
        ("secret.set", "HF_TOKEN"),
    ]


async def test_a_job_whose_secret_is_gone_ends_with_a_reason_that_names_it(api: Api):
    alice = await token(api, "alice")
    await put(api, alice)
    job = await submitted(api, alice, secrets=["HF_TOKEN"], pipeline={"stages": 2})
    await api.client.delete("/api/v1/secrets/HF_TOKEN", headers=alice)
    for _ in range(3):
        await api.service.cluster.refresh()
        await api.service.orchestrator.round()
        await api.service.orchestrator.settle()
    read = (await api.client.get(f"/api/v1/jobs/{job['id']}", headers=alice)).json()
    assert (read["state"], read["reason"]) == ("FAILED", "SECRET_MISSING")
    assert "slotline secret set HF_TOKEN" in read["message"]
    assert api.cluster.submissions == {}
    await put(api, alice)
    await api.client.post(f"/api/v1/jobs/{job['id']}/retry", headers=alice)
    await api.rounds(job["id"], number=2)


async def test_a_driver_that_asks_after_its_secret_went_is_told_so(api: Api):
    alice = await token(api, "alice")
    await put(api, alice)
    job = await submitted(api, alice, secrets=["HF_TOKEN"], pipeline={"stages": 2})
    await api.rounds(job["id"])
    await api.client.delete("/api/v1/secrets/HF_TOKEN", headers=alice)
    assert "HF_TOKEN is gone" in problem(await api.driver(job["id"], "GET"), 422)["detail"]


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("HF_TOKEN", "short", 422),
        ("HF_TOKEN", "       x       ", 422),
        ("HF_TOKEN", b"\xff" * 10, 422),
        ("HF_TOKEN", "with-a-\0-in-it", 422),
        ("HF_TOKEN", "x" * 40_000, 413),
        ("HF_TOKEN", "", 422),
        ("SLOTLINE_API_TOKEN", VALUE, 422),
        ("LD_PRELOAD", VALUE, 422),
        ("a-b", VALUE, 422),
    ],
)
async def test_what_cannot_be_a_secret_is_refused_and_not_repeated(api: Api, name, value, status):
    answer = await put(api, ROOT, name, value)
    problem(answer, status)
    given = value if isinstance(value, str) else "\\xff"
    assert not given.strip() or given not in answer.text
    assert (await api.client.get("/api/v1/secrets", headers=ROOT)).json() == {"items": []}


async def test_a_job_with_secrets_is_not_measured_before_it_runs(api: Api):
    """The worker that measures would be started with them, for all of Ray to see."""
    await put(api, ROOT)
    body = job_body(secrets=["HF_TOKEN"])
    answer = await api.client.post("/api/v1/plans/job", json=body, headers=ROOT)
    assert "given to attempts only" in problem(answer, 422)["detail"]
    assert api.cluster.submissions == {}


@pytest.mark.parametrize(
    "env",
    [
        {"LD_PRELOAD": "x.so"},
        {"ld_preload": "x.so"},
        {"SLOTLINE_ATTEMPT_TOKEN": "x"},
        {"RAY_ADDRESS": "x"},
        {"PYTHONPATH": "x"},
        {"PATH": "x"},
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"A-B": "x"},
        {"": "x"},
        {"1A": "x"},
        {"A\n": "x"},
        {"A": 1},
        {"A": "\0"},
        {"A": "\ud800"},
        {"A": "x" * 70_000},
        {f"A{number}": "x" for number in range(101)},
    ],
)
def test_an_environment_that_is_not_a_jobs_to_set_is_refused(env):
    with pytest.raises(ValueError):
        JobSpec.model_validate(job_body(env=env))


def test_a_name_is_a_variable_or_a_secret_once():
    with pytest.raises(ValueError, match="in env and in secrets"):
        JobSpec.model_validate(job_body(env={"A": "x"}, secrets=["A"]))
    with pytest.raises(ValueError, match="twice"):
        JobSpec.model_validate(job_body(secrets=["A", "A"]))
    with pytest.raises(ValueError, match="not a job's to set"):
        JobSpec.model_validate(job_body(secrets=["SLOTLINE_API_TOKEN"]))


def test_what_was_measured_with_another_environment_is_another_measurement():
    plain, other = (
        JobSpec.model_validate(job_body(**more)).model_dump(mode="json") for more in ({}, {"env": {"A": "1"}})
    )
    assert costs_digest(plain) != costs_digest(other)
    assert scoped_profile_key(plain, "k") != scoped_profile_key(other, "k")
    older = {name: value for name, value in plain.items() if name not in ("env", "secrets")}
    assert costs_digest(plain) == costs_digest(older) and scoped_profile_key(
        plain, "k"
    ) == scoped_profile_key(older, "k")


def test_a_sealed_secret_opens_for_its_owner_and_name_with_one_of_the_keys():
    old, new = SecretBox(["a" * 32]), SecretBox(["b" * 32, "a" * 32])
    sealed = old.seal("alice", "K", VALUE)
    assert VALUE not in sealed
    assert new.open("alice", "K", sealed) == VALUE
    for owner, name in (("bob", "K"), ("alice", "L")):
        with pytest.raises(SealError, match="another one's"):
            new.open(owner, name, sealed)
    with pytest.raises(SealError, match="another key"):
        SecretBox(["b" * 32]).open("alice", "K", sealed)
    with pytest.raises(SealError):
        new.open("alice", "K", sealed[:-8] + "AAAAAAA=")


def test_a_key_is_made_beside_a_sqlite_of_ours_and_asked_for_elsewhere(tmp_path: Path):
    settings = Settings(data_dir=tmp_path / "new")
    sealed = SecretBox.of(settings).seal("", "K", VALUE)
    assert SecretBox.of(settings).open("", "K", sealed) == VALUE
    file = tmp_path / "new" / "secrets.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and os.listdir(file.parent) == ["secrets.key"]
    with pytest.raises(NoSecretsKeyError, match="SLOTLINE_SECRETS_KEY"):
        SecretBox.of(Settings(database_url="postgresql://db/x"))


async def test_without_a_key_no_secret_is_taken(make_api: ApiMaker, tmp_path: Path):
    async with make_api(database_url=f"sqlite:///{tmp_path / 'own.db'}") as api:
        assert "SLOTLINE_SECRETS_KEY" in problem(await put(api, {}), 409)["detail"]


def test_a_key_that_can_be_guessed_is_refused():
    with pytest.raises(ValueError, match="32 characters"):
        Settings(secrets_key="k" * 40 + ",short")
