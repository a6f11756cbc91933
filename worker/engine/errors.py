"""The errors that end a step. All survive pickling, so that they reach the driver whole.

Errors of a transport are in worker.transport.base. Must not know torch.
"""

from __future__ import annotations

from worker.transport.base import AbortedError, ConnectError, EngineError, PeerLostError


class StageError(EngineError):
    """The user's code raised in an action: a stage's forward or backward, the loss, the optimizer."""

    def __init__(
        self, message: str, action: str, stage: int | None, microbatch: int | None, details: str = ""
    ):
        super().__init__(message, action, stage, microbatch, details)
        self.message = message
        self.action = action
        self.stage = stage
        self.microbatch = microbatch
        self.details = details

    def __str__(self) -> str:
        return self.message


class StallError(EngineError):
    """A slot did not end within its limit."""

    def __init__(self, message: str, action: str, lane: str, waited_s: float):
        super().__init__(message, action, lane, waited_s)
        self.message = message
        self.action = action
        self.lane = lane
        self.waited_s = waited_s

    def __str__(self) -> str:
        return self.message


class NonFiniteError(EngineError):
    """A loss or the gradient norm is NaN or infinite and the policy is to stop."""


__all__ = [
    "AbortedError",
    "ConnectError",
    "EngineError",
    "NonFiniteError",
    "PeerLostError",
    "StageError",
    "StallError",
]
