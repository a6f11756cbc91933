"""Reshardings enqueued on a stream, over NCCL's fake: random layouts arrive bit for bit, and rounds keep what they say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from service.scheduler.resharding.layout import Links, Tensor
from service.scheduler.resharding.resharding import plan_gather_then_send, plan_resharding
from tests.service.scheduler.resharding.cases import LITERATURE, random_case
from tests.tiers import some_by_day
from tests.worker.cuda_workers import Watched
from tests.worker.parallel.resharding.cases import bits, dtype_of, part_of, strided, whole_tensor
from worker.contract.resharding import ReshardingPlan, message_rounds
from worker.engine.reshardings import resharding_group
from worker.parallel.resharding import StreamResharder
from worker.transport.base import Topology
from worker.transport.rendezvous import host_store

TURNS = 2


@pytest.fixture
def everywhere(monkeypatch):
    """Runs a plan on all of its workers, one after the other on a stream; whether each then has what it must have."""
    monkeypatch.setattr("worker.transport.selftest.LONG", 67)

    def run(plan, source, target, seed: int) -> list[bool]:
        read = ReshardingPlan.from_json(plan.to_json())
        topology = Topology(("source", "target"), (len(read.sources), len(read.targets)))
        store, layouts, group = (
            host_store("127.0.0.1"),
            {"source": source, "target": target},
            resharding_group(read),
        )
        watch = Watched(monkeypatch)

        def one(name: str) -> bool:
            side, worker = name.split("/")[0], int(name.split("/")[1])
            transport = watch.transport(topology, side, worker, store.port)
            transport.connect({}, tuple((*lane, group) for lane in read.lanes()))
            stream, end = transport.device.Stream(), StreamResharder(read, name, group)
            right = []
            for turn in range(TURNS):
                whole = whole_tensor(read.shape, dtype_of(read.element_bytes, seed), seed + turn)
                expected = part_of(whole, layouts[side], worker)
                given = whole if side == "source" else whole_tensor(read.shape, whole.dtype, seed + 100)
                tensor = part_of(given, layouts[side], worker).clone()
                if seed % 3 == 0 and tensor.numel():
                    tensor = strided(tensor)
                with transport.device.stream(stream):
                    end.enqueue(tensor, transport)
                right.append(bits(tensor) == bits(expected))
            transport.close()
            return all(right)

        names = [*topology.names("source"), *topology.names("target")]
        with ThreadPoolExecutor(len(names)) as pool:
            found = list(pool.map(one, names))
        watch.check()
        return found

    return run


@some_by_day("case", LITERATURE, ids=lambda case: case.name, by_day=3)
def test_the_layouts_of_the_literature_arrive_bit_for_bit(case, everywhere):
    source, target = case.layouts()
    plan = plan_resharding(Tensor((8, 16, 6), 4), source, target, Links(1.0, 8.0), messages=60)
    assert all(everywhere(plan, source, target, seed=1))


@some_by_day("seed", range(12), by_day=4)
def test_random_layouts_arrive_bit_for_bit(seed, everywhere):
    tensor, source, target, links = random_case(seed, largest=6)
    plan = plan_resharding(tensor, source, target, links, messages=40)
    assert all(everywhere(plan, source, target, seed))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("make", [plan_resharding, plan_gather_then_send])
def test_no_message_of_a_round_needs_another_of_it(make, seed):
    tensor, source, target, links = random_case(seed, largest=9)
    plan = ReshardingPlan.from_json(make(tensor, source, target, links).to_json())
    rounds = message_rounds(plan)
    assert sorted(one.number for of in rounds for one in of) == [*range(len(plan.messages))]
    number_of = {one.number: k for k, of in enumerate(rounds) for one in of}
    for one in plan.messages:
        assert all(number_of[before] < number_of[one.number] for before in one.after)
    if not any(one.after for one in plan.messages):
        assert len(rounds) <= 1
        return
    for of in rounds:  # what is passed on leaves while the next comes
        senders = [(one.sender, one.local) for one in of]
        receivers = [(one.receiver, one.local) for one in of]
        assert len({*senders}) == len(senders) and len({*receivers}) == len(receivers)
