"""The interface of a transport, the topology of ranks, its errors, and the dense form of tensors it moves.

Transports move memory: no strides, no lazy conjugate. Sums work on elements in order, complex ones as pairs; a
strided gradient is summed as a dense copy and written back.
Must not know stages, programs or schedules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

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


Lane = tuple[str, str] | tuple[str, str, str]
"""Sender and receiver: two meshes, whose workers of one number are connected, or two workers; on CUDA also with the name
of a group, whose lanes are one connection (see `exchange`)."""


@dataclass(frozen=True)
class Topology:
    """All workers of an attempt; the same value on each of them. Ranks count mesh by mesh, in each worker by worker.

    `workers_per_mesh` is a number, or one for each mesh where they differ. `tensors` has the tensor-parallel size of each
    mesh where these differ, or where they are above 1 and meshes are heterogeneous.
    """

    meshes: tuple[str, ...]
    workers_per_mesh: int | tuple[int, ...] = 1
    tensors: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(set(self.meshes)) != len(self.meshes):
            raise ValueError(f"mesh names repeat: {', '.join(self.meshes)}; give each mesh its own name")
        if isinstance(self.workers_per_mesh, tuple) and len(self.workers_per_mesh) != len(self.meshes):
            raise ValueError(
                f"workers_per_mesh lists {len(self.workers_per_mesh)} meshes and there are {len(self.meshes)}: "
                "give one number for each"
            )
        if min(self.sizes, default=1) < 1:
            raise ValueError(f"workers_per_mesh is {self.workers_per_mesh}; it must be at least 1")

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of workers of each mesh."""
        given = self.workers_per_mesh
        return given if isinstance(given, tuple) else (given,) * len(self.meshes)

    @property
    def uniform(self) -> bool:
        """True where all meshes have equally many workers and one tensor-parallel size: then worker w of one mesh has the
        same shards as worker w of another. The plan says whether they exchange tensors in pairs."""
        return len({*self.sizes}) <= 1 and self.tensors is None

    def tensor(self, mesh: str, else_of_all: int = 1) -> int:
        """The tensor-parallel size of `mesh`; `else_of_all` where all meshes have one."""
        return else_of_all if self.tensors is None else self.tensors[self.meshes.index(mesh)]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def workers(self, mesh: str) -> int:
        """The number of workers of `mesh`."""
        return self.sizes[self.meshes.index(mesh)]

    def rank(self, mesh: str, worker: int) -> int:
        return sum(self.sizes[: self.meshes.index(mesh)]) + worker

    def is_worker(self, peer: str) -> bool:
        """True where `peer` is one worker, as "m1/0", and not a mesh."""
        return peer.rpartition("/")[0] in self.meshes

    def rank_of(self, peer: str, worker: int) -> int:
        """The rank of a peer of some worker `worker`: a mesh means its worker of that number."""
        if not self.is_worker(peer):
            return self.rank(peer, worker)
        mesh, _, number = peer.rpartition("/")
        return self.rank(mesh, int(number))

    def name(self, rank: int) -> str:
        """ "m1/0": mesh and worker of a rank, for messages."""
        for mesh, workers in zip(self.meshes, self.sizes, strict=True):
            if rank < workers:
                return f"{mesh}/{rank}"
            rank -= workers
        raise IndexError(f"there is no rank beyond {self.size - 1}")

    def names(self, mesh: str) -> tuple[str, ...]:
        """The workers of `mesh`, in order."""
        return tuple(f"{mesh}/{worker}" for worker in range(self.workers(mesh)))


def topology_of(sizes: Mapping[str, int], tensors: tuple[int, ...] = ()) -> Topology:
    """The topology of meshes by their number of workers, with the tensor-parallel size of each."""
    numbers = tuple(sizes.values())
    heterogeneous = len({*numbers}) > 1
    return Topology(
        tuple(sizes),
        numbers if heterogeneous else numbers[0],
        tensors if max(tensors, default=1) > 1 and (heterogeneous or len({*tensors}) > 1) else None,
    )


@dataclass(frozen=True)
class Failure:
    """The first failure of the attempt that a worker announced."""

    origin: str
    reason: str


@dataclass(frozen=True)
class PeerProgress:
    """The progress that a worker last published, and its age in seconds."""

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

    def connect(self, groups: Mapping[str, tuple[int, ...]], lanes: tuple[Lane, ...]) -> None:
        """Block until every peer is there. `groups`: ranks that all-reduce together, by name, the same
        mapping on every worker; `lanes`: directed pairs of peers that exchange tensors, in the agreed order."""

    def send(self, peer: str, tag: int, tensor: torch.Tensor) -> Callable[[], None] | None:
        """Send contiguous `tensor` to `peer`: a mesh means this worker's counterpart there, "m1/0" is one worker."""

    def receive(self, peer: str, tag: int, out: torch.Tensor) -> Callable[[], None] | None:
        """Receive into contiguous `out`, which has the sender's shape and dtype."""

    def all_reduce(self, group: str, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the group, in place."""

    def start_all_reduce(self, group: str, tensor: torch.Tensor) -> Callable[[], None] | None:
        """Start an `all_reduce`: on CPU what it returns blocks until the sum is there, once."""

    def start_reduce_scatter(
        self, group: str, out: torch.Tensor, tensor: torch.Tensor
    ) -> Callable[[], None] | None:
        """Sum contiguous `tensor` over the group, of which this worker keeps its own part in `out`: one of as many equal
        ones as the group has workers, in their order. Only started on CPU, as `start_all_reduce`."""

    def start_all_gather(
        self, group: str, out: torch.Tensor, tensor: torch.Tensor
    ) -> Callable[[], None] | None:
        """Fill contiguous `out` with the `tensor` of every worker of the group, in their order; only started on CPU."""

    def exchange(
        self,
        group: str,
        sends: Sequence[tuple[str, torch.Tensor]],
        receives: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        """On CUDA only: enqueue all messages at once, to and from workers with lanes in the group; from one worker to
        another they come in their order. All are over before what follows on the stream begins."""

    def publish(self, text: str) -> None:
        """Publish the progress of this worker to its peers."""

    def progress(self, peer: str) -> PeerProgress | None:
        """The last progress of `peer`: a mesh (this worker's counterpart there), or one worker."""

    def post_message(self, what: str, text: str) -> None:
        """Post a message of this worker under the name `what`; the next one of that name replaces it."""

    def read_message(self, what: str, peer: str) -> str | None:
        """The message that worker `peer` posted under the name `what`, if any."""

    def announce(self, reason: str) -> None:
        """Tell the peers that this worker failed; the first announcement of an attempt stays."""

    def failure(self) -> Failure | None:
        """The first announced failure of the attempt, if any."""

    def abort(self) -> None:
        """Make every blocked call of this worker raise, now. May be called from any thread, repeatedly."""

    def close(self) -> None:
        """Free connections and threads; legal after an error."""


@contextlib.contextmanager
def closing_transport(transport: Transport) -> Iterator[None]:
    """Close the transport behind the body; abort it first where the body fails: what waits for a peer that failed
    too is not delivered, and close would wait for it."""
    try:
        yield
    except BaseException:
        transport.abort()
        raise
    finally:
        transport.close()


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, complex ones as pairs in a further dimension: what norms and libraries of collectives take."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def dense_for_sum(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """The dense real tensor that a sum in place of `tensor` works on, and a call that then writes it back (None where it is
    the tensor's own memory). Complex numbers are pairs. Another worker's gradient may have other strides: elements are
    summed, in order."""
    own = tensor.detach()
    dense = own.contiguous().resolve_conj().resolve_neg()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    if dense.data_ptr() == own.data_ptr():
        return real, None

    @torch.no_grad()
    def write() -> None:
        tensor.copy_(dense)

    return real, write


def check_dense(what: str, *tensors: torch.Tensor) -> None:
    """ValueError for a tensor whose memory is not its values in order: a transport would move other values."""
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            lazily = "lazily conjugated or negated" if tensor.is_contiguous() else "not contiguous"
            raise ValueError(
                f"{what}: a tensor of shape {list(tensor.shape)} is {lazily}, and transports move memory: make it "
                "contiguous, and resolve it (torch.resolve_conj, torch.resolve_neg)"
            )
