"""Transport between engines of one process, one engine per thread: for tests and tiny runs.

A transfer is a rendezvous, as with gloo and NCCL. Must not know stages, programs or schedules.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping

import torch

from worker.transport.base import ConnectError, Failure, PeerLostError, PeerProgress, Topology

_ABORTED = object()


class _Mailbox:
    """One tag between two ranks: the tensor one way, the receipt the other."""

    def __init__(self) -> None:
        self.tensor: queue.SimpleQueue = queue.SimpleQueue()
        self.receipt: queue.SimpleQueue = queue.SimpleQueue()


class _Hub:
    """The state that the transports of one process share."""

    def __init__(self, topology: Topology):
        self.topology = topology
        self.lock = threading.Lock()
        self.mailboxes: dict[tuple[int, int, bool, int], _Mailbox] = {}
        self.aborted = False
        self.joined: set[int] = set()
        self.arrived = threading.Condition(self.lock)
        self.barriers: dict[str, threading.Barrier] = {}
        self.parts: dict[str, dict[int, torch.Tensor]] = {}
        self.failure: Failure | None = None
        self.progress: dict[int, tuple[str, float]] = {}
        self.messages: dict[tuple[str, int], str] = {}

    def mailbox(self, source: int, target: int, tag: int, peer: str = "") -> _Mailbox:
        """Lanes of meshes and lanes of workers have tags of their own."""
        with self.lock:
            if self.aborted:
                raise PeerLostError("the transport was aborted", self.topology.name(target))
            return self.mailboxes.setdefault((source, target, self.topology.is_worker(peer), tag), _Mailbox())

    def abort(self) -> None:
        with self.lock:
            self.aborted = True
            boxes = list(self.mailboxes.values())
            self.arrived.notify_all()
        for box in boxes:
            box.tensor.put(_ABORTED)
            box.receipt.put(_ABORTED)
        for barrier in self.barriers.values():
            barrier.abort()


class LocalTransport:
    """One worker's end; make all ends of a topology with `LocalTransport.group`."""

    def __init__(self, hub: _Hub, mesh: str, worker: int, connect_timeout_s: float):
        self.topology = hub.topology
        self.mesh = mesh
        self.worker = worker
        self._hub = hub
        self._rank = hub.topology.rank(mesh, worker)
        self._connect_timeout_s = connect_timeout_s

    @classmethod
    def group(
        cls, topology: Topology, connect_timeout_s: float = 30.0
    ) -> dict[tuple[str, int], LocalTransport]:
        """The transports of all workers of `topology`, by (mesh, worker)."""
        hub = _Hub(topology)
        return {
            (mesh, worker): cls(hub, mesh, worker, connect_timeout_s)
            for mesh in topology.meshes
            for worker in range(topology.workers(mesh))
        }

    def connect(self, groups: Mapping[str, tuple[int, ...]], lanes: tuple[tuple[str, str], ...]) -> None:
        hub = self._hub
        with hub.lock:
            for name, ranks in sorted(groups.items()):
                hub.barriers.setdefault(name, threading.Barrier(len(ranks)))
                hub.parts.setdefault(name, {})
            hub.joined.add(self._rank)
            hub.arrived.notify_all()
            all_joined = hub.arrived.wait_for(
                lambda: hub.aborted or len(hub.joined) == self.topology.size, self._connect_timeout_s
            )
            missing = [self.topology.name(r) for r in range(self.topology.size) if r not in hub.joined]
        if not all_joined or missing:
            raise ConnectError(f"{', '.join(missing)} did not connect within {self._connect_timeout_s:g} s")

    def send(self, peer: str, tag: int, tensor: torch.Tensor) -> Callable[[], None]:
        target = self.topology.rank_of(peer, self.worker)
        box = self._hub.mailbox(self._rank, target, tag, peer)
        box.tensor.put(tensor)

        def wait() -> None:
            if box.receipt.get() is _ABORTED:
                raise PeerLostError(f"sending to {peer} was aborted", peer)

        return wait

    def receive(self, peer: str, tag: int, out: torch.Tensor) -> Callable[[], None]:
        source = self.topology.rank_of(peer, self.worker)
        box = self._hub.mailbox(source, self._rank, tag, peer)
        return lambda: self._receive(box, peer, tag, out)

    def _receive(self, box: _Mailbox, peer: str, tag: int, out: torch.Tensor) -> None:
        source = self.topology.rank_of(peer, self.worker)
        tensor = box.tensor.get()
        if tensor is _ABORTED:
            raise PeerLostError(f"receiving from {peer} was aborted", peer)
        if tensor.shape != out.shape or tensor.dtype != out.dtype:
            raise PeerLostError(
                f"{peer} sent {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(out.shape)} {out.dtype}",
                peer,
            )
        # A write that autograd does not see, as from a socket or from NCCL.
        out.data.copy_(tensor.detach())
        with self._hub.lock:
            self._hub.mailboxes.pop((source, self._rank, self.topology.is_worker(peer), tag), None)
        box.receipt.put(None)

    def all_reduce(self, group: str, tensor: torch.Tensor) -> None:
        tensor.detach().copy_(self._gather_all(group, "all-reduce", tensor).sum(0))

    def start_all_reduce(self, group: str, tensor: torch.Tensor) -> Callable[[], None]:
        return lambda: self.all_reduce(group, tensor)

    def start_reduce_scatter(self, group: str, out: torch.Tensor, tensor: torch.Tensor) -> Callable[[], None]:
        def finish() -> None:
            total = self._gather_all(group, "reduce-scatter", tensor).sum(0)
            own = sorted(self._hub.parts[group]).index(self._rank)
            out.copy_(total.view(-1, *out.shape)[own])

        return finish

    def start_all_gather(self, group: str, out: torch.Tensor, tensor: torch.Tensor) -> Callable[[], None]:
        def finish() -> None:
            out.copy_(self._gather_all(group, "all-gather", tensor).view_as(out))

        return finish

    def _gather_all(self, group: str, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of every worker of the group, stacked in their order."""
        barrier, parts = self._hub.barriers[group], self._hub.parts[group]
        parts[self._rank] = tensor.detach().clone()
        try:
            barrier.wait()
            stacked = torch.stack([parts[rank] for rank in sorted(parts)])
            barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLostError(f"the {what} over {group} was aborted", group) from None
        return stacked

    def publish(self, text: str) -> None:
        self._hub.progress[self._rank] = (text, time.monotonic())

    def progress(self, peer: str) -> PeerProgress | None:
        entry = self._hub.progress.get(self.topology.rank_of(peer, self.worker))
        return None if entry is None else PeerProgress(entry[0], time.monotonic() - entry[1])

    def post_message(self, what: str, text: str) -> None:
        self._hub.messages[what, self._rank] = text

    def read_message(self, what: str, peer: str) -> str | None:
        return self._hub.messages.get((what, self.topology.rank_of(peer, self.worker)))

    def announce(self, reason: str) -> None:
        with self._hub.lock:
            if self._hub.failure is None:
                self._hub.failure = Failure(self.topology.name(self._rank), reason)

    def failure(self) -> Failure | None:
        return self._hub.failure

    def abort(self) -> None:
        self._hub.abort()

    def close(self) -> None:
        """Nothing of this end is left; engines of the other ends go on until they are aborted."""
