"""Attempt failures with a reason code, and the breadcrumbs that explain a process that died in native code.

AttemptFailure is the one exception that ends an attempt early; it survives pickling. Of several failures of one
step the cause goes before its consequences (lost peers, stalls). The breadcrumb is a small mapped file of the
node: what is written stays when the process is gone and costs no system call; behind it faulthandler writes the
Python stack of a fatal signal. The file stays open for the life of the process. Light: no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import re
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from worker.contract.reasons import Reason

# Of several failures of one step the one named first here is reported: a worker whose peer raised
# or died reports a lost peer or a stall of its own, which is a consequence and not the cause.
CAUSE_PRECEDENCE = (
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
        message, details = _encodable(message), _encodable(details)
        super().__init__(reason, message, details)
        self.reason = reason
        self.message = message
        self.details = details

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def _encodable(text: str) -> str:
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


_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if `error`, or an exception that led to it, is an out-of-memory error of torch."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("torch"):
            return True
        of_torch = type(error) is RuntimeError or type(error).__module__.startswith("torch")
        if of_torch and any(
            text in str(error) for text in _OUT_OF_MEMORY_TEXTS
        ):  # others may only quote a peer
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def first_cause(failures: list[AttemptFailure]) -> AttemptFailure:
    """The failure that explains the others; `failures` is not empty."""
    rank = {reason: i for i, reason in enumerate(CAUSE_PRECEDENCE)}
    return min(failures, key=lambda f: rank.get(f.reason, len(rank)))


@contextlib.contextmanager
def attributed_to(reason: Reason) -> Iterator[None]:
    """Turns an exception of the body into an AttemptFailure with `reason` and its traceback. Also a decorator.

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


_ACTION_BYTES = 256
_MAX_STACK_LINES = 40
_breadcrumb_map: mmap.mmap | None = None
_breadcrumb_file = -1  # open as long as the process lives: its faulthandler writes there


@dataclass(frozen=True)
class CrashReport:
    """Of a process that is gone: the action it was in ("" between two), the signal as Python calls it, where it had
    come through native code (None otherwise), and the Python stack there."""

    action: str
    signal: str | None
    stack: str


def start_breadcrumbs() -> None:
    """From now on keep what this process does; called once, by a process that somebody may look for."""
    global _breadcrumb_map, _breadcrumb_file
    place = _breadcrumb_path(os.getpid())
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        _breadcrumb_file = os.open(place, flags, 0o600)
        os.write(_breadcrumb_file, bytes(_ACTION_BYTES))
        _breadcrumb_map = mmap.mmap(_breadcrumb_file, _ACTION_BYTES)
    except OSError:  # a full disk, say: nothing depends on it
        _breadcrumb_map = None
        return
    faulthandler.enable(file=_breadcrumb_file, all_threads=False)


def leave_breadcrumb(action: str) -> None:
    """This process begins `action`; "" when it has ended. Nothing where `begin` was not called."""
    if _breadcrumb_map is not None:
        _breadcrumb_map[:] = action.encode(errors="replace")[:_ACTION_BYTES].ljust(_ACTION_BYTES, b"\0")


def read_crash_report(process_id: int) -> CrashReport | None:
    """The crash report of the process of this node; None where it left none."""
    try:
        content = _breadcrumb_path(process_id).read_bytes()
    except OSError:
        return None
    action = content[:_ACTION_BYTES].rstrip(b"\0").decode(errors="replace")
    lines = content[_ACTION_BYTES:].decode(errors="replace").splitlines()[:_MAX_STACK_LINES]
    signal = re.match(r"Fatal Python error: (.*)", lines[0]) if lines else None
    stack = "\n".join(line for line in lines if not line.startswith("Extension modules"))
    return CrashReport(action, None if signal is None else signal[1].strip(), stack)


def remove_crash_report(process_id: int) -> None:
    """Remove what the process of this node left."""
    with contextlib.suppress(OSError):
        _breadcrumb_path(process_id).unlink()


def _breadcrumb_path(process_id: int) -> Path:
    return Path(tempfile.gettempdir()) / f"slotline-{os.getuid()}-{process_id}.doing"
