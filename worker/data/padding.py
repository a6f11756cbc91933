"""LengthGroups and Padding: samples of unequal lengths in microbatches of like length, each padded to one bucket.

A step has the samples that its SampleOrder gives it; sorted by length (ties by position) they are cut into microbatches of
equally many rows. Every worker does so for itself, from the samples alone: no bucket is sent, and a resume needs none.
A data set with `lengths` (one of each sample, by index) is asked for those; of another, and of a stream, each worker reads
all samples of a step, the other ranks' too. Knows no models.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from worker.contract.job import AUTO, Lengths
from worker.data.dataset import IndexedSource, SampleOrder, StreamSource
from worker.data.sampler import input_names, sample_row

MAX_AUTO_BUCKETS = 8
MAX_READ_SAMPLES = 20_000
"""Samples that are read before training where buckets are chosen and the data set tells no lengths."""
_CANDIDATES = 64
_MULTIPLE = 8
"""Chosen buckets but the largest are multiples of this, which matrix products like."""
_DEFAULT_FIELD = "input_ids"


def choose_buckets(lengths: Sequence[int], most: int = MAX_AUTO_BUCKETS) -> tuple[int, ...]:
    """At most `most` ascending buckets, the last one the longest of `lengths`, of about the fewest padded tokens in all.

    Candidates are quantiles, of which the best are found by dynamic programming over (candidate, buckets).
    """
    ordered = sorted(lengths)
    longest = max(ordered[-1], 1)
    quantiles = {
        ordered[min(len(ordered) * k // _CANDIDATES, len(ordered) - 1)] for k in range(1, _CANDIDATES)
    }
    rounded = {-(-max(length, 1) // _MULTIPLE) * _MULTIPLE for length in quantiles}
    ends = [*sorted(end for end in rounded if end < longest), longest]
    counts = [0, *(bisect.bisect_right(ordered, end) for end in ends)]
    # padded[k]: tokens of the samples up to ends[k], and the buckets that hold them
    padded = [(counts[k + 1] * end, (end,)) for k, end in enumerate(ends)]
    for _ in range(most - 1):
        padded = [
            min(
                padded[k],
                *(
                    (padded[j][0] + (counts[k + 1] - counts[j + 1]) * end, (*padded[j][1], end))
                    for j in range(k)
                ),
            )
            if k
            else padded[k]
            for k, end in enumerate(ends)
        ]
    return padded[-1][1]


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

    def length(self, sample: Any) -> int:
        """The length of a sample. Raises ValueError where it has other inputs, or none of shape (length,)."""
        _check_names(input_names(sample), self.names, self.data)
        field = _parts_of(sample, self.names)[0][self.field]
        _check_field(field, self.names, self.field, self.data)
        return len(field)

    def fit(self, sample: Any, length: int) -> Any:
        """The sample padded, or cut, to `length`."""
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
    """The samples of a step by position (None: not read), the positions of each microbatch, and each sample's length."""

    step: int
    samples: Sequence[Any] | None
    groups: Sequence[Sequence[int]]
    lengths: Sequence[int]


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
        self.padding = Padding.of(
            source.batch(order.first_step - 1),
            order.data.lengths,
            ignored=order.ignored_target,
            data=order.data.factory,
        )
        if order.data.lengths.buckets == AUTO:
            chosen = replace(
                order.data.lengths, buckets=choose_buckets(self._all_lengths(order.data.factory))
            )
            order = replace(order, data=replace(order.data, lengths=chosen))
        self.order = order
        self._grouped: _GroupedStep | None = None

    @property
    def buckets(self) -> tuple[int, ...]:
        """The lengths to which microbatches are padded, ascending."""
        return self.order.data.lengths.buckets

    def rows(self, step: int, microbatch: int, first: int, count: int) -> list[Any]:
        """The samples `first` to `first + count` of a microbatch, as long as they are."""
        grouped = self._group(step)
        return [self._sample(grouped, at) for at in grouped.groups[microbatch][first : first + count]]

    def bucket(self, step: int, microbatch: int) -> int:
        """The length to which a microbatch is padded."""
        grouped = self._group(step)
        return self._bucket_of(grouped.lengths, grouped.groups[microbatch])

    def known_buckets(self, step: int) -> tuple[int, ...]:
        """The buckets of a step's microbatches by the data set's `lengths`; none where it has none, or one that no bucket
        holds. No sample is read."""
        if self._table is None:
            return ()
        lengths = [int(self._table[index]) for index in self._source.numbers(step)]
        if max(lengths) > self.buckets[-1]:
            return ()
        return tuple(self._bucket_of(lengths, group) for group in self._groups(lengths))

    def _bucket_of(self, lengths: Sequence[int], group: Sequence[int]) -> int:
        return self.buckets[bisect.bisect_left(self.buckets, max(lengths[at] for at in group))]

    def _groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """The positions of each microbatch among samples of these lengths."""
        places, size = range(len(lengths)), self.order.size
        if not self.order.once:  # an evaluation leaves out the end of its data, whatever lengths that has
            places = sorted(places, key=lambda at: (lengths[at], at))
        return [list(places[m * size : (m + 1) * size]) for m in range(self.order.microbatches)]

    def sample_lengths(self, step: int, microbatch: int, first: int, count: int) -> list[int]:
        """The lengths of the samples `first` to `first + count` of a microbatch."""
        grouped = self._group(step)
        return [grouped.lengths[at] for at in grouped.groups[microbatch][first : first + count]]

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
        for number, length in zip(self._source.numbers(step), lengths, strict=True):
            if length > self.buckets[-1]:
                raise ValueError(
                    f"sample {number} of data {self.order.data.factory!r} has length {length:,}, and the largest of "
                    f"data.lengths.buckets is {self.buckets[-1]:,}: add a bucket for it, or have the data set cut samples"
                )
        self._grouped = _GroupedStep(step, samples, self._groups(lengths), lengths)
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
