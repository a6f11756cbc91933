"""Rendezvous of an attempt's workers over one TCPStore: joining, progress, messages and the first failure.

The driver hosts the store, so that no worker's death ends it. A TCPStore authenticates nobody: where all
workers are on one machine it listens on loopback alone, and what workers say is sealed with an HMAC that only
the attempt's own processes can make, so that nobody else who reaches the port can end an attempt.
Must not know tensors or transfers.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from worker.transport.base import ConnectError, Failure, PeerProgress, Topology

STORE_TIMEOUT = timedelta(seconds=5)
SECRET_VARIABLE = "SLOTLINE_ATTEMPT_TOKEN"
"""The variable of the driver's and its workers' environment with the secret of the attempt; tests have none."""
_LOOPBACK = "127.0.0.1"
_BACKLOG = 4096


def host_store(host: str) -> dist.TCPStore:
    """Serve the rendezvous of one attempt from this process, on that address only. Keep the object alive; its
    `port` is the one to give to the workers."""
    with socket.socket() as listening:  # of its own accord the store listens on every address
        listening.bind((host, 0))
        listening.listen(_BACKLOG)
        return dist.TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
            master_listen_fd=listening.detach(),
        )


def serve_rendezvous(own: str, nodes: Collection[str]) -> tuple[dist.TCPStore, tuple[str, int]]:
    """A store for workers on `nodes` (addresses, as the driver's `own`), and the address to give to them."""
    if {*nodes} == {own}:
        store = host_store(_LOOPBACK)
        return store, (_LOOPBACK, store.port)
    store = host_store("0.0.0.0")
    return store, (own, store.port)


def announce_loss(store: dist.Store, worker: str) -> None:
    """Tell all at this rendezvous, as their driver, that this worker is lost: behind a broken connection each would wait a
    while for a peer's word on it."""
    seal = Seal(os.environ.get(SECRET_VARIABLE, ""), "")
    with contextlib.suppress(RuntimeError):
        store.compare_set(seal.failure_key, "", seal.put("failure", ["the driver", f"{worker} is gone"]))


def first_line(error: BaseException) -> str:
    """The message of an error of gloo, NCCL or the store, without its stack."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class Seal:
    """Values that only those who know the secret can write; `name` keeps a value from passing for another's."""

    def __init__(self, secret: str, prefix: str) -> None:
        self._secret = f"{secret} {prefix}".encode()
        self.failure_key = f"failure/{self._code('the place of the failure', '')}"
        """A key that outsiders cannot guess, and so not take before it is needed."""

    def put(self, name: str, value: list[Any]) -> str:
        text = json.dumps(value)
        return f"{self._code(name, text)} {text}"

    def read(self, name: str, sealed: bytes) -> list[Any] | None:
        """The value that `put` sealed; None for one that an outsider wrote."""
        code, _, text = sealed.decode("utf-8", "replace").partition(" ")
        if not hmac.compare_digest(code.encode(), self._code(name, text).encode()):
            return None
        return json.loads(text)

    def _code(self, name: str, text: str) -> str:
        return hmac.new(self._secret, f"{name}\n{text}".encode(), hashlib.sha256).hexdigest()


class Rendezvous:
    """One worker's view of the store, at which all are within `timeout_s`. `prefix` keeps several pipelines apart in one
    store."""

    def __init__(
        self, topology: Topology, *, rank: int, host: str, port: int, timeout_s: float, prefix: str = ""
    ):
        self._topology = topology
        self._rank = rank
        self._address = (host, port)
        self._timeout_s = timeout_s
        self._prefix = prefix
        self._seal = Seal(os.environ.get(SECRET_VARIABLE, ""), prefix)
        self.store: dist.Store | None = None

    def join(self) -> None:
        """Open the store and wait until every worker has. ConnectError names who is missing."""
        deadline = time.monotonic() + self._timeout_s
        self.store = self._open()
        self.store.set(f"joined/{self._rank}", "1")
        missing = list(range(self._topology.size))
        while True:
            missing = [rank for rank in missing if not self.store.check([f"joined/{rank}"])]
            if not missing:
                return
            if failure := self.failure():
                raise ConnectError(f"{failure.origin} gave up: {failure.reason}")
            if time.monotonic() > deadline:
                names = ", ".join(self._topology.name(rank) for rank in missing)
                raise ConnectError(f"{names} did not connect within {self._timeout_s:g} s")
            time.sleep(0.02)

    def publish(self, text: str) -> None:
        """RuntimeError when the store is gone."""
        key = f"progress/{self._rank}"
        self.store.set(key, self._seal.put(key, [text, time.time()]))

    def progress(self, rank: int) -> PeerProgress | None:
        key = f"progress/{rank}"
        with contextlib.suppress(RuntimeError):
            if (said := self._read_sealed(key, key)) is not None:
                return PeerProgress(said[0], max(0.0, time.time() - said[1]))
        return None

    def post_message(self, what: str, text: str) -> None:
        """RuntimeError when the store is gone."""
        key = f"{what}/{self._rank}"
        self.store.set(key, self._seal.put(key, [text]))

    def read_message(self, what: str, rank: int) -> str | None:
        key = f"{what}/{rank}"
        with contextlib.suppress(RuntimeError):
            if (said := self._read_sealed(key, key)) is not None:
                return said[0]
        return None

    def announce(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):
            if self.store is not None:
                failure = [self._topology.name(self._rank), reason]
                self.store.compare_set(self._seal.failure_key, "", self._seal.put("failure", failure))

    def failure(self) -> Failure | None:
        with contextlib.suppress(RuntimeError):
            if (said := self._read_sealed(self._seal.failure_key, "failure")) is not None:
                return Failure(*said)
        return None

    def close(self) -> None:
        self.store = None

    def _read_sealed(self, key: str, name: str) -> list[Any] | None:
        """The value that a worker of this attempt put at `key`; None where there is none, or one of an outsider."""
        if self.store is None or not self.store.check([key]):
            return None
        return self._seal.read(name, self.store.get(key))

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


def in_rounds(lanes: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same lanes in an order in which many connect at once: round by round, in each of which a mesh has one at most.

    A greedy edge colouring: at most 2Δ − 1 rounds, where no mesh has more than Δ lanes (in sorted order a chain of meshes
    would connect one pair after the other). The same on every worker for the same lanes.
    """
    taken: dict[str, set[int]] = defaultdict(set)
    rounds: list[list[tuple[str, str]]] = []
    for lane in lanes:
        used = taken[lane[0]] | taken[lane[1]]
        number = next(number for number in itertools.count() if number not in used)
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(lane)
        for mesh in lane:
            taken[mesh].add(number)
    return [lane for one in rounds for lane in one]


class RendezvousTransport:
    """A transport between processes whose messages, progress and failures travel over the rendezvous, where all its
    workers arrive within `join_timeout_s`.

    Subclasses move tensors: they add connect, send, receive, all_reduce, abort and close.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        mesh: str,
        worker: int,
        store: tuple[str, int],
        join_timeout_s: float,
        prefix: str = "",
    ):
        self.topology = topology
        self.mesh = mesh
        self.worker = worker
        self._rank = topology.rank(mesh, worker)
        self._rendezvous = Rendezvous(
            topology,
            rank=self._rank,
            host=store[0],
            port=store[1],
            timeout_s=join_timeout_s,
            prefix=prefix,
        )

    def publish(self, text: str) -> None:
        self._rendezvous.publish(text)

    def progress(self, peer: str) -> PeerProgress | None:
        return self._rendezvous.progress(self.topology.rank_of(peer, self.worker))

    def post_message(self, what: str, text: str) -> None:
        self._rendezvous.post_message(what, text)

    def read_message(self, what: str, peer: str) -> str | None:
        return self._rendezvous.read_message(what, self.topology.rank_of(peer, self.worker))

    def announce(self, reason: str) -> None:
        self._rendezvous.announce(reason)

    def failure(self) -> Failure | None:
        return self._rendezvous.failure()

    def _own_lanes(
        self, lanes: tuple[tuple[str, str], ...]
    ) -> Iterator[tuple[str, str, str, tuple[int, int]]]:
        """Source, target, name and ranks of each connection that ends here, in the agreed order."""
        for source, target in in_rounds(lanes):
            ranks = (self.topology.rank_of(source, self.worker), self.topology.rank_of(target, self.worker))
            if self._rank in ranks:
                one = self.topology.is_worker(source)
                yield source, target, f"{source}>{target}" + ("" if one else f"/{self.worker}"), ranks

    def _own_groups(self, groups: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and ranks of each group of several workers that this one belongs to, in the agreed order."""
        for name in sorted(groups):
            if self._rank in groups[name] and len(groups[name]) > 1:
                yield name, groups[name]
