"""The NCCL transport against a recording fake: who connects when, on which communicator and stream."""

import sys
import threading
import time
import tomllib
import types
from pathlib import Path

import pytest
import torch

from tests.polling import until
from tests.worker.transport.fake_nccl import VERSION, FakeNccl
from worker.transport.base import ConnectError, PeerLostError, Topology
from worker.transport.nccl import NcclLibrary, NcclSettings, NcclTransport, check_nccl_versions
from worker.transport.rendezvous import host_store

MESHES = ("m0", "m1", "m2", "m3")
LANES = tuple(sorted((a, b) for a in MESHES for b in MESHES if a != b))
GROUPS = {"meshes/0": (0, 1, 2, 3), "tied/w/0": (0, 3)}


def make(nccl, store, mesh, **options):
    return NcclTransport(
        Topology(MESHES),
        mesh=mesh,
        worker=0,
        store=("127.0.0.1", store.port),
        library=NcclLibrary(nccl, (2, 28, 9), lambda: 77),
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
            assert used
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
    given = (torch.ones(5), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64) * 1j)
    found = {}

    def sum_all(mesh):
        found[mesh] = [tensor.clone() for tensor in given]
        for tensor in found[mesh]:
            transports[mesh].all_reduce("meshes/0", tensor)

    run_all(sum_all)
    sums = [call[4:] for call in nccl.calls if call[0] == "allReduce" and call[1] == "m0"]
    assert sums == [(5, 7), (3, 9), (4, 7)]  # ncclFloat32 is 7, ncclBfloat16 9
    for tensors in found.values():
        assert all(torch.equal(tensor, 4 * one) for tensor, one in zip(tensors, given, strict=True))
    with pytest.raises(TypeError, match=r"cannot sum tensors of torch\.bool"):
        transports["m0"].all_reduce("meshes/0", torch.ones(2, dtype=torch.bool))


def test_parts_tell_nccl_how_much_each_worker_has_of_them(connected):
    """A reduce-scatter counts the numbers of a part, an all-gather its bytes."""
    nccl, transports = connected
    del nccl.calls[:]

    def share(mesh):
        own, part, whole = MESHES.index(mesh), torch.empty(3), torch.empty(12)
        transports[mesh].start_reduce_scatter("meshes/0", part, torch.arange(12.0) * (own + 1))
        assert torch.equal(part, torch.arange(12.0)[3 * own : 3 * own + 3] * 10)
        transports[mesh].start_all_gather("meshes/0", whole, part)
        assert torch.equal(whole, torch.arange(12.0) * 10)

    run_all(share)
    mine = [(call[0], *call[4:]) for call in nccl.calls if call[1] == "m0"]
    assert mine == [("reduceScatter", 3, 7), ("allGather", 12, 1)]
    with pytest.raises(TypeError, match=r"cannot sum tensors of torch\.bool"):
        transports["m0"].start_reduce_scatter(
            "meshes/0", torch.ones(1, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
        )


def test_the_identity_of_a_communicator_arrives_as_nccl_made_it():
    nccl, store = FakeNccl(), host_store("127.0.0.1")
    run_all(lambda mesh: make(nccl, store, mesh).connect({}, LANES))
    assert len({identity for what, _, identity, *_ in nccl.calls if what == "init"}) == len(LANES)


def test_a_cupy_before_14_is_refused_by_what_it_gives():
    nccl, store = FakeNccl(), host_store("127.0.0.1")
    nccl.get_unique_id = lambda: (1,) * 128
    for rank in range(1, len(MESHES)):
        store.set(f"joined/{rank}", "1")  # the others are there; the first worker makes the first identity
    with pytest.raises(ConnectError, match="identity as tuple, not bytes: install cupy 14"):
        make(nccl, store, "m0").connect({}, LANES)


def test_what_installs_cupy_asks_for_14():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    assert "cupy-cuda12x>=14" in extras["cuda12"] and "cupy-cuda13x>=14" in extras["cuda13"]


def test_abort_ends_every_communicator_and_later_calls_name_the_peer(connected):
    nccl, transports = connected
    transports["m1"].abort()
    ended = [call for call in nccl.calls if call[0] == "abort"]
    assert len(ended) == 6 + 1
    with pytest.raises(PeerLostError, match="sending to m2 failed"):
        transports["m1"].send("m2", 0, torch.zeros(1))
    transports["m1"].abort()
    transports["m1"].close()
    assert [call for call in nccl.calls if call[0] in ("abort", "destroy")] == ended, (
        "once, however often told"
    )


def test_the_last_message_of_a_mesh_that_closes_first_arrives():
    nccl, store = FakeNccl(), host_store("127.0.0.1")
    transports = {mesh: make(nccl, store, mesh) for mesh in MESHES}
    run_all(lambda mesh: transports[mesh].connect({}, LANES))
    nccl.delay_s = 0.3
    got = torch.zeros(4)

    def last_step(mesh):
        if mesh == "m0":
            transports["m0"].send("m1", 0, torch.arange(4.0))
            transports["m0"].close()
        else:
            transports["m1"].receive("m0", 0, got)

    receiver = threading.Thread(target=last_step, args=("m1",), daemon=True)
    receiver.start()
    last_step("m0")
    receiver.join(5.0)
    assert got.tolist() == [0.0, 1.0, 2.0, 3.0]
    transports["m1"].close()
    assert {call[0] for call in nccl.calls[-8:]} <= {"destroy", "group", "recv"}


def waiting_receives(transport, peers):
    """Receives of `transport` that spin on the device, each for a peer that never sends; what each raised."""
    raised = {}

    def receive(peer):
        try:
            transport.receive(peer, 0, torch.zeros(1))
        except PeerLostError as error:
            raised[peer] = error

    threads = [threading.Thread(target=receive, args=(peer,), daemon=True) for peer in peers]
    for thread in threads:
        thread.start()
    return threads, raised


def test_an_abort_ends_receives_of_several_communicators_that_all_spin(connected):
    """Freeing one communicator waits for the device, where the receive of another spins: one after the other
    would wait for ever."""
    nccl, transports = connected
    threads, raised = waiting_receives(transports["m0"], ["m1", "m2", "m3"])
    until(lambda: len(nccl.spinning.get("m0", ())) == 3)
    ended = threading.Thread(target=transports["m0"].abort, daemon=True)
    ended.start()
    ended.join(10.0)
    for thread in threads:
        thread.join(5.0)
    assert raised.keys() == {"m1", "m2", "m3"}
    assert not ended.is_alive() and not transports["m0"]._ender.is_alive()
    (group,) = [call for call in nccl.calls if call[0] == "group"]
    assert group[2] == 6 + 2, "all communicators of the worker end in one group"


def test_an_abort_that_never_returns_holds_up_nobody(monkeypatch):
    nccl, store = FakeNccl(), host_store("127.0.0.1")
    transports = {mesh: make(nccl, store, mesh) for mesh in MESHES}
    run_all(lambda mesh: transports[mesh].connect({}, LANES))
    monkeypatch.setattr("worker.transport.nccl._ABORT_S", 0.3)
    nccl.stuck.set()
    try:
        callers = [threading.Thread(target=transports["m0"].abort, daemon=True) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60.0)
        assert nccl.stuck.is_set() and not any(caller.is_alive() for caller in callers)
        transports["m0"].announce("m0 stalls")
        assert transports["m1"].failure().reason == "m0 stalls"
        with pytest.raises(PeerLostError, match="ended"):
            transports["m0"].send("m1", 0, torch.zeros(1))
    finally:
        nccl.stuck.clear()


def test_a_call_that_returns_ends_before_its_communicator_is_freed(connected):
    _, transports = connected
    inside, go_on, freed = threading.Event(), threading.Event(), []
    communicator = transports["m0"]._sends["m1"]
    real = communicator.send

    def slow(*arguments):
        inside.set()
        go_on.wait(0.2)
        freed.append(communicator.ending)
        real(*arguments)

    communicator.send = slow
    sender = threading.Thread(target=lambda: transports["m0"].send("m1", 0, torch.zeros(1)), daemon=True)
    sender.start()
    inside.wait(5.0)
    transports["m0"].abort()
    sender.join(5.0)
    assert freed == [None] and communicator.ending == "abort"


@pytest.mark.slow
def test_a_connection_that_fails_half_way_is_aborted_not_delivered(monkeypatch):
    nccl, store = FakeNccl(), host_store("127.0.0.1")
    transports = {mesh: make(nccl, store, mesh, connect_timeout_s=3.0) for mesh in MESHES}

    def connect(mesh):
        if mesh == "m2":
            transports[mesh]._make = lambda *arguments: (_ for _ in ()).throw(ConnectError("m2 is ill"))
        nccl.timeout_s = 1.0
        transports[mesh].connect({}, LANES)

    with pytest.raises(ConnectError):
        run_all(connect)
    assert {call[0] for call in nccl.calls} <= {"init", "send", "recv", "group", "abort"}


def test_an_error_that_nccl_notices_by_itself_is_told(connected):
    nccl, transports = connected
    assert transports["m0"].failure() is None
    nccl.broken = RuntimeError("NCCL_ERROR_REMOTE_ERROR: remote process exited")
    with pytest.raises(PeerLostError, match="remote process exited"):
        transports["m0"].failure()


def test_a_worker_that_loads_longer_than_connecting_may_take_is_waited_for():
    nccl, store = FakeNccl(connect_timeout_s=0.5), host_store("127.0.0.1")
    transports = {
        mesh: make(nccl, store, mesh, connect_timeout_s=0.5, join_timeout_s=60.0) for mesh in MESHES
    }

    def connect(mesh):
        if mesh == "m3":
            time.sleep(1.0)  # twice as long as connecting may take
        transports[mesh].connect(GROUPS, LANES)

    run_all(connect)
    assert sorted(transports["m0"]._sends) == ["m1", "m2", "m3"]


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
        NcclTransport(Topology(MESHES), mesh="m0", worker=0, store=("127.0.0.1", 1))


def test_two_different_nccls_in_one_process_are_refused_with_the_pair_that_fits():
    check_nccl_versions((2, 28, 9), VERSION)
    with pytest.raises(
        ConnectError, match=r"torch was built for NCCL 2\.27\.5, but cupy loads NCCL 2\.28\.9"
    ):
        check_nccl_versions((2, 27, 5), VERSION)


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
        NcclTransport(Topology(MESHES), mesh="m0", worker=0, store=("127.0.0.1", 1))
