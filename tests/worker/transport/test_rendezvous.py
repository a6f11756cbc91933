"""The store of an attempt: on this machine alone where that is enough, and deaf to what strangers say."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from worker.transport.base import Failure, Topology
from worker.transport.rendezvous import (
    SECRET_VARIABLE,
    STORE_TIMEOUT,
    Rendezvous,
    RendezvousTransport,
    announce_loss,
    host_store,
    in_rounds,
    serve_rendezvous,
)

TWO = Topology(("a", "b"))


def listens_on(port: int) -> set[str]:
    """Addresses in /proc's hexadecimal of what listens on the port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(address)
    return found


def join(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, secrets: tuple[str, str], prefix: str = "p"
) -> list[Rendezvous]:
    workers = []
    for rank, secret in enumerate(secrets):
        monkeypatch.setenv(SECRET_VARIABLE, secret)
        worker = Rendezvous(TWO, rank=rank, host="127.0.0.1", port=store.port, timeout_s=10, prefix=prefix)
        worker.store = worker._open()
        worker.store.set(f"joined/{rank}", "1")
        workers.append(worker)
    for worker in workers:
        worker.join()
    return workers


MESHES = [f"m{k}" for k in range(8)]


@given(
    st.sets(
        st.tuples(st.sampled_from(MESHES), st.sampled_from(MESHES)).filter(lambda lane: lane[0] != lane[1])
    )
)
def test_lanes_connect_in_few_rounds_in_each_of_which_a_mesh_has_one(drawn):
    """The seconds that an ideal machine takes: a mesh makes its own one after the other, both ends at once."""
    lanes = sorted(drawn)
    ordered = in_rounds(lanes)
    assert sorted(ordered) == lanes
    degree = Counter(mesh for lane in lanes for mesh in lane)
    assert connecting_s(ordered) <= max(0, 2 * max(degree.values(), default=0) - 1)


def test_a_chain_of_meshes_connects_in_as_many_rounds_as_a_mesh_has_lanes():
    chain = sorted(lane for a, b in itertools.pairwise(MESHES) for lane in ((a, b), (b, a)))
    assert connecting_s(in_rounds(chain)) == 4 and connecting_s(chain) == 14


def test_a_worker_makes_its_connections_in_that_order():
    chain = sorted(lane for a, b in itertools.pairwise(MESHES) for lane in ((a, b), (b, a)))
    place = {"worker": 0, "store": ("127.0.0.1", 1), "join_timeout_s": 1.0}
    end = RendezvousTransport(Topology(tuple(MESHES)), mesh="m4", **place)
    own = [(source, target) for source, target, *_ in end._own_lanes(tuple(chain))]
    assert own == [lane for lane in in_rounds(chain) if "m4" in lane] != [x for x in chain if "m4" in x]


def connecting_s(lanes: list[tuple[str, str]]) -> int:
    """When the last of them stands, each takes a second in which both ends are busy."""
    free_s: Counter[str] = Counter()
    for lane in lanes:
        end_s = max(free_s[mesh] for mesh in lane) + 1
        free_s.update({mesh: end_s - free_s[mesh] for mesh in lane})
    return max(free_s.values(), default=0)


def test_a_store_of_workers_on_one_machine_listens_there_alone():
    store, (host, port) = serve_rendezvous("10.0.0.1", ["10.0.0.1", "10.0.0.1"])
    assert (host, port) == ("127.0.0.1", store.port)
    assert listens_on(port) == {"0100007F"}
    other = next(
        (a[4][0] for a in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)), "127.0.0.1"
    )
    if not other.startswith("127."):
        with pytest.raises(OSError):
            socket.create_connection((other, port), timeout=2)


def test_a_store_of_workers_on_several_machines_is_reached_by_the_drivers_address():
    store, place = serve_rendezvous("10.0.0.1", ["10.0.0.1", "10.0.0.2"])
    assert place == ("10.0.0.1", store.port)
    assert listens_on(store.port) == {"00000000"}


def test_workers_of_one_attempt_hear_each_other(monkeypatch: pytest.MonkeyPatch):
    store = host_store("127.0.0.1")
    one, two = join(store, monkeypatch, ("secret", "secret"))
    one.publish("1F0")
    two.store.wait(["progress/0"])
    assert two.progress(0).text == "1F0"
    assert two.failure() is None
    one.announce("out of memory")
    assert two.failure().reason == "out of memory" and two.failure().origin == TWO.name(0)


def test_workers_hear_of_their_driver_that_one_is_lost(monkeypatch: pytest.MonkeyPatch):
    store = host_store("127.0.0.1")
    one, two = join(store, monkeypatch, ("secret", "secret"), prefix="")
    monkeypatch.setenv(SECRET_VARIABLE, "another")
    announce_loss(store, "worker 0 of mesh m1")
    assert one.failure() is None
    monkeypatch.setenv(SECRET_VARIABLE, "secret")
    announce_loss(store, "worker 0 of mesh m1")
    assert one.failure() == two.failure() == Failure("the driver", "worker 0 of mesh m1 is gone")
    announce_loss(store, "worker 0 of mesh m0")
    assert two.failure().reason == "worker 0 of mesh m1 is gone", "the first failure stays"


def test_a_stranger_who_reaches_the_store_ends_no_attempt(monkeypatch: pytest.MonkeyPatch):
    store = host_store("127.0.0.1")
    one, two = join(store, monkeypatch, ("secret", "secret"))
    stranger = dist.TCPStore(
        "127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT
    )
    one.publish("1F0")
    stranger.wait(["p/progress/0"])  # it sees what there is
    word = json.dumps(["a", "end now"])
    for begin in ("p/", ""):
        stranger.set(f"{begin}failure", word)
        stranger.compare_set(f"{begin}failure", "", word)
        stranger.set(f"{begin}progress/1", json.dumps(["stuck", time.time()]))
        stranger.set(f"{begin}progress/0", stranger.get("p/progress/0"))
    stranger.set("p/progress/1", stranger.get("p/progress/0"))  # another's word under one's own name
    stranger.get("p/progress/1")  # all of this has arrived
    assert one.failure() is None and two.failure() is None
    assert one.progress(1) is None and two.progress(0).text == "1F0"
    with_another_secret = join(store, monkeypatch, ("wrong", "wrong"))[0]
    with_another_secret.announce("end now")
    assert two.failure() is None
    two.announce("a true one")
    assert one.failure().reason == "a true one"
