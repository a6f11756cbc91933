"""Losses that differ for a reason of their own are named as that, and not the forwards before them."""

from __future__ import annotations

import itertools
import random
import re

import torch
from torch import nn

from tests.worker.checks.test_tricks import Reassigned
from tests.worker.model import stateful_models
from tests.worker.model.lying_models import WIDTH
from tests.worker.verify.proving import proof_of
from tests.worker.verify.test_defects import target_of_another
from tests.worker.verify.test_stateful_models import LOSS_DIFFERS, unchecked

MADE_BY_THE_LOSS = r"; made by the loss of 0F\d on m0, since the outputs of all stages are equal: "
NO_REPEAT = (
    r"it does not repeat, in the plain model either: of the same output and target it makes [\d.]+, too$"
)
TARGET_CHANGED = r"it changes its target in place, which is the data set's and may be used again"


class KeptPoints:
    """Targets that are kept once for all, as in a memory-mapped file."""

    targets = torch.ones(8, WIDTH)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)), self.targets[index]


def views(samples):
    """A microbatch of one sample, without a copy."""
    ((inputs, target),) = samples
    return inputs[None], target[None]


class Noisy(nn.MSELoss):
    def forward(self, output, target):
        return super().forward(output, target) * random.uniform(0.5, 1.5)


class Counting(nn.MSELoss):
    """Counts for more with each call: workers called it before, to measure its time."""

    def __init__(self):
        super().__init__()
        self.calls = itertools.count(1)

    def forward(self, output, target):
        return super().forward(output, target) * next(self.calls)


class Centred(nn.MSELoss):
    """Changes the output in place, each row by its own mean."""

    def forward(self, output, target):
        return super().forward(output.sub_(output.detach().mean(-1, keepdim=True)), target)


class NoisyCentred(Centred):
    def forward(self, output, target):
        return super().forward(output, target) * random.uniform(0.5, 1.5)


def with_loss(loss: str, model: str = f"{stateful_models.__name__}:Plain"):
    spec = unchecked(model)
    spec["loss"] = {"factory": loss}
    return spec


def assert_made_by_the_loss(found: str | None, reason: str) -> None:
    assert found is not None and re.search(LOSS_DIFFERS + MADE_BY_THE_LOSS + reason, found), found


def test_a_loss_that_draws_random_numbers_is_said_not_to_repeat():
    assert_made_by_the_loss(proof_of(with_loss(f"{__name__}:Noisy"), steps=1).difference, NO_REPEAT)


def test_a_loss_that_counts_its_calls_is_said_not_to_repeat():
    assert_made_by_the_loss(proof_of(with_loss(f"{__name__}:Counting"), steps=1).difference, NO_REPEAT)


def test_a_loss_that_changes_the_target_that_a_data_set_keeps_is_named():
    spec = with_loss(f"{stateful_models.__name__}:TargetChanged")
    spec["data"] = {"factory": f"{__name__}:KeptPoints", "collate": {"factory": f"{__name__}:views"}}
    spec["training"] |= {"global_batch": 4, "microbatches": 4}
    assert_made_by_the_loss(proof_of(spec, steps=1).difference, TARGET_CHANGED)


def test_a_loss_that_changes_a_target_which_is_used_once_is_equal_with_a_note():
    found = proof_of(with_loss(f"{stateful_models.__name__}:TargetChanged"), steps=2)
    assert found.difference is None
    assert [note for note in found.notes if re.match(f"the loss: {TARGET_CHANGED}", note)]


def test_a_loss_that_changes_the_output_in_place_is_equal():
    found = proof_of(with_loss(f"{__name__}:Centred"), steps=2)
    assert found.difference is None
    assert not [note for note in found.notes if note.startswith("the loss:")]


def test_a_forward_is_not_blamed_for_an_output_that_the_loss_changes_in_place():
    assert_made_by_the_loss(proof_of(with_loss(f"{__name__}:NoisyCentred"), steps=1).difference, NO_REPEAT)


def test_a_loss_is_blamed_behind_a_model_whose_forwards_move_a_buffer_that_they_read(monkeypatch):
    with monkeypatch.context() as patch:
        target_of_another(patch)
        spec = with_loss("torch.nn:MSELoss", f"{Reassigned.__module__}:Reassigned")
        found = proof_of(spec, steps=2).difference
    assert_made_by_the_loss(found, "its function or its target$")
