"""Why an attempt ends early: reason codes, and the one exception that carries them to the driver.

Light (no torch): the driver and its tests use it without the engine.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

MODEL_BUILD_FAILED = "MODEL_BUILD_FAILED"
DATA_FAILED = "DATA_FAILED"
CUT_IMPOSSIBLE = "CUT_IMPOSSIBLE"
PLAN_INFEASIBLE = "PLAN_INFEASIBLE"
USER_CODE_RAISED = "USER_CODE_RAISED"
NAN_LOSS = "NAN_LOSS"
SLOT_STALLED = "SLOT_STALLED"
WORKER_LOST = "WORKER_LOST"
START_TIMEOUT = "START_TIMEOUT"
CHECKPOINT_FAILED = "CHECKPOINT_FAILED"
CHECKPOINT_UNWRITABLE = "CHECKPOINT_UNWRITABLE"  # found out before the first step
CANCELLED_BY_USER = "CANCELLED_BY_USER"
INTERNAL = "INTERNAL"

# Of several failures of one step the one named first here is told: a worker whose peer raised
# or died reports a lost peer or a stall of its own, which is a consequence and not the cause.
BY_CAUSE = (
    USER_CODE_RAISED,
    NAN_LOSS,
    MODEL_BUILD_FAILED,
    DATA_FAILED,
    CUT_IMPOSSIBLE,
    PLAN_INFEASIBLE,
    CHECKPOINT_UNWRITABLE,
    CHECKPOINT_FAILED,
    WORKER_LOST,
    SLOT_STALLED,
    START_TIMEOUT,
    INTERNAL,
)

Result = TypeVar("Result")


class AttemptFailure(RuntimeError):
    """The attempt ends; `reason` is a code of this module, `message` is for people, `details` a traceback."""

    def __init__(self, reason: str, message: str, details: str = ""):
        super().__init__(reason, message, details)
        self.reason = reason
        self.message = message
        self.details = details

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def first_cause(failures: list[AttemptFailure]) -> AttemptFailure:
    """The failure that explains the others; `failures` is not empty."""
    rank = {reason: i for i, reason in enumerate(BY_CAUSE)}
    return min(failures, key=lambda f: rank.get(f.reason, len(rank)))


def fails_as(reason: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator: what the function raises becomes an AttemptFailure with `reason` and its traceback."""

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Result:
            try:
                return function(*args, **kwargs)
            except AttemptFailure:
                raise
            except Exception as error:
                raise as_failure(error, reason) from None

        return wrapper

    return decorate


def as_failure(error: BaseException, reason: str) -> AttemptFailure:
    """An AttemptFailure that names the error's type and text and keeps its traceback as text."""
    text = str(error).strip() or "no message"
    message = text if isinstance(error, AttemptFailure) else f"{type(error).__name__}: {text}"
    return AttemptFailure(reason, message, "".join(traceback.format_exception(error)))
