"""Ranges of forecasts hold as often as they say, on samples of a known distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from service.scheduler.why.calibration import _STUDENT_T, COVERAGE, forecast


def test_the_points_are_those_of_students_t():
    points = [stats.t.ppf((1 + COVERAGE) / 2, freedom) for freedom in range(1, len(_STUDENT_T) + 1)]
    assert pytest.approx(points, abs=6e-5) == list(_STUDENT_T)


@pytest.mark.parametrize("runs", [3, 5, 12, 60])
@pytest.mark.parametrize("spread", [0.02, 0.4])
def test_nine_of_ten_next_runs_are_in_the_range(runs: int, spread: float):
    draws = np.random.default_rng(runs).lognormal(mean=0.1, sigma=spread, size=(4000, runs + 1))
    held, middles = 0, []
    for *ratios, following in draws:
        expected = forecast(0.2, ratios)
        assert expected.low < expected.middle < expected.high
        held += expected.low <= 0.2 * following <= expected.high
        middles.append(expected.middle)
    assert held / len(draws) == pytest.approx(COVERAGE, abs=4 * math.sqrt(0.9 * 0.1 / len(draws)) + 0.004)
    assert np.median(middles) == pytest.approx(0.2 * math.exp(0.1), rel=0.02)


def test_of_few_runs_nothing_is_said_and_wrong_ratios_are_refused():
    assert forecast(1.0, []) is None and forecast(1.0, [1.1, 0.9]) is None
    same = forecast(2.0, [1.5] * 3)
    assert (same.low, same.middle, same.high) == pytest.approx((3.0, 3.0, 3.0))
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="positive numbers"):
            forecast(1.0, [1.0, 1.0, 1.0, wrong])
