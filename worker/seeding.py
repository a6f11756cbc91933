"""Code that draws the random numbers of a seed, whoever runs it, and disturbs nobody else's.

Python's, numpy's and torch's generators belong to the whole process: see worker/turns.py for whose turn it is.
Must not know stages, data sets or jobs.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from worker.turns import GENERATORS


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What the body draws from random, numpy.random and torch (on CUDA too, once it is in use) follows from
    `seed` alone; afterwards these generators stand where they stood."""
    with _kept():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # not torch.manual_seed: before CUDA is in use that keeps every seed, with a stack trace, for later
        for generator in (torch.default_generator, *_cuda_generators()):
            generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def others_turn() -> Iterator[None]:
    """While the body waits for other workers: a turn of this thread with the generators is others', if it has it, and
    afterwards the generators stand where they stood."""
    if not GENERATORS.mine:
        yield
        return
    with _kept(), GENERATORS.free():
        yield


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    cuda = _cuda_generators()
    python, numpy, torch_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_cuda = [generator.get_state() for generator in cuda]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_cpu)
        for generator, state in zip(cuda, on_cuda, strict=True):
            generator.set_state(state)


def _cuda_generators() -> list[torch.Generator]:
    """That of the current device, if this process uses CUDA at all."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.default_generators[torch.cuda.current_device()]]
