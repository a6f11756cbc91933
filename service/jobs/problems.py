"""The error that a rule refuses a call with, and its codes.

`ProblemCode` is what programs read where people read `detail`; codes are part of the API and are never renamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from worker.contract.reasons import Reason


class ProblemCode(StrEnum):
    """The codes that a status has by itself come first: they stand where no other says more."""

    UNAUTHENTICATED = "UNAUTHENTICATED"
    FORBIDDEN = "FORBIDDEN"
    NOT_FOUND = "NOT_FOUND"
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
    TIMED_OUT = "TIMED_OUT"
    CONFLICT = "CONFLICT"
    TOO_LARGE = "TOO_LARGE"
    INVALID = "INVALID"
    INTERNAL_ERROR = "INTERNAL_ERROR"
    UNAVAILABLE = "UNAVAILABLE"
    REFUSED = "REFUSED"

    IDEMPOTENCY_KEY_REUSED = "IDEMPOTENCY_KEY_REUSED"
    JOB_NOT_WAITING = "JOB_NOT_WAITING"
    JOB_BEGAN_ELSEWHERE = "JOB_BEGAN_ELSEWHERE"
    QUEUE_NOT_YOURS = "QUEUE_NOT_YOURS"
    STATE_FORBIDS = "STATE_FORBIDS"
    ATTEMPT_OVER = "ATTEMPT_OVER"
    VERSION_MISMATCH = Reason.VERSION_MISMATCH.value
    PLAN_REFUSED = "PLAN_REFUSED"
    PLAN_MISMATCH = "PLAN_MISMATCH"
    PLAN_NAME_TAKEN = "PLAN_NAME_TAKEN"
    TOO_MANY_PLANS = "TOO_MANY_PLANS"
    CHECKPOINT_IN_USE = "CHECKPOINT_IN_USE"
    PLANNER_BUSY = "PLANNER_BUSY"
    PLAN_TOO_SLOW = "PLAN_TOO_SLOW"
    PLANNING_TIMEOUT = Reason.PLANNING_TIMEOUT.value
    CLUSTER_AWAY = "CLUSTER_AWAY"
    DATABASE_AWAY = "DATABASE_AWAY"
    DATABASE_BUSY = "DATABASE_BUSY"


class ProblemError(Exception):
    """A refused call: an HTTP status, a message with the way out, and the wrong fields, each with value and message."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        errors: Sequence[Mapping[str, Any]] | None = None,
        headers: Mapping[str, str] | None = None,
        code: ProblemCode | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.code = status, detail, code
        self.errors, self.headers = errors, headers


def field_problem(field: str, value: str, message: str) -> ProblemError:
    """422 for one field; `message` goes on after the field's name and value."""
    error = {"field": field, "value": value, "message": message}
    return ProblemError(422, f"{field} {value!r}: {message}", errors=[error])
