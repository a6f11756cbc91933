"""What drivers of other versions are told: those that are understood are taken, others refused by name."""

from __future__ import annotations

import pytest

from service.store.events import events_of
from tests.service.api.conftest import Api
from worker.contract import versions

FIRST_RELEASE = {
    "sequence": 1,
    "state": "RUNNING",
    "reason": None,
    "message": None,
    "steps": [{"step": 1, "loss": 2.5, "step_s": 0.1}],
    "timelines": [],
    "events": [{"at": 1.0, "kind": "note", "message": "begins"}],
    "metrics_endpoint": None,
    "checkpoint": None,
}


async def test_a_driver_of_the_first_release_says_no_version_and_is_taken(api: Api):
    job_id = await api.started()
    assert (await api.driver(job_id, "GET")).json()["protocol"] == versions.PROTOCOL
    assert (await api.driver(job_id, "POST", "/reports", json=FIRST_RELEASE)).json() == {
        "command": "continue"
    }
    steps = (await api.client.get(f"/api/v1/jobs/{job_id}/steps")).json()["items"]
    assert [(step["step"], step["loss"]) for step in steps] == [(1, 2.5)]


async def test_a_newer_driver_is_taken_and_what_it_says_beyond_us_is_passed_over(api: Api):
    job_id = await api.started()
    newer = {versions.PROTOCOL_HEADER: str(versions.PROTOCOL + 7)}
    said = {**FIRST_RELEASE, "mood": "calm", "steps": [{"step": 1, "loss": 2.5, "weather": "fine"}]}
    assert (await api.driver(job_id, "POST", "/reports", json=said, headers=newer)).status_code == 200
    assert (await api.job(job_id))["state"] == "RUNNING"


@pytest.mark.parametrize("headers", [{}, {versions.PROTOCOL_HEADER: "0"}, {versions.PROTOCOL_HEADER: "one"}])
async def test_a_driver_that_would_be_misread_is_refused_and_the_job_says_why(
    api: Api, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    job_id = await api.started(retry={"infrastructure": 1})
    monkeypatch.setattr(versions, "OLDEST_DRIVER_PROTOCOL", 1)
    answer = await api.driver(job_id, "POST", "/reports", json={"of": "another time"}, headers=headers)
    assert answer.status_code == 409, "before its words, which may be others now, are found wrong"
    problem = answer.json()
    assert problem["code"] == "VERSION_MISMATCH"
    assert "the driver speaks protocol 0, and this control plane" in problem["detail"]
    assert (
        f"takes 1 to {versions.PROTOCOL}: give Ray's pods the worker image of this version"
        in problem["detail"]
    )
    job = await api.job(job_id)
    assert (job["state"], job["reason"]) == ("RECOVERING", "VERSION_MISMATCH"), "an upgrade may be under way"
    assert problem["detail"] in job["message"]
    again = await api.driver(job_id, "POST", "/reports", json=FIRST_RELEASE, headers=headers)
    assert again.status_code == 409 and again.json()["code"] == "ATTEMPT_OVER"
    async with api.service.database.read() as session:
        ends = [e for e in await events_of(session, job_id) if "VERSION_MISMATCH" in e.message]
    assert len(ends) == 1

    await api.rounds(job_id, 2)
    newer = {versions.PROTOCOL_HEADER: "1"}
    taken = await api.driver(job_id, "POST", "/reports", number=2, json=FIRST_RELEASE, headers=newer)
    assert taken.status_code == 200 and (await api.job(job_id))["state"] == "RUNNING"


async def test_whoever_has_no_token_is_told_nothing_of_versions(api: Api, monkeypatch: pytest.MonkeyPatch):
    job_id = await api.started()
    monkeypatch.setattr(versions, "OLDEST_DRIVER_PROTOCOL", 1)
    answer = await api.driver(job_id, "POST", "/reports", json=FIRST_RELEASE, token="another")
    assert answer.status_code == 401
    assert (await api.job(job_id))["state"] == "STARTING"
