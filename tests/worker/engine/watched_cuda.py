"""A torch.cuda whose streams are threads, or which runs at once and finds races by streams and events alone.

`Device(threads=True)`: every stream is a thread that runs what was enqueued, with pauses drawn from a seed, so that
streams overtake each other wherever no event holds them back; values are then those of that order.

`Device(threads=True, entries=N)`: besides, a stream takes N entries, records and waits too; one more blocks the host until
there is room, and so does every query of an event while a launch is blocked, as the driver may do it.

`Device()`: what is enqueued runs at once, and every operation of torch and of NCCL is noted with the memory that it
reads and writes. A race is told

* where two operations of different streams touch the same bytes, one of them writes, and neither waits for the other;
* where memory is freed while another stream may still use it: the allocator gives it to whatever its own stream
  enqueues next (there is no record_stream here);
* where two operations of one NCCL communicator are not ordered by streams and events.

What the host has waited for is over for all streams. Addresses are the host's: this knows nothing of a real device.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Clock = dict[int, int]
_PAUSES_S = (0.0, 0.0002, 0.002)


@dataclass
class _Block:
    """A piece of memory: the stream on whose behalf it was allocated, and the last access of each kind to each part."""

    stream: int | None
    accesses: dict[tuple[int, int, int, bool], tuple[int, str]] = field(default_factory=dict)


class Device:
    """One worker's device; hand it to CudaLanes as `cuda`."""

    def __init__(self, name: str = "", *, threads: bool = False, seed: int = 0, entries: int | None = None):
        self.name, self.threads, self.entries = name, threads, entries
        self.launching = threading.Condition()
        self.blocked_launches = 0
        self.races: list[str] = []
        self.operations = 0
        self.random = random.Random(seed)
        self._local = threading.local()
        self._lock = threading.RLock()
        self._streams: list[Stream] = []
        self._clocks: dict[int, Clock] = {0: {}}
        self._host: Clock = {}
        self._blocks: dict[int, _Block] = {}
        self._alive: dict[int, weakref.ref] = {}
        self._communicators: dict[str, tuple[int, int]] = {}
        self.said: dict[str, list[tuple]] = {}
        """By communicator, what this worker enqueued on it, in order."""
        self.nvtx = types.SimpleNamespace(range=lambda name: contextlib.nullcontext())

    # What CudaLanes asks of torch.cuda

    def Stream(self, priority: int = 0) -> Stream:
        stream = Stream(self, len(self._streams) + 1, priority)
        self._streams.append(stream)
        self._clocks[stream.cuda_stream] = {}
        return stream

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> Event:
        return Event(self)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current, stream.cuda_stream
        try:
            with contextlib.nullcontext() if self.threads else _Noting(self):
                yield
        finally:
            self._local.stream = before

    @property
    def current(self) -> int:
        """The stream on which the calling thread works; 0 is that of the host between steps."""
        return getattr(self._local, "stream", 0)

    def synchronize(self) -> None:
        """The host has waited for everything."""
        with self._lock:
            for stream, clock in self._clocks.items():
                self._host[stream] = max(self._host.get(stream, 0), clock.get(stream, 0))

    def action(self, action: Callable[[], Any], launches: int = 1) -> Callable[[], Any]:
        """What enqueues `action` on the current stream, as so many entries."""
        if not self.threads:
            return action

        def enqueue() -> None:
            stream = self._streams[self.current - 1]
            stream.put(lambda: action() and None)
            for _ in range(launches - 1):
                stream.put(lambda: None)

        return enqueue

    def end(self) -> None:
        """End the streams' threads."""
        for stream in self._streams:
            stream.put(None)

    # Who may touch what

    def touch(self, tensor: torch.Tensor, write: bool, what: str) -> None:
        """An operation of the current stream reads or writes `tensor`."""
        with self._lock:
            self._touch(tensor, write, what, self._tick())

    def communicate(self, communicator: str, what: tuple, reads: Any = (), writes: Any = ()) -> None:
        """An operation of NCCL on the current stream."""
        with self._lock:
            here, number = self.current, self._tick()
            self.said.setdefault(communicator, []).append(what)
            if self.threads:
                return
            before = self._communicators.get(communicator)
            if before is not None and not self._over(*before, here):
                self._tell(f"{what} on {communicator} may meet the one before it on stream {before[0]}")
            self._communicators[communicator] = here, number
            for tensors, write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self._touch(tensor, write, f"{what[0]} on {communicator}", number)

    def note(self, function: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """An operation of torch on the current stream."""
        returns = function._schema.returns
        if returns and all(one.alias_info is not None and not one.alias_info.is_write for one in returns):
            return  # a view touches nothing
        with self._lock:
            number, seen = self._tick(), set()
            arguments = function._schema.arguments
            given = [*zip(arguments, args, strict=False)]
            given += [(one, kwargs[one.name]) for one in arguments if one.name in kwargs]
            for one, value in given:
                write = one.alias_info is not None and one.alias_info.is_write
                for tensor in _tensors(value):
                    seen.add(_base(tensor))
                    self._touch(tensor, write, str(function), number)
            for tensor in _tensors(out):
                if _base(tensor) not in seen:
                    self._touch(tensor, True, str(function), number, new=True)

    def _tick(self) -> int:
        clock = self._clocks[self.current]
        clock[self.current] = clock.get(self.current, 0) + 1
        self.operations += 1
        return clock[self.current]

    def _touch(self, tensor: torch.Tensor, write: bool, what: str, number: int, new: bool = False) -> None:
        base, here = _base(tensor), self.current
        if not base:
            return
        block = self._block(base, tensor, here if new else None)
        low, high = _span(tensor)
        for (stream, begin, end, wrote), (other, by) in block.accesses.items():
            meets = stream != here and (write or wrote) and begin < high and low < end
            if meets and not self._over(stream, other, here):
                doing = "writes" if write else "reads"
                self._tell(f"{what} {doing} on stream {here} what {by} on stream {stream} may still use")
        block.accesses[here, low, high, write] = number, what

    def _block(self, base: int, tensor: torch.Tensor, stream: int | None) -> _Block:
        if base not in self._blocks:
            block = self._blocks[base] = _Block(stream)
            storage = tensor.untyped_storage()
            self._alive[base] = weakref.ref(storage, lambda _: self._freed(base, block))
        return self._blocks[base]

    def _freed(self, base: int, block: _Block) -> None:
        with self._lock:
            if self._blocks.get(base) is not block:
                return
            del self._blocks[base], self._alive[base]
            if block.stream is None:
                return
            for (stream, *_), (number, by) in block.accesses.items():
                if stream != block.stream and not self._over(stream, number, block.stream):
                    self._tell(
                        f"memory of stream {block.stream} is freed while {by} on stream {stream} may still use it"
                    )

    def _over(self, stream: int, number: int, here: int) -> bool:
        """Whether operation `number` of a stream is over before what is enqueued on stream `here` from now on."""
        if stream == here:
            return True
        return number <= max(self._clocks[here].get(stream, 0), self._host.get(stream, 0))

    def _tell(self, race: str) -> None:
        self.races.append(f"{self.name}: {race}")


class Stream:
    """One stream of a device; with threads, one of them."""

    def __init__(self, device: Device, number: int, priority: int):
        self.device, self.cuda_stream, self.priority = device, number, priority
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._pause_s = 0.0
        self._pending = 0
        if device.threads:
            threading.Thread(target=self._run, name=f"{device.name}-stream-{number}", daemon=True).start()

    def put(self, work: Callable[[], None] | None) -> None:
        device = self.device
        if device.entries is not None and work is not None:
            with device.launching:
                device.blocked_launches += 1
                device.launching.wait_for(lambda: self._pending < device.entries)
                device.blocked_launches -= 1
                self._pending += 1
                device.launching.notify_all()
        self._queue.put(work)

    def wait_event(self, event: Event) -> None:
        assert event.recorded, "a wait for an event that is not recorded yet waits for nothing"
        if self.device.threads:
            number = event.recorded
            return self.put(lambda: event.until(number))
        with self.device._lock:
            mine = self.device._clocks[self.cuda_stream]
            for stream, done in event.clock.items():
                mine[stream] = max(mine.get(stream, 0), done)

    def _run(self) -> None:
        self.device._local.stream = self.cuda_stream
        while (work := self._queue.get()) is not None:
            if self.device.random.random() < 0.1:
                self._pause_s = self.device.random.choice(_PAUSES_S)
            time.sleep(self._pause_s)
            try:
                work()
            except BaseException as error:  # as on a device: told when somebody waits
                self.device.races.append(f"{self.device.name}: {type(error).__name__}: {error}")
            with self.device.launching:
                self._pending -= 1
                self.device.launching.notify_all()


class Event:
    """Recorded on a stream; `clock` is what is over when it has happened."""

    def __init__(self, device: Device):
        self.device = device
        self.recorded = self.happened = 0
        self.at = 0.0
        self.clock: Clock = {}
        self._came = threading.Condition()

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        number = self.recorded
        if self.device.threads:
            stream.put(lambda: self._happen(number))
        else:
            with self.device._lock:
                self.clock = dict(self.device._clocks[stream.cuda_stream])
            self._happen(number)

    def query(self) -> bool:
        if self.device.entries is not None:
            with self.device.launching:
                free = self.device.launching.wait_for(lambda: not self.device.blocked_launches, 10)
            assert free, "a query waits behind a launch that a full stream blocks"
        return 0 < self.recorded == self.happened

    def until(self, number: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: self.happened >= number, 120), "an event never happened"

    def synchronize(self) -> None:
        self.until(self.recorded)
        host = self.device._host
        for stream, done in self.clock.items():
            host[stream] = max(host.get(stream, 0), done)

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3

    def _happen(self, number: int) -> None:
        with self._came:
            self.happened, self.at = number, time.monotonic()
            self._came.notify_all()


class _Noting(TorchDispatchMode):
    def __init__(self, device: Device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self._device.note(function, args, kwargs or {}, out)
        return out


def unnoted() -> contextlib.AbstractContextManager[Any]:
    """What a fake does inside is no operation of torch on a stream."""
    return _disable_current_modes()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for one in value if isinstance(one, torch.Tensor)] if isinstance(value, list | tuple) else []


def _base(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage between which it lies."""
    if not tensor.numel():
        return 0, 0
    first = tensor.storage_offset()
    last = first + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first * tensor.element_size(), (last + 1) * tensor.element_size()
