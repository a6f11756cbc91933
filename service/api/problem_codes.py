"""The `code` of a problem: what a program reads where people read `detail`. Codes are part of the API: none is renamed."""

from __future__ import annotations

from enum import StrEnum

from worker.reasons import Reason


class Code(StrEnum):
    """Those of one HTTP status first, which stand where no other says more."""

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
    CLUSTER_AWAY = "CLUSTER_AWAY"
    DATABASE_AWAY = "DATABASE_AWAY"
    DATABASE_BUSY = "DATABASE_BUSY"


_OF_STATUS = {
    401: Code.UNAUTHENTICATED,
    403: Code.FORBIDDEN,
    404: Code.NOT_FOUND,
    405: Code.METHOD_NOT_ALLOWED,
    408: Code.TIMED_OUT,
    409: Code.CONFLICT,
    413: Code.TOO_LARGE,
    422: Code.INVALID,
    500: Code.INTERNAL_ERROR,
    503: Code.UNAVAILABLE,
}


def code_of(status: int) -> Code:
    """The code of a problem of which no more is known than its status."""
    return _OF_STATUS.get(status, Code.INTERNAL_ERROR if status >= 500 else Code.REFUSED)
