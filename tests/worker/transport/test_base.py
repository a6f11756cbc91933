"""What transports move is values, not whatever lies in memory: sums of other strides, lazy conjugates."""

from __future__ import annotations

import pytest
import torch

from tests.worker.at_once import at_once
from tests.worker.transport.fake_nccl import FakeNccl
from worker.transport.base import Topology
from worker.transport.gloo import GlooTransport
from worker.transport.nccl import NcclLibrary, NcclTransport
from worker.transport.rendezvous import host_store

MESHES = ("m0", "m1")


@pytest.fixture(params=["gloo", "nccl"])
def pair(request, monkeypatch):
    """Two transports, connected; with the name of their group."""
    monkeypatch.setattr("worker.transport.selftest.LONG", 67)
    store, nccl = host_store("127.0.0.1"), FakeNccl()

    def make(mesh):
        where = {"mesh": mesh, "worker": 0, "store": ("127.0.0.1", store.port)}
        if request.param == "gloo":
            return GlooTransport(Topology(MESHES), host="127.0.0.1", **where)
        library = NcclLibrary(nccl, (2, 28, 9), lambda: 7)
        return NcclTransport(Topology(MESHES), library=library, **where)

    made = {mesh: make(mesh) for mesh in MESHES}
    lanes = (("m0", "m1"), ("m1", "m0"))
    at_once(made, lambda mesh, transport: transport.connect({"all": (0, 1), "alone": (0,)}, lanes))
    yield made
    for transport in made.values():
        transport.abort()
        transport.close()


def summed(pair, of):
    """What each has after a sum of its own."""
    found = {mesh: of(mesh) for mesh in MESHES}
    at_once(pair, lambda mesh, transport: transport.all_reduce("all", found[mesh]))
    return found


VALUES = torch.arange(24.0).view(2, 3, 4)


@pytest.mark.parametrize(
    "lying",
    [
        lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    ],
    ids=["turned", "with gaps", "channels last"],
)
def test_what_is_summed_are_elements_however_they_lie(pair, lying):
    """A compiled backward's gradient of words lies as its product made it, the one of their lookup in rows."""
    found = summed(pair, lambda mesh: lying(VALUES.clone()) if mesh == "m0" else 100 * VALUES)
    for tensor in found.values():
        assert torch.equal(tensor, 101 * VALUES)
    assert not found["m0"].is_contiguous()


def test_complex_numbers_are_summed_conjugated_or_not(pair):
    z = torch.complex(VALUES, -VALUES)
    found = summed(pair, lambda mesh: z.clone().conj() if mesh == "m0" else z.clone())
    for mesh, tensor in found.items():
        assert torch.equal(tensor.resolve_conj(), torch.complex(2 * VALUES, 0 * VALUES)), mesh


def test_what_was_started_and_what_has_no_elements_is_summed_too(pair):
    before, ends = VALUES[..., 0].t().clone(), {}
    flat = {mesh: VALUES.clone()[..., 0].t() for mesh in MESHES}
    at_once(pair, lambda m, t: ends.update({m: t.start_all_reduce("all", flat[m])}))
    at_once(pair, lambda m, t: ends[m] and ends[m]())
    assert all(torch.equal(one, 2 * before) for one in flat.values())
    assert all(one.numel() == 0 for one in summed(pair, lambda mesh: torch.zeros(0, 3)).values())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float16, torch.bfloat16])
def test_bytes_and_halves_are_summed(pair, dtype):
    found = summed(pair, lambda mesh: torch.full((5,), 3 if mesh == "m0" else 4, dtype=dtype))
    assert all(torch.equal(one, torch.full((5,), 7, dtype=dtype)) for one in found.values())


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (VALUES.transpose(0, 1), "is not contiguous"),
        (torch.complex(VALUES, VALUES).conj(), "is lazily conjugated"),
        (torch._neg_view(VALUES), "is lazily conjugated or negated"),
    ],
    ids=["turned", "conjugated", "negated"],
)
def test_what_is_no_memory_in_order_is_not_moved(pair, bad, said):
    """It arrived as what lay there."""
    one = pair["m0"]
    good = torch.empty(2 * bad.numel(), dtype=bad.dtype)
    calls = [
        lambda: one.send("m1", 0, bad),
        lambda: one.receive("m1", 0, bad),
        lambda: one.start_all_gather("all", good, bad),
        lambda: one.start_all_gather("all", bad, good[: bad.numel() // 2]),
        lambda: one.start_reduce_scatter("all", bad, good),
    ]
    if isinstance(one, NcclTransport):
        one._ranks["all"] = (0, 1)
        calls.append(lambda: one.exchange("all", [("m1/0", bad)], []))
    for call in calls:
        with pytest.raises(ValueError, match=said):
            call()


def test_a_peer_without_a_connection_is_named_as_what_it_is(pair):
    """Over NCCL it was an unknown status of the network."""
    if not isinstance(pair["m0"], NcclTransport):
        pytest.skip("gloo's words are Python's")
    with pytest.raises(ValueError, match="no NCCL connection to send to 'm7' was made; there are: m1"):
        pair["m0"].send("m7", 0, torch.zeros(1))
    with pytest.raises(ValueError, match="no NCCL connection in group 'nobody' was made; there are: all"):
        pair["m0"].start_all_gather("nobody", torch.zeros(2), torch.zeros(1))


def test_a_sum_over_nobody_is_none(pair):
    """It was left out without a word: every worker went on with its own part."""
    with pytest.raises(ValueError, match="connection in group 'workers/m9' was made; there are: all"):
        pair["m0"].all_reduce("workers/m9", torch.ones(2))
    own = torch.ones(2)
    pair["m0"].all_reduce("alone", own)
    assert own.tolist() == [1, 1], "the sum over a group of one"
