"""Run options of a worker's engine, and the mapping from engine errors to AttemptFailures with a reason code.

An out-of-memory failure carries the bytes that the plan expected and the bytes that were seen.
Must not know the driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from worker.actor.optimizer import target_ignore_index
from worker.actor.telemetry import PeakMemory, requested_bytes
from worker.contract.failures import AttemptFailure, OutOfMemoryFailure, as_failure
from worker.contract.job import Job, LossScaling
from worker.contract.reasons import Reason
from worker.engine.results import NonFiniteError, RunOptions, SlotLimits, StageError, StallError
from worker.transport.base import AbortedError, EngineError, PeerLostError


def engine_failure(error: EngineError) -> AttemptFailure:
    """The failure of an attempt whose step ended with `error`."""
    if isinstance(error, StageError):
        return as_failure(error, Reason.USER_CODE_RAISED)
    if isinstance(error, NonFiniteError):
        return as_failure(error, Reason.NAN_LOSS)
    if isinstance(error, (StallError, PeerLostError, AbortedError)):
        return as_failure(error, Reason.SLOT_STALLED)
    return as_failure(error, Reason.INTERNAL)


def out_of_memory_failure(
    failure: AttemptFailure, mesh: str, device: str, planned_bytes: int | None, peak_bytes: int
) -> OutOfMemoryFailure:
    """`failure` of a worker of `mesh` that ran out of memory, with what was planned and what was seen."""
    planned = "an unknown number of" if planned_bytes is None else f"{planned_bytes:,}"
    way = "allocated by torch" if device == "cuda" else "resident in its process"
    return OutOfMemoryFailure(
        f"{failure.message}; mesh {mesh} was planned with {planned} bytes and had come to "
        f"{peak_bytes:,} bytes ({way})",
        failure.details,
        mesh,
        peak_bytes + min(requested_bytes(failure.message), peak_bytes),
    )


def run_options(job: Job, mesh: str, *, limits: SlotLimits, device: str) -> RunOptions:
    """How the engine of a worker of `mesh` trains `job`."""
    training = job.training
    return RunOptions(
        precision=training.precision,
        transfers=training.transfers,
        clip_grad_norm=training.clip_grad_norm,
        non_finite=training.non_finite,
        ignored_target=target_ignore_index(job),
        seed=training.seed,
        tensor=job.tp_size(mesh),
        sync_batch_norm=training.sync_batch_norm,
        loss_scaling=training.loss_scaling or LossScaling(),
        limits=limits,
        device=device,
        sharded=job.sharded,
    )


@contextlib.contextmanager
def raise_as_attempt_failure(
    memory: PeakMemory, *, mesh: str, device: str, planned_bytes: int | None
) -> Iterator[None]:
    """Whatever the body raises is an AttemptFailure; when memory runs out, with what was planned and what was seen."""
    try:
        yield
    except Exception as error:
        failure = _attempt_failure(error)
        if failure.reason is not Reason.OUT_OF_MEMORY:
            raise failure from None
        raise out_of_memory_failure(failure, mesh, device, planned_bytes, memory.read()) from None


def _attempt_failure(error: Exception) -> AttemptFailure:
    if isinstance(error, AttemptFailure):
        return error
    return engine_failure(error) if isinstance(error, EngineError) else as_failure(error, Reason.INTERNAL)
