"""LoaderProcesses: torch DataLoader processes that read a worker's microbatches ahead, in step order.

Each process builds the data set anew from the job's values and draws what the worker itself would draw. They are
spawned, not forked: a fork would hold the worker's connections, and peers would not see it die. They end with the
worker, also when they hang in user code. Knows no stages.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from worker.contract.failures import AttemptFailure
from worker.data.dataset import POSITIONS_KEPT, SampleOrder
from worker.data.microbatches import BatchSlice, Microbatches, ReadMicrobatch

_PARENT_POLL_S = 1.0


@dataclass(frozen=True)
class _LoaderResult:
    """The result of a loader process for (step, microbatch): a microbatch, or the error; of a stream the place behind the
    step."""

    at: tuple[int, int]
    read: ReadMicrobatch | None
    error: Exception | None = None
    place: Mapping[str, Any] | None = None


class LoaderProcesses:
    """`read` microbatches in order of steps, up to step `last`; another order begins the processes again."""

    def __init__(
        self, order: SampleOrder, *, own_loss: bool, with_inputs: bool = False, last: int, is_stream: bool
    ):
        self._order, self._last, self._is_stream = order, last, is_stream
        self._own_loss, self._with_inputs = own_loss, with_inputs
        self._iterator: Any = None
        self._next: tuple[int, int] | None = None
        self._asked: tuple[int, int] | None = None
        self._from: tuple[int, Mapping[str, Any] | None] | None = None
        self._places: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=POSITIONS_KEPT)
        self._closed = False

    def read(self, step: int, microbatch: int, part: BatchSlice) -> ReadMicrobatch:
        """Raises what reading raised, and RuntimeError where a process died."""
        if self._closed:
            raise RuntimeError("nothing is read any more: the processes were ended")
        self._asked = (step, microbatch)
        if self._next != self._asked:
            self._begin(step, part)
            for earlier in range(microbatch):
                self._take(step, earlier)
        try:
            return self._take(step, microbatch)
        except StopIteration:
            raise RuntimeError(f"the processes ended before {self._key_text(step, microbatch)}") from None

    def place(self, step: int) -> Mapping[str, Any] | None:
        """The position at which `step` begins, for a checkpoint."""
        if not self._is_stream:
            return None
        return next((place for at, place in reversed(self._places) if at == step), None)

    def go_to(self, step: int, place: Mapping[str, Any] | None) -> None:
        """Begin at `step`, at the place that a checkpoint kept of it."""
        self._end()
        self._from = (step, place)
        if place is not None:
            self._places.append((step, place))

    def reading(self) -> str:
        """Assigns steps and microbatches to the processes that read them."""
        names = ", ".join(str(process.pid) for process in self._processes())
        asked = "nothing" if self._asked is None else self._key_text(*self._asked)
        return f"loader process {names or 'not started'} reads {asked}"

    def close(self) -> None:
        """End all processes, hanging ones too."""
        self._closed = True
        for process in self._processes():
            process.kill()
        self._iterator = None

    def _begin(self, step: int, part: BatchSlice) -> None:
        self._end()
        work = _LoaderWork(self._order, self._own_loss, self._with_inputs, part, step, max(step, self._last))
        self._next = (step, 0)
        if self._is_stream:
            at, place = self._from or (0, None)
            if at != step:
                place = self.place(step)
            dataset: Any = _StreamedMicrobatches(work, place)
            keys: Any = None
        else:
            dataset, keys = _IndexedMicrobatches(work), _MicrobatchKeys(work)
        loader = self._order.data.loader
        processes = DataLoader(
            dataset,
            sampler=keys,
            batch_size=None,
            collate_fn=_identity,
            num_workers=loader.workers,
            prefetch_factor=loader.prefetch,
            multiprocessing_context="spawn",
            worker_init_fn=_exit_with_parent,
            generator=torch.Generator(),  # the process's own stays where it stands
        )
        # begun on the main thread, torch would have every process that ends raise there, wherever it is
        with ThreadPoolExecutor(1) as thread:
            self._iterator = thread.submit(iter, processes).result()

    def _take(self, step: int, microbatch: int) -> ReadMicrobatch:
        try:
            found: _LoaderResult = next(self._iterator)
        except RuntimeError as error:
            raise RuntimeError(
                f"a loader process of data {self._order.data.factory} died ({self._deaths_text() or error}) before "
                f"{self._key_text(step, microbatch)}: it was killed, or the data set ended it"
            ) from error
        if found.error is not None:
            self._next = None
            raise found.error
        assert found.at == (step, microbatch), f"{found.at} came in place of {(step, microbatch)}"
        self._next = self._key_after(step, microbatch)
        if found.place is not None:
            self._places.append((step + 1, found.place))
        return found.read

    def _key_after(self, step: int, microbatch: int) -> tuple[int, int]:
        last = microbatch == self._order.microbatches - 1
        return (step + 1, 0) if last else (step, microbatch + 1)

    def _key_text(self, step: int, microbatch: int) -> str:
        return f"microbatch {microbatch} of step {step}"

    def _processes(self) -> list[Any]:
        return list(getattr(self._iterator, "_workers", ()))

    def _deaths_text(self) -> str:
        ended = [(one.pid, one.exitcode) for one in self._processes() if one.exitcode not in (None, 0)]
        return ", ".join(f"process {pid} {_exit_text(code)}" for pid, code in ended)

    def _end(self) -> None:
        for process in self._processes():
            process.kill()
        self._iterator = self._next = None


@dataclass(frozen=True)
class _LoaderWork:
    """The work of the loader processes of a worker, as it is sent to them."""

    order: SampleOrder
    own_loss: bool
    with_inputs: bool
    part: BatchSlice
    first: int
    last: int

    def make_microbatches(self) -> Microbatches:
        return Microbatches(self.order, own_loss=self.own_loss, with_inputs=self.with_inputs)

    def in_order(self) -> Iterator[tuple[int, int]]:
        for step in range(self.first, self.last + 1):
            for microbatch in range(self.order.microbatches):
                yield step, microbatch


class _MicrobatchKeys:
    """The order in which processes get their work."""

    def __init__(self, work: _LoaderWork):
        self._work = work

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self._work.in_order()


class _IndexedMicrobatches(Dataset[_LoaderResult]):
    """Any microbatch of a data set with indices; made where it is first asked."""

    def __init__(self, work: _LoaderWork):
        self._work = work
        self._made: Microbatches | None = None

    def __getitem__(self, at: tuple[int, int]) -> _LoaderResult:
        return _read_result(at, self._read)

    def _read(self, step: int, microbatch: int) -> ReadMicrobatch:
        self._made = self._made or self._work.make_microbatches()
        return self._made.read(step, microbatch, self._work.part)


class _StreamedMicrobatches(IterableDataset[_LoaderResult]):
    """The microbatches of a stream, from a place on."""

    def __init__(self, work: _LoaderWork, place: Mapping[str, Any] | None):
        self._work, self._place = work, place

    def __iter__(self) -> Iterator[_LoaderResult]:
        made: list[Microbatches] = []

        def read(step: int, microbatch: int) -> ReadMicrobatch:
            if not made:
                made.append(self._work.make_microbatches())
                made[0].source.go_to(step, self._place)
            return made[0].read(step, microbatch, self._work.part)

        for step, microbatch in self._work.in_order():
            found = _read_result((step, microbatch), read)
            if found.error is None and microbatch == self._work.order.microbatches - 1:
                found = _LoaderResult(found.at, found.read, place=made[0].source.place(step + 1))
            yield found
            if found.error is not None:
                return


def _read_result(at: tuple[int, int], read: Any) -> _LoaderResult:
    try:
        return _LoaderResult(at, read(*at))
    except AttemptFailure as failure:
        return _LoaderResult(at, None, failure)
    except Exception as error:  # of a class that the worker may not know, or that cannot be sent
        return _LoaderResult(
            at, None, RuntimeError(f"{error}" if type(error) is RuntimeError else _error_text(error))
        )


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _identity(found: _LoaderResult) -> _LoaderResult:
    return found


def _exit_text(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _exit_with_parent(_: int) -> None:
    """End this process with the worker, also while it hangs in a user's code."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="slotline-parent", daemon=True).start()
