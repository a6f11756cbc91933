"""Jobs on meshes of unlike sizes, beside their plain models."""

from __future__ import annotations

import re

import pytest

from tests.worker.jobs.test_heterogeneous_meshes import on, unet
from tests.worker.verify.proving import gpt, pictures, proof_of
from tests.worker.verify.test_defects import SPLIT, around, forward_differs, weight_backward_skipped
from worker.engine.optim.reduce_and_step import ModelUpdate
from worker.parallel.resharding import TileBuffers


def unlike_gpt(*sizes, **changes):
    return on(sizes, gpt(stages=len(sizes), meshes=len(sizes), **changes))


def unlike_unet(*sizes):
    spec = unet()
    return on(sizes, spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        unlike_gpt(2, 1, dropout=0.2, schedule="zb-h1"),
        unlike_gpt(1, 2, dropout=0.2),
        unlike_unet(1, 2),
    ],
    ids=lambda spec: f"{spec['model']['factory']}-{spec['resources']['workers']}",
)
def test_a_gpt_and_a_unet_on_unlike_meshes_are_equal_to_the_plain_model(spec):
    """Dropout too: each worker draws for its own rows, the plain model for those of the workers that have the loss."""
    proof = proof_of(spec, steps=1)
    assert (proof.difference, proof.steps) == (None, 1)
    assert proof.worst.kinds["transfers"][0] > 0


@pytest.mark.slow
def test_an_encoder_and_a_decoder_on_unlike_meshes_are_equal_to_the_plain_model():
    pytest.importorskip("transformers")
    from tests.worker.jobs.test_plain_modules import spec_of

    proof = proof_of(on((2, 1), spec_of("t5", loss=None, stages=2, meshes=2)), steps=1)
    assert (proof.difference, proof.steps) == (None, 1)


def wrong_tile(monkeypatch):
    """Of the rows that m1/0 fills the second tile is put where the first one belongs."""

    def make(original):
        def place(self, tile):
            if self._worker == "m1/0" and self._plan.sources.keys() >= {"m0/1"} and tile == 1:
                tile = 0
            return original(self, tile)

        return place

    around(monkeypatch, TileBuffers, "_place", make)
    return (
        unlike_gpt(2, 1),
        r"sent is not what was used: SEND_F on m0 to RECV_F on m1 of microbatch \d \('.*' of stage 0, its part "
        r"\[\d:\d\].*\) as m1/0 has it",
    )


def wrong_gradient_of_a_tile(monkeypatch):
    """What goes back to the second worker of m0 is the gradient of the first one's rows."""

    def make(original):
        def place(self, tile):
            if self._worker == "m1/0" and "m1/0" in self._plan.sources and tile == 1:
                tile = 0
            return original(self, tile)

        return place

    around(monkeypatch, TileBuffers, "_place", make)
    return (
        unlike_gpt(2, 1),
        r"sent is not what was used: SEND_B on m1 to RECV_B on m0 .*gradient of .*its part \[1:2\].* as m0/1 has",
    )


def not_divided_by_the_loss_workers(monkeypatch):
    """The mesh of one worker adds up the gradients of the two that have the loss."""

    def make(original):
        def init(self, *values, **arguments):
            original(self, *values, **arguments)
            if self.collectives.mesh == "m0":
                self._dp_size_of_loss = 1

        return init

    around(monkeypatch, ModelUpdate, "__init__", make)
    return unlike_gpt(
        1, 2
    ), r"gradient of '.*' of stage 0 on m0 .* it is 2 times the plain .*made by REDUCE on m0"


def _engines(defect, sizes, message, **changes):
    """A defect of the engine, on unlike meshes."""

    def planted(monkeypatch):
        defect(monkeypatch)
        return unlike_gpt(*sizes, **changes), message

    planted.__name__ = f"{defect.__name__}{sizes}"
    return planted


DEFECTS = [
    wrong_tile,
    wrong_gradient_of_a_tile,
    not_divided_by_the_loss_workers,
    _engines(
        weight_backward_skipped,
        (1, 2, 1),
        r"of stage 1 on m1 .*differs .*made by 1W3 on m1, 1W3 on m1 .worker 1",
        **SPLIT,
    ),
    _engines(forward_differs, (1, 2), r"loss of microbatch 0 is .*made by 1F0 on m1, whose inputs are equal"),
]


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_planted_defect_is_found_with_its_slot_on_unlike_meshes(defect, monkeypatch):
    with monkeypatch.context() as patch:
        spec, message = defect(patch)
        proof = proof_of(spec, steps=1)
    assert proof.difference is not None, "not found"
    assert re.search(message, proof.difference), proof.difference


def test_statistics_of_the_rows_of_a_worker_have_no_plain_model():
    spec = pictures()
    spec["pipeline"] |= {"stages": 2}
    with pytest.raises(
        ValueError, match=r"stage 0 keeps '.*running_var' of the rows .* meshes of 2, 1 workers"
    ):
        proof_of(on((2, 1), spec))
