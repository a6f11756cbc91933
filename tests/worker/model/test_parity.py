"""Two outcomes are equal up to rounding, or the first tensor that differs is named with its distance."""

from __future__ import annotations

import math

import pytest
import torch

from worker.model.parity import Outcome, Tolerance, first_mismatch

TOLERANCE = Tolerance(values=1e-3, gradients=1e-2)
ONES = torch.ones(4)
EXPECTED = Outcome({"loss": ONES, "output": 2 * ONES}, {"a": 3 * ONES, "b": 1e-4 * ONES, "c": None})


def outcome(**changes):
    return Outcome(
        {name: changes.get(name, value) for name, value in EXPECTED.values.items()},
        {name: changes.get(name, value) for name, value in EXPECTED.gradients.items()},
    )


@pytest.mark.parametrize(
    ("changes", "name", "apart"),
    [
        ({"loss": 1.002 * ONES}, "loss", 0.002),
        ({"output": 2.002 * ONES, "a": 4 * ONES}, "output", 0.001),  # values come first
        ({"a": 3.06 * ONES}, "a", 0.02),
        ({"b": 1e-3 * ONES}, "b", 9e-4 / 0.03),  # as a part of a hundredth of the largest gradient
        ({"a": torch.ones(5)}, "a", math.inf),
        ({"a": None}, "a", math.inf),
        ({"c": ONES}, "c", math.inf),
        ({"loss": ONES * math.nan}, "loss", math.inf),
    ],
)
def test_the_first_tensor_that_differs_is_named_with_its_distance(changes, name, apart):
    mismatch = first_mismatch(EXPECTED, outcome(**changes), Tolerance(values=9e-4, gradients=1e-2))
    assert (mismatch.name, mismatch.is_gradient) == (name, name in EXPECTED.gradients)
    assert mismatch.distance.apart == pytest.approx(apart, rel=1e-3)
    assert mismatch.expected is {**EXPECTED.values, **EXPECTED.gradients}[name]
    assert mismatch.found is changes[name]


@pytest.mark.parametrize(
    "changes",
    [{}, {"loss": 1.0009 * ONES}, {"a": 3.02 * ONES}, {"b": 3e-4 * ONES}],
    ids=["equal", "a value", "a gradient", "a gradient that is small beside another"],
)
def test_rounding_is_no_mismatch(changes):
    assert first_mismatch(EXPECTED, outcome(**changes), TOLERANCE) is None


def test_a_tensor_that_only_the_found_outcome_has_is_not_looked_at():
    more = Outcome({**EXPECTED.values, "more": ONES}, EXPECTED.gradients)
    assert first_mismatch(EXPECTED, more, TOLERANCE) is None
