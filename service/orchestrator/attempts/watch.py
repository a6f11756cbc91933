"""Watches attempts that are not final: polls Ray, submits, stops and ends them as `decide.decide_attempt` says.

One call an attempt and round, never two at once for one attempt. A result is applied only to an attempt that is
still the job's current one and that was not heard of since the decision; that and why a driver is stopped is written
before Ray is asked. Silence counts only where this process listened (liveness). What is known beside the store is
lost at a restart, harmlessly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from service.observability.instruments import Outage
from service.orchestrator.attempts.liveness import LivenessWindow
from service.orchestrator.attempts.outcome import (
    Backoff,
    attempt_deadline,
    end_attempt,
    request_graceful_stop,
)
from service.orchestrator.attempts.submit import Submitter
from service.orchestrator.decisions.attempt_lifecycle import (
    DoNothing,
    EndAttempt,
    RayJob,
    RequestGracefulStop,
    StopDriver,
    Submit,
    WatchedAttempt,
    WatchLimits,
    decide_attempt,
)
from service.orchestrator.ray.clusters import Clusters
from service.orchestrator.ray.driver_logs import LogKeeper
from service.orchestrator.ray.jobs_api import Cluster, ClusterError
from service.settings.clusters import DEFAULT_CLUSTER
from service.settings.settings import Settings
from service.spec.states import AttemptState
from service.store.attempts import lock_attempt
from service.store.database import Sessions, utc_now
from service.store.tables import AttemptRow, JobRow
from service.store.transitions import add_event, lock_job
from worker.contract.logs import log_fields
from worker.contract.reasons import Reason

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 30.0
"""An event names a driver that has not reported for this time."""
START_NOTICE_S = 60.0
"""An event names a driver that has not reported at all for this time, with what Ray says of it."""
_ASK_EVERY_S = 1.5
_STOP_EVERY_S = 5.0
_STOP_DECISION_VALID_S = 5.0
"""A decision to stop a driver holds for this time: later a report of the driver may have come."""


@dataclass
class _WatchState:
    """State of an attempt that only this process has; lost at a restart, harmlessly."""

    ray: RayJob | None = None
    ray_error: str | None = None
    """Why Ray did not answer when it was asked last."""
    asked_at: float = 0.0
    stopped_at: float = 0.0
    stop_asked_at: float | None = None
    """When Ray was first asked to stop the driver."""
    busy: bool = False
    silence_reported: bool = False
    missing_reported: bool = False


class AttemptWatcher:
    """Watches attempts, by one call per attempt and round; calls `ended` after each end."""

    def __init__(
        self,
        settings: Settings,
        database: Sessions,
        clusters: Clusters,
        *,
        submitter: Submitter,
        logs: LogKeeper,
        liveness: LivenessWindow,
        ended: Callable[[], None],
    ) -> None:
        self.limits = WatchLimits(end_grace_s=settings.preemption_grace_s)
        self.liveness = liveness
        self.backoff = Backoff()
        self._database, self._clusters = database, clusters
        self._submitter, self._logs, self._ended = submitter, logs, ended
        self._outages = dict[str, Outage]()
        self._watched: dict[str, _WatchState] = {}
        self._cluster_of: dict[str, str] = {}

    def retain_only(self, cluster_of: Mapping[str, str]) -> None:
        """Forget the state of all but these attempts (by id, with their clusters); where one is gone, its accelerators are
        about to be free."""
        for cluster in {self._cluster_of[attempt_id] for attempt_id in self._cluster_of.keys() - cluster_of}:
            self._clusters.of(cluster).watcher.expect_release()
        self._cluster_of = dict(cluster_of)
        self._watched = {
            attempt_id: self._watched.get(attempt_id, _WatchState()) for attempt_id in cluster_of
        }

    async def look_after(self, attempt: AttemptRow, job: JobRow, read_at: float) -> None:
        """Poll Ray when it is due, decide, act; never twice at once for one attempt.

        `read_at` is a time just before `attempt` was read: reports since then are not in it.
        """
        with log_fields(job=job.id, attempt=attempt.number, step=job.step, trace_id=job.trace_id):
            await self._look_after(attempt, job, read_at)

    async def _look_after(self, attempt: AttemptRow, job: JobRow, read_at: float) -> None:
        watched = self._watched.setdefault(attempt.id, _WatchState())
        if watched.busy:
            return
        cluster, outage = self._clusters.of(attempt.cluster).ray, self._outage(attempt.cluster)
        watched.busy = True
        try:
            now = time.time()
            if attempt.submitted_at is not None and now - watched.asked_at >= _ASK_EVERY_S:
                watched.asked_at = now
                try:
                    watched.ray = await self._ask(cluster, attempt.driver_id, watched.ray, read_at)
                    watched.ray_error = None
                except ClusterError as error:
                    watched.ray, watched.ray_error = None, str(error)
            if attempt.cluster not in self._clusters.names and not watched.missing_reported:
                await self._report_missing(attempt)
                watched.missing_reported = True
            decision = decide_attempt(
                _to_watched_attempt(attempt, job, watched),
                watching_since=read_at - self._silence_s(attempt, read_at),
                now=read_at,
                limits=self.limits,
            )
            if isinstance(decision, Submit):
                if refusal := await self._submitter.submit(attempt, job):
                    await self._end(attempt, refusal)
            elif isinstance(decision, RequestGracefulStop):
                async with self._database.write() as session:
                    await request_graceful_stop(
                        session, attempt.id, decision.reason, decision.message, at=utc_now()
                    )
            elif isinstance(decision, StopDriver) and time.time() - watched.stopped_at >= _STOP_EVERY_S:
                watched.stopped_at = time.time()
                decided_at = time.monotonic()
                recorded = await self._record_stop(attempt, decision.why)
                # a process that was frozen meanwhile decides anew
                if recorded and time.monotonic() - decided_at < _STOP_DECISION_VALID_S:
                    await cluster.stop(attempt.driver_id)
                    watched.stop_asked_at = watched.stop_asked_at or read_at
            elif isinstance(decision, EndAttempt):
                await self._end(attempt, decision)
            else:
                if isinstance(decision, DoNothing):  # a driver that was to be stopped is heard again
                    watched.stop_asked_at = None
                await self._report_silence(attempt, watched, read_at)
            outage.back()
        except ClusterError as error:
            outage.away(f"attempt {attempt.id}: {error}")
        finally:
            watched.busy = False

    def _outage(self, cluster: str) -> Outage:
        named = "the cluster" if cluster == DEFAULT_CLUSTER else f"cluster {cluster}"
        return self._outages.setdefault(cluster, Outage(f"{named}, asked about attempts,", logger))

    def _silence_s(self, attempt: AttemptRow, until: float) -> float:
        """Seconds since the driver's last report, or the attempt's creation, in which a report could have come."""
        last_report_at = attempt.heartbeat_at or attempt.created_at
        return self.liveness.listening_s(last_report_at.timestamp(), until)

    async def _record_stop(self, attempt: AttemptRow, why: str) -> bool:
        """Write why Slotline stops the driver, before it does; False where the driver has reported since, or has ended."""
        async with self._database.write() as session:
            fresh, job = await lock_attempt(session, attempt.id)
            end_requested = job.cancel_requested_at is not None or fresh.end_asked_at is not None
            reported = not end_requested and fresh.heartbeat_at != attempt.heartbeat_at
            if fresh.attempt_state.final or reported:
                return False
            if fresh.stopped_because is None:
                fresh.stopped_because = why
                add_event(
                    session,
                    job,
                    "stopped",
                    f"Slotline stops the driver: {why}",
                    at=utc_now(),
                    attempt=attempt.number,
                )
        logger.info("stopping the driver of attempt %s: %s", attempt.id, why)
        return True

    async def _report_silence(self, attempt: AttemptRow, watched: _WatchState, read_at: float) -> None:
        """Add one event when a driver falls silent, or does not start, long before it is given up."""
        started = attempt.heartbeat_at is not None
        limit_s = HEARTBEAT_TIMEOUT_S if started else START_NOTICE_S
        silent = self._silence_s(attempt, read_at) >= limit_s
        if silent and not watched.silence_reported:
            what = "no report" if started else "the driver has not started"
            message = f"{what} for {limit_s:g} s; {_ray_text(watched)}"
            async with self._database.write() as session:
                if job := await lock_job(session, attempt.job_id):
                    add_event(session, job, "silent", message, at=utc_now(), attempt=attempt.number)
        watched.silence_reported = silent

    async def _report_missing(self, attempt: AttemptRow) -> None:
        """Add one event where the settings do not name the attempt's cluster any more."""
        why = self._clusters.of(attempt.cluster).watcher.snapshot.error
        message = f"{why}; until then its driver is heard, but Ray is not asked about it and cannot stop it"
        async with self._database.write() as session:
            if job := await lock_job(session, attempt.job_id):
                add_event(session, job, "no-cluster", message, at=utc_now(), attempt=attempt.number)

    async def _ask(self, cluster: Cluster, driver_id: str, before: RayJob | None, read_at: float) -> RayJob:
        ray = await cluster.job(driver_id)
        if not ray.state.ended:
            return ray
        seen = before.ended_seen_at if before is not None and before.ended_seen_at else read_at
        return replace(ray, ended_seen_at=seen)

    async def _end(self, seen: AttemptRow, end: EndAttempt) -> None:
        """End an attempt, unless its driver has reported since `seen` was read."""
        message = end.message
        log = await self._logs.last_log(seen)
        async with self._database.write() as session:
            attempt, job = await lock_attempt(session, seen.id)
            if job.current_attempt != seen.id or attempt.attempt_state.final:
                return
            if attempt.heartbeat_at != seen.heartbeat_at:
                return
            if attempt.stopped_because is not None and end.reason is Reason.DRIVER_LOST:
                message = f"Slotline stopped the driver: {attempt.stopped_because}"
            if end.state is AttemptState.FAILED and log is not None and (tail := _log_tail(log.text)):
                message = f"{message}; its log ends: {tail}"
            if log is not None:
                attempt.log_first_line, attempt.log = log
            await end_attempt(
                session,
                job,
                attempt,
                end.state,
                reason=end.reason,
                message=message,
                at=utc_now(),
                backoff=self.backoff,
            )
        self._ended()


def _ray_text(watched: _WatchState) -> str:
    """Says what Ray answered about the driver, or why it did not."""
    if watched.ray is not None:
        return f"Ray says: {watched.ray}"
    return watched.ray_error or "Ray was not asked about it yet"


def _log_tail(log: str, lines: int = 5) -> str:
    return " | ".join([line.strip() for line in log.splitlines() if line.strip()][-lines:])[-1000:]


def _unix_seconds(time_: datetime | None) -> float | None:
    return None if time_ is None else time_.timestamp()


def _to_watched_attempt(attempt: AttemptRow, job: JobRow, watched: _WatchState) -> WatchedAttempt:
    return WatchedAttempt(
        created_at=attempt.created_at.timestamp(),
        submitted_at=_unix_seconds(attempt.submitted_at),
        heartbeat_at=_unix_seconds(attempt.heartbeat_at),
        cancel_requested_at=_unix_seconds(job.cancel_requested_at),
        ray=watched.ray,
        deadline=attempt_deadline(attempt, job),
        end_asked_at=_unix_seconds(attempt.end_asked_at),
        end_asked_for=None if attempt.end_asked_for is None else Reason.parse(attempt.end_asked_for),
        stop_asked_at=watched.stop_asked_at,
    )
