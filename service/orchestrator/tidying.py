"""When old measurements, logs and packages are removed; what goes is said by store/retention.py."""

from __future__ import annotations

import time

from service.settings import Settings
from service.store.database import Sessions, utc_now
from service.store.retention import Keep, remove_old

_TIDY_EVERY_S = 3600.0


class Tidier:
    """Removes what the settings no longer keep; `due` at the start and once an hour."""

    def __init__(self, settings: Settings, database: Sessions) -> None:
        self._database = database
        self._keep = Keep(
            timelines_days=settings.keep_timelines_days,
            history_days=settings.keep_history_days,
            packages_days=settings.keep_packages_days,
            plans_days=settings.keep_plans_days,
        )
        self._begun_at: float | None = None

    @property
    def due(self) -> bool:
        return self._begun_at is None or time.monotonic() - self._begun_at >= _TIDY_EVERY_S

    async def tidy(self) -> None:
        self._begun_at = time.monotonic()
        await remove_old(self._database, self._keep, now=utc_now())
