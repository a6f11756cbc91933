"""Rows of the store as the values that queueing.admit decides from."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from service.orchestrator.asked_end import deadline_of
from service.orchestrator.decide import Capacity, Holder, QueueRules, WaitingJob
from service.orchestrator.everywhere import line_everywhere
from service.settings import Settings
from service.store.tables import Attempt, Job

END_TAKES_S = 30.0
"""So long after it was stopped an attempt may hold its accelerators still."""


def rules_of(settings: Settings) -> QueueRules:
    """How jobs take turns and give way."""
    return QueueRules(
        preempts=settings.preemption,
        grace_s=settings.preemption_grace_s + END_TAKES_S,
        patience_s=settings.queue_patience_s,
    )


def waiting_job(job: Job, settings: Settings) -> WaitingJob:
    """A job that waits."""
    longest_s = math.inf
    if job.max_duration_s is not None:
        longest_s = max(job.max_duration_s - job.held_s, 0.0) + settings.preemption_grace_s + END_TAKES_S
    return WaitingJob(
        id=job.id,
        queue=job.queue,
        priority=job.priority,
        queued_at=job.queued_at.timestamp(),
        accelerators=job.accelerators,
        device=job.device,
        began=job.attempts_made > 0,
        not_before=None if job.not_before is None else job.not_before.timestamp(),
        owner=owner_of(job),
        longest_s=longest_s,
        cluster=settings.cluster_of(job.queue),
        began_on=job.began_on,
    )


def holder(attempt: Attempt, job: Job, settings: Settings, *, now: float) -> Holder:
    """An attempt that holds accelerators, and until when at most."""
    until, leaving = math.inf, False
    if (deadline := deadline_of(attempt, job)) is not None:
        until = deadline + settings.preemption_grace_s + END_TAKES_S
    for asked_at, grace_s in (
        (attempt.end_asked_at, settings.preemption_grace_s),
        (job.cancel_requested_at, settings.cancel_grace_s),
    ):
        if asked_at is not None:  # it goes, if later than it should: nobody else has to for that
            leaving = True
            until = max(asked_at.timestamp() + grace_s, now) + END_TAKES_S
    return Holder(
        job_id=job.id,
        queue=job.queue,
        accelerators=attempt.accelerators,
        device=attempt.device,
        owner=owner_of(job),
        priority=job.priority,
        since=attempt.created_at.timestamp(),
        until=until,
        leaving=leaving,
        cluster=attempt.cluster,
    )


def in_line(
    waiting: Sequence[Job],
    active: Sequence[tuple[Attempt, Job]],
    capacities: Mapping[str, Capacity | None],
    settings: Settings,
) -> list[Job]:
    """Waiting jobs in the order in which their turns come on their clusters."""
    now = time.time()
    known = {job.id: job for job in waiting}
    line = line_everywhere(
        [waiting_job(job, settings) for job in waiting],
        [holder(attempt, job, settings, now=now) for attempt, job in active],
        capacities=capacities,
        now=now,
        patience_s=settings.queue_patience_s,
    )
    return [known[one.id] for one in line]


def owner_of(job: Job) -> str:
    """Whose turn the job takes in its queue; nobody's name where the store knows no owners: then all are one."""
    return getattr(job, "owner", None) or ""
