"""Known values over every new NCCL connection: a wrong one is found, by name, before a step relies on it."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from tests.worker.transport.fake_nccl import FakeNccl
from tests.worker.transport.test_nccl import run_all
from worker.transport import selftest
from worker.transport.base import ConnectError, Topology
from worker.transport.nccl import NcclLibrary, NcclTransport
from worker.transport.rendezvous import host_store

TOPOLOGY = Topology(("m0", "m1"), (2, 1))
EVERYBODY = TOPOLOGY.names("m0") + TOPOLOGY.names("m1")
GROUPS = {"workers/m0": (0, 1), "everybody": (0, 1, 2)}
PAIRS = (("m0/0", "m1/0"), ("m0/1", "m1/0"), ("m0/1", "m0/0"))


def connect(nccl):
    """All workers, and what each was told, by name."""
    store = host_store("127.0.0.1")
    ends = {
        name: NcclTransport(
            TOPOLOGY,
            mesh=name[:2],
            worker=int(name[3:]),
            store=("127.0.0.1", store.port),
            library=NcclLibrary(nccl, (2, 28, 9), lambda: 77),
        )
        for name in EVERYBODY
    }
    told = {}

    def one(name):
        try:
            ends[name].connect(GROUPS, tuple((*pair, "transfers/m0>m1") for pair in PAIRS))
        except ConnectError as error:
            told[name] = str(error)

    run_all(one, EVERYBODY)
    return ends, told, store


def test_good_connections_are_told_nothing_and_each_pair_has_been_used():
    nccl = FakeNccl()
    _, told, _ = connect(nccl)
    assert told == {} and nccl.misfits == []
    sent = [call for call in nccl.calls if call[0] == "send"]
    assert len(sent) == 2 * len(PAIRS)


def test_an_exchange_goes_both_ways_at_once_and_in_order_between_two_workers():
    ends, _, _ = connect(FakeNccl())
    given = {pair: [torch.arange(6) + 10 * k for k in (n, n + 3)] for n, pair in enumerate(PAIRS)}
    found = {pair: [torch.zeros(6, dtype=torch.int64) for _ in one] for pair, one in given.items()}

    def exchange(name):
        sends = [(p[1], t) for p, of in given.items() if p[0] == name for t in of]
        receives = [(p[0], t) for p, of in found.items() if p[1] == name for t in of]
        ends[name].exchange("transfers/m0>m1", sends, receives)

    run_all(exchange, EVERYBODY)
    for pair, tensors in given.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, found[pair], strict=True))


def _spoiled(method, spoil):
    """A fake whose communicators do `method` otherwise."""
    nccl = FakeNccl()
    right = getattr(nccl.NcclCommunicator, method)

    def wrong(self, *arguments):
        spoil(right, self, *arguments)

    setattr(nccl.NcclCommunicator, method, wrong)
    return nccl


def _add_nothing(right, self, sendbuf, recvbuf, count, *rest):
    if self.rank == 0:  # this rank's part is left out
        ctypes.memset(sendbuf, 0, min(count, 4))
    right(self, sendbuf, recvbuf, count, *rest)


def _drop_the_end(right, self, sendbuf, count, *rest):
    if count > 1000:  # as a copy between GPUs that goes wrong in a later page
        data = ctypes.string_at(sendbuf, count)
        broken = ctypes.create_string_buffer(data[:-7] + b"\0" * 7, count)
        right(self, ctypes.addressof(broken), count, *rest)
    else:
        right(self, sendbuf, count, *rest)


def rehearse(nccl, operation, dtype, size):
    """What each worker was told of one collective over everybody."""
    ends, _, _ = connect(nccl)
    told = {}

    def one(name):
        trial = selftest.collective_selftest(
            *(ends[name], "everybody", operation, dtype),
            size_bytes=3 * size * dtype.itemsize,
            index=EVERYBODY.index(name),
            ranks=3,
            device="cpu",
        )
        trial.start()
        try:
            trial.check(name)
        except ConnectError as error:
            told[name] = str(error)

    run_all(one, EVERYBODY)
    return told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint8])
@pytest.mark.parametrize("operation", ["all-reduce", "reduce-scatter", "all-gather"])
def test_a_collective_of_a_step_is_tried_with_values_of_its_type_and_size(operation, dtype):
    nccl = FakeNccl()
    assert rehearse(nccl, operation, dtype, 7777) == {} and nccl.misfits == []
    method = {"all-reduce": "allReduce", "reduce-scatter": "reduceScatter", "all-gather": "allGather"}[
        operation
    ]
    numbers = 7777 * (3 if operation == "all-reduce" else 1) * (2 if dtype.is_complex else 1)
    count = numbers * (dtype.itemsize // (2 if dtype.is_complex else 1) if operation == "all-gather" else 1)
    assert [call[4] for call in nccl.calls if call[0] == method][-3:] == [count] * 3


@pytest.mark.parametrize(
    ("operation", "method"),
    [("all-reduce", "allReduce"), ("reduce-scatter", "reduceScatter"), ("all-gather", "allGather")],
)
def test_a_collective_of_a_step_that_gives_wrong_values_is_named(operation, method):
    def spoil(right, self, sendbuf, recvbuf, count, *rest):
        right(self, sendbuf, recvbuf, count, *rest)
        if count > 1 << 20:  # larger than any trial of a new connection
            ctypes.memset(recvbuf + 4096, 0, 64)

    told = rehearse(_spoiled(method, spoil), operation, torch.float32, (1 << 20) + 5)
    assert len(told) == 3 and f"the {operation} over everybody of" in told["m0/1"]
    assert "gave 0.0 at 1024" in told["m0/1"]


def _only_own(right, self, sendbuf, recvbuf, count, *rest):
    right(self, sendbuf, recvbuf, count, *rest)
    ctypes.memset(recvbuf, 0, count)


def _as_rank_zero(right, self, sendbuf, recvbuf, *rest):
    rank, self.rank = self.rank, self.rank
    right(self, sendbuf, recvbuf, *rest)
    if rank:
        ctypes.memset(recvbuf, 1, 4)


@pytest.mark.parametrize(
    ("method", "spoil", "said"),
    [
        ("allReduce", _add_nothing, "the all-reduce over"),
        ("allGather", _only_own, "the all-gather over"),
        ("reduceScatter", _as_rank_zero, "the reduce-scatter over"),
        ("send", _drop_the_end, "what goes from m0/0 to m1/0 in transfers/m0>m1 of 131075 uint8 gave 0 at"),
    ],
)
def test_a_wrong_value_is_told_with_the_connection_and_where_it_is(method, spoil, said):
    _, told, _ = connect(_spoiled(method, spoil))
    assert any(said in one and "is right; the GPUs or NCCL move wrong values" in one for one in told.values())


def test_a_connection_to_the_wrong_worker_is_found():
    """Two communicators swapped: each has the right number of ranks."""
    nccl = FakeNccl()
    right, turns = nccl.NcclCommunicator.recv, itertools.count()

    def from_another(self, recvbuf, count, datatype, peer, stream):
        if self.ranks == 3 and self.rank == 2 and count > 1000:
            peer = 1 - peer if next(turns) < 2 else peer
        right(self, recvbuf, count, datatype, peer, stream)

    nccl.NcclCommunicator.recv = from_another
    _, told, _ = connect(nccl)
    assert "m1/0: what goes from m0/" in told["m1/0"]
