"""slotline checkpoints and export, against a served control plane and real checkpoints on this machine's disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from tests.polling import until
from tests.service.cli.conftest import Run
from tests.service.conftest import job_body
from tests.service.serving import Served
from worker.contract.checkpoint_files import SaveSeconds
from worker.contract.tasks import EXPORT_RESULT_MARK

if TYPE_CHECKING:
    import torch


def trained(run: Run, served: Served, tmp_path: Path) -> tuple[str, torch.nn.Module]:
    """A job that saves, and a model that lies in its checkpoints of steps 2 and 4."""
    import torch

    from worker.checkpoint import format as checkpoint_format
    from worker.checkpoint.record import RECORD_SHARD, make_record, record_to_state

    body = job_body(checkpoint={"uri": str(tmp_path / "runs"), "every_steps": 2})
    file = tmp_path / "saving.yaml"
    file.write_text(yaml.safe_dump(body))
    job_id = run("submit", file, "--json").json["id"]
    until(lambda: f"{job_id}-1" in served.cluster.submissions)
    model = torch.nn.Linear(3, 2)
    for step in (2, 4):
        uri = checkpoint_format.step_uri(str(tmp_path / "runs"), job_id, step)
        state = {"parameters": {name: p.detach() * step for name, p in model.named_parameters()}}
        checkpoint_format.save_shard(uri, step=step, shard="m0", state=state)
        checkpoint_format.save_shard(
            uri, step=step, shard=RECORD_SHARD, state=record_to_state(make_record(model), {})
        )
        seconds = SaveSeconds(0.25, 1.5)
        checkpoint_format.finish_checkpoint(
            uri, step=step, shards=["m0", RECORD_SHARD], keep=3, seconds=seconds
        )
    return job_id, model


@pytest.mark.slow
def test_checkpoints_are_shown_and_weights_exported_on_this_machine(run: Run, served: Served, tmp_path: Path):
    import torch
    from safetensors.torch import load_file

    job_id, model = trained(run, served, tmp_path)
    shown = run("checkpoints", job_id, "--sums")
    assert shown.code == 0 and "latest" in shown.out and "checksums" in shown.out
    assert "0.25 s" in shown.out and "1.5 s" in shown.out
    assert [one["step"] for one in run("checkpoints", job_id, "--json").json["items"]] == [4, 2]
    out = tmp_path / "out"
    result = run("export", job_id, "-o", out)
    assert result.code == 0, result.err
    assert f"2 tensors after step 4, 1 files of 0.00 MB: {out}" in result.out
    assert torch.equal(load_file(out / "model.safetensors")["weight"], model.weight * 4)
    assert run("export", job_id, "-o", tmp_path / "two", "--step", 2, "--json").json["step"] == 2
    (tmp_path / "runs" / job_id / "step-0000000004" / "m0.distcp").write_bytes(b"short")
    passed_over = run("export", job_id, "-o", tmp_path / "three")
    assert (
        passed_over.code == 0
        and "m0.distcp has 5 bytes" in passed_over.err
        and "after step 2" in passed_over.out
    )
    damaged = run("checkpoints", job_id)
    assert damaged.code == 0 and "damaged" in damaged.out and "m0.distcp has 5 bytes" in damaged.err
    missing = run("export", job_id, "-o", tmp_path / "four", "--step", 9)
    assert missing.code == 1 and "no checkpoint of step 9" in missing.err and "leave out -o" in missing.err


@pytest.mark.slow
def test_without_a_folder_the_cluster_writes_the_weights(run: Run, served: Served, tmp_path: Path):
    job_id, _ = trained(run, served, tmp_path)
    answer = {
        "step": 4,
        "uri": "/runs/x",
        "files": [{"name": "model.safetensors", "bytes": 2e9}],
        "tensors": 2,
    }
    cluster, submit = served.cluster, served.cluster.submit

    async def submitted(submission):
        await submit(submission)
        if submission.id.startswith("export-"):
            cluster.logs[submission.id] = (
                f"{EXPORT_RESULT_MARK}{json.dumps(answer | {'notes': ['look out']})}\n"
            )
            cluster.states[submission.id] = RayJob(RayState.SUCCEEDED)

    cluster.submit = submitted
    result = run("export", job_id)
    assert result.code == 0, result.err
    assert "2 tensors after step 4, 1 files of 2.00 GB: /runs/x" in result.out and "look out" in result.err


@pytest.mark.slow
def test_an_export_that_takes_longer_than_one_would_wait_is_told_so(run: Run, served: Served, tmp_path: Path):
    job_id, _ = trained(run, served, tmp_path)  # nobody ends the run that writes
    result = run("export", job_id, "--limit-s", 1)
    assert result.code == 1 and "for more than 1 s: ask again later" in result.err
    assert result.err.count(f"writes the weights of {job_id} …") == 1, "told once"


def test_a_job_that_saves_nothing_has_nothing_to_export(run: Run, served: Served, job_file: Path):
    job_id = run("submit", job_file, "--json").json["id"]
    for arguments in (("export", job_id), ("export", job_id, "-o", "x"), ("checkpoints", job_id)):
        result = run(*arguments)
        assert result.code == 1 and "saves no checkpoints" in result.err
