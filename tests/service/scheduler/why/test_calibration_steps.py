"""Which profiled steps calibrate a plan."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.scheduler.why.calibration import CALIBRATION_STEPS, choose_calibration_steps
from worker.contract.timeline import FIRST_PROFILED_STEPS


def test_steps_of_the_start_calibrate_until_there_are_three_later_ones():
    start = [1, 2, 3, 4, 5, 6]
    assert choose_calibration_steps(start[:1]) == [], "the first is cold"
    assert choose_calibration_steps(start) == [2, 3, 4, 5, 6]
    assert choose_calibration_steps([*start, 14, 25]) == [2, 3, 4, 5, 6, 14, 25]
    assert choose_calibration_steps([*start, 14, 25, 48]) == [14, 25, 48]


def test_a_plan_that_was_swapped_in_is_calibrated_by_steps_behind_it():
    profiled = [1, 2, 3, 4, 5, 6, 14, 25, 48, 90]
    assert choose_calibration_steps(profiled, since_step=14) == [25, 48, 90]
    assert choose_calibration_steps(profiled, since_step=25) == [48, 90]
    assert choose_calibration_steps(profiled, since_step=3) == [14, 25, 48, 90]
    assert choose_calibration_steps(profiled, since_step=90) == []


@given(st.lists(st.integers(1, 500), unique=True).map(sorted), st.none() | st.integers(1, 500))
def test_the_last_nine_warm_steps_at_most_calibrate_and_never_one_before_the_swap(profiled, since_step):
    chosen = choose_calibration_steps(profiled, since_step=since_step)
    assert len(chosen) <= CALIBRATION_STEPS
    assert set(chosen) <= set(profiled[1:])
    assert all(since_step is None or step > since_step for step in chosen)
    later = [step for step in profiled[FIRST_PROFILED_STEPS:] if since_step is None or step > since_step]
    assert list(chosen[-len(later) :] if later else []) == later[-CALIBRATION_STEPS:], (
        "the latest always count"
    )
