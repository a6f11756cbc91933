"""Attempts in the store: made with their token, found, listed by what is still to be done about them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.jobspec import AttemptState, JobState
from service.store.states import move_job
from service.store.tables import WITHOUT_SPEC, Attempt, Job


async def create_attempt(session: AsyncSession, job: Job, *, device: str, at: datetime) -> Attempt:
    """The next attempt of a locked job that waits: the job is STARTING afterwards.

    The first one fixes the device of the job: those that go on from its checkpoints compute as it did.
    """
    assert job.device in ("auto", device), f"{job.id} is a job on {job.device}, not on {device}"
    job.device = device
    job.attempts_made += 1
    attempt = Attempt(
        id=f"{job.id}-{job.attempts_made}",
        job_id=job.id,
        number=job.attempts_made,
        state=AttemptState.STARTING,
        token=secrets.token_urlsafe(32),
        device=device,
        accelerators=job.accelerators,
        created_at=at,
        last_sequence=0,
        log_first_line=1,
    )
    session.add(attempt)
    job.current_attempt, job.not_before = attempt.id, None
    move_job(
        session,
        job,
        JobState.STARTING,
        at=at,
        message=f"attempt {attempt.number} takes {job.accelerators} accelerators ({device})",
        attempt=attempt.number,
    )
    return attempt


async def find_attempt(session: AsyncSession, attempt_id: str) -> Attempt | None:
    return await session.get(Attempt, attempt_id)


async def attempts_of(session: AsyncSession, job_id: str) -> Sequence[Attempt]:
    """The job's attempts, first to last."""
    query = select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.number)
    return (await session.execute(query)).scalars().all()


async def active_attempts(session: AsyncSession) -> list[tuple[Attempt, Job]]:
    """Attempts that hold accelerators, oldest first, each with its job (without its specification)."""
    query = (
        select(Attempt, Job)
        .join(Job, Attempt.job_id == Job.id)
        .options(WITHOUT_SPEC)
        .where(Attempt.state.in_([AttemptState.STARTING, AttemptState.RUNNING]))
        .order_by(Attempt.created_at, Attempt.id)
    )
    return [(attempt, job) for attempt, job in (await session.execute(query)).all()]


async def attempts_without_log(session: AsyncSession, *, ended_before: datetime) -> list[Attempt]:
    """Attempts that are over and whose driver's log is not kept yet."""
    query = select(Attempt).where(
        Attempt.log.is_(None), Attempt.submitted_at.is_not(None), Attempt.finished_at < ended_before
    )
    return list((await session.execute(query)).scalars())


async def measured_attempts(session: AsyncSession, *, ended_after: datetime) -> list[tuple[Attempt, Job]]:
    """Attempts whose driver serves metrics: they run, or ended after `ended_after`."""
    query = (
        select(Attempt, Job)
        .join(Job, Attempt.job_id == Job.id)
        .options(WITHOUT_SPEC)
        .where(
            Attempt.metrics_endpoint.is_not(None),
            or_(Attempt.finished_at.is_(None), Attempt.finished_at > ended_after),
        )
        .order_by(Attempt.created_at, Attempt.id)
    )
    return [(attempt, job) for attempt, job in (await session.execute(query)).all()]
