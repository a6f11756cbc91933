"""What is drawn under a seed follows from it alone, and nobody else notices."""

import random
import threading

import numpy as np
import pytest
import torch

from tests.worker.odd_jobs import Masked, tied_from_python_and_numpy
from worker.data.sampler import read_sample
from worker.model import rng
from worker.model.factory import build_model
from worker.model.rng import FairLock, seeded


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_seed_gives_the_same_numbers_wherever_the_generators_stand():
    drawn = []
    for before in (1, 2):
        random.seed(before), np.random.seed(before), torch.manual_seed(before)
        with seeded(77):
            drawn.append(draw())
    with seeded(78):
        other = draw()
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], other, strict=True))


def test_a_turn_with_the_generators_may_hold_another_and_ends_with_the_outer_one():
    lock = FairLock()

    def taken():
        found = []
        thread = threading.Thread(target=lambda: found.append(lock._lock.acquire(blocking=False)))
        thread.start()
        thread.join(60)
        if found[0]:
            lock._lock.release()
        return not found[0]

    with lock:
        with lock:
            with lock.released():
                assert not taken()
            assert taken()
        assert taken()
    assert not taken()


def test_every_bit_of_a_seed_that_numpy_takes_counts():
    drawn = set()
    for seed in (1, 3, 33, 1 + 2**16, 1 + 2**31, 2**32 - 1):
        with seeded(seed):
            drawn.add(float(np.random.rand()))
    assert len(drawn) == 6


def test_a_devices_generator_is_seeded_and_stands_afterwards_where_it_stood(monkeypatch):
    """In the place of that of CUDA, once it is in use."""
    device = torch.Generator()
    monkeypatch.setattr(rng, "_cuda_generators", lambda: [device])
    device.manual_seed(5)
    expected = torch.rand(3, generator=device)
    drawn = []
    for before in (5, 6):
        device.manual_seed(before)
        with seeded(77):
            drawn.append(torch.rand(3, generator=device))
    assert torch.equal(*drawn)
    device.manual_seed(5)
    with seeded(77):
        torch.rand(9, generator=device)
    assert torch.equal(torch.rand(3, generator=device), expected)


@pytest.mark.parametrize("raises", [False, True])
def test_generators_stand_afterwards_where_they_stood(raises):
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(5)
    expected = draw()
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(5)
    try:
        with seeded(2**62 + 1):
            draw()
            if raises:
                raise KeyError
    except KeyError:
        pass
    assert draw() == expected


def test_a_model_drawn_from_python_and_numpy_is_the_same_on_every_worker():
    first, second = (build_model("odd_jobs:tied_from_python_and_numpy", seed=3) for _ in range(2))
    assert torch.equal(first.first.weight, second.first.weight)
    other = build_model("odd_jobs:tied_from_python_and_numpy", seed=4)
    assert not torch.equal(first.first.weight, other.first.weight)
    assert tied_from_python_and_numpy().first.weight.shape == (4, 4)


def test_a_sample_is_one_draw_for_whoever_reads_it_and_another_in_another_step():
    data = Masked(16)

    def read(index, **key):
        return torch.stack(read_sample(data, index, **{"seed": 3, "step": 5, **key}))

    sample = read(2)
    read(4)  # what is read in between changes nothing
    assert torch.equal(read(2), sample)
    hidden = sample[1] != -100
    assert hidden.any() and (sample[0][hidden] == 0).all(), "input and target belong to one draw"
    for key in ({"seed": 4}, {"step": 6}):
        assert not torch.equal(read(2, **key) != -100, sample != -100)
    assert not torch.equal(read(3)[1] != -100, hidden)


def test_reading_samples_leaves_the_generators_of_the_training_alone():
    torch.manual_seed(1)
    expected = torch.nn.functional.dropout(torch.ones(50))
    torch.manual_seed(1)
    read_sample(Masked(16), 3, seed=0, step=0)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(50)), expected)
