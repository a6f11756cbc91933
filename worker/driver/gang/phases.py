"""The phases of an attempt in which workers are called: each has a time limit, the reason of a timeout, and what ends it."""

from __future__ import annotations

from enum import Enum

from worker.contract.reasons import Reason
from worker.driver.limits import Limits


class Phase(Enum):
    """A phase of an attempt in which workers are called."""

    START = "start"
    PREPARE = "prepare"
    """Build, trace, profile, plan and load."""
    BENCHMARK = "benchmark"
    """Workers connect to each other and measure."""
    CHECK = "check"
    """Comparisons and dry runs between loading and the first step."""
    SETUP = "setup"
    """A value handed over or looked up; the worker computes nothing."""
    STEP = "step"
    CHECKPOINT = "checkpoint"

    @property
    def timeout_reason(self) -> Reason:
        """The reason of an attempt that ends because a worker did not answer in time."""
        starting = (Phase.START, Phase.PREPARE, Phase.BENCHMARK)
        return Reason.START_TIMEOUT if self in starting else Reason.SLOT_STALLED

    @property
    def stops_at_once(self) -> bool:
        """True where a graceful stop interrupts a call; steps and checkpoints are finished first."""
        return self in (Phase.START, Phase.PREPARE, Phase.BENCHMARK, Phase.CHECK)

    def limit_s(self, limits: Limits, planned_step_s: float) -> float:
        """The seconds that a call may take."""
        if self is Phase.STEP:
            return limits.step_s(planned_step_s)
        return {
            Phase.START: limits.start_s,
            Phase.PREPARE: limits.prepare_s,
            Phase.BENCHMARK: 2 * limits.connect_s,
            Phase.CHECK: limits.prepare_s,
            Phase.SETUP: 2 * limits.connect_s,
            Phase.CHECKPOINT: limits.checkpoint_s,
        }[self]
