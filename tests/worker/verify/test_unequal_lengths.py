"""Verify of a job whose samples have unequal lengths."""

from __future__ import annotations

from tests.tiers import some_by_day
from tests.worker.unequal_texts import unequal_job
from tests.worker.verify.proving import proof_of
from worker.actor.loaded import LoadedWorker


@some_by_day(("workers", "dropout"), [(1, 0.2), (2, 0.2), (2, 0.0)], by_day=1)
def test_each_length_is_equal_to_the_plain_model_with_its_random_draws(workers, dropout):
    spec = unequal_job(stages=2, workers=workers)
    spec["model"]["args"]["dropout"] = dropout
    proof = proof_of(spec, steps=2)
    assert proof.difference is None and proof.steps == 2


def test_a_short_microbatch_that_comes_out_otherwise_is_found_and_its_forward_named(monkeypatch):
    load = LoadedWorker.__init__

    def wrong(worker, *given, **named):
        load(worker, *given, **named)
        for runner in (
            runner for runners in worker.engine._runners_by_shape[1:] for runner in runners.values()
        ):
            run = runner._module.forward
            runner._module.forward = lambda *tensors, run=run: tuple(
                x * 1.5 if x.is_floating_point() else x for x in run(*tensors)
            )

    monkeypatch.setattr(LoadedWorker, "__init__", wrong)
    proof = proof_of(unequal_job(stages=2), steps=1)
    assert proof.steps == 0 and "the loss of microbatch 0" in proof.difference
    assert "made by 0F0 on m0, whose inputs are equal" in proof.difference
