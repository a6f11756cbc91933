"""Optimizers that look across parameters differ from the plain model's, where no trial refuses them before training."""

from __future__ import annotations

import re

import pytest

from tests.tiers import some_by_day
from tests.worker import odd_optimizers
from tests.worker.model import stateful_models
from tests.worker.verify.proving import proof_of
from tests.worker.verify.test_stateful_models import unchecked
from worker.actor import prepared


@pytest.fixture(autouse=True)
def no_trial(monkeypatch):
    """The trials that refuse such optimizers are switched off."""
    monkeypatch.setattr(prepared, "check_layout_of_optimizer", lambda job, device: "")
    monkeypatch.setattr(prepared, "check_optimizer_of_model", lambda job, parameters, device, untried: [])
    monkeypatch.setattr(prepared, "check_optimizer_of_meshes", lambda job, parameters, names: None)


def difference_of(factory: str, steps: int, **arguments) -> str | None:
    """What is found of a model of two layers, each with two parameters, on two meshes."""
    spec = unchecked(f"{stateful_models.__name__}:Plain", stages=2)
    spec["optimizer"] = {"factory": factory, "args": arguments, "schedule": None}
    return proof_of(spec, steps=steps).difference


AFTER_STEP = r"step {step}: after STEP on m[01], '.*' differs by .* of what the step changes; {name} updates it otherwise "
WITH_FEWER = (
    r"with the 2 parameters of m[01] than with all 4{settings}: it, or its factory, looks across parameters$"
)


@some_by_day(
    ("name", "arguments", "step"),
    [
        ("NormedSGD", {}, "1"),
        ("ClippedSGD", {"limit": 1e-3}, "1"),
        ("Prodigy", {}, "[2-5]"),
        ("DAdaptAdam", {}, "[2-5]"),
    ],
    by_day=2,
)
def test_a_proof_finds_an_optimizer_that_computes_by_all_parameters(name, arguments, step):
    settings = r" \(d is .*, not .*\)" if name in ("Prodigy", "DAdaptAdam") else ""
    found = difference_of(f"{odd_optimizers.__name__}:{name}", 6, **arguments)
    said = AFTER_STEP.format(step=step, name=name) + WITH_FEWER.format(settings=settings)
    assert found is not None and re.match(said, found), found


def test_a_proof_finds_a_factory_that_groups_by_position():
    found = difference_of(f"{odd_optimizers.__name__}:by_position", 1, count=1)
    said = AFTER_STEP.format(step=1, name="AdamW") + WITH_FEWER.format(
        settings=r" \(weight_decay is 0, not 0.01\)"
    )
    assert found is not None and re.match(said, found), found


def test_a_proof_finds_a_factory_whose_rate_depends_on_the_number_of_parameters():
    found = difference_of(f"{odd_optimizers.__name__}:by_count", 1)
    rate = r"step 1: the learning rate on m0 is 0.05, in the plain model 0.025; SGD updates it otherwise "
    assert found is not None
    assert re.match(rate + WITH_FEWER.format(settings=r" \(lr is 0.05, not 0.025\)"), found), found


def test_an_optimizer_that_draws_is_not_said_to_look_across_parameters():
    found = difference_of(f"{odd_optimizers.__name__}:Langevin", 1)
    assert found is not None
    assert found.endswith("; Langevin draws random numbers: it does not repeat its own updates")
