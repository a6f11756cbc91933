"""A job that is trained with a plan that was kept before, on a real Ray."""

from __future__ import annotations

import io
import sys
import zipfile

import pytest

from service.client.client import ApiError, Client
from tests.end_to_end.conftest import job_spec
from tests.end_to_end.test_jobs import plain_losses

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = """
from torch import nn

def build(**_):
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, {hidden}), nn.Linear({hidden}, 8), nn.Linear(8, 256))
"""
LOSS = """
from torch.nn import functional

def tokens(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""


def package(hidden: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("kept_model.py", MODEL.format(hidden=hidden) + LOSS)
    return file.getvalue()


def in_a_plain_loop(spec, kept, folder, monkeypatch) -> list[float]:
    """The losses of its three steps, with the microbatches that the plan has."""
    (folder / "kept_model.py").write_text(MODEL.format(hidden=12) + LOSS)
    monkeypatch.syspath_prepend(folder)
    losses = plain_losses(
        spec | {"training": {**spec["training"], "microbatches": kept.spec["microbatches"]}}
    )
    monkeypatch.delitem(sys.modules, "kept_model")
    assert len(losses) == 3
    return losses


def test_a_job_trains_with_exactly_the_plan_that_was_kept_and_is_refused_when_its_code_has_changed(
    server, tmp_path, monkeypatch
):
    with Client(server.url) as client:
        spec = job_spec(
            "gpt-named",
            model={"factory": "kept_model:build"},
            loss={"factory": "kept_model:tokens"},
            training={"steps": 3, "global_batch": 8, "microbatches": "auto", "seed": 3},
            pipeline={"stages": "auto", "schedule": "auto"},
            resources={"meshes": 2, "device": "cpu"},
            code={"working_dir": client.upload_package(package(12)).uri},
            checkpoint={"uri": str(tmp_path), "every_steps": 1, "keep": 1, "keep_every": 2},
        )
        kept = client.plan_job(spec, name="mine", budget_s=1)
        job = server.wait(server.submit(spec | {"plan": "mine"}))
        assert job["state"] == "SUCCEEDED", job["message"]
        ran = client.plan(job["id"])
        assert ran.named == kept.named and ran.begins == kept.begins
        assert ran.plan["programs"] == kept.plan["programs"] and ran.plan["slots"] == kept.plan["slots"]
        told = [one.message for one in client.events(job["id"]) if one.kind == "planned"]
        assert "as the plan 'mine' has it" in told[0]
        losses = [step["loss"] for step in server.steps(job["id"])]
        assert losses == pytest.approx(in_a_plain_loop(spec, kept, tmp_path, monkeypatch), rel=1e-5)
        assert [(one.step, one.kept) for one in client.checkpoints(job["id"]).items] == [
            (3, ["latest", "best"]),
            (2, ["every"]),
        ]
        held = client.artifacts(job["id"]).stored_bytes
        gone = client.remove_checkpoint(job["id"], 2)
        assert (gone.removed, gone.left) == (["step-0000000002"], [3])
        assert 0 < client.artifacts(job["id"]).stored_bytes < held
        assert server.job(job["id"])["progress"]["model_flops_per_s"] > 0
        changed = spec | {"plan": "mine", "code": {"working_dir": client.upload_package(package(20)).uri}}
        other = server.wait(server.submit(changed))
        assert (other["state"], other["reason"]) == ("FAILED", "PLAN_INFEASIBLE"), other["message"]
        assert "it was made for other layers" in other["message"] and "bytes" in other["message"]
        assert server.steps(other["id"]) == [], "before the first step"
        with pytest.raises(ApiError, match="made for another job"):
            client.submit(spec | {"plan": "mine", "resources": {"meshes": 1, "device": "cpu"}})
