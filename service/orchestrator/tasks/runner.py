"""TaskRunner: one-shot Ray tasks shared by all processes of a database; one runs each, any fetches its result.

The process that starts a task renews its row; where it dies another starts the task again (store/leases.py). The
result, a line of the task's output, is handed out once. Tasks may be cancelled anywhere but inside
`run_to_completion`. A Ray job that is lost with its control plane ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from service.orchestrator.decisions.decide import RayState
from service.orchestrator.planning.pool import PlannerBusyError
from service.orchestrator.ray.jobs_api import Cluster, ClusterError, ClusterUnreachableError, RayJobSubmission
from service.store.database import Sessions, run_to_completion
from service.store.leases import (
    TaskOutcome,
    claim_task,
    finish_task,
    is_task_running,
    renew_tasks,
    take_task_outcome,
    unique_process_name,
)

logger = logging.getLogger(__name__)
TASK_RENEWAL_S = 5.0

TaskWork = Callable[[], Awaitable[str | None]]


class TaskRunner:
    """Runs of one kind. Of those that this process begins in a place `at_once` go on, `in_line` more wait for their turn.

    What they do may be cut off anywhere, but for what is `uncut`. `busy` tells of a number of runs why no more are taken,
    `failed` makes the error of a run that ended without an answer, of the message of the one that it raised.
    """

    def __init__(
        self,
        database: Sessions,
        kind: str,
        *,
        at_once: int,
        in_line: int = 0,
        busy: Callable[[int], str],
        failed: Callable[[str], Exception],
    ) -> None:
        self._database, self._kind, self._busy, self._failed = database, kind, busy, failed
        self._limit = at_once + in_line
        self._slots = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(at_once))
        self._running_by_place = Counter[str]()
        self._holder = unique_process_name()
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._beating: asyncio.Task[None] | None = None

    async def answer(self, request: str, work: TaskWork, *, place: str) -> str | None:
        """What came of the run for `request`, once; None while it goes on, which begins with the first call: ask again.

        It has its turn among those of its `place`. An answer of None is not told: the next call begins again. Raises
        the error of a run that failed, once, and PlannerBusyError.
        """
        key = f"{self._kind}-{hashlib.sha256(f'{place} {request}'.encode()).hexdigest()}"
        if key in self._runs or await is_task_running(self._database, key):
            return None
        full = self._running_by_place[place] >= self._limit
        async with self._database.write() as session:
            end = await take_task_outcome(session, key)
            mine = end is None and not full
            mine = mine and await claim_task(session, key, self._holder)
        if end is not None:
            if end.failure is not None:
                raise self._failed(end.failure)
            return end.answer
        if full:
            raise PlannerBusyError(self._busy(self._running_by_place[place]))
        if mine:
            self._running_by_place[place] += 1
            self._runs[key] = asyncio.create_task(self._run(key, work, place))
            self._runs[key].add_done_callback(lambda _: self._forget_run(key, place))
            if self._beating is None:
                self._beating = asyncio.create_task(self._beat())
        return None

    async def close(self) -> None:
        """End what goes on here: others may begin it at once."""
        tasks = [*self._runs.values(), *([self._beating] if self._beating else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget_run(self, key: str, place: str) -> None:
        del self._runs[key]
        self._running_by_place[place] -= 1

    async def _run(self, key: str, work: TaskWork, place: str) -> None:
        end = None
        try:
            async with self._slots[place]:
                answer = await work()
            end = None if answer is None else TaskOutcome(answer)
        except Exception as error:
            end = TaskOutcome(failure=str(error) or type(error).__name__)
        finally:
            await run_to_completion(self._ended(key, end))

    async def _ended(self, key: str, end: TaskOutcome | None) -> None:
        try:
            async with self._database.write() as session:
                await finish_task(session, key, self._holder, end)
        except (SQLAlchemyError, OSError) as error:
            logger.warning("what came of a run (%s) is lost, it begins again when asked for: %s", key, error)

    async def _beat(self) -> None:
        """For as long as this process lives; a run that another one has taken meanwhile ends here."""
        while True:
            await asyncio.sleep(TASK_RENEWAL_S)
            if not (keys := list(self._runs)):
                continue
            with contextlib.suppress(SQLAlchemyError, OSError):  # silent as long as the database is away
                kept = await run_to_completion(self._renew(keys))
                for key in set(keys) - kept:
                    if (task := self._runs.get(key)) is not None:
                        task.cancel()

    async def _renew(self, keys: list[str]) -> set[str]:
        async with self._database.write() as session:
            return await renew_tasks(session, self._holder, keys)


TASK_POLL_S = 0.5
TASK_LOG_SETTLES_S = 20.0
ENDED_STATES = (RayState.SUCCEEDED, RayState.FAILED, RayState.STOPPED)

ResultT = TypeVar("Answer")


class TaskTimeoutError(Exception):
    """The run had not ended in time and was stopped; `began`: it had its resources."""

    def __init__(self, began: bool) -> None:
        super().__init__(f"{'ran' if began else 'waited for its turn'} for too long")
        self.began = began


class NoTaskResultError(Exception):
    """The run ended without an answer; the message is what Ray or the last line of its output says."""


async def run_ray_task(
    cluster: Cluster, submission: RayJobSubmission, read: Callable[[str], ResultT | None], *, limit_s: float
) -> ResultT:
    """Start `submission`, wait until it has ended and read its answer; it is stopped in any case.

    `read` gives what the output says, None where it is not there yet, and may raise. Raises RunTooLongError after
    `limit_s`, NoAnswerError, and ClusterError where it could not be started.
    """
    deadline = time.monotonic() + limit_s
    try:
        await cluster.submit(submission)
        await _wait_until_ended(cluster, submission.id, deadline)
        return await _read_task_result(cluster, submission.id, read)
    finally:
        with contextlib.suppress(ClusterError):
            await cluster.stop(submission.id)


async def _wait_until_ended(cluster: Cluster, run_id: str, deadline: float) -> None:
    state = None
    while time.monotonic() < deadline:
        with contextlib.suppress(ClusterUnreachableError):
            state = (await cluster.job(run_id)).state
        if state in ENDED_STATES:
            return
        await asyncio.sleep(min(TASK_POLL_S, max(0.0, deadline - time.monotonic())))
    raise TaskTimeoutError(began=state is not RayState.PENDING)


async def _read_task_result(cluster: Cluster, run_id: str, read: Callable[[str], ResultT | None]) -> ResultT:
    deadline = time.monotonic() + TASK_LOG_SETTLES_S
    log = ""
    while time.monotonic() < deadline:  # the last lines come a little after the end
        with contextlib.suppress(ClusterUnreachableError):
            log = await cluster.log(run_id)
        if (answer := read(log)) is not None:
            return answer
        await asyncio.sleep(TASK_POLL_S)
    job = await cluster.job(run_id)
    last = next((line for line in reversed(log.strip().splitlines()) if line.strip()), "no output")
    raise NoTaskResultError(job.message or last)
