"""BatchSampler: sample indices as a function of seed, step and microbatch, for an exact resume; and collate.

Random numbers that a data set draws follow from seed, step and index: the mesh that takes a sample's input and the
mesh that takes its target see one draw. Knows no stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from worker.model.pytree import Target, Targets, named_leaves
from worker.model.rng import derive_seed, seeded

TARGET_NAMES = ("labels", "label", "target", "targets")
"""Under which of these names a sample that is a dict has its target."""


class BatchSampler:
    """Deals a data set's samples to microbatches: every epoch a new permutation, no sample left out.

    Step s and microbatch m can be asked for in any order; `first_step` has the first samples of the first epoch, and a
    step before it, which only shows what samples are like, the same. With `origin` (step, sample) that step begins at
    that sample, counted over all epochs. Raises ValueError for an empty data set or a batch that `microbatches` does not
    divide.
    """

    def __init__(
        self,
        samples: int,
        global_batch: int,
        microbatches: int,
        *,
        seed: int = 0,
        first_step: int = 1,
        origin: tuple[int, int] | None = None,
    ) -> None:
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
        self.first_step = first_step
        self._origin = origin or (first_step, 0)

    def begin(self, step: int) -> int:
        """The sample with which `step` begins, counted over all epochs."""
        at, sample = self._origin
        return 0 if step < self.first_step else sample + (step - at) * self.global_batch

    def indices(self, step: int, microbatch: int) -> list[int]:
        """The samples of one microbatch, in order; global_batch / microbatches of them."""
        if step < self.first_step - 1 or not 0 <= microbatch < self.microbatches:
            raise ValueError(f"no microbatch {microbatch} of {self.microbatches} in step {step}")
        size = self.global_batch // self.microbatches
        first = self.begin(step) + microbatch * size
        return [self._sample(position) for position in range(first, first + size)]

    def _sample(self, position: int) -> int:
        epoch, place = divmod(position, self.samples)
        return int(_permutation(self.seed, epoch, self.samples)[place])


class SequentialSampler(BatchSampler):
    """Every sample once, in the data set's own order; behind the last one it begins again."""

    def _sample(self, position: int) -> int:
        return position % self.samples


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, samples: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(samples)


def read_sample(dataset: Any, index: int, *, seed: int, step: int) -> Any:
    """`dataset[index]` as it is in `step`, for whoever asks and however often: python's, numpy's and torch's
    generators are seeded for it, and stand afterwards where they stood."""
    with seeded(derive_seed(seed, "sample", step, index)):
        return dataset[index]


def collate(
    samples: Sequence[Any], *, own_loss: bool = False, with_inputs: bool = False
) -> tuple[tuple[Tensor, ...], Target]:
    """Stack samples: the model's inputs, and the targets.

    A sample is (input, target), ((inputs…), target), ({name: input}, target), or a dict, whose entry of one of the
    names TARGETS is the target; inputs by name come in the order of `input_names`. With `own_loss` the model computes
    its loss and takes the target too, and what is returned in its place says nothing. A target may be a nest of tensors
    (a dict, a tuple, …); `with_inputs` the loss takes the inputs beside it. Raises ValueError naming what a sample is
    instead.
    """
    rows = []
    names = input_names(samples[0], own_loss=own_loss)
    for sample in samples:
        if (found := input_names(sample, own_loss=own_loss)) != names:
            raise ValueError(
                f"a sample of the data set has the inputs {', '.join(found) or 'by position'}, another "
                f"{', '.join(names) or 'by position'}: return the same fields for every index"
            )
        rows.append(sample_row(sample, names, own_loss))
    *columns, wanted = zip(*rows, strict=True)
    shown = [f"input {name}" for name in names] or [f"input {k}" for k in range(len(columns))]
    inputs = [_stack(what, column) for what, column in zip(shown, columns, strict=True)]
    targets = _stack_targets(wanted)
    if not isinstance(targets, torch.Tensor) and next(named_leaves(targets), None) is not None:
        targets = Targets.of(targets)
    for what, value in zip([*shown, "target"], [*inputs, targets], strict=True):
        if not isinstance(value, torch.Tensor | Targets):
            raise ValueError(f"the {what} of a sample is no tensor, array or number: return one of these")
    if with_inputs and not own_loss:
        kept = targets.target if isinstance(targets, Targets) else targets
        targets = Targets.of(kept, dict(zip(names, inputs, strict=True)) if names else tuple(inputs))
    return tuple(inputs), targets


def input_names(sample: Any, *, own_loss: bool = False) -> tuple[str, ...]:
    """The keywords under which the model takes the inputs of such a sample, in order; empty: by position."""
    if isinstance(sample, Mapping):
        return tuple(sorted(set(sample) - ({_target_name(sample)} if not own_loss else set())))
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        shape = (
            f"{type(sample).__name__} of {len(sample)}"
            if hasattr(sample, "__len__")
            else type(sample).__name__
        )
        raise ValueError(
            f"a sample of the data set is a {shape}, not a pair: return (input, target), or a dict of tensors"
        )
    if not isinstance(sample[0], Mapping):
        return ()
    if own_loss:
        raise ValueError(
            "a sample of the data set is (dict, target), and the job has no loss: give `loss`, or return one dict with "
            "all that the model takes, under its names"
        )
    return tuple(sorted(sample[0]))


def _target_name(sample: Mapping[str, Any]) -> str:
    found = [name for name in TARGET_NAMES if name in sample]
    if len(found) != 1:
        raise ValueError(
            f"a sample of the data set is a dict of {', '.join(map(str, sample))}, and the job's loss wants one target: "
            f"name it {' or '.join(TARGET_NAMES)}, return (dict, target), or leave out `loss` where the model returns its "
            "own"
        )
    return found[0]


def sample_row(sample: Any, names: Sequence[str], own_loss: bool) -> tuple[Any, ...]:
    """The inputs, and the target."""
    if isinstance(sample, Mapping):
        target = 0.0 if own_loss else _as_tensor(sample[_target_name(sample)])
        return *(_as_tensor(sample[name]) for name in names), target
    first, target = sample
    if isinstance(first, Mapping):
        return *(_as_tensor(first[name]) for name in names), target
    inputs = tuple(first) if isinstance(first, tuple | list) else (first,)
    return (*inputs, target, 0.0) if own_loss else (*inputs, target)


def _stack_targets(targets: Sequence[Any]) -> Any:
    """Targets of samples, which may be nests, as one."""
    first = targets[0]
    if isinstance(first, Mapping):
        if different := next((one for one in targets if set(one) != set(first)), None):
            raise ValueError(
                f"the target of a sample has {', '.join(map(str, first))}, that of another "
                f"{', '.join(map(str, different))}: return the same fields for every index"
            )
        return {name: _stack_targets([one[name] for one in targets]) for name in first}
    if isinstance(first, tuple | list) and not all(isinstance(part, int | float) for part in first):
        parts = [_stack_targets(column) for column in zip(*targets, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return _stack("target", [_as_tensor(list(one) if isinstance(one, tuple) else one) for one in targets])


def _stack(what: str, values: Sequence[Any]) -> Any:
    """The values of samples as one; ValueError for a sample whose `what` is None."""
    missing = sum(value is None for value in values)
    if missing:
        raise ValueError(
            f"the {what} of {missing} of {len(values)} samples is None: return a value for every sample, or name in "
            "data.columns only fields that all of them have"
        )
    return default_collate(list(values))


def _as_tensor(value: Any) -> Any:
    """Lists of numbers, as data sets on disk give them, as tensors."""
    return torch.tensor(value) if isinstance(value, list) else value
