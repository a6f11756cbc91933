"""What workers gather is every bit of every part, in half the bytes of a sum."""

from __future__ import annotations

import threading

import pytest
import torch

from worker.parallel.collectives import Collectives
from worker.parallel.tensor.graph_collectives import TensorGroup
from worker.parallel.tensor.placement import Split
from worker.transport.base import Topology
from worker.transport.gloo import GlooTransport
from worker.transport.rendezvous import host_store


def connected(workers):
    """Ends of one mesh over gloo, a thread each."""
    store = host_store("127.0.0.1")
    where = {"store": ("127.0.0.1", store.port), "host": "127.0.0.1"}
    ends = [GlooTransport(Topology(("m0",), workers), mesh="m0", worker=w, **where) for w in range(workers)]
    each(ends, lambda _, end: end.connect({"g": tuple(range(workers))}, ()))
    return store, ends


def each(ends, run):
    found, errors = [None] * len(ends), []

    def start(worker, end):
        try:
            found[worker] = run(worker, end)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=item) for item in enumerate(ends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    return found


@pytest.mark.parametrize("workers", [2, 3])
def test_gathered_parts_are_the_whole_bit_for_bit(workers):
    """Also zeros with a sign, infinities and every NaN, which a sum with zeros changes; in one or several parts."""
    store, ends = connected(workers)
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (2, 6 * workers, 3), generator=draw, dtype=torch.int32)
    whole = bits.view(torch.float32)
    whole[0, :, 0] = -0.0
    cases = [
        (whole, Split(1, (6 * workers,))),
        (whole, Split(1, (2 * workers, 4 * workers))),
        (whole.transpose(0, 1), Split(0, (6 * workers,))),
        (whole.bfloat16(), Split(1, (workers,) * 6)),
        (bits.long(), Split(1, (6 * workers,))),
    ]

    def gathered(worker, end):
        collectives = Collectives(end, {"g": tuple(range(workers))})
        group = TensorGroup(worker, workers, collectives.in_stage("g"))
        return [group.gather(split.pick(one, worker, workers), split) for one, split in cases]

    for found in each(ends, gathered):
        for (one, _), got in zip(cases, found, strict=True):
            assert got.dtype == one.dtype and got.is_contiguous()
            assert torch.equal(got.view(torch.uint8), one.contiguous().view(torch.uint8))
    each(ends, lambda _, end: end.close())
    del store


def test_a_gather_sends_every_worker_only_the_parts_of_others():
    sent = []

    class Counts:
        def all_reduce(self, tensor):
            raise AssertionError("it would move twice the bytes")

        def all_gather(self, out, tensor):
            sent.append((tensor.nbytes, out.nbytes))
            out.copy_(tensor.expand_as(out))

    group = TensorGroup(0, 4, Counts())
    group.gather(torch.ones(3, 2), Split(1, (8,)))
    assert sent == [(24, 96)]
