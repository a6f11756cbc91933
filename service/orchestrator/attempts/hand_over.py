"""Gives the retry of a job that lost a worker to the driver of the attempt before, which has the other workers still.

The next attempt is created in the session that ends the last one: its job does not wait, and its accelerators are never
free in between. Number, token, fencing and budgets of retries are those of any attempt. Ray has the driver, and what it
holds, under the id of that driver's first attempt (AttemptRow.driver_id). Where anything else may have changed, there is
no hand-over, and the job is admitted as after any failure.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from service.spec.states import AttemptState, JobState
from service.store.attempts import (
    create_attempt,
    find_attempt,
    lock_attempt,
    placements_of,
    record_placement,
)
from service.store.tables import AttemptRow, JobRow, PlacedMeshRow
from service.store.transitions import add_event
from worker.contract.reasons import Reason


async def hand_over(
    session: AsyncSession, attempt_id: str, *, cluster: str | None, left_out: Collection[str], at: datetime
) -> AttemptRow | None:
    """The next attempt of the job, for the driver of `attempt_id`, which has just ended: the same one where the driver asks
    again. None where the job is admitted anew, or does not go on.

    `cluster` is that of the job's queue by the settings, `left_out` are Ray's ids of the nodes that take no work.
    """
    attempt, job = await lock_attempt(session, attempt_id)
    if (given := await _given(session, attempt, job)) is not None:
        return given
    placed = await placements_of(session, [attempt.id])
    usable = bool(placed) and not {mesh.node_id for mesh in placed} & {*left_out}
    if not usable or attempt.cluster != cluster or not _is_retried_at_once(attempt, job, at):
        return None
    following = await create_attempt(
        session,
        job,
        device=attempt.device,
        at=at,
        cluster=attempt.cluster,
        accelerators=attempt.accelerators,
        accelerator_type=attempt.accelerator_type,
        driver_of=attempt.driver_id,
    )
    await session.flush()  # before the rows that name it
    columns = ("job_id", "cluster", "mesh", "node_id", "node", "workers")
    own = [
        PlacedMeshRow(attempt_id=following.id, **{name: getattr(mesh, name) for name in columns})
        for mesh in placed
    ]
    await record_placement(session, following.id, own)
    message = f"the driver of attempt {attempt.number} goes on with attempt {following.number}, and keeps its workers"
    add_event(session, job, "handed_over", message, at=at, attempt=following.number)
    return following


async def _given(session: AsyncSession, attempt: AttemptRow, job: JobRow) -> AttemptRow | None:
    """The attempt that this driver was given and has not begun: the answer that said so was lost."""
    current = None if job.current_attempt is None else await find_attempt(session, job.current_attempt)
    if current is None or current.driver_of != attempt.driver_id or current.number != attempt.number + 1:
        return None
    begun = current.heartbeat_at is not None or current.attempt_state is not AttemptState.STARTING
    return None if begun else current


def _is_retried_at_once(attempt: AttemptRow, job: JobRow, at: datetime) -> bool:
    """True where the attempt lost a worker and nothing else was to end it, and its job goes on without a pause and with as
    many accelerators."""
    stops = attempt.end_asked_at is not None or attempt.stopped_because is not None
    waits = job.not_before is None or job.not_before > at
    return (
        job.current_attempt == attempt.id
        and attempt.attempt_state is AttemptState.FAILED
        and attempt.reason == Reason.WORKER_LOST
        and job.job_state is JobState.RECOVERING
        and job.fewest_accelerators is None
        and job.accelerators == attempt.accelerators
        and not stops
        and not waits
    )
