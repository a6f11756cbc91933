"""Samples put together: a worker's part of a microbatch as the tensors that model and loss take.

Used by the worker itself, by the processes that read for it, and by the plain model beside it. Knows no stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from worker.data.dataset import make_collator
from worker.data.sampler import collate, input_names, row_of
from worker.data.source import Order, Source, make_source
from worker.engine.random_state import derive_seed
from worker.nests import Target, Targets, all_tensors, tensors_of
from worker.seeding import seeded
from worker.turns import GENERATORS

Rows = tuple[tuple[torch.Tensor, ...], Target]


@dataclass(frozen=True)
class Part:
    """Block `worker` of the `workers` equal ones in which a microbatch is shared."""

    worker: int
    workers: int


@dataclass(frozen=True)
class Read:
    """Inputs and targets, and under which names the model takes the inputs (none: by position)."""

    rows: Rows
    names: tuple[str, ...]


class Microbatches:
    """`read` any of them; `own_loss`: the model takes the targets too; `with_inputs`: the loss takes the inputs. `dataset`
    is one with indices that is there."""

    def __init__(self, order: Order, *, own_loss: bool, with_inputs: bool = False, dataset: Any = None):
        self.order, self._own_loss, self._with_inputs = order, own_loss, with_inputs
        self.source: Source = make_source(order, dataset)
        self._collator = make_collator(order.data)

    def read(self, step: int, microbatch: int, part: Part) -> Read:
        """A worker's rows of a microbatch. A job's own `collate` sees the whole microbatch, whoever wants a part of it:
        what it pads or draws does not depend on how many workers share it."""
        size = self.order.size
        share = size // part.workers
        first = part.worker * share
        if self._collator is None:
            read = self.stacked(self.source.rows(step, microbatch, first, share))
        else:
            read = self._collated(step, microbatch, slice(first, first + share))
        if microbatch == self.order.microbatches - 1:
            self.source.end_step(step)
        return read

    def stacked(self, samples: list[Any]) -> Read:
        """Samples, stacked. ValueError where they are not alike."""
        try:
            rows = collate(samples, own_loss=self._own_loss, with_inputs=self._with_inputs)
        except RuntimeError as error:  # of torch's stack
            raise ValueError(
                f"samples of data {self.order.data.factory!r} cannot be stacked ({error}): cut or pad all to one shape, or "
                "give data.collate"
            ) from error
        return Read(rows, input_names(samples[0], own_loss=self._own_loss))

    def _collated(self, step: int, microbatch: int, own: slice) -> Read:
        size, name = self.order.size, self.order.data.collate.factory
        samples = self.source.rows(step, microbatch, 0, size)
        try:
            with GENERATORS, seeded(derive_seed(self.order.seed, "collate", step, microbatch)):
                batch = self._collator(samples)
        except Exception as error:
            raise RuntimeError(
                f"data.collate {name} raised {type(error).__name__}: {error}, for {size} samples"
            ) from error
        names = input_names(batch, own_loss=self._own_loss)
        *inputs, targets = row_of(batch, names, self._own_loss)
        if self._own_loss:
            targets = torch.zeros(size)
        elif self._with_inputs:
            targets = Targets.of(targets, dict(zip(names, inputs, strict=True)) if names else tuple(inputs))
        elif not isinstance(targets, torch.Tensor) and next(tensors_of(targets), None) is not None:
            targets = Targets.of(targets)
        wanted = all_tensors(targets)
        shown = [*(names or range(len(inputs))), *["target"] * len(wanted)]
        for what, tensor in zip(shown, [*inputs, *wanted], strict=True):
            if not isinstance(tensor, torch.Tensor) or tensor.ndim < 1 or len(tensor) != size:
                shape = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ValueError(
                    f"data.collate {name} returned {shape} as {what} for {size} samples: return tensors with a row for each"
                )
        return Read((tuple(tensor[own] for tensor in inputs), targets[own]), names)
