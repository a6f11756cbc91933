"""A recording fake of cupy.cuda.nccl: communicators that block until all their ranks are there.

Parameters have cupy's names: test_fake_nccl.py compares, wherever there is a cupy.
"""

from __future__ import annotations

import ctypes
import itertools
import threading

VERSION = 22809
_SIZES = {0: 1, 1: 1, 2: 4, 4: 8, 6: 2, 7: 4, 8: 8, 9: 2}


class FakeNccl:
    """One per test; all ranks of the test share it, as all processes share one NCCL network."""

    available = True

    def __init__(self, connect_timeout_s: float = 60.0, identities: str = "bytes"):
        self.identities = identities  # before cupy 14 "signed" C chars, and "unsigned" ones on ARM
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
        identity = bytes((number * 37 + k * 91) % 256 for k in range(128))
        if self.identities == "bytes":
            return identity
        return tuple(byte - 256 if byte > 127 and self.identities == "signed" else byte for byte in identity)


class FakeCommunicator:
    nccl: FakeNccl

    def __init__(self, ndev, commId, rank, config=None):
        nccl, identity = self.nccl, commId
        wanted = bytes if nccl.identities == "bytes" else tuple
        if not isinstance(commId, wanted):
            raise TypeError(
                f"Argument 'commId' has incorrect type (expected {wanted.__name__}, got {type(commId).__name__})"
            )
        if len(commId) != 128:
            raise ValueError(f"commId length {len(commId)} != 128.")
        if nccl.identities != "bytes":
            lowest = -128 if nccl.identities == "signed" else 0
            assert all(lowest <= part < lowest + 256 for part in identity)
        self.identity, self.rank, self.aborted = identity, rank, False
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
            self.nccl.messages.setdefault((self.identity, peer), []).append(data)
            self.nccl.lock.notify_all()

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._check("recv", stream)
        key = (self.identity, self.rank)
        with self.nccl.lock:
            assert self.nccl.lock.wait_for(lambda: self.nccl.messages.get(key), 60)
            data = self.nccl.messages[key].pop(0)
        assert len(data) == count * _SIZES[datatype]
        ctypes.memmove(recvbuf, data, len(data))

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        self._check("allReduce", stream, count, datatype)

    def check_async_error(self):
        if self.nccl.broken:
            raise self.nccl.broken

    def abort(self):
        self.aborted = True
        self.nccl.calls.append(("abort", threading.current_thread().name, self.identity, self.rank))

    def _check(self, what, stream, *more):
        if self.aborted:
            raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT: the communicator was aborted")
        self.nccl.calls.append((what, threading.current_thread().name, self.identity, stream, *more))
