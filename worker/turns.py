"""Whose turn it is with the random generators of the process, which its threads share.

python's, numpy's and torch's CPU generator belong to the process. Two of its threads draw from them: the one that
computes (dropout, a loss, an optimizer) and the one that reads samples ahead, whose data set may mask or augment. Each
holds GENERATORS while user code of its own may seed them and draw, so that neither disturbs the other's numbers.
"""

from __future__ import annotations

import threading


class Turns:
    """A lock that nobody gets twice while another waits: python's own may starve who waits for a loop."""

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._next:  # who waits here is the next, whatever the holder does after its turn
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


GENERATORS = Turns()
