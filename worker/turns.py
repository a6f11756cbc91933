"""Whose turn it is with the random generators of the process, which its threads share.

python's, numpy's and torch's CPU generator belong to the process. Two of its threads draw from them: the one that
computes (dropout, a loss, an optimizer) and the one that reads samples ahead, whose data set may mask or augment. Each
holds GENERATORS while user code of its own may seed them and draw, so that neither disturbs the other's numbers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """A lock that nobody gets twice while another waits: python's own may starve who waits for a loop."""

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._lock = threading.Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        with self._next:  # who waits here is the next, whatever the holder does after its turn
            self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._holder = None
        self._lock.release()

    @property
    def mine(self) -> bool:
        """Whether this thread has its turn."""
        return self._holder == threading.get_ident()

    @contextlib.contextmanager
    def free(self) -> Iterator[None]:
        """In the body it is anybody's turn; where it was this thread's, it is again afterwards."""
        if not self.mine:
            yield
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


GENERATORS = Turns()
