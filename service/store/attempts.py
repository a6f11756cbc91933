"""Attempts: created with their token, placed, locked with their job, listed by state, missing log and metrics endpoint.

Creating an attempt of a locked, waiting job moves the job to STARTING. A job's first attempt fixes its device and
its cluster, where its checkpoints are and later attempts resume. `lock_attempt` locks the job and re-reads the attempt.
Lists leave out logs and specifications, which are long.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import delete, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.settings.clusters import DEFAULT_CLUSTER
from service.spec.states import AttemptState, JobState
from service.store.spans import add_wait_span
from service.store.tables import WITHOUT_LOG, WITHOUT_SPEC, Attempt, Job, PlacedMesh
from service.store.transitions import lock_job, move_job


async def exchange_token(session: AsyncSession, attempt_id: str, old: str, new: str) -> bool:
    """Put `new` in the place of the token `old`; False where another exchange came between."""
    change = update(Attempt).where(Attempt.id == attempt_id, Attempt.token == old).values(token=new)
    return (await session.execute(change)).rowcount == 1


async def create_attempt(
    session: AsyncSession, job: Job, *, device: str, at: datetime, cluster: str = DEFAULT_CLUSTER
) -> Attempt:
    """Create the next attempt of a locked, waiting job, which becomes STARTING.

    The first attempt fixes the device and the cluster of the job: later attempts resume from its checkpoints.
    """
    assert job.device in ("auto", device), f"{job.id} is a job on {job.device}, not on {device}"
    assert job.began_on in (None, cluster), f"{job.id} began on {job.began_on}, not on {cluster}"
    job.device, job.cluster = device, cluster
    job.attempts_made += 1
    attempt = Attempt(
        id=f"{job.id}-{job.attempts_made}",
        job_id=job.id,
        number=job.attempts_made,
        state=AttemptState.STARTING,
        token=secrets.token_urlsafe(32),
        device=device,
        cluster=cluster,
        accelerators=job.accelerators,
        created_at=at,
        last_sequence=0,
        log_first_line=1,
    )
    session.add(attempt)
    job.current_attempt, job.not_before = attempt.id, None
    await add_wait_span(session, job, until=at)
    move_job(
        session,
        job,
        JobState.STARTING,
        at=at,
        message=f"attempt {attempt.number} takes {job.accelerators} accelerators ({device})"
        + ("" if cluster == DEFAULT_CLUSTER else f" of cluster {cluster}"),
        attempt=attempt.number,
    )
    return attempt


async def find_attempt(session: AsyncSession, attempt_id: str) -> Attempt | None:
    return await session.get(Attempt, attempt_id)


async def lock_attempt(session: AsyncSession, attempt_id: str) -> tuple[Attempt, Job]:
    """The attempt, read again under the lock, and its job, which stays locked until the session ends."""
    attempt = await find_attempt(session, attempt_id)
    assert attempt is not None, attempt_id
    job = await lock_job(session, attempt.job_id)
    assert job is not None, attempt.job_id
    await session.refresh(attempt)  # it may have been read before the job was locked
    return attempt, job


async def attempts_of(session: AsyncSession, job_id: str) -> Sequence[Attempt]:
    """The job's attempts, first to last, without their logs."""
    query = select(Attempt).options(WITHOUT_LOG).where(Attempt.job_id == job_id).order_by(Attempt.number)
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


async def record_placement(session: AsyncSession, attempt_id: str, placed: Sequence[PlacedMesh]) -> None:
    """Store where the attempt's meshes are placed, in the stead of an earlier placement."""
    await session.execute(delete(PlacedMesh).where(PlacedMesh.attempt_id == attempt_id))
    session.add_all(placed)


async def placements_of(session: AsyncSession, attempt_ids: Collection[str]) -> Sequence[PlacedMesh]:
    """The nodes of the meshes of these attempts, mesh by mesh."""
    query = select(PlacedMesh).where(PlacedMesh.attempt_id.in_(attempt_ids))
    found = (await session.execute(query)).scalars().all()
    return sorted(found, key=lambda one: (one.attempt_id, len(one.mesh), one.mesh, one.node, one.node_id))


class LogLocation(NamedTuple):
    """Place of an attempt's log: in the store if it is `stored`, else with Ray if the attempt was `submitted`."""

    attempt_id: str
    number: int
    created_at: datetime
    ended: bool
    submitted: bool
    stored: bool
    cluster: str = DEFAULT_CLUSTER


async def log_locations(session: AsyncSession, job_id: str) -> list[LogLocation]:
    """The log locations of all attempts of a job, first to last."""
    query = select(
        Attempt.id,
        Attempt.number,
        Attempt.created_at,
        Attempt.state,
        Attempt.submitted_at,
        Attempt.log.is_not(None),
        Attempt.cluster,
    )
    rows = await session.execute(query.where(Attempt.job_id == job_id).order_by(Attempt.number))
    return [
        LogLocation(id_, number, created, AttemptState(state).final, submitted is not None, stored, cluster)
        for id_, number, created, state, submitted, stored, cluster in rows
    ]


async def stored_log(session: AsyncSession, attempt_id: str) -> tuple[int, str]:
    """Number of the first stored line of the log, and the text from there on."""
    query = select(Attempt.log_first_line, Attempt.log).where(Attempt.id == attempt_id)
    first, text = (await session.execute(query)).one()
    return first, text or ""


async def attempts_without_log(session: AsyncSession, *, ended_before: datetime) -> list[Attempt]:
    """Attempts that ended before `ended_before` and whose driver's log is not stored yet."""
    query = select(Attempt).where(
        Attempt.log.is_(None), Attempt.submitted_at.is_not(None), Attempt.finished_at < ended_before
    )
    return list((await session.execute(query)).scalars())


async def attempts_with_metrics(session: AsyncSession, *, ended_after: datetime) -> list[tuple[Attempt, Job]]:
    """Attempts with a metrics endpoint that run, or ended after `ended_after`, each with its job (no specification)."""
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
