"""Carries out one worker's end of a resharding plan: packs tiles, sends and receives them, unpacks them.

On CPU four lanes, each a thread while a resharding runs: to and from other hosts, to and from workers of this
host. All workers keep the plan's one order on each lane, and a message waits only for earlier ones: the first
unfinished message of all can always go on, so no circle of waits is possible.
On a CUDA stream packing, rounds of messages and unpacking are enqueued one behind the other on the current
stream (that of the transfer's lane); copies are made there too, so their memory is reused only behind what read
it. Must not know how the plan was made, nor stages and schedules.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.contract.resharding import Message, ReshardingPlan, message_rounds
from worker.transport.base import EngineError, finish

MESSAGES_IN_FLIGHT = 2
"""Messages of a lane that are started before the first of them has ended: the next waits at hand, and no card idles."""

_POLL_S = 0.05


class PeerTransport(Protocol):
    """A transport in which each worker, by its name in the plan, is a peer."""

    def send(self, peer: str, tag: int, tensor: torch.Tensor) -> Callable[[], None] | None: ...

    def receive(self, peer: str, tag: int, out: torch.Tensor) -> Callable[[], None] | None: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class MessageTiming:
    """Start and end of the receipt of a message, by this worker's monotonic clock."""

    number: int
    start_s: float
    end_s: float


class Resharder:
    """One worker's end of one plan; runs it any number of times, one at a time.

    The resharding fails, and names what it waits for, where no message of this worker ends for `limit_s` seconds.
    """

    def __init__(self, plan: ReshardingPlan, worker: str, transport: PeerTransport, *, limit_s: float = 60.0):
        if worker not in plan.sources and worker not in plan.targets:
            known = ", ".join([*plan.sources, *plan.targets])
            raise ValueError(f"{worker} is no worker of this resharding: its workers are {known}")
        self._plan = plan
        self._worker = worker
        self._transport = transport
        self._limit_s = limit_s
        self._own_messages = tuple(
            message for message in plan.messages if worker in (message.sender, message.receiver)
        )

    def run(self, tensor: torch.Tensor, first_tag: int = 0) -> list[MessageTiming]:
        """`start`, and wait for its end."""
        return self.start(tensor, first_tag)()

    def start(self, tensor: torch.Tensor, first_tag: int = 0) -> Callable[[], list[MessageTiming]]:
        """Start the resharding; what is returned blocks until this worker's part has ended, and must be called, once.

        `tensor` is the worker's box of the whole: of a source read, of a target filled. Message k has tag `first_tag` + k.
        Raises ValueError where it has another shape or element size; EngineError where a peer fails or stalls: then the
        transport is aborted.
        """
        return self.begin(tensor, first_tag).finish

    def begin(self, tensor: torch.Tensor, first_tag: int = 0) -> ReshardingRun:
        """Start a resharding and return the run, which can say for whom it waits."""
        check_tensor(self._worker, self._plan, tensor)
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{self._worker} has a tensor on {tensor.device}, where threads see no copy end: enqueue it"
            )
        return ReshardingRun(
            self._plan,
            self._worker,
            self._own_messages,
            tensor.detach(),
            self._transport,
            self._limit_s,
            first_tag,
        )


class ReshardingRun:
    """This worker's part of a running resharding."""

    def __init__(
        self,
        plan: ReshardingPlan,
        worker: str,
        messages: tuple[Message, ...],
        tensor: torch.Tensor,
        transport: PeerTransport,
        limit_s: float,
        first_tag: int,
    ):
        self._worker = worker
        self._transport = transport
        self._limit_s = limit_s
        self._first_tag = first_tag
        self._tiles = TileBuffers(plan, worker, messages, tensor)
        self._arrived = {
            message.number: threading.Event() for message in messages if message.receiver == worker
        }
        self._open = {message.number: message for message in messages}
        self._measured: list[MessageTiming] = []
        self._lock = threading.Lock()
        self._failed: BaseException | None = None
        self._last = time.monotonic()
        lanes: dict[tuple[bool, bool], list[Message]] = defaultdict(list)
        for message in messages:
            lanes[message.sender == worker, message.local].append(message)
        self._threads = [
            threading.Thread(
                target=self._lane, args=(in_order, self._send if sends else self._receive), daemon=True
            )
            for (sends, _), in_order in lanes.items()
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[MessageTiming]:
        """Wait for all lanes; raises the first failure, after the transport was aborted and the lanes have ended."""
        while self._failed is None and any(thread.is_alive() for thread in self._threads):
            for thread in self._threads:
                thread.join(_POLL_S)
            if time.monotonic() - self._last > self._limit_s and self._open:
                self._fail(EngineError(f"{self._waiting()} has not ended within {self._limit_s:g} s"))
        for thread in self._threads:
            thread.join(self._limit_s)
        if self._failed is not None:
            raise self._failed
        return sorted(self._measured, key=lambda message: message.number)

    def missing(self) -> tuple[str, ...]:
        """The workers at the other ends of messages that could go on and have not ended."""
        with self._lock:
            ready = [
                message
                for message in self._open.values()
                if not any(before in self._open for before in message.after)
            ]
        others = {end for message in ready for end in (message.sender, message.receiver)} - {self._worker}
        return tuple(sorted(others))

    def _waiting(self) -> str:
        with self._lock:
            return str(self._open[min(self._open)])

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failed is not None:
                return
            self._failed = error
        for came in self._arrived.values():
            came.set()  # who waits sees that it failed
        self._transport.abort()

    def _lane(self, messages: list[Message], start: Callable[[Message], Callable[[], None]]) -> None:
        """Carry out the messages of a lane in order; the next ones begin while one is on its way."""
        begun: list[tuple[Message, Callable[[], None]]] = []
        try:
            for message in messages:
                if len(begun) == MESSAGES_IN_FLIGHT:
                    self._end(*begun.pop(0))
                begun.append((message, start(message)))
            while begun:
                self._end(*begun.pop(0))
        except BaseException as error:
            self._fail(error)

    def _end(self, message: Message, wait: Callable[[], None]) -> None:
        wait()
        with self._lock:
            del self._open[message.number]
            self._last = time.monotonic()

    def _send(self, message: Message) -> Callable[[], None]:
        for before in message.after:
            self._arrived[before].wait()
            if self._failed is not None:
                raise self._failed
        work = self._transport.send(
            message.receiver, self._first_tag + message.number, self._tiles.part(message)
        )

        def wait() -> None:
            finish(work)
            self._tiles.sent(message)

        return wait

    def _receive(self, message: Message) -> Callable[[], None]:
        begun = time.monotonic()
        work = self._transport.receive(
            message.sender, self._first_tag + message.number, self._tiles.part(message)
        )

        def wait() -> None:
            finish(work)
            self._measured.append(MessageTiming(message.number, begun, time.monotonic()))
            self._arrived[message.number].set()
            self._tiles.received(message)

        return wait


class TileBuffers:
    """The bytes of each tile of this worker's messages, in row order: a part of its tensor where that lies so, else a copy.

    A copy is made when its first message goes and dropped after its last; what came is written to the tensor when all of
    the tile is there.
    """

    def __init__(self, plan: ReshardingPlan, worker: str, messages: Sequence[Message], tensor: torch.Tensor):
        self._plan = plan
        self._worker = worker
        self._tensor = tensor
        self._box = plan.box(worker)
        self._bytes: dict[int, torch.Tensor] = {}
        self._uses = Counter(message.tile for message in messages)
        self._missing = Counter(message.tile for message in messages if message.receiver == worker)
        self._lock = threading.Lock()

    def part(self, message: Message) -> torch.Tensor:
        """The bytes of a message, to be read or to be written."""
        size = self._plan.element_bytes
        with self._lock:
            if message.tile not in self._bytes:
                self._bytes[message.tile] = self._new(message.tile)
            return self._bytes[message.tile][message.begin * size : message.end * size]

    def sent(self, message: Message) -> None:
        """Count a message that has left: the bytes of its tile are freed after the last one."""
        self._used(message)

    def received(self, message: Message) -> None:
        """Count a message that has come; the last one of a tile that was received apart writes the tile into the tensor."""
        with self._lock:
            self._missing[message.tile] -= 1
            whole = not self._missing[message.tile]
        if whole and self._plan.needs(self._worker, message.tile):
            place = self._place(message.tile)
            if not place.is_contiguous():
                flat = self._bytes[message.tile].view(self._tensor.dtype)
                place.copy_(flat.view(place.shape))
        self._used(message)

    def _new(self, tile: int) -> torch.Tensor:
        if self._plan.holds(self._worker, tile):
            return _bytes_of(self._place(tile).contiguous())
        if self._plan.needs(self._worker, tile) and (place := self._place(tile)).is_contiguous():
            return _bytes_of(place)
        size = self._plan.elements(tile) * self._plan.element_bytes
        return torch.empty(size, dtype=torch.uint8, device=self._tensor.device)

    def _place(self, tile: int) -> torch.Tensor:
        """The tile's part of this worker's tensor."""
        slices = tuple(
            slice(begin - start, end - start)
            for (begin, end), (start, _) in zip(self._plan.tiles[tile], self._box, strict=True)
        )
        return self._tensor[slices]

    def _used(self, message: Message) -> None:
        with self._lock:
            self._uses[message.tile] -= 1
            if not self._uses[message.tile]:
                del self._bytes[message.tile]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor; a dimension of length 1 may have any stride there, which bytes may not."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def check_tensor(worker: str, plan: ReshardingPlan, tensor: torch.Tensor) -> None:
    """ValueError unless `tensor` has the shape and element size of the box that `worker` has by `plan`."""
    shape = tuple(end - begin for begin, end in plan.box(worker))
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{worker} has a tensor of shape {tuple(tensor.shape)}, the plan's box is {shape}: give that"
        )
    if tensor.element_size() != plan.element_bytes:
        raise ValueError(
            f"{worker} has elements of {tensor.element_size()} bytes ({tensor.dtype}), the plan's have "
            f"{plan.element_bytes}: plan with that size"
        )


class ExchangeTransport(Protocol):
    """A transport that moves the messages of one round, by the names of the workers in the plan."""

    def exchange(
        self,
        group: str,
        sends: Sequence[tuple[str, torch.Tensor]],
        receives: Sequence[tuple[str, torch.Tensor]],
    ) -> None: ...


class StreamResharder:
    """One worker's end of one plan, whose messages travel in `group`; enqueues it any number of times."""

    def __init__(self, plan: ReshardingPlan, worker: str, group: str):
        self._plan, self._worker, self._group = plan, worker, group
        own = (
            [message for message in of if worker in (message.sender, message.receiver)]
            for of in message_rounds(plan)
        )
        self._rounds = [messages for messages in own if messages]

    def enqueue(self, tensor: torch.Tensor, transport: ExchangeTransport) -> None:
        """`tensor` is the worker's box of the whole: of a source read, of a target filled. ValueError where it has
        another shape or element size."""
        check_tensor(self._worker, self._plan, tensor)
        messages = [message for of in self._rounds for message in of]
        tiles = TileBuffers(self._plan, self._worker, messages, tensor.detach())
        for of in self._rounds:
            sent = [message for message in of if message.sender == self._worker]
            come = [message for message in of if message.receiver == self._worker]
            transport.exchange(
                self._group,
                [(message.receiver, tiles.part(message)) for message in sent],
                [(message.sender, tiles.part(message)) for message in come],
            )
            for message in sent:
                tiles.sent(message)
            for message in come:
                tiles.received(message)
