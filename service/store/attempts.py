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
from service.store.tables import WITHOUT_LOG, WITHOUT_SPEC, AttemptRow, JobRow, PlacedMeshRow
from service.store.transitions import lock_job, move_job


async def exchange_token(session: AsyncSession, attempt_id: str, old: str, new: str) -> bool:
    """Put `new` in the place of the token `old`; False where another exchange came between."""
    change = update(AttemptRow).where(AttemptRow.id == attempt_id, AttemptRow.token == old).values(token=new)
    return (await session.execute(change)).rowcount == 1


async def create_attempt(
    session: AsyncSession,
    job: JobRow,
    *,
    device: str,
    at: datetime,
    cluster: str = DEFAULT_CLUSTER,
    accelerators: int | None = None,
    accelerator_type: str | None = None,
    driver_of: str | None = None,
) -> AttemptRow:
    """Create the next attempt of a locked, waiting job, which becomes STARTING, on all its accelerators or so many, of this
    type; for the driver of the attempt `driver_of`, which Ray has already, or for one of its own.

    The first attempt fixes the device and the cluster of the job: later attempts resume from its checkpoints.
    """
    assert job.device in ("auto", device), f"{job.id} is a job on {job.device}, not on {device}"
    assert job.began_on in (None, cluster), f"{job.id} began on {job.began_on}, not on {cluster}"
    job.device, job.cluster = device, cluster
    job.last_accelerators = accelerators = accelerators or job.accelerators
    job.attempts_made += 1
    attempt = AttemptRow(
        id=f"{job.id}-{job.attempts_made}",
        job_id=job.id,
        number=job.attempts_made,
        state=AttemptState.STARTING,
        token=secrets.token_urlsafe(32),
        device=device,
        cluster=cluster,
        accelerators=accelerators,
        accelerator_type=accelerator_type,
        created_at=at,
        driver_of=driver_of,
        submitted_at=None if driver_of is None else at,
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
        message=f"attempt {attempt.number} takes {accelerators} accelerators "
        + f"({device if accelerator_type is None else f'{device}, {accelerator_type}'})"
        + ("" if cluster == DEFAULT_CLUSTER else f" of cluster {cluster}"),
        attempt=attempt.number,
    )
    return attempt


async def find_attempt(session: AsyncSession, attempt_id: str) -> AttemptRow | None:
    return await session.get(AttemptRow, attempt_id)


async def lock_attempt(session: AsyncSession, attempt_id: str) -> tuple[AttemptRow, JobRow]:
    """The attempt, read again under the lock, and its job, which stays locked until the session ends."""
    attempt = await find_attempt(session, attempt_id)
    assert attempt is not None, attempt_id
    job = await lock_job(session, attempt.job_id)
    assert job is not None, attempt.job_id
    await session.refresh(attempt)  # it may have been read before the job was locked
    return attempt, job


async def attempts_of(session: AsyncSession, job_id: str) -> Sequence[AttemptRow]:
    """The job's attempts, first to last, without their logs."""
    query = (
        select(AttemptRow).options(WITHOUT_LOG).where(AttemptRow.job_id == job_id).order_by(AttemptRow.number)
    )
    return (await session.execute(query)).scalars().all()


async def active_attempts(session: AsyncSession) -> list[tuple[AttemptRow, JobRow]]:
    """Attempts that hold accelerators, oldest first, each with its job (without its specification)."""
    query = (
        select(AttemptRow, JobRow)
        .join(JobRow, AttemptRow.job_id == JobRow.id)
        .options(WITHOUT_SPEC)
        .where(AttemptRow.state.in_([AttemptState.STARTING, AttemptState.RUNNING]))
        .order_by(AttemptRow.created_at, AttemptRow.id)
    )
    return [(attempt, job) for attempt, job in (await session.execute(query)).all()]


async def record_placement(session: AsyncSession, attempt_id: str, placed: Sequence[PlacedMeshRow]) -> None:
    """Store where the attempt's meshes are placed, in the stead of an earlier placement."""
    await session.execute(delete(PlacedMeshRow).where(PlacedMeshRow.attempt_id == attempt_id))
    session.add_all(placed)


async def placements_of(session: AsyncSession, attempt_ids: Collection[str]) -> Sequence[PlacedMeshRow]:
    """The nodes of the meshes of these attempts, mesh by mesh."""
    query = select(PlacedMeshRow).where(PlacedMeshRow.attempt_id.in_(attempt_ids))
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
    driver_of: str | None = None
    """The attempt in whose driver's log it stands, where it has no driver of its own."""


async def log_locations(session: AsyncSession, job_id: str) -> list[LogLocation]:
    """The log locations of all attempts of a job, first to last."""
    query = select(
        AttemptRow.id,
        AttemptRow.number,
        AttemptRow.created_at,
        AttemptRow.state,
        AttemptRow.submitted_at,
        AttemptRow.log.is_not(None),
        AttemptRow.cluster,
        AttemptRow.driver_of,
    )
    rows = await session.execute(query.where(AttemptRow.job_id == job_id).order_by(AttemptRow.number))
    return [
        LogLocation(id_, number, created, AttemptState(state).final, submitted is not None, *rest)
        for id_, number, created, state, submitted, *rest in rows
    ]


async def stored_log(session: AsyncSession, attempt_id: str) -> tuple[int, str]:
    """Number of the first stored line of the log, and the text from there on."""
    query = select(AttemptRow.log_first_line, AttemptRow.log).where(AttemptRow.id == attempt_id)
    first, text = (await session.execute(query)).one()
    return first, text or ""


async def attempts_without_log(session: AsyncSession, *, ended_before: datetime) -> list[AttemptRow]:
    """Attempts that ended before `ended_before` and whose driver's log is not stored yet."""
    query = select(AttemptRow).where(
        AttemptRow.log.is_(None), AttemptRow.submitted_at.is_not(None), AttemptRow.finished_at < ended_before
    )
    return list((await session.execute(query)).scalars())


async def attempts_with_metrics(
    session: AsyncSession, *, ended_after: datetime
) -> list[tuple[AttemptRow, JobRow]]:
    """Attempts with a metrics endpoint that run, or ended after `ended_after`, each with its job (no specification)."""
    query = (
        select(AttemptRow, JobRow)
        .join(JobRow, AttemptRow.job_id == JobRow.id)
        .options(WITHOUT_SPEC)
        .where(
            AttemptRow.metrics_endpoint.is_not(None),
            or_(AttemptRow.finished_at.is_(None), AttemptRow.finished_at > ended_after),
        )
        .order_by(AttemptRow.created_at, AttemptRow.id)
    )
    return [(attempt, job) for attempt, job in (await session.execute(query)).all()]
