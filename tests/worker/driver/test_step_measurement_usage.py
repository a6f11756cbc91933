"""What accelerators did of a step, against a step that is drawn by hand."""

from __future__ import annotations

import pytest

from worker.contract.timeline import summarise
from worker.driver.reporter import LaunchPhases
from worker.driver.step_measurement import IDLE_REASONS, step_usage


def slot(mesh, lane, action, start_s, end_s):
    return {"mesh": mesh, "lane": lane, "action": action, "start_s": start_s, "end_s": end_s}


# m0: F 0-2, idle 2-3 (nothing), idle 3-4 (receives), B 4-6, done at 6; m1: fills 0-3, F 3-4, done; both: STEP, and a rest.
STEP = [
    slot("m0", "compute", "F", 0.0, 2.0),
    slot("m0", "recv:m1", "RECV_B", 3.0, 4.0),
    slot("m0", "compute", "B", 4.0, 6.0),
    slot("m0", "compute", "STEP", 6.0, 6.5),
    slot("m1", "compute", "F", 3.0, 4.0),
    slot("m1", "compute", "STEP", 6.0, 7.0),
]


def test_every_idle_second_has_one_reason():
    usage = step_usage(STEP, summarise(STEP), step_s=8.0, workers={"m0": 1, "m1": 1}, samples=4)
    assert usage.idle_s == {
        "fill": 3.0,
        "drain": 2.0,
        "exposed transfer": 1.0,
        "waits": 1.0,
        "between steps": 1.5 + 1.0,
    }
    assert tuple(usage.idle_s) == IDLE_REASONS
    busy = (2 + 2 + 0.5) + (1 + 1)
    assert sum(usage.idle_s.values()) + busy == usage.accelerator_s == 16.0


def test_each_worker_of_a_mesh_is_an_accelerator():
    one, four = (
        step_usage(STEP, summarise(STEP), step_s=8.0, workers={"m0": n, "m1": n}, samples=4) for n in (1, 4)
    )
    assert four.accelerator_s == 4 * one.accelerator_s
    assert four.idle_s == pytest.approx({reason: 4 * seconds for reason, seconds in one.idle_s.items()})
    assert four.samples == one.samples
    unlike = step_usage(STEP, summarise(STEP), step_s=8.0, workers={"m0": 2, "m1": 1}, samples=4)
    assert unlike.accelerator_s == 24.0
    assert unlike.idle_s["fill"] == one.idle_s["fill"]  # of m1 alone
    assert unlike.idle_s["waits"] == 2 * one.idle_s["waits"]  # of m0 alone


def test_a_step_that_was_told_shorter_than_its_slots_has_no_negative_time():
    usage = step_usage(STEP, summarise(STEP), step_s=5.0, workers={"m0": 1, "m1": 1}, samples=4)
    assert usage.idle_s["between steps"] == 0.0
    assert usage.accelerator_s == 12.0


def test_phases_of_a_start_follow_each_other_without_a_gap():
    times, told = iter([10.0, 11.5, 15.0]), []
    launch = LaunchPhases(lambda phase, seconds: told.append((phase, seconds)), now=lambda: next(times))
    launch.end_phase("place")
    launch.end_phase("plan")
    assert told == [("place", 1.5), ("plan", 3.5)]


def test_a_phase_within_another_is_counted_once():
    times, told = iter([10.0, 11.0, 15.0, 18.0]), []
    launch = LaunchPhases(lambda phase, seconds: told.append((phase, seconds)), now=lambda: next(times))
    with launch.within("trace"):
        pass
    launch.end_phase("profile")
    assert told == [("trace", 4.0), ("profile", 4.0)]
