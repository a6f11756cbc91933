"""What a worker's process is doing, kept where it can be read after the process has died in native code.

A small file of this node that the process has mapped: what is written there stays when the process is gone, and costs
no call of the system. Behind it Python writes where it stood when a signal such as SIGSEGV came. Light: no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

_ACTION_BYTES = 256
_LAST_LINES = 40
_record: mmap.mmap | None = None
_file = -1  # open as long as the process lives: its faulthandler writes there


@dataclass(frozen=True)
class LastWords:
    """Of a process that is gone: the action it was in ("" between two), the signal as Python calls it, where it had
    come through native code (None otherwise), and the Python stack there."""

    action: str
    signal: str | None
    stack: str


def begin() -> None:
    """From now on keep what this process does; called once, by a process that somebody may look for."""
    global _record, _file
    place = _place(os.getpid())
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        _file = os.open(place, flags, 0o600)
        os.write(_file, bytes(_ACTION_BYTES))
        _record = mmap.mmap(_file, _ACTION_BYTES)
    except OSError:  # a full disk, say: nothing depends on it
        _record = None
        return
    faulthandler.enable(file=_file, all_threads=False)


def doing(action: str) -> None:
    """This process begins `action`; "" when it has ended. Nothing where `begin` was not called."""
    if _record is not None:
        _record[:] = action.encode(errors="replace")[:_ACTION_BYTES].ljust(_ACTION_BYTES, b"\0")


def last_words(process_id: int) -> LastWords | None:
    """What the process of this node left; None where it left nothing."""
    try:
        content = _place(process_id).read_bytes()
    except OSError:
        return None
    action = content[:_ACTION_BYTES].rstrip(b"\0").decode(errors="replace")
    told = content[_ACTION_BYTES:].decode(errors="replace").splitlines()[:_LAST_LINES]
    signal = re.match(r"Fatal Python error: (.*)", told[0]) if told else None
    stack = "\n".join(line for line in told if not line.startswith("Extension modules"))
    return LastWords(action, None if signal is None else signal[1].strip(), stack)


def forget(process_id: int) -> None:
    """Remove what the process of this node left."""
    with contextlib.suppress(OSError):
        _place(process_id).unlink()


def _place(process_id: int) -> Path:
    return Path(tempfile.gettempdir()) / f"slotline-{os.getuid()}-{process_id}.doing"
