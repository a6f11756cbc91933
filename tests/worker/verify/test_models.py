"""No false alarm: models of libraries as they are, with dropout, tied weights and running statistics, are equal."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.worker.jobs import test_loss_reduction, test_split_images
from tests.worker.jobs import test_plain_modules as test_raw_models
from tests.worker.verify.proving import gpt, pictures, proof_of
from worker.engine.optim.grad_scaler import PipelineGradScaler


def raw(name, **dropout):
    """A raw model of transformers with its own loss, by AdamW, on three meshes."""
    spec = test_raw_models.spec_of(name, loss=None, stages=3, meshes=3)
    spec["model"]["args"]["config"]["args"] = spec["model"]["args"]["config"]["args"] | dropout
    spec["optimizer"] |= {"factory": "torch.optim:AdamW", "args": {"lr": 1e-3}}
    spec["pipeline"]["schedule"] = "auto"
    return spec


def unet():
    spec = gpt(stages=4, meshes=4, schedule="auto")
    spec["model"] = {"factory": "worker.examples.unet:build", "args": {}}
    spec["data"] = {"factory": "worker.examples.digits:NoisyDigits", "args": {}}
    spec["loss"] = {"factory": "torch.nn.functional:mse_loss"}
    return spec


def diffusers():
    model = {"factory": "diffusers:UNet2DModel", "args": test_split_images.UNET}
    return test_split_images.spec_of(model, timed=True)


def in_bf16():
    spec = gpt(dropout=0.1)
    spec["training"]["precision"] = "bf16"
    return spec


def in_fp16():
    """Its first step overflows, and with `one_step_overflows` no other."""
    spec = gpt(dropout=0.1)
    scaling = {"init_scale": 2.0**40}
    spec["training"] |= {"precision": "fp16", "loss_scaling": scaling}
    return spec


def with_bf16_transfers():
    spec = pictures()
    spec["training"]["transfers"] = "bf16"
    return spec


def recomputed():
    spec = gpt(dropout=0.1, schedule="zb-h1")
    spec["pipeline"]["recompute"] = "all"
    return spec


JOBS = {
    "gpt2": lambda: raw("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    "llama": lambda: raw("llama", attention_dropout=0.1),
    "bert": lambda: raw("bert", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1),
    "t5": lambda: raw("t5", dropout_rate=0.1),
    "unet": unet,
    "UNet2DModel": diffusers,
    "bf16": in_bf16,
    "bf16 transfers": with_bf16_transfers,
    "recomputed": recomputed,
}
JOBS["tokens"] = lambda: test_loss_reduction.spec_of(stages=2, meshes=2, workers_per_mesh=2)
LIBRARY = dict.fromkeys(("gpt2", "llama", "bert", "t5"), "transformers") | {"UNet2DModel": "diffusers"}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_model_that_trains_as_it_should_is_found_equal(name):
    if name in LIBRARY:
        pytest.importorskip(LIBRARY[name])
    proof = proof_of(JOBS[name](), steps=2)
    assert proof.difference is None
    counted = {kind: count for kind, (count, _, _) in proof.worst.kinds.items()}
    assert counted["transfers"] > 0 and counted["gradients"] == 2 * counted["initial parameters"]


@pytest.fixture
def one_step_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale comes down at once to what fits."""
    plain_scaler = functools.partial(torch.amp.GradScaler, backoff_factor=2.0**-30)
    monkeypatch.setattr("worker.verify.plain.torch.amp.GradScaler", plain_scaler)
    monkeypatch.setattr("worker.engine.optim.grad_scaler.BACKOFF_FACTOR", 2.0**-30)


@pytest.mark.usefixtures("one_step_overflows")
def test_a_job_in_fp16_is_found_equal_also_where_a_step_overflows():
    proof = proof_of(in_fp16(), steps=3)
    assert proof.difference is None
    counted = {kind: count for kind, (count, _, _) in proof.worst.kinds.items()}
    assert counted["gradients"] == 2 * counted["initial parameters"], "the first step overflows"


@pytest.mark.slow
@pytest.mark.usefixtures("one_step_overflows")
def test_a_loss_scale_that_is_never_lowered_is_found(monkeypatch):
    ended = PipelineGradScaler.end_step

    def keeps(self, step):
        scale = self.scale
        found = ended(self, step)
        self.scale = scale
        return found

    monkeypatch.setattr(PipelineGradScaler, "end_step", keeps)
    assert (
        "step 2: the loss scale is 1.09951e+12 on m0 and 1024 in" in proof_of(in_fp16(), steps=2).difference
    )
