"""What a failed attempt leaves: whole, bounded, and without anything secret."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import pytest
from pydantic import SecretStr

from service.jobs import postmortem as room
from service.jobs.postmortem import REDACTED, PostMortemFacts, post_mortem_zip
from service.store.attempts import find_attempt
from service.store.database import utc_now
from service.store.events import find_post_mortem
from service.store.plans import record_job_plan
from service.store.tables import AttemptRow
from tests.service.api.conftest import Api, ApiMaker

STALL = (
    "StallError: mesh m1: 1F3 on lane compute has not ended after 9.0 s (limit 4.0 s); it waits for m0; m0 said 0.2 s "
    "ago: step 5, last finished 0F2; 1RECV_F3 on lane recv:m0 waits for event 7 (1F2) since 9.1 s"
)
SLOTS = [
    {
        "mesh": "m0",
        "lane": "compute",
        "action": "F",
        "stage": "s0",
        "microbatch": 0,
        "start_s": 0.0,
        "end_s": 0.5,
    },
    {
        "mesh": "m1",
        "lane": "compute",
        "action": "F",
        "stage": "s1",
        "microbatch": 0,
        "start_s": 0.6,
        "end_s": 1.5,
    },
]
PLAN = {
    "begins": ["a"],
    "spec": {"microbatches": 1},
    "plan": {"slots": [], "programs": {"m0": [{"op": "F"}]}},
}


async def failed(api: Api, **changes: Any) -> str:
    """A job whose first attempt trained with a plan, and stalled."""
    job_id = await api.started(**changes)
    async with api.service.database.write() as session:
        attempt = await find_attempt(session, f"{job_id}-1")
        await record_job_plan(session, attempt, json.dumps(PLAN), at=utc_now())
        token = attempt.token
    api.cluster.logs[f"{job_id}-1"] = (
        "2026-05-17T12:00:00.000Z INFO worker: begins\n"
        f"SLOTLINE_ATTEMPT_TOKEN={token}\n"
        "reading s3://user:hunter22@bucket/data with api_key=abcdef123456\n"
        "2026-05-17T12:00:01.000Z ERROR gang: who waited for whom: AbortedError: m0 ended: m1 stalled\n"
        f"2026-05-17T12:00:01.000Z ERROR gang: who waited for whom: {STALL}\n"
    )
    await api.report(
        job_id,
        1,
        state="RUNNING",
        steps=[{"step": 5, "loss": 1.5, "step_s": 2.0}],
        timelines=[{"step": 5, "started_at": 1.75e9, "slots": SLOTS}],
        events=[{"at": 1.75e9, "kind": "versions", "message": "python 3.11.9, torch 2.9.0"}],
    )
    await api.report(job_id, 2, state="FAILED", reason="SLOT_STALLED", message=STALL)
    return job_id


async def opened(api: Api, job_id: str, **params: Any) -> dict[str, str]:
    answer = await api.client.get(f"/api/v1/jobs/{job_id}/postmortem", params=params)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/zip"
    assert "postmortem.zip" in answer.headers["content-disposition"]
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


async def test_a_failed_attempt_leaves_all_that_tells_why(api: Api):
    job_id = await failed(api)
    files = await opened(api, job_id)
    assert json.loads(files["attempt.json"])["reason"] == "SLOT_STALLED"
    assert json.loads(files["job.json"])["training"]["steps"] == 10
    assert json.loads(files["plan.json"])["begins"] == ["a"]
    assert "programs" not in json.loads(files["plan.json"])["plan"]
    assert json.loads(files["programs.json"]) == PLAN["plan"]["programs"]
    assert {slot["mesh"] for slot in json.loads(files["slots.json"])} == {"m0", "m1"}
    assert [step["loss"] for step in json.loads(files["steps.json"])] == [1.5]
    assert json.loads(files["versions.json"])["driver"] == "python 3.11.9, torch 2.9.0"
    assert any(event["kind"] == "versions" for event in json.loads(files["events.json"]))
    assert "it waits for m0;\n" in files["waits.txt"] and "AbortedError: m0 ended" in files["waits.txt"]
    assert "INFO worker: begins" in files["log.txt"]
    assert "step (5)" in files["README.txt"]


async def test_nothing_secret_is_in_it(make_api: ApiMaker):
    async with make_api(api_token=SecretStr("the-api-token"), ray_auth_token=SecretStr("ray-token-9")) as api:
        api.client.headers["Authorization"] = "Bearer the-api-token"
        model = {
            "factory": "worker.examples.gpt:build",
            "args": {"hf_token": "hf_0123456789", "tokenizer": "gpt2", "apiKey": "k-12345", "tokens": 7},
        }
        job_id = await failed(api, model=model)
        api.cluster.logs[f"{job_id}-1"] += "Authorization: Bearer the-api-token and ray-token-9\n"
        files = await opened(api, job_id)
        async with api.service.database.read() as session:
            token = (await find_attempt(session, f"{job_id}-1")).token
    for text in files.values():
        for secret in (
            token,
            "the-api-token",
            "ray-token-9",
            "hunter22",
            "abcdef123456",
            "hf_0123456789",
            "k-12345",
        ):
            assert secret not in text
    args = json.loads(files["job.json"])["model"]["args"]
    assert args == {"hf_token": REDACTED, "tokenizer": "gpt2", "apiKey": REDACTED, "tokens": 7}
    assert f"SLOTLINE_ATTEMPT_TOKEN={REDACTED}" in files["log.txt"]


async def test_what_later_attempts_replace_stays_with_the_one_that_failed(api: Api):
    """The next attempt has another plan, repeats the step and fails too: each has its own."""
    job_id = await failed(api, retry={"infrastructure": 5})
    await api.rounds(job_id, number=2)
    other = {**PLAN, "begins": ["b"]}
    async with api.service.database.write() as session:
        await record_job_plan(
            session, await find_attempt(session, f"{job_id}-2"), json.dumps(other), at=utc_now()
        )
    slower = [{**slot, "end_s": 9.0} for slot in SLOTS]
    timeline = {"step": 5, "started_at": 1.75e9, "slots": slower}
    await api.report(job_id, 1, number=2, state="RUNNING", timelines=[timeline])
    await api.report(job_id, 2, number=2, state="FAILED", reason="NAN_LOSS", message="nan")
    first, last = await opened(api, job_id, attempt=1), await opened(api, job_id)
    assert [json.loads(files["plan.json"])["begins"] for files in (first, last)] == [["a"], ["b"]]
    ends = [max(slot["end_s"] for slot in json.loads(files["slots.json"])) for files in (first, last)]
    assert ends == [1.5, 9.0]


async def test_only_the_last_ones_of_a_job_are_kept(api: Api):
    job_id = await failed(api, retry={"infrastructure": 20})
    for number in range(2, 8):
        await api.rounds(job_id, number=number)
        await api.report(job_id, 1, number=number, state="FAILED", reason="WORKER_LOST", message="gone")
    async with api.service.database.read() as session:
        kept = [await find_post_mortem(session, f"{job_id}-{number}") is not None for number in range(1, 8)]
    assert kept == [False, False, True, True, True, True, True]
    files = await opened(api, job_id, attempt=1)
    assert "plan.json is not here" in files["README.txt"] and "who waited" in files["log.txt"]


async def test_where_nothing_failed_there_is_no_post_mortem(api: Api):
    job_id = await api.started()
    none = await api.client.get(f"/api/v1/jobs/{job_id}/postmortem")
    assert none.status_code == 404 and "no attempt" in none.json()["detail"]
    await api.report(job_id, 1, state="FAILED", reason="NAN_LOSS", message="nan")
    other = await api.client.get(f"/api/v1/jobs/{job_id}/postmortem", params={"attempt": 4})
    assert other.status_code == 404 and "those that did are 1" in other.json()["detail"]
    assert "plan.json is not here" in (await opened(api, job_id))["README.txt"]


def facts(**changes: Any) -> PostMortemFacts:
    given: dict[str, Any] = {
        "attempt": {"number": 1, "job_id": "job-a", "reason": "NAN_LOSS", "message": "nan"},
        "job": {"env": {"A": "secret-env"}, "code": {"env_vars": {"B": "secret-env"}, "pip": []}},
        "plan": None,
        "step": None,
        "slots": None,
        "steps": [],
        "events": [],
        "log": [],
        "versions": {},
    }
    return PostMortemFacts(**{**given, **changes})


def test_an_environment_is_no_part_of_it():
    with zipfile.ZipFile(io.BytesIO(post_mortem_zip(facts()))) as archive:
        assert all(b"secret-env" not in archive.read(name) for name in archive.namelist())
        assert json.loads(archive.read("job.json")) == {"code": {"pip": []}}


def test_what_is_too_long_is_cut_with_a_word(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "LOG_LIMIT_BYTES", 1000)
    monkeypatch.setattr(room, "JSON_LIMIT_BYTES", 100)
    plan = json.dumps({"plan": {"programs": {"m0": ["x" * 500]}}})
    log = [f"line {number:05}" for number in range(1000)]
    with zipfile.ZipFile(io.BytesIO(post_mortem_zip(facts(plan=plan, log=log)))) as archive:
        text = archive.read("log.txt").decode()
        assert text.startswith("[910 lines before these are left out]\n") and text.endswith("line 00999\n")
        assert "programs.json" not in archive.namelist() and "plan.json" in archive.namelist()
        assert "programs.json is not here: it is " in archive.read("README.txt").decode()


def test_the_columns_that_it_tells_hold_no_token():
    from service.jobs.postmortem import ATTEMPT_FIELDS

    assert "token" not in ATTEMPT_FIELDS and all(hasattr(AttemptRow, name) for name in ATTEMPT_FIELDS)
