"""The interface of the lanes of one mesh: start a step, wait for it, report where each lane stands, measure it.

Implementations: cpu.py (threads) and cuda.py (streams). Must not know what an action does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

# What is left of an action after it was started: blocks until it has ended. None: it has, or (CUDA) its stream
# knows.
Finish = Callable[[], None]
Action = Callable[[], Finish | None]


def chain_finish(ended: Finish | None, last: Callable[[], Any]) -> Finish | None:
    """What waits for the end of what was started and then does `last`, which is done at once where the lane's
    stream carries it."""
    if ended is None:
        last()
        return None

    def finish() -> None:
        ended()
        last()

    return finish


@dataclass(frozen=True)
class LaneStatus:
    """Where a lane stands: the instruction that it runs or (`waits_for` set) is about to, since when, and
    the one that it ran last."""

    lane: str
    current: int | None
    since_s: float
    waits_for: int | None
    last: int | None


class Lanes(Protocol):
    """All lanes of one mesh. Made for one program; its threads live until `close`."""

    def start(self) -> None:
        """Begin a step on all lanes."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until all lanes have ended the step; False after `timeout_s`. Raises what an action raised."""

    def statuses(self) -> list[LaneStatus]:
        """Where every lane stands that is inside an instruction or waits for an event."""

    def last_compute(self) -> int | None:
        """The last compute instruction of the step that ended."""

    def computing(self) -> AbstractContextManager[Any]:
        """What the calling thread runs inside, between steps, runs as on the compute lane; at the end it is over."""

    def measured(self) -> list[tuple[float, float]]:
        """Start and end of every instruction of the finished step, in seconds of time.monotonic()."""

    def stop(self) -> None:
        """Start nothing more, and end the step early; not to be undone."""

    def close(self, timeout_s: float) -> list[str]:
        """End the threads; the names of those that did not end in time (they are inside a user's code)."""
