"""Runs the program of one mesh: lanes, events, stages, transfers, update. One entry: `Engine`."""

from worker.engine.engine import Engine
from worker.engine.errors import (
    AbortedError,
    ConnectError,
    EngineError,
    NonFiniteError,
    PeerLostError,
    StageError,
    StallError,
)
from worker.engine.reshard import Plans
from worker.engine.results import MeasuredSlot, RunOptions, SlotLimits, StepResult, StreamPriorities

__all__ = [
    "AbortedError",
    "ConnectError",
    "Engine",
    "EngineError",
    "MeasuredSlot",
    "NonFiniteError",
    "PeerLostError",
    "Plans",
    "RunOptions",
    "SlotLimits",
    "StageError",
    "StallError",
    "StepResult",
    "StreamPriorities",
]
