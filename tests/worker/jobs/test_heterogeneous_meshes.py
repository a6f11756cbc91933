"""Whole jobs on meshes of unlike sizes: their losses are those of a plain loop, whoever shares a microbatch."""

from __future__ import annotations

import pytest
import torch

from service.spec.job import JobSpec
from tests.worker.actor.test_actor import job, plain
from tests.worker.cached import traced_once  # noqa: F401 (used by every test)
from tests.worker.jobs.test_plain_modules import plain_losses, spec_of
from tests.worker.workers import Workers
from worker.checkpoint import format as checkpoint_format


def on(sizes, spec):
    """The job on meshes of these sizes, as the control plane hands it to its workers."""
    spec = {**spec, "resources": {"meshes": [{"workers": size} for size in sizes], "device": "cpu"}}
    return {**spec, "resources": JobSpec.model_validate(spec).model_dump(mode="json")["resources"]}


def unet(**changes):
    spec = job(stages=4, **changes)
    spec["model"] = {"factory": "worker.examples.unet:build", "args": {}}
    spec["data"] = {"factory": "worker.examples.digits:NoisyDigits", "args": {}}
    spec["pipeline"]["schedule"] = "auto"
    spec["loss"] = {"factory": "torch.nn.functional:mse_loss"}
    # Adam makes as much of a gradient that is rounding as of any other
    spec["optimizer"] = {"factory": "torch.optim:SGD", "args": {"lr": 0.2, "momentum": 0.9}, "schedule": None}
    return spec


LOSSES = {"gpt": torch.nn.functional.cross_entropy, "unet": torch.nn.functional.mse_loss}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_a_plain_loop_on_two_and_one_workers_and_resumed_on_one_and_two(name, tmp_path):
    """Tied weights, skips, clipping, Adam's state; every worker of every mesh steps alike."""
    spec = {"gpt": job, "unet": unet}[name]()
    expected, _ = plain(spec, range(1, 5), LOSSES[name])
    uri = checkpoint_format.step_uri(str(tmp_path), "job", 2)
    with Workers(on((2, 1), spec)) as workers:
        assert workers.losses(range(1, 3)) == pytest.approx(expected[:2], rel=1e-5)
        assert {(one["edge"], one["backward"]) for one in workers.planned["reshardings"]} >= {
            (0, False),
            (0, True),
        }
        workers.call(lambda w: w.save(uri, 2))
        checkpoint_format.finish_checkpoint(uri, step=2, shards=["m0", "m1"], keep=1)
    with Workers(on((1, 2), spec)) as workers:
        assert workers.call(lambda w: w.restore(uri)) == [2, 2, 2]
        assert workers.losses(range(3, 5)) == pytest.approx(expected[2:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_an_encoder_and_a_decoder_of_a_public_model_on_unlike_meshes(sizes):
    """The model's own loss is a mean over tokens, of which samples have unlike numbers: a worker has that of its rows."""
    pytest.importorskip("transformers")
    spec = spec_of("t5", loss=None, stages=2, meshes=2)
    of_rows = {**spec["training"], "microbatches": sizes[-1] * spec["training"]["microbatches"]}
    plainly = {**spec, "training": of_rows}
    expected = plain_losses(plainly, range(1, 4), lambda model, batch: model(**batch).loss)
    with Workers(on(sizes, spec)) as workers:
        assert workers.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_public_model_whose_mask_crosses_unlike_meshes():
    """It has no gradient, and nothing of it goes back."""
    pytest.importorskip("transformers")
    spec = spec_of("gpt2", loss=None, stages=2, meshes=2)
    spec["pipeline"]["cut"] = ["transformer.wte", "transformer.h.2"]
    of_rows = {**spec["training"], "microbatches": 2 * spec["training"]["microbatches"]}
    expected = plain_losses(
        {**spec, "training": of_rows}, range(1, 3), lambda model, batch: model(**batch).loss
    )
    with Workers(on((1, 2), spec)) as workers:
        edges = workers.planned["spec"]["edges"]
        assert 0.0 in [edge["backward_s"] for edge in edges]
        assert workers.losses(range(1, 3)) == pytest.approx(expected, rel=1e-5)
