"""The NCCL transport against a recording fake: who connects when, on which communicator and stream."""

import sys
import threading
import types

import pytest
import torch
from fake_nccl import VERSION, FakeNccl

from worker.transport import ConnectError, PeerLostError, Topology
from worker.transport.nccl import NcclSettings, NcclTransport, check_versions
from worker.transport.rendezvous import host_store

MESHES = ("m0", "m1", "m2", "m3")
LANES = tuple(sorted((a, b) for a in MESHES for b in MESHES if a != b))
GROUPS = {"meshes/0": (0, 1, 2, 3), "tied/w/0": (0, 3)}


def make(nccl, store, mesh, **options):
    return NcclTransport(
        Topology(MESHES),
        mesh=mesh,
        worker=0,
        store_host="127.0.0.1",
        store_port=store.port,
        nccl=nccl,
        torch_version=(2, 28, 9),
        stream_pointer=lambda: 77,
        **options,
    )


def run_all(function, names=MESHES):
    """function(mesh) in a thread a mesh; raises the first error."""
    errors = []

    def call(mesh):
        try:
            function(mesh)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(mesh,), name=mesh) for mesh in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def connected():
    nccl, store = FakeNccl(), host_store("127.0.0.1")
    transports = {mesh: make(nccl, store, mesh) for mesh in MESHES}
    run_all(lambda mesh: transports[mesh].connect(GROUPS, LANES))
    return nccl, transports


def test_every_pair_connects_in_one_agreed_order_and_is_used_once_before_the_first_step(connected):
    nccl, _ = connected
    order = {}
    for mesh in MESHES:
        mine = [call[2] for call in nccl.calls if call[0] == "init" and call[1] == mesh]
        assert len(mine) == 6 + (2 if mesh in ("m0", "m3") else 1)
        order[mesh] = mine
        for identity in mine:
            used = [
                call for call in nccl.calls if call[1] == mesh and call[2] == identity and call[0] != "init"
            ]
            assert len(used) == 1
    for a in MESHES:
        for b in MESHES:
            both = set(order[a]) & set(order[b])
            assert [i for i in order[a] if i in both] == [i for i in order[b] if i in both]


def test_each_direction_has_its_own_communicator_and_runs_on_the_lanes_stream(connected):
    nccl, transports = connected
    there, back = torch.arange(6.0), torch.zeros(6)
    del nccl.calls[:]
    run_all(
        lambda mesh: (
            transports["m0"].send("m1", 0, there) if mesh == "m0" else transports["m1"].receive("m0", 0, back)
        ),
        ("m0", "m1"),
    )
    assert torch.equal(there, back)
    run_all(
        lambda mesh: (
            transports["m1"].send("m0", 0, there) if mesh == "m1" else transports["m0"].receive("m1", 0, back)
        ),
        ("m0", "m1"),
    )
    identities = [call[2] for call in nccl.calls]
    assert len(identities) == 4 and len(set(identities)) == 2
    assert {call[3] for call in nccl.calls} == {77}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.int64,
        torch.int16,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_tensors_of_every_dtype_arrive_whole(connected, dtype):
    _, transports = connected
    sent, got = torch.arange(8).to(dtype), torch.zeros(8, dtype=dtype)
    transports["m0"].send("m3", 0, sent)
    transports["m3"].receive("m0", 0, got)
    assert torch.equal(sent.view(torch.uint8), got.view(torch.uint8)) and got.view(torch.uint8).any()


def test_a_sum_tells_nccl_how_many_numbers_of_which_type(connected):
    nccl, transports = connected
    del nccl.calls[:]
    for tensor in (torch.ones(5), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64)):
        transports["m0"].all_reduce("meshes/0", tensor)
    sums = [call[4:] for call in nccl.calls if call[0] == "allReduce"]
    assert sums == [(5, 7), (3, 9), (4, 7)]  # ncclFloat32 is 7, ncclBfloat16 9
    with pytest.raises(TypeError, match=r"cannot sum tensors of torch\.bool"):
        transports["m0"].all_reduce("meshes/0", torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize("identities", ["bytes", "signed", "unsigned"])
def test_the_identity_of_a_communicator_arrives_as_nccl_made_it(identities):
    nccl, store = FakeNccl(identities=identities), host_store("127.0.0.1")
    run_all(lambda mesh: make(nccl, store, mesh).connect({}, LANES))
    assert len({identity for _, _, identity, _ in nccl.calls}) == len(LANES)


def test_abort_ends_every_communicator_and_later_calls_name_the_peer(connected):
    nccl, transports = connected
    transports["m1"].abort()
    ended = [call for call in nccl.calls if call[0] == "abort"]
    assert len(ended) == 6 + 1
    with pytest.raises(PeerLostError, match="sending to m2 failed"):
        transports["m1"].send("m2", 0, torch.zeros(1))


def test_an_error_that_nccl_notices_by_itself_is_told(connected):
    nccl, transports = connected
    assert transports["m0"].failure() is None
    nccl.broken = RuntimeError("NCCL_ERROR_REMOTE_ERROR: remote process exited")
    with pytest.raises(PeerLostError, match="remote process exited"):
        transports["m0"].failure()


def test_a_peer_that_is_not_there_is_named_before_any_communicator_is_made():
    nccl, store = FakeNccl(), host_store("127.0.0.1")
    with pytest.raises(ConnectError, match=r"m1/0, m2/0, m3/0 did not connect within 0\.5 s"):
        make(nccl, store, "m0", connect_timeout_s=0.5).connect(GROUPS, LANES)
    assert nccl.calls == []


@pytest.mark.parametrize(("status", "meaning"), [(6, "ncclRemoteError"), (7, "ncclInProgress")])
def test_a_status_that_cupy_has_no_name_for_is_told_with_its_meaning(connected, status, meaning):
    nccl, transports = connected
    nccl.broken = KeyError(status)  # cupy's table of names ends at 6, before cupy 14 at 5
    with pytest.raises(PeerLostError, match=f"NCCL status {status}, {meaning}"):
        transports["m0"].failure()


def test_a_cupy_without_an_nccl_library_is_named(monkeypatch):
    """cupy.cuda.nccl imports without one, and has nothing but `available`."""
    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl = types.SimpleNamespace(available=False)
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    with pytest.raises(ConnectError, match="cupy finds no NCCL library"):
        NcclTransport(Topology(MESHES), mesh="m0", worker=0, store_host="127.0.0.1", store_port=1)


def test_two_different_nccls_in_one_process_are_refused_with_the_pair_that_fits():
    check_versions((2, 28, 9), VERSION)
    with pytest.raises(
        ConnectError, match=r"torch was built for NCCL 2\.27\.5, but cupy loads NCCL 2\.28\.9"
    ):
        check_versions((2, 27, 5), VERSION)


def test_settings_limit_the_width_of_nccl_but_not_against_the_users_word():
    environment = {"NCCL_MAX_CTAS": "4"}
    NcclSettings(max_p2p_channels=2, max_ctas=8).apply(environment)
    assert environment == {"NCCL_MAX_CTAS": "4", "NCCL_MAX_P2P_NCHANNELS": "2"}


def test_cupy_that_is_missing_is_named_with_the_extra_to_install():
    pytest.importorskip("torch")
    try:
        import cupy  # noqa: F401

        pytest.skip("cupy is installed")
    except ImportError:
        pass
    with pytest.raises(ConnectError, match=r"slotline\[cuda12\]"):
        NcclTransport(Topology(MESHES), mesh="m0", worker=0, store_host="127.0.0.1", store_port=1)
