"""Checks queued jobs before their first attempt, and ends those with problems, before they take accelerators.

A job is held back from admission while its check runs, and for TURN_LIMIT_S while it waits for one: after that it is
admitted unchecked, and its driver checks it, as it does where a check was undecided. Jobs of a cluster that is away, or
has no node with their accelerators, are not checked and not held. Runs are shared with other control planes and begin
again where one dies (tasks/runner.py); what a job was found to be is in its row. Who has the fewest jobs under check
comes first, then priority, then age.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from service.orchestrator.attempts.admit import explain_waits
from service.orchestrator.decisions.attempt_lifecycle import Wait, device_of
from service.orchestrator.planning.pool import PlannerBusyError
from service.orchestrator.ray.clusters import Clusters
from service.orchestrator.tasks.check import CheckAnswer, CheckRequest, CheckUndecidedError
from service.orchestrator.tasks.runner import TaskRunner, TaskState
from service.settings.settings import Settings
from service.spec.states import CheckState, JobState, NodeMark
from service.store.database import Sessions, run_to_completion, utc_now
from service.store.jobs import WaitingRow, find_job
from service.store.transitions import add_event, lock_job, move_job
from worker.contract.reasons import Reason

TURN_LIMIT_S = 60.0
"""For this time after its submission a job waits for its turn to be checked, where it could start otherwise."""
PASSED_KEPT_S = 300.0
"""For this time the answer for a job without problems holds for equal ones."""
_LOADS_A_ROUND = 16


class JobChecks:
    """The checks of the jobs that wait, by the control plane that has the lease; calls `changed` after each answer."""

    def __init__(
        self,
        settings: Settings,
        database: Sessions,
        clusters: Clusters,
        runner: TaskRunner[CheckRequest, CheckAnswer],
        *,
        changed: Callable[[], None],
    ) -> None:
        self._settings, self._database, self._clusters = settings, database, clusters
        self._runner, self._changed = runner, changed
        self._under_check: dict[str, _CheckedJob] = {}
        self._passed: dict[str, tuple[float, CheckAnswer]] = {}
        self._looking = False

    def held(self, waiting: Sequence[WaitingRow], marks: Sequence[NodeMark] = ()) -> set[str]:
        """The ids of the jobs that are not to be admitted before their check has answered."""
        now = datetime.now(UTC)
        return {
            job.id
            for job in self._to_be_checked(waiting, marks)
            if job.id in self._under_check or (now - job.queued_at).total_seconds() < TURN_LIMIT_S
        }

    async def look(self, waiting: Sequence[WaitingRow], marks: Sequence[NodeMark] = ()) -> None:
        """Begin checks that have their turn, and apply the answers of those that have ended; one call at a time."""
        if self._looking:
            return
        self._looking = True
        try:
            jobs = self._to_be_checked(waiting, marks)
            here = {job.id for job in jobs}
            self._under_check = {
                job_id: checked for job_id, checked in self._under_check.items() if job_id in here
            }
            await self._explain(jobs)
            await self._begin(jobs)
            await self._apply_answers()
        finally:
            self._looking = False

    def _to_be_checked(self, waiting: Sequence[WaitingRow], marks: Sequence[NodeMark]) -> list[WaitingRow]:
        """Jobs without an answer, on clusters where a node with their accelerators takes work."""
        capacities = self._clusters.capacities({}, marks)

        def offers_accelerators(job: WaitingRow) -> bool:
            capacity = capacities.get(self._settings.cluster_of(job.queue) or "")
            return bool(capacity and capacity.total[device_of(job.device, job.accelerators, capacity)])

        return [job for job in waiting if _is_unchecked(job) and offers_accelerators(job)]

    async def _explain(self, jobs: Sequence[WaitingRow]) -> None:
        """Say that a job is checked first, where nothing says yet why it waits."""
        message = "its factories, arguments and data are checked, without an accelerator"
        fresh = [(job, Wait(job.id, Reason.CHECKING, message)) for job in jobs if job.reason is None]
        await explain_waits(self._database, fresh)

    async def _begin(self, jobs: Sequence[WaitingRow]) -> None:
        """Take up jobs as long as there are runs for them. Equal jobs share one."""
        rest = [job for job in jobs if job.id not in self._under_check]
        for _ in range(_LOADS_A_ROUND):
            runs = {one.key: one.cluster for one in self._under_check.values()}
            running = Counter(runs.values())
            owners = Counter(one.request.owner for one in self._under_check.values())
            free = [
                job
                for job in rest
                if running[self._settings.cluster_of(job.queue) or ""] < self._runner.task.concurrency
            ]
            if not free:
                return
            job = min(free, key=lambda one: (owners[one.owner], -one.priority, one.queued_at, one.id))
            rest.remove(job)
            await self._take_up(job)

    async def _take_up(self, job: WaitingRow) -> None:
        async with self._database.read() as session:  # rounds leave the specification out
            stored = await find_job(session, job.id)
        cluster = self._settings.cluster_of(job.queue)
        if stored is None or cluster is None or not _is_unchecked(stored):
            return  # it was read before an answer was written
        request = CheckRequest(stored.spec, stored.owner, stored.device, stored.accelerators)
        key = f"{cluster} {self._runner.task.key(request, cluster)}"
        until, answer = self._passed.get(key, (0.0, None))
        if answer is not None and time.monotonic() < until:
            await self._apply(job.id, answer)
        else:
            self._under_check[job.id] = _CheckedJob(request, key, cluster)

    async def _apply_answers(self) -> None:
        self._passed = {key: kept for key, kept in self._passed.items() if time.monotonic() < kept[0]}
        for key, job_ids in list(self._jobs_by_key()):
            checked = self._under_check[job_ids[0]]
            answer: CheckAnswer | TaskState | str
            try:
                answer = await self._runner.result(checked.request, cluster=checked.cluster)
            except PlannerBusyError:  # a check of a job that was cancelled goes on
                continue
            except CheckUndecidedError as error:
                answer = str(error)
            if isinstance(answer, TaskState):
                continue
            if isinstance(answer, CheckAnswer) and not answer.check.problems:
                self._passed[key] = time.monotonic() + PASSED_KEPT_S, answer
            for job_id in job_ids:
                await run_to_completion(self._apply(job_id, answer))
                self._under_check.pop(job_id, None)

    def _jobs_by_key(self) -> Iterator[tuple[str, list[str]]]:
        for key in dict.fromkeys(checked.key for checked in self._under_check.values()):
            yield key, [job_id for job_id, checked in self._under_check.items() if checked.key == key]

    async def _apply(self, job_id: str, answer: CheckAnswer | str) -> None:
        """Write the answer, or the reason why there is none, to a job that still waits for its first attempt."""
        at = utc_now()
        async with self._database.write() as session:
            job = await lock_job(session, job_id)
            if job is None or not _is_unchecked(job):
                return
            if job.reason == Reason.CHECKING:
                job.reason = job.message = None
            if isinstance(answer, str):
                job.check_state = CheckState.UNDECIDED
                add_event(
                    session, job, "check", f"not checked before its turn, its driver does it: {answer}", at=at
                )
            else:
                for note in answer.check.notes:
                    add_event(session, job, "check", note, at=at)
                if problems := answer.check.problems:
                    for problem in problems:
                        if problem.details:
                            raised = f"{problem.field}: {problem.details}"
                            add_event(session, job, "check_traceback", raised, at=at)
                    message = "; ".join(map(str, problems))
                    move_job(
                        session,
                        job,
                        JobState.FAILED,
                        at=at,
                        reason=Reason.parse(problems[0].reason),
                        message=message,
                    )
                else:
                    job.check_state = CheckState.PASSED
                    found = "; ".join(answer.check.checked)
                    add_event(session, job, "checked", f"{found} in {answer.seconds:.1f} s", at=at)
        self._changed()


def _is_unchecked(job: WaitingRow) -> bool:
    """True for a job that waits for its first attempt and has no answer yet."""
    return job.job_state is JobState.QUEUED and not job.attempts_made and job.check_state is None


@dataclass(frozen=True)
class _CheckedJob:
    """A job whose check runs: its request, the key under which equal jobs share the run, and its cluster."""

    request: CheckRequest
    key: str
    cluster: str
