"""LengthGroups and Padding: samples of unequal lengths in microbatches of like length, each padded to one bucket.

A step has the samples that its SampleOrder gives it; sorted by length (ties by position) they are cut into microbatches
(length_buckets.py). Rows that are left in a bucket repeat a sample, without any target. Every worker does so for itself,
from the samples alone: no bucket is sent, and a resume needs none. A data set with `lengths` (one of each sample, by index)
is asked for those; of another, and of a stream, each worker reads all samples of a step, the other ranks' too. Knows no
models.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from worker.contract.job import AUTO, Bucket, Lengths
from worker.data.dataset import IndexedSource, SampleOrder, StreamSource
from worker.data.length_buckets import choose_buckets, choose_lengths, cut_into_groups, equal_buckets
from worker.data.sampler import input_names, sample_row

MAX_READ_SAMPLES = 20_000
"""Samples that are read before training where buckets are chosen and the data set tells no lengths."""
_DEFAULT_FIELD = "input_ids"
_ASKED_LENGTHS = 10_000
"""Of those that a data set tells, spread over it, for the choice of rows."""


@dataclass(frozen=True)
class Padding:
    """The parts of a sample that lie along its length, and the value with which each is padded: of its inputs (`names`,
    none: by position) and of the leaves of its target; None: the part has no length. `field` is the input that counts."""

    names: tuple[str, ...]
    field: int
    inputs: tuple[int | None, ...]
    target: tuple[int | None, ...]
    data: str

    @classmethod
    def of(cls, samples: Sequence[Any], lengths: Lengths, *, ignored: int, data: str) -> Padding:
        """The padding of what the parts of all `samples` have in common. Raises ValueError for a field that is no integers
        of shape (length,), and for a target along the length that cannot hold `ignored`."""
        names = input_names(samples[0])
        field = _field_position(names, lengths.field, samples[0], data)
        for sample in samples:
            _check_names(input_names(sample), names, data)
        rows = [_parts_of(sample, names) for sample in samples]
        for inputs, _ in rows:
            _check_field(inputs[field], names, field, data)
        sizes = [len(inputs[field]) for inputs, _ in rows]
        along_inputs = [
            _lies_along(column, sizes) for column in zip(*(inputs for inputs, _ in rows), strict=True)
        ]
        targets = [_leaves(target)[0] for _, target in rows]
        if len({len(leaves) for leaves in targets}) > 1:
            raise ValueError(
                f"targets of data {data!r} have unequal numbers of tensors: return the same ones for every index"
            )
        along_target = [_lies_along(column, sizes) for column in zip(*targets, strict=True)]
        for leaf, along in zip(targets[0], along_target, strict=True):
            if along and not _holds(leaf.dtype, ignored):
                raise ValueError(
                    f"the target of a sample of data {data!r} is {leaf.dtype} and as long as its input: data.lengths pads "
                    f"it with {ignored}, which the loss ignores, so return int64"
                )
        return cls(
            names,
            field,
            tuple(
                (lengths.pad if k == field else 0) if along else None for k, along in enumerate(along_inputs)
            ),
            tuple(ignored if along else None for along in along_target),
            data,
        )

    @property
    def hides_targets(self) -> bool:
        """True where the loss ignores all of a sample whose target is padding alone."""
        return bool(self.target) and None not in self.target

    def length(self, sample: Any) -> int:
        """The length of a sample. Raises ValueError where it has other inputs, or none of shape (length,)."""
        _check_names(input_names(sample), self.names, self.data)
        field = _parts_of(sample, self.names)[0][self.field]
        _check_field(field, self.names, self.field, self.data)
        return len(field)

    def fit(self, sample: Any, length: int, *, hides_target: bool = False) -> Any:
        """The sample padded, or cut, to `length`; where it `hides_target`, with padding as its target."""
        inputs, target = _parts_of(sample, self.names)
        size = len(inputs[self.field])
        leaves, tree = _leaves(target)
        shown = self.names or [f"input {k}" for k in range(len(inputs))]
        parts = [
            self._fitted(what, value, pad, size, length)
            for what, value, pad in zip(
                [*shown, *["target"] * len(leaves)],
                [*inputs, *leaves],
                (*self.inputs, *self.target),
                strict=True,
            )
        ]
        inputs, leaves = parts[: len(inputs)], parts[len(inputs) :]
        if hides_target:
            leaves = [torch.full_like(leaf, pad) for leaf, pad in zip(leaves, self.target, strict=True)]
        by_name = dict(zip(self.names, inputs, strict=True)) if self.names else tuple(inputs)
        return by_name, tree_unflatten(leaves, tree)

    def _fitted(self, what: str, value: Any, pad: int | None, size: int, length: int) -> Any:
        if pad is None:
            return value
        if not isinstance(value, Tensor) or not value.ndim or len(value) != size:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"the {what} of a sample of data {self.data!r} is {shape}, and its length is {size}: earlier samples had as "
                "many entries there; return equally many"
            )
        if size >= length:
            return value[:length]
        padded = value.new_full((length, *value.shape[1:]), pad)
        padded[:size] = value
        return padded


@dataclass(frozen=True)
class _GroupedStep:
    """The samples of a step by position (None: not read), each one's length, and the positions and the bucket of each
    microbatch."""

    step: int
    samples: Sequence[Any] | None
    lengths: Sequence[int]
    groups: Sequence[Sequence[int]]
    buckets: Sequence[Bucket]


class LengthGroups:
    """The samples of each step of `source`, whose lengths are unequal, in microbatches. `order` has the buckets that were
    chosen.

    Raises ValueError where buckets cannot be chosen.
    """

    def __init__(self, order: SampleOrder, source: IndexedSource | StreamSource):
        self._source = source
        self._table = _length_table(source)
        if self._table is not None and len(self._table) != source.samples:
            raise ValueError(
                f"data {order.data.factory!r} has {source.samples} samples and {len(self._table)} lengths: give one of each"
            )
        samples = source.batch(order.first_step - 1)
        self.padding = Padding.of(
            samples,
            order.data.lengths,
            ignored=order.ignored_target,
            data=order.data.factory,
        )
        if order.data.lengths.buckets == AUTO:
            chosen = replace(
                order.data.lengths, buckets=choose_lengths(self._all_lengths(order.data.factory))
            )
            order = replace(order, data=replace(order.data, lengths=chosen))
        if not order.buckets:
            order = replace(order, buckets=self._choose_buckets(order, samples))
        self.order = order
        self._grouped: _GroupedStep | None = None

    def _choose_buckets(self, order: SampleOrder, samples: Sequence[Any]) -> tuple[Bucket, ...]:
        lengths = order.data.lengths.buckets
        if order.row_multiple is None or not self.padding.hides_targets:
            return equal_buckets(lengths, order.size)
        table = self._table
        if table is None:
            known = [self.padding.length(sample) for sample in samples]
        else:
            known = [int(table[index]) for index in range(0, len(table), 1 + len(table) // _ASKED_LENGTHS)]
        return choose_buckets(
            lengths,
            [min(length, lengths[-1]) for length in known],
            microbatches=order.microbatches,
            rows=order.size,
            multiple=order.row_multiple,
        )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The shapes to which microbatches are padded, ascending, of which the last one has the most tokens."""
        return self.order.buckets

    def rows(
        self, step: int, microbatch: int, bucket: Bucket, worker: int, workers: int
    ) -> tuple[list[Any], int]:
        """Block `worker` of the `workers` equal ones in which a microbatch, padded to a bucket that holds it, is shared, and
        the tokens of these samples before."""
        grouped = self._group(step)
        return self._block(grouped, grouped.groups[microbatch], bucket, worker, workers)

    def example(self, step: int, bucket: Bucket, worker: int, workers: int) -> tuple[list[Any], int]:
        """The answer of `rows` for samples of `step` that fill a bucket: the longest that it holds, and where these are too
        few the next longer ones, cut."""
        grouped = self._group(step)
        places = sorted(range(len(grouped.lengths)), key=lambda at: (grouped.lengths[at], at))
        held = sum(length <= bucket.length for length in grouped.lengths)
        group = places[max(held - bucket.rows, 0) : max(held, bucket.rows)]
        return self._block(grouped, group, bucket, worker, workers)

    def _block(
        self, grouped: _GroupedStep, group: Sequence[int], bucket: Bucket, worker: int, workers: int
    ) -> tuple[list[Any], int]:
        share = bucket.rows // workers
        own = _rows_of(group, bucket.rows, self.order.row_multiple or 1)[
            worker * share : (worker + 1) * share
        ]
        samples = {at: self._sample(grouped, at) for at, _ in own}
        fitted = [self.padding.fit(samples[at], bucket.length, hides_target=is_left) for at, is_left in own]
        return fitted, sum(grouped.lengths[at] for at, is_left in own if not is_left)

    def bucket(self, step: int, microbatch: int) -> Bucket:
        """The shape to which a microbatch is padded."""
        return self._group(step).buckets[microbatch]

    def known_buckets(self, step: int) -> tuple[Bucket, ...]:
        """The buckets of a step's microbatches by the data set's `lengths`; none where it has none, or one that no bucket
        holds. No sample is read."""
        if self._table is None:
            return ()
        lengths = [int(self._table[index]) for index in self._source.numbers(step)]
        if max(lengths) > self.buckets[-1].length:
            return ()
        return tuple(self._groups(lengths)[1])

    def _groups(self, lengths: Sequence[int]) -> tuple[list[list[int]], Sequence[Bucket]]:
        """The positions and the bucket of each microbatch among samples of these lengths."""
        places, order = range(len(lengths)), self.order
        if not order.once:  # an evaluation leaves out the end of its data, whatever lengths that has
            places = sorted(places, key=lambda at: (lengths[at], at))
        if all(bucket.rows == order.size for bucket in self.buckets):
            groups = [list(places[m * order.size : (m + 1) * order.size]) for m in range(order.microbatches)]
            ends = [bucket.length for bucket in self.buckets]
            longest = (max(lengths[at] for at in group) for group in groups)
            return groups, [self.buckets[bisect.bisect_left(ends, length)] for length in longest]
        cut = cut_into_groups(
            tuple(lengths[at] for at in places), self.buckets, order.microbatches, order.row_multiple
        )
        ends = list(itertools.accumulate(cut.sizes))
        return [
            list(places[end - size : end]) for size, end in zip(cut.sizes, ends, strict=True)
        ], cut.buckets

    def end_step(self, step: int) -> None:
        """No more rows of this step are wanted."""
        self._grouped = None
        self._source.end_step(step)

    def forget_first_samples(self) -> None:
        """Have the first samples read anew where they are asked for again."""
        self._grouped = None
        self._source.forget_first_samples()

    def _sample(self, grouped: _GroupedStep, at: int) -> Any:
        if grouped.samples is not None:
            return grouped.samples[at]
        index = self._source.numbers(grouped.step)[at]
        sample = self._source.example(grouped.step, index)
        if (length := self.padding.length(sample)) != grouped.lengths[at]:
            raise ValueError(
                f"sample {index} of data {self.order.data.factory!r} has length {length}, and its `lengths` say "
                f"{grouped.lengths[at]}: microbatches are made by them, so have both agree"
            )
        return sample

    def _group(self, step: int) -> _GroupedStep:
        if self._grouped is not None and self._grouped.step == step:
            return self._grouped
        samples = None
        if self._table is None:
            samples = self._source.batch(step)
            lengths = [self.padding.length(sample) for sample in samples]
        else:
            self._source.check_not_past_end(step)
            lengths = [int(self._table[index]) for index in self._source.numbers(step)]
        most = self.buckets[-1].length
        for number, length in zip(self._source.numbers(step), lengths, strict=True):
            if length > most:
                raise ValueError(
                    f"sample {number} of data {self.order.data.factory!r} has length {length:,}, and the largest of "
                    f"data.lengths.buckets is {most:,}: add a bucket for it, or have the data set cut samples"
                )
        self._grouped = _GroupedStep(step, samples, lengths, *self._groups(lengths))
        return self._grouped

    def _all_lengths(self, data: str) -> list[int]:
        samples = self._source.samples
        if samples is None:
            raise ValueError(
                f"data.lengths.buckets is auto, which looks at all samples, and data {data!r} is a stream, whose later ones "
                "nobody knows: write buckets, the last one for the longest sample, such as [64, 128, 256]"
            )
        if self._table is not None:
            return [int(self._table[index]) for index in range(samples)]
        if samples > MAX_READ_SAMPLES:
            raise ValueError(
                f"data.lengths.buckets is auto, which looks at all samples, and data {data!r} has "
                f"{samples:,}: write buckets, or give the data set an attribute `lengths` with one of each sample "
                f"(more than {MAX_READ_SAMPLES:,} are not read for it)"
            )
        return [self.padding.length(self._source.example(0, index)) for index in range(samples)]


def _rows_of(group: Sequence[int], rows: int, workers: int) -> list[tuple[int, bool]]:
    """The sample of each row of a microbatch, and True for rows that are left: all workers have about equally many samples,
    and repeat their last one."""
    found = []
    for worker in range(workers):
        own = group[len(group) * worker // workers : len(group) * (worker + 1) // workers]
        left = rows // workers - len(own)
        found += [*((at, False) for at in own), *[(own[-1], True)] * left]
    return found


def _length_table(source: IndexedSource | StreamSource) -> Any:
    """The `lengths` of a data set with indices; None where it has none."""
    table = getattr(source.dataset, "lengths", None) if isinstance(source, IndexedSource) else None
    return table if hasattr(table, "__getitem__") and hasattr(table, "__len__") else None


def _field_position(names: tuple[str, ...], wanted: str | None, sample: Any, data: str) -> int:
    count = len(sample_row(sample, names, False)) - 1
    if not names:
        if wanted is not None:
            raise ValueError(
                f"data.lengths.field is {wanted!r}, and samples of data {data!r} have inputs by position: leave it out, the "
                "first one counts"
            )
        return 0
    name = wanted or (_DEFAULT_FIELD if count > 1 else names[0])
    if name not in names:
        raise ValueError(
            f"data.lengths.field is {name!r}, and a sample of data {data!r} has the inputs {', '.join(names)}: name the one "
            "whose length counts"
        )
    return names.index(name)


def _check_names(names: tuple[str, ...], wanted: tuple[str, ...], data: str) -> None:
    if names != wanted:
        raise ValueError(
            f"a sample of data {data!r} has the inputs {', '.join(names) or 'by position'}, an earlier one "
            f"{', '.join(wanted) or 'by position'}: return the same fields for every index"
        )


def _check_field(value: Any, names: Sequence[str], field: int, data: str) -> None:
    if (
        isinstance(value, Tensor)
        and value.ndim == 1
        and not value.is_floating_point()
        and value.dtype != torch.bool
    ):
        return
    shown = (
        f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    )
    raise ValueError(
        f"input {names[field] if names else field} of data {data!r}, by which data.lengths goes, is {shown}: return "
        "integers of shape (length,), or name another in data.lengths.field"
    )


def _parts_of(sample: Any, names: Sequence[str]) -> tuple[list[Any], Any]:
    """The inputs of a sample as tensors, and its target."""
    *inputs, target = sample_row(sample, names, False)
    return [_as_tensor(value) for value in inputs], target


def _leaves(target: Any) -> tuple[list[Any], Any]:
    """The leaves of a target as tensors, and its tree."""
    leaves, tree = tree_flatten(target, is_leaf=_is_numbers)
    return [_as_tensor(leaf) for leaf in leaves], tree


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(part, int | float) for part in value)


def _as_tensor(value: Any) -> Any:
    """Lists and arrays of numbers as tensors; anything else as it is."""
    if value is None or isinstance(value, Tensor | int | float | str | bytes):
        return value
    if isinstance(value, list | tuple) and not _is_numbers(value):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return value


def _lies_along(column: Sequence[Any], lengths: Sequence[int]) -> bool:
    """True if a part has an entry for each position in every sample."""
    return all(
        isinstance(value, Tensor) and value.ndim > 0 and len(value) == length
        for value, length in zip(column, lengths, strict=True)
    )


def _holds(dtype: torch.dtype, value: int) -> bool:
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return False
    return torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
