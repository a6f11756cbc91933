"""Clocks of several processes, and the times of transfers seen from both ends."""

import random

import pytest

from worker.contract.program import MeasuredSlot
from worker.driver.step_measurement import align_transfers, estimate_clock_offset, to_driver_clock


def slot(action, start, end, **fields):
    given = {"lane": "x", "stage": 0, "microbatch": 0, "edge": None, "peer_mesh": None, "peer_stage": None}
    return MeasuredSlot(action=action, start_s=start, end_s=end, **{**given, **fields})


@pytest.mark.parametrize("seed", range(50))
def test_the_true_offset_lies_within_the_stated_uncertainty(seed):
    rng = random.Random(seed)
    now, offset = [1000.0], rng.uniform(-1e6, 1e6)

    def local():
        return now[0]

    def remote():
        now[0] += rng.uniform(1e-5, 1e-2)  # the question travels
        answer = now[0] + offset
        now[0] += rng.uniform(1e-5, 1e-2)  # the answer travels
        return answer

    found = estimate_clock_offset(remote, rounds=15, local_now=local)
    assert abs(found.offset_s - offset) <= found.uncertainty_s
    assert found.uncertainty_s <= 1e-2


def test_more_rounds_do_not_make_the_uncertainty_larger():
    def uncertainty(rounds):
        rng, now = random.Random(1), [0.0]

        def remote():
            now[0] += rng.uniform(0, 1e-2)
            return now[0]

        return estimate_clock_offset(remote, rounds=rounds, local_now=lambda: now[0]).uncertainty_s

    assert uncertainty(50) <= uncertainty(5) <= uncertainty(1)
    with pytest.raises(ValueError, match="rounds is 0"):
        uncertainty(0)


def test_slots_move_to_the_drivers_clock():
    offset = estimate_clock_offset(lambda: 105.0, rounds=1, local_now=lambda: 5.0)
    moved = to_driver_clock([slot("F", 107.0, 108.5)], offset)
    assert (moved[0].start_s, moved[0].end_s) == (7.0, 8.5)


def test_both_halves_of_a_transfer_run_from_when_both_ends_are_ready():
    sent = slot("SEND_F", 3.0, 4.9, edge=2, microbatch=1)
    received = slot("RECV_F", 1.0, 5.0, edge=2, microbatch=1)
    gradient = slot("SEND_B", 0.5, 9.0, edge=2, microbatch=1)
    compute = slot("F", 0.0, 1.0)
    aligned = align_transfers({"a": [compute, sent, gradient], "b": [received]})
    assert aligned["a"][0] == compute
    assert (aligned["a"][1].start_s, aligned["a"][1].end_s) == (3.0, 5.0)
    assert (aligned["b"][0].start_s, aligned["b"][0].end_s) == (3.0, 5.0)
    assert aligned["a"][2] == gradient  # its other half is not there
