"""Ends an attempt early: cancellation, a graceful stop after saving a checkpoint, SIGTERM, and a job found to be wrong.

A graceful stop ends between two steps with the state after the last one saved; a cancelled attempt ends at once. A
job is checked beside its launch, where files and packages are as its workers have them, and nothing waits for that.
What is wrong ends the attempt, also where steps are trained already: by the field, all of it, and what no worker has
tried yet.
The first SIGTERM raises KeyboardInterrupt, later ones change nothing; ray.init replaces the handler, so it has to be
installed again behind it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Protocol

from worker.contract.failures import AttemptFailure
from worker.contract.reasons import Reason
from worker.contract.tasks import JobCheck

CAUSE_LIMIT_S = 10.0
"""A launch that fails waits so long for what its check has to say."""


class Cancelled(Exception):
    """The control plane cancelled the attempt, or accepts no more of its reports."""


class GracefulStop(Exception):
    """The attempt ends because the control plane asked for it; the message says what is saved."""


class Interruption:
    """The wishes of the control plane to end the attempt, asked for between steps and while calls are waited for;
    `raise_if_wrong` raises what else is to end it."""

    def __init__(
        self,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        stop_requested: Callable[[], bool] = lambda: False,
        raise_if_wrong: Callable[[], None] = lambda: None,
    ) -> None:
        self._cancelled, self._raise_if_wrong = cancelled, raise_if_wrong
        self.stop_requested = stop_requested

    def raise_if_cancelled(self) -> None:
        """Raise Cancelled where the attempt was cancelled, and what the check of its job found wrong."""
        if self._cancelled():
            raise Cancelled
        self._raise_if_wrong()

    def raise_if_stopping(self) -> None:
        """Raise as `raise_if_cancelled`, or GracefulStop where the attempt was asked to stop before its first step."""
        self.raise_if_cancelled()
        if self.stop_requested():
            raise GracefulStop("asked to end: stopped before a step of its own")


class SigtermHandler:
    """SIGTERM: the first one ends the attempt in order, by KeyboardInterrupt; later ones change nothing."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Handle SIGTERM from now on; again after something else took the signal's place."""
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, *_: object) -> None:
        if not self.requested:
            self.requested = True
            raise KeyboardInterrupt


class RunningCheck(Protocol):
    """A check that runs elsewhere."""

    def answer(self, wait_s: float) -> JobCheck | None:
        """Its result, once it has one, or notes why there is none; None where it takes longer than `wait_s`."""

    def end(self) -> None:
        """Stop it."""


class LaunchCheck:
    """The check of one attempt's job: `begin` starts it, and `raise_if_wrong` is asked again and again from then on.

    `start` starts the process, `report` takes events: (kind, message)."""

    def __init__(self, start: Callable[[], RunningCheck], report: Callable[[str, str], None]) -> None:
        self._start, self._report = start, report
        self._running: RunningCheck | None = None

    def begin(self) -> None:
        """Start the check, which goes on by itself."""
        self._running = self._start()

    def raise_if_wrong(self, wait_s: float = 0.0) -> None:
        """AttemptFailure with all that was found wrong, as soon as that is known; waits for it for `wait_s` at most."""
        running = self._running
        if running is None or (check := running.answer(wait_s)) is None:
            return
        self._running = None
        for text in check.notes:
            self._report("check", text)
        if check.problems:
            details = "\n".join(problem.details for problem in check.problems if problem.details)
            raise AttemptFailure(
                Reason(check.problems[0].reason), "; ".join(map(str, check.problems)), details
            )
        if check.checked:
            self._report("checked", "; ".join(check.checked))

    def end(self) -> None:
        """Stop the check where it still runs."""
        running, self._running = self._running, None
        if running is not None:
            running.end()
