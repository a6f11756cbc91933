"""Samples that are read ahead: the same ones, at most so many, with the errors of those that were asked for."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest
import torch

from tests.polling import until
from worker.data.prefetch import DeviceStaging, Prefetcher, ReadTooSlowError
from worker.model.rng import RNG_LOCK, FairLock


def reader(read, *, steps=2, last=100, limit_s=10.0):
    return Prefetcher(read, steps=steps, last=last, limit_s=limit_s)


def rests(ahead):
    """True while the reading thread sleeps until somebody wakes it, which only the caller of this does."""
    with ahead._changed:
        return bool(ahead._changed._waiters)


def test_so_many_steps_are_read_ahead_and_none_after_the_last():
    seen = []
    ahead = reader(lambda step: seen.append(step) or step, last=6)
    assert ahead.take(1) == 1
    until(lambda: rests(ahead))
    assert seen == [1, 2, 3], "one is in use, two are ahead"
    assert [ahead.take(step) for step in range(2, 7)] == [2, 3, 4, 5, 6]
    until(lambda: rests(ahead))
    assert seen == [1, 2, 3, 4, 5, 6]
    assert ahead.close()


def test_reading_goes_on_while_the_taker_computes():
    ahead = reader(lambda step: step)
    ahead.take(1)
    until(lambda: rests(ahead))
    assert (ahead.take(2, limit_s=0.0), ahead.take(3, limit_s=0.0)) == (2, 3), "they are there, nobody waits"
    ahead.close()


def test_off_reads_on_the_callers_thread_when_it_asks():
    threads = []
    ahead = reader(lambda step: threads.append(threading.current_thread()) or step, steps=0)
    assert [ahead.take(1), ahead.take(2)] == [1, 2]
    assert set(threads) == {threading.current_thread()}
    assert ahead.close()


def test_what_reading_raises_comes_with_the_step_that_it_belongs_to():
    def read(step):
        if step == 3:
            raise KeyError("sample 17")
        return step

    ahead = reader(read)
    assert [ahead.take(1), ahead.take(2)] == [1, 2]
    with pytest.raises(KeyError, match="sample 17"):
        ahead.take(3)
    assert ahead.take(4) == 4
    ahead.close()


def test_a_step_out_of_order_drops_what_was_read():
    ahead = reader(lambda step: step)
    assert [ahead.take(step) for step in (1, 2, 9, 10, 4, 4, 5, 0, 1)] == [1, 2, 9, 10, 4, 4, 5, 0, 1]
    ahead.close()


def test_a_data_set_that_is_stuck_is_told_after_the_limit_and_does_not_hold_the_end():
    stuck = threading.Event()
    ahead = reader(lambda step: stuck.wait(20), limit_s=0.1)
    with pytest.raises(ReadTooSlowError, match=r"step 5 were not there within 0 s"):
        ahead.take(5)
    assert not ahead.close(0.05)
    stuck.set()
    until(lambda: not ahead._thread.is_alive())
    with pytest.raises(RuntimeError, match="closed"):
        ahead.take(6)


def test_the_thread_ends_with_the_reader():
    ahead = reader(lambda step: step)
    ahead.take(1)
    assert ahead.close() and not ahead._thread.is_alive()


def test_turns_are_taken_by_both_who_want_them():
    turns, stop, taken = FairLock(), threading.Event(), [0]

    def greedy():
        while not stop.is_set():
            with turns:
                taken[0] += 1
                until(lambda: turns._next.locked() or stop.is_set())  # until the other one waits

    thread = threading.Thread(target=greedy)
    thread.start()
    until(lambda: taken[0] > 0)
    for _ in range(20):
        with turns:
            pass
    others = taken[0]
    stop.set()
    thread.join()
    assert others <= 21, "who waits comes next"


def test_a_data_set_that_seeds_and_draws_never_meets_another_user_of_the_generators():
    """As worker.actor.actor and worker.engine use them: each side seeds and draws within its turn."""
    wrong, stop = [], threading.Event()

    def draws(seed):
        with RNG_LOCK:
            torch.manual_seed(seed), random.seed(seed)
            values = [(float(torch.rand(())), random.random()) for _ in range(20)]
        return values

    expected = {seed: draws(seed) for seed in (1, 2)}

    def other():
        while not stop.is_set():
            if draws(2) != expected[2]:
                wrong.append(2)

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(300):
        if draws(1) != expected[1]:
            wrong.append(1)
    stop.set()
    thread.join()
    assert wrong == []


class Fake:
    """torch.cuda as Staging uses it; tensors of the CPU say what is asked of them."""

    def __init__(self):
        self.said = []

    def current_device(self):
        return 0

    def Stream(self):
        fake = self

        class Stream:
            def synchronize(self):
                fake.said.append("synchronize")

        return Stream()

    def device(self, index):
        return self._inside(f"device {index}")

    def stream(self, stream):
        return self._inside("stream")

    def _inside(self, name):
        self.said.append(name)
        return contextlib.nullcontext()


class FakeTensor:
    def __init__(self, name, said):
        self.name, self.said = name, said

    def pin_memory(self):
        self.said.append(f"pin {self.name}")
        return self

    def to(self, device, non_blocking):
        self.said.append(f"copy {self.name} to {device} {non_blocking}")
        return f"{self.name} on {device}"


def test_samples_are_pinned_and_copied_on_a_stream_of_their_own_before_they_are_handed_over():
    fake = Fake()
    x, y = FakeTensor("x", fake.said), FakeTensor("y", fake.said)
    assert DeviceStaging(fake)([(x,)], [y]) == ([("x on cuda:0",)], ["y on cuda:0"])
    assert fake.said == [
        *("pin x", "pin y", "device 0", "stream"),
        *("copy x to cuda:0 True", "copy y to cuda:0 True", "synchronize"),
    ]
