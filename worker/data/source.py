"""The samples of a step's microbatches, wherever they come from: a data set with indices, or a stream.

Both are values made of a job's words, so that another process can make the same. Knows no collating and no workers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from worker.data.dataset import chosen, is_stream, make_dataset
from worker.data.sampler import BatchSampler, InOrder, read_sample
from worker.data.stream import DataEndedError, Place, Stream
from worker.job import Data
from worker.reasons import Reason
from worker.turns import GENERATORS

PLACES_KEPT = 72
"""More steps than may be read ahead."""


@dataclass(frozen=True)
class Order:
    """How the samples of `data` are dealt to steps, of which `first_step` is the first that counts: one before it has the
    first samples too, and only shows what they are like. `once`: evaluation, which passes over the data in its order."""

    data: Data
    seed: int
    global_batch: int
    microbatches: int
    first_step: int = 1
    once: bool = False

    @property
    def size(self) -> int:
        """Samples of a microbatch, over all workers."""
        return self.global_batch // self.microbatches


class Source(Protocol):
    """Where samples come from."""

    samples: int | None
    """How many there are; None where only the end tells."""

    def rows(self, step: int, microbatch: int, first: int, count: int) -> list[Any]:
        """The samples `first` to `first + count` of a microbatch. Errors name the sample."""

    def end_step(self, step: int) -> None:
        """No more rows of this step are wanted."""

    def place(self, step: int) -> dict[str, Any] | None:
        """What a checkpoint keeps of the place where `step` begins; None where that was not come to."""

    def go_to(self, step: int, place: dict[str, Any] | None) -> None:
        """Go on at the begin of `step`, of which `place` is what a checkpoint kept."""


def make_source(order: Order, dataset: Any = None) -> Source:
    """`dataset` is what was made before, if any. Raises FactoryError and ValueError for what cannot be dealt."""
    if dataset is None:
        dataset = make_dataset(order.data, seed=order.seed)
    return StreamSource(order, dataset) if is_stream(dataset) else IndexedSource(order, dataset)


class IndexedSource:
    """See Source. Any step can be asked for at any time."""

    def __init__(self, order: Order, dataset: Any):
        self.dataset, self._order = dataset, order
        self.samples = len(dataset)
        kind = InOrder if order.once or not order.data.shuffle else BatchSampler
        self._sampler = kind(
            self.samples,
            order.global_batch,
            order.microbatches,
            seed=order.seed,
            first_step=order.first_step,
        )

    def rows(self, step: int, microbatch: int, first: int, count: int) -> list[Any]:
        self._refuse_behind_the_end(step)
        indices = self._sampler.indices(step, microbatch)[first : first + count]
        return [self.example(step, index) for index in indices]

    def _refuse_behind_the_end(self, step: int) -> None:
        order = self._order
        wanted = (step - order.first_step + 1) * order.global_batch
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
            with GENERATORS:  # this may be the reading thread: see worker/turns.py
                sample = read_sample(self.dataset, index, seed=self._order.seed, step=step)
        except Exception as error:
            raise RuntimeError(
                f"sample {index} of data {name} raised {type(error).__name__}: {error}"
            ) from error
        return chosen(sample, self._order.data)

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

    def __init__(self, order: Order, dataset: Any):
        self._order = order
        self._unused: Any = dataset  # made, and not iterated yet
        self._stream: Stream | None = None
        self._head: list[Any] = []
        self._places: deque[tuple[int, Place]] = deque(maxlen=PLACES_KEPT)

    def rows(self, step: int, microbatch: int, first: int, count: int) -> list[Any]:
        first += microbatch * self._order.size
        if step < self._order.first_step:
            found = self._first_samples(first + count)[first:]
        else:
            stream = self._opened()
            stream.go_to(self._begin(step) + first)
            found = stream.take(count)
        return [chosen(sample, self._order.data) for sample in found]

    def first_samples_again(self, count: int) -> list[Any]:
        """The first samples, of the stream made once more."""
        return [chosen(sample, self._order.data) for sample in self._new().take(count)]

    def end_step(self, step: int) -> None:
        """Pass over what is others', and note the place."""
        if step < self._order.first_step:
            return
        self._opened().go_to(self._begin(step + 1))
        if not self._order.once:
            self._places.append((step + 1, self._opened().place()))

    def place(self, step: int) -> dict[str, Any] | None:
        found = next((place for at, place in reversed(self._places) if at == step), None)
        return None if found is None else found.to_state()

    def go_to(self, step: int, place: dict[str, Any] | None) -> None:
        """Raises AttemptFailure where passing over samples takes too long, or the data is another."""
        begin = self._begin(step)
        saved = None if place is None or place.get("position") != begin else Place.from_state(place)
        stream = self._opened()
        stream.go_to(begin, saved)
        self._places.append((step, stream.place()))

    def _begin(self, step: int) -> int:
        return (step - self._order.first_step) * self._order.global_batch

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
            skip_limit_s=data.skip_limit_s,
            way_out="lower evaluation.steps" if self._order.once else "set data.at_end to repeat",
        )

    def _make(self) -> Any:
        made, self._unused = self._unused, None
        return made if made is not None else make_dataset(self._order.data, seed=self._order.seed)
