"""Task, the definition of a one-shot Ray task, and TaskRunner, which shares its runs among all replicas of a database.

A task is `python -m worker.tasks NAME` in a Ray job of its own; the last marked line of its output is its result. The
process that starts one renews its row; where it dies another starts the task again (store/leases.py). The result is
handed out once. Tasks may be cancelled anywhere but inside `run_to_completion`. A Ray job that is lost with its
control plane ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import ClassVar, Generic, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from service.orchestrator.decisions.attempt_lifecycle import RayState
from service.orchestrator.planning.pool import PlannerBusyError
from service.orchestrator.ray.clusters import Clusters, NamedCluster
from service.orchestrator.ray.jobs_api import Cluster, ClusterError, ClusterUnreachableError, RayJobSubmission
from service.settings.clusters import DEFAULT_CLUSTER
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
from service.store.node_states import node_marks

logger = logging.getLogger(__name__)
TASK_RENEWAL_S = 5.0
TASK_POLL_S = 0.5
"""The longest pause between two looks at a run; first looks come sooner, since a check takes a second."""
_FIRST_POLL_S = 0.1
TASK_LOG_SETTLES_S = 20.0
ENVIRONMENT_LIMIT = 100_000
"""Characters of a request in a variable: Linux takes 128 KiB for one."""

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
OutputT = TypeVar("OutputT")


class TaskState(StrEnum):
    """The state of a task that has no result yet."""

    RUNNING = "running"


class TaskTimeoutError(Exception):
    """The Ray job had not ended, or begun, in time and was stopped; `began`: it had its resources. `said` is Ray's last
    word on it."""

    def __init__(self, began: bool, said: str = "") -> None:
        super().__init__(f"{'ran' if began else 'waited for its turn'} for too long")
        self.began, self.said = began, said


class NoTaskResultError(Exception):
    """The Ray job ended without a result; the message is what Ray or the last line of its output says."""


class Task(ABC, Generic[RequestT, ResultT]):
    """Definition of a one-shot Ray task: which requests share a run, what a run does, and what its failures say."""

    name: ClassVar[str]
    """NAME of `python -m worker.tasks NAME`."""
    concurrency: ClassVar[int]
    """Runs of one control plane at once on one cluster."""
    queue_limit: ClassVar[int] = 0
    """Runs that may wait beyond these."""
    limit_s: ClassVar[float]
    """Limit of one run, the wait for its resources included."""
    start_limit_s: ClassVar[float] = math.inf
    """Limit of the wait for its resources alone."""
    error: ClassVar[type[Exception]]
    """The exception for a run that failed; its message says why and what to do."""

    def __init__(self, database: Sessions) -> None:
        self._database = database

    @abstractmethod
    def key(self, request: RequestT, cluster: str) -> str:
        """Text that is equal for requests that share one run."""

    @abstractmethod
    async def perform(self, request: RequestT, cluster: NamedCluster) -> str | None:
        """Run the task; the text that `read_result` takes, or None where the result is kept elsewhere."""

    def read_result(self, text: str) -> ResultT:
        """The result of which `perform` returned the text, possibly in another process."""
        raise NotImplementedError(f"results of {self.name} are kept elsewhere")

    @abstractmethod
    def busy_message(self, runs: int) -> str:
        """Message that `runs` runs are the limit."""

    @abstractmethod
    def timeout_message(self, began: bool) -> str:
        """Message that a run was ended after `limit_s`, which `began` or waited for its resources all the time."""

    @abstractmethod
    def no_result_message(self, detail: str) -> str:
        """Message that a run ended without a result; `detail` is Ray's message or the last line of its output."""

    async def stored_result(self, request: RequestT, cluster: str) -> ResultT | None:
        """The result where the store has it already: then nothing is run."""
        return None

    def submission(
        self,
        cluster: NamedCluster,
        environment: Mapping[str, str],
        *,
        job_id: str | None = None,
        pip: Sequence[str] = (),
    ) -> RayJobSubmission:
        """One process of the task, which holds no accelerator; `job_id` is the job that it is shown with, `pip` are its
        packages."""
        return task_submission(cluster, self.name, environment, job_id=job_id, pip=pip)

    async def run_in_ray(
        self, cluster: NamedCluster, submission: RayJobSubmission, read: Callable[[str], OutputT | None]
    ) -> OutputT:
        """Run `submission`, on no node that takes no work, and return what `read` finds in its output. Raises `error` for
        every failure."""
        avoided = await run_to_completion(self._avoided(cluster, submission))
        submission = replace(submission, avoid=tuple(dict.fromkeys((*submission.avoid, *avoided))))
        try:
            return await run_ray_task(
                cluster.ray, submission, read, limit_s=self.limit_s, start_limit_s=self.start_limit_s
            )
        except TaskTimeoutError as error:
            said = "" if error.began else f"; Ray says: {error.said}"
            raise self.error(f"{self.timeout_message(error.began)}{said}") from None
        except NoTaskResultError as error:
            raise self.error(self.no_result_message(str(error))) from None
        except self.error:
            raise
        except Exception as error:  # a cluster that is away
            raise self.error(str(error) or type(error).__name__) from error

    async def _avoided(self, cluster: NamedCluster, submission: RayJobSubmission) -> tuple[str, ...]:
        """Ray's ids of the nodes that take no work. Without resources of its own, and nodes that it avoids, a task runs on
        the head, as long as that takes work."""
        async with self._database.read() as session:
            marks = await node_marks(session, cluster.name)
        avoided = cluster.left_out(marks)
        on_head = not any(node.is_head and node.id in avoided for node in cluster.watcher.snapshot.nodes)
        return () if on_head and not submission.resources and not submission.avoid else tuple(avoided)


class TaskRunner(Generic[RequestT, ResultT]):
    """Runs of one task, shared by all control planes of a database; each has its turn among those of its cluster."""

    def __init__(self, database: Sessions, clusters: Clusters, task: Task[RequestT, ResultT]) -> None:
        self.task = task
        self._database, self._clusters = database, clusters
        self._slots = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(task.concurrency))
        self._running_by_cluster = Counter[str]()
        self._holder = unique_process_name()
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._listeners: list[Callable[[], None]] = []

    def on_end(self, listener: Callable[[], None]) -> None:
        """Call `listener` when a run of this process has ended, and its result is there."""
        self._listeners.append(listener)

    async def result(self, request: RequestT, *, cluster: str = DEFAULT_CLUSTER) -> ResultT | TaskState:
        """The result of a run for `request`, once; RUNNING while it goes on, which begins with the first call: ask again.

        A result that is kept elsewhere is RUNNING too: the next call finds it, or begins again. Raises the task's
        error for a run that failed, once, and PlannerBusyError.
        """
        if (stored := await self.task.stored_result(request, cluster)) is not None:
            return stored
        text = f"{cluster} {self.task.key(request, cluster)}"
        key = f"{self.task.name}-{hashlib.sha256(text.encode()).hexdigest()}"
        if key in self._runs or await is_task_running(self._database, key):
            return TaskState.RUNNING
        runs = self._running_by_cluster[cluster]
        full = runs >= self.task.concurrency + self.task.queue_limit
        async with self._database.write() as session:
            outcome = await take_task_outcome(session, key)
            claimed = outcome is None and not full and await claim_task(session, key, self._holder)
        if outcome is not None:
            if outcome.failure is not None:
                raise self.task.error(outcome.failure)
            return self.task.read_result(outcome.answer or "")
        if full:
            raise PlannerBusyError(self.task.busy_message(runs))
        if claimed:
            self._start(key, request, cluster)
        return TaskState.RUNNING

    async def close(self) -> None:
        """End the runs of this process: others may begin them at once."""
        tasks = [*self._runs.values(), *([self._renewing] if self._renewing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, key: str, request: RequestT, cluster: str) -> None:
        self._running_by_cluster[cluster] += 1
        self._runs[key] = asyncio.create_task(self._run(key, request, cluster))
        self._runs[key].add_done_callback(lambda _: self._forget_run(key, cluster))
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_for_ever())

    def _forget_run(self, key: str, cluster: str) -> None:
        del self._runs[key]
        self._running_by_cluster[cluster] -= 1
        for listener in self._listeners:
            listener()

    async def _run(self, key: str, request: RequestT, cluster: str) -> None:
        outcome = None
        try:
            async with self._slots[cluster]:
                text = await self.task.perform(request, self._clusters.of(cluster))
            outcome = None if text is None else TaskOutcome(text)
        except Exception as error:
            outcome = TaskOutcome(failure=str(error) or type(error).__name__)
        finally:
            await run_to_completion(self._finish(key, outcome))

    async def _finish(self, key: str, outcome: TaskOutcome | None) -> None:
        try:
            async with self._database.write() as session:
                await finish_task(session, key, self._holder, outcome)
        except (SQLAlchemyError, OSError) as error:
            logger.warning("the result of task %s is lost, it begins again when asked for: %s", key, error)

    async def _renew_for_ever(self) -> None:
        """Renew the rows of this process's runs; a run that another process has taken meanwhile ends here."""
        while True:
            await asyncio.sleep(TASK_RENEWAL_S)
            if not (keys := list(self._runs)):
                continue
            with contextlib.suppress(SQLAlchemyError, OSError):  # silent as long as the database is away
                renewed = await run_to_completion(self._renew(keys))
                for key in set(keys) - renewed:
                    if (task := self._runs.get(key)) is not None:
                        task.cancel()

    async def _renew(self, keys: list[str]) -> set[str]:
        async with self._database.write() as session:
            return await renew_tasks(session, self._holder, keys)


def task_submission(
    cluster: NamedCluster,
    name: str,
    environment: Mapping[str, str],
    *,
    job_id: str | None = None,
    pip: Sequence[str] = (),
) -> RayJobSubmission:
    """One process of `python -m worker.tasks NAME`; `job_id` and `pip` are as in `Task.submission`."""
    run_id = f"{name}-{secrets.token_hex(8)}"
    return RayJobSubmission(
        id=run_id,
        entrypoint=f"{cluster.drivers.entrypoint('worker.tasks', pip=pip)} {name}",
        interpreter=cluster.drivers.interpreter(pip),
        env=environment,
        metadata={f"slotline_{name}": job_id or run_id},
        pip=tuple(pip),
    )


async def run_ray_task(
    cluster: Cluster,
    submission: RayJobSubmission,
    read: Callable[[str], OutputT | None],
    *,
    limit_s: float,
    start_limit_s: float = math.inf,
) -> OutputT:
    """Start `submission`, wait until it has ended and read its result; it is stopped in any case.

    `read` gives what the output says, None where it is not there yet, and may raise. Raises TaskTimeoutError after
    `limit_s`, or where it has not begun after `start_limit_s`, NoTaskResultError, and ClusterError where it could not be
    started.
    """
    now = time.monotonic()
    try:
        await cluster.submit(submission)
        await _wait_until_ended(cluster, submission.id, now + limit_s, now + start_limit_s)
        return await _read_output(cluster, submission.id, read)
    finally:
        with contextlib.suppress(ClusterError):
            await cluster.stop(submission.id)


async def _wait_until_ended(cluster: Cluster, run_id: str, deadline: float, start_deadline: float) -> None:
    run, pause_s = None, min(_FIRST_POLL_S, TASK_POLL_S)
    while (now := time.monotonic()) < deadline:
        with contextlib.suppress(ClusterUnreachableError):
            run = await cluster.job(run_id)
        if run is not None and run.state in (RayState.SUCCEEDED, RayState.FAILED, RayState.STOPPED):
            return
        if run is not None and run.state is RayState.PENDING and now >= start_deadline:
            break
        await asyncio.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
        pause_s = min(pause_s * 1.1, TASK_POLL_S)
    began = run is None or run.state is not RayState.PENDING
    raise TaskTimeoutError(began, "" if run is None else str(run))


async def _read_output(cluster: Cluster, run_id: str, read: Callable[[str], OutputT | None]) -> OutputT:
    deadline = time.monotonic() + TASK_LOG_SETTLES_S
    log = ""
    while time.monotonic() < deadline:  # the last lines come a little after the end
        with contextlib.suppress(ClusterUnreachableError):
            log = await cluster.log(run_id)
        if (result := read(log)) is not None:
            return result
        await asyncio.sleep(min(_FIRST_POLL_S, TASK_POLL_S))
    job = await cluster.job(run_id)
    last_line = next((line for line in reversed(log.strip().splitlines()) if line.strip()), "no output")
    raise NoTaskResultError(job.message or last_line)
