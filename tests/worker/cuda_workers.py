"""Workers of whole jobs as on GPUs: CudaLanes on streams that are watched, and NcclTransport over a fake of cupy.

The tensors are the host's, so that values can be compared; streams, events, communicators and their order are what
they would be. Everything of the worker is the product's, but torch.cuda and cupy.cuda.nccl.
"""

from __future__ import annotations

from tests.worker.engine.watched_cuda import Device, unnoted
from tests.worker.transport.fake_nccl import FakeNccl
from tests.worker.workers import Workers
from worker.actor import state
from worker.engine.engine import Engine
from worker.engine.lanes.cuda import CudaLanes
from worker.parallel.collectives import Collectives
from worker.transport.nccl import NcclLibrary, NcclTransport


class WatchedTransport(NcclTransport):
    """Tells the device what NCCL reads and writes on which stream, for which communicator."""

    device: Device

    def connect(self, *arguments):
        super().connect(*arguments)
        self.device.synchronize()  # on CUDA it waits there until all trials are over

    def send(self, peer, tag, tensor):
        self.device.communicate(f"to {peer}", ("send", tensor.nbytes), [tensor])
        with unnoted():
            super().send(peer, tag, tensor)

    def receive(self, peer, tag, out):
        self.device.communicate(f"from {peer}", ("receive", out.nbytes), (), [out])
        with unnoted():
            super().receive(peer, tag, out)

    def all_reduce(self, group, tensor):
        if group in self._groups:
            what = ("all_reduce", tensor.numel(), tensor.dtype)
            self.device.communicate(group, what, [tensor], [tensor])
        with unnoted():
            super().all_reduce(group, tensor)

    def start_reduce_scatter(self, group, out, tensor):
        what = ("reduce_scatter", tensor.numel(), tensor.dtype)
        self.device.communicate(group, what, [tensor], [out])
        with unnoted():
            super().start_reduce_scatter(group, out, tensor)

    def start_all_gather(self, group, out, tensor):
        self.device.communicate(group, ("all_gather", tensor.nbytes), [tensor], [out])
        with unnoted():
            super().start_all_gather(group, out, tensor)

    def exchange(self, group, sends, receives):
        mine = [tensor for _, tensor in sends], [tensor for _, tensor in receives]
        self.device.communicate(group, ("exchange",), *mine)
        with unnoted():
            super().exchange(group, sends, receives)


class Watched:
    """All devices and the one NCCL of a test, from here on in place of CUDA's; `changed` may spoil an engine's lanes."""

    def __init__(
        self, monkeypatch, *, threads=False, seed=0, entries=None, changed=lambda engine, lanes: None
    ):
        self.nccl = FakeNccl()
        self.devices: dict[tuple[str, int], Device] = {}
        self._options, self._seed = {"threads": threads, "entries": entries}, seed

        def lanes(engine, actions):
            device = self.device(engine._mesh, engine._worker)
            launches = engine._launches()
            within_step = [self._within_step(action) for action in actions]
            enqueued = [device.action(*one) for one in zip(within_step, launches, strict=True)]
            made = CudaLanes(engine._program, enqueued, launches, cuda=device)
            changed(engine, made)
            return made

        rehearse = Collectives.rehearse

        def rehearsed(collectives, *arguments, **options):
            rehearse(collectives, *arguments, **options)
            self.device(collectives.mesh, collectives.worker).synchronize()  # as copying to the host does

        monkeypatch.setattr(Collectives, "rehearse", rehearsed)
        monkeypatch.setattr(Engine, "_enqueues", lambda engine: True)
        monkeypatch.setattr(Engine, "_make_lanes", lanes)

    def _within_step(self, action):
        def run():
            self.nccl.within_step.slot = action
            try:
                return action()
            finally:
                del self.nccl.within_step.slot

        return run

    def device(self, mesh, worker):
        seed = self._seed + 97 * worker + sum(mesh.encode())
        made = Device(f"{mesh}/{worker}", seed=seed, **self._options)
        return self.devices.setdefault((mesh, worker), made)

    def transport(self, topology, mesh, worker, store_port, connect_s=60.0, join_s=None):
        device = self.device(mesh, worker)
        made = WatchedTransport(
            topology,
            mesh=mesh,
            worker=worker,
            store=("127.0.0.1", store_port),
            connect_timeout_s=connect_s,
            join_timeout_s=join_s,
            library=NcclLibrary(self.nccl, (2, 28, 9), lambda: device.current),
        )
        made.device = device
        return made

    @property
    def races(self) -> list[str]:
        """What the devices found."""
        return [race for device in self.devices.values() for race in device.races]

    def check(self) -> None:
        """No race, and nothing that did not fit together."""
        assert self.races == [] and self.nccl.misfits == []

    def end(self) -> None:
        for device in self.devices.values():
            device.end()


class CudaWorkers(Workers):
    """All workers of a job on watched devices; options are those of Watched, `nodes` those of Workers."""

    def __init__(self, monkeypatch, job, nodes=None, **options):
        self.watched = Watched(monkeypatch, **options)

        def transport(kind, topology, *, mesh, worker, store, host, connect_s, join_s=None):
            return self.watched.transport(topology, mesh, worker, store[1], connect_s, join_s)

        monkeypatch.setattr(state, "make_transport", transport)
        super().__init__(job, nodes)

    def __exit__(self, *error):
        super().__exit__(*error)
        self.watched.end()
