"""A checkpoint that another layout restores is the plain model's, tensor by tensor, and trains on as it does."""

from __future__ import annotations

import re

import pytest

from tests.tiers import some_by_day
from tests.worker.checkpoint.test_jobs import saved
from tests.worker.verify.proving import gpt, pictures, proof_of
from tests.worker.workers import Workers
from worker.actor import saver

SAVED_AFTER = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """Of two stages on two meshes, with a schedule and dropout, after three steps."""
    with Workers(gpt(stages=2, meshes=2, lr_schedule="cosine", dropout=0.1)) as run:
        run.losses(range(1, SAVED_AFTER + 1))
        return saved(run, str(tmp_path_factory.mktemp("checkpoints")), SAVED_AFTER)


def layout(**changes):
    return gpt(lr_schedule="cosine", dropout=0.1, **changes)


def zero1():
    spec = layout(stages=2, meshes=2, workers_per_mesh=2)
    spec["resources"]["shard"] = "optimizer"
    return spec


def tensor():
    spec = layout(stages=2, meshes=2, workers_per_mesh=2)
    spec["resources"]["tensor"] = 2
    return spec


@some_by_day(
    "spec",
    [layout(stages=3, meshes=3), layout(stages=1, meshes=1), zero1(), tensor()],
    by_day=1,
    ids=["three meshes", "one", "ZeRO-1", "tensor parallel"],
)
def test_another_layout_goes_on_as_the_plain_model_does(spec, checkpoint):
    proof = proof_of(spec, steps=2, resume=checkpoint)
    assert (proof.difference, proof.steps) == (None, 2)
    assert proof.worst.kinds["initial parameters"][1] == 0.0 and proof.worst.kinds["learning rates"][0] > 0


@pytest.mark.slow
def test_running_statistics_and_fp16_are_restored_too(tmp_path):
    first, other = pictures(), pictures()
    for spec in (first, other):
        spec["training"] |= {"precision": "fp16", "loss_scaling": {"init_scale": 1024.0}}
    other["pipeline"]["stages"], other["resources"]["meshes"] = 2, 2
    with Workers(first) as run:
        run.losses(range(1, 3))
        uri = saved(run, str(tmp_path), 2)
    assert proof_of(other, steps=1, resume=uri).difference is None


def swapped(monkeypatch, part: str) -> None:
    """Planted: of two layers of equal shapes each gets the other's tensors, as a strict load lets pass."""
    load = saver.checkpoint_format.load_parts

    def load_swapped(*given):
        loaded = load(*given)
        entries = loaded.state[part]
        others = {
            name: name.replace("blocks.0.", "blocks.?.").replace("blocks.1.", "blocks.0.").replace("?", "1")
            for name in entries
        }
        loaded.state[part] = {name: entries.get(others[name], entries[name]) for name in entries}
        return loaded

    monkeypatch.setattr(saver.checkpoint_format, "load_parts", load_swapped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "parameters",
            r"before the first step: 'blocks\.\d\..*' of stage 0 on m0 does not begin with the model's values",
        ),
        ("optimizer", r"step 4: after STEP on m\d.*, 'blocks\..*' differs by"),
    ],
)
def test_layers_that_are_put_in_each_others_place_are_found(part, message, checkpoint, monkeypatch):
    swapped(monkeypatch, part)
    assert re.search(message, proof_of(layout(stages=1, meshes=1), steps=1, resume=checkpoint).difference)
