"""Decisions about an attempt as pure functions: the next step of its life, and the retry after its failure.

Values in, values out: no clock, no database, no Ray. Also holds the values of admission (WaitingJob, Holder, Capacity,
Start, Wait, Preempt), which admission_and_preemption.py and multi_cluster.py decide over. Times are Unix seconds.
Silence counts from `watching_since`: a control plane that was away must not take its own absence for the driver's.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from service.settings.clusters import DEFAULT_CLUSTER
from service.spec.job import RetrySection
from service.spec.principals import DEFAULT_PROJECT, QuotaScope, quota_scopes
from service.spec.states import AttemptState
from worker.contract.reasons import Cause, Reason, cause_of

Device = Literal["cpu", "cuda"]


# Admission: the values of policy.admit


@dataclass(frozen=True)
class WaitingJob:
    """A job that wants a whole gang of `accelerators`; `device` may be auto until it `began`.

    An elastic job takes any of the sizes in `gangs`, the most first, of which `accelerators` is then the least.
    """

    id: str
    queue: str
    priority: int
    queued_at: float
    accelerators: int
    device: str
    not_before: float | None = None
    began: bool = False
    owner: str = ""
    longest_s: float = math.inf
    """Longest time that it holds its accelerators, the grace at its end included."""
    accelerator_type: str | None = None
    """The type that it asks for; without one it takes any, but its whole gang of the same."""
    cluster: str | None = DEFAULT_CLUSTER
    """The cluster of its queue; None where no setting names one."""
    began_on: str | None = None
    """The cluster of its earlier attempts, where its checkpoints are; None before the first."""
    gangs: Sequence[int] = ()
    patient: bool = False
    """It waits for a gang as large as its last one, and after a while goes on with a smaller one."""
    project: str = DEFAULT_PROJECT

    @property
    def quota_scopes(self) -> Sequence[QuotaScope]:
        return quota_scopes(self.project, self.queue)

    @property
    def sizes(self) -> Sequence[int]:
        """The sizes of a gang with which it may start, the most first."""
        return self.gangs or (self.accelerators,)


@dataclass(frozen=True)
class Holder:
    """A job whose attempt holds accelerators, from `since` to `until` at the latest."""

    job_id: str
    queue: str
    accelerators: int
    device: str
    owner: str = ""
    priority: int = 0
    since: float = 0.0
    until: float = math.inf
    stopping: bool = False
    """It was asked to end."""
    cluster: str = DEFAULT_CLUSTER
    left_out: int = 0
    """Those of its accelerators that are on nodes that are left out: nobody has them after it."""
    larger: Sequence[int] = ()
    """Sizes of a gang with which an elastic job would end clearly earlier, the most first, though it has to start anew."""
    accelerator_type: str | None = None
    """The type of all of them; None on nodes that tell none."""
    project: str = DEFAULT_PROJECT

    @property
    def quota_scopes(self) -> Sequence[QuotaScope]:
        return quota_scopes(self.project, self.queue)


class AcceleratorKind(NamedTuple):
    """A device, and the accelerator type that its nodes tell; None where they tell none."""

    device: str
    accelerator_type: str | None = None


# The Ray resource of an accelerator by device, as the worker's placement groups ask for it.
RAY_RESOURCES = {"cpu": "slotline_worker", "cuda": "GPU"}


@dataclass(frozen=True)
class Capacity:
    """Accelerators of all living nodes that take work, by device; `others` are held by other programs than our attempts.

    `left_out` are those of nodes that take none (draining, excluded, quarantined), with `marks`, a text for each node.
    `types` has the same of the nodes of each accelerator type, None for those that tell none; it is empty where none does.
    """

    total: Mapping[str, int]
    others: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    marks: Sequence[str] = ()
    types: Mapping[str | None, Capacity] = field(default_factory=dict)

    @property
    def by_type(self) -> Mapping[str | None, Capacity]:
        """The parts of it that a gang may have, since no gang is of two types."""
        return self.types or {None: self}

    def in_all(self, device: str) -> int:
        """The accelerators of `device`, those that are left out too."""
        return self.total.get(device, 0) + self.left_out.get(device, 0)


OWNER_PATIENCE_S = 3600.0
"""An owner who had no start for this time has the next turn: long enough that fair shares decide, not ages."""


@dataclass(frozen=True)
class QueueRules:
    """Rules of all queues.

    `preempts`: jobs give way to jobs of a higher priority, with `grace_s` to save a checkpoint. An owner who has waited
    for `patience_s` without a start goes before the others of the same queue and priority.
    """

    preempts: bool = True
    grace_s: float = 60.0
    patience_s: float = OWNER_PATIENCE_S


@dataclass(frozen=True)
class Start:
    """A waiting job starts, on so many `accelerators` of `device`, all of one type (None: on nodes that tell none)."""

    job_id: str
    device: Device
    accelerators: int
    accelerator_type: str | None = None


@dataclass(frozen=True)
class Preempt:
    """A running job saves a checkpoint and ends its attempt: for another that waits, or for a larger gang of its own
    (`for_job` is then itself)."""

    job_id: str
    for_job: str
    message: str


@dataclass(frozen=True)
class Wait:
    """A job goes on waiting, and is told why."""

    job_id: str
    reason: Reason
    message: str


def device_of(
    wanted: str, accelerators: int, capacity: Capacity, *, accelerator_type: str | None = None
) -> Device:
    """The device of a gang: `wanted`, or for auto cuda where the cluster has GPUs of one type for the whole gang; for an
    `accelerator_type` the device of its nodes."""
    if wanted != "auto":
        return "cuda" if wanted == "cuda" else "cpu"
    if accelerator_type is not None:
        nodes = capacity.types.get(accelerator_type, Capacity({}))
        return "cpu" if nodes.in_all("cpu") and not nodes.in_all("cuda") else "cuda"
    gpus = max(part.in_all("cuda") for part in capacity.by_type.values())
    return "cuda" if gpus >= accelerators else "cpu"


def resource_text(device: str, accelerator_type: str | None = None) -> str:
    """The Ray resource of a device as messages name it, with the type that a job asks for."""
    return RAY_RESOURCES[device] + ("" if accelerator_type is None else f" of type {accelerator_type}")


# Watching an attempt


class RayState(StrEnum):
    """State of a Ray job; MISSING: Ray answers and does not know it."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    MISSING = "MISSING"

    @property
    def ended(self) -> bool:
        return self not in (RayState.PENDING, RayState.RUNNING)


@dataclass(frozen=True)
class RayJob:
    """Status of a Ray job at the last poll; `ended_seen_at` is when it was first seen ended."""

    state: RayState
    message: str | None = None
    exit_code: int | None = None
    ended_seen_at: float | None = None

    @property
    def was_killed(self) -> bool:
        """True where a signal that no process can handle ended it: what it had to report has come, or never comes."""
        return self.exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL)

    def __str__(self) -> str:
        """The state and the first line of what Ray says of it."""
        said = (self.message or "").strip().split("\n", 1)[0]
        return f"{self.state}: {said}" if said else str(self.state)


@dataclass(frozen=True)
class WatchedAttempt:
    """An attempt that is not final.

    `ray` is None while Ray has not answered about it; at `deadline` it has used up its job's time; at `end_asked_at` a
    graceful stop was requested, for the reason `end_asked_for`; at `stop_asked_at` Ray was first asked to stop the driver.
    """

    created_at: float
    submitted_at: float | None
    heartbeat_at: float | None
    cancel_requested_at: float | None
    ray: RayJob | None
    deadline: float | None = None
    end_asked_at: float | None = None
    end_asked_for: Reason | None = None
    stop_asked_at: float | None = None


CANCEL_GRACE_S = 15.0
"""Time for a cancelled job to end by itself before Ray stops it: some steps, as it ends between two."""


@dataclass(frozen=True)
class WatchLimits:
    """Time limits of an attempt's life."""

    silence_limit_s: float = 600.0
    """A driver that Ray still runs and that has not reported for this time is stopped: drivers report every few seconds,
    also while they wait, and try again for minutes where the control plane is away."""
    start_timeout_s: float = 600.0
    """Time for Ray to take a driver, in which it installs `code.pip`, and then for the driver's first report."""
    cancel_grace_s: float = CANCEL_GRACE_S
    end_grace_s: float = 60.0
    """Time for a driver to save a checkpoint after a graceful stop was requested."""
    report_grace_s: float = 3.0
    """Time for the last report of a driver whose end Ray saw first, and that was not killed."""
    stop_limit_s: float = 10.0
    """Time for Ray to end a driver that it was asked to stop: it kills one 3 s after it told it to end. Behind it the
    attempt ends without Ray's word; a driver that lives on is fenced off, and what it holds counts as held by others."""


@dataclass(frozen=True)
class DoNothing:
    """The attempt goes on."""


@dataclass(frozen=True)
class Submit:
    """Give the attempt to Ray."""


@dataclass(frozen=True)
class RequestGracefulStop:
    """The driver is to save a checkpoint and end."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class StopDriver:
    """Ray is to stop the driver."""

    why: str


@dataclass(frozen=True)
class EndAttempt:
    """The attempt is over without a final report."""

    state: AttemptState
    reason: Reason
    message: str


def decide_attempt(
    attempt: WatchedAttempt, *, watching_since: float, now: float, limits: WatchLimits
) -> DoNothing | Submit | RequestGracefulStop | StopDriver | EndAttempt:
    """The next step for an attempt. Silence counts from `watching_since` at the earliest.

    A control plane that was away itself must not take its own absence for the driver's.
    """
    cancelled = attempt.cancel_requested_at is not None
    if attempt.submitted_at is None:
        if cancelled:
            return _cancelled_end()
        if attempt.end_asked_for is not None:
            return _graceful_stop_end(attempt.end_asked_for, "before Ray had the driver")
        waited_s = now - max(attempt.created_at, watching_since)
        if waited_s < limits.start_timeout_s:
            return Submit()
        message = f"Ray has not taken the driver in {limits.start_timeout_s:g} s"
        return EndAttempt(AttemptState.FAILED, Reason.START_TIMEOUT, message)
    problem = _liveness_problem(attempt, watching_since=watching_since, now=now, limits=limits)
    if attempt.ray is not None and attempt.ray.state.ended:
        ended_at = attempt.ray.ended_seen_at
        grace_s = 0.0 if attempt.ray.was_killed else limits.report_grace_s
        if ended_at is None or now - ended_at < grace_s:
            return DoNothing()
        if cancelled:
            return _cancelled_end()
        if attempt.end_asked_for is not None:
            return _graceful_stop_end(attempt.end_asked_for, "without a last report")
        return problem or _driver_lost(attempt.ray)
    # a driver that was never heard has nothing to end by itself
    grace_s = 0.0 if attempt.heartbeat_at is None else limits.cancel_grace_s
    if cancelled and now - attempt.cancel_requested_at >= grace_s:
        out_of_reach = attempt.ray is None and problem is not None
        if out_of_reach or _stop_failed(attempt, now, limits):
            return _cancelled_end()
        return StopDriver("the driver did not end by itself")
    if attempt.end_asked_for is not None and not cancelled:
        if attempt.end_asked_at is None or now - attempt.end_asked_at < limits.end_grace_s:
            return DoNothing()
        late = f"in the {limits.end_grace_s:g} s that it had to save a checkpoint"
        if attempt.ray is None and problem is not None:
            return _graceful_stop_end(attempt.end_asked_for, f"unheard, {late}")
        if _stop_failed(attempt, now, limits):
            return _graceful_stop_end(attempt.end_asked_for, f"without Ray's word: it did not stop, {late}")
        return StopDriver(f"the driver did not end {late}")
    if attempt.deadline is not None and now >= attempt.deadline and not cancelled:
        return RequestGracefulStop(
            Reason.MAX_DURATION, "has held its accelerators for its whole max_duration"
        )
    if problem is None:
        return DoNothing()
    out_of_reach = attempt.ray is None or _stop_failed(attempt, now, limits)
    return problem if out_of_reach else StopDriver(problem.message)


def _stop_failed(attempt: WatchedAttempt, now: float, limits: WatchLimits) -> bool:
    """True where Ray has not ended the driver in the time that it has for it."""
    return attempt.stop_asked_at is not None and now - attempt.stop_asked_at >= limits.stop_limit_s


def _liveness_problem(
    attempt: WatchedAttempt, *, watching_since: float, now: float, limits: WatchLimits
) -> EndAttempt | None:
    """The end of an attempt whose driver is silent for too long; None while it is heard."""
    if attempt.heartbeat_at is None:
        waited_s = now - max(attempt.created_at, watching_since)
        if waited_s < limits.start_timeout_s:
            return None
        said = "" if attempt.ray is None else f"; Ray says: {attempt.ray}"
        message = f"the driver has not reported in {limits.start_timeout_s:g} s since its start{said}"
        return EndAttempt(AttemptState.FAILED, Reason.START_TIMEOUT, message)
    silent_s = now - max(attempt.heartbeat_at, watching_since)
    if silent_s < limits.silence_limit_s:
        return None
    return EndAttempt(
        AttemptState.FAILED,
        Reason.DRIVER_LOST,
        f"the driver has said nothing for {limits.silence_limit_s:g} s",
    )


def _driver_lost(ray: RayJob) -> EndAttempt:
    if ray.state is RayState.MISSING:
        message = "Ray no longer knows the attempt: the cluster was restarted"
    elif (setup_message := code_setup_failure(ray.message)) is not None:
        return EndAttempt(AttemptState.FAILED, Reason.CODE_SETUP_FAILED, setup_message)
    else:
        code = "" if ray.exit_code is None else f" with exit code {ray.exit_code}"
        detail = f": {ray.message.split(', last available logs')[0]}" if ray.message else ""
        message = f"the driver ended ({ray.state}){code} and sent no final report{detail}"
    return EndAttempt(AttemptState.FAILED, Reason.DRIVER_LOST, message)


def code_setup_failure(text: str | None) -> str | None:
    """The installer's errors, else the last line, of Ray's `text` about a runtime environment that failed; None for another
    text."""
    if not text or not text.startswith("runtime_env setup failed"):
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    return f"the job's code could not be set up: {'; '.join(errors)}; correct code.pip or code.working_dir"


def _graceful_stop_end(reason: Reason, how: str) -> EndAttempt:
    return EndAttempt(AttemptState.FAILED, reason, f"{reason.meaning}: the attempt ended {how}")


def _cancelled_end() -> EndAttempt:
    return EndAttempt(AttemptState.CANCELLED, Reason.CANCELLED_BY_USER, "cancelled by the user")


# After a failure


@dataclass(frozen=True)
class TryAgain:
    """Another attempt follows after a pause."""

    after_s: float
    message: str


@dataclass(frozen=True)
class FailJob:
    """The job has failed for good."""

    message: str


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt's failure, the last step that its job had reported before it, and the first that the attempt reported;
    None before the first."""

    reason: str
    message: str = ""
    step: int | None = None
    first_step: int | None = None

    def is_the_same(self, other: FailedAttempt) -> bool:
        """True where both say the same of the same step, but for numbers and addresses."""
        return self.step == other.step and self._kind == other._kind

    @property
    def _kind(self) -> tuple[str, str]:
        return self.reason, _NUMBERS.sub("#", self.message)


def without_made_good(failures: Sequence[FailedAttempt]) -> list[FailedAttempt]:
    """The failures, in their order, but those of the infrastructure that a later attempt made good: it went on from a
    further step than the failed one, so something of that was kept, and past the step where the job failed.

    Of an attempt without a step it is not known where it would have gone on: at the furthest where the next one did.
    """
    counted: list[FailedAttempt] = []
    later: list[tuple[int, int]] = []
    """First step, and step at its end, of each later attempt that had steps."""
    for failure in reversed(failures):
        went_on_from = (
            failure.first_step if failure.first_step is not None else later[-1][0] if later else None
        )
        failed_at = -1 if failure.step is None else failure.step
        is_nobodys_fault = cause_of(failure.reason) is Cause.INFRASTRUCTURE
        made_good = went_on_from is not None and any(
            first > went_on_from and last > failed_at for first, last in later
        )
        if not (is_nobodys_fault and made_good):
            counted.append(failure)
        if failure.first_step is not None:
            later.append((failure.first_step, failed_at))
    return counted[::-1]


_NUMBERS = re.compile(r"0x[0-9a-f]+|[0-9]+")
_RETRIED_AT_ONCE = (Reason.WORKER_LOST, Reason.DRIVER_LOST)
"""Where a process alone was lost, Ray has nothing to find out first: the first retry is without a pause."""
_WITHIN_THE_ATTEMPT = (Reason.INTERNAL, Reason.CHECKPOINT_FAILED)
"""Failures of the infrastructure that come of what an attempt does, not of what happens to it."""


def after_failure(
    failure: FailedAttempt,
    *,
    allowed: RetrySection,
    before: Sequence[FailedAttempt],
    backoff_s: float,
    backoff_limit_s: float,
) -> TryAgain | FailJob:
    """The retry, or the end, of a job whose attempt failed.

    `before` are the earlier failed attempts that still count, in their order. Each cause has its own allowance (-1: no
    limit); the pause doubles with every failure of the same cause, up to `backoff_limit_s`, and a lost process has none
    before its first retry. An illegal address is the accelerator's once, and then the job's own. What failed within the
    attempt, in the same words at the same step as the last one, would fail again, and is not tried again unless there is
    no limit.
    """
    reason, message = failure.reason, failure.message
    repeated = reason == Reason.ILLEGAL_ADDRESS and any(other.reason == reason for other in before)
    cause = Cause.USER if repeated else cause_of(reason)
    earlier = sum(cause_of(other.reason) is cause for other in before)
    limit = {
        Cause.INFRASTRUCTURE: allowed.infrastructure,
        Cause.USER: allowed.user,
        Cause.PREEMPTION: allowed.preemption,
    }[cause]
    if limit != -1 and earlier >= limit:
        tries = f" (retry.{cause} is {limit})" if limit or cause is not Cause.USER else ""
        return FailJob(f"{message}{tries}")
    if limit != -1 and reason in _WITHIN_THE_ATTEMPT and before and failure.is_the_same(before[-1]):
        where = "before the first step" if failure.step is None else f"behind step {failure.step}"
        return FailJob(
            f"{message} (the attempt before failed in the same way {where}, and another would: `slotline retry` goes on "
            "when the cause is gone)"
        )
    of = "" if limit == -1 else f" of {limit}"
    which = f"{cause} retry {earlier + 1}{of}"
    if earlier == 0 and reason in _RETRIED_AT_ONCE:
        return TryAgain(0.0, f"{message}; {which} at once")
    pause_s = min(backoff_limit_s, backoff_s * 2 ** min(earlier, 30))
    return TryAgain(pause_s, f"{message}; {which} in {pause_s:g} s")
