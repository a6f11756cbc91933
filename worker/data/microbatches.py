"""Microbatches: collates samples into one data-parallel rank's tensors for the model and its loss.

Used by the worker itself, by its loader processes, and by the plain model of the parity check. A job's own
`collate` sees the whole microbatch, whatever the number of ranks: what it pads or draws must not depend on that.
Knows no stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from worker.contract.job import Bucket
from worker.data.dataset import SampleOrder, Source, make_collator, make_source
from worker.data.padding import LengthGroups
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
    """Inputs and targets, and under which names the model takes the inputs (none: by position). With data.lengths the
    `bucket` to which the microbatch was padded, and the tokens of these samples before."""

    rows: MicrobatchTensors
    names: tuple[str, ...]
    bucket: Bucket | None = None
    tokens: int = 0


class Microbatches:
    """`read` any of them; `own_loss`: the model takes the targets too; `with_inputs`: the loss takes the inputs. `dataset`
    is one with indices that is there."""

    def __init__(self, order: SampleOrder, *, own_loss: bool, with_inputs: bool = False, dataset: Any = None):
        self._own_loss, self._with_inputs = own_loss, with_inputs
        self._lengths: LengthGroups | None = None
        if order.data.lengths is not None and order.data.collate is not None:
            raise ValueError(
                "data has lengths and collate, which both make microbatches of samples: leave out one of them"
            )
        self.source: Source = make_source(order, dataset)
        if order.data.lengths is not None:
            self._lengths = LengthGroups(order, self.source)
            order = self._lengths.order
        self.order = order
        """With data.lengths with the buckets that were chosen."""
        self._collator = make_collator(order.data)

    def read(self, step: int, microbatch: int, part: BatchSlice) -> ReadMicrobatch:
        """A worker's rows of a microbatch. A job's own `collate` sees the whole microbatch, whoever wants a part of it:
        what it pads or draws does not depend on how many workers share it."""
        size = self.order.size
        share = size // part.workers
        first = part.worker * share
        if self._lengths is not None:
            read = self._padded(step, microbatch, part, self._lengths.bucket(step, microbatch))
        elif self._collator is None:
            read = self.stack_samples(self.source.rows(step, microbatch, first, share))
        else:
            read = self._collated(step, microbatch, slice(first, first + share))
        if microbatch == self.order.microbatches - 1:
            (self._lengths or self.source).end_step(step)
        return read

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The shapes to which microbatches are padded, ascending; none where all samples have one shape."""
        return () if self._lengths is None else self._lengths.buckets

    def buckets_of(self, step: int) -> tuple[Bucket, ...]:
        """The buckets of a step's microbatches without reading a sample; none where the data set tells no lengths."""
        return () if self._lengths is None else self._lengths.known_buckets(step)

    def examples(self, step: int, part: BatchSlice) -> dict[Bucket, ReadMicrobatch]:
        """A worker's rows of a microbatch for each bucket, of samples of `step`, padded or cut to it."""
        found = {
            bucket: self._stacked(self._lengths.example(step, bucket, part.worker, part.workers), bucket)
            for bucket in self._lengths.buckets
        }
        self._lengths.end_step(step)
        return found

    def padded_twice(self, step: int, part: BatchSlice) -> list[ReadMicrobatch]:
        """A worker's rows of the shortest microbatch of `step`, padded to its bucket and to the longest; none where these
        are one."""
        groups = self._lengths
        if groups is None or groups.bucket(step, 0).length == groups.buckets[-1].length:
            return []
        short = groups.bucket(step, 0)
        longest = Bucket(groups.buckets[-1].length, short.rows)
        found = [self._padded(step, 0, part, bucket) for bucket in (short, longest)]
        groups.end_step(step)
        return found

    def forget_first_samples(self) -> None:
        """Have the first samples read anew where they are asked for again."""
        (self._lengths or self.source).forget_first_samples()

    def _padded(self, step: int, microbatch: int, part: BatchSlice, bucket: Bucket) -> ReadMicrobatch:
        return self._stacked(self._lengths.rows(step, microbatch, bucket, part.worker, part.workers), bucket)

    def _stacked(self, fitted: tuple[list[Any], int], bucket: Bucket) -> ReadMicrobatch:
        samples, tokens = fitted
        return replace(self.stack_samples(samples), bucket=bucket, tokens=tokens)

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
