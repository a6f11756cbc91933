"""When this process could have heard from drivers: it ran, and the database took writes.

A control plane that was frozen, or whose database was away, must not take its own deafness for the silence
of drivers: silence is counted only over the time that it listened.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from sqlalchemy.exc import SQLAlchemyError

from service.store.database import Database, utc_now
from service.store.pulse import record_pulse

RETURN_S = 15.0
"""Drivers ask a control plane that was away again within 10 s: what they have to say is waited for."""
_BEAT_EVERY_S = 1.0
_DEAF_AFTER_S = 5.0
_LATE_S = 15.0
_REMEMBERED = 1000


class Hearing:
    """Which times count as listening: those between two `heard` that are not far apart.

    After a longer gap the next `return_s` do not count either. Times are Unix seconds, as those of reports.
    """

    def __init__(self, since: float, *, gap_s: float = _DEAF_AFTER_S, return_s: float = RETURN_S) -> None:
        self.since, self.heard_at = since, since
        self._gap_s, self._return_s = gap_s, return_s
        self._deaf: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    def begin(self, at: float) -> None:
        """Count from here on only: this process has taken over."""
        self.since = self.heard_at = at
        self._deaf.clear()

    def heard(self, at: float) -> None:
        """A report that came at this time would have been stored."""
        if at - self.heard_at > self._gap_s:
            last_end = self._deaf[-1][1] if self._deaf else self.since
            self._deaf.append((max(self.heard_at, last_end), at + self._return_s))
        self.heard_at = max(at, self.heard_at)

    def listened(self, begin: float, end: float) -> float:
        """Seconds between `begin` and `end` in which this process could have heard."""
        begin = max(begin, self.since)
        if end - self.heard_at > self._gap_s:
            end = self.heard_at  # it may be deaf now
        deaf = sum(max(0.0, min(end, until) - max(begin, from_)) for from_, until in self._deaf)
        return max(0.0, end - begin - deaf)


class Pulse:
    """Writes to the database about once a second, and tells `hearing` when that went well."""

    def __init__(self, database: Database, *, tick_s: float, name: str) -> None:
        self.hearing = Hearing(time.time(), gap_s=max(_DEAF_AFTER_S, 3 * tick_s))
        self.turned_at = time.time()
        self._late_s = max(_LATE_S, 3 * tick_s)
        self._database, self._name, self._tick_s = database, name, tick_s
        self._begun_at, self._busy = 0.0, False

    def turned(self) -> None:
        """The loop has come round."""
        self.turned_at = time.time()

    @property
    def lag_s(self) -> float:
        """Seconds since the loop last came round; about the time of a tick while all is well."""
        return time.time() - self.turned_at

    @property
    def problem(self) -> str | None:
        """What does not go on as it should: the rounds, or the writes."""
        now = time.time()
        if now - self.turned_at > self._late_s:
            return f"the orchestrator has finished no round for {now - self.turned_at:.0f} s"
        if now - self.hearing.heard_at > self._late_s:
            return f"the database has taken no write for {now - self.hearing.heard_at:.0f} s"
        return None

    @property
    def due(self) -> bool:
        return not self._busy and time.time() - self._begun_at >= _BEAT_EVERY_S

    async def beat(self) -> None:
        """One write. What was under way when it began could not have been heard before its end."""
        self._busy, self._begun_at = True, time.time()
        try:
            async with self._database.write() as session:
                await record_pulse(session, self._name, at=utc_now())
        except (SQLAlchemyError, OSError) as error:
            self._database.outage.away(error)
        else:
            self.hearing.heard(time.time())
            self._database.outage.back()
        finally:
            self._busy = False

    async def beat_for_ever(self) -> None:
        """For a process without a loop of its own: an API replica."""
        while True:
            if self.due:
                await self.beat()
            self.turned()
            await asyncio.sleep(self._tick_s)
