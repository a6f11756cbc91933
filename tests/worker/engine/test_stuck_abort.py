"""A stalled step over NCCL whose abort never returns is reported all the same; the driver then kills."""

import threading

import pytest

from tests.worker.engine.engine_support import batch, chain, make_engine, serial_programs, squared_error
from tests.worker.transport.fake_nccl import FakeNccl
from worker.contract.planned import MeshProgram
from worker.engine.results import RunOptions, SlotLimits, StallError
from worker.transport.base import Topology
from worker.transport.nccl import NcclLibrary, NcclTransport
from worker.transport.rendezvous import host_store

MESHES = ("m0", "m1")


class Deferred(NcclTransport):
    """On CPU a receive goes on by itself, as it does on a stream."""

    def receive(self, peer, tag, out):
        if not self._connected.is_set():
            return super().receive(peer, tag, out)
        return lambda: NcclTransport.receive(self, peer, tag, out)

    def connect(self, groups, lanes):
        self._connected = threading.Event()
        super().connect(groups, lanes)
        self._connected.set()


def test_a_stall_is_told_although_the_abort_hangs():
    nccl, store, graph = FakeNccl(), host_store("127.0.0.1"), chain(2)
    programs = serial_programs(graph, MESHES, 1)
    engines = {
        mesh: make_engine(
            Deferred(
                Topology(MESHES),
                mesh=mesh,
                worker=0,
                store=("127.0.0.1", store.port),
                library=NcclLibrary(nccl, (2, 28, 9), lambda: 0),
            ),
            MeshProgram(programs[mesh], 1),
            graph,
            MESHES,
            loss=squared_error,
            options=RunOptions(limits=SlotLimits(factor=1.0, floor_s=0.5)),
        )
        for mesh in MESHES
    }
    threads = [threading.Thread(target=engine.connect, name=mesh) for mesh, engine in engines.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    nccl.stuck.set()
    try:
        told = []

        def step():
            with pytest.raises(StallError, match="RECV_B") as raised:
                engines["m0"].run_step(1, *batch(1))
            told.append(raised.value)

        thread = threading.Thread(target=step, daemon=True)  # m1 never runs its step
        thread.start()
        thread.join(60.0)
        assert nccl.stuck.is_set() and told, "no abort returned, and the step has ended"
        assert engines["m1"]._transport.failure().reason == str(told[0])
    finally:
        nccl.stuck.clear()
        for engine in engines.values():
            engine.close()
