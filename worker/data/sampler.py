"""Which samples a step uses: a function of seed, step and microbatch, so that a resume is exact.

Also how one is read: random numbers that a data set draws follow from seed, step and index, so that the mesh
that takes a sample's input and the mesh that takes its target see one draw. Knows no stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from worker.engine.random_state import derive_seed
from worker.seeding import seeded


class BatchSampler:
    """Deals a data set's samples to microbatches: every epoch a new permutation, no sample left out.

    Step s and microbatch m can be asked for in any order. Raises ValueError for an empty data set
    or a batch that `microbatches` does not divide.
    """

    def __init__(self, samples: int, global_batch: int, microbatches: int, *, seed: int = 0) -> None:
        if samples < 1:
            raise ValueError("the data set is empty: give it at least one sample")
        if global_batch < 1 or microbatches < 1 or global_batch % microbatches:
            raise ValueError(
                f"global_batch {global_batch} is not divisible by microbatches {microbatches}: change one of them"
            )
        self.samples = samples
        self.global_batch = global_batch
        self.microbatches = microbatches
        self.seed = seed

    def indices(self, step: int, microbatch: int) -> list[int]:
        """The samples of one microbatch, in order; global_batch / microbatches of them."""
        if step < 0 or not 0 <= microbatch < self.microbatches:
            raise ValueError(f"no microbatch {microbatch} of {self.microbatches} in step {step}")
        size = self.global_batch // self.microbatches
        first = step * self.global_batch + microbatch * size
        return [self._sample(position) for position in range(first, first + size)]

    def _sample(self, position: int) -> int:
        epoch, place = divmod(position, self.samples)
        return int(_permutation(self.seed, epoch, self.samples)[place])


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, samples: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(samples)


def read_sample(dataset: Any, index: int, *, seed: int, step: int) -> Any:
    """`dataset[index]` as it is in `step`, for whoever asks and however often: python's, numpy's and torch's
    generators are seeded for it, and stand afterwards where they stood."""
    with seeded(derive_seed(seed, "sample", step, index)):
        return dataset[index]


def collate(samples: Sequence[Any]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Stack samples (input, target) or ((inputs…), target): the model's inputs, and the targets.

    Raises ValueError naming what a sample is instead.
    """
    sample = samples[0]
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        shape = (
            f"{type(sample).__name__} of {len(sample)}"
            if hasattr(sample, "__len__")
            else type(sample).__name__
        )
        raise ValueError(f"a sample of the data set is a {shape}, not a pair: return (input, target)")
    inputs, targets = default_collate(list(samples))
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    for what, value in [*((f"input {k}", value) for k, value in enumerate(inputs)), ("target", targets)]:
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"the {what} of a sample is no tensor, array or number: return one of these")
    return inputs, targets
