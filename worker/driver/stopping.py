"""Ends an attempt early: cancellation, a graceful stop after saving a checkpoint, and SIGTERM.

A graceful stop ends between two steps with the state after the last one saved; a cancelled attempt ends at once.
The first SIGTERM raises KeyboardInterrupt, later ones change nothing; ray.init replaces the handler, so it has to be
installed again behind it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from worker.driver.checkpoints import Checkpoints
from worker.driver.evaluation import Evaluations


class Cancelled(Exception):
    """The control plane asked to stop, or wants no more of this attempt."""


class GracefulStop(Exception):
    """The attempt ends because the control plane asked for it; the message says what is saved."""


def save_and_stop(step: int, checkpoints: Checkpoints, evaluations: Evaluations | None = None) -> None:
    """Save the state after this step where the job has a place for it, and raise AskedToStop."""
    if checkpoints.save(step, evaluations):
        raise GracefulStop(f"asked to end: stopped after step {step}, which is saved")
    raise GracefulStop(f"asked to end: stopped after step {step}; the job has no `checkpoint`, so it is lost")


def raise_if_stopping(asked: Callable[[], bool]) -> None:
    """Raise AskedToStop where the attempt was asked to end before its first step."""
    if asked():
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
