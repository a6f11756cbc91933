"""Jobs that begin from another job's checkpoint: submitted, refused, handed to drivers; the checkpoint stays until then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from service.cli.job_file import job_file_text
from service.store.database import utc_now
from service.store.files import StorageInUseError, begin_removal
from service.store.transitions import lock_job
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_artifacts import answered, deleted, ended, saving_job
from tests.service.api.routers.test_jobs import problem
from tests.service.api.routers.test_people import token
from tests.service.api.routers.test_weights import lay
from tests.service.conftest import job_body
from worker.contract import versions
from worker.contract.checkpoint_files import step_folder_name, step_uri

THIS_VERSION = {versions.PROTOCOL_HEADER: str(versions.PROTOCOL)}


def body(base: Path, resume_from: str, *, steps: int = 100, **changes: Any) -> dict[str, Any]:
    """A job that begins from there."""
    return job_body(
        checkpoint={"uri": str(base), "resume_from": resume_from},
        training={"steps": steps, "global_batch": 8, "microbatches": 4},
        pipeline={"stages": 1},
        **changes,
    )


async def first_job(api: Api, base: Path, *steps: int) -> str:
    """A job with these checkpoints, which leaves room for another."""
    return await saving_job(api, base, *steps, pipeline={"stages": 1})


async def refused(api: Api, given: dict[str, Any], status: int = 422, **request: Any) -> str:
    return problem(await api.client.post("/api/v1/jobs", json=given, **request), status)["detail"]


async def submitted(api: Api, given: dict[str, Any]) -> dict[str, Any]:
    answer = await api.client.post("/api/v1/jobs", json=given)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_a_job_begins_from_the_newest_whole_checkpoint_of_the_moment_and_its_driver_is_given_it(
    api: Api, tmp_path: Path
):
    base = tmp_path / "runs"
    first = await first_job(api, base, 2, 4)
    lay(base, first, 6, manifest=False)  # being written
    job = await submitted(api, body(base / "others", first))
    assert job["spec"]["checkpoint"]["resume_from"] == f"{first}@4", "as it is submitted again, whenever"
    lay(base, first, 8)
    await api.rounds(job["id"])
    given = (await api.driver(job["id"], "GET", headers=THIS_VERSION)).json()
    assert given["resume"] is None
    assert given["resume_from"] == {"uri": step_uri(str(base), first, 4), "job": first, "step": 4}
    again = await submitted(api, yaml.safe_load(job_file_text(job["spec"])))  # slotline job ID --spec
    assert again["spec"] == job["spec"] and again["id"] != job["id"]


async def test_a_repeated_submission_is_the_same_job_although_there_is_a_newer_checkpoint(
    api: Api, tmp_path: Path
):
    first = await first_job(api, tmp_path, 2)
    key = {"Idempotency-Key": "once"}
    answers = []
    for step in (4, 6):
        answers.append(
            (await api.client.post("/api/v1/jobs", json=body(tmp_path, first), headers=key)).json()["id"]
        )
        lay(tmp_path, first, step)
    assert len({*answers}) == 1


async def test_a_checkpoint_that_this_machine_does_not_see_is_known_by_what_the_driver_reported(
    api: Api, tmp_path: Path
):
    first = await api.started(checkpoint={"uri": "/not/mounted/here", "every_steps": 2})
    await api.report(first, 1, checkpoint={"step": 6, "uri": step_uri("/not/mounted/here", first, 6)})
    assert (await submitted(api, body(tmp_path, first)))["spec"]["checkpoint"]["resume_from"] == f"{first}@6"
    earlier = await submitted(api, body(tmp_path, f"{first}@4"))
    assert earlier["spec"]["checkpoint"]["resume_from"] == f"{first}@4", (
        "the workers look whether it is there"
    )
    assert f"no checkpoint of step 8; it has 6 as its newest: name one, as {first}@6" in await refused(
        api, body(tmp_path, f"{first}@8")
    )


async def test_what_there_is_not_is_refused_with_the_way_out(api: Api, tmp_path: Path):
    first = await first_job(api, tmp_path, 2, 4)
    none = await api.submit(checkpoint={"uri": str(tmp_path)})
    for given, message in (
        ("job-0123456789", "there is no job job-0123456789: `slotline jobs` lists them"),
        (f"{first}@3", f"has no checkpoint of step 3; it has 2, 4: name one, as {first}@4"),
        (none, "is QUEUED and has no checkpoint: submit again when it has one (`slotline checkpoints"),
        (f"{none}@5", "has no checkpoint"),
        (
            "runs/gpt",
            "write JOB or JOB@STEP (`slotline checkpoints JOB` lists the steps), or the absolute path",
        ),
        (f"{first}@last", "write JOB or JOB@STEP"),
    ):
        detail = await refused(api, body(tmp_path, given))
        assert "checkpoint.resume_from" in detail and message in detail
    behind = await refused(api, body(tmp_path, first, steps=4))
    assert (
        f"training.steps '4': is not behind step 4 of job {first}" in behind and "give more than 4" in behind
    )


async def test_another_owners_checkpoint_is_refused_and_an_operator_may_take_it(
    make_api: ApiMaker, tmp_path: Path
):
    async with make_api(api_token="secret") as api:
        alice, bob, operator = [
            await token(api, name, role)
            for name, role in (("alice", "submitter"), ("bob", "submitter"), ("olga", "operator"))
        ]
        given = job_body(checkpoint={"uri": str(tmp_path)})
        first = (await api.client.post("/api/v1/jobs", json=given, headers=alice)).json()["id"]
        lay(tmp_path, first, 2)
        detail = await refused(api, body(tmp_path, first), 403, headers=bob)
        assert f"job {first} is alice's, and bob is no operator: ask one, or begin from the weights" in detail
        for who in (alice, operator):
            answer = await api.client.post("/api/v1/jobs", json=body(tmp_path, first), headers=who)
            assert answer.status_code == 201, answer.text


async def test_a_path_is_taken_as_it_is(api: Api, tmp_path: Path):
    job = await submitted(api, body(tmp_path, "/shared/runs/step-0000000050"))
    await api.rounds(job["id"])
    given = (await api.driver(job["id"], "GET", headers=THIS_VERSION)).json()
    assert given["resume_from"] == {"uri": "/shared/runs/step-0000000050", "job": None, "step": None}


async def test_a_job_of_an_older_version_is_begun_from(api: Api, tmp_path: Path):
    first = await first_job(api, tmp_path, 2)
    async with api.service.database.write() as session:
        job = await lock_job(session, first)
        job.spec = {"checkpoint": {"uri": str(tmp_path)}, "gone": 1, "training": {"steps": 3}}
    job = await submitted(api, body(tmp_path, first))
    await api.rounds(job["id"])
    given = (await api.driver(job["id"], "GET", headers=THIS_VERSION)).json()
    assert given["resume_from"]["uri"] == step_uri(str(tmp_path), first, 2)


async def test_a_driver_that_would_begin_from_nothing_is_refused(api: Api, tmp_path: Path):
    first = await first_job(api, tmp_path, 2)
    job = await submitted(api, body(tmp_path, first))
    await api.rounds(job["id"])
    older = {versions.PROTOCOL_HEADER: str(versions.RESUME_FROM_PROTOCOL - 1)}
    answer = problem(await api.driver(job["id"], "GET", headers=older), 409)
    assert answer["code"] == "VERSION_MISMATCH" and "takes 2 to 2" in answer["detail"]
    assert (await api.job(job["id"]))["reason"] == "VERSION_MISMATCH"


async def test_a_checkpoint_stays_while_a_job_is_still_to_begin_from_it(api: Api, tmp_path: Path):
    first = await first_job(api, tmp_path, 2, 4)
    job = (await submitted(api, body(tmp_path, f"{first}@2")))["id"]
    path = f"/api/v1/jobs/{first}/checkpoints/2"

    async def wanted(sequence: int) -> list[int]:
        return (await api.report(first, sequence)).json().get("wanted_checkpoints", [])

    assert await wanted(2) == [2], "the driver that trains keeps it too"
    answer = problem(await answered(api, path), 409)
    assert answer["code"] == "CHECKPOINT_IN_USE"
    assert f"job {job} (QUEUED) begins from {step_folder_name(2)} of job {first}" in answer["detail"]
    await api.rounds(job)
    assert await wanted(3) == [2], "its attempt may not have come to it yet"
    await api.report(job, 1, checkpoint={"step": 6, "uri": step_uri(str(tmp_path), job, 6)})
    assert await wanted(4) == []
    assert (await deleted(api, path)).json()["removed"] == [step_folder_name(2)]


@pytest.mark.parametrize("end", ["cancel", "fail"])
async def test_a_job_that_has_ended_holds_no_checkpoint_and_its_retry_does_again(
    api: Api, tmp_path: Path, end: str
):
    first = await first_job(api, tmp_path, 2)
    job = (await submitted(api, body(tmp_path, first)))["id"]
    await ended(api, first)
    await api.rounds(job)

    async def expires() -> bool:
        """True if retention would delete the source's files; nothing is changed."""
        try:
            async with api.service.database.write() as session:
                await begin_removal(session, first, None, at=utc_now(), limit_s=1, by="", days=1)
                await session.rollback()
        except StorageInUseError:
            return False
        return True

    assert not await expires()
    if end == "cancel":
        await api.client.post(f"/api/v1/jobs/{job}/cancel")
        await api.report(job, 1, state="CANCELLED")
    else:
        await ended(api, job)
    assert await expires()
    assert (await api.client.post(f"/api/v1/jobs/{job}/retry")).status_code == 202
    assert not await expires()


async def test_a_checkpoint_that_is_being_deleted_is_not_begun_from(api: Api, tmp_path: Path):
    first = await first_job(api, tmp_path, 2, 4)
    async with api.service.database.write() as session:
        await begin_removal(session, first, [step_folder_name(2)], at=utc_now(), limit_s=60, by="alice")
    answer = problem(await api.client.post("/api/v1/jobs", json=body(tmp_path, f"{first}@2")), 409)
    assert answer["code"] == "CHECKPOINT_IN_USE" and "somebody deletes" in answer["detail"]
    listed = (await api.client.get("/api/v1/jobs")).json()["items"]
    assert [job["id"] for job in listed] == [first], "nothing was stored"
    await submitted(api, body(tmp_path, f"{first}@4"))
