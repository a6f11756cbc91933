"""Workers that would meet their sums in two orders are told so by name, where they would have trained on without a word."""

from __future__ import annotations

import re
import threading
from dataclasses import replace

import pytest
import torch

from tests.worker.cuda_workers import Watched
from tests.worker.engine.engine_support import LocalPipeline, batch, chain, serial_programs
from worker.contract.buckets import is_bucket
from worker.engine import lowering
from worker.parallel.collective_log import CollectiveLog
from worker.transport.base import EngineError, Topology
from worker.transport.gloo import GlooTransport
from worker.transport.local import LocalTransport
from worker.transport.rendezvous import host_store

LOOPED = ["m0", "m1", "m0", "m1"]
SAID = (
    r"m0/1 and m0/0 meet the collectives of group workers/m0 in different orders: number 0 is 0REDUCE's all-reduce of "
    r"\d+ bytes \(torch.float64\) on m0/1 and 2REDUCE's all-reduce of \d+ bytes \(torch.float64\) on m0/0"
)


def later(bucketed):
    """The first bucket behind the second, in everything that a program says of it."""
    first, second = [k for k, one in enumerate(bucketed.program) if is_bucket(one)][:2]
    assert bucketed.program[second].record is not None, "the last one"
    places = [k for k in range(len(bucketed.program)) if k != first]
    places.insert(places.index(second) + 1, first)
    program = list(bucketed.program)
    program[first], program[second] = (
        replace(program[first], record=program[second].record),
        replace(program[second], record=None),
    )
    return replace(
        bucketed,
        program=tuple(program[k] for k in places),
        buckets={places.index(k): names for k, names in bucketed.buckets.items()},
        source=tuple(bucketed.source[k] for k in places),
    )


@pytest.fixture
def one_has_another_order(monkeypatch):
    """Of the engines that are made, m0/1's sums its buckets in another order; they are equally large."""
    made, real = [], lowering.with_buckets

    def with_buckets(program, gradients):
        made.append(program)
        bucketed = real(program, gradients)
        return later(bucketed) if len(made) == 2 else bucketed

    monkeypatch.setattr(lowering, "with_buckets", with_buckets)


@pytest.fixture(params=["gloo", "nccl"])
def transports(request, monkeypatch):
    """What engines are given in place of LocalTransport."""
    monkeypatch.setattr("worker.transport.selftest.LONG", 67)
    store, made = host_store("127.0.0.1"), []
    watch = Watched(monkeypatch) if request.param == "nccl" else None

    def group(topology):
        def transport(mesh, worker):
            if watch is not None:
                return watch.transport(topology, mesh, worker, store.port)
            where = {"store": ("127.0.0.1", store.port), "host": "127.0.0.1"}
            return GlooTransport(topology, mesh=mesh, worker=worker, **where)

        made.append(store)
        return {
            (mesh, worker): transport(mesh, worker)
            for mesh in topology.meshes
            for worker in range(topology.workers(mesh))
        }

    monkeypatch.setattr(LocalTransport, "group", group)
    yield watch
    if watch is not None:
        watch.end()


def pipeline():
    graph = chain(4)
    return LocalPipeline(graph, LOOPED, serial_programs(graph, LOOPED, 2), 2, workers=2)


def batches():
    return [batch(2, seed=worker) for worker in range(2)]


def test_buckets_that_one_worker_sums_in_another_order_end_the_first_step_or_come_before_it(
    transports, one_has_another_order
):
    with pipeline() as run:
        if transports is None:
            with pytest.raises(EngineError, match=SAID):
                run.step(1, batches())
            return
        run.each(lambda key, engine: engine.warm_up(1, *batches()[key[1]]))
        device = transports.devices["m0", 1]
        before = {name: len(said) for name, said in device.said.items()}
        with pytest.raises(EngineError):
            run.step(1, batches())
        assert any(re.search(SAID, str(error)) for error in run.errors.values())
        assert {name: len(said) for name, said in device.said.items()} == before, "nothing was summed wrongly"


def test_workers_that_have_one_order_train_on(transports):
    with pipeline() as run:
        for step in range(1, 4):
            run.step(step, batches())
        for engine in run.engines.values():
            slots = [note.slot for note in engine._collectives.log._reference[f"workers/{engine._mesh}"]]
            assert slots[:2] == (["2REDUCE", "0REDUCE"] if engine._mesh == "m0" else ["3REDUCE", "1REDUCE"])
            assert not engine._collectives.log._not_compared
    if transports is not None:
        transports.check()
        kinds = {said[:3] for _, said in transports.nccl.connected}
        assert ("allReduce", 44, 8) in kinds, "a bucket has no size of the self-test"


def test_a_worker_whose_dry_run_does_not_come_is_named_and_the_wait_can_be_ended():
    first, second = orders(2)
    for one in (first, second):
        one.add("all", "all-reduce", torch.zeros(1))
    first.record_dry_run()
    with pytest.raises(EngineError, match=r"m0/0 has run its program once .* m0/1 has not within 0.1 s"):
        first.compare_dry_runs(0.1)

    def end():
        raise EngineError("aborted")

    with pytest.raises(EngineError, match="aborted"):
        first.compare_dry_runs(60.0, end)
    second.record_dry_run()
    (record,) = first.compare_dry_runs(60.0)["all"]
    assert (record.operation, record.dtype, record.size_bytes) == ("all-reduce", "torch.float32", 4)


def orders(count=3):
    topology = Topology(("m0",), count)
    transports = LocalTransport.group(topology)
    groups = {"all": tuple(range(count)), "pair": (0, 1)}
    return [CollectiveLog("steps", transports["m0", worker], groups) for worker in range(count)]


def together(each):
    """Calls at once; what each raised."""
    raised = [None] * len(each)

    def call(index, function):
        try:
            function()
        except EngineError as error:
            raised[index] = str(error)

    threads = [threading.Thread(target=call, args=item) for item in enumerate(each)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return raised


def run(order, sizes):
    order.begin()
    for size in sizes:
        order.add("all", "all-reduce", torch.zeros(size))
        if order._own_name != "m0/2":
            order.add("pair", "all-gather", torch.zeros(1))
    order.compare_after_step()


def test_what_all_meet_otherwise_in_a_later_step_is_no_fault():
    """A parameter that no worker makes a gradient of in some step, say."""
    own = orders()
    for sizes in ([1, 2], [1, 2], [1, 3], [1, 3], [1, 2], [7]):
        assert together([lambda one=one, sizes=sizes: run(one, sizes) for one in own]) == [None] * 3


def test_what_one_meets_otherwise_in_a_later_step_ends_it(monkeypatch):
    monkeypatch.setattr("worker.parallel.collective_log._LIMIT_S", 0.3)
    for odd in range(3):
        own = orders()
        assert together([lambda one=one: run(one, [1, 2]) for one in own]) == [None] * 3
        sizes = [[1, 2 + (k == odd)] for k in range(3)]
        raised = together([lambda one=one, of=of: run(one, of) for one, of in zip(own, sizes, strict=True)])
        assert [k for k, error in enumerate(raised) if error] == [odd]
        assert f"m0/{odd} has met the collectives of group all otherwise than in earlier steps" in raised[odd]


def test_one_that_tells_late_has_as_long_as_the_slots_behind_the_last_sum_may_take(monkeypatch):
    """The STEP of a large stage takes long the first time."""
    monkeypatch.setattr("worker.parallel.collective_log._LIMIT_S", 0.2)
    first, second = orders(2)
    first.begin()
    for one in (first, second):
        one.add("all", "all-reduce", torch.zeros(1))
    told_late = threading.Timer(1.0, first.compare_after_step)
    told_late.start()
    second.compare_after_step(60.0)  # as the engine does, by its longest slot
    told_late.join()
    limits_s, compare = {}, CollectiveLog.compare_after_step

    def compare_after_step(log, slot_limit_s):
        limits_s[log] = slot_limit_s
        compare(log, slot_limit_s)

    monkeypatch.setattr(CollectiveLog, "compare_after_step", compare_after_step)
    with LocalPipeline(chain(2), ["m0", "m1"], serial_programs(chain(2), ["m0", "m1"], 1), 1) as pipeline:
        pipeline.step(1, [batch(1)])
        for engine in pipeline.engines.values():
            assert limits_s[engine._collectives.log] == max(engine._limits_s)


def test_two_that_differ_in_unlike_ways_name_the_first_that_does():
    own = orders()
    assert together([lambda one=one: run(one, [1, 2, 3]) for one in own]) == [None] * 3
    sizes = [[1, 4, 3], [1, 5, 3], [1, 4, 3]]
    raised = together([lambda one=one, of=of: run(one, of) for one, of in zip(own, sizes, strict=True)])
    assert "group all in different orders: number 1 is no slot's all-reduce of 20 bytes" in raised[1]


def test_one_sum_less_is_told():
    own = orders(2)
    raised = together([lambda: run(own[0], [1, 2]), lambda: run(own[1], [1])])
    assert raised[0] is None
    assert "number 1 is none on m0/1 and no slot's all-reduce of 8 bytes (torch.float32) on m0/0" in raised[1]
