"""Transport between GPUs: NCCL through cupy, a communicator per direction of two meshes and per process group.

Every call is enqueued on torch's current stream, which the engine sets to the lane's. On one communicator NCCL
matches transfers and sums by order; all ends' programs have the same order (the scheduler proves it). Meshes
between which tensors are resharded have one communicator of all their workers for each direction: an exchange
is one kernel. Communicators are made in one order on all workers, self-tested, and ended together on a thread
of their own: freeing one waits for the device, where a receive of the next may still spin. Calls under way are
counted: none is freed under a call. cupy must load the NCCL that torch was built for: whichever loads first
serves both. Must not know stages or programs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from worker.transport.base import (
    ConnectError,
    Failure,
    Lane,
    PeerLostError,
    Topology,
    check_dense,
    dense_for_sum,
)
from worker.transport.rendezvous import RendezvousTransport, first_line
from worker.transport.selftest import SelfTest, exchange_selftests, group_selftests, lane_selftests


def check_nccl_versions(of_torch: tuple[int, ...], of_cupy: int) -> None:
    """Refuse two different NCCLs in one process: whichever loads first serves both, and structures differ.

    ConnectError with the pair that fits. `of_cupy` is NCCL's own number, 22809 for 2.28.9.
    """
    cupy_version = (of_cupy // 10000, of_cupy // 100 % 100, of_cupy % 100)
    built_version = tuple(of_torch[:3])
    if cupy_version != built_version:
        want, have = (".".join(map(str, version)) for version in (built_version, cupy_version))
        raise ConnectError(
            f"torch was built for NCCL {want}, but cupy loads NCCL {have}: install nvidia-nccl-cu12 or "
            f"nvidia-nccl-cu13 =={want} (the one of torch's CUDA) and let cupy find that library first"
        )


@dataclass(frozen=True)
class NcclLibrary:
    """NCCL as this process has it: cupy's bindings, the version that torch was built for, torch's current stream."""

    nccl: Any
    torch_version: tuple[int, ...]
    stream_pointer: Callable[[], int]

    @classmethod
    def load(cls) -> NcclLibrary:
        """The installed one. ConnectError where cupy or its library is missing."""
        nccl = load_nccl()
        return cls(nccl, torch.cuda.nccl.version(), lambda: torch.cuda.current_stream().cuda_stream)


def load_nccl() -> Any:
    """cupy.cuda.nccl; ConnectError where it or its library is missing."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ConnectError(
            "cupy is not installed: install slotline[cuda12] or slotline[cuda13], as torch's CUDA has it"
        ) from error
    if not nccl.available:  # an import that failed inside cupy is only a warning there
        raise ConnectError(
            "cupy finds no NCCL library (libnccl.so.2): import torch first, which brings its own, or install "
            "nvidia-nccl-cu12 or nvidia-nccl-cu13, as torch's CUDA has it"
        )
    return nccl


# ncclDataType_t and ncclRedOp_t of nccl.h. Only sums need to know types: transfers move bytes.
_BYTES = 1
_SUMMED_TYPES = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_SUM = 0
# How long a caller waits for its communicators to end. What takes longer goes on, or hangs, on a thread of its
# own: the failure is told all the same, and the driver kills the process.
_ABORT_S = 2.0
_DESTROY_S = 10.0
# How long a call into NCCL may take to return before an abort no longer waits for it: it is what hangs.
_CALL_S = 0.5
# How often the device is asked whether it is through with the trials.
_SELFTEST_POLL_S = 0.01
_NEW_STATUSES = {6: "6, ncclRemoteError: a peer exited or the network failed", 7: "7, ncclInProgress"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NcclSettings:
    """Limits on the width of NCCL's kernels: they take multiprocessors from compute while they wait.

    None leaves NCCL's own choice. Must be applied before the first communicator of the process.
    """

    max_p2p_channels: int | None = None
    max_ctas: int | None = None

    def apply(self, environment: dict[str, str] | os._Environ = os.environ) -> None:
        """Set NCCL's environment variables; one that the user has set stays."""
        for name, value in (
            ("NCCL_MAX_P2P_NCHANNELS", self.max_p2p_channels),
            ("NCCL_MAX_CTAS", self.max_ctas),
        ):
            if value is not None:
                environment.setdefault(name, str(value))


class NcclTransport(RendezvousTransport):
    """One GPU's end of all its transfers. Construct it after the device has been chosen, and other NcclSettings than the
    default have been applied.

    `library` is that of cupy and torch unless a test brings its own.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        mesh: str,
        worker: int,
        store: tuple[str, int],
        connect_timeout_s: float = 120.0,
        join_timeout_s: float | None = None,
        prefix: str = "",
        library: NcclLibrary | None = None,
    ):
        NcclSettings().apply()
        super().__init__(
            topology,
            mesh=mesh,
            worker=worker,
            store=store,
            join_timeout_s=connect_timeout_s if join_timeout_s is None else join_timeout_s,
            prefix=prefix,
        )
        self._connect_timeout_s = connect_timeout_s
        library = library or NcclLibrary.load()
        check_nccl_versions(library.torch_version, library.nccl.get_version())
        self._nccl, self._stream_pointer = library.nccl, library.stream_pointer
        self._sends: dict[str, Any] = {}
        self._receives: dict[str, Any] = {}
        self._groups: dict[str, Any] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._alone: frozenset[str] = frozenset()
        # Calls under way are counted, so that no communicator is freed under a call that returns.
        self._state = threading.Condition()
        self._calls = 0
        self._ender: threading.Thread | None = None

    def connect(self, groups: Mapping[str, tuple[int, ...]], lanes: tuple[Lane, ...]) -> None:
        """Make all communicators in one order that is the same on every worker, and try each with known values: the
        first call on a communicator blocks the host. A peer that dies while they are made blocks for ever; the driver
        kills."""
        self._alone = frozenset(name for name, ranks in groups.items() if len(ranks) == 1)
        self._rendezvous.join()
        ends_s = time.monotonic() + self._connect_timeout_s
        try:
            self._connect(groups, lanes, ends_s)
        except BaseException:
            self.abort()  # a trial may wait on the device for a peer that never comes: nothing to deliver
            raise

    def _connect(self, groups: Mapping[str, tuple[int, ...]], lanes: tuple[Lane, ...], ends_s: float) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        own_name = self.topology.name(self._rank)
        trials: list[SelfTest] = []
        exchanges = _exchange_pairs(lanes)
        groups = {**groups, **{name: self._ranks_of(pairs) for name, pairs in exchanges.items()}}
        for source, target, name, ranks in self._own_lanes(tuple(lane for lane in lanes if len(lane) == 2)):
            communicator = self._make(name, ranks, ends_s)
            if ranks[0] == self._rank:
                self._sends[target] = communicator
            else:
                self._receives[source] = communicator
            trials += lane_selftests(self, source, target, ranks, self._rank, device)
        for name, ranks in self._own_groups(groups):
            self._groups[name] = self._make(f"group/{name}", ranks, ends_s)
            self._ranks[name] = ranks
            if name in exchanges:
                trials += exchange_selftests(self, name, exchanges[name], own_name, device)
            else:
                trials += group_selftests(self, name, ranks, self._rank, device)
        if device == "cuda":  # what follows waits for peers: nothing may be loaded or allocated behind it
            torch.cuda.synchronize()
        for trial in trials:
            trial.start()
        if device == "cuda":
            self._wait_for_the_device(ends_s)
        for trial in trials:
            trial.check(own_name)

    def _wait_for_the_device(self, ends_s: float) -> None:
        over = torch.cuda.Event()
        over.record()
        while not over.query():
            if time.monotonic() > ends_s:
                raise ConnectError(
                    f"{self.topology.name(self._rank)}: NCCL's connections have not carried a few known values in time; "
                    "NCCL_DEBUG=INFO makes NCCL tell which way it goes"
                )
            time.sleep(_SELFTEST_POLL_S)

    def send(self, peer: str, tag: int, tensor: torch.Tensor) -> None:
        """The caller keeps the tensor until something that follows on its own stream waits for the send's end."""
        check_dense(f"sending to {peer}", tensor)
        stream, communicator = self._stream_pointer(), _communicator_of(self._sends, peer, "to send to")
        with _peer_lost_on_error(f"sending to {peer}", peer), self._call():
            communicator.send(tensor.data_ptr(), tensor.nbytes, _BYTES, 1, stream)

    def receive(self, peer: str, tag: int, out: torch.Tensor) -> None:
        check_dense(f"receiving from {peer}", out)
        stream, communicator = (
            self._stream_pointer(),
            _communicator_of(self._receives, peer, "to receive from"),
        )
        with _peer_lost_on_error(f"receiving from {peer}", peer), self._call():
            communicator.recv(out.data_ptr(), out.nbytes, _BYTES, 0, stream)

    def all_reduce(self, group: str, tensor: torch.Tensor) -> None:
        if group in self._alone:
            return
        communicator = _communicator_of(self._groups, group, "in group")
        dense, write = dense_for_sum(tensor)
        kind = _nccl_type(group, dense)
        pointer, count = dense.data_ptr(), dense.numel()
        with _peer_lost_on_error(f"the all-reduce over {group}", group), self._call():
            communicator.allReduce(pointer, pointer, count, kind, _SUM, self._stream_pointer())
        if write is not None:
            write()

    def start_all_reduce(self, group: str, tensor: torch.Tensor) -> None:
        self.all_reduce(group, tensor)

    def start_reduce_scatter(self, group: str, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """The caller keeps both until something that follows on its own stream waits for the end, as with `send`."""
        check_dense(f"the reduce-scatter over {group}", tensor, out)
        (tensor, _), (out, _) = dense_for_sum(tensor), dense_for_sum(out)
        kind, communicator = _nccl_type(group, tensor), _communicator_of(self._groups, group, "in group")
        with _peer_lost_on_error(f"the reduce-scatter over {group}", group), self._call():
            communicator.reduceScatter(
                tensor.data_ptr(), out.data_ptr(), out.numel(), kind, _SUM, self._stream_pointer()
            )

    def start_all_gather(self, group: str, out: torch.Tensor, tensor: torch.Tensor) -> None:
        check_dense(f"the all-gather over {group}", tensor, out)
        communicator = _communicator_of(self._groups, group, "in group")
        with _peer_lost_on_error(f"the all-gather over {group}", group), self._call():
            communicator.allGather(
                tensor.data_ptr(), out.data_ptr(), tensor.nbytes, _BYTES, self._stream_pointer()
            )

    def exchange(
        self,
        group: str,
        sends: Sequence[tuple[str, torch.Tensor]],
        receives: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        """Enqueue the messages in one group of NCCL, so that none waits for another."""
        check_dense(f"the exchange in {group}", *(tensor for _, tensor in (*sends, *receives)))
        communicator = _communicator_of(self._groups, group, "in group")
        rank_of, stream = self._rank_in(group), self._stream_pointer()
        with _peer_lost_on_error(f"the exchange in {group}", group), self._call():
            self._nccl.groupStart()
            try:
                for peer, tensor in sends:
                    communicator.send(tensor.data_ptr(), tensor.nbytes, _BYTES, rank_of(peer), stream)
                for peer, out in receives:
                    communicator.recv(out.data_ptr(), out.nbytes, _BYTES, rank_of(peer), stream)
            finally:
                self._nccl.groupEnd()

    def failure(self) -> Failure | None:
        """PeerLostError when NCCL has noticed one by itself."""
        if (failure := super().failure()) is not None:
            return failure
        if self._ender is not None:
            return None
        for peer, communicator in self._communicators():
            with _peer_lost_on_error("NCCL's connection", peer), self._call():
                communicator.check_async_error()
        return None

    def abort(self) -> None:
        """End kernels that wait for a peer, and drop what is on its way. Returns in bounded time whatever NCCL
        does; what is enqueued afterwards fails."""
        self._end("abort", _ABORT_S)

    def close(self) -> None:
        """Deliver what is on its way and free everything; after `abort` nothing is delivered."""
        self._end("destroy", _DESTROY_S)
        self._rendezvous.close()

    def _ranks_of(self, pairs: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        return tuple(sorted({self.topology.rank_of(end, self.worker) for pair in pairs for end in pair}))

    def _rank_in(self, group: str) -> Callable[[str], int]:
        """The number of a worker within a group."""
        return lambda peer: self._ranks[group].index(self.topology.rank_of(peer, self.worker))

    def _communicators(self) -> list[tuple[str, Any]]:
        """All communicators, with the peer or group of each."""
        return [*self._sends.items(), *self._receives.items(), *self._groups.items()]

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        with self._state:
            if self._ender is not None:
                raise RuntimeError("the communicators of this worker have ended")
            self._calls += 1
        try:
            yield
        finally:
            with self._state:
                self._calls -= 1
                self._state.notify_all()

    def _end(self, how: str, limit_s: float) -> None:
        """Call the method `how` of all communicators, once, on a thread of its own that may hang."""
        with self._state:
            if self._ender is None:
                self._ender = threading.Thread(
                    target=self._end_all, args=(how,), name="slotline-nccl-end", daemon=True
                )
                self._ender.start()
        self._ender.join(limit_s)
        if self._ender.is_alive():
            log.warning(
                "%s: NCCL's communicators have not ended within %g s (%s); the process can only be killed",
                self.topology.name(self._rank),
                limit_s,
                how,
            )

    def _end_all(self, how: str) -> None:
        """Call `how` in one group: freeing the memory of one communicator waits for the device, where a receive of the
        next may still spin. A group tells all of them to stop first, and then frees."""
        with self._state:
            self._state.wait_for(lambda: self._calls == 0, _CALL_S)
        try:
            self._nccl.groupStart()
            try:
                for _, communicator in self._communicators():
                    with contextlib.suppress(Exception):
                        getattr(communicator, how)()
            finally:
                self._nccl.groupEnd()
        except Exception as error:
            log.warning("%s: ending NCCL's communicators: %s", self.topology.name(self._rank), error)

    def _make(self, name: str, ranks: tuple[int, ...], ends_s: float) -> Any:
        store = self._rendezvous.store
        rank = ranks.index(self._rank)
        key = f"nccl/{name}"
        try:
            if rank == 0:
                store.set(key, _check_unique_id(self._nccl.get_unique_id()).hex())
            store.wait([key], timedelta(seconds=max(1.0, ends_s - time.monotonic())))
            identity = bytes.fromhex(store.get(key).decode())
            return self._nccl.NcclCommunicator(len(ranks), identity, rank)
        except Exception as error:
            raise ConnectError(
                f"{self.topology.name(self._rank)} could not make the NCCL communicator {name}: {first_line(error)}"
            ) from error


def _exchange_pairs(lanes: Sequence[Lane]) -> dict[str, list[tuple[str, str]]]:
    """The pairs of workers that exchange messages, by their group."""
    pairs_of: dict[str, list[tuple[str, str]]] = {}
    for lane in lanes:
        if len(lane) == 3:
            pairs_of.setdefault(lane[2], []).append((lane[0], lane[1]))
    return pairs_of


def _communicator_of(communicators: Mapping[str, Any], name: str, what: str) -> Any:
    """The communicator of that name; ValueError where none was connected."""
    if name not in communicators:
        known = ", ".join(sorted(communicators)) or "none"
        raise ValueError(f"no NCCL connection {what} {name!r} was made; there are: {known}")
    return communicators[name]


def _nccl_type(group: str, tensor: torch.Tensor) -> int:
    """The ncclDataType_t of a tensor that NCCL sums; TypeError where it has none."""
    if tensor.dtype not in _SUMMED_TYPES:
        raise TypeError(f"NCCL cannot sum tensors of {tensor.dtype} over {group}: train in a float type")
    return _SUMMED_TYPES[tensor.dtype]


def _check_unique_id(identity: Any) -> bytes:
    """NCCL's unique identity of a communicator as bytes, which cupy returns from version 14 on."""
    if not isinstance(identity, bytes):
        raise TypeError(
            f"cupy gives NCCL's identity as {type(identity).__name__}, not bytes: install cupy 14 or later"
        )
    return identity


@contextlib.contextmanager
def _peer_lost_on_error(what: str, peer: str) -> Iterator[None]:
    """Raise every error of cupy as a PeerLostError that names the failed call and the peer."""
    try:
        yield
    except KeyError as error:  # cupy looks NCCL's status up in a table that ends before 6, or before 7
        status = error.args[0] if error.args else None
        raise PeerLostError(
            f"{what} failed: NCCL status {_NEW_STATUSES.get(status, status)}", peer
        ) from error
    except Exception as error:
        raise PeerLostError(f"{what} failed: {first_line(error)}", peer) from error
