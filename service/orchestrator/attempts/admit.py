"""Admits waiting jobs: creates attempts where jobs may start, preempts others, explains why the rest wait.

Turns rows of the store into the values of `decisions`, which decide (`admit_all_clusters`, in a thread: queues may
hold thousands of jobs), and applies the answers, each in a transaction that checks the job again. An explanation is
written only where it is news. A stopping or over-time attempt counts as a holder until its grace and release delay
have passed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from service.orchestrator.attempts.autoscaling import Autoscaling
from service.orchestrator.attempts.outcome import attempt_deadline, request_graceful_stop
from service.orchestrator.decisions.attempt_lifecycle import (
    CANCEL_GRACE_S,
    OWNER_PATIENCE_S,
    Capacity,
    Holder,
    Preempt,
    QueueRules,
    Start,
    Wait,
    WaitingJob,
)
from service.orchestrator.decisions.multi_cluster import admit_all_clusters, order_all_clusters
from service.orchestrator.ray.clusters import Clusters
from service.settings.settings import Settings
from service.spec.states import AttemptState, JobState, NodeMark, NodeState
from service.store.attempts import create_attempt, placements_of
from service.store.database import Sessions, utc_now
from service.store.jobs import WaitingRow
from service.store.queues import all_quotas
from service.store.tables import AttemptRow, JobRow
from service.store.transitions import explain_wait, lock_job, lock_jobs
from worker.contract.reasons import Reason

ItemT = TypeVar("ItemT")
JobT = TypeVar("JobT", JobRow, WaitingRow)
RELEASE_DELAY_S = 30.0
"""Time for which an attempt may still hold its accelerators after it was stopped."""
_EXPLANATIONS_PER_TRANSACTION = 200


class Admission:
    """Creates attempts for the accelerators of each cluster, by the rules of the queues; calls `changed` after each."""

    def __init__(
        self,
        settings: Settings,
        database: Sessions,
        clusters: Clusters,
        *,
        autoscaling: Autoscaling,
        changed: Callable[[], None],
    ) -> None:
        self._settings, self._database, self._clusters = settings, database, clusters
        self._autoscaling, self._changed = autoscaling, changed

    async def empty_draining_nodes(
        self, active: Sequence[tuple[AttemptRow, JobRow]], marks: Sequence[NodeMark]
    ) -> None:
        """Request a graceful stop of each attempt with a mesh on a draining node: its job goes on elsewhere."""
        draining = {
            (cluster, node_id): mark
            for cluster, nodes in self._clusters.left_out(marks).items()
            for node_id, mark in nodes.items()
            if mark.state is NodeState.DRAINING
        }
        going_on = [attempt.id for attempt, _ in active if attempt.end_asked_at is None]
        if not draining or not going_on:
            return
        async with self._database.read() as session:
            placements = await placements_of(session, going_on)
        stopped = {
            placed.attempt_id: draining[placed.cluster, placed.node_id]
            for placed in placements
            if (placed.cluster, placed.node_id) in draining
        }
        for attempt_id, mark in stopped.items():
            await self._preempt(attempt_id, f"node {mark}")

    async def admit(
        self,
        waiting: Sequence[WaitingRow],
        active: Sequence[tuple[AttemptRow, JobRow]],
        marks: Sequence[NodeMark] = (),
        *,
        grows: bool = True,
    ) -> None:
        """Start or explain every waiting job, request a graceful stop of each job that gives way or (`grows`) goes on with
        more accelerators, and say what clusters are to grow for."""
        drivers = defaultdict[str, list[str]](list)
        for attempt, _ in active:
            drivers[attempt.cluster].append(attempt.driver_id)
        capacities, now = self._clusters.capacities(drivers, marks), time.time()
        left_out = self._clusters.left_out(marks)
        async with self._database.read() as session:
            quotas = await all_quotas(session, self._settings.quotas)
            on_left_out = await _workers_left_out(session, active, left_out)
        holders = [
            replace(
                to_holder(attempt, job, self._settings, now=now, left_out=on_left_out.get(attempt.id, 0)),
                larger=_larger_gangs(attempt, job) if grows else (),
            )
            for attempt, job in active
        ]

        def decide() -> tuple[dict[str, WaitingJob], list[Start | Wait | Preempt]]:
            jobs = {job.id: to_waiting_job(job, self._settings, now=now) for job in waiting}
            rules = queue_rules(self._settings)
            return jobs, admit_all_clusters(
                list(jobs.values()), holders, capacities=capacities, quotas=quotas, now=now, rules=rules
            )

        jobs, answers = await asyncio.to_thread(decide)  # thousands of jobs take their time
        self._autoscaling.update(
            [jobs[answer.job_id] for answer in answers if not isinstance(answer, Preempt)],
            holders,
            {job.id for attempt, job in active if attempt.attempt_state is AttemptState.STARTING},
            capacities=capacities,
            quotas=quotas,
            left_out=left_out,
        )
        attempt_of = {job.id: attempt.id for attempt, job in active}
        jobs_by_id = {job.id: job for job in waiting}
        for answer in answers:
            if isinstance(answer, Start):
                await self._start(answer, self._settings.cluster_of(jobs_by_id[answer.job_id].queue))
            elif isinstance(answer, Preempt):
                reason = Reason.RESIZED if answer.for_job == answer.job_id else Reason.PREEMPTED
                await self._preempt(attempt_of[answer.job_id], answer.message, reason)
        waits = self._autoscaling.explained(wait for wait in answers if isinstance(wait, Wait))
        await explain_waits(self._database, [(jobs_by_id[wait.job_id], wait) for wait in waits])

    async def _preempt(self, attempt_id: str, message: str, reason: Reason = Reason.PREEMPTED) -> None:
        async with self._database.write() as session:
            requested = await request_graceful_stop(session, attempt_id, reason, message, at=utc_now())
        if requested:
            self._changed()

    async def _start(self, start: Start, cluster: str | None) -> None:
        async with self._database.write() as session:
            job = await lock_job(session, start.job_id)
            if job is None or job.job_state not in (JobState.QUEUED, JobState.RECOVERING):
                return
            if job.device not in ("auto", start.device):
                return  # its device was fixed since it was read: the next round knows
            if cluster is None or self._settings.cluster_of(job.queue) != cluster:
                return  # moved to another cluster's queue since then
            await create_attempt(
                session,
                job,
                device=start.device,
                at=utc_now(),
                cluster=cluster,
                accelerators=start.accelerators,
                accelerator_type=start.accelerator_type,
            )
        self._changed()


async def _workers_left_out(
    session: AsyncSession,
    active: Sequence[tuple[AttemptRow, JobRow]],
    left_out: Mapping[str, Mapping[str, NodeMark]],
) -> dict[str, int]:
    """The numbers of workers of attempts on nodes that take no work, by attempt."""
    workers: dict[str, int] = defaultdict(int)
    if any(left_out.values()):
        for placed in await placements_of(session, [attempt.id for attempt, _ in active]):
            if placed.node_id in left_out.get(placed.cluster, ()):
                workers[placed.attempt_id] += placed.workers
    return workers


async def explain_waits(database: Sessions, waits: Sequence[tuple[WaitingRow, Wait]]) -> None:
    """Write to jobs why they wait, where that has changed; one start or end changes it for every job behind."""
    news = {job.id: (job, wait) for job, wait in waits if _is_news(job, wait)}
    for ids in _batched(sorted(news), _EXPLANATIONS_PER_TRANSACTION):
        async with database.write() as session:
            for fresh in await lock_jobs(session, ids):
                job, wait = news[fresh.id]
                if fresh.state == job.state:
                    explain_wait(session, fresh, wait.reason, wait.message, at=utc_now())


def _is_news(job: WaitingRow, wait: Wait) -> bool:
    if job.reason == wait.reason and job.message == wait.message:
        return False
    # of a job that backs off, the failure that it recovers from says more
    return job.state != JobState.RECOVERING or wait.reason is not Reason.BACKING_OFF


def _batched(values: Sequence[ItemT], size: int) -> Iterator[Sequence[ItemT]]:
    for begin in range(0, len(values), size):
        yield values[begin : begin + size]


def admission_order(
    waiting: Sequence[JobT],
    active: Sequence[tuple[AttemptRow, JobRow]],
    capacities: Mapping[str, Capacity | None],
    settings: Settings,
) -> list[JobT]:
    """Waiting jobs in the order of their turns on their clusters."""
    now = time.time()
    jobs_by_id = {job.id: job for job in waiting}
    ordered = order_all_clusters(
        [to_waiting_job(job, settings, now=now) for job in waiting],
        [to_holder(attempt, job, settings, now=now) for attempt, job in active],
        capacities=capacities,
        now=now,
        patience_s=OWNER_PATIENCE_S,
    )
    return [jobs_by_id[job.id] for job in ordered]


def queue_rules(settings: Settings) -> QueueRules:
    """The rules of all queues, from the settings."""
    return QueueRules(
        preempts=settings.preemption,
        grace_s=settings.preemption_grace_s + RELEASE_DELAY_S,
    )


_GROWTH_PAYS = 2.0
"""A larger gang must save so many times the seconds that the attempt took to start."""


def gang_sizes(job: JobRow | WaitingRow) -> list[int]:
    """The numbers of accelerators with which an elastic job, or one with spares, may train, the most first; empty for
    others."""
    if job.fewest_accelerators is None:
        return []
    step = job.workers_per_mesh if job.is_elastic else 1
    return list(range(job.accelerators, job.fewest_accelerators - 1, -step))


def _larger_gangs(attempt: AttemptRow, job: JobRow) -> list[int]:
    """Sizes with which an elastic job would end clearly earlier than with the attempt's, though it starts anew: the steps
    that are left, were they as much faster as it is larger, save twice the time of a start."""
    if not job.is_elastic or job.step_s is None or job.step is None or attempt.started_at is None:
        return []
    left_s = (job.steps_wanted - job.step) * job.step_s
    start_s = (attempt.started_at - attempt.created_at).total_seconds()
    return [
        size
        for size in gang_sizes(job)
        if size > attempt.accelerators
        and left_s * (1 - attempt.accelerators / size) > _GROWTH_PAYS * max(start_s, 10.0)
    ]


def to_waiting_job(job: JobRow | WaitingRow, settings: Settings, *, now: float) -> WaitingJob:
    """The job as a value for `decisions`."""
    longest_s = math.inf
    if job.max_duration_s is not None:
        longest_s = max(job.max_duration_s - job.held_s, 0.0) + settings.preemption_grace_s + RELEASE_DELAY_S
    gangs = gang_sizes(job)
    patient = bool(gangs) and job.patient_until is not None and now < job.patient_until.timestamp()
    if patient:
        gangs = [size for size in gangs if size >= min(job.last_accelerators or 0, job.accelerators)]
    return WaitingJob(
        id=job.id,
        queue=job.queue,
        priority=job.priority,
        queued_at=job.queued_at.timestamp(),
        accelerators=gangs[-1] if gangs else job.accelerators,
        gangs=gangs,
        patient=patient,
        device=job.device,
        began=job.attempts_made > 0,
        not_before=None if job.not_before is None else job.not_before.timestamp(),
        owner=fair_share_owner(job),
        project=job.project,
        longest_s=longest_s,
        accelerator_type=job.accelerator_type,
        cluster=settings.cluster_of(job.queue),
        began_on=job.began_on,
    )


def to_holder(
    attempt: AttemptRow, job: JobRow, settings: Settings, *, now: float, left_out: int = 0
) -> Holder:
    """The attempt as a value for `decisions`, with the time until which it holds accelerators at most; `left_out` of its
    workers are on nodes that take no work."""
    until, stopping = math.inf, False
    if (deadline := attempt_deadline(attempt, job)) is not None:
        until = deadline + settings.preemption_grace_s + RELEASE_DELAY_S
    for asked_at, grace_s in (
        (attempt.end_asked_at, settings.preemption_grace_s),
        (job.cancel_requested_at, CANCEL_GRACE_S),
    ):
        if asked_at is not None:  # it ends, even if late: no other job is preempted in its place
            stopping = True
            until = max(asked_at.timestamp() + grace_s, now) + RELEASE_DELAY_S
    return Holder(
        job_id=job.id,
        queue=job.queue,
        accelerators=attempt.accelerators,
        device=attempt.device,
        owner=fair_share_owner(job),
        project=job.project,
        priority=job.priority,
        since=attempt.created_at.timestamp(),
        until=until,
        stopping=stopping,
        cluster=attempt.cluster,
        left_out=left_out,
        accelerator_type=attempt.accelerator_type,
    )


def fair_share_owner(job: JobRow | WaitingRow) -> str:
    """The owner whose turn the job takes in its queue; empty, and so shared by all, where the store has no owners."""
    return getattr(job, "owner", None) or ""
