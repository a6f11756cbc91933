"""What the engine takes of a processor for an action, measured between real gloo transports."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from worker.engine import Engine
from worker.engine_measure import MICROBATCHES, measure_action, program_of
from worker.transport import ConnectError, Topology
from worker.transport.gloo import GlooTransport, host_store


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
            store_host="127.0.0.1",
            store_port=store.port,
            connect_timeout_s=connect_s,
        )
        for mesh in meshes
    ]


def measured(stores, count):
    meshes = tuple(f"m{k}" for k in range(count))
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(measure_action, transports(stores, meshes)))


def test_what_the_engine_burns_in_a_step_is_found_for_every_action(stores, monkeypatch):
    """Processor time, so that other processes of the machine do not count; here all meshes are one process."""
    before = measured(stores, 3)
    run_step = Engine.run_step

    def slower(engine, *arguments):
        until = time.thread_time() + 0.064
        while time.thread_time() < until:
            pass
        return run_step(engine, *arguments)

    monkeypatch.setattr(Engine, "run_step", slower)
    after = measured(stores, 3)
    assert all(0.0 <= seconds < 0.01 for seconds in before)
    more_s = 0.064 / (2 * MICROBATCHES)
    assert all(b - a > 0.9 * more_s for a, b in zip(before, after, strict=True))


def test_one_mesh_alone_is_measured_without_transfers(stores):
    (seconds,) = measured(stores, 1)
    assert 0.0 <= seconds < 0.01
    assert {i.op for i in program_of(0, ["m0"])} == {"F", "B"}


def test_a_mesh_that_does_not_come_is_named(stores):
    first, _ = transports(stores, ("m0", "m1"), connect_s=0.5)
    with pytest.raises(ConnectError, match="m1"):
        measure_action(first)


def test_both_ends_of_every_transfer_stand_in_the_programs():
    meshes = ["m0", "m1", "m2"]
    programs = {mesh: list(program_of(k, meshes)) for k, mesh in enumerate(meshes)}

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
