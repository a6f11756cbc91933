"""Stream: an iterable data set read epoch by epoch, at a position that a checkpoint saves.

Every sample has a position: the epoch, and how many of it came before. Whoever reads a stream reads all of it and
keeps what it needs: the samples of a step depend on nothing but the stream, whatever the number of workers. A
resume uses the data set's own state_dict where it has one, checked against a checksum of the next sample, else it
skips samples within a time limit. Knows no steps.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from worker.contract.failures import AttemptFailure
from worker.contract.job import SKIP_LIMIT_S
from worker.contract.reasons import Reason
from worker.data.checksum import checksum
from worker.model.rng import derive_seed, seeded

log = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0
_NOTHING = object()


class DataEndedError(AttemptFailure):
    """The stream has no more samples, and the job does not begin it again."""


@dataclass(frozen=True)
class StreamPosition:
    """The position of a stream: `position` samples were given in all, `within` of them in this epoch.

    `state` is what the data set tells of itself (torch's convention `state_dict`), None where it tells nothing;
    `following` a checksum of the next sample, None where there is none.
    """

    position: int
    epoch: int
    within: int
    state: bytes | None = None
    following: str | None = None

    def to_state(self) -> dict[str, Any]:
        """The position as a checkpoint keeps it: numbers, strings and a tensor."""
        state = torch.frombuffer(bytearray(self.state), dtype=torch.uint8) if self.state else None
        return {
            "position": self.position,
            "epoch": self.epoch,
            "within": self.within,
            "state": state,
            "following": self.following,
        }

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> StreamPosition:
        state = saved["state"]
        return cls(
            saved["position"],
            saved["epoch"],
            saved["within"],
            None if state is None else state.numpy().tobytes(),
            saved["following"],
        )


class _RestoredEpoch:
    """The epoch of `place`, to which a data set was sent: checksums of the first samples that it gave from there."""

    _MOST = 4

    def __init__(self, place: StreamPosition) -> None:
        self._place = place
        self.checksums: list[str] = []

    def add(self, sample: Any) -> None:
        if len(self.checksums) < self._MOST:
            self.checksums.append(checksum(sample))

    def goes_on_with(self, first: list[str]) -> bool:
        """True if an epoch that begins with these samples is the next one, and not this one from its place again."""
        if not self.checksums:  # the place was this epoch's end, and what followed is of the next one
            return first[:1] == [self._place.following]
        return bool(first) and (self._place.within == 0 or first != self.checksums)


class Stream:
    """The samples of what `make` returns: see `take`, `go_to` and `place`.

    With `repeats` it begins again at its end (`set_epoch` is told, where the data set has it), else DataEndedError is
    raised there. A stream that can be iterated once only is made anew for each epoch. What it draws from python's,
    numpy's and torch's generators follows from `seed` and the sample's place.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        name: str,
        seed: int,
        repeats: bool,
        skip_limit_s: float = SKIP_LIMIT_S,
        way_out: str = "set data.at_end to repeat",
    ) -> None:
        self._make, self._name, self._seed, self._way_out = make, name, seed, way_out
        self._repeats, self._skip_limit_s = repeats, skip_limit_s
        self._states_can_be_stored = True
        self._restart()

    @property
    def position(self) -> int:
        """The number of samples that were taken."""
        return self._position

    def take(self, count: int) -> list[Any]:
        """The next samples. RuntimeError names the one that cannot be read."""
        return [self._next() for _ in range(count)]

    def place(self) -> StreamPosition:
        """The position of the stream; reads the next sample, which `take` gives then."""
        if self._place is None or self._place.position != self._position:
            where, state = (self._position, self._epoch, self._within), self._state()
            self._place = StreamPosition(*where, state, self._next_checksum())
        return self._place

    def go_to(self, position: int, place: StreamPosition | None = None) -> None:
        """Have `position` as the place of the next sample: by `place`, which was saved there, as the data set itself
        goes to it; or by passing over samples. Raises AttemptFailure where that takes too long, or `place` was that of
        other data."""
        if place is not None and place.position == position:
            if place.state is not None and self._restore_state(place):
                return
            self._restart()
            if self.can_set_epoch:
                self._epoch, self._position = place.epoch, position - place.within
            self._skip_to(position)
            self._check_next_sample(place)
            return
        if position < self._position:
            self._restart()
        self._skip_to(position)

    @property
    def can_set_epoch(self) -> bool:
        """True if an epoch's samples can be had without those of the epochs before."""
        return hasattr(self._dataset, "set_epoch")

    def _restart(self) -> None:
        self._dataset = self._make()
        self._iterator: Iterator[Any] | None = None
        self._fresh = True  # no sample was taken from this object
        self._peeked: list[Any] = []  # the sample that was looked at
        self._place: StreamPosition | None = None  # the last that was asked for
        self._restored: _RestoredEpoch | None = (
            None  # until the end of the epoch to which the data set was sent
        )
        self._position = self._epoch = self._within = 0

    def _next_checksum(self) -> str | None:
        """A checksum of the next sample; None at the end."""
        try:
            self._peek()
        except DataEndedError:
            return None
        return checksum(self._peeked[0])

    def _next(self) -> Any:
        self._peek()
        sample = self._peeked.pop(0)
        if self._restored is not None:
            self._restored.add(sample)
        self._position, self._within = self._position + 1, self._within + 1
        return sample

    def _peek(self) -> None:
        while not self._peeked:
            try:
                with seeded(derive_seed(self._seed, "stream", self._epoch, self._within)):
                    if self._iterator is None:
                        self._iterator = self._open()
                    self._peeked.append(next(self._iterator))
                    self._fresh = False
            except StopIteration:
                self._end_epoch()
            except AttemptFailure:
                raise
            except Exception as error:
                raise RuntimeError(
                    f"{self._position_text()} raised {type(error).__name__}: {error}"
                ) from error

    def _open(self) -> Iterator[Any]:
        if self.can_set_epoch:
            self._dataset.set_epoch(self._epoch)
        return iter(self._dataset)

    def _end_epoch(self) -> None:
        if self._within == 0 and not self._fresh and isinstance(self._dataset, Iterator):
            self._dataset, self._iterator, self._fresh = self._make(), None, True  # a generator runs once
            return
        if self._within == 0:
            raise ValueError(
                f"data {self._name} is empty: iterating it{' again' if self._epoch else ''} gave no sample"
            ) from None
        if not self._repeats:
            raise DataEndedError(
                Reason.DATA_FAILED,
                f"data {self._name} ended after {self._position} samples: give more, or {self._way_out}",
            ) from None
        self._iterator = None
        self._epoch, self._within = self._epoch + 1, 0
        if self._restored is not None:
            self._leave_restored_epoch(self._restored)

    def _leave_restored_epoch(self, restored: _RestoredEpoch) -> None:
        """Have the epoch behind that of a resume from its first sample: a data set that was sent to a place may begin each
        further epoch there.

        One with set_epoch is made anew. Another may count its epochs itself, which a new one would not know: it is made
        anew only where it would begin again with the samples behind that place, or with none."""
        self._restored = None
        if not self.can_set_epoch:
            ahead, iterator = [], None
            for number in range(max(len(restored.checksums), 1)):
                with seeded(derive_seed(self._seed, "stream", self._epoch, number)):
                    iterator = iterator or self._open()
                    if (sample := next(iterator, _NOTHING)) is _NOTHING:
                        break
                    ahead.append(sample)
            if restored.goes_on_with([checksum(sample) for sample in ahead]):
                self._iterator, self._peeked = iterator, ahead
                return
        self._dataset, self._fresh = self._make(), True

    def _position_text(self) -> str:
        return (
            f"sample {self._position} of data {self._name} (epoch {self._epoch}, its number {self._within})"
        )

    def _state(self) -> bytes | None:
        """The state of the iterator or the data set; None where neither has one, or at the start."""
        whose = next((name for name, one in self._stateful_objects() if _has_state_dict(one)), None)
        if whose is None or self._iterator is None or self._peeked or not self._states_can_be_stored:
            return None
        content = io.BytesIO()
        try:
            torch.save({"of": whose, "state": dict(self._stateful_objects())[whose].state_dict()}, content)
            torch.load(io.BytesIO(content.getvalue()), weights_only=True)
        except Exception as error:
            self._states_can_be_stored = False
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.warning(
                "the state_dict() of data %s cannot be stored (%s): a resume will pass over its samples",
                self._name,
                reason,
            )
            return None
        return content.getvalue()

    def _stateful_objects(self) -> tuple[tuple[str, Any], ...]:
        """Objects that may have a state, in torchdata's order."""
        return ("iterator", self._iterator), ("data set", self._dataset)

    def _restore_state(self, place: StreamPosition) -> bool:
        """Send the data set to `place`; True if the sample that it gives there is the one that followed."""
        self._restart()
        self._position, self._epoch, self._within = place.position, place.epoch, place.within
        self._restored = _RestoredEpoch(place)
        try:
            saved = torch.load(io.BytesIO(place.state), weights_only=True)
            with seeded(derive_seed(self._seed, "stream", self._epoch, self._within)):
                if saved["of"] == "data set":
                    self._dataset.load_state_dict(saved["state"])
                self._iterator = self._open()
                if saved["of"] == "iterator":
                    self._iterator.load_state_dict(saved["state"])
            found = self._next_checksum()
        except Exception as error:
            log.warning(
                "data %s did not take its own state (%s: %s): its samples are passed over instead",
                self._name,
                type(error).__name__,
                error,
            )
            return False
        if found != place.following:
            log.warning(
                "the state of data %s led to another sample than it had come to: its samples are passed over instead",
                self._name,
            )
            return False
        self._place = place
        return True

    def _check_next_sample(self, place: StreamPosition) -> None:
        if self._next_checksum() != place.following:
            raise AttemptFailure(
                Reason.DATA_FAILED,
                f"sample {place.position} of data {self._name} is not the one that followed when the checkpoint was "
                "saved: bring back the data as it was, or start a new job from the weights (model.weights)",
            )

    def _skip_to(self, position: int) -> None:
        began = last_logged = time.monotonic()
        first = self._position
        while self._position < position:
            self._next()
            now = time.monotonic()
            done, of = self._position - first, position - first
            if now - began > self._skip_limit_s:
                raise AttemptFailure(
                    Reason.DATA_FAILED,
                    f"{done} of {of} samples of data {self._name} were passed over in {self._skip_limit_s:.0f} s: "
                    "give the data set state_dict() and load_state_dict(), with which none is",
                )
            if now - last_logged > _LOG_EVERY_S:
                last_logged = now
                log.warning("data %s: %d of %d samples passed over", self._name, done, of)


def _has_state_dict(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
