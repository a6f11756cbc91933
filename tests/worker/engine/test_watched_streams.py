"""Transfers between unlike meshes and sums over workers, enqueued on streams: right values and no races; and every wait
that is left out, memory that goes too early and sum in another order is found by the watch that finds none otherwise."""

from __future__ import annotations

import pytest

from tests.tiers import some_by_day
from tests.worker.cuda_workers import Watched
from tests.worker.engine.engine_support import chain, planned, skips, times_of
from tests.worker.engine.test_heterogeneous_engines import (
    MICROBATCHES,
    SHORT,
    UnlikePipeline,
    _adam,
    _batch,
    _check,
    _stall_of,
)
from tests.worker.engine.watched_cuda import Event
from worker.contract.program import SEND_OPS
from worker.engine.lanes.cuda import CudaLanes
from worker.engine.results import SlotLimits
from worker.parallel.resharding import StreamResharder
from worker.transport.base import EngineError
from worker.transport.local import LocalTransport
from worker.transport.rendezvous import host_store


@pytest.fixture
def watched(monkeypatch):
    """Makes devices for all engines of the test from here on; ends their threads."""
    made = []
    monkeypatch.setattr("worker.transport.selftest.LONG", 67)

    def make(**options):
        watch, store = Watched(monkeypatch, **options), host_store("127.0.0.1")

        def group(topology):
            return {
                (mesh, worker): watch.transport(topology, mesh, worker, store.port)
                for mesh in topology.meshes
                for worker in range(topology.workers(mesh))
            }

        monkeypatch.setattr(LocalTransport, "group", group)
        made.append((watch, store))
        return watch

    yield make
    for watch, _ in made:
        watch.end()


CASES = {
    "2 to 1": (lambda: chain(2), ["m0", "m1"], (2, 1)),
    "1 to 3": (lambda: chain(2), ["m0", "m1"], (1, 3)),
    "2 to 3, skips": (skips, ["m0", "m0", "m1", "m1"], (2, 3)),
}


def job_of(case):
    make, mesh_of_stage, sizes = CASES[case]
    graph = make()
    plan, programs = planned(graph, mesh_of_stage, MICROBATCHES, "1f1b" if case == "2 to 1" else "auto")
    return graph, mesh_of_stage, dict(zip(("m0", "m1"), sizes, strict=True)), plan, programs


@pytest.mark.parametrize("case", CASES)
def test_a_step_between_unlike_meshes_races_nowhere_and_its_host_waits_for_nothing(
    case, watched, monkeypatch
):
    waited, enqueueing = [], []
    enqueue, synchronize = CudaLanes._enqueue, Event.synchronize

    def watched_enqueue(lanes):
        enqueueing.append(lanes._cuda)
        enqueue(lanes)
        enqueueing.remove(lanes._cuda)

    def watched_synchronize(event):
        if event.device in enqueueing:
            waited.append(event.device)
        synchronize(event)

    monkeypatch.setattr(CudaLanes, "_enqueue", watched_enqueue)
    monkeypatch.setattr(Event, "synchronize", watched_synchronize)
    watch = watched()
    graph, mesh_of_stage, sizes, _, programs = job_of(case)
    _check(graph, mesh_of_stage, sizes, programs, clip=0.05)
    watch.check()
    assert waited == []
    said = {name for device in watch.devices.values() for name in device.said}
    assert {"transfers/m0>m1", "transfers/m1>m0"} <= said


@some_by_day("seed", range(3), by_day=1)
def test_values_are_right_in_whatever_order_streams_go_on(seed, watched):
    watch = watched(threads=True, seed=seed)
    graph, mesh_of_stage, sizes, _, programs = job_of("2 to 3, skips")
    _check(graph, mesh_of_stage, sizes, programs, clip=0.05)
    watch.check()


def races_of(watched, job, *, changed=lambda engine, lanes: None, planned_times=False, steps=2):
    """What the watch finds in some steps of a job whose lanes are `changed`."""
    graph, mesh_of_stage, sizes, plan, programs = job
    watch = watched(changed=changed)
    times = times_of(plan) if planned_times else None
    with UnlikePipeline(graph, mesh_of_stage, programs, sizes, optimizer=_adam, times=times) as pipeline:
        for step in range(1, steps + 1):
            pipeline.run(step, *_batch(step))
    return watch.races


def first_of(engine, chosen):
    return engine._mesh == chosen and engine._worker == 0


@pytest.mark.slow
def test_every_wait_that_is_left_out_is_found(watched):
    """But for those before STEP, which only ends the program, and before a buffer is received into for the first time."""
    job = job_of("2 to 1")
    assert races_of(watched, job) == []
    tried = 0
    for mesh in job[2]:
        engines = []

        def look(engine, lanes, mesh=mesh, engines=engines):
            if first_of(engine, mesh):
                engines.append((engine, lanes))

        races_of(watched, job, changed=look, steps=1)
        ((engine, lanes),) = engines
        buffers = set()
        for index, instruction in enumerate(engine._program):
            buffer = engine._buffers.buffer_of[index]
            new = buffer is not None and buffer not in buffers
            buffers.add(buffer)
            if new or instruction.op == "STEP":
                continue
            for place in range(len(lanes._waits[index])):

                def forget(engine, lanes, mesh=mesh, index=index, place=place):
                    if first_of(engine, mesh):
                        del lanes._waits[index][place]

                assert races_of(watched, job, changed=forget), f"{mesh}: {instruction} does without {place}"
                tried += 1
    assert tried == 17


def test_a_sent_tensor_that_is_dropped_without_waiting_for_its_send_is_found(watched):
    job = job_of("2 to 1")
    dropped = []

    def forget(engine, lanes):
        for action, sends in engine._actions._releases.items():
            dropped.extend(sends)
            lanes._waits[action] = [w for w in lanes._waits[action] if engine._program[w].op not in SEND_OPS]

    assert races_of(watched, job, planned_times=True) == []
    found = races_of(watched, job, changed=forget, planned_times=True)
    assert dropped and any("is freed while exchange on transfers/" in race for race in found)


@pytest.mark.slow
def test_tiles_that_are_packed_on_another_stream_are_found(watched, monkeypatch):
    """As if packing did not stand before the messages, on the stream of their lane."""
    enqueue = StreamResharder.enqueue

    def on_the_compute_stream(self, tensor, transport):
        device = getattr(transport, "device", None)
        if device is not None and self._worker in self._plan.sources:
            with device.stream(device._streams[0]):
                tensor = tensor * 1.0
        enqueue(self, tensor, transport)

    monkeypatch.setattr(StreamResharder, "enqueue", on_the_compute_stream)
    found = races_of(watched, job_of("2 to 1"))
    assert any("may still use" in race for race in found)


@pytest.mark.slow
def test_sums_in_another_order_on_one_worker_are_found(watched):
    """Buckets of unlike sizes: NCCL would hang, or add up what does not belong together."""

    def swap(engine, lanes):
        if engine._mesh == "m0" and engine._worker == 1:
            buckets = sorted(engine._actions._gradient_buckets)
            first, last = buckets[0], buckets[-1]
            assert first != last
            actions = lanes._actions
            actions[first], actions[last] = actions[last], actions[first]

    of_nccl, of_engine = (
        r"collective \d+: \('allReduce', .* here, \('allReduce', .* there",
        "in different orders",
    )
    with pytest.raises(EngineError, match=f"{of_nccl}|{of_engine}"):  # whichever comes first
        races_of(watched, job_of("2 to 3, skips"), changed=swap)


@pytest.mark.slow
def test_a_transfer_that_stalls_on_a_stream_names_the_worker_that_has_not_come(watched):
    watched(threads=True)
    graph, mesh_of_stage, sizes, _, programs = job_of("2 to 1")
    with UnlikePipeline(graph, mesh_of_stage, programs, sizes, optimizer=_adam, limits=SHORT) as pipeline:
        said = _stall_of(pipeline, ("m1", 0), _batch(1))
    assert "RECV_F0@m0/e0" in said
    assert "it waits for m0/1; m0/1 said" in said


@pytest.mark.slow
@pytest.mark.parametrize("most", [15, 5], ids=["several actions ahead", "actions that alone are too many"])
def test_behind_a_peer_that_never_sends_no_launch_blocks_and_the_stall_is_told(most, watched, monkeypatch):
    """A stream takes 40 entries, and a query of an event blocks while a launch does: a host that enqueues the step in one
    go blocks in the middle of it, and the watch with it."""
    graph, meshes = chain(2), ["m0", "m1"]
    programs = planned(graph, meshes, MICROBATCHES, "gpipe")[1]
    monkeypatch.setattr("worker.engine.lanes.cuda._MAX_LAUNCHES_AHEAD", most)
    watched(threads=True, entries=40)
    sizes, soon = {"m0": 2, "m1": 1}, SlotLimits(factor=1.0, floor_s=0.5)
    with UnlikePipeline(graph, meshes, programs, sizes, optimizer=_adam, limits=soon) as pipeline:
        launches = pipeline.engines["m1", 0]._launches()
        said = _stall_of(pipeline, ("m1", 0), _batch(1))
    assert sum(launches) > 40, "a step is no longer than a stream"
    assert "RECV_F0@m0/e0" in said and "it waits for m0/1; m0/1 said" in said
