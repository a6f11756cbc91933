"""Losses that are weighed otherwise than the batch divides, which no job's own count shows, are found."""

from __future__ import annotations

import re

import pytest
from torch import nn
from torch.nn import functional

from tests.tiers import some_by_day
from tests.worker.actor.test_actor import job
from tests.worker.jobs import test_loss_reduction as by_tokens
from tests.worker.verify.proving import gpt, proof_of
from worker.actor import optimizer
from worker.engine import stage
from worker.model.pytree import count_tokens

WHOLE = r"step 1: the loss of the whole batch is [\d.]+, and those of its microbatches, weighed by training.loss_reduction "


def of_tokens(loss: dict, **training):
    """Texts of unequal targets on one mesh, whose loss nobody tries before training."""
    spec = by_tokens.spec_of(stages=1, meshes=1) | {"loss": loss}
    spec["training"] |= {"check_trace": False} | training
    return spec


class OwnLoss(nn.Module):
    """Returns its own loss: the mean over the tokens that are targets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(256, 8), nn.Dropout(0.5), nn.Linear(8, 256)

    def forward(self, tokens, labels):
        logits = self.head(self.drop(self.embed(tokens)))
        return functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=by_tokens.IGNORED
        )


def of_own_loss(data: str, **training):
    spec = job(stages=1, meshes=1, loss=None)
    spec["model"], spec["data"] = {"factory": f"{__name__}:OwnLoss"}, {"factory": data}
    spec["training"] |= {"microbatches": 2, "check_trace": False} | training
    return spec


class AllTargets(by_tokens.Texts):
    def __getitem__(self, index):
        tokens, _ = super().__getitem__(index)
        return tokens, tokens


@some_by_day(
    "spec",
    [
        of_tokens({"factory": f"{by_tokens.__name__}:shifted"}, microbatches=2),
        of_tokens(
            {"factory": "torch.nn:CrossEntropyLoss", "args": {"ignore_index": by_tokens.IGNORED}},
            loss_reduction="mean",
        ),
        of_own_loss(f"{by_tokens.__name__}:Texts"),
    ],
    by_day=1,
    ids=["shifted labels", "mean of unequal microbatches", "the model's own loss"],
)
def test_microbatches_that_do_not_make_up_the_batch_are_a_difference(spec):
    reduction = spec["training"].get("loss_reduction", "mean")
    assert re.match(WHOLE + reduction, proof_of(spec, steps=1).difference)


@pytest.mark.slow
def test_class_weights_that_are_not_counted_are_found(monkeypatch):
    """Planted: both sides take the job's count, which forgets the weights."""
    loss = {"factory": "torch.nn:CrossEntropyLoss", "args": by_tokens.CLASS_WEIGHTS}
    assert proof_of(of_tokens(loss), steps=1).difference is None
    monkeypatch.setattr(
        optimizer, "_class_weights_or_count", lambda target, ignored, weights: count_tokens(target, ignored)
    )
    assert re.match(WHOLE + "tokens", proof_of(of_tokens(loss), steps=1).difference)


@pytest.mark.slow
def test_a_mean_over_nothing_that_is_called_is_found(monkeypatch):
    """Planted: a microbatch without a target is not left out before the loss."""
    spec = of_tokens({"factory": f"{by_tokens.__name__}:masked_mean"}, global_batch=8, microbatches=8)
    assert proof_of(spec, steps=1).difference is None

    left_out = stage.StageRunner._loss

    def called(self, output, microbatch):
        self._state.weights[microbatch] = self._state.weights[microbatch] or 1e-9
        return left_out(self, output, microbatch)

    monkeypatch.setattr(stage.StageRunner, "_loss", called)
    found = proof_of(spec, steps=1).difference
    assert re.search(
        "not finite .*the plain model made this step: its losses and gradients are finite", found
    )


class Few(by_tokens.Texts):
    def __len__(self):
        return 3


@pytest.mark.slow
def test_too_few_samples_for_a_step_are_no_proof_of_anything():
    spec = of_tokens({"factory": f"{by_tokens.__name__}:masked_mean"})
    spec["data"] = {"factory": f"{__name__}:Few", "at_end": "stop"}
    assert re.search("its 3 samples have no 8 for 1 steps of 8", str(proof_of(spec, steps=1).difference))


@pytest.mark.slow
def test_a_step_without_targets_is_noted():
    loss = {"factory": "torch.nn:CrossEntropyLoss", "args": {"ignore_index": by_tokens.IGNORED}}
    spec = of_tokens(loss) | {"data": {"factory": f"{by_tokens.__name__}:NoTargets"}}
    assert any("step 1 has no target" in note for note in proof_of(spec, steps=1).notes)


@some_by_day(
    "spec",
    [
        gpt(stages=1, meshes=1),
        of_tokens({"factory": f"{by_tokens.__name__}:masked_mean"}),
        of_own_loss(f"{__name__}:AllTargets"),
        of_own_loss(f"{by_tokens.__name__}:Texts", loss_reduction="microbatches"),
    ],
    by_day=1,
    ids=["plain", "tokens", "own loss with dropout", "each a batch of its own"],
)
def test_microbatches_that_make_up_the_batch_are_no_difference(spec):
    proof = proof_of(spec, steps=2)
    assert proof.difference is None and not [note for note in proof.notes if "whole batch" in note]
    count = proof.worst.kinds.get("losses of whole batches", (0,))[0]
    assert count == (0 if spec["training"].get("loss_reduction") == "microbatches" else 2)
