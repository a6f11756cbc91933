"""The interface of a transport, the ranks behind it, and the errors that cross it.

Light: no torch at import. Must not know stages, programs or schedules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class EngineError(RuntimeError):
    """A step ended early; the engine that raised it can only be closed. Survives pickling."""


class ConnectError(EngineError):
    """A peer was not there in time; the message names it."""


class PeerLostError(EngineError):
    """The connection to `peer` broke in the middle of a step."""

    def __init__(self, message: str, peer: str):
        super().__init__(message, peer)
        self.message = message
        self.peer = peer

    def __str__(self) -> str:
        return self.message


class AbortedError(EngineError):
    """Somebody else failed first: `origin` says who ("m1/0"; "" is a local call of abort), `reason` why."""

    def __init__(self, origin: str, reason: str):
        super().__init__(origin, reason)
        self.origin = origin
        self.reason = reason

    def __str__(self) -> str:
        return f"aborted because {self.origin or 'the caller'} said: {self.reason}"


@dataclass(frozen=True)
class Topology:
    """All workers of an attempt; the same value on each of them. Rank = mesh index * workers + worker."""

    meshes: tuple[str, ...]
    workers_per_mesh: int = 1

    def __post_init__(self) -> None:
        if len(set(self.meshes)) != len(self.meshes):
            raise ValueError(f"mesh names repeat: {', '.join(self.meshes)}; give each mesh its own name")
        if self.workers_per_mesh < 1:
            raise ValueError(f"workers_per_mesh is {self.workers_per_mesh}; it must be at least 1")

    @property
    def size(self) -> int:
        return len(self.meshes) * self.workers_per_mesh

    def rank(self, mesh: str, worker: int) -> int:
        return self.meshes.index(mesh) * self.workers_per_mesh + worker

    def name(self, rank: int) -> str:
        """ "m1/0": mesh and worker of a rank, for messages."""
        return f"{self.meshes[rank // self.workers_per_mesh]}/{rank % self.workers_per_mesh}"


@dataclass(frozen=True)
class Failure:
    """The first failure of the attempt that anybody announced."""

    origin: str
    reason: str


@dataclass(frozen=True)
class Progress:
    """What a worker last said of itself, and how long ago."""

    text: str
    age_s: float


def finish(transfer: Callable[[], None] | None) -> None:
    """Block until `transfer`, which `send` or `receive` returned, has ended; on CUDA the stream says when."""
    if transfer is not None:
        transfer()


class Transport(Protocol):
    """One worker's end of all its transfers.

    `send` and `receive` only start a transfer. On CPU it then goes on by itself, and what they return blocks
    until it has ended; it must be called before `close`, once: a second call may block for ever. On CUDA
    they enqueue it on the current stream and return None. `all_reduce` blocks on CPU and enqueues on CUDA. Both
    ends of a transfer give the same `tag`; two transfers of one step never share a tag.
    """

    topology: Topology
    mesh: str
    worker: int

    def connect(self, groups: Mapping[str, tuple[int, ...]], lanes: tuple[tuple[str, str], ...]) -> None:
        """Block until every peer is there. `groups`: ranks that all-reduce together, by name, the same
        mapping on every worker; `lanes`: directed pairs of meshes that exchange tensors, in the agreed order."""

    def send(self, peer: str, tag: int, tensor: torch.Tensor) -> Callable[[], None] | None:
        """Send contiguous `tensor` to this worker's counterpart on mesh `peer`."""

    def receive(self, peer: str, tag: int, out: torch.Tensor) -> Callable[[], None] | None:
        """Receive into contiguous `out`, which has the sender's shape and dtype."""

    def all_reduce(self, group: str, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the group, in place."""

    def start_all_reduce(self, group: str, tensor: torch.Tensor) -> Callable[[], None] | None:
        """As `all_reduce`, but only started on CPU: what it returns blocks until the sum is there, once."""

    def publish(self, text: str) -> None:
        """Tell the peers what this worker did last."""

    def progress(self, mesh: str) -> Progress | None:
        """What this worker's counterpart on `mesh` last published."""

    def announce(self, reason: str) -> None:
        """Tell the peers that this worker failed; the first announcement of an attempt stays."""

    def failure(self) -> Failure | None:
        """The first announced failure of the attempt, if any."""

    def abort(self) -> None:
        """Make every blocked call of this worker raise, now. May be called from any thread, repeatedly."""

    def close(self) -> None:
        """Free connections and threads; legal after an error."""


@contextlib.contextmanager
def for_a_while(transport: Transport) -> Iterator[None]:
    """Close the transport behind the body; abort it first where the body fails: what waits for a peer that failed
    too is not delivered, and close would wait for it."""
    try:
        yield
    except BaseException:
        transport.abort()
        raise
    finally:
        transport.close()
