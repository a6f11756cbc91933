"""The loop: read the queue, decide (decide.py), do it; one control plane runs one loop.

Fetch, decide, apply: Ray is called with no database session open, and a result is applied only to an
attempt that is still the job's current one. All state is in the store, so a restart goes on here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from service.jobs import PACKAGE_PREFIX, AttemptState, JobState, stored
from service.orchestrator import outcome
from service.orchestrator.decide import (
    RESOURCES,
    Capacity,
    End,
    Holder,
    RayJob,
    Start,
    Stop,
    Submit,
    Wait,
    WaitingJob,
    WatchedAttempt,
    WatchLimits,
    admit,
    watch,
)
from service.orchestrator.ray_jobs import (
    Cluster,
    ClusterError,
    ClusterUnreachableError,
    Node,
    Submission,
)
from service.settings import Settings
from service.store import attempts as attempt_store
from service.store.database import Database, utc_now
from service.store.jobs import waiting_jobs
from service.store.leader import Leadership
from service.store.packages import package_content
from service.store.retention import Keep, remove_old
from service.store.states import add_event, explain_wait, lock_job, lock_jobs
from service.store.tables import Attempt, Job
from worker.reasons import Reason

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ASK_EVERY_S = 1.5
_STOP_EVERY_S = 5.0
_STOP_LIMIT_S = 2.0
_LOG_SETTLES_S = 2.0
_LOG_GIVEN_UP_S = 600.0
_TIDY_EVERY_S = 3600.0
_EXPLAINED_AT_ONCE = 200
_NOT_TAKEN = Reason.WAITS_FOR_CLUSTER


@dataclass(frozen=True)
class ClusterView:
    """What was last seen of the cluster; `error` says why `nodes` is empty or old."""

    nodes: tuple[Node, ...] = ()
    seen_at: float | None = None
    error: str | None = "not asked yet"

    @property
    def available(self) -> bool:
        return self.error is None


@dataclass
class _Watched:
    """What this process knows about an attempt beside the store; lost at a restart, harmlessly."""

    ray: RayJob | None = None
    asked_at: float = 0.0
    stopped_at: float = 0.0
    busy: bool = False
    silence_told: bool = False


class Orchestrator:
    """Runs jobs of `database` on `cluster`; `wake()` makes the next round begin at once."""

    def __init__(self, settings: Settings, database: Database, cluster: Cluster, *, local: bool) -> None:
        self.view = ClusterView()
        self._settings, self._database, self._cluster = settings, database, cluster
        self._python = settings.driver_python or (sys.executable if local else "python")
        self._backoff = outcome.Backoff(settings.retry_backoff_s, settings.retry_backoff_limit_s)
        self._limits = WatchLimits(
            silence_limit_s=settings.silence_limit_s,
            start_timeout_s=settings.start_timeout_s,
            cancel_grace_s=settings.cancel_grace_s,
        )
        self._watched: dict[str, _Watched] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._leadership = Leadership(database)
        self._wake = asyncio.Event()
        self._stopping = False
        self._since = time.time()
        self._keeps_logs, self._kept_logs_at = False, -_LOG_SETTLES_S
        self._keep = Keep(
            timelines_days=settings.keep_timelines_days,
            history_days=settings.keep_history_days,
            packages_days=settings.keep_packages_days,
        )
        self._tidied_at: float | None = None

    @property
    def capacity(self) -> Capacity | None:
        """Accelerators by device; None while the cluster does not answer."""
        if not self.view.available:
            return None
        shares = {"cpu": 1, "cuda": self._settings.workers_per_gpu}
        total = {
            device: sum(int(node.resources.get(name, 0) * shares[device]) for node in self.view.nodes)
            for device, name in RESOURCES.items()
        }
        return Capacity(total)

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Let `run` come to its end; calls under way get a moment."""
        self._stopping = True
        self.wake()

    async def run(self) -> None:
        """Work until `stop`; an error of one round is logged and the next round begins."""
        refresher = asyncio.create_task(self._refresh_for_ever())
        try:
            while not self._stopping:
                self._wake.clear()
                try:
                    if await self._leadership.held():
                        await self.round()
                except Exception:
                    logger.exception("a round of the orchestrator failed; the next one tries again")
                if self._stopping:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._settings.tick_s)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_STOP_LIMIT_S)
        finally:
            for task in (refresher, *self._tasks):
                task.cancel()
            await asyncio.gather(refresher, *self._tasks, return_exceptions=True)
            await self._leadership.release()

    async def round(self) -> None:
        """One pass over active attempts and waiting jobs; slow calls go on in tasks of their own."""
        async with self._database.read() as session:
            active = await attempt_store.active_attempts(session)
            waiting = await waiting_jobs(session)
        self._watched = {a.id: self._watched.get(a.id, _Watched()) for a, _ in active}
        for attempt, job in active:
            self._spawn(self._look_after(attempt, job, self._watched[attempt.id]))
        if waiting:
            await self._admit(waiting, active)
        if not self._keeps_logs and time.monotonic() - self._kept_logs_at >= _LOG_SETTLES_S:
            self._keeps_logs = True
            self._spawn(self._keep_logs())
        if self._tidied_at is None or time.monotonic() - self._tidied_at >= _TIDY_EVERY_S:
            self._tidied_at = time.monotonic()
            self._spawn(remove_old(self._database, self._keep, now=utc_now()))

    async def refresh(self) -> None:
        """Look at the cluster's nodes."""
        try:
            nodes = await self._cluster.nodes()
        except ClusterError as error:
            if self.view.error != str(error):
                logger.warning("%s", error)
            self.view = replace(self.view, error=str(error))
            return
        fresh = ClusterView(tuple(nodes), time.time(), None)
        if not self.view.available or fresh.nodes != self.view.nodes:
            self.wake()
        self.view = fresh

    async def log_of(self, attempt: Attempt) -> tuple[int, str]:
        """(number of its first line, text) of a driver's log: kept in the store, or asked of Ray."""
        if attempt.log is not None:
            return attempt.log_first_line, attempt.log
        return 1, "" if attempt.submitted_at is None else await self._cluster.log(attempt.id)

    async def settle(self) -> None:
        """Wait for the calls that rounds have begun (tests)."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _refresh_for_ever(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:
                logger.exception("the cluster's answer was not understood")
            await asyncio.sleep(self._settings.cluster_refresh_s if self.view.available else 0.5)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("a task of the orchestrator failed", exc_info=error)

    # Admission

    async def _admit(self, waiting: list[Job], active: list[tuple[Attempt, Job]]) -> None:
        answers = admit(
            [_waiting_job(job) for job in waiting],
            [Holder(job.id, job.queue, a.accelerators, a.device) for a, job in active],
            capacity=self.capacity,
            quotas=self._settings.queues,
            now=time.time(),
        )
        for answer in answers:
            if isinstance(answer, Start):
                await self._start(answer)
        known = {job.id: job for job in waiting}
        await self._explain([(known[wait.job_id], wait) for wait in answers if isinstance(wait, Wait)])

    async def _explain(self, waits: Sequence[tuple[Job, Wait]]) -> None:
        """Tell jobs why they wait, where that is news: one start or end is news to all that wait for it."""
        news = {job.id: (job, wait) for job, wait in waits if _is_news(job, wait)}
        for ids in _batched(sorted(news), _EXPLAINED_AT_ONCE):
            async with self._database.write() as session:
                for fresh in await lock_jobs(session, ids):
                    job, wait = news[fresh.id]
                    if fresh.job_state == job.job_state:
                        explain_wait(session, fresh, wait.reason, wait.message, at=utc_now())

    async def _start(self, start: Start) -> None:
        async with self._database.write() as session:
            job = await lock_job(session, start.job_id)
            if job is None or job.job_state not in (JobState.QUEUED, JobState.RECOVERING):
                return
            await attempt_store.create_attempt(session, job, device=start.device, at=utc_now())
        self.wake()

    # One attempt

    async def _look_after(self, attempt: Attempt, job: Job, watched: _Watched) -> None:
        """Ask Ray when it is time, decide, act; never twice at once for one attempt."""
        if watched.busy:
            return
        watched.busy = True
        try:
            now = time.time()
            if attempt.submitted_at is not None and now - watched.asked_at >= _ASK_EVERY_S:
                watched.asked_at = now
                watched.ray = await self._ask(attempt.id, watched.ray)
            decision = watch(
                _watched_attempt(attempt, job, watched.ray),
                watching_since=self._since,
                now=time.time(),
                limits=self._limits,
            )
            if isinstance(decision, Submit):
                await self._submit(attempt, job)
            elif isinstance(decision, Stop) and time.time() - watched.stopped_at >= _STOP_EVERY_S:
                watched.stopped_at = time.time()
                logger.info("stopping the driver of attempt %s: %s", attempt.id, decision.why)
                await self._cluster.stop(attempt.id)
            elif isinstance(decision, End):
                await self._end(attempt.id, decision)
            else:
                await self._tell_silence(attempt, watched)
        except ClusterError as error:
            logger.warning("attempt %s: %s", attempt.id, error)
        finally:
            watched.busy = False

    async def _tell_silence(self, attempt: Attempt, watched: _Watched) -> None:
        """One event when a driver falls silent, long before it is given up."""
        last = max(_seconds(attempt.heartbeat_at) or time.time(), self._since)
        silent = time.time() - last >= self._settings.heartbeat_timeout_s
        if silent and not watched.silence_told:
            message = (
                f"no report for {self._settings.heartbeat_timeout_s:g} s; Ray says: {_ray_word(watched.ray)}"
            )
            async with self._database.write() as session:
                if job := await lock_job(session, attempt.job_id):
                    add_event(session, job, "silent", message, at=utc_now(), attempt=attempt.number)
        watched.silence_told = silent

    async def _ask(self, attempt_id: str, before: RayJob | None) -> RayJob | None:
        try:
            ray = await self._cluster.job(attempt_id)
        except ClusterError:
            return None
        if not ray.state.ended:
            return ray
        seen = before.ended_seen_at if before is not None and before.ended_seen_at else time.time()
        return replace(ray, ended_seen_at=seen)

    async def _submit(self, attempt: Attempt, job: Job) -> None:
        """Start the driver. Repeating it after a lost answer is safe: the id is the attempt's."""
        try:
            submission = Submission(
                id=attempt.id,
                entrypoint=f"{shlex.quote(self._python)} -m worker.driver",
                env=self._cluster_of_the_driver()
                | {
                    "SLOTLINE_CONTROL_URL": self._settings.url,
                    "SLOTLINE_ATTEMPT_ID": attempt.id,
                    "SLOTLINE_ATTEMPT_TOKEN": attempt.token,
                    "SLOTLINE_METRICS_LINGER_S": f"{self._settings.metrics_linger_s:g}",
                    "SLOTLINE_WORKERS_PER_GPU": str(self._settings.workers_per_gpu),
                },
                metadata={"slotline_job": job.id, "slotline_attempt": str(attempt.number)},
                working_dir=await self._code(stored(job.spec, "code", "working_dir", "")),
                pip=tuple(stored(job.spec, "code", "pip", [])),
            )
            await self._cluster.submit(submission)
        except ClusterUnreachableError as error:
            await self._explain([(job, Wait(job.id, _NOT_TAKEN, f"not started yet: {error}"))])
            return
        except ClusterError as error:
            await self._end(attempt.id, End(AttemptState.FAILED, Reason.START_REFUSED, str(error)))
            return
        async with self._database.write() as session:
            fresh = await attempt_store.find_attempt(session, attempt.id)
            if fresh is not None and fresh.submitted_at is None:
                fresh.submitted_at = utc_now()
            starting = await lock_job(session, job.id)
            if starting is not None and starting.reason == _NOT_TAKEN:
                starting.reason = starting.message = None

    def _cluster_of_the_driver(self) -> dict[str, str]:
        address = self._settings.driver_ray_address
        return {"SLOTLINE_DRIVER_RAY_ADDRESS": address} if address else {}

    async def _code(self, place: str) -> str | None:
        """What Ray is told to unpack for a job's code.working_dir; None for an empty one."""
        if not place.startswith(PACKAGE_PREFIX):
            return place or None
        digest = place.removeprefix(PACKAGE_PREFIX)
        async with self._database.read() as session:
            content = await package_content(session, digest)
        if content is None:
            raise ClusterError(f"package {digest} is gone from the store: upload it again")
        return await self._cluster.upload_package(f"_ray_pkg_{digest[:32]}.zip", content)

    async def _end(self, attempt_id: str, end: End) -> None:
        message = end.message
        log = await self._last_log(attempt_id)
        if end.state is AttemptState.FAILED and log is not None and (tail := _tail(log[1])):
            message = f"{message}; its log ends: {tail}"
        async with self._database.write() as session:
            attempt = await attempt_store.find_attempt(session, attempt_id)
            assert attempt is not None, attempt_id
            job = await lock_job(session, attempt.job_id)
            await session.refresh(attempt)
            if job is None or job.current_attempt != attempt_id or attempt.attempt_state.final:
                return
            if log is not None:
                attempt.log_first_line, attempt.log = log
            await outcome.end_attempt(
                session,
                job,
                attempt,
                end.state,
                reason=end.reason,
                message=message,
                at=utc_now(),
                backoff=self._backoff,
            )
        self.wake()

    async def _last_log(self, attempt_id: str) -> tuple[int, str] | None:
        try:
            text = await self._cluster.log(attempt_id)
        except ClusterError:
            return None
        return clip_log(text, self._settings.log_limit_bytes)

    async def _keep_logs(self) -> None:
        """Keep the logs of drivers that reported their own end, before Ray forgets them."""
        try:
            before = utc_now() - timedelta(seconds=_LOG_SETTLES_S)
            async with self._database.read() as session:
                ended = await attempt_store.attempts_without_log(session, ended_before=before)
            for attempt in ended:
                if self.view.available:
                    await self._keep_log(attempt)
        finally:
            self._keeps_logs, self._kept_logs_at = False, time.monotonic()

    async def _keep_log(self, attempt: Attempt) -> None:
        """One log; one that Ray does not give out (its node is gone) is given up after a while."""
        log = await self._last_log(attempt.id)
        if log is None and time.time() - (_seconds(attempt.finished_at) or 0.0) < _LOG_GIVEN_UP_S:
            return
        async with self._database.write() as session:
            if fresh := await attempt_store.find_attempt(session, attempt.id):
                fresh.log_first_line, fresh.log = log or (1, "[Ray did not give this log out]\n")


def _batched(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for begin in range(0, len(values), size):
        yield values[begin : begin + size]


def clip_log(text: str, limit: int) -> tuple[int, str]:
    """(number of the first line kept, text): the last `limit` characters, in whole lines."""
    text = text.replace("\x00", "").encode("utf-8", "replace").decode()
    if len(text) <= limit:
        return 1, text
    begin = text.find("\n", len(text) - limit) + 1
    return text.count("\n", 0, begin) + 1, text[begin:]


def _is_news(job: Job, wait: Wait) -> bool:
    if job.job_state is JobState.RECOVERING and wait.reason is Reason.BACKING_OFF:
        return False  # the failure that it recovers from says more
    return (job.reason, job.message) != (wait.reason, wait.message)


def _tail(log: str, lines: int = 5) -> str:
    return " | ".join([line.strip() for line in log.splitlines() if line.strip()][-lines:])[-1000:]


def _ray_word(ray: RayJob | None) -> str:
    return "nothing" if ray is None else str(ray.state)


def _seconds(time_: datetime | None) -> float | None:
    return None if time_ is None else time_.timestamp()


def _waiting_job(job: Job) -> WaitingJob:
    return WaitingJob(
        id=job.id,
        queue=job.queue,
        priority=job.priority,
        queued_at=job.queued_at.timestamp(),
        accelerators=job.accelerators,
        device=job.device,
        not_before=_seconds(job.not_before),
    )


def _watched_attempt(attempt: Attempt, job: Job, ray: RayJob | None) -> WatchedAttempt:
    return WatchedAttempt(
        created_at=attempt.created_at.timestamp(),
        submitted_at=_seconds(attempt.submitted_at),
        heartbeat_at=_seconds(attempt.heartbeat_at),
        cancel_requested_at=_seconds(job.cancel_requested_at),
        ray=ray,
    )
