"""What the orchestrator decides: which jobs start, what happens to an attempt, what follows a failure.

Pure functions from values to values: no clock, no database, no Ray. Times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from service.job_states import AttemptState
from service.jobspec import Retry
from worker.reasons import Cause, Reason, cause_of

Device = Literal["cpu", "cuda"]


# Admission


@dataclass(frozen=True)
class WaitingJob:
    """A job that wants a whole gang of `accelerators`; `device` may be auto until it `began`."""

    id: str
    queue: str
    priority: int
    queued_at: float
    accelerators: int
    device: str
    not_before: float | None = None
    began: bool = False


@dataclass(frozen=True)
class Holder:
    """A job whose attempt holds accelerators."""

    job_id: str
    queue: str
    accelerators: int
    device: str


# The Ray resource of an accelerator by device, as the worker's placement groups ask for it.
RESOURCES = {"cpu": "slotline_worker", "cuda": "GPU"}


@dataclass(frozen=True)
class Capacity:
    """Accelerators of all living nodes by device, and those of them that others than our attempts hold."""

    total: Mapping[str, int]
    others: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    job_id: str
    device: Device


@dataclass(frozen=True)
class Wait:
    job_id: str
    reason: Reason
    message: str


def admit(
    waiting: Sequence[WaitingJob],
    holders: Sequence[Holder],
    *,
    capacity: Capacity | None,
    quotas: Mapping[str, int | None],
    now: float,
) -> list[Start | Wait]:
    """One answer a waiting job, best first: by priority, then by age; a whole gang or nothing.

    The first job that must wait for accelerators keeps later jobs of its device from
    overtaking it, so that a large job is not starved by small ones. Jobs held back by a quota, by
    a pause, or because the cluster is too small for them at all hold nobody up.
    """
    running, answers, first_in_line = list(holders), list[Start | Wait](), dict[str, str]()
    for job in sorted(waiting, key=lambda job: (-job.priority, job.queued_at, job.id)):
        answer = _answer(job, running, first_in_line, capacity, quotas, now)
        answers.append(answer)
        if isinstance(answer, Start):
            running.append(Holder(job.id, job.queue, job.accelerators, answer.device))
        elif answer.reason is Reason.WAITS_FOR_ACCELERATORS and capacity is not None:
            first_in_line.setdefault(device_of(job.device, job.accelerators, capacity), job.id)
    return answers


def _answer(
    job: WaitingJob,
    running: Sequence[Holder],
    first_in_line: Mapping[str, str],
    capacity: Capacity | None,
    quotas: Mapping[str, int | None],
    now: float,
) -> Start | Wait:
    if job.not_before is not None and now < job.not_before:
        return Wait(job.id, Reason.BACKING_OFF, "waits a little before the next attempt")
    if message := _over_quota(job, running, quotas):
        return Wait(job.id, Reason.WAITS_FOR_QUOTA, message)
    if capacity is None:
        return Wait(job.id, Reason.WAITS_FOR_CLUSTER, "waits for the Ray cluster, which does not answer")
    device = device_of(job.device, job.accelerators, capacity)
    total, resource = capacity.total.get(device, 0), RESOURCES[device]
    if job.accelerators > total:
        if job.began:
            began = f"it began on {device} and goes on only there: add nodes, or submit it anew for another device"
            message = (
                f"waits for {job.accelerators} accelerators of {resource}, the cluster has {total}; {began}"
            )
            return Wait(job.id, Reason.CLUSTER_TOO_SMALL, message)
        return Wait(
            job.id,
            Reason.CLUSTER_TOO_SMALL,
            f"needs {job.accelerators} accelerators of {resource}; the cluster has {total}: add nodes, "
            f"or submit with {'fewer resources.meshes' if total else 'another resources.device'}",
        )
    users = [holder for holder in running if holder.device == device]
    others = capacity.others.get(device, 0)
    free = total - others - sum(holder.accelerators for holder in users)
    wanted = f"waits for {job.accelerators} accelerators of {resource}; {max(free, 0)} of {total} free"
    if free < job.accelerators:
        taken = f"; others than Slotline's running jobs hold {others}" if others else ""
        return Wait(job.id, Reason.WAITS_FOR_ACCELERATORS, wanted + _used_by(users) + taken)
    if device in first_in_line:
        return Wait(
            job.id, Reason.WAITS_BEHIND, f"{wanted}, kept for job {first_in_line[device]}, which is before it"
        )
    return Start(job.id, device)


def device_of(wanted: str, accelerators: int, capacity: Capacity) -> Device:
    """The device of a gang: what is wanted; for auto cuda where the whole gang finds GPUs."""
    if wanted != "auto":
        return "cuda" if wanted == "cuda" else "cpu"
    return "cuda" if capacity.total.get("cuda", 0) >= accelerators else "cpu"


def _over_quota(job: WaitingJob, running: Sequence[Holder], quotas: Mapping[str, int | None]) -> str | None:
    quota = quotas.get(job.queue)
    if quota is None:
        return None
    users = [holder for holder in running if holder.queue == job.queue]
    used = sum(holder.accelerators for holder in users)
    if used + job.accelerators <= quota:
        return None
    if job.accelerators > quota:
        return (
            f"needs {job.accelerators} accelerators; the quota of queue {job.queue} is {quota}: "
            "raise it in SLOTLINE_QUEUES, or submit to another queue or with fewer resources.meshes"
        )
    return (
        f"waits for {job.accelerators} accelerators of queue {job.queue}; "
        f"{quota - used} of its quota of {quota} free{_used_by(users)}"
    )


def _used_by(users: Sequence[Holder]) -> str:
    if not users:
        return ""
    named = ", ".join(f"job {user.job_id} uses {user.accelerators}" for user in users[:3])
    more = f", {len(users) - 3} more jobs use {sum(user.accelerators for user in users[3:])}"
    return f" ({named}{more if len(users) > 3 else ''})"


# Watching an attempt


class RayState(StrEnum):
    """What Ray says about the job behind an attempt; MISSING: Ray answers and does not know it."""

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
    """Ray's latest word on a job; `ended_seen_at` is when we first saw it ended."""

    state: RayState
    message: str | None = None
    exit_code: int | None = None
    ended_seen_at: float | None = None


@dataclass(frozen=True)
class WatchedAttempt:
    """An attempt that is not final. `ray` is None while Ray has not answered about it."""

    created_at: float
    submitted_at: float | None
    heartbeat_at: float | None
    cancel_requested_at: float | None
    ray: RayJob | None


@dataclass(frozen=True)
class WatchLimits:
    silence_limit_s: float = 600.0
    start_timeout_s: float = 600.0
    cancel_grace_s: float = 15.0
    report_grace_s: float = 3.0
    """A driver that ended may have a last report under way; Ray may see the end first."""


@dataclass(frozen=True)
class Leave:
    """Nothing to do."""


@dataclass(frozen=True)
class Submit:
    """Give the attempt to Ray."""


@dataclass(frozen=True)
class Stop:
    """Have Ray stop the driver."""

    why: str


@dataclass(frozen=True)
class End:
    """The attempt is over without a final report."""

    state: AttemptState
    reason: Reason
    message: str


def watch(
    attempt: WatchedAttempt, *, watching_since: float, now: float, limits: WatchLimits
) -> Leave | Submit | Stop | End:
    """What to do about an attempt. Silence counts from `watching_since` at the earliest.

    A control plane that was away itself must not take its own absence for the driver's.
    """
    cancelled = attempt.cancel_requested_at is not None
    if attempt.submitted_at is None:
        if cancelled:
            return _cancelled_end()
        waited = now - max(attempt.created_at, watching_since)
        if waited < limits.start_timeout_s:
            return Submit()
        message = f"Ray has not taken the driver in {limits.start_timeout_s:g} s"
        return End(AttemptState.FAILED, Reason.START_TIMEOUT, message)
    problem = _problem(attempt, watching_since=watching_since, now=now, limits=limits)
    if attempt.ray is not None and attempt.ray.state.ended:
        seen = attempt.ray.ended_seen_at
        if seen is None or now - seen < limits.report_grace_s:
            return Leave()
        return _cancelled_end() if cancelled else (problem or _lost(attempt.ray))
    if cancelled and now - attempt.cancel_requested_at >= limits.cancel_grace_s:
        out_of_reach = attempt.ray is None and problem is not None
        return _cancelled_end() if out_of_reach else Stop("the driver did not end by itself")
    if problem is None:
        return Leave()
    return problem if attempt.ray is None else Stop(problem.message)


def _problem(
    attempt: WatchedAttempt, *, watching_since: float, now: float, limits: WatchLimits
) -> End | None:
    """Why an attempt that Ray still runs, or that Ray says nothing about, cannot go on."""
    if attempt.heartbeat_at is None:
        waited = now - max(attempt.created_at, watching_since)
        if waited < limits.start_timeout_s:
            return None
        message = f"the driver has not reported in {limits.start_timeout_s:g} s since its start"
        return End(AttemptState.FAILED, Reason.START_TIMEOUT, message)
    silent = now - max(attempt.heartbeat_at, watching_since)
    if silent < limits.silence_limit_s:
        return None
    return End(
        AttemptState.FAILED,
        Reason.DRIVER_LOST,
        f"the driver has said nothing for {limits.silence_limit_s:g} s",
    )


def _lost(ray: RayJob) -> End:
    if ray.state is RayState.MISSING:
        message = "Ray no longer knows the attempt: the cluster was restarted"
    elif ray.message and ray.message.startswith("runtime_env setup failed"):
        return End(AttemptState.FAILED, Reason.CODE_SETUP_FAILED, _setup_message(ray.message))
    else:
        code = "" if ray.exit_code is None else f" with exit code {ray.exit_code}"
        detail = f": {ray.message.split(', last available logs')[0]}" if ray.message else ""
        message = f"the driver ended ({ray.state}){code} and sent no final report{detail}"
    return End(AttemptState.FAILED, Reason.DRIVER_LOST, message)


def _setup_message(text: str) -> str:
    """Of Ray's account of an environment that could not be made: what the installer said, else its end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    return f"the job's code could not be set up: {'; '.join(said)}; correct code.pip or code.working_dir"


def _cancelled_end() -> End:
    return End(AttemptState.CANCELLED, Reason.CANCELLED_BY_USER, "cancelled by the user")


# After a failure


@dataclass(frozen=True)
class TryAgain:
    after_s: float
    message: str


@dataclass(frozen=True)
class GiveUp:
    message: str


def after_failure(
    reason: str,
    message: str,
    *,
    allowed: Retry,
    failures_before: Sequence[str],
    backoff_s: float,
    backoff_limit_s: float,
) -> TryAgain | GiveUp:
    """Whether another attempt follows one that failed with `reason`.

    `failures_before` are the reasons of the earlier failed attempts that still count. Each
    cause has its own allowance; the pause doubles with every failure of the same cause.
    """
    cause = cause_of(reason)
    earlier = sum(cause_of(before) is cause for before in failures_before)
    limit = {
        Cause.INFRASTRUCTURE: allowed.infrastructure,
        Cause.USER: allowed.user,
        Cause.PREEMPTION: allowed.preemption,
    }[cause]
    if limit != -1 and earlier >= limit:
        tries = f" (retry.{cause} is {limit})" if limit or cause is not Cause.USER else ""
        return GiveUp(f"{message}{tries}")
    pause = min(backoff_limit_s, backoff_s * 2 ** min(earlier, 30))
    of = "" if limit == -1 else f" of {limit}"
    return TryAgain(pause, f"{message}; {cause} retry {earlier + 1}{of} in {pause:g} s")
