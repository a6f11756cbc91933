"""Reason codes for why an attempt ended or a job waits, each with its cause and its meaning in one line.

A new kind of failure is a Reason here, and has a place in CAUSE_PRECEDENCE below if a worker can fail with it;
failures.py carries it from where it is raised to the driver. Codes are part of the REST API and stay in the
database, so one is never renamed. Drivers and control planes of different versions talk to each other:
`Reason.parse` maps an unknown code to INTERNAL with a log line (tests set `strict`, which makes it an error).
"""

from __future__ import annotations

import functools
import logging
from enum import StrEnum

log = logging.getLogger(__name__)

# Tests set this: there an unknown code is a mistake of ours and no newer neighbour.
strict = False


class UnknownReasonError(ValueError):
    """A reason code that is not in the list, where `strict` is set."""


class Cause(StrEnum):
    """The party responsible for a failed attempt; each cause has its own number of retries."""

    INFRASTRUCTURE = "infrastructure"
    USER = "user"
    PREEMPTION = "preemption"


class Reason(StrEnum):
    """A code with its `cause` (None where nothing failed) and its `meaning` in one line."""

    cause: Cause | None
    meaning: str

    def __new__(cls, code: str, cause: Cause | None, meaning: str) -> Reason:
        reason = str.__new__(cls, code)
        reason._value_ = code
        reason.cause = cause
        reason.meaning = meaning
        return reason

    # The job is at fault: the same attempt would fail again.
    MODEL_BUILD_FAILED = "MODEL_BUILD_FAILED", Cause.USER, "the model, loss or optimizer cannot be built"
    DATA_FAILED = "DATA_FAILED", Cause.USER, "the data set cannot be made or read"
    CUT_IMPOSSIBLE = "CUT_IMPOSSIBLE", Cause.USER, "the model cannot be cut into the stages asked for"
    PLAN_INFEASIBLE = "PLAN_INFEASIBLE", Cause.USER, "no plan fits the job's limits"
    USER_CODE_RAISED = "USER_CODE_RAISED", Cause.USER, "the model, loss or optimizer raised"
    NAN_LOSS = "NAN_LOSS", Cause.USER, "a loss or gradient norm is not finite"
    CHECKPOINT_UNWRITABLE = (
        "CHECKPOINT_UNWRITABLE",
        Cause.USER,
        "checkpoint.uri cannot be written to, found out before the first step",
    )
    RESUME_REFUSED = (
        "RESUME_REFUSED",
        Cause.USER,
        "the checkpoint of checkpoint.resume_from is not there, or does not fit the job",
    )
    CHECKPOINT_DAMAGED = (
        "CHECKPOINT_DAMAGED",
        Cause.USER,  # another attempt would read the same files
        "every checkpoint to go on from is damaged",
    )
    SECRET_MISSING = "SECRET_MISSING", Cause.USER, "a secret that the job names is gone or cannot be opened"
    CODE_SETUP_FAILED = "CODE_SETUP_FAILED", Cause.USER, "the job's own code or packages cannot be installed"

    MAX_DURATION = (
        "MAX_DURATION",
        Cause.USER,
        "the job held accelerators for as long as its max_duration allows",
    )

    # The machines, the network or Slotline itself: another attempt may succeed.
    SLOT_STALLED = "SLOT_STALLED", Cause.INFRASTRUCTURE, "a slot or a step did not end within its limit"
    ACCELERATOR_FAILED = (
        "ACCELERATOR_FAILED",
        Cause.INFRASTRUCTURE,
        "an accelerator, its memory or its link to others reported a fault",
    )
    ILLEGAL_ADDRESS = (
        "ILLEGAL_ADDRESS",
        Cause.INFRASTRUCTURE,  # once: a second one of the same job is its own, see after_failure
        "a kernel used memory that is not there: a broken accelerator, or a defect of the kernel",
    )
    WORKER_LOST = "WORKER_LOST", Cause.INFRASTRUCTURE, "a worker's process is gone"
    NODE_LOST = "NODE_LOST", Cause.INFRASTRUCTURE, "a node is gone, and the workers on it"
    PLANNING_TIMEOUT = (
        "PLANNING_TIMEOUT",
        Cause.INFRASTRUCTURE,  # the planning processes may be busy now, and free for the next attempt
        "the control plane made no plan within its time limit, also without a search",
    )
    START_TIMEOUT = "START_TIMEOUT", Cause.INFRASTRUCTURE, "driver or workers were not ready in time"
    START_REFUSED = "START_REFUSED", Cause.INFRASTRUCTURE, "the Ray cluster did not accept the driver"
    DRIVER_LOST = "DRIVER_LOST", Cause.INFRASTRUCTURE, "the driver ended or fell silent without a report"
    CHECKPOINT_FAILED = "CHECKPOINT_FAILED", Cause.INFRASTRUCTURE, "a checkpoint cannot be saved or restored"
    OUT_OF_MEMORY = (
        "OUT_OF_MEMORY",
        Cause.INFRASTRUCTURE,  # the next attempt plans with more; when nothing fits it is PLAN_INFEASIBLE
        "an accelerator had no memory left for a tensor",
    )
    VERSION_MISMATCH = (
        "VERSION_MISMATCH",
        Cause.INFRASTRUCTURE,  # an upgrade may be under way: the next attempt may find the other's new version
        "driver and control plane are of versions that do not understand each other",
    )
    INTERNAL = "INTERNAL", Cause.INFRASTRUCTURE, "Slotline failed in a way that it has no other code for"

    ACCELERATORS_TAKEN = (
        "ACCELERATORS_TAKEN",
        Cause.PREEMPTION,  # no failure of the job: it waits again, now with a look at who has them
        "the cluster did not give the accelerators that seemed free: something else took them",
    )
    PREEMPTED = "PREEMPTED", Cause.PREEMPTION, "the accelerators were taken for something else"
    RESIZED = (
        "RESIZED",
        Cause.PREEMPTION,
        "the job goes on with another number of meshes",
    )  # counts as no failure

    # Nothing failed.
    STOPPED_EARLY = (
        "STOPPED_EARLY",
        None,
        "the job ended before its last step, as evaluation.patience or data.at_end says",
    )
    CANCELLED_BY_USER = "CANCELLED_BY_USER", None, "somebody asked for the end"
    BACKING_OFF = "BACKING_OFF", None, "a pause before the next attempt"
    CHECKING = "CHECKING", None, "its factories, arguments and data are checked before its first attempt"
    WAITS_FOR_ACCELERATORS = "WAITS_FOR_ACCELERATORS", None, "too few accelerators are free"
    WAITS_FOR_QUOTA = "WAITS_FOR_QUOTA", None, "the quota of the queue, or of the project there, is used up"
    WAITS_FOR_CLUSTER = "WAITS_FOR_CLUSTER", None, "its Ray cluster does not answer, or is none of its queue"
    WAITS_BEHIND = "WAITS_BEHIND", None, "free accelerators are kept for a job before it"
    CLUSTER_TOO_SMALL = "CLUSTER_TOO_SMALL", None, "the whole cluster has too few accelerators"

    @classmethod
    def parse(cls, code: str) -> Reason:
        """The reason that `code` names; INTERNAL, with a line in the log, for one that is not in the list.

        Raises UnknownReasonError instead where `strict` is set. See `read` for the message beside it.
        """
        try:
            return cls(code)
        except ValueError:
            if strict:
                raise UnknownReasonError(
                    f"reason code {code!r} is not in worker/contract/reasons.py: add it there, with cause and meaning, and "
                    "to CAUSE_PRECEDENCE if a worker fails with it"
                ) from None
            _warn_once(code)
            return cls.INTERNAL

    @classmethod
    def read(cls, code: str | None, message: str | None) -> tuple[Reason | None, str | None]:
        """`parse` for a code with its message, either of which may be absent: an unknown code stays readable
        in the message."""
        if not code:
            return None, message
        reason = cls.parse(code)
        return reason, message if reason == code else f"{code}: {message or 'no message was given'}"


CAUSE_PRECEDENCE = (
    Reason.ACCELERATOR_FAILED,
    Reason.ILLEGAL_ADDRESS,
    Reason.OUT_OF_MEMORY,
    Reason.USER_CODE_RAISED,
    Reason.NAN_LOSS,
    Reason.MODEL_BUILD_FAILED,
    Reason.DATA_FAILED,
    Reason.CUT_IMPOSSIBLE,
    Reason.PLAN_INFEASIBLE,
    Reason.PLANNING_TIMEOUT,
    Reason.CHECKPOINT_UNWRITABLE,
    Reason.RESUME_REFUSED,
    Reason.CHECKPOINT_DAMAGED,
    Reason.CHECKPOINT_FAILED,
    Reason.NODE_LOST,
    Reason.WORKER_LOST,
    Reason.SLOT_STALLED,
    Reason.ACCELERATORS_TAKEN,
    Reason.START_TIMEOUT,
    Reason.INTERNAL,
)
"""Reasons that workers fail with: of several failures of one step the one named first here is reported.

A worker whose peer raised or died reports a lost peer or a stall of its own: a consequence, not the cause.
"""


def cause_of(code: str | None) -> Cause:
    """The cause of an attempt that failed with this code; infrastructure for no code."""
    reason = Reason.INTERNAL if code is None else Reason.parse(code)
    return reason.cause or Cause.INFRASTRUCTURE


@functools.cache
def _warn_once(code: str) -> None:
    log.warning(
        "reason code %r is unknown to this version and counts as INTERNAL: are all parts up to date?", code
    )
