"""The same-process transport: a rendezvous, by tag, that ends when aborted."""

import threading
import time

import pytest
import torch

from worker.transport.base import ConnectError, PeerLostError, Topology
from worker.transport.local import LocalTransport


@pytest.fixture
def pair():
    ends = LocalTransport.group(Topology(("a", "b")), connect_timeout_s=0.5)
    return ends["a", 0], ends["b", 0]


def in_background(function, *arguments):
    caught = []

    def call():
        try:
            function(*arguments)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, caught


def test_a_send_ends_when_the_receive_has_the_tensor(pair):
    a, b = pair
    thread, _ = in_background(a.send("b", 1, torch.ones(3)))
    time.sleep(0.05)
    assert thread.is_alive()
    out = torch.zeros(3)
    b.receive("a", 1, out)()
    thread.join(5)
    assert not thread.is_alive() and torch.equal(out, torch.ones(3))


def test_transfers_are_told_apart_by_tag_whatever_their_order(pair):
    a, b = pair
    threads = [in_background(a.send("b", tag, torch.full((2,), float(tag))))[0] for tag in (1, 2, 3)]
    for tag in (3, 1, 2):
        out = torch.zeros(2)
        b.receive("a", tag, out)()
        assert out[0] == tag
    for thread in threads:
        thread.join(5)


def test_a_lane_of_meshes_and_one_of_their_workers_have_tags_of_their_own(pair):
    """As connections of gloo do: a resharding's message is no tensor of a pair."""
    a, b = pair
    ends = [a.send("b", 7, torch.ones(3)), a.send("b/0", 7, torch.full((2,), 2.0))]
    outs = torch.zeros(2), torch.zeros(3)
    b.receive("a/0", 7, outs[0])()
    b.receive("a", 7, outs[1])()
    for end in ends:
        end()
    assert [out.tolist() for out in outs] == [[2.0, 2.0], [1.0, 1.0, 1.0]]


def test_abort_wakes_whoever_waits(pair):
    a, b = pair
    threads = [in_background(a.send("b", 1, torch.ones(1))), in_background(b.receive("a", 2, torch.ones(1)))]
    time.sleep(0.05)
    b.abort()
    for thread, caught in threads:
        thread.join(5)
        assert not thread.is_alive() and isinstance(caught[0], PeerLostError)


def test_a_missing_peer_is_named(pair):
    with pytest.raises(ConnectError, match=r"b/0 did not connect within 0\.5 s"):
        pair[0].connect({}, ())


def test_a_topology_refuses_two_meshes_of_one_name():
    with pytest.raises(ValueError, match="mesh names repeat"):
        Topology(("a", "a"))
