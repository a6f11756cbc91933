"""Drivers' logs: read from the store or asked of Ray, and kept in the store before Ray forgets them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import NamedTuple

from service.orchestrator.cluster_view import ClusterWatcher
from service.orchestrator.ray_jobs import Cluster, ClusterError
from service.store.attempts import attempts_without_log, find_attempt
from service.store.database import Database, utc_now
from service.store.tables import Attempt

_LOG_SETTLES_S = 2.0
_LOG_GIVEN_UP_S = 600.0


class DriverLog(NamedTuple):
    """A log from its line number `first_line` (from 1) on; earlier lines were cut off."""

    first_line: int
    text: str


class LogReader:
    """Reads the log of any attempt, whether it runs or is over."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def read(self, attempt: Attempt) -> DriverLog:
        """What the store keeps, else what Ray has. Raises ClusterError when Ray is needed and away."""
        if attempt.log is not None:
            return DriverLog(attempt.log_first_line, attempt.log)
        return DriverLog(1, "" if attempt.submitted_at is None else await self._cluster.log(attempt.id))


class LogKeeper:
    """Keeps the logs of drivers that have ended, their last `limit_bytes`."""

    def __init__(
        self, database: Database, cluster: Cluster, watcher: ClusterWatcher, *, limit_bytes: int
    ) -> None:
        self._database, self._cluster, self._watcher = database, cluster, watcher
        self._limit_bytes = limit_bytes
        self._busy, self._done_at = False, -_LOG_SETTLES_S

    @property
    def due(self) -> bool:
        """Whether it is time for `keep_logs` again."""
        return not self._busy and time.monotonic() - self._done_at >= _LOG_SETTLES_S

    async def keep_logs(self) -> None:
        """Keep the logs of drivers that reported their own end, before Ray forgets them."""
        self._busy = True
        try:
            before = utc_now() - timedelta(seconds=_LOG_SETTLES_S)
            async with self._database.read() as session:
                ended = await attempts_without_log(session, ended_before=before)
            for attempt in ended:
                if self._watcher.snapshot.available:
                    await self._keep_log(attempt)
        finally:
            self._busy, self._done_at = False, time.monotonic()

    async def last_log(self, attempt_id: str) -> DriverLog | None:
        """The log of a driver as Ray has it now, clipped for the store; None when Ray does not give it out."""
        try:
            text = await self._cluster.log(attempt_id)
        except ClusterError:
            return None
        return clip_log(text, self._limit_bytes)

    async def _keep_log(self, attempt: Attempt) -> None:
        """One log; one that Ray does not give out (its node is gone) is given up after a while."""
        log = await self.last_log(attempt.id)
        ended_at = 0.0 if attempt.finished_at is None else attempt.finished_at.timestamp()
        if log is None and time.time() - ended_at < _LOG_GIVEN_UP_S:
            return
        async with self._database.write() as session:
            if fresh := await find_attempt(session, attempt.id):
                fresh.log_first_line, fresh.log = log or (1, "[Ray did not give this log out]\n")


def clip_log(text: str, limit: int) -> DriverLog:
    """The last `limit` characters, in whole lines."""
    text = text.replace("\x00", "").encode("utf-8", "replace").decode()
    if len(text) <= limit:
        return DriverLog(1, text)
    begin = text.find("\n", len(text) - limit) + 1
    return DriverLog(text.count("\n", 0, begin) + 1, text[begin:])
