"""The loop: read the queue, decide (decide.py), do it; one control plane runs one loop.

Fetch, decide, apply: Ray is called with no database session open. All state is in the store, so a
restart goes on here. What a round does is in rooms of its own: admission, watching, logs, tidying.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Coroutine
from typing import Any

from service.instruments import ROUND_SECONDS
from service.orchestrator.admission import Admission
from service.orchestrator.cluster_view import ClusterWatcher
from service.orchestrator.logs import LogKeeper
from service.orchestrator.pulse import Pulse
from service.orchestrator.ray_jobs import Cluster
from service.orchestrator.submission import Submitter
from service.orchestrator.tidying import Tidier
from service.orchestrator.watching import AttemptWatcher
from service.settings import Settings
from service.store.attempts import active_attempts
from service.store.database import AWAY, Database
from service.store.jobs import waiting_jobs
from service.store.leader import Leadership

logger = logging.getLogger(__name__)
_STOP_LIMIT_S = 2.0
_REST = 3.0
"""A round is followed by a rest of so many times its length, of a tick at most."""


class Orchestrator:
    """Runs jobs of `database` on `cluster`; `wake()` makes the next round begin at once.

    `watcher` looks at the same cluster. With `local`, drivers run under this Python.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        cluster: Cluster,
        watcher: ClusterWatcher,
        *,
        local: bool,
    ) -> None:
        self._settings, self._database = settings, database
        self._leadership = Leadership(database)
        self.pulse = Pulse(database, tick_s=settings.tick_s)
        self._wake = asyncio.Event()
        self._stopping, self._stopped = False, asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.logs = LogKeeper(database, cluster, watcher, limit_bytes=settings.log_limit_bytes)
        python = settings.driver_python or (sys.executable if local else "python")
        self.submitter = Submitter(settings, database, cluster, python=python)
        self.attempts = AttemptWatcher(
            settings,
            database,
            cluster,
            submitter=self.submitter,
            logs=self.logs,
            hearing=self.pulse.hearing,
            ended=self.wake,
        )
        self._admission = Admission(settings, database, watcher, changed=self.wake)
        self._tidier = Tidier(settings, database)
        watcher.on_change(self.wake)

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Let `run` come to its end; calls under way get a moment."""
        self._stopping = True
        self._stopped.set()
        self.wake()

    async def run(self) -> None:
        """Work until `stop`; an error of one round is logged and the next round begins."""
        try:
            while not self._stopping:
                self._wake.clear()
                begun_at = time.monotonic()
                try:
                    self._beat()
                    if await self._leadership.held():
                        with ROUND_SECONDS.time():
                            await self.round()
                    self.pulse.turned()
                except AWAY as error:
                    self._database.outage.away(error)  # one line an outage, not one a round
                except Exception:
                    logger.exception("a round of the orchestrator failed; the next one tries again")
                await self._rest(_REST * (time.monotonic() - begun_at))
                if self._stopping:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._settings.tick_s)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_STOP_LIMIT_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._leadership.release()

    async def _rest(self, seconds: float) -> None:
        """Leave the process to those who ask, also where every submission wakes us: rounds grow with the line."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), min(seconds, self._settings.tick_s))

    async def round(self) -> None:
        """One pass over active attempts and waiting jobs; slow calls go on in tasks of their own."""
        self._beat()
        now = time.time()  # before the reports are read: what came since is not taken for silence
        async with self._database.read() as session:
            active = await active_attempts(session)
            waiting = await waiting_jobs(session)
        self.attempts.forget_all_but([attempt.id for attempt, _ in active])
        for attempt, job in active:
            self._spawn(self.attempts.look_after(attempt, job, now))
        if waiting:
            await self._admission.admit(waiting, active)
        if self.logs.due:
            self._spawn(self.logs.keep_logs())
        if self._tidier.due:
            self._spawn(self._tidier.tidy())

    def _beat(self) -> None:
        if self.pulse.due:
            self._spawn(self.pulse.beat())

    async def settle(self) -> None:
        """Wait for the calls that rounds have begun (tests)."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, AWAY):
            self._database.outage.away(error)
        else:
            logger.error("a task of the orchestrator failed", exc_info=error)
