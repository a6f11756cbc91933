"""Transport between processes on CPU: gloo point-to-point, all-reduce, reduce-scatter and all-gather over TCP.

Every direction of every pair of meshes has its own connection: gloo announces that a receiver is ready on the
connection that carries the tensors, and that word must not queue behind tensors of the other direction. On a
connection every transfer of a step has its own tag. Waits are unbounded: the engine knows each slot's limit and
calls `abort`. gloo's own abort does not wake a waiting transfer; a wait that times out does (torch 2.13).
Must not know stages, programs or schedules.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from worker.transport.base import ConnectError, PeerLostError, Topology, check_dense, dense_for_sum, finish
from worker.transport.rendezvous import STORE_TIMEOUT, RendezvousTransport, first_line, host_store

# Blocking for ever is the engine's business: it knows each slot's limit and calls `abort`.
_NEVER = timedelta(days=7)
_ABORT_TAG = 2**31 - 1
_LOOP_THREAD = "gloo_tcp_loop"

__all__ = ["GlooTransport", "host_store"]


class GlooTransport(RendezvousTransport):
    """One worker's end of all its transfers, over TCP.

    `host` is the address of this worker that its peers connect to (default: that of its host name).
    """

    def __init__(
        self,
        topology: Topology,
        *,
        mesh: str,
        worker: int,
        store: tuple[str, int],
        host: str | None = None,
        connect_timeout_s: float = 60.0,
        join_timeout_s: float | None = None,
        prefix: str = "",
    ):
        super().__init__(
            topology,
            mesh=mesh,
            worker=worker,
            store=store,
            join_timeout_s=connect_timeout_s if join_timeout_s is None else join_timeout_s,
            prefix=prefix,
        )
        self._host = host
        self._connect_timeout_s = connect_timeout_s
        self._device: dist.ProcessGroupGloo.Device | None = None
        self._sends: dict[str, dist.ProcessGroupGloo] = {}
        self._receives: dict[str, dist.ProcessGroupGloo] = {}
        self._groups: dict[str, dist.ProcessGroupGloo] = {}
        self._alone: frozenset[str] = frozenset()
        self._abort_lock = threading.Lock()
        self._aborted = False

    def connect(self, groups: Mapping[str, tuple[int, ...]], lanes: tuple[tuple[str, str], ...]) -> None:
        """Raises ConnectError naming who is missing."""
        self._alone = frozenset(name for name, ranks in groups.items() if len(ranks) == 1)
        self._rendezvous.join()
        try:
            self._device = self._make_device()
            for source, target, name, ranks in self._own_lanes(lanes):
                pair = self._make_group(name, ranks, self._connect_timeout_s)
                if ranks[0] == self._rank:
                    self._sends[target] = pair
                else:
                    self._receives[source] = pair
            for name, ranks in self._own_groups(groups):
                self._groups[name] = self._make_group(f"group/{name}", ranks, self._connect_timeout_s)
        except RuntimeError as error:
            raise ConnectError(
                f"{self.topology.name(self._rank)} could not connect to its peers within "
                f"{self._connect_timeout_s:g} s: {first_line(error)}"
            ) from error

        set_loop_threads_to_batch()

    def send(self, peer: str, tag: int, tensor: torch.Tensor) -> Callable[[], None]:
        check_dense(f"sending to {peer}", tensor)
        return _start_transfer(peer, f"sending to {peer}", lambda: self._sends[peer].send([tensor], 1, tag))

    def receive(self, peer: str, tag: int, out: torch.Tensor) -> Callable[[], None]:
        check_dense(f"receiving from {peer}", out)
        return _start_transfer(
            peer, f"receiving from {peer}", lambda: self._receives[peer].recv([out], 0, tag)
        )

    def all_reduce(self, group: str, tensor: torch.Tensor) -> None:
        finish(self.start_all_reduce(group, tensor))

    def start_all_reduce(self, group: str, tensor: torch.Tensor) -> Callable[[], None] | None:
        if group in self._alone:
            return None
        if group not in self._groups:
            known = ", ".join(sorted(self._groups)) or "none"
            raise ValueError(f"no gloo connection in group {group!r} was made; there are: {known}")
        reduce, (dense, write) = self._groups[group].allreduce, dense_for_sum(tensor)
        ended = _start_transfer(group, f"the all-reduce over {group}", lambda: reduce([dense]))
        if write is None:
            return ended

        def finish() -> None:
            ended()
            write()

        return finish

    def start_reduce_scatter(
        self, group: str, out: torch.Tensor, tensor: torch.Tensor
    ) -> Callable[[], None] | None:
        """Every worker sends every other its part, and sums in the order of the workers: gloo's own sums everything
        everywhere first, which moves twice the bytes (torch 2.13)."""
        check_dense(f"the reduce-scatter over {group}", tensor, out)
        parts = torch.empty_like(tensor)
        whole = self._groups[group].alltoall_base
        ended = _start_transfer(
            group, f"the reduce-scatter over {group}", lambda: whole(parts, tensor.detach(), [], [])
        )

        def finish() -> None:
            ended()
            torch.sum(parts.view(-1, *out.shape), 0, out=out)

        return finish

    def start_all_gather(
        self, group: str, out: torch.Tensor, tensor: torch.Tensor
    ) -> Callable[[], None] | None:
        check_dense(f"the all-gather over {group}", tensor, out)
        gather = self._groups[group]._allgather_base
        return _start_transfer(
            group, f"the all-gather over {group}", lambda: gather(out.view(-1), tensor.detach().view(-1))
        )

    def abort(self) -> None:
        # gloo's own abort() does not wake a waiting transfer (measured with torch 2.13); a wait that times
        # out does: gloo then fails every operation of the context and closes its connections. A wait for a
        # peer whose connection is gone fails at once and wakes nothing, so one for each peer.
        with self._abort_lock:
            if self._aborted:
                return
            self._aborted = True
            for group in [*self._sends.values(), *self._receives.values(), *self._groups.values()]:
                for other in set(range(group.size())) - {group.rank()}:
                    with contextlib.suppress(RuntimeError):
                        group.recv([torch.zeros(1)], other, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self._sends, self._receives, self._groups = {}, {}, {}
        self._device = None
        self._rendezvous.close()

    def _make_device(self) -> dist.ProcessGroupGloo.Device:
        if self._host:
            return dist.ProcessGroupGloo.create_device(hostname=self._host)
        return dist.ProcessGroupGloo.create_default_device()

    def _make_group(self, name: str, ranks: tuple[int, ...], timeout_s: float) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._threads = 1
        options._timeout = timedelta(seconds=timeout_s)
        store = dist.PrefixStore(name, self._rendezvous.store)
        store.set_timeout(timedelta(seconds=timeout_s))
        group = dist.ProcessGroupGloo(store, ranks.index(self._rank), len(ranks), options)
        store.set_timeout(STORE_TIMEOUT)
        group.set_timeout(_NEVER)
        return group


def set_loop_threads_to_batch() -> None:
    """Keep gloo's own threads of this process from preempting those that they then wait for.

    A loop thread that cannot take a connection's lock asks epoll again at once, for as long as the thread that holds the
    lock (it is sending, or posting a receive) has no core. Woken by the other side it takes that core itself, and then
    burns it: 10 to 60 calls of epoll_wait for each transfer that were answered and read nothing, 50 to 500 µs of
    processor time (torch 2.13, two processes on two cores). SCHED_BATCH threads do not preempt whom they wake
    beside: 10 to 40 µs. Linux only; elsewhere, and where it is forbidden, nothing changes.
    """
    for folder in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text().strip() == _LOOP_THREAD:
                os.sched_setscheduler(int(folder.name), os.SCHED_BATCH, os.sched_param(0))


def _start_transfer(peer: str, what: str, start: Callable[[], dist.Work]) -> Callable[[], None]:
    """Start a transfer; returns a call that blocks until it has ended."""
    with _peer_lost_on_error(peer, what):
        work = start()

    def wait() -> None:
        with _peer_lost_on_error(peer, what):
            work.wait()

    return wait


@contextlib.contextmanager
def _peer_lost_on_error(peer: str, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"{what} failed: {first_line(error)}", peer) from None
