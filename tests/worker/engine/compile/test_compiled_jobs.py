"""Jobs with training.compile: equal to the plain loop, planned with what was measured compiled, and told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from service.spec.job import JobSpec
from tests.worker.actor.test_actor import job
from tests.worker.verify.proving import gpt, pictures, proof_of
from tests.worker.workers import Workers
from worker.actor.batch_feed import Batches
from worker.actor.benchmarks import profile_key
from worker.contract.job import Job
from worker.contract.profile import LayerProfile
from worker.engine import compile as room
from worker.verify.local_gang import prepare_workers


def compiled(spec):
    spec["training"]["compile"] = True
    return spec


def with_dropout_split_and_recomputed():
    spec = gpt(dropout=0.1, schedule="zb-h1", stages=2, meshes=2)
    spec["pipeline"]["recompute"] = "all"
    return spec


def unet():
    """GroupNorm, skips, and backwards in two parts."""
    spec = gpt(schedule="zb-h1", stages=2, meshes=2)
    spec["model"] = {"factory": "worker.examples.unet:build", "args": {"width": 8, "levels": 1}}
    spec["data"] = {"factory": "worker.examples.digits:NoisyDigits", "args": {}}
    spec["loss"] = {"factory": "torch.nn.functional:mse_loss"}
    return spec


def with_shared_matrices():
    """Two workers share the matrices of a stage."""
    spec = gpt(dropout=0.1, stages=1, meshes=1, workers_per_mesh=2)
    spec["resources"] |= {"tensor": 2}
    spec["model"]["args"]["layers"] = 1
    return spec


@pytest.mark.slow
@pytest.mark.usefixtures("no_generated_code")
@pytest.mark.parametrize(
    "spec_of", [with_dropout_split_and_recomputed, unet, lambda: pictures(), with_shared_matrices]
)
def test_every_loss_gradient_parameter_and_buffer_is_that_of_the_plain_model(spec_of, caplog):
    proof = proof_of(compiled(spec_of()), steps=2)
    assert proof.difference is None
    assert proof.steps == 2
    assert any(note.startswith("by torch.compile, stages in graphs: s0 in") for note in proof.notes)
    assert not any("runs as traced" in note for note in proof.notes)
    assert "runs as traced from here on" not in caplog.text, "a step ran a graph that nothing had tried"


@pytest.mark.usefixtures("no_generated_code")
def test_a_stage_that_recomputes_by_block_runs_as_traced_and_says_so():
    spec = compiled(gpt(stages=1, meshes=1))
    spec["pipeline"]["recompute"] = "by_block"
    proof = proof_of(spec, steps=1)
    assert proof.difference is None
    assert any("stage s0 runs as traced: it recomputes by block" in note for note in proof.notes)


class TwoHeads(nn.Module):
    """Two outputs, of which the loss takes one."""

    def __init__(self):
        super().__init__()
        self.body, self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.used(hidden), self.unused(hidden)


class Numbers:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), index % 2


def of_the_first(output, target):
    return nn.functional.cross_entropy(output[0], target)


@pytest.mark.slow
@pytest.mark.usefixtures("no_generated_code")
def test_a_stage_whose_loss_leaves_an_output_unused_trains_no_weight_that_the_plain_model_does_not():
    """AdamW shrinks a weight whose gradient is zero, and leaves one alone that has none."""
    spec = compiled(job(stages=1, meshes=1))
    spec["model"] = {"factory": f"{__name__}:TwoHeads", "output": "*"}
    spec["data"] = {"factory": f"{__name__}:Numbers"}
    spec["loss"] = {"factory": f"{__name__}:of_the_first"}
    proof = proof_of(spec, steps=2)
    assert proof.difference is None
    (note,) = (note for note in proof.notes if "stage s0 runs as traced: compiled, the gradient of" in note)
    assert (
        "unused" in note
        and "(2 in all) would be one of zeros where it is none, as the loss uses only some" in note
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_generated_code")
def test_no_step_compiles_and_a_job_that_cannot_be_compiled_trains_as_it_did(monkeypatch):
    spec = job(stages=1, meshes=1)
    spec["model"]["args"]["layers"] = 1
    with Workers(spec) as run:
        expected = run.losses(range(1, 3))
    with Workers(compiled(spec)) as run:
        bodies = [worker.stages[0].compiled for worker in run.workers]
        before = [body.graphs for body in bodies]
        losses = run.losses(range(1, 3))
        assert [body.graphs for body in bodies] == before
        assert all(before)
    assert losses == pytest.approx(expected, rel=1e-5)

    def broken(graph, arguments):
        raise NotImplementedError("no such operation here")

    monkeypatch.setattr(room.torch._dynamo, "lookup_backend", lambda name: broken)
    with Workers(compiled(spec)) as run:
        assert run.losses(range(1, 3)) == expected
        assert run.notes[-1].startswith(
            "training.compile: stage s0 runs as traced: NotImplementedError: no such"
        )


@pytest.mark.slow
@pytest.mark.usefixtures("no_generated_code")
def test_layers_are_measured_compiled_and_the_profile_says_so_under_a_key_of_its_own(monkeypatch):
    spec = job(stages=1, meshes=1)
    spec["model"]["args"]["layers"] = 1
    profiles, keys = [], []
    for one in (spec, compiled(job(stages=1, meshes=1) | {"model": spec["model"]})):
        (worker,) = prepare_workers(Job.from_json(one))
        keys.append(worker.profile_keys())
        profiles.append(worker.profile())
    assert keys[0] != keys[1]
    assert "compiled" not in profiles[0]  # as before there was such a setting
    read = LayerProfile.from_json(profiles[1])
    assert {"embed", "blocks.0"} <= read.compiled
    assert LayerProfile.from_json(read.to_json()) == read
    block = next(layer for layer in read.layers if layer.name == "blocks.0")
    assert block.flops == next(
        layer["flops"] for layer in profiles[0]["layers"] if layer["name"] == "blocks.0"
    )
    # one node computes all gradients, so nothing is left to W
    assert block.backward_weight_s < block.backward_input_s / 2
    read_job = Job.from_json(compiled(spec))
    batches = Batches(read_job, worker=0, workers_per_mesh=1, microbatches=2)
    monkeypatch.setattr(room, "missing_compiler", lambda device: "none here")
    monkeypatch.setattr("worker.actor.benchmarks.missing_compiler", lambda device: "none here")
    assert profile_key(read_job, "cpu", batches, 2, 1) not in (*keys[0].values(), *keys[1].values())


def test_the_setting_is_read_by_the_control_plane_and_by_workers_alike():
    spec = compiled(job())
    assert JobSpec.model_validate(spec).training.compile is True
    assert Job.from_json(spec).training.compiling_s == 1200
    assert Job.from_json(job()).training.compiling_s == 0
