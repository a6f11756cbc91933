"""Numbers for the control plane's metrics: few queries, each over an index."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select

from service.job_states import WAITING_STATES, AttemptState, JobState
from service.store.database import Database
from service.store.tables import Attempt, Job
from worker.reasons import Cause, cause_of


@dataclass(frozen=True)
class Counts:
    """Jobs by state (every state, also with 0), waiting jobs by queue, ended attempts by cause.

    Causes are succeeded, cancelled, and the three causes of failure (infrastructure, user, preemption).
    """

    jobs_by_state: dict[str, int]
    queue_depth: dict[str, int]
    attempts_by_cause: dict[str, int]


async def count(database: Database, queues: tuple[str, ...] = ()) -> Counts:
    """All counts from one read session; each of `queues` appears, also with 0."""
    jobs = {str(state): 0 for state in JobState}
    depth = dict.fromkeys(queues, 0)
    causes = dict.fromkeys(("succeeded", "cancelled", *map(str, Cause)), 0)
    async with database.read() as session:
        by_state = select(Job.state, func.count()).group_by(Job.state)
        jobs.update({state: number for state, number in (await session.execute(by_state)).all()})
        waiting = select(Job.queue, func.count()).where(Job.state.in_(WAITING_STATES)).group_by(Job.queue)
        depth.update({queue: number for queue, number in (await session.execute(waiting)).all()})
        ended = select(Attempt.state, Attempt.reason, func.count()).group_by(Attempt.state, Attempt.reason)
        for state, reason, number in (await session.execute(ended)).all():
            if AttemptState(state).final:
                cause = str(cause_of(reason)) if state == AttemptState.FAILED else state.lower()
                causes[cause] += number
    return Counts(jobs_by_state=jobs, queue_depth=depth, attempts_by_cause=causes)
