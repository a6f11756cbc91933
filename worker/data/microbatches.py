"""Microbatches: collates samples into one data-parallel rank's tensors for the model and its loss.

Used by the worker itself, by its loader processes, and by the plain model of the parity check. A job's own
`collate` sees the whole microbatch, whatever the number of ranks: what it pads or draws must not depend on that.
Knows no stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from worker.data.dataset import SampleOrder, Source, make_collator, make_source
from worker.data.sampler import collate, input_names, sample_row
from worker.model.pytree import Target, Targets, named_leaves, target_tensors
from worker.model.rng import derive_seed, seeded

MicrobatchTensors = tuple[tuple[torch.Tensor, ...], Target]


@dataclass(frozen=True)
class BatchSlice:
    """Block `worker` of the `workers` equal ones in which a microbatch is shared."""

    worker: int
    workers: int


@dataclass(frozen=True)
class ReadMicrobatch:
    """Inputs and targets, and under which names the model takes the inputs (none: by position)."""

    rows: MicrobatchTensors
    names: tuple[str, ...]


class Microbatches:
    """`read` any of them; `own_loss`: the model takes the targets too; `with_inputs`: the loss takes the inputs. `dataset`
    is one with indices that is there."""

    def __init__(self, order: SampleOrder, *, own_loss: bool, with_inputs: bool = False, dataset: Any = None):
        self.order, self._own_loss, self._with_inputs = order, own_loss, with_inputs
        self.source: Source = make_source(order, dataset)
        self._collator = make_collator(order.data)

    def read(self, step: int, microbatch: int, part: BatchSlice) -> ReadMicrobatch:
        """A worker's rows of a microbatch. A job's own `collate` sees the whole microbatch, whoever wants a part of it:
        what it pads or draws does not depend on how many workers share it."""
        size = self.order.size
        share = size // part.workers
        first = part.worker * share
        if self._collator is None:
            read = self.stack_samples(self.source.rows(step, microbatch, first, share))
        else:
            read = self._collated(step, microbatch, slice(first, first + share))
        if microbatch == self.order.microbatches - 1:
            self.source.end_step(step)
        return read

    def stack_samples(self, samples: list[Any]) -> ReadMicrobatch:
        """Samples, stacked. ValueError where they are not alike."""
        try:
            rows = collate(samples, own_loss=self._own_loss, with_inputs=self._with_inputs)
        except RuntimeError as error:  # of torch's stack
            raise ValueError(
                f"samples of data {self.order.data.factory!r} cannot be stacked ({error}): cut or pad all to one shape, or "
                "give data.collate"
            ) from error
        return ReadMicrobatch(rows, input_names(samples[0], own_loss=self._own_loss))

    def _collated(self, step: int, microbatch: int, own: slice) -> ReadMicrobatch:
        size, name = self.order.size, self.order.data.collate.factory
        samples = self.source.rows(step, microbatch, 0, size)
        try:
            with seeded(derive_seed(self.order.seed, "collate", step, microbatch)):
                batch = self._collator(samples)
        except Exception as error:
            raise RuntimeError(
                f"data.collate {name} raised {type(error).__name__}: {error}, for {size} samples"
            ) from error
        names = input_names(batch, own_loss=self._own_loss)
        *inputs, targets = sample_row(batch, names, self._own_loss)
        if self._own_loss:
            targets = torch.zeros(size)
        elif self._with_inputs:
            targets = Targets.of(targets, dict(zip(names, inputs, strict=True)) if names else tuple(inputs))
        elif not isinstance(targets, torch.Tensor) and next(named_leaves(targets), None) is not None:
            targets = Targets.of(targets)
        wanted = target_tensors(targets)
        shown = [*(names or range(len(inputs))), *["target"] * len(wanted)]
        for what, tensor in zip(shown, [*inputs, *wanted], strict=True):
            if not isinstance(tensor, torch.Tensor) or tensor.ndim < 1 or len(tensor) != size:
                shape = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ValueError(
                    f"data.collate {name} returned {shape} as {what} for {size} samples: return tensors with a row for each"
                )
        return ReadMicrobatch((tuple(tensor[own] for tensor in inputs), targets[own]), names)
