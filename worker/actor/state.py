"""WorkerState: the place of one worker, the calls that it answers in every state, and the failures that it raises.

Everything a call raises is an AttemptFailure with a reason code.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from worker.actor.benchmarks import measure_job_update, measure_mesh_links, plannable_bytes
from worker.benchmark.engine_overhead import measure_engine
from worker.benchmark.links import Probe, ProbeResult, endpoint
from worker.checkpoint.format import check_writable
from worker.contract.costs import EngineCosts, UpdateCosts
from worker.contract.failures import (
    AttemptFailure,
    OutOfMemoryFailure,
    as_failure,
    attributed_to,
    is_device_assert,
)
from worker.contract.job import Job
from worker.contract.reasons import Reason
from worker.engine.results import NonFiniteError, StageError, StallError
from worker.machine.device import make_transport
from worker.machine.node import processor_share
from worker.machine.telemetry import PeakMemory, accelerator_name, gpu_peak_flops, requested_bytes
from worker.transport.base import AbortedError, EngineError, PeerLostError, Topology, Transport


@dataclass(frozen=True)
class WorkerPlace:
    """The place of a worker of `job`: number `index` of `mesh`, on one accelerator (`device`: "cpu" or "cuda"). `memory`
    measures what the worker uses of it."""

    job: Job
    mesh: str
    index: int
    device: str
    memory: PeakMemory

    @property
    def tensor(self) -> int:
        """The tensor-parallel size of its mesh."""
        return self.job.tp_size(self.mesh)

    @property
    def data_rank(self) -> int:
        """Its data-parallel rank: the ranks of one tensor-parallel group have the same samples."""
        return self.index // self.tensor

    @property
    def workers_per_mesh(self) -> int:
        """The number of workers of its mesh."""
        return self.job.mesh_sizes[int(self.mesh[1:])]

    @property
    def data_workers(self) -> int:
        """The data-parallel size of its mesh."""
        return self.workers_per_mesh // self.tensor


@dataclass(frozen=True)
class KnownGraph:
    """A model as it was traced for a number of microbatches, and compared with itself, without its parameters."""

    microbatches: int
    graph: bytes


class WorkerState:
    """A worker in one of its states, which is complete when it is constructed; these calls are answered in each of them."""

    planned_bytes: int | None = None
    """The most bytes that it holds by its plan; None: not known, or not planned yet."""

    def __init__(self, place: WorkerPlace):
        self.place = place
        self.job, self.mesh, self.index = place.job, place.mesh, place.index
        self.device, self.memory = place.device, place.memory

    def clock(self) -> float:
        """This process's monotonic clock, in seconds."""
        return time.monotonic()

    def processor_share(self) -> float:
        """The fraction of a processor core that this worker gets while all of them compute."""
        return processor_share()

    def gpu_peak_flops(self) -> float | None:
        """The peak FLOP/s of this worker's GPU in the job's precision; None: not known."""
        return gpu_peak_flops(self.job.training.precision)

    def memory_limit(self, sharing: int) -> int | None:
        """Bytes that this worker may plan with, one of `sharing` on the same node (CPU) or GPU; None if unknown."""
        return plannable_bytes(self.job, self.device, sharing)

    @attributed_to(Reason.CHECKPOINT_UNWRITABLE)
    def try_checkpoints(self, uri: str) -> None:
        """Write and remove a file where checkpoints will go, so that a wrong place is reported before training."""
        check_writable(uri)

    def update_costs(self) -> UpdateCosts:
        """The costs of the engine's REDUCE and STEP on this worker alone, with the job's optimizer."""
        return measure_job_update(self.job, self.device)

    @attributed_to(Reason.START_TIMEOUT)
    def measure_links(
        self,
        *,
        probes: Sequence[Probe],
        topology: Topology,
        store: tuple[str, int],
        host: str,
        connect_s: float,
    ) -> list[ProbeResult]:
        """The results of the probes whose hub this worker is; all endpoints of `topology` call this at the same time."""
        own = endpoint(self.mesh, self.index)
        transport = make_transport(
            self.device, topology, mesh=own, worker=0, store=store, host=host, connect_s=connect_s
        )
        return measure_mesh_links(transport, probes, self.device)

    @attributed_to(Reason.START_TIMEOUT)
    def measure_engine(
        self, *, topology: Topology, store: tuple[str, int], host: str, connect_s: float
    ) -> EngineCosts:
        """The costs of the engine for an action, and of connections; every worker 0 calls this at the same time."""
        return measure_engine(self.transport(topology, store, host, connect_s), self.device)

    def transport(
        self,
        topology: Topology,
        store: tuple[str, int],
        host: str,
        connect_s: float,
        join_s: float | None = None,
    ) -> Transport:
        """A transport of this worker's own, which is not connected yet."""
        place = {"mesh": self.mesh, "worker": self.index, "store": store, "host": host}
        return make_transport(self.device, topology, **place, connect_s=connect_s, join_s=join_s)

    def close(self) -> None:
        """End threads and connections; an actor that is killed needs no such call."""

    def abandon(self) -> None:
        """End threads and connections without waiting for peers, which may be gone."""
        self.close()

    def known_graph(self) -> KnownGraph | None:
        """The traced model that this worker gave to others, or was given; None where it has none that can be sent."""
        return None

    def parts(self) -> Iterable[Any]:
        """All that holds memory of the attempt, and is to be gone with this state."""
        return ()

    @contextlib.contextmanager
    def raising_attempt_failures(self) -> Iterator[None]:
        """Raise every error of the body as an AttemptFailure; out of memory with planned and seen bytes, a fault of an
        accelerator with that and its node."""
        try:
            yield
        except Exception as error:
            failure = _attempt_failure(error)
            if failure.reason in (Reason.ACCELERATOR_FAILED, Reason.ILLEGAL_ADDRESS):
                raise AttemptFailure(
                    failure.reason, f"{accelerator_name(self.device)}: {failure.message}", failure.details
                ) from None
            if failure.reason is not Reason.OUT_OF_MEMORY:
                raise failure from None
            raise out_of_memory_failure(
                failure, self.mesh, self.device, self.planned_bytes, self.memory.read()
            ) from None


def _attempt_failure(error: Exception) -> AttemptFailure:
    if isinstance(error, AttemptFailure):
        return error
    return engine_failure(error) if isinstance(error, EngineError) else as_failure(error, Reason.INTERNAL)


def engine_failure(error: EngineError) -> AttemptFailure:
    """The failure of an attempt whose step ended with `error`."""
    if isinstance(error, StageError) or is_device_assert(error):
        return as_failure(error, Reason.USER_CODE_RAISED)
    if isinstance(error, NonFiniteError):
        return as_failure(error, Reason.NAN_LOSS)
    if isinstance(error, (StallError, PeerLostError, AbortedError)):
        return as_failure(error, Reason.SLOT_STALLED)
    return as_failure(error, Reason.INTERNAL)


def _written_snapshot() -> str:
    """Write the blocks of torch's allocator to a file of this node, and return where it is."""
    snapshot = torch.cuda.memory._snapshot()
    with tempfile.NamedTemporaryFile(prefix="slotline-memory-", suffix=".pickle", delete=False) as file:
        pickle.dump(snapshot, file)
    return f"the blocks of torch's allocator, for its memory_viz, are in {file.name} of node {socket.gethostname()}"


def out_of_memory_failure(
    failure: AttemptFailure, mesh: str, device: str, planned_bytes: int | None, peak_bytes: int
) -> OutOfMemoryFailure:
    """`failure` of a worker of `mesh` that ran out of memory, with planned and seen bytes; in its details what torch's
    allocator holds."""
    details = failure.details
    if device == "cuda":
        with contextlib.suppress(Exception):  # a device that is out of memory may answer nothing
            details = f"{details}\n{torch.cuda.memory_summary(abbreviated=True)}"
        with contextlib.suppress(Exception):
            details = f"{details}\n{_written_snapshot()}"
    planned = "an unknown number of" if planned_bytes is None else f"{planned_bytes:,}"
    way = "allocated by torch" if device == "cuda" else "resident in its process"
    return OutOfMemoryFailure(
        f"{failure.message}; mesh {mesh} was planned with {planned} bytes and had come to "
        f"{peak_bytes:,} bytes ({way})",
        details,
        mesh,
        peak_bytes + min(requested_bytes(failure.message), peak_bytes),
    )
