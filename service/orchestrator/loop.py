"""The orchestrator's loop: read the queue, decide, apply; one control plane at a time, by a fenced lease.

Fetch, decide, apply: Ray is called with no database session open. All state is in the store, so that a restart, or
another control plane, goes on from it. Work of a round is in attempts/, ray/driver_logs.py, RetentionSweeper and
KeeperRemoval, which write through `fenced`: writes of a control plane that was replaced are refused. The lease is taken
anew only when all work of the earlier term has ended; a loop that is stuck stops renewing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Set
from datetime import timedelta
from typing import Any

from service.observability.instruments import ROUND_SECONDS
from service.orchestrator.attempts.admit import Admission
from service.orchestrator.attempts.autoscaling import Autoscaling
from service.orchestrator.attempts.checks import JobChecks
from service.orchestrator.attempts.liveness import Heartbeat
from service.orchestrator.attempts.submit import Submitter
from service.orchestrator.attempts.watch import AttemptWatcher
from service.orchestrator.ray.clusters import Clusters, NamedCluster
from service.orchestrator.ray.driver_logs import LogKeeper
from service.orchestrator.ray.jobs_api import ClusterError
from service.orchestrator.tasks.artifacts import RemovalFailedError, RemovalTask
from service.orchestrator.tasks.check import CheckAnswer, CheckRequest
from service.orchestrator.tasks.runner import (
    NoTaskResultError,
    TaskRunner,
    TaskTimeoutError,
    run_ray_task,
    task_submission,
)
from service.settings.settings import FOR_EVER, Settings
from service.store.attempts import active_attempts
from service.store.database import DATABASE_UNAVAILABLE, Database, Sessions, utc_now
from service.store.files import RetentionPolicy, apply_retention
from service.store.jobs import jobs_that_ended, waiting_jobs
from service.store.leases import FencedDatabase, Lease, LeaseLostError, unique_process_name
from service.store.node_states import node_marks
from worker.contract.tasks import (
    RELEASE_REQUEST_VARIABLE,
    ReleaseRequest,
    ReleaseResult,
    read_release_result,
)

logger = logging.getLogger(__name__)
TICK_S = 0.5
"""Time between two rounds where nothing wakes the orchestrator; what matters wakes it."""
LEASE_S = 10.0
"""An orchestrator that has not renewed its lease for this time is replaced: longer than a pause of the database,
and short for those who wait for a start."""
_STOP_LIMIT_S = 2.0
_RENEWALS_A_LEASE = 4
_SWEEP_INTERVAL_S = 3600.0
_STUCK_AFTER_S = 120.0
"""A loop without a finished round for this time stops renewing its lease: another control plane may take it."""
RELEASE_SETTLE_S = 5.0
"""Behind the end of a job: its driver may be ending them, and Ray tells of it in some seconds."""
RELEASE_PAUSE_S = 10.0
"""Between two releases on one cluster."""
_RELEASE_LIMIT_S = 120.0
_REST_FACTOR = 3.0
"""Rest after a round, as a multiple of its length; a tick at most."""


class Orchestrator:
    """Runs jobs of `database` on `clusters`; `wake()` makes the next round begin at once. Jobs are checked by `checker`
    before their first attempt; where there is none, their drivers check them."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        clusters: Clusters,
        checker: TaskRunner[CheckRequest, CheckAnswer] | None = None,
    ) -> None:
        self._settings, self._database = settings, database
        name = unique_process_name()
        self.lease = Lease(database, lease_s=LEASE_S, holder=name)
        self.fenced = FencedDatabase(database, self.lease)
        self.heartbeat = Heartbeat(database, tick_s=TICK_S, name=name)
        self._wake = asyncio.Event()
        self._stopping, self._urgent = False, asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._heartbeat_tasks: set[asyncio.Task[None]] = set()
        self.logs = LogKeeper(self.fenced, clusters)
        self.submitter = Submitter(settings, self.fenced, clusters)
        self.attempts = AttemptWatcher(
            settings,
            self.fenced,
            clusters,
            submitter=self.submitter,
            logs=self.logs,
            liveness=self.heartbeat.liveness,
            ended=self.wake,
        )
        self.autoscaling = Autoscaling(self.fenced, clusters)
        self._admission = Admission(
            settings, self.fenced, clusters, autoscaling=self.autoscaling, changed=self.wake
        )
        self._checks = (
            None
            if checker is None
            else JobChecks(settings, self.fenced, clusters, checker, changed=self.wake)
        )
        self._retention = RetentionSweeper(settings, self.fenced, clusters)
        self._keepers = KeeperRemoval(self.fenced, clusters)
        clusters.on_change(self.wake)
        if checker is not None:
            checker.on_end(self.wake_at_once)

    def wake(self) -> None:
        self._wake.set()

    def wake_at_once(self) -> None:
        """End a rest, too: for what comes seldom and for which somebody waits."""
        self._urgent.set()
        self.wake()

    def stop(self) -> None:
        """Make `run` return; calls under way get a moment."""
        self._stopping = True
        self.wake_at_once()

    async def run(self) -> None:
        """Work until `stop`; an error of one round is logged and the next round begins."""
        renewing = asyncio.create_task(self._renew_for_ever())
        try:
            while not self._stopping:
                self._wake.clear()
                self._urgent.clear()
                begun_at = time.monotonic()
                try:
                    await self.round()
                    self.heartbeat.round_finished()
                except LeaseLostError:
                    self.heartbeat.round_finished()  # the lease has logged it; the next round only serves
                except DATABASE_UNAVAILABLE as error:
                    self._database.outage.away(error)  # one line an outage, not one a round
                except Exception:
                    logger.exception("a round of the orchestrator failed; the next one tries again")
                await self._rest(_REST_FACTOR * (time.monotonic() - begun_at))
                if self._stopping:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), TICK_S)
            if last := {*self._tasks, *self._heartbeat_tasks}:
                await asyncio.wait(last, timeout=_STOP_LIMIT_S)
        finally:
            last = [renewing, *self._tasks, *self._heartbeat_tasks]
            for task in last:
                task.cancel()
            await asyncio.gather(*last, return_exceptions=True)
            await self.lease.release()

    async def _rest(self, seconds: float) -> None:
        """Leave the process to those who ask, also where every submission wakes us: rounds grow with the line."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._urgent.wait(), min(seconds, TICK_S))

    async def round(self) -> None:
        """Pass once over active attempts and waiting jobs, where this control plane has the lease.

        Slow calls go on in tasks of their own.
        """
        self._beat()
        if await self._holds_lease():
            with ROUND_SECONDS.time():
                await self._round()

    async def _holds_lease(self) -> bool:
        """True while the lease is ours. It is taken only when all tasks of an earlier term have ended."""
        if self.lease.token is not None:
            return await self.lease.acquire()
        if self._tasks or not await self.lease.acquire():
            return False
        # as after a restart: drivers may have reported to the control plane before, which may have been frozen
        self.attempts.retain_only([])
        self.heartbeat.liveness.begin(time.time())
        self.autoscaling.forget()
        return True

    async def _renew_for_ever(self) -> None:
        """Renew the lease beside the rounds, which may be long; not for a loop that is stuck."""
        while True:
            await asyncio.sleep(self.lease.lease_s / _RENEWALS_A_LEASE)
            try:
                if self.heartbeat.lag_s < _STUCK_AFTER_S:
                    await self.lease.renew()
            except LeaseLostError:
                self.wake()
            except DATABASE_UNAVAILABLE as error:
                self._database.outage.away(error)
            except Exception:
                logger.exception("the lease was not renewed; it is tried again")

    async def _round(self) -> None:
        if self._checks is not None:
            await self._checks.apply_answers()
        now = time.time()  # before the reports are read: a report since then is not taken for silence
        async with self.fenced.read() as session:
            active = await active_attempts(session)
            waiting = await waiting_jobs(session)
            marks = await node_marks(session)
            if not self.autoscaling.recalled:
                await self.autoscaling.recall(session)
        self.attempts.retain_only({attempt.id: attempt.cluster for attempt, _ in active})
        for attempt, job in active:
            self._spawn(self.attempts.look_after(attempt, job, now))
        if active and marks:
            await self._admission.empty_draining_nodes(active, marks)
        held: set[str] = set()
        if self._checks is not None and waiting:
            unchecked = self._checks.unchecked(waiting, marks)
            held = self._checks.held(unchecked)
            self._spawn(self._checks.look(unchecked))
            waiting = [job for job in waiting if job.id not in held]
        elastic = any(job.is_elastic for _, job in active)
        if waiting or elastic or not self.autoscaling.is_idle:
            await self._admission.admit(
                waiting, active, marks, grows=not held
            )  # what is held wants accelerators soon
        for request in self.autoscaling.due():
            self._spawn(request)
        for release in self._keepers.due(
            lambda: {job.id for _, job in active} | {job.id for job in waiting} | held
        ):
            self._spawn(release)
        if self.logs.due:
            self._spawn(self.logs.keep_logs())
        if self._retention.due:
            self._spawn(self._retention.sweep())

    def _beat(self) -> None:
        if self.heartbeat.due:
            task = asyncio.create_task(self.heartbeat.beat())  # whoever has the lease
            self._heartbeat_tasks.add(task)
            task.add_done_callback(self._heartbeat_tasks.discard)

    async def settle(self) -> None:
        """Wait for the calls that rounds have begun (tests)."""
        while pending := [*self._tasks, *self._heartbeat_tasks]:
            await asyncio.gather(*pending, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, LeaseLostError):
            self.wake()
        elif isinstance(error, DATABASE_UNAVAILABLE):
            self._database.outage.away(error)
        else:
            logger.error("a task of the orchestrator failed", exc_info=error)


class RetentionSweeper:
    """Removes measurements, logs, packages and files that the settings no longer keep; `due` at the start and hourly.

    What is removed from the store, and how, is in store/files.py; files in storage are deleted by a RemovalTask.
    """

    def __init__(self, settings: Settings, database: Sessions, clusters: Clusters) -> None:
        self._database = database
        self._removal = RemovalTask(database, clusters)
        self._files_days = settings.keep_checkpoints_days
        self._policy = RetentionPolicy(
            timelines_days=settings.keep_timelines_days,
            history_days=settings.keep_history_days,
        )
        self._begun_at: float | None = None

    @property
    def due(self) -> bool:
        return self._begun_at is None or time.monotonic() - self._begun_at >= _SWEEP_INTERVAL_S

    async def sweep(self) -> None:
        self._begun_at = time.monotonic()
        await apply_retention(self._database, self._policy, now=utc_now())
        if self._files_days != FOR_EVER:
            try:
                await self._removal.remove_expired(self._files_days)
            except RemovalFailedError as error:
                logger.warning("checkpoints of jobs of the past could not be deleted: %s", error)


class KeeperRemoval:
    """Ends the keepers that hold copies of jobs which have ended, one release at a time on each cluster.

    The cluster is looked at, and not the ends of jobs: what a control plane missed while it was away it sees when it is
    back. A driver ends the keepers of its job itself where it can, a moment before the job ends: those are not looked for.
    """

    def __init__(self, database: Sessions, clusters: Clusters) -> None:
        self._database, self._clusters = database, clusters
        self._begun_at: dict[str, float] = {}
        self._busy: set[str] = set()

    def due(self, unended: Callable[[], Set[str]]) -> list[Coroutine[Any, Any, None]]:
        """The releases to make now, to be awaited beside the rounds; nothing of the jobs `unended` ends. Those are counted
        only where there are keepers."""
        now, due = time.monotonic(), []
        for cluster in self._clusters:
            if not (jobs := cluster.watcher.jobs_with_keepers):
                continue
            jobs -= unended()
            begun_at = self._begun_at.get(cluster.name)
            paused = begun_at is not None and now - begun_at < RELEASE_PAUSE_S
            if jobs and cluster.name not in self._busy and not paused and cluster.watcher.snapshot.available:
                self._busy.add(cluster.name)
                due.append(self._release(cluster, jobs))
        return due

    async def _release(self, cluster: NamedCluster, jobs: Collection[str]) -> None:
        """End the keepers of those of the jobs that have ended; others may be of another control plane."""
        try:
            async with self._database.read() as session:
                ended = await jobs_that_ended(
                    session, jobs, before=utc_now() - timedelta(seconds=RELEASE_SETTLE_S)
                )
            if ended:
                self._begun_at[cluster.name] = time.monotonic()
                result = await _release_keepers(cluster, ReleaseRequest(tuple(sorted(ended))))
                logger.info("ended %d keepers of copies of %s", len(result.keepers), ", ".join(sorted(ended)))
        except (ClusterError, NoTaskResultError, TaskTimeoutError) as error:
            logger.warning(
                "keepers of copies were not ended on cluster %s, and will be: %s", cluster.name, error
            )
        finally:
            self._busy.discard(cluster.name)


async def _release_keepers(cluster: NamedCluster, request: ReleaseRequest) -> ReleaseResult:
    environment = {RELEASE_REQUEST_VARIABLE: request.to_json(), **cluster.drivers.ray_environment}
    submission = task_submission(cluster, "release", environment)
    return await run_ray_task(cluster.ray, submission, read_release_result, limit_s=_RELEASE_LIMIT_S)
