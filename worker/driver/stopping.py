"""Ends an attempt early: cancellation, a graceful stop after saving a checkpoint, and SIGTERM.

A graceful stop ends between two steps with the state after the last one saved; a cancelled attempt ends at once.
The first SIGTERM raises KeyboardInterrupt, later ones change nothing; ray.init replaces the handler, so it has to be
installed again behind it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable


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
        """As `raise_if_cancelled`, or GracefulStop where the attempt was asked to stop before its first step."""
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
