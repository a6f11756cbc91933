"""The one exception that ends an attempt early: what failed, attributed to a reason.

Light (no torch): the driver and its tests use it without the engine.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from worker.reasons import Reason

# Of several failures of one step the one named first here is reported: a worker whose peer raised
# or died reports a lost peer or a stall of its own, which is a consequence and not the cause.
CAUSES_BEFORE_CONSEQUENCES = (
    Reason.OUT_OF_MEMORY,
    Reason.USER_CODE_RAISED,
    Reason.NAN_LOSS,
    Reason.MODEL_BUILD_FAILED,
    Reason.DATA_FAILED,
    Reason.CUT_IMPOSSIBLE,
    Reason.PLAN_INFEASIBLE,
    Reason.CHECKPOINT_UNWRITABLE,
    Reason.CHECKPOINT_FAILED,
    Reason.WORKER_LOST,
    Reason.SLOT_STALLED,
    Reason.ACCELERATORS_TAKEN,
    Reason.START_TIMEOUT,
    Reason.INTERNAL,
)


class AttemptFailure(RuntimeError):
    """The attempt ends for `reason`; `message` is for people, `details` a traceback. Survives pickling."""

    def __init__(self, reason: Reason, message: str, details: str = ""):
        message, details = _in_utf8(message), _in_utf8(details)
        super().__init__(reason, message, details)
        self.reason = reason
        self.message = message
        self.details = details

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def _in_utf8(text: str) -> str:
    """The text as it can be sent: Ray ends a worker whose error names a file that is no UTF-8, for lost."""
    return text.encode("utf-8", "backslashreplace").decode()


class OutOfMemoryFailure(AttemptFailure):
    """A worker of `mesh` found no place for a tensor.

    `seen_bytes` is what it had held at most and that tensor, counted as no more than as much again.
    """

    def __init__(self, message: str, details: str, mesh: str, seen_bytes: int):
        super().__init__(Reason.OUT_OF_MEMORY, message, details)
        self.args = (self.message, self.details, mesh, seen_bytes)  # what pickle calls the class with
        self.mesh = mesh
        self.seen_bytes = seen_bytes


_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error`, or what led to it, says that torch found no memory for a tensor."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("torch"):
            return True
        of_torch = type(error) is RuntimeError or type(error).__module__.startswith("torch")
        if of_torch and any(text in str(error) for text in _NO_MEMORY):  # others may only quote a peer
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def first_cause(failures: list[AttemptFailure]) -> AttemptFailure:
    """The failure that explains the others; `failures` is not empty."""
    rank = {reason: i for i, reason in enumerate(CAUSES_BEFORE_CONSEQUENCES)}
    return min(failures, key=lambda f: rank.get(f.reason, len(rank)))


@contextlib.contextmanager
def attributed_to(reason: Reason) -> Iterator[None]:
    """What the body raises becomes an AttemptFailure with `reason` and its traceback. Also a decorator.

    A failure that has a reason already keeps it.
    """
    try:
        yield
    except AttemptFailure:
        raise
    except Exception as error:
        raise as_failure(error, reason) from None


def as_failure(error: BaseException, reason: Reason) -> AttemptFailure:
    """An AttemptFailure that names the error's type and text and keeps its traceback as text.

    For OUT_OF_MEMORY in place of `reason` where memory was what lacked.
    """
    if is_out_of_memory(error):
        reason = Reason.OUT_OF_MEMORY
    text = str(error).strip() or "no message"
    message = text if isinstance(error, AttemptFailure) else f"{type(error).__name__}: {text}"
    return AttemptFailure(reason, message, "".join(traceback.format_exception(error)))
