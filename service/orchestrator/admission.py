"""Jobs that wait: those that may start get an attempt, the others an explanation. everywhere.admit_everywhere decides."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from service.job_states import JobState
from service.orchestrator.asked_end import ask_to_end
from service.orchestrator.clusters import Clusters
from service.orchestrator.decide import Preempt, Start, Wait
from service.orchestrator.everywhere import admit_everywhere
from service.orchestrator.snapshot import holder, rules_of, waiting_job
from service.settings import Settings
from service.store.attempts import create_attempt
from service.store.database import Sessions, utc_now
from service.store.queue_quotas import quotas_in_force
from service.store.states import explain_wait, lock_job, lock_jobs
from service.store.tables import Attempt, Job
from worker.reasons import Reason

T = TypeVar("T")
_EXPLAINED_AT_ONCE = 200


class Admission:
    """Makes attempts for what each cluster has, under the rules of the queues; `changed` is called after each."""

    def __init__(
        self, settings: Settings, database: Sessions, clusters: Clusters, *, changed: Callable[[], None]
    ) -> None:
        self._settings, self._database, self._clusters = settings, database, clusters
        self._changed = changed

    async def admit(self, waiting: Sequence[Job], active: Sequence[tuple[Attempt, Job]]) -> None:
        """Start or explain every waiting job, and ask those to end that give way."""
        held = defaultdict[str, list[str]](list)
        for attempt, _ in active:
            held[attempt.cluster].append(attempt.id)
        capacities, now = self._clusters.capacities(held), time.time()
        async with self._database.read() as session:
            quotas = await quotas_in_force(session, self._settings.quotas)
        answers = await asyncio.to_thread(  # thousands of jobs take their time
            admit_everywhere,
            [waiting_job(job, self._settings) for job in waiting],
            [holder(attempt, job, self._settings, now=now) for attempt, job in active],
            capacities=capacities,
            quotas=quotas,
            now=now,
            rules=rules_of(self._settings),
        )
        attempts = {job.id: attempt.id for attempt, job in active}
        cluster_of = {job.id: self._settings.cluster_of(job.queue) for job in waiting}
        for answer in answers:
            if isinstance(answer, Start):
                await self._start(answer, cluster_of[answer.job_id])
            elif isinstance(answer, Preempt):
                await self._preempt(attempts[answer.job_id], answer.message)
        known = {job.id: job for job in waiting}
        waits = [(known[wait.job_id], wait) for wait in answers if isinstance(wait, Wait)]
        await explain_waits(self._database, waits)

    async def _preempt(self, attempt_id: str, message: str) -> None:
        async with self._database.write() as session:
            asked = await ask_to_end(session, attempt_id, Reason.PREEMPTED, message, at=utc_now())
        if asked:
            self._changed()

    async def _start(self, start: Start, cluster: str | None) -> None:
        async with self._database.write() as session:
            job = await lock_job(session, start.job_id)
            if job is None or job.job_state not in (JobState.QUEUED, JobState.RECOVERING):
                return
            if job.device not in ("auto", start.device):
                return  # fixed since it was looked at: the next round knows
            if cluster is None or self._settings.cluster_of(job.queue) != cluster:
                return  # moved to another cluster's queue since then
            await create_attempt(session, job, device=start.device, at=utc_now(), cluster=cluster)
        self._changed()


async def explain_waits(database: Sessions, waits: Sequence[tuple[Job, Wait]]) -> None:
    """Tell jobs why they wait, where that is news: one start or end is news to all that wait for it."""
    news = {job.id: (job, wait) for job, wait in waits if _is_news(job, wait)}
    for ids in _batched(sorted(news), _EXPLAINED_AT_ONCE):
        async with database.write() as session:
            for fresh in await lock_jobs(session, ids):
                job, wait = news[fresh.id]
                if fresh.job_state == job.job_state:
                    explain_wait(session, fresh, wait.reason, wait.message, at=utc_now())


def _is_news(job: Job, wait: Wait) -> bool:
    if job.job_state is JobState.RECOVERING and wait.reason is Reason.BACKING_OFF:
        return False  # the failure that it recovers from says more
    return (job.reason, job.message) != (wait.reason, wait.message)


def _batched(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for begin in range(0, len(values), size):
        yield values[begin : begin + size]
