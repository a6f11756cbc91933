"""Jobs in fp16: they train, save and go on as a plain loop with torch.amp.GradScaler does."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from service.spec.job import JobSpec
from tests.worker.actor.test_actor import job
from tests.worker.workers import Workers
from worker.checkpoint import format as checkpoint_format
from worker.contract.failures import AttemptFailure
from worker.contract.job import Job
from worker.contract.reasons import Reason
from worker.data.sampler import BatchSampler, collate
from worker.engine.optim import grad_scaler
from worker.model.factory import build_model, call_factory
from worker.verify.local_gang import prepare_workers

STEPS = range(1, 11)
# So large that the first steps overflow by themselves, in the backward of the half of the model that is in fp16.
SCALING = {"init_scale": 2.0**26}
FASTER = {"backoff_factor": 0.125, "growth_interval": 3}


@pytest.fixture(autouse=True)
def scale_changes_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FASTER.items():
        monkeypatch.setattr(grad_scaler, name.upper(), value)


def fp16(**layout):
    spec = job("cosine", **layout)
    spec["training"] |= {"precision": "fp16", "loss_scaling": SCALING}
    return spec


def plain(spec):
    """Of each step the mean loss, the loss scale and whether it was skipped; with several workers a mesh each takes its
    rows of every microbatch, and gradients are averaged, as by torch's DistributedDataParallel."""
    training, workers = spec["training"], spec["resources"]["workers_per_mesh"]
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=training["seed"])
    data = call_factory(spec["data"]["factory"], spec["data"]["args"])
    count = training["microbatches"]
    sampler = BatchSampler(len(data), training["global_batch"], count, seed=training["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), **spec["optimizer"]["args"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    scaler = torch.amp.GradScaler("cpu", **SCALING, **FASTER)
    told = []
    for step in STEPS:
        optimizer.zero_grad()
        losses = []
        for microbatch in range(count):
            indices = sampler.indices(step, microbatch)
            share = len(indices) // workers
            for first in range(0, len(indices), share):
                inputs, target = collate([data[i] for i in indices[first : first + share]])
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = nn.functional.cross_entropy(model(*inputs), target)
                scaler.scale(loss / count).backward()
                losses.append(loss.item())
        for parameter in model.parameters():
            parameter.grad /= workers
        scale = scaler.get_scale()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), training["clip_grad_norm"])
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < scale
        if not skipped:
            schedule.step()
        told.append((sum(losses) / len(losses), scale, skipped))
    return told


def ran(run, steps):
    told = []
    for step in steps:
        results = run.step(step)
        ((scale, skipped),) = {(result.loss_scale, result.skipped) for result in results}
        losses = [loss for result in results for loss in result.losses]
        told.append((sum(losses) / len(losses), scale, skipped))
    return told


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"stages": 3, "meshes": 3}, {"workers_per_mesh": 2}], ids=str)
def test_a_job_is_the_plain_loop_and_goes_on_from_a_checkpoint_bit_for_bit_on_another_layout(
    layout, tmp_path
):
    spec, uri = fp16(**layout), checkpoint_format.step_uri(str(tmp_path), "job", 4)
    expected = plain(spec)
    assert sum(skipped for *_, skipped in expected) >= 2
    assert len({scale for _, scale, _ in expected}) >= 4, "it falls and grows"
    with Workers(spec) as run:
        first = ran(run, range(1, 5))
        run.call(lambda w: w.save(uri, 4))
        meshes = [f"m{mesh}" for mesh in range(spec["resources"]["meshes"])]
        checkpoint_format.finish_checkpoint(uri, step=4, shards=meshes, keep=1)
        rest = ran(run, range(5, 11))
    for (loss, *how), (found, *ours) in zip(expected, first + rest, strict=True):
        assert ours == how
        assert found == pytest.approx(loss, rel=1e-3)
    state, _ = checkpoint_format.load_checkpoint(uri)
    assert state["loss_scale"]["scale"] == expected[4][1] != SCALING["init_scale"]
    other = {"stages": 1, "meshes": 1} | {k: v for k, v in layout.items() if k == "workers_per_mesh"}
    with Workers(fp16(**other)) as run:
        run.call(lambda w: w.restore(uri))
        assert ran(run, range(5, 11)) == rest


class Half(nn.Module):
    """A model whose weights are in fp16 themselves."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256).half()

    def forward(self, tokens):
        return self.head(self.embed(tokens).half()).float().transpose(1, 2)


def test_weights_that_are_fp16_themselves_are_refused():
    spec = fp16() | {"model": {"factory": f"{__name__}:Half"}}
    worker = prepare_workers(Job.from_json(spec))[0]
    with pytest.raises(
        AttemptFailure, match=r"parameter 'head.weight' \(2 in all\) is float16 itself"
    ) as told:
        worker.trace(2)
    assert told.value.reason is Reason.MODEL_BUILD_FAILED


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"precision": "bf16", "loss_scaling": {}}, "precision is bf16, which scales no loss: leave it out"),
        ({"precision": "fp16", "loss_scaling": {"init_scale": 0.0}}, "init_scale"),
        ({"precision": "fp8"}, "'fp32', 'bf16' or 'fp16'"),
    ],
)
def test_what_cannot_scale_is_refused(training, message):
    spec = job()
    spec["training"] |= training
    with pytest.raises(ValidationError, match=message):
        JobSpec.model_validate(spec)
