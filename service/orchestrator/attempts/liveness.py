"""LivenessWindow: the time in which this control plane could hear from drivers, fed by its database heartbeat.

A control plane that was frozen, or whose database was away, must not take its own absence for a driver's silence:
silence is counted only between heartbeat writes that are close together, and not in the RECONNECT_S after a gap, in
which drivers that found nobody call again. The heartbeat is written by every process, whoever has the lease; it also
reports a loop that finishes no rounds. Times are Unix seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from sqlalchemy.exc import SQLAlchemyError

from service.store.database import Database, utc_now
from service.store.leases import record_heartbeat

RECONNECT_S = 15.0
"""Drivers call a control plane that was away again within 10 s: their reports are waited for."""
_HEARTBEAT_INTERVAL_S = 1.0
_GAP_AFTER_S = 5.0
_STALLED_AFTER_S = 15.0
_GAPS_REMEMBERED = 1000


class LivenessWindow:
    """The times that count as listening: between two `record_contact` that are at most `gap_s` apart.

    After a longer gap the next `return_s` do not count either. Times are Unix seconds, as the times of reports.
    """

    def __init__(self, since: float, *, gap_s: float = _GAP_AFTER_S, return_s: float = RECONNECT_S) -> None:
        self.since, self.last_contact_at = since, since
        self._gap_s, self._return_s = gap_s, return_s
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_GAPS_REMEMBERED)

    def begin(self, at: float) -> None:
        """Count from `at` on only: this process has taken over."""
        self.since = self.last_contact_at = at
        self._gaps.clear()

    def record_contact(self, at: float) -> None:
        """Note that a report that came at this time would have been stored."""
        if at - self.last_contact_at > self._gap_s:
            last_end = self._gaps[-1][1] if self._gaps else self.since
            self._gaps.append((max(self.last_contact_at, last_end), at + self._return_s))
        self.last_contact_at = max(at, self.last_contact_at)

    def listening_s(self, begin: float, end: float) -> float:
        """Seconds between `begin` and `end` in which a report would have been stored."""
        begin = max(begin, self.since)
        if end - self.last_contact_at > self._gap_s:
            end = self.last_contact_at  # nothing may be stored since
        gaps_s = sum(max(0.0, min(end, until) - max(begin, from_)) for from_, until in self._gaps)
        return max(0.0, end - begin - gaps_s)


class Heartbeat:
    """Writes a row of this process about once a second, and records each success in `liveness`."""

    def __init__(self, database: Database, *, tick_s: float, name: str) -> None:
        self.liveness = LivenessWindow(time.time(), gap_s=max(_GAP_AFTER_S, 3 * tick_s))
        self.round_finished_at = time.time()
        self._late_s = max(_STALLED_AFTER_S, 3 * tick_s)
        self._database, self._name, self._tick_s = database, name, tick_s
        self._begun_at, self._busy = 0.0, False

    def round_finished(self) -> None:
        """Note that the loop has come round."""
        self.round_finished_at = time.time()

    @property
    def lag_s(self) -> float:
        """Seconds since the loop last came round; about the time of a tick while all is well."""
        return time.time() - self.round_finished_at

    @property
    def problem(self) -> str | None:
        """A message about rounds or writes that do not go on; None while all is well."""
        now = time.time()
        if now - self.round_finished_at > self._late_s:
            return f"the orchestrator has finished no round for {now - self.round_finished_at:.0f} s"
        if now - self.liveness.last_contact_at > self._late_s:
            return f"the database has taken no write for {now - self.liveness.last_contact_at:.0f} s"
        return None

    @property
    def due(self) -> bool:
        return not self._busy and time.time() - self._begun_at >= _HEARTBEAT_INTERVAL_S

    async def beat(self) -> None:
        """Write once. The contact is recorded at the end: a report sent meanwhile could not have been stored before."""
        self._busy, self._begun_at = True, time.time()
        try:
            async with self._database.write() as session:
                await record_heartbeat(session, self._name, at=utc_now())
        except (SQLAlchemyError, OSError) as error:
            self._database.outage.away(error)
        else:
            self.liveness.record_contact(time.time())
            self._database.outage.back()
        finally:
            self._busy = False

    async def beat_forever(self) -> None:
        """Write until cancelled, for a process without a loop of its own: an API replica."""
        while True:
            if self.due:
                await self.beat()
            self.round_finished()
            await asyncio.sleep(self._tick_s)
