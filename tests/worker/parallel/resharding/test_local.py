"""Reshardings between threads of one process: any number of workers, and what happens when one fails."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from service.scheduler.resharding.layout import Links, Tensor, mesh_layout
from service.scheduler.resharding.resharding import (
    plan_gather_then_send,
    plan_resharding,
    plan_send_and_receive,
)
from tests.service.scheduler.resharding.cases import LITERATURE, random_case
from tests.tiers import some_by_day
from tests.worker.parallel.resharding.cases import part_of, trial
from worker.contract.resharding import ReshardingPlan
from worker.parallel.resharding import Resharder
from worker.transport.base import EngineError, PeerLostError, Topology
from worker.transport.local import LocalTransport


def run_everywhere(plan, source, target, seed: int, reshardings: int = 1) -> list[bool]:
    """Every worker in a thread of its own; what `trial` says of each."""
    names = [worker.name for worker in plan.workers]
    ends = LocalTransport.group(Topology(tuple(names)))
    data, layouts = plan.to_json(), {"source": source, "target": target}

    def run(name: str) -> bool:
        transport = ends[name, 0]
        transport.connect({}, ReshardingPlan.from_json(data).lanes())
        tags = [k * len(plan.messages) for k in range(reshardings)]
        return all(trial(name, layouts, data, seed, transport, tag) for tag in tags)

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(run, names))


@some_by_day("case", LITERATURE, ids=lambda case: case.name, by_day=4)
@pytest.mark.parametrize("local", [None, 8.0])
def test_the_layouts_of_the_literature_arrive_bit_for_bit(case, local):
    source, target = case.layouts()
    plan = plan_resharding(Tensor((8, 16, 6), 4), source, target, Links(1.0, local), messages=200)
    assert all(run_everywhere(plan, source, target, seed=1))


@some_by_day("seed", range(60), by_day=20)
def test_random_layouts_arrive_bit_for_bit(seed):
    tensor, source, target, links = random_case(seed, largest=9)
    plan = plan_resharding(tensor, source, target, links, messages=100)
    assert all(run_everywhere(plan, source, target, seed, reshardings=2))


@pytest.mark.parametrize("make", [plan_send_and_receive, plan_gather_then_send])
@pytest.mark.parametrize("seed", range(12))
def test_the_naive_plans_run_as_well(make, seed):
    tensor, source, target, links = random_case(seed, largest=6)
    assert all(run_everywhere(make(tensor, source, target, links), source, target, seed))


def test_a_scalar_arrives_too():
    source, target = (mesh_layout(name, mesh=(2,), split=(None,)) for name in ("source", "target"))
    plan = plan_resharding(Tensor((), 8), source, target, Links(1.0))
    assert all(run_everywhere(plan, source, target, seed=3))


def _pair(limit_s: float):
    """Ends of a resharding of eight floats from one worker to another."""
    source, target = (mesh_layout(name, mesh=(1,), split=(None,)) for name in ("source", "target"))
    plan = ReshardingPlan.from_json(plan_resharding(Tensor((8,), 4), source, target, Links(1.0)).to_json())
    ends = LocalTransport.group(Topology(("source/0", "target/0")))
    return [Resharder(plan, name, ends[name, 0], limit_s=limit_s) for name in ("source/0", "target/0")]


def test_a_peer_that_never_sends_is_named_within_the_limit():
    _, receiver = _pair(limit_s=0.3)
    with pytest.raises(
        EngineError, match=r"message 0 \(tile 0 \[0:8\], source/0 to target/0\).* within 0\.3 s"
    ):
        receiver.run(torch.zeros(8))
    assert not [thread for thread in threading.enumerate() if "_lane" in thread.name]


def test_an_abort_of_the_transport_ends_a_resharding():
    sender, receiver = _pair(limit_s=30.0)
    wait = receiver.start(torch.zeros(8))
    sender._transport.abort()
    with pytest.raises(PeerLostError):
        wait()


def test_compute_goes_on_while_a_resharding_waits():
    sender, receiver = _pair(limit_s=30.0)
    out = torch.zeros(8)
    wait = receiver.start(out)
    assert torch.ones(8).sum() == 8  # start returned, though nobody has sent
    sender.run(torch.arange(8.0))
    (measured,) = wait()
    assert measured.number == 0 and measured.end_s >= measured.start_s
    assert torch.equal(out, torch.arange(8.0))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(7), r"shape \(7,\), the plan's box is \(8,\)"),
        (torch.zeros(8, dtype=torch.float64), "elements of 8 bytes .*, the plan's have 4"),
        (torch.zeros(8, device="meta"), "on meta, where threads see no copy end: enqueue it"),
    ],
)
def test_a_tensor_that_is_not_the_plans_is_refused(tensor, said):
    with pytest.raises(ValueError, match=said):
        _pair(limit_s=1.0)[0].start(tensor)


def _changed(**changes) -> dict:
    source, target = (
        mesh_layout("source", mesh=(1,), split=(None,)),
        mesh_layout("target", mesh=(2,), split=(None,)),
    )
    data = plan_resharding(Tensor((8,), 4), source, target, Links(1.0), messages=8).to_json()
    relayed = next(k for k, message in enumerate(data["messages"]) if message["after"])
    data["messages"][relayed].update(changes)
    return data


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sender": "source/7"}, "of source/7, which the plan's workers are not"),
        ({"tile": 9}, "there are 1 tiles"),
        ({"end": 99}, "its tile has 8 elements"),
        ({"after": []}, "its sender neither holds that nor waits for it"),
        ({"after": [999]}, "waits for message 999"),
    ],
)
def test_a_plan_that_no_worker_could_run_is_refused_by_message(changes, said):
    with pytest.raises(ValueError, match=said):
        ReshardingPlan.from_json(_changed(**changes))


def test_a_worker_of_no_such_plan_is_refused():
    with pytest.raises(
        ValueError,
        match=r"m7/0 is no worker of this resharding: its workers are source/0, target/0, target/1",
    ):
        Resharder(ReshardingPlan.from_json(_changed()), "m7/0", transport=None)


class _Slowed:
    """A transport whose transfers begin late, by a draw of its own."""

    def __init__(self, transport: LocalTransport, seed: int):
        self._transport, self._draw, self._lock = transport, random.Random(seed), threading.Lock()

    def send(self, peer, tag, tensor):
        self._wait()
        return self._transport.send(peer, tag, tensor)

    def receive(self, peer, tag, out):
        self._wait()
        return self._transport.receive(peer, tag, out)

    def abort(self):
        self._transport.abort()

    def _wait(self) -> None:
        with self._lock:
            seconds = self._draw.random() * 0.004
        time.sleep(seconds)


@pytest.mark.parametrize("seed", range(8))
def test_it_ends_and_is_right_whoever_is_late(seed):
    source, target = LITERATURE[(2, 3, 5, 6)[seed % 4]].layouts()
    plan = plan_resharding(Tensor((8, 8, 6), 4), source, target, Links(1.0, 8.0), messages=200)
    names = [worker.name for worker in plan.workers]
    ends = LocalTransport.group(Topology(tuple(names)))
    data, layouts = plan.to_json(), {"source": source, "target": target}

    def run(k: int) -> bool:
        slowed = _Slowed(ends[names[k], 0], seed * 100 + k)
        return trial(names[k], layouts, data, seed, slowed, 0)

    with ThreadPoolExecutor(len(names)) as pool:
        assert all(pool.map(run, range(len(names))))


@pytest.mark.parametrize("seed", range(10))
def test_a_tensor_comes_back_the_other_way(seed):
    """Forward through an edge and back, as activations and their gradients go."""
    tensor, source, target, links = random_case(seed, largest=7)
    there = plan_resharding(tensor, source, target, links, messages=60)
    back = plan_resharding(tensor, target, source, links, messages=60)
    names = [worker.name for worker in there.workers]
    ends = LocalTransport.group(Topology(tuple(names)))
    whole = torch.arange(tensor.elements).to(torch.int64).view(tensor.shape)
    plans = [ReshardingPlan.from_json({**one.to_json(), "element_bytes": 8}) for one in (there, back)]

    def run(name: str) -> bool:
        side, _, worker = name.partition("/")
        right = part_of(whole, source if side == "source" else target, int(worker))
        got = right.clone() if side == "source" else torch.zeros_like(right)
        Resharder(plans[0], name, ends[name, 0]).run(got)
        if side == "source":
            got = torch.zeros_like(right)
        Resharder(plans[1], name, ends[name, 0]).run(got, first_tag=len(there.messages))
        return torch.equal(got, right)

    with ThreadPoolExecutor(len(names)) as pool:
        assert all(pool.map(run, names))
