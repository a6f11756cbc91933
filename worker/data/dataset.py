"""Builds a job's data set and deals its samples to steps and microbatches, from an indexed data set or a stream.

A Source is made from the job's values alone (SampleOrder), so that a loader process makes the same one. User code
runs under RNG_LOCK with seeded generators, as compute and prefetch threads share the process-wide RNGs. Knows no
collating, no stages and no loader processes.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from worker.contract.job import Bucket, Data
from worker.contract.profile import FactoryError
from worker.contract.reasons import Reason
from worker.data.sampler import BatchSampler, SequentialSampler, read_sample
from worker.data.stream import DataEndedError, Stream, StreamPosition
from worker.model.factory import build_arguments, call_factory, resolve
from worker.model.rng import RNG_LOCK, seeded

Collator = Callable[[list[Any]], Any]


def make_dataset(data: Data, *, seed: int) -> Any:
    """The data set of the factory, or the part of it that `data.split` names. Raises FactoryError for what is neither a
    data set with indices nor a stream.

    Python's, numpy's and torch's generators are seeded for it and stand afterwards where they stood.
    """
    with seeded(seed):
        made = call_factory(data.factory, data.args)
    if isinstance(made, DataLoader):
        raise FactoryError(
            f"data {data.factory!r} returned a DataLoader: return its data set, and give its arguments as data.loader"
        )
    if data.split is not None or isinstance(made, Mapping):
        made = _select_split(made, data)
    if not _is_map_style(made) and not is_stream(made):
        raise FactoryError(
            f"data {data.factory!r} returned {type(made).__name__}, which cannot tell {_missing_method(made)}: "
            "return a map-style data set, or what can be iterated"
        )
    return _with_torch_format(made, data)


def is_stream(dataset: Any) -> bool:
    """True for data without indices, whose samples come one after the other."""
    if isinstance(dataset, IterableDataset):  # of a class that has __getitem__, which raises
        return True
    return not _is_map_style(dataset) and (hasattr(dataset, "__iter__") or isinstance(dataset, Iterator))


def select_fields(sample: Any, data: Data) -> Any:
    """Select the fields of `data.columns` of a sample that is a dict, under the names that the model has for them."""
    if data.columns is None:
        return sample
    if not isinstance(sample, Mapping):
        raise ValueError(
            f"a sample of data {data.factory!r} is a {type(sample).__name__}, and data.columns takes fields of dicts: "
            "leave it out"
        )
    found = {}
    for name, field in _field_mapping(data.columns).items():
        if field not in sample:
            raise ValueError(
                f"a sample of data {data.factory!r} has no field {field!r}, which data.columns names; it has "
                f"{', '.join(map(str, sample)) or 'none'}"
            )
        found[name] = sample[field]
    return found


def make_collator(data: Data) -> Collator | None:
    """The callable that makes a batch of a list of samples, where the job names it: an object of a class, or a function
    with its arguments bound."""
    if data.collate is None:
        return None
    target, arguments = resolve(data.collate.factory), {}
    if isinstance(target, type):
        target = call_factory(data.collate.factory, data.collate.args)
    else:
        arguments = build_arguments(data.collate.args)
    if not callable(target):
        raise FactoryError(f"data.collate {data.collate.factory!r} is a {type(target).__name__}, no function")
    return functools.partial(target, **arguments) if arguments else target


def _select_split(made: Any, data: Data) -> Any:
    if not isinstance(made, Mapping):
        raise FactoryError(
            f"data {data.factory!r} returned {type(made).__name__}, which has no parts by name: leave out data.split"
        )
    names = ", ".join(map(str, made)) or "nothing"
    if data.split is None:
        raise FactoryError(
            f"data {data.factory!r} returned {type(made).__name__} of {names}: name one with data.split"
        )
    if data.split not in made:
        raise FactoryError(f"data {data.factory!r} has no split {data.split!r}: it has {names}")
    return made[data.split]


def _is_map_style(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def _missing_method(made: Any) -> str:
    if not hasattr(made, "__len__"):
        return "how many samples it has (__len__)"
    return "a sample by its index (__getitem__)"


def _field_mapping(columns: Mapping[str, Any] | Sequence[str]) -> Mapping[str, Any]:
    return columns if isinstance(columns, Mapping) else {name: name for name in columns}


def _with_torch_format(made: Any, data: Data) -> Any:
    """A data set of Hugging Face gives tensors, and reads no other columns from disk; a format of its own it keeps."""
    if not type(made).__module__.startswith("datasets."):
        return made
    wanted = sorted(set(_field_mapping(data.columns).values())) if data.columns is not None else None
    has = made.column_names  # None where a stream does not know them
    if wanted is not None and has is not None:
        if missing := [name for name in wanted if name not in has]:
            raise FactoryError(
                f"data {data.factory!r} has no column {', '.join(missing)}, which data.columns names; it has "
                f"{', '.join(has)}"
            )
        made = made.select_columns(wanted)
    kept = getattr(made, "format", None)
    return made.with_format("torch") if not kept or kept.get("type") is None else made


POSITIONS_KEPT = 72
"""More steps than may be read ahead."""


@dataclass(frozen=True)
class SampleOrder:
    """The assignment of the samples of `data` to steps. `first_step` is the first that counts: one before it has the first
    samples too, and only shows what they are like. `once`: evaluation, which passes over the data in its order.
    `origin` (step, sample): that step begins at that sample, counted over all epochs, and the steps behind it follow.
    `ignored_target` is the integer that pads targets. With data.lengths `row_multiple` is the number of workers that share
    a microbatch, None where all microbatches have equally many rows, and `buckets` are the shapes that were chosen."""

    data: Data
    seed: int
    global_batch: int
    microbatches: int
    first_step: int = 1
    once: bool = False
    origin: tuple[int, int] | None = None
    ignored_target: int = -100
    row_multiple: int | None = None
    buckets: tuple[Bucket, ...] = ()

    @property
    def size(self) -> int:
        """Samples of a microbatch, over all workers; with data.lengths on average."""
        return self.global_batch // self.microbatches

    def begin(self, step: int) -> int:
        """The sample with which `step` begins, counted over all epochs."""
        at, sample = self.origin or (self.first_step, 0)
        return sample + (step - at) * self.global_batch


class Source(Protocol):
    """A source of samples, indexed or a stream."""

    samples: int | None
    """How many there are; None where only the end tells."""

    def rows(self, step: int, microbatch: int, first: int, count: int) -> list[Any]:
        """The samples `first` to `first + count` of a microbatch. Errors name the sample."""

    def batch(self, step: int) -> list[Any]:
        """All samples of a step."""

    def numbers(self, step: int) -> list[int]:
        """The index of each sample of a step; of a stream its place, counted over all epochs."""

    def forget_first_samples(self) -> None:
        """Have the first samples read anew where they are asked for again; of a stream, from one that is made once more."""

    def end_step(self, step: int) -> None:
        """No more rows of this step are wanted."""

    def place(self, step: int) -> dict[str, Any] | None:
        """The position at which `step` begins, for a checkpoint; None where it was not reached."""

    def go_to(self, step: int, place: dict[str, Any] | None) -> None:
        """Go on at the begin of `step`, of which `place` is what a checkpoint kept."""


def make_source(order: SampleOrder, dataset: Any = None) -> Source:
    """`dataset` is what was made before, if any. Raises FactoryError and ValueError for what cannot be dealt."""
    if dataset is None:
        dataset = make_dataset(order.data, seed=order.seed)
    return StreamSource(order, dataset) if is_stream(dataset) else IndexedSource(order, dataset)


class IndexedSource:
    """See Source. Any step can be asked for at any time."""

    def __init__(self, order: SampleOrder, dataset: Any):
        self.dataset, self._order = dataset, order
        self.samples = len(dataset)
        kind = SequentialSampler if order.once or not order.data.shuffle else BatchSampler
        self._sampler = kind(
            self.samples,
            order.global_batch,
            order.microbatches,
            seed=order.seed,
            first_step=order.first_step,
            origin=order.origin,
        )

    def rows(self, step: int, microbatch: int, first: int, count: int) -> list[Any]:
        self.check_not_past_end(step)
        indices = self._sampler.indices(step, microbatch)[first : first + count]
        return [self.example(step, index) for index in indices]

    def batch(self, step: int) -> list[Any]:
        self.check_not_past_end(step)
        return [self.example(step, index) for index in self.numbers(step)]

    def numbers(self, step: int) -> list[int]:
        return [index for m in range(self._sampler.microbatches) for index in self._sampler.indices(step, m)]

    def check_not_past_end(self, step: int) -> None:
        """DataEndedError where data that stops at its end has too few samples for this step."""
        order = self._order
        if step < order.first_step:
            return
        wanted = order.begin(step + 1)
        if order.data.at_end == "stop" and not order.once and wanted > self.samples:
            raise DataEndedError(
                Reason.DATA_FAILED,
                f"data {order.data.factory} ended: its {self.samples} samples have no {wanted} for {step} steps of "
                f"{order.global_batch}; give more, or set data.at_end to repeat",
            )

    def example(self, step: int, index: int) -> Any:
        """Sample `index` as step `step` draws it: the only door to the data set."""
        name = self._order.data.factory
        try:
            with RNG_LOCK:  # this may be the reading thread: see worker/model/rng.py
                sample = read_sample(self.dataset, index, seed=self._order.seed, step=step)
        except Exception as error:
            raise RuntimeError(
                f"sample {index} of data {name} raised {type(error).__name__}: {error}"
            ) from error
        return select_fields(sample, self._order.data)

    def forget_first_samples(self) -> None:
        """Nothing is held."""

    def end_step(self, step: int) -> None:
        """Nothing is held."""

    def place(self, step: int) -> dict[str, Any] | None:
        return {"samples": self.samples}

    def go_to(self, step: int, place: dict[str, Any] | None) -> None:
        """Raises ValueError where the data set has another length than it had: every epoch's order would be another."""
        before = (place or {}).get("samples")
        if before is not None and before != self.samples:
            raise ValueError(
                f"data {self._order.data.factory!r} has {self.samples} samples, and had {before} when the checkpoint was "
                "saved: their order would be another; bring back the data as it was, or start a new job from the weights "
                "(model.weights)"
            )


class StreamSource:
    """See Source. Steps are asked for in order; an earlier one begins the stream again."""

    samples = None

    def __init__(self, order: SampleOrder, dataset: Any):
        self._order = order
        self._unused: Any = dataset  # made, and not iterated yet
        self._stream: Stream | None = None
        self._head: list[Any] = []
        self._places: deque[tuple[int, StreamPosition]] = deque(maxlen=POSITIONS_KEPT)

    def rows(self, step: int, microbatch: int, first: int, count: int) -> list[Any]:
        first += microbatch * self._order.size
        if step < self._order.first_step:
            found = self._first_samples(first + count)[first:]
        else:
            stream = self._opened()
            stream.go_to(self._order.begin(step) + first)
            found = stream.take(count)
        return [select_fields(sample, self._order.data) for sample in found]

    def batch(self, step: int) -> list[Any]:
        return self.rows(step, 0, 0, self._order.global_batch)

    def numbers(self, step: int) -> list[int]:
        begin = self._order.begin(step) if step >= self._order.first_step else 0
        return list(range(begin, begin + self._order.global_batch))

    def forget_first_samples(self) -> None:
        self._head = []

    def end_step(self, step: int) -> None:
        """Pass over what is others', and note the place."""
        if step < self._order.first_step:
            return
        self._opened().go_to(self._order.begin(step + 1))
        if not self._order.once:
            self._places.append((step + 1, self._opened().place()))

    def place(self, step: int) -> dict[str, Any] | None:
        found = next((place for at, place in reversed(self._places) if at == step), None)
        return None if found is None else found.to_state()

    def go_to(self, step: int, place: dict[str, Any] | None) -> None:
        """Raises AttemptFailure where passing over samples takes too long, or the data is another."""
        begin = self._order.begin(step)
        saved = None if place is None or place.get("position") != begin else StreamPosition.from_state(place)
        stream = self._opened()
        stream.go_to(begin, saved)
        self._places.append((step, stream.place()))

    def _first_samples(self, count: int) -> list[Any]:
        if len(self._head) < count:
            self._head = self._new().take(count)
        return self._head[:count]

    def _opened(self) -> Stream:
        if self._stream is None:
            self._stream = self._new()
        return self._stream

    def _new(self) -> Stream:
        data, seed = self._order.data, self._order.seed
        return Stream(
            self._make,
            name=data.factory,
            seed=seed,
            repeats=data.at_end == "repeat" and not self._order.once,
            way_out="lower evaluation.steps" if self._order.once else "set data.at_end to repeat",
        )

    def _make(self) -> Any:
        made, self._unused = self._unused, None
        return made if made is not None else make_dataset(self._order.data, seed=self._order.seed)
