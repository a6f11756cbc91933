"""Checks queued jobs before their first attempt, and ends those with problems, before they take accelerators.

A job is held back from admission while its check runs, and for TURN_LIMIT_S while it waits for one: after that it is
admitted unchecked, and its driver checks it, as it does where a check was undecided. Jobs of a cluster that is away, or
has no node with their accelerators, are not checked and not held; jobs that are too large for it are checked, and not
held. Runs are shared with other control planes and begin again where one dies (tasks/runner.py); what a job was found
to be is in its row. Jobs that could start on what is free come first, those that are too large last; among them who
has the fewest jobs under check, then priority, then age.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import NamedTuple

from service.orchestrator.attempts.admit import explain_waits
from service.orchestrator.decisions.attempt_lifecycle import Capacity, Wait, device_of
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
_LARGE_LOADS_A_ROUND = 4
"""Of jobs that are too large: specifications are long, and those who ask for other things wait while they are read."""


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

    def held(self, unchecked: Sequence[UncheckedJob]) -> set[str]:
        """The ids of the jobs that are not to be admitted before their check has answered."""
        now = datetime.now(UTC)
        return {
            job.id
            for job, outlook in unchecked
            if outlook is not Outlook.TOO_LARGE
            and (job.id in self._under_check or (now - job.queued_at).total_seconds() < TURN_LIMIT_S)
        }

    async def look(self, unchecked: Sequence[UncheckedJob]) -> None:
        """Begin checks that have their turn, and apply the answers of those that have ended; one call at a time. What could
        start does not wait for what is too large."""
        async with self._turn() as free:
            if not free:
                return
            here = {job.id for job, _ in unchecked}
            self._under_check = {
                job_id: checked for job_id, checked in self._under_check.items() if job_id in here
            }
            fitting = [job for job in unchecked if job.outlook is not Outlook.TOO_LARGE]
            await self._explain([job for job, _ in fitting])
            for jobs, loads in ((fitting, _LOADS_A_ROUND), (unchecked, _LARGE_LOADS_A_ROUND)):
                await self._begin(jobs, loads)
                await self._apply_answers()

    async def apply_answers(self) -> None:
        """Apply the answers of checks that have ended, so that the round which begins knows them; not while `look` does."""
        async with self._turn() as free:
            if free:
                await self._apply_answers()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[bool]:
        """True for who may look at checks, one at a time."""
        if self._looking:
            yield False
            return
        self._looking = True
        try:
            yield True
        finally:
            self._looking = False

    def unchecked(self, waiting: Sequence[WaitingRow], marks: Sequence[NodeMark] = ()) -> list[UncheckedJob]:
        """Jobs without an answer, on clusters where a node with their accelerators takes work."""
        capacities = self._clusters.capacities({}, marks)
        outlooks = dict[tuple[str, str, int, str | None], Outlook | None]()
        jobs = []
        for job in waiting:
            if not _is_unchecked(job):
                continue
            accelerators = job.fewest_accelerators or job.accelerators
            gang = job.queue, job.device, accelerators, job.accelerator_type
            if gang not in outlooks:
                capacity = capacities.get(self._settings.cluster_of(job.queue) or "")
                outlooks[gang] = None if capacity is None else _outlook(*gang[1:], capacity)
            if (outlook := outlooks[gang]) is not None:
                jobs.append(UncheckedJob(job, outlook))
        return jobs

    async def _explain(self, jobs: Sequence[WaitingRow]) -> None:
        """Say that a job is checked first, where nothing says yet why it waits."""
        message = "its factories, arguments and data are checked, without an accelerator"
        fresh = [(job, Wait(job.id, Reason.CHECKING, message)) for job in jobs if job.reason is None]
        await explain_waits(self._database, fresh)

    async def _begin(self, jobs: Sequence[UncheckedJob], loads: int) -> None:
        """Take up so many jobs as long as there are runs for them. Equal jobs share one."""
        lines = await asyncio.to_thread(self._lines, jobs)  # thousands of jobs take their time
        for _ in range(loads):
            runs = {one.key: one.cluster for one in self._under_check.values()}
            running = Counter(runs.values())
            owners = Counter(one.request.owner for one in self._under_check.values())
            turns = [
                (turn[0], owners[owner], turn, (cluster, owner))
                for (cluster, owner), line in lines.items()
                if line and running[cluster] < self._runner.task.concurrency
                for turn, _ in line[:1]
            ]
            if not turns:
                return
            _, job = heapq.heappop(lines[min(turns)[-1]])
            await self._take_up(job)

    def _lines(
        self, jobs: Sequence[UncheckedJob]
    ) -> Mapping[_ClusterAndOwner, list[tuple[_Turn, WaitingRow]]]:
        """The jobs that are not under check, by cluster and owner: heaps by turn."""
        lines = defaultdict[_ClusterAndOwner, list[tuple[_Turn, WaitingRow]]](list)
        cluster_of = functools.cache(self._settings.cluster_of)
        for job, outlook in jobs:
            if job.id not in self._under_check:
                turn = outlook, -job.priority, job.queued_at, job.id
                lines[cluster_of(job.queue) or "", job.owner].append((turn, job))
        for line in lines.values():
            heapq.heapify(line)
        return lines

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


class Outlook(IntEnum):
    """The soonest start of a job on its cluster, as far as its size tells; in the order of turns."""

    STARTS_NOW = 0
    WAITS = 1
    TOO_LARGE = 2


class UncheckedJob(NamedTuple):
    """A job without an answer, and when it could start."""

    job: WaitingRow
    outlook: Outlook


_ClusterAndOwner = tuple[str, str | None]
_Turn = tuple[Outlook, int, datetime, str]
"""The key by which the jobs of an owner have their turns: outlook, priority (negated), age, id."""


def _outlook(
    wanted: str, accelerators: int, accelerator_type: str | None, capacity: Capacity
) -> Outlook | None:
    """The outlook of a gang where `capacity` counts all that runs as others; None where no node has its accelerators."""
    device = device_of(wanted, accelerators, capacity, accelerator_type=accelerator_type)
    if not capacity.total[device]:
        return None
    types = capacity.by_type
    if accelerator_type is not None:
        types = {accelerator_type: types.get(accelerator_type, Capacity({}))}
    if all(accelerators > part.total.get(device, 0) for part in types.values()):
        return Outlook.TOO_LARGE
    starts_now = any(
        accelerators <= part.total.get(device, 0) - part.others.get(device, 0) for part in types.values()
    )
    return Outlook.STARTS_NOW if starts_now else Outlook.WAITS


def _is_unchecked(job: WaitingRow) -> bool:
    """True for a job that waits for its first attempt and has no answer yet."""
    return job.check_state is None and not job.attempts_made and job.state == JobState.QUEUED


@dataclass(frozen=True)
class _CheckedJob:
    """A job whose check runs: its request, the key under which equal jobs share the run, and its cluster."""

    request: CheckRequest
    key: str
    cluster: str
