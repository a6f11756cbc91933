"""Why an attempt ends when its engine does: the engine's errors as reasons."""

from __future__ import annotations

from worker.engine import (
    AbortedError,
    EngineError,
    NonFiniteError,
    PeerLostError,
    StageError,
    StallError,
)
from worker.failure import AttemptFailure, OutOfMemoryFailure, as_failure
from worker.memory import tried_bytes
from worker.reasons import Reason


def engine_failure(error: EngineError) -> AttemptFailure:
    """The failure of an attempt whose step ended with `error`."""
    if isinstance(error, StageError):
        return as_failure(error, Reason.USER_CODE_RAISED)
    if isinstance(error, NonFiniteError):
        return as_failure(error, Reason.NAN_LOSS)
    if isinstance(error, (StallError, PeerLostError, AbortedError)):
        return as_failure(error, Reason.SLOT_STALLED)
    return as_failure(error, Reason.INTERNAL)


def out_of_memory(
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
        peak_bytes + min(tried_bytes(failure.message), peak_bytes),
    )
