"""Whole jobs with `shard: optimizer`: their losses are those of a plain loop, and checkpoints go on on any layout."""

from __future__ import annotations

import pytest
import torch

from service.spec.job import JobSpec
from tests.worker.actor.test_actor import job, plain
from tests.worker.cached import traced_once  # noqa: F401 (used by every test)
from tests.worker.jobs.test_heterogeneous_meshes import LOSSES, unet
from tests.worker.workers import Workers
from worker.checkpoint import format as checkpoint_format
from worker.contract.failures import AttemptFailure


def on(entries, spec):
    """The job on a list of meshes, as the control plane hands it to its workers."""
    spec = {**spec, "resources": {"meshes": entries, "device": "cpu"}}
    return {**spec, "resources": JobSpec.model_validate(spec).model_dump(mode="json")["resources"]}


SHARED, WHOLE = {"workers": 2, "shard": "optimizer"}, {"workers": 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_meshes_that_share_an_optimizer_are_those_of_a_plain_loop_and_go_on_elsewhere(
    name, tmp_path
):
    spec = {"gpt": job, "unet": unet}[name]()
    spec["pipeline"]["schedule"] = "auto"
    expected, _ = plain(spec, range(1, 7), LOSSES[name])
    uris = [checkpoint_format.step_uri(str(tmp_path), "job", step) for step in (2, 4)]
    with Workers(on([SHARED, SHARED], spec)) as run:
        assert run.losses(range(1, 3)) == pytest.approx(expected[:2], rel=1e-5)
        run.call(lambda w: w.save(uris[0], 2))
        checkpoint_format.finish_checkpoint(uris[0], step=2, shards=["m0", "m1"], keep=2)
    with Workers(on([{"workers": 1}], spec)) as run:
        run.call(lambda w: w.restore(uris[0]))
        assert run.losses(range(3, 5)) == pytest.approx(expected[2:4], rel=1e-5)
        run.call(lambda w: w.save(uris[1], 4))
        checkpoint_format.finish_checkpoint(uris[1], step=4, shards=["m0"], keep=2)
    with Workers(on([{"workers": 1}, SHARED], spec)) as run:
        run.call(lambda w: w.restore(uris[1]))
        assert run.losses(range(5, 7)) == pytest.approx(expected[4:], rel=1e-5)


@pytest.mark.slow
def test_losses_of_an_encoder_and_decoder_that_share_are_those_of_a_plain_loop():
    """The memory of the encoder crosses the meshes, and every block of the decoder reads it."""
    spec = job(stages=2)
    spec["model"] = {
        "factory": "tests.benchmarks.planned_models.planned_models:encoder_decoder",
        "args": {"layers": 1, "width": 16, "heads": 2},
    }
    expected, _ = plain(spec, range(1, 4))
    with Workers(on([SHARED, SHARED], spec)) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)


def test_what_a_worker_keeps_is_planned_as_half_where_two_share_it():
    spec = job()
    with Workers(on([SHARED, WHOLE], spec)) as run:
        run.losses(range(1, 2))
        planned = {s["mesh"]: s["static_bytes"] for s in run.planned["spec"]["stages"]}
        for worker in run.workers:
            tensors = [p for stage in worker.stages.values() for p in stage.parameters()]
            state = [
                t
                for entry in worker.engine.optimizer.state.values()
                for t in entry.values()
                if isinstance(t, torch.Tensor)
            ]
            held = 2 * sum(p.nbytes for p in {id(p): p for p in tensors}.values()) + sum(
                t.nbytes for t in state
            )
            assert held == pytest.approx(planned[worker.mesh], rel=0.02)


def test_an_optimizer_that_cannot_be_shared_is_refused_before_anything_is_planned():
    spec = job(optimizer={"factory": "torch.optim:Adafactor", "args": {"lr": 1e-2}, "schedule": None})
    entries = [{"workers": 2}, {"workers": 2}]
    given = on(entries, spec)
    given["resources"]["shard"] = "optimizer"
    with pytest.raises(
        AttemptFailure, match=r"resources\.shard is optimizer: optimizer Adafactor cannot update"
    ):
        Workers(given)


@pytest.mark.slow
def test_an_evaluation_is_that_of_meshes_that_share_nothing():
    evaluation = {"data": {"factory": "worker.examples.text:ByteWindows", "args": {"length": 8}}, "steps": 1}
    found = []
    for entry in (SHARED, WHOLE):
        with Workers(on([entry, entry], job(evaluation=evaluation))) as run:
            run.losses(range(1, 3))
            found.append(run.evaluate())
    assert found[0] == found[1]
