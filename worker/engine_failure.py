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
from worker.failure import AttemptFailure, as_failure
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
