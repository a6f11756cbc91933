"""Checkpoints and final weights over REST: what the control plane sees, and what the cluster writes for it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.tasks.artifacts import ExportTask
from service.store.measurements import StepRecord
from tests.polling import until_async
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.conftest import job_body
from worker.contract.checkpoint_files import step_uri
from worker.contract.tasks import EXPORT_REQUEST_VARIABLE, EXPORT_RESULT_MARK, ExportRequest

LOSS = {2: 0.7, 4: 0.5, 6: 0.9, 8: 0.4}


def lay(base: Path, job_id: str, step: int, *, size: int = 100, manifest: bool = True) -> Path:
    """A checkpoint as a control plane sees one: a shard and a manifest that tells its size."""
    folder = Path(step_uri(str(base), job_id, step))
    folder.mkdir(parents=True)
    (folder / "m0.pt").write_bytes(b"x" * size)
    if manifest:
        told = {
            "format": 2,
            "step": step,
            "shards": {"m0": 100},
            "names": {"m0": []},
            "sha256": {"m0": "0" * 64},
        }
        (folder / "manifest.json").write_text(json.dumps(told))
    return folder


async def saving_job(api: Api, base: Path) -> str:
    return await api.started(checkpoint={"uri": str(base), "every_steps": 2, "keep": 9})


async def test_checkpoints_are_listed_with_their_loss_the_latest_and_the_best_whole_one(
    api: Api, tmp_path: Path
):
    base = tmp_path / "runs"
    job_id = await saving_job(api, base)
    assert (await api.client.get(f"/api/v1/jobs/{job_id}/checkpoints")).json()["items"] == [], "nothing yet"
    steps = [{**vars(StepRecord(step, loss, *([None] * 7)))} for step, loss in LOSS.items()]
    uri = step_uri(str(base), job_id, 8)
    reported = await api.report(job_id, 1, steps=steps, checkpoint={"step": 8, "uri": uri})
    assert reported.status_code < 300, reported.text
    lay(base, job_id, 2)
    lay(base, job_id, 4)
    lay(base, job_id, 6)
    lay(base, job_id, 8, size=60)
    lay(base, job_id, 5, manifest=False)
    lay(base, job_id, 10, manifest=False)
    old = lay(base, job_id, 12, manifest=False) / "m0.pt"
    os.utime(old, (time.time() - 700,) * 2)
    found = (await api.client.get(f"/api/v1/jobs/{job_id}/checkpoints")).json()
    assert found["uri"] == f"{base}/{job_id}"
    by_step = {one["step"]: one for one in found["items"]}
    assert {step: one["state"] for step, one in by_step.items()} == {
        12: "unfinished",
        10: "being written",
        8: "damaged",
        6: "complete",
        5: "unfinished",
        4: "complete",
        2: "complete",
    }
    assert by_step[6]["blocking_s"] is None, "of an older version"
    assert "m0.pt has 60 bytes, the manifest says 100" in by_step[8]["damage"]
    assert [step for step, one in by_step.items() if one["latest"]] == [6]
    assert [step for step, one in by_step.items() if one["best"]] == [4], "8 is damaged"
    assert (
        by_step[4]["loss"] == 0.5 and by_step[4]["size_bytes"] == 100 and by_step[4]["saved_at"].endswith("Z")
    )
    summed = (await api.client.get(f"/api/v1/jobs/{job_id}/checkpoints?sums=true")).json()["items"]
    assert [one["state"] for one in summed if one["step"] % 4 == 0][1:] == ["damaged"] * 2, "by their content"
    await api.report(job_id, 2, state="FAILED", reason="NAN_LOSS", message="no number")
    ended = (await api.client.get(f"/api/v1/jobs/{job_id}/checkpoints")).json()["items"]
    assert {one["step"] for one in ended if one["state"] == "unfinished"} == {5, 10, 12}


async def test_a_place_that_the_control_plane_does_not_see_is_named(make_api: ApiMaker, tmp_path: Path):
    async with make_api() as api:
        job_id = await saving_job(api, tmp_path / "elsewhere")
        uri = step_uri("/mnt/elsewhere", job_id, 2)
        await api.report(job_id, 1, checkpoint={"step": 2, "uri": uri})
        told = problem(await api.client.get(f"/api/v1/jobs/{job_id}/checkpoints"), 503)["detail"]
        assert (
            f"there is no {tmp_path}/elsewhere/{job_id} to be seen" in told
            and uri in told
            and "mount" in told
        )


@pytest.mark.parametrize("uri", ["http://10.0.0.1/x", "file:///a::http://10.0.0.1/x", "ftp://host/x"])
async def test_the_control_plane_calls_no_host_that_a_job_names(make_api: ApiMaker, monkeypatch, uri):
    monkeypatch.setattr(
        "service.jobs.artifacts.inspect_checkpoints", lambda *_, **__: pytest.fail("it was looked at")
    )
    async with make_api() as api:
        job_id = await api.submit(checkpoint={"uri": uri})
        told = problem(await api.client.get(f"/api/v1/jobs/{job_id}/checkpoints"), 503)["detail"]
        assert uri in told and "only at paths, s3 and gs" in told


async def test_jobs_without_checkpoints_and_unknown_ones_are_refused(make_api: ApiMaker):
    async with make_api() as api:
        job_id = await api.submit()
        for method, path in (("GET", "checkpoints"), ("POST", "export")):
            told = problem(await api.client.request(method, f"/api/v1/jobs/{job_id}/{path}"), 409)["detail"]
            assert "saves no checkpoints" in told
            problem(await api.client.request(method, f"/api/v1/jobs/job-none/{path}"), 404)


async def exporting(api: Api, job_id: str, query: str = "") -> str:
    """The id of the run that writes a job's weights after the first request for them."""
    before = set(api.cluster.submissions)
    first = await api.client.post(f"/api/v1/jobs/{job_id}/export{query}")
    assert first.status_code == 202 and first.headers["Retry-After"] == "1", first.text
    new = await until_async(lambda: set(api.cluster.submissions) - before)
    (run_id,) = new
    return run_id


async def answered(api: Api, job_id: str, query: str = "") -> Any:
    async with asyncio.timeout(60):
        while True:
            response = await api.client.post(f"/api/v1/jobs/{job_id}/export{query}")
            if response.status_code != 202:
                return response
            await asyncio.sleep(0.02)


async def test_weights_are_written_by_a_process_of_the_cluster_that_holds_no_accelerator(make_api: ApiMaker):
    written = {
        "step": 4,
        "uri": "/runs/x",
        "files": [{"name": "model.safetensors", "bytes": 9}],
        "tensors": 3,
    }
    async with make_api() as api:
        job_id = await api.started(checkpoint={"uri": "s3://bucket/runs"})
        run_id = await exporting(api, job_id)
        submission = api.cluster.submissions[run_id]
        assert submission.entrypoint.endswith("-m worker.tasks export") and submission.resources == {}
        asked = ExportRequest.from_json(submission.env[EXPORT_REQUEST_VARIABLE])
        assert asked == ExportRequest("s3://bucket/runs", job_id, None, None)
        assert (await api.client.post(f"/api/v1/jobs/{job_id}/export")).status_code == 202
        api.cluster.logs[run_id] = (
            f"warning: slow\n{EXPORT_RESULT_MARK}{json.dumps(written | {'notes': ['passed over: x']})}\n"
        )
        api.cluster.states[run_id] = RayJob(RayState.SUCCEEDED)
        assert (await answered(api, job_id)).json() == written | {"notes": ["passed over: x"]}
        assert api.cluster.stopped == [run_id]
        other = await exporting(api, job_id, "?step=2")
        assert ExportRequest.from_json(api.cluster.submissions[other].env[EXPORT_REQUEST_VARIABLE]).step == 2
        problem(await api.client.post(f"/api/v1/jobs/{job_id}/export?step=0"), 422)
        refused = problem(await api.client.post(f"/api/v1/jobs/{job_id}/export?merged=true"), 422)
        assert "merge_and_unload()" in refused["detail"]
        refused = problem(await api.client.post(f"/api/v1/jobs/{job_id}/export?format=dcp"), 422)
        assert "format is 'dcp'" in refused["detail"] and "checkpoint as it lies" in refused["detail"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            {"failed": "there is no /runs to be seen from here (on node-7)"},
            "no /runs to be seen from here (on node-7)",
        ),
        (None, "ended without a result"),
        ("never", "was written for more than 0.2 s and was ended"),
        ("away", "the cluster is away"),
    ],
)
async def test_weights_that_cannot_be_written_are_a_problem_with_the_reason(
    make_api: ApiMaker, monkeypatch, answer, says
):
    monkeypatch.setattr("service.orchestrator.tasks.runner.TASK_LOG_SETTLES_S", 0.1)
    monkeypatch.setattr(ExportTask, "limit_s", 0.2 if answer == "never" else 60.0)
    async with make_api() as api:
        job_id = await api.started(checkpoint={"uri": "/runs"})
        if answer == "away":
            api.cluster.away = True
            assert (await api.client.post(f"/api/v1/jobs/{job_id}/export")).status_code == 202
        else:
            run_id = await exporting(api, job_id)
        if isinstance(answer, dict):
            api.cluster.logs[run_id] = f"{EXPORT_RESULT_MARK}{json.dumps(answer)}\n"
        if answer is None or isinstance(answer, dict):
            api.cluster.states[run_id] = RayJob(RayState.FAILED)
        told = problem(await answered(api, job_id), 422)["detail"]
        assert says in told and job_id in told
        api.cluster.away = False
        await exporting(api, job_id)  # it may be asked for again


async def test_few_exports_are_under_way_at_once(make_api: ApiMaker, monkeypatch):
    monkeypatch.setattr("service.orchestrator.tasks.artifacts.ExportTask.concurrency", 1)
    async with make_api() as api:
        job_id = await api.started(checkpoint={"uri": "/runs"})
        run_id = await exporting(api, job_id)
        full = await api.client.post(f"/api/v1/jobs/{job_id}/export?step=2")
        assert "exports are under way" in problem(full, 503)["detail"]
        api.cluster.logs[run_id] = f"{EXPORT_RESULT_MARK}{json.dumps({'failed': 'x'})}\n"
        api.cluster.states[run_id] = RayJob(RayState.FAILED)
        async with asyncio.timeout(60):  # what is over and nobody asks for gives its place
            while (await api.client.post(f"/api/v1/jobs/{job_id}/export?step=2")).status_code == 503:
                await asyncio.sleep(0.02)


async def test_weights_to_start_from_lie_at_an_absolute_path(make_api: ApiMaker):
    async with make_api() as api:
        for place in ("weights.pt", "s3://bucket/w", "./w"):
            body = job_body(model={"factory": "a:b", "weights": place})
            told = problem(await api.client.post("/api/v1/jobs", json=body), 422)
            assert f"model.weights '{place}': is no absolute path" in told["detail"]
        job_id = await api.submit(model={"factory": "a:b", "weights": "/weights/gpt", "freeze": ["wte.*"]})
        assert (await api.job(job_id))["spec"]["model"]["freeze"] == ["wte.*"]
