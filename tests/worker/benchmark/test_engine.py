"""What the engine takes of a processor for an action, measured between real gloo transports."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.worker.cuda_workers import Watched, WatchedTransport
from worker.benchmark import engine_overhead as benchmark_engine
from worker.benchmark.engine_overhead import MICROBATCHES, measure_engine, pipeline_program
from worker.contract.costs import EngineCosts
from worker.engine.engine import Engine
from worker.engine.lanes import cuda as cuda_lanes
from worker.transport.base import ConnectError, Topology
from worker.transport.gloo import GlooTransport
from worker.transport.rendezvous import host_store


@pytest.fixture(scope="module")
def stores():
    """Rendezvous stores live as long as somebody holds them."""
    return []


def transports(stores, meshes, connect_s=60.0):
    stores.append(store := host_store("127.0.0.1"))
    return [
        GlooTransport(
            Topology(meshes),
            mesh=mesh,
            worker=0,
            host="127.0.0.1",
            store=("127.0.0.1", store.port),
            connect_timeout_s=connect_s,
        )
        for mesh in meshes
    ]


def measured(stores, count):
    meshes = tuple(f"m{k}" for k in range(count))
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(measure_engine, transports(stores, meshes)))


def seconds(costs):
    return [one.action_s for one in costs]


class ThreadClock(threading.local):
    """What a module sees of `time`: processor seconds of the calling thread, which go on only where it says so."""

    burnt = 0.0

    def process_time(self):
        return self.burnt

    thread_time = process_time


def test_what_the_engine_burns_in_a_step_is_found_for_every_action(stores, monkeypatch):
    """Processor time, so that other processes of the machine do not count: of any other clock the module has none."""
    clock, run_step, steps = ThreadClock(), Engine.run_step, []

    def burning(engine, step, *arguments):
        clock.burnt += 0.064 if step > 1 else 9.0  # the first ones warm up
        steps.append(step)
        return run_step(engine, step, *arguments)

    monkeypatch.setattr(benchmark_engine, "time", clock)
    monkeypatch.setattr(Engine, "run_step", burning)
    assert seconds(measured(stores, 3)) == pytest.approx([0.064 / (2 * MICROBATCHES)] * 3)
    assert sorted(steps) == sorted([*range(max(steps) + 1)] * 3)


def test_what_a_profile_counts_already_is_no_work_of_the_engine(stores, monkeypatch):
    """Half of forward and backward alone for each of them; less than nothing is nothing."""
    clock, run_step = ThreadClock(), Engine.run_step

    def burning(engine, *arguments):
        clock.burnt += 0.064
        return run_step(engine, *arguments)

    def operations(*arguments, **options):
        clock.burnt += 1e-3 if threading.current_thread() not in slow else 9.0
        return run_forward(*arguments, **options)

    slow, run_forward = [], benchmark_engine.run_forward
    monkeypatch.setattr(benchmark_engine, "time", clock)
    monkeypatch.setattr(benchmark_engine, "run_forward", operations)
    monkeypatch.setattr(Engine, "run_step", burning)
    assert seconds(measured(stores, 1)) == pytest.approx([0.064 / (2 * MICROBATCHES) - 0.5e-3])
    slow.append(threading.current_thread())
    assert measure_engine(transports(stores, ("m0",))[0]) == EngineCosts(0.0, 0)


def test_on_a_real_clock_every_mesh_finds_a_little(stores):
    assert all(0.0 <= action_s < 1.0 for action_s in seconds(measured(stores, 3)))


def test_one_mesh_alone_is_measured_without_transfers(stores):
    (action_s,) = seconds(measured(stores, 1))
    assert 0.0 <= action_s < 1.0
    assert {i.op for i in pipeline_program(0, ["m0"])} == {"F", "B"}


def test_on_streams_it_is_the_time_of_the_thread_that_enqueues(stores, monkeypatch):
    """Whatever the device and NCCL's threads take meanwhile: the process's own clock is not asked."""
    clock, send = ThreadClock(), WatchedTransport.send

    def burning(transport, *arguments):
        clock.burnt += 1e-3
        send(transport, *arguments)

    still = SimpleNamespace(process_time=lambda: 0.0, thread_time=lambda: 0.0)
    monkeypatch.setattr(benchmark_engine, "time", still)
    monkeypatch.setattr(
        cuda_lanes, "time", SimpleNamespace(thread_time=clock.thread_time, monotonic=time.monotonic)
    )
    monkeypatch.setattr(WatchedTransport, "send", burning)
    watched, topology = Watched(monkeypatch), Topology(("m0", "m1"))
    stores.append(store := host_store("127.0.0.1"))
    made = [watched.transport(topology, mesh, 0, store.port) for mesh in topology.meshes]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(measure_engine, made))
    assert seconds(found) == pytest.approx([MICROBATCHES * 1e-3 / (2 * MICROBATCHES)] * 2)
    watched.check()


def test_what_connections_hold_of_an_accelerator_is_what_they_free_at_the_end(stores, monkeypatch):
    """The middle one of three meshes has two peers, and two communicators with each; all meshes share one group."""
    held = 2**20

    def open_bytes(device):
        own = threading.current_thread().name
        return 2**30 - held * sum(one.process == own for one in watched.nccl.alive)

    monkeypatch.setattr(benchmark_engine, "bytes_open_to_torch", open_bytes)
    watched, topology = Watched(monkeypatch), Topology(("m0", "m1", "m2"))
    stores.append(store := host_store("127.0.0.1"))
    made = [watched.transport(topology, mesh, 0, store.port) for mesh in topology.meshes]
    with ThreadPoolExecutor(3) as threads:
        found = [costs.connection_bytes for costs in threads.map(measure_engine, made)]
    assert found == [3 * held, 5 * held, 3 * held]
    assert watched.nccl.alive == []


def test_a_mesh_that_does_not_come_is_named(stores):
    first, _ = transports(stores, ("m0", "m1"), connect_s=0.5)
    with pytest.raises(ConnectError, match="m1"):
        measure_engine(first)


def test_both_ends_of_every_transfer_stand_in_the_programs():
    meshes = ["m0", "m1", "m2"]
    programs = {mesh: list(pipeline_program(k, meshes)) for k, mesh in enumerate(meshes)}

    def ends(half):
        """(sender, receiver, direction, edge, microbatch) of each transfer that has this half."""
        return sorted(
            (*((mesh, i.peer) if half == "SEND" else (i.peer, mesh)), i.op[-1], i.edge, i.microbatch)
            for mesh, program in programs.items()
            for i in program
            if i.op.startswith(half)
        )

    assert ends("SEND") == ends("RECV")
    assert len(ends("SEND")) == 2 * 2 * MICROBATCHES
    for program in programs.values():
        recorded = [i.record for i in program if i.record is not None]
        assert len(recorded) == len(set(recorded))
        assert {event for i in program for event in i.wait} <= set(recorded)
