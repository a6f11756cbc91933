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
    """A call that waits for `ended` and then runs `last`; without `ended`, where a stream carries the action, `last` runs
    now."""
    if ended is None:
        last()
        return None

    def finish() -> None:
        ended()
        last()

    return finish


@dataclass(frozen=True)
class LaneStatus:
    """The position of a lane: `current` is the instruction that it runs since `since_s` (time.monotonic()), or that waits
    for event `waits_for`; `last` is the instruction before. Instructions are indices in the program."""

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
        """The status of every lane that is inside an instruction or waits for an event."""

    def last_compute(self) -> int | None:
        """The last compute instruction of the step that ended."""

    def computing(self) -> AbstractContextManager[Any]:
        """A context in which the calling thread computes as the compute lane does, between steps; ends when it is over."""

    def slot_times(self) -> list[tuple[float, float]]:
        """Start and end of every instruction of the finished step, in seconds of time.monotonic()."""

    def stop(self) -> None:
        """Start nothing more, and end the step early; not to be undone."""

    def close(self, timeout_s: float) -> list[str]:
        """End the threads; returns the names of threads that did not end in time, inside a user's code."""
