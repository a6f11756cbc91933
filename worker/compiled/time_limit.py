"""A limit on how long Python code of this thread may go on, for code that looks at no clock (a compiler)."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator

_DELIVERED_S = 1.0


class OverdueError(BaseException):
    """The body went on for too long. No Exception: what catches all of those must not keep it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OverdueError in the body after `seconds`, as soon as it runs Python code."""
    thread, lock, over, fired = threading.get_ident(), threading.Lock(), False, False

    def fire() -> None:
        nonlocal fired
        with lock:
            if not over:
                fired = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(OverdueError)
                )

    timer = threading.Timer(max(seconds, 0.0), fire)
    timer.daemon = True
    timer.start()
    raised = False
    try:
        yield
    except OverdueError:
        raised = True
        raise
    finally:
        with lock:
            over = True
        timer.cancel()
        if fired and not raised:  # it is on its way, or somebody in the body has caught it
            ends = time.monotonic() + _DELIVERED_S
            with contextlib.suppress(OverdueError):
                while time.monotonic() < ends:
                    time.sleep(0.01)
            raise OverdueError
