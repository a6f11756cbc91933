"""A piece of work on a thread of its own, which somebody looks at now and then. Knows nothing of what is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Task(Generic[Result]):
    """`work()` on a daemon thread that begins now: a process that ends does not wait for it."""

    def __init__(self, work: Callable[[], Result], name: str):
        self._work = work
        self._result: Result | None = None
        self._error: BaseException | None = None
        self.seconds = 0.0
        """How long the work took, once it is done."""
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def result(self, limit_s: float) -> Result:
        """What the work returned, or raises what it raised. TimeoutError after `limit_s` seconds."""
        if not self._ended.wait(limit_s):
            raise TimeoutError(f"not done within {limit_s:g} s")
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self.seconds = time.monotonic() - began
        self._ended.set()
