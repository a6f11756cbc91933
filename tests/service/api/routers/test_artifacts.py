"""What jobs leave: listed, counted and deleted, by a process of the cluster and never under somebody who reads it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.store.database import utc_now
from service.store.transitions import lock_job
from tests.polling import until_async
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.api.routers.test_people import token
from tests.service.api.routers.test_weights import exporting, lay
from worker.contract.checkpoint_files import step_folder_name, step_uri
from worker.contract.tasks import REMOVAL_REQUEST_VARIABLE, REMOVAL_RESULT_MARK, removal_requests_from_json
from worker.tasks.remove import remove_artifacts


async def saving_job(api: Api, base: Path, *steps: int, **changes: Any) -> str:
    """A job with these checkpoints, of which its driver has reported the last."""
    job_id = await api.started(checkpoint={"uri": str(base), "every_steps": 2, "keep": 9}, **changes)
    for step in steps:
        lay(base, job_id, step)
    if steps:
        told = {
            "step": steps[-1],
            "uri": step_uri(str(base), job_id, steps[-1]),
            "stored_bytes": 100 * len(steps),
        }
        assert (await api.report(job_id, 1, checkpoint=told)).status_code < 300
    return job_id


async def ended(api: Api, job_id: str) -> None:
    await api.report(job_id, 2, state="FAILED", reason="NAN_LOSS", message="no number")


def works(api: Api, run_id: str) -> None:
    """Do what the process of the cluster would do."""
    submission = api.cluster.submissions[run_id]
    assert submission.entrypoint.endswith("-m worker.tasks remove") and submission.resources == {}
    found = [
        asdict(remove_artifacts(one))
        for one in removal_requests_from_json(submission.env[REMOVAL_REQUEST_VARIABLE])
    ]
    api.cluster.logs[run_id] = f"a warning\n{REMOVAL_RESULT_MARK}{json.dumps({'jobs': found})}\n"
    api.cluster.states[run_id] = RayJob(RayState.SUCCEEDED)


async def begun(api: Api, path: str) -> str:
    """The id of the run that deletes, after the first request."""
    before = set(api.cluster.submissions)
    first = await api.client.delete(path)
    assert first.status_code == 202 and first.headers["Retry-After"] == "1", first.text
    new = await until_async(lambda: set(api.cluster.submissions) - before)
    (run_id,) = new
    return run_id


async def answered(api: Api, path: str) -> Any:
    async with asyncio.timeout(60):
        while True:
            response = await api.client.delete(path)
            if response.status_code != 202:
                return response
            await asyncio.sleep(0.02)


async def deleted(api: Api, path: str) -> Any:
    works(api, await begun(api, path))
    return await answered(api, path)


async def test_a_checkpoint_is_deleted_by_the_cluster_and_told(api: Api, tmp_path: Path):
    base = tmp_path / "runs"
    job_id = await saving_job(api, base, 2, 4, 6)
    path = f"/api/v1/jobs/{job_id}/checkpoints"
    found = await deleted(api, f"{path}/4")
    assert found.status_code == 200, found.text
    assert found.json()["removed"] == [step_folder_name(4)] and found.json()["left"] == [6, 2]
    assert {one["step"] for one in (await api.client.get(path)).json()["items"]} == {2, 6}
    again = (await deleted(api, f"{path}/4")).json()
    assert (again["removed"], again["left"]) == ([], [6, 2]), "twice is once"
    events = (await api.client.get(f"/api/v1/jobs/{job_id}/events")).json()["items"]
    assert [one["kind"] for one in events].count("removed") == 1
    audit = (await api.client.get("/api/v1/audit")).json()["items"]
    assert (audit[0]["action"], audit[0]["subject"], audit[0]["detail"]) == (
        "job.remove_files",
        job_id,
        step_folder_name(4),
    )
    assert (await api.client.get("/api/v1/usage")).json()["items"][0]["storage_bytes"] == 200


@pytest.mark.slow
async def test_what_a_job_would_go_on_from_stays_until_it_has_ended(api: Api, tmp_path: Path):
    base = tmp_path / "runs"
    job_id = await saving_job(api, base, 2, 4)
    lay(base, job_id, 6)  # finished and not reported so far
    path = f"/api/v1/jobs/{job_id}/checkpoints"
    refused = problem(await api.client.delete(f"{path}/4"), 409)
    assert refused["code"] == "CHECKPOINT_IN_USE" and "would go on from this checkpoint" in refused["detail"]
    newest = problem(await deleted(api, f"{path}/6"), 409)
    assert newest["code"] == "CHECKPOINT_IN_USE" and "from which the job would go on" in newest["detail"]
    assert (base / job_id / step_folder_name(6)).is_dir()
    await ended(api, job_id)
    for step, left in ((4, 6), (6, 2), (2, None)):
        assert (await deleted(api, f"{path}/{step}")).status_code == 200
        shown = (await api.job(job_id))["checkpoint"]
        assert (shown and shown["step"]) == left, "a retry goes on from what is left"
    assert (await api.client.post(f"/api/v1/jobs/{job_id}/retry")).status_code == 202
    await api.rounds(job_id, 2)
    assert (await api.driver(job_id, "GET", "", number=2)).json()["resume"] is None


async def test_no_attempt_begins_and_no_export_reads_while_something_is_deleted(api: Api, tmp_path: Path):
    base = tmp_path / "runs"
    job_id = await saving_job(api, base, 2, 4)
    await ended(api, job_id)
    path = f"/api/v1/jobs/{job_id}/checkpoints/4"
    run_id = await begun(api, path)
    refused = problem(await api.client.post(f"/api/v1/jobs/{job_id}/retry"), 409)
    assert refused["code"] == "CHECKPOINT_IN_USE" and "being deleted" in refused["detail"]
    for query in ("", "?step=4"):
        assert (await api.client.post(f"/api/v1/jobs/{job_id}/export{query}")).status_code == 202
        async with asyncio.timeout(60):
            while (told := await api.client.post(f"/api/v1/jobs/{job_id}/export{query}")).status_code == 202:
                await asyncio.sleep(0.02)
        assert "somebody deletes step-0000000004" in problem(told, 422)["detail"]
    assert list(api.cluster.submissions) == [f"{job_id}-1", run_id], "nothing was begun"
    reading = await exporting(api, job_id, "?step=2")  # another one may be read
    works(api, run_id)
    assert (await answered(api, path)).status_code == 200
    other = f"/api/v1/jobs/{job_id}/checkpoints/2"
    assert (await api.client.delete(other)).status_code == 202
    assert "an export reads step-0000000002" in problem(await answered(api, other), 409)["detail"]
    assert (base / job_id / step_folder_name(2)).is_dir()
    api.cluster.states[reading] = RayJob(RayState.FAILED)
    assert (await api.client.post(f"/api/v1/jobs/{job_id}/retry")).status_code == 202


@pytest.mark.slow
async def test_a_deletion_that_fails_leaves_the_job_as_it_was(
    make_api: ApiMaker, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("service.orchestrator.tasks.runner.TASK_LOG_SETTLES_S", 0.1)
    async with make_api() as api:
        job_id = await saving_job(api, tmp_path / "runs", 2, 4)
        await ended(api, job_id)
        path = f"/api/v1/jobs/{job_id}/checkpoints/4"
        run_id = await begun(api, path)
        assert (await api.job(job_id))["checkpoint"] is None, "nobody goes by it meanwhile"
        api.cluster.states[run_id] = RayJob(RayState.FAILED)
        assert "ended without a result" in problem(await answered(api, path), 503)["detail"]
        assert (await api.job(job_id))["checkpoint"]["step"] == 4
        api.cluster.away = True
        assert (await api.client.delete(path)).status_code == 202
        assert "the cluster is away" in problem(await answered(api, path), 503)["detail"]
        api.cluster.away = False
        assert (await deleted(api, path)).json()["left"] == [2]


async def test_only_owners_and_operators_delete(make_api: ApiMaker, tmp_path: Path):
    async with make_api(api_token="secret") as api:
        people = {name: await token(api, name, role) for name, role in ROLES.items()}
        api.client.headers.update(people["ann"])
        job_id = await saving_job(api, tmp_path / "runs", 2, 4)
        await ended(api, job_id)
        for what in ("checkpoints/2", "exports/export-step-0000000002"):
            for who in ("bob", "vic"):
                found = await api.client.delete(f"/api/v1/jobs/{job_id}/{what}", headers=people[who])
                problem(found, 403)
        assert (
            len(api.cluster.submissions) == 1 and (tmp_path / "runs" / job_id / step_folder_name(2)).is_dir()
        )
        assert (await deleted(api, f"/api/v1/jobs/{job_id}/checkpoints/2")).status_code == 200
        seen = (await api.client.get("/api/v1/usage", headers=people["vic"])).json()["items"]
        assert [(one["owner"], one["jobs"]) for one in seen] == [("ann", 1)]
        assert (await api.client.get("/api/v1/usage?owner=bob", headers=people["vic"])).json()["items"] == []


ROLES = {"ann": "submitter", "bob": "submitter", "vic": "viewer"}


async def test_jobs_without_checkpoints_and_unknown_ones_have_nothing_to_be_deleted(make_api: ApiMaker):
    async with make_api() as api:
        job_id = await api.started()
        told = problem(await api.client.delete(f"/api/v1/jobs/{job_id}/checkpoints/2"), 409)
        assert "saves no checkpoints" in told["detail"]
        problem(await api.client.delete("/api/v1/jobs/job-none/checkpoints/2"), 404)
        for name in ("step-0000000002", "export-step-2", "..", "export-step-0000000002%2F.."):
            found = await api.client.delete(f"/api/v1/jobs/{job_id}/exports/{name}")
            assert found.status_code in (404, 405, 422), (name, found.text)


async def test_what_a_job_has_left_is_listed_with_sizes_and_when_it_goes(make_api: ApiMaker, tmp_path: Path):
    async with make_api(keep_checkpoints_days=3) as api:
        base = tmp_path / "runs"
        package = await api.client.post(
            "/api/v1/packages", content=EMPTY_ZIP, headers={"Content-Type": "application/zip"}
        )
        code = {"working_dir": package.json()["uri"]}
        job_id = await saving_job(api, base, 2, code=code)
        folder = base / job_id / f"export-{step_folder_name(2)}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x" * 70)
        (base / job_id / "mine").mkdir()
        path = f"/api/v1/jobs/{job_id}/artifacts"
        found = (await api.client.get(path)).json()
        by_kind = {one["kind"]: one for one in found["items"]}
        assert set(by_kind) == {"export", "package"} and found["notes"] == [] and found["stored_bytes"] == 100
        assert by_kind["export"]["size_bytes"] == 70 and by_kind["export"]["expires_at"] is None
        assert by_kind["export"]["place"] == str(folder) and by_kind["export"]["step"] == 2
        assert by_kind["package"]["size_bytes"] == len(EMPTY_ZIP)
        await ended(api, job_id)
        async with api.service.database.write() as session:
            job = await lock_job(session, job_id)
            ended_at = job.finished_at
        found = (await api.client.get(path)).json()
        by_kind = {one["kind"]: one for one in found["items"]}
        assert {"postmortem", "export"} <= set(by_kind)
        goes = {kind: one["expires_at"] for kind, one in by_kind.items()}
        assert goes["export"].startswith(str((ended_at + timedelta(days=3)).date()))
        assert goes["postmortem"] > goes["export"] and goes["package"] is None
        assert (await api.client.get(by_kind["postmortem"]["place"])).status_code == 200
        name = by_kind["export"]["name"]
        assert (await deleted(api, f"/api/v1/jobs/{job_id}/exports/{name}")).json()["freed_bytes"] == 70
        kinds = [one["kind"] for one in (await api.client.get(path)).json()["items"]]
        assert "export" not in kinds and (base / job_id / "mine").is_dir()


EMPTY_ZIP = b"PK\x05\x06" + bytes(18)


async def test_files_of_jobs_that_ended_long_ago_go_where_the_settings_say_so(api: Api, tmp_path: Path):
    base = tmp_path / "runs"
    small = {"pipeline": {"stages": 1}}
    old, young, running = [await saving_job(api, base, 2, 4, **small) for _ in range(3)]
    for job_id in (old, young):
        await ended(api, job_id)
    async with api.service.database.write() as session:
        (await lock_job(session, old)).finished_at = utc_now() - timedelta(days=9)
    emptying = asyncio.create_task(api.service.remover.task.remove_expired(5.0))
    runs = await until_async(lambda: [one for one in api.cluster.submissions if one.startswith("remove-")])
    works(api, runs[0])
    await asyncio.wait_for(emptying, 60)
    assert sorted(one.name for one in base.iterdir() if any(one.iterdir())) == sorted([young, running])
    shown = await api.job(old)
    assert shown["checkpoint"] is None
    events = (await api.client.get(f"/api/v1/jobs/{old}/events")).json()["items"]
    assert "SLOTLINE_KEEP_CHECKPOINTS_DAYS" in events[-1]["message"] and events[-1]["kind"] == "removed"
    await api.service.remover.task.remove_expired(5.0)
    assert [one for one in api.cluster.submissions if one.startswith("remove-")] == runs, "once is enough"


@pytest.mark.parametrize(
    ("checkpoint", "kept"),
    [
        ({"every_steps": 2, "keep": 9}, {6: ["latest"], 4: ["best"], 2: []}),
        ({"every_steps": 2, "keep": 9, "keep_every": 4}, {6: ["latest"], 4: ["best", "every"], 2: []}),
    ],
)
async def test_a_list_says_why_a_checkpoint_stays(make_api: ApiMaker, tmp_path: Path, checkpoint, kept):
    async with make_api() as api:
        base = tmp_path / "runs"
        job_id = await api.started(checkpoint={"uri": str(base), **checkpoint})
        for step in kept:
            lay(base, job_id, step)
        best = {"step": 4, "uri": step_uri(str(base), job_id, 4), "metric": "loss", "value": 0.5}
        await api.report(job_id, 1, best_checkpoint=best)
        items = (await api.client.get(f"/api/v1/jobs/{job_id}/checkpoints")).json()["items"]
        assert {one["step"]: one["kept"] for one in items} == kept
        odd = {"uri": str(base), "every_steps": 2, "keep_every": 5}
        spec = {**(await api.job(job_id))["spec"], "checkpoint": odd}
        told = problem(await api.client.post("/api/v1/jobs", json=spec), 422)["detail"]
        assert "keep_every 5 is no multiple of every_steps 2" in told and "set it to 4" in told
