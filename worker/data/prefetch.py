"""Prefetcher: reads the samples of the next steps on a thread, and copies them to the GPU on its own stream.

Steps are taken in order; taking another step voids what was read ahead. An error is raised by the `take` of its
step. The copy is complete when a batch is taken, so its consumers need to wait for nothing; the engine drops
batches between steps, when nothing runs that reads them. Knows no data set and no engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from worker.contract.failures import attributed_to
from worker.contract.reasons import Reason

Batch = TypeVar("Batch")


class ReadTooSlowError(RuntimeError):
    """The samples of a step were not there within the limit."""


@dataclass(frozen=True)
class _PrefetchedBatch(Generic[Batch]):
    """The result of reading a step: a batch, or the error."""

    step: int
    batch: Batch | None
    error: BaseException | None


class Prefetcher(Generic[Batch]):
    """`take(step)` is `read(step)`; the up to `steps` steps behind it, none after `last`, are read meanwhile.

    With `steps` 0 all is read when it is asked for, on the caller's thread. The thread starts with the first
    `take` and ends with `close`, or with the process.
    """

    def __init__(
        self,
        read: Callable[[int], Batch],
        *,
        steps: int,
        last: int,
        limit_s: float,
        reading: Callable[[], str] = lambda: "the data set",
    ):
        if steps < 0:
            raise ValueError(f"{steps} steps cannot be read ahead: give 0 (off) or more")
        self._read, self._steps, self._last, self._limit_s = read, steps, last, limit_s
        self._who = reading  # who reads, for messages
        self._changed = threading.Condition()
        self._ready: deque[_PrefetchedBatch[Batch]] = deque()
        self._wanted: int | None = None  # who waits, for which step
        self._next: int | None = None  # what the thread reads next; None: nothing, until it is told again
        self._reading: int | None = None
        self._order = (
            0  # counts the calls that were not for the step that stood first: what was read for them is void
        )
        self._closed = False
        self._thread: threading.Thread | None = None

    def take(self, step: int, *, keep: bool = False, limit_s: float | None = None) -> Batch:
        """The result of `read(step)`, or its error. ReadTooSlowError after `limit_s`; None takes the limit of all calls.

        Whatever was read for other steps is dropped when they are not asked for in order. With `keep` the next call
        has the same again.
        """
        if self._steps == 0:
            return self._read(step)
        limit_s = self._limit_s if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        with self._changed:
            self._expect(step)
            while not (self._ready and self._ready[0].step == step):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise ReadTooSlowError(
                        f"the samples of step {step} were not there within {limit_s:.0f} s: {self._who()} is slow, or "
                        "stuck"
                    )
                self._changed.wait(left_s)
            found = self._ready[0] if keep else self._ready.popleft()
            self._wanted = None
            self._changed.notify_all()
        if found.error is not None:
            raise found.error
        return found.batch

    def close(self, limit_s: float = 2.0) -> bool:
        """End the thread; False when it is still inside a user's data set after `limit_s` (it is a daemon)."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _expect(self, step: int) -> None:
        if self._closed:
            raise RuntimeError("nothing is read any more: the reader was closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="slotline-data", daemon=True)
            self._thread.start()
        first = self._next if self._reading is None else self._reading
        if self._ready:
            first = self._ready[0].step
        if first != step:
            self._ready.clear()
            self._next = step
            self._order += 1
        self._wanted = step
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_read())
                if self._closed:
                    return
                step, order = self._next, self._order
                self._reading, self._next = step, step + 1
            try:
                found = _PrefetchedBatch(step, self._read(step), None)
            except BaseException as error:
                found = _PrefetchedBatch(step, None, error)
            with self._changed:
                self._reading = None
                if order == self._order and not self._closed:
                    self._ready.append(found)
                    if found.error is not None:
                        self._next = None  # a step behind it is never asked for
                del found
                self._changed.notify_all()

    def _may_read(self) -> bool:
        if self._next is None:
            return False
        return self._next == self._wanted or (self._next <= self._last and len(self._ready) < self._steps)


MicrobatchPair = tuple[tuple[torch.Tensor, ...], torch.Tensor]
StepSamples = tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor]]


def prefetch_steps(
    microbatch: Callable[[int, int], MicrobatchPair],
    microbatches: int,
    *,
    device: str,
    ahead: int,
    last: int,
    limit_s: float,
    reading: Callable[[], str] = lambda: "the data set",
    pinned: bool = True,
) -> Prefetcher[StepSamples]:
    """Reads whole steps, made of `microbatch(step, m)`, `ahead` of the one that is taken; see ReadAhead.

    What is read ahead is on the device when it is taken, over `pinned` memory. `reading` names who reads.
    Raises AttemptFailure DATA_FAILED.
    """
    staging = DeviceStaging(pins=pinned) if device == "cuda" and ahead else None

    @attributed_to(Reason.DATA_FAILED)
    def read(step: int) -> StepSamples:
        pairs = [microbatch(step, m) for m in range(microbatches)]
        inputs, targets = [inputs for inputs, _ in pairs], [target for _, target in pairs]
        return staging(inputs, targets) if staging else (inputs, targets)

    return Prefetcher(read, steps=ahead, last=last, limit_s=limit_s, reading=reading)


class DeviceStaging:
    """Copies samples to the current CUDA device, from pinned memory where it `pins`, on a stream beside those of the step.

    Made on the thread that chose the device, used on the one that reads. `cuda` is torch.cuda unless a test
    brings its own.
    """

    def __init__(self, cuda: Any = torch.cuda, *, pins: bool = True):
        self._cuda, self._pins = cuda, pins
        self._device = cuda.current_device()
        self._stream = cuda.Stream()

    def __call__(
        self, inputs: Sequence[Sequence[torch.Tensor]], targets: Sequence[torch.Tensor]
    ) -> StepSamples:
        """The samples on the device, copied when this returns: whoever uses them needs to wait for nothing.

        Only this thread waits. The memory is the stream's, which takes it back when the samples are dropped:
        the engine does that between steps, when nothing runs that reads them.
        """
        pinned = [
            [t.pin_memory() if self._pins else t for t in (*each, target)]
            for each, target in zip(inputs, targets, strict=True)
        ]
        with self._cuda.device(self._device), self._cuda.stream(self._stream):
            moved = [[t.to(f"cuda:{self._device}", non_blocking=True) for t in each] for each in pinned]
            self._stream.synchronize()
        return [tuple(each[:-1]) for each in moved], [each[-1] for each in moved]
