"""How the workers of an attempt find each other and hear of each other's fate: one TCPStore.

The driver hosts the store, so that no worker's death ends it. Must not know tensors or transfers.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch.distributed as dist

from worker.transport.base import ConnectError, Failure, Progress, Topology

STORE_TIMEOUT = timedelta(seconds=5)


def host_store(host: str = "0.0.0.0", port: int = 0) -> dist.TCPStore:
    """Serve the rendezvous of one attempt from this process. Keep the object alive; its `port` is the
    one to give to the workers."""
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)


def first_line(error: BaseException) -> str:
    """What an error of gloo, NCCL or the store says, without its stack."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class Rendezvous:
    """One worker's view of the store. `prefix` keeps several pipelines apart in one store."""

    def __init__(
        self, topology: Topology, *, rank: int, host: str, port: int, timeout_s: float, prefix: str = ""
    ):
        self._topology = topology
        self._rank = rank
        self._address = (host, port)
        self._timeout_s = timeout_s
        self._prefix = prefix
        self.store: dist.Store | None = None

    def join(self) -> float:
        """Open the store and wait until every worker has; the seconds that are left for connecting.

        ConnectError names who is missing."""
        deadline = time.monotonic() + self._timeout_s
        self.store = self._open()
        self.store.set(f"joined/{self._rank}", "1")
        missing = list(range(self._topology.size))
        while True:
            missing = [rank for rank in missing if not self.store.check([f"joined/{rank}"])]
            if not missing:
                return max(1.0, deadline - time.monotonic())
            if failure := self.failure():
                raise ConnectError(f"{failure.origin} gave up: {failure.reason}")
            if time.monotonic() > deadline:
                names = ", ".join(self._topology.name(rank) for rank in missing)
                raise ConnectError(f"{names} did not connect within {self._timeout_s:g} s")
            time.sleep(0.02)

    def publish(self, text: str) -> None:
        """RuntimeError when the store is gone."""
        self.store.set(f"progress/{self._rank}", json.dumps([text, time.time()]))

    def progress(self, rank: int) -> Progress | None:
        key = f"progress/{rank}"
        with contextlib.suppress(RuntimeError):
            if self.store is not None and self.store.check([key]):
                text, at = json.loads(self.store.get(key))
                return Progress(text, max(0.0, time.time() - at))
        return None

    def announce(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):
            if self.store is not None:
                failure = json.dumps([self._topology.name(self._rank), reason])
                self.store.compare_set("failure", "", failure)

    def failure(self) -> Failure | None:
        with contextlib.suppress(RuntimeError):
            if self.store is not None and self.store.check(["failure"]):
                return Failure(*json.loads(self.store.get("failure")))
        return None

    def close(self) -> None:
        self.store = None

    def _open(self) -> dist.Store:
        host, port = self._address
        timeout = timedelta(seconds=self._timeout_s)
        try:
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        except RuntimeError as error:
            raise ConnectError(
                f"no rendezvous store at {host}:{port} within {self._timeout_s:g} s: {first_line(error)}"
            ) from error
        store.set_timeout(STORE_TIMEOUT)
        return dist.PrefixStore(self._prefix, store) if self._prefix else store


class RendezvousTransport:
    """The part of a transport between processes that passes words, not tensors, over the rendezvous.

    A subclass adds connect, send, receive, all_reduce, abort and close.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        mesh: str,
        worker: int,
        store_host: str,
        store_port: int,
        connect_timeout_s: float,
        prefix: str = "",
    ):
        self.topology = topology
        self.mesh = mesh
        self.worker = worker
        self._rank = topology.rank(mesh, worker)
        self._rendezvous = Rendezvous(
            topology,
            rank=self._rank,
            host=store_host,
            port=store_port,
            timeout_s=connect_timeout_s,
            prefix=prefix,
        )

    def publish(self, text: str) -> None:
        self._rendezvous.publish(text)

    def progress(self, mesh: str) -> Progress | None:
        return self._rendezvous.progress(self.topology.rank(mesh, self.worker))

    def announce(self, reason: str) -> None:
        self._rendezvous.announce(reason)

    def failure(self) -> Failure | None:
        return self._rendezvous.failure()

    def _own_lanes(
        self, lanes: tuple[tuple[str, str], ...]
    ) -> Iterator[tuple[str, str, str, tuple[int, int]]]:
        """Source, target, name and ranks of each connection that ends here, in the agreed order."""
        for source, target in lanes:
            ranks = (self.topology.rank(source, self.worker), self.topology.rank(target, self.worker))
            if self._rank in ranks:
                yield source, target, f"{source}>{target}/{self.worker}", ranks

    def _own_groups(self, groups: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and ranks of each group of several workers that this one belongs to, in the agreed order."""
        for name in sorted(groups):
            if self._rank in groups[name] and len(groups[name]) > 1:
                yield name, groups[name]
