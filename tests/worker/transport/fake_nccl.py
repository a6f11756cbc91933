"""A recording fake of cupy.cuda.nccl: communicators that block until all their ranks are there.

As NCCL does, a receive spins until its message or an abort comes, and ending a communicator frees memory,
which waits for the device: outside a group for whatever of the same process still spins there. An abort
drops what its communicator has not delivered (`delay_s` a message), destroying waits for it.

Values move: sums and gathers of a communicator take what its ranks bring in their order, wait until all have come, and
refuse what does not fit together (NCCL would hang, or mix it up). Messages of a group leave before the first is awaited.
The first collective of a kind and size connects what it takes, which waits for the device: a misfit `within_step`, as a
receive may spin there for ever.

Parameters have cupy's names: test_fake_nccl.py compares, wherever there is a cupy.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from dataclasses import dataclass, field

import torch

VERSION = 22809
_TYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    4: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}
_SIZES = {number: dtype.itemsize for number, dtype in _TYPES.items()}


@dataclass
class _Meeting:
    """A collective to which the ranks of a communicator come."""

    said: tuple
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    left: int = 0


class FakeNccl:
    """One per test; all ranks of the test share it, as all processes share one NCCL network."""

    available = True

    def __init__(self, connect_timeout_s: float = 60.0, delay_s: float = 0.0):
        self.delay_s = delay_s
        self.stuck = threading.Event()  # set: nothing that ends communicators returns, in a group or alone
        self.group = threading.local()
        self.spinning: dict[str, set] = {}
        self.lock = threading.Condition()
        self.ids = itertools.count(1)
        self.members: dict[tuple, set[int]] = {}
        self.meetings: dict[tuple, _Meeting] = {}
        self.misfits: list[str] = []  # collectives of one communicator that do not fit together
        self.within_step = threading.local()
        self.connected: set[tuple] = set()
        self.alive: list[FakeCommunicator] = []
        self.calls: list[tuple] = []
        self.messages: dict[tuple, list[bytes]] = {}
        self.timeout_s = connect_timeout_s
        self.broken: Exception | None = None
        outer = self

        class NcclCommunicator(FakeCommunicator):
            nccl = outer

        self.NcclCommunicator = NcclCommunicator

    def get_version(self):
        return VERSION

    def get_unique_id(self):
        number = next(self.ids)
        return number.to_bytes(4) + bytes((number * 37 + k * 91) % 256 for k in range(124))

    def groupStart(self):
        assert not hasattr(self.group, "ends"), "groups of NCCL nest, but this transport has no reason to"
        self.group.ends, self.group.receives = [], []

    def groupEnd(self):
        ends, receives = self.group.__dict__.pop("ends"), self.group.__dict__.pop("receives")
        if ends:
            self.calls.append(("group", threading.current_thread().name, len(ends)))
        for receive in receives:
            receive()
        with self.lock:
            for communicator in ends:
                communicator.stopped = communicator.stopped or communicator.ending == "abort"
            self.lock.notify_all()
        for communicator in ends:
            communicator._free()

    def deliver(self, key, data, communicator):
        """A message on its way: it arrives `delay_s` later unless its communicator is aborted before."""
        with self.lock:
            if not communicator.stopped:
                self.messages.setdefault(key, []).append(data)
            communicator.under_way -= 1
            self.lock.notify_all()


class FakeCommunicator:
    nccl: FakeNccl

    def __init__(self, ndev, commId, rank, config=None):
        nccl, identity = self.nccl, commId
        if not isinstance(commId, bytes):
            raise TypeError(
                f"Argument 'commId' has incorrect type (expected bytes, got {type(commId).__name__})"
            )
        if len(commId) != 128:
            raise ValueError(f"commId length {len(commId)} != 128.")
        self.identity, self.rank, self.process = identity, rank, threading.current_thread().name
        self.stopped, self.ending, self.under_way, self.met, self.ranks = False, None, 0, 0, ndev
        with nccl.lock:
            nccl.calls.append(("init", threading.current_thread().name, identity, rank))
            nccl.members.setdefault(identity, set()).add(rank)
            nccl.lock.notify_all()
            if not nccl.lock.wait_for(lambda: len(nccl.members[identity]) == ndev, nccl.timeout_s):
                raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: the constructor would block for ever")
            nccl.alive.append(self)

    def send(self, sendbuf, count, datatype, peer, stream):
        self._check("send", stream)
        with self.nccl.lock:
            data = ctypes.string_at(sendbuf, count * _SIZES[datatype])
            self.under_way += 1
        arguments = ((self.identity, self.rank, peer), data, self)
        if self.nccl.delay_s:
            threading.Timer(self.nccl.delay_s, self.nccl.deliver, arguments).start()
        else:
            self.nccl.deliver(*arguments)

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._check("recv", stream)
        if hasattr(self.nccl.group, "receives"):
            self.nccl.group.receives.append(lambda: self._receive(recvbuf, count * _SIZES[datatype], peer))
        else:
            self._receive(recvbuf, count * _SIZES[datatype], peer)

    def _receive(self, recvbuf, size, peer):
        key, nccl = (self.identity, peer, self.rank), self.nccl
        with nccl.lock:
            spinning = nccl.spinning.setdefault(self.process, set())
            spinning.add(self)
            try:
                assert nccl.lock.wait_for(lambda: self.stopped or nccl.messages.get(key), 60)
            finally:
                spinning.discard(self)
                nccl.lock.notify_all()
            if not nccl.messages.get(key):
                raise RuntimeError("NCCL_ERROR_INTERNAL_ERROR: the communicator was aborted")
            data = nccl.messages[key].pop(0)
        assert len(data) == size
        ctypes.memmove(recvbuf, data, len(data))

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        self._check("allReduce", stream, count, datatype)
        parts = self._meet(("allReduce", count, datatype, op), _memory(sendbuf, count, datatype))
        _memory(recvbuf, count, datatype).copy_(_total(parts))

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        self._check("reduceScatter", stream, recvcount, datatype)
        whole = _memory(sendbuf, recvcount * self.ranks, datatype)
        parts = self._meet(("reduceScatter", recvcount, datatype, op), whole)
        own = _total(parts)[self.rank * recvcount : (self.rank + 1) * recvcount]
        _memory(recvbuf, recvcount, datatype).copy_(own)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        self._check("allGather", stream, count, datatype)
        parts = self._meet(("allGather", count, datatype), _memory(sendbuf, count, datatype))
        _memory(recvbuf, count * self.ranks, datatype).copy_(torch.cat(parts))

    def _meet(self, said, tensor):
        """What all ranks bring to this one's next collective, in their order."""
        nccl = self.nccl
        with nccl.lock:
            self.met += 1
            key = (self.identity, self.met)
            if hasattr(nccl.within_step, "slot") and (self.identity, said) not in nccl.connected:
                nccl.misfits.append(f"{said} connects within a step")
            nccl.connected.add((self.identity, said))
            meeting = nccl.meetings.setdefault(key, _Meeting(said))
            if meeting.said != said:
                nccl.misfits.append(f"collective {self.met}: {meeting.said} here, {said} there")
                raise RuntimeError(nccl.misfits[-1])
            meeting.parts[self.rank] = tensor.clone()
            nccl.lock.notify_all()
            spinning = nccl.spinning.setdefault(self.process, set())
            spinning.add(self)
            try:
                assert nccl.lock.wait_for(lambda: self.stopped or len(meeting.parts) == self.ranks, 60)
            finally:
                spinning.discard(self)
                nccl.lock.notify_all()
            if len(meeting.parts) < self.ranks:
                raise RuntimeError("NCCL_ERROR_INTERNAL_ERROR: the communicator was aborted")
            meeting.left += 1
            if meeting.left == self.ranks:
                del nccl.meetings[key]
            return [meeting.parts[rank] for rank in range(self.ranks)]

    def check_async_error(self):
        if self.nccl.broken:
            raise self.nccl.broken

    def abort(self):
        self._end("abort")

    def destroy(self):
        self._end("destroy")

    def _free(self):
        """Wait for the device: for everything of this process that spins, and for what is to be delivered."""
        nccl = self.nccl
        while nccl.stuck.is_set():
            time.sleep(0.02)
        with nccl.lock:
            nccl.lock.wait_for(
                lambda: (
                    not nccl.spinning.get(self.process) and (self.ending == "abort" or self.under_way == 0)
                )
            )
            nccl.alive.remove(self)

    def _end(self, how):
        if self.ending is not None:
            return  # cupy forgets a communicator that has ended
        self.ending = how
        self.nccl.calls.append((how, threading.current_thread().name, self.identity, self.rank))
        if hasattr(self.nccl.group, "ends"):
            self.nccl.group.ends.append(self)
            return
        with self.nccl.lock:
            self.stopped = how == "abort"
            self.nccl.lock.notify_all()
        self._free()

    def _check(self, what, stream, *more):
        if self.ending is not None:
            raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT: the communicator was aborted")
        self.nccl.calls.append((what, threading.current_thread().name, self.identity, stream, *more))


def _memory(pointer, count, datatype):
    """The numbers that lie there."""
    dtype = _TYPES[datatype]
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(pointer), dtype=dtype)


def _total(parts):
    return torch.stack(parts).sum(0).to(parts[0].dtype)
