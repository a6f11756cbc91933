"""Attempt failures with a reason code, and the breadcrumbs that explain a process that died in native code.

AttemptFailure is the one exception that ends an attempt early; it survives pickling. Of several failures of one
step the cause goes before its consequences (lost peers, stalls), as reasons.CAUSE_PRECEDENCE ranks them. The
breadcrumb is a small mapped file of the node: what is written stays when the process is gone and costs no system
call; behind it faulthandler writes the Python stack of a fatal signal. The file stays open for the life of the
process. Light: no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import mmap
import os
import re
import struct
import tempfile
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from worker.contract.reasons import CAUSE_PRECEDENCE, Reason


class AttemptFailure(RuntimeError):
    """The attempt ends for `reason`; `message` is for people, `details` a traceback. Survives pickling.

    `nodes` are the Ray ids of the nodes at fault, which the driver fills in; empty where it cannot name one.
    """

    nodes: tuple[str, ...] = ()

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
    for one in _causes(error):
        if type(one).__name__ == "OutOfMemoryError" and type(one).__module__.startswith("torch"):
            return True
        of_torch = type(one) is RuntimeError or type(one).__module__.startswith("torch")
        if of_torch and any(
            text in str(one) for text in _OUT_OF_MEMORY_TEXTS
        ):  # others may only quote a peer
            return True
    return False


# What CUDA reports of a program's own mistakes; every other error of CUDA is the accelerator's.
_PROGRAM_ERRORS = (
    "device-side assert",
    "invalid argument",
    "invalid configuration argument",
    "invalid device function",
    "invalid device ordinal",
    "invalid resource handle",
    "no kernel image is available",
    "too many resources requested",
    "operation not permitted",
    "operation would make the legacy stream depend",
    "operation failed due to a previous error during capture",
    "PTX",
)
_LIBRARY_ERRORS = re.compile(
    r"CUDA error: |CUDA driver error: |CUDNN_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
    r"|CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
)


def accelerator_failure(error: BaseException | None) -> Reason | None:
    """ACCELERATOR_FAILED or ILLEGAL_ADDRESS where torch reports a fault of an accelerator as `error`, or as an exception
    that led to it; None of any other, as of a device-side assert, which is the job's own."""
    for one in _causes(error):
        if not (type(one) is RuntimeError or type(one).__module__.startswith("torch")):
            continue  # others may only quote a peer
        text = str(one)
        if type(one).__name__ != "AcceleratorError" and not _LIBRARY_ERRORS.search(text):
            continue
        if is_out_of_memory(one) or any(known in text for known in _PROGRAM_ERRORS):
            return None
        illegal = "illegal memory access" in text or "misaligned address" in text
        return Reason.ILLEGAL_ADDRESS if illegal else Reason.ACCELERATOR_FAILED
    return None


def is_device_assert(error: BaseException | None) -> bool:
    """True if `error`, or an exception that led to it, is torch's report of an assertion that failed on the device: it may
    surface wherever the host waits."""
    return any(
        (type(one) is RuntimeError or type(one).__module__.startswith("torch"))
        and "device-side assert" in str(one)
        for one in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


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

    In place of `reason` OUT_OF_MEMORY where memory was what lacked, ACCELERATOR_FAILED or ILLEGAL_ADDRESS where an
    accelerator reports a fault.
    """
    fault = accelerator_failure(error)
    if is_out_of_memory(error):
        reason = Reason.OUT_OF_MEMORY
    elif fault is not None:
        reason = fault
    text = str(error).strip() or "no message"
    message = text if isinstance(error, AttemptFailure) else f"{type(error).__name__}: {text}"
    if fault is reason:
        message += (
            "; accelerators report faults late: what is named is where it surfaced, not where it happened"
        )
    return AttemptFailure(reason, message, "".join(traceback.format_exception(error)))


_HEAD = struct.Struct("<QQ")  # of a slot: the thread that left it, and when, by count
_SLOT_BYTES, _SLOTS = 256, 16  # threads beyond so many share slots
_MAX_STACK_LINES = 40
_breadcrumb_map: mmap.mmap | None = None
_breadcrumb_file = -1  # open as long as the process lives: its faulthandler writes there
_breadcrumb_process = 0  # whose they are: a fork has those of its parent
_slot_of_thread: dict[int, int] = {}
_breadcrumbs = itertools.count(1)


@dataclass(frozen=True)
class CrashReport:
    """The last traces of a process that is gone: the action it was in ("" between two), of the thread that died or else the
    one begun last; the signal as Python calls it, where it had come through native code (None otherwise), and the Python
    stack there."""

    action: str
    signal: str | None
    stack: str


def start_breadcrumbs() -> None:
    """From now on keep what this process does, and forget what it did; called by a process that somebody may look for, while
    no other thread of it leaves breadcrumbs."""
    global _breadcrumb_map, _breadcrumb_file, _breadcrumb_process
    _slot_of_thread.clear()
    if _breadcrumb_map is not None and _breadcrumb_process == os.getpid():
        _breadcrumb_map[:] = bytes(_SLOTS * _SLOT_BYTES)
        return
    place = _breadcrumb_path(os.getpid())
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        _breadcrumb_file = os.open(place, flags, 0o600)
        os.write(_breadcrumb_file, bytes(_SLOTS * _SLOT_BYTES))
        _breadcrumb_map = mmap.mmap(_breadcrumb_file, _SLOTS * _SLOT_BYTES)
        _breadcrumb_process = os.getpid()
    except OSError:  # a full disk, say: nothing depends on it
        _breadcrumb_map = None
        return
    faulthandler.enable(file=_breadcrumb_file)  # of all threads: only so it names the one that died


def leave_breadcrumb(action: str) -> None:
    """This thread begins `action`; "" when it has ended. Nothing where `start_breadcrumbs` was not called."""
    if _breadcrumb_map is None:
        return
    thread = threading.get_ident()
    begin = _slot_of_thread.setdefault(thread, len(_slot_of_thread) % _SLOTS) * _SLOT_BYTES
    slot = _HEAD.pack(thread, next(_breadcrumbs)) + action.encode(errors="replace")
    _breadcrumb_map[begin : begin + _SLOT_BYTES] = slot[:_SLOT_BYTES].ljust(_SLOT_BYTES, b"\0")


def read_crash_report(process_id: int) -> CrashReport | None:
    """The crash report of the process of this node; None where it left none."""
    try:
        content = _breadcrumb_path(process_id).read_bytes()
    except OSError:
        return None
    actions: list[tuple[int, int, str]] = []  # count, thread, action
    for begin in range(0, _SLOTS * _SLOT_BYTES, _SLOT_BYTES):
        slot = content[begin : begin + _SLOT_BYTES].ljust(_HEAD.size, b"\0")
        thread, count = _HEAD.unpack_from(slot)
        actions.append((count, thread, slot[_HEAD.size :].rstrip(b"\0").decode(errors="replace")))
    dump = content[_SLOTS * _SLOT_BYTES :].decode(errors="replace")
    signal = re.match(r"Fatal Python error: (.*)", dump)
    died = re.search(r"^Current thread 0x([0-9a-f]+).*?(?=^\S|\Z)", dump, re.MULTILINE | re.DOTALL)
    lines = [*dump.splitlines()[:1], *(died[0].strip().splitlines() if died is not None else ())]
    stack = "\n".join(lines[:_MAX_STACK_LINES])
    own = [action for _, thread, action in actions if died is not None and thread == int(died[1], 16)]
    begun = [action for _, _, action in sorted(actions) if action]
    return CrashReport((own or begun[-1:] or [""])[0], None if signal is None else signal[1].strip(), stack)


def remove_crash_report(process_id: int) -> None:
    """Remove what the process of this node left."""
    with contextlib.suppress(OSError):
        _breadcrumb_path(process_id).unlink()


def _breadcrumb_path(process_id: int) -> Path:
    return Path(tempfile.gettempdir()) / f"slotline-{os.getuid()}-{process_id}.doing"
