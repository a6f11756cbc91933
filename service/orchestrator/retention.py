"""Hourly retention sweep: removes measurements, logs, packages and files that the settings no longer keep.

What is removed, and how, is in store/files.py; files in storage are deleted by tasks/artifacts.py.
"""

from __future__ import annotations

import logging
import time

from service.orchestrator.tasks.artifacts import JobRemover, RemovalFailedError
from service.settings.settings import FOR_EVER, Settings
from service.store.database import Sessions, utc_now
from service.store.files import RetentionPolicy, apply_retention

logger = logging.getLogger(__name__)

_SWEEP_INTERVAL_S = 3600.0


class RetentionSweeper:
    """Removes what the settings no longer keep; `due` at the start and once an hour."""

    def __init__(self, settings: Settings, database: Sessions, remover: JobRemover) -> None:
        self._database, self._remover = database, remover
        self._files_days = settings.keep_checkpoints_days
        self._keep = RetentionPolicy(
            timelines_days=settings.keep_timelines_days,
            history_days=settings.keep_history_days,
            packages_days=settings.keep_packages_days,
            plans_days=settings.keep_plans_days,
        )
        self._begun_at: float | None = None

    @property
    def due(self) -> bool:
        return self._begun_at is None or time.monotonic() - self._begun_at >= _SWEEP_INTERVAL_S

    async def sweep(self) -> None:
        self._begun_at = time.monotonic()
        await apply_retention(self._database, self._keep, now=utc_now())
        if self._files_days != FOR_EVER:
            try:
                await self._remover.empty(self._files_days)
            except RemovalFailedError as error:
                logger.warning("checkpoints of jobs of the past could not be deleted: %s", error)
