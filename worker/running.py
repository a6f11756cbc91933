"""How a worker's program runs by its job, and what goes wrong meanwhile as the failure of an attempt. Knows no driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from worker.engine import EngineError, RunOptions, SlotLimits
from worker.engine_failure import engine_failure, out_of_memory
from worker.failure import AttemptFailure, as_failure
from worker.job import Job
from worker.memory import PeakMemory
from worker.precision import LossScaling
from worker.reasons import Reason
from worker.training import ignored_target


def run_options(job: Job, mesh: str, *, limits: SlotLimits, device: str) -> RunOptions:
    """How the engine of a worker of `mesh` trains `job`."""
    training = job.training
    return RunOptions(
        precision=training.precision,
        transfers=training.transfers,
        clip_grad_norm=training.clip_grad_norm,
        non_finite=training.non_finite,
        ignored_target=ignored_target(job),
        seed=training.seed,
        tensor=job.tensor_of(mesh),
        sync_batch_norm=training.sync_batch_norm,
        loss_scaling=training.loss_scaling or LossScaling(),
        limits=limits,
        device=device,
        sharded=job.sharded,
    )


@contextlib.contextmanager
def told_as_failure(
    memory: PeakMemory, *, mesh: str, device: str, planned_bytes: int | None
) -> Iterator[None]:
    """Whatever the body raises is an AttemptFailure; when memory runs out, with what was planned and what was seen."""
    try:
        yield
    except Exception as error:
        failure = _failure(error)
        if failure.reason is not Reason.OUT_OF_MEMORY:
            raise failure from None
        raise out_of_memory(failure, mesh, device, planned_bytes, memory.read()) from None


def _failure(error: Exception) -> AttemptFailure:
    if isinstance(error, AttemptFailure):
        return error
    return engine_failure(error) if isinstance(error, EngineError) else as_failure(error, Reason.INTERNAL)
