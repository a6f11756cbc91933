"""An attempt that is asked to save a checkpoint and end: its accelerators are for another job, or its time is over.

Other than a cancelled one it ends between two steps, with the state after the last one saved.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.driver.evaluation import Evaluations
from worker.driver.saving import Checkpoints


class Cancelled(Exception):
    """The control plane asked to stop, or wants no more of this attempt."""


class AskedToStop(Exception):
    """The attempt ends because the control plane asked for it; the message says what is saved."""


def stop_after(step: int, checkpoints: Checkpoints, evaluations: Evaluations | None = None) -> None:
    """Save the state after this step where the job has a place for it, and raise AskedToStop."""
    if checkpoints.save(step, evaluations):
        raise AskedToStop(f"asked to end: stopped after step {step}, which is saved")
    raise AskedToStop(f"asked to end: stopped after step {step}; the job has no `checkpoint`, so it is lost")


def raise_if(asked: Callable[[], bool]) -> None:
    """Raise AskedToStop where the attempt was asked to end before its first step."""
    if asked():
        raise AskedToStop("asked to end: stopped before a step of its own")
