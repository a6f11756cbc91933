"""`Work` counts the calls that a thread makes: how much is done, on any machine and beside any load."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


class Work:
    """`with Work() as work:` counts the calls of functions, Python's and C's, that this thread makes inside, in
    `work.calls`. How long one call of C code takes is not seen."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> Work:
        self._before = sys.getprofile()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self.calls += 1
