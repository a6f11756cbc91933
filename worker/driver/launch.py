"""How long each phase of an attempt's start took, from the driver's first line to its first step."""

from __future__ import annotations

import time
from collections.abc import Callable


class Launch:
    """Phases follow each other without a gap; the first one begins now. `ended` is told each with its seconds."""

    def __init__(
        self, ended: Callable[[str, float], None], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._ended, self._now = ended, now
        self._since = now()

    def ended(self, phase: str) -> None:
        """The phase that this one names is over, and the next one begins."""
        since, self._since = self._since, self._now()
        self._ended(phase, self._since - since)
