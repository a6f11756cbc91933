"""Links and meshes that are slower than they were, seen in the slots of profiled steps."""

from __future__ import annotations

import random

import pytest

from worker.benchmark.slowdowns import LinkWatch, MeshWatch
from worker.contract.job import Bucket


def slots_of_step(seconds, microbatches=4):
    """The slots of a step in which transfers from m0 to m1 take `seconds`, those back 10 ms, at most a little apart."""
    return [
        {
            "mesh": mesh,
            "lane": lane,
            "start_s": 1.0 * number,
            "end_s": 1.0 * number + lasts * (1 + 0.01 * number),
        }
        for number in range(microbatches)
        for mesh, lane, lasts in (
            ("m1", "recv:m0", seconds),
            ("m0", "send:m1", seconds),
            ("m0", "recv:m1", 0.010),
            ("m0", "compute", 9.0),
        )
    ]


def watched(*steps, planned=0.020):
    """(source, target) of what a watch calls stale, after steps whose transfers from m0 to m1 took these seconds."""
    stale = []
    watch = LinkWatch(slots_of_step(planned), lambda source, target, *seconds: stale.append((source, target)))
    for seconds in steps:
        watch.observe(slots_of_step(seconds))
    return stale


def test_a_transfer_that_takes_twice_as_long_as_planned_or_half_as_long_makes_its_link_stale_once():
    assert watched(*[0.047] * 12) == [("m0", "m1")]
    assert watched(*[0.007] * 12) == [("m0", "m1")]
    assert watched(*[0.030] * 12) == watched(*[0.015] * 12) == []


def test_a_few_disturbed_steps_a_wide_spread_and_the_engines_own_time_make_no_link_stale():
    assert watched(0.5, 0.5, 0.5, 0.5) == [], "too few steps"
    assert watched(0.5, 0.02, 0.5, 0.02, 0.02, 0.5, 0.02, 0.02, 0.02) == [], "the median is as planned"
    assert watched(0.02, 0.08, 0.05, 0.03, 0.07, 0.05, 0.02) == [], (
        "steps differ by more than the link seems to have"
    )
    assert watched(*[0.0009] * 12, planned=0.0001) == []


def computing(*meshes_s, split=False, microbatches=3):
    """The slots of a step in which the forwards of each mesh take so many seconds in all, its backwards twice as many."""
    return [
        {
            "mesh": f"m{mesh}",
            "lane": lane,
            "stage": mesh,
            "action": action,
            "start_s": m,
            "end_s": m + part / microbatches,
        }
        for mesh, seconds in enumerate(meshes_s)
        for action, part in (
            ("F", seconds),
            *((("I", seconds), ("W", seconds)) if split else (("B", 2 * seconds),)),
            ("RECV_F", 7.0),
        )
        for lane in ("recv:m9" if action == "RECV_F" else "compute",)
        for m in range(microbatches)
    ]


def paces(*steps):
    """What a watch says of these steps, each with its number."""
    said, seen = [], []
    watch = MeshWatch(lambda pace, slow: said.append((len(seen), pace, slow)))
    for slots in steps:
        watch.observe(slots)
        seen.append(slots)
    return said


def test_a_mesh_that_becomes_slow_is_told_within_five_profiled_steps_and_again_when_it_is_as_before():
    quiet, slowed = computing(0.1, 0.2), computing(0.1, 0.4)
    said = paces(computing(5.0, 0.01), *[quiet] * 12, *[slowed] * 20, *[quiet] * 20)
    (slow_at, slow, is_slow), (back_at, back, is_slow_then) = said
    assert (is_slow, is_slow_then) == (True, False)
    assert 13 <= slow_at < 13 + 5 and 33 <= back_at < 33 + 5
    assert (slow.mesh, slow.factor, slow.first_s) == ("m1", pytest.approx(2.0), pytest.approx(0.6))
    assert slow.seconds == pytest.approx(1.2) and back.seconds == pytest.approx(0.6)


@pytest.mark.parametrize("sigma", [0.05, 0.15, 0.3])
def test_meshes_whose_steps_only_vary_are_not_slow(sigma):
    draw = random.Random(7)
    steps = [
        computing(*(0.1 * draw.lognormvariate(0, sigma / 3**0.5) for _ in range(4))) for _ in range(1000)
    ]
    assert paces(*steps) == []


def test_a_few_disturbed_steps_and_other_backwards_make_no_mesh_slow():
    quiet, disturbed = computing(0.1), computing(0.9)
    assert paces(*[quiet] * 14, disturbed, disturbed, *[quiet] * 5, disturbed, *[quiet] * 9) == []
    assert paces(*[quiet] * 14, *[computing(0.1, split=True)] * 30) == []
    (said,) = paces(*[quiet] * 14, *[computing(0.2, split=True)] * 30)
    assert said[1].factor == pytest.approx(2.0), "by its forwards, which both have"


def of_buckets(buckets, factor=1.0):
    """The slots of a step of one mesh, whose microbatches take as many seconds as they have tokens."""
    return [
        {
            "mesh": "m0",
            "lane": "compute",
            "stage": 0,
            "action": action,
            "microbatch": m,
            "start_s": 0.0,
            "end_s": factor * bucket.tokens,
        }
        for action in "FB"
        for m, bucket in enumerate(buckets)
    ]


def test_steps_of_larger_microbatches_make_no_mesh_slow():
    said = []
    watch = MeshWatch(lambda pace, slow: said.append(pace))
    one, two, nine = Bucket(1, 1), Bucket(1, 2), Bucket(3, 3)
    small, large = (one, one, two), (two, nine, nine)  # of nine no first step had any
    for buckets, factor in [*[(small, 1.0)] * 12, *[(large, 1.0)] * 20]:
        watch.observe(of_buckets(buckets, factor), buckets)
    assert said == []
    for _ in range(5):
        watch.observe(of_buckets(large, 2.0), large)
    assert [pace.factor for pace in said] == [pytest.approx(2.0)]


def test_a_mesh_that_was_slow_from_the_start_is_as_it_was():
    assert paces(*[computing(0.1, 0.8)] * 40) == []
