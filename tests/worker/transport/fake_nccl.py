"""A recording fake of cupy.cuda.nccl: communicators that block until all their ranks are there.

As NCCL does, a receive spins until its message or an abort comes, and ending a communicator frees memory,
which waits for the device: outside a group for whatever of the same process still spins there. An abort
drops what its communicator has not delivered (`delay_s` a message), destroying waits for it.

Parameters have cupy's names: test_fake_nccl.py compares, wherever there is a cupy.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time

VERSION = 22809
_SIZES = {0: 1, 1: 1, 2: 4, 4: 8, 6: 2, 7: 4, 8: 8, 9: 2}


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
        return bytes((number * 37 + k * 91) % 256 for k in range(128))

    def groupStart(self):
        assert not hasattr(self.group, "ends"), "groups of NCCL nest, but this transport has no reason to"
        self.group.ends = []

    def groupEnd(self):
        ends = self.group.__dict__.pop("ends")
        self.calls.append(("group", threading.current_thread().name, len(ends)))
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
        self.stopped, self.ending, self.under_way = False, None, 0
        with nccl.lock:
            nccl.calls.append(("init", threading.current_thread().name, identity, rank))
            nccl.members.setdefault(identity, set()).add(rank)
            nccl.lock.notify_all()
            if not nccl.lock.wait_for(lambda: len(nccl.members[identity]) == ndev, nccl.timeout_s):
                raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: the constructor would block for ever")

    def send(self, sendbuf, count, datatype, peer, stream):
        self._check("send", stream)
        with self.nccl.lock:
            data = ctypes.string_at(sendbuf, count * _SIZES[datatype])
            self.under_way += 1
        arguments = ((self.identity, peer), data, self)
        if self.nccl.delay_s:
            threading.Timer(self.nccl.delay_s, self.nccl.deliver, arguments).start()
        else:
            self.nccl.deliver(*arguments)

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._check("recv", stream)
        key, nccl = (self.identity, self.rank), self.nccl
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
        assert len(data) == count * _SIZES[datatype]
        ctypes.memmove(recvbuf, data, len(data))

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        self._check("allReduce", stream, count, datatype)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        self._check("reduceScatter", stream, recvcount, datatype)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        self._check("allGather", stream, count, datatype)

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
