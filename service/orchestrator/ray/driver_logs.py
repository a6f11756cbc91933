"""Driver logs: read from the store or streamed from Ray, windowed to their last lines, and stored after the end.

Of a log only the last LOG_LIMIT_BYTES are held and shown, in whole lines under their numbers. However many clients
follow an attempt, one reader asks Ray for it; it ends when nobody asks. Logs of ended drivers are stored before Ray
forgets them, each cluster by itself. A driver that ran several attempts has one log, of which each attempt has its part.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import NamedTuple, Self

from service.orchestrator.ray.clusters import Clusters
from service.orchestrator.ray.jobs_api import Cluster, ClusterError
from service.spec.values import harmless_text
from service.store.attempts import LogLocation, attempts_without_log, find_attempt, stored_log
from service.store.database import Database, Sessions, utc_now
from service.store.tables import AttemptRow
from worker.contract.logs import attempt_of_line

LOG_LIMIT_BYTES = 1 << 20
"""Shown and stored log of one attempt: its end; Ray keeps all of it on the driver's node."""
_LOG_SETTLES_S = 2.0
_LOG_GIVEN_UP_S = 600.0
_WINDOW_FRESH_S = 0.3
_FOLLOW_UNUSED_S = 30.0
_READER_LIMIT = 64


class DriverLog(NamedTuple):
    """A log from its line number `first_line` (from 1) on; earlier lines were cut off."""

    first_line: int
    text: str


class LogReader:
    """Reads the lines of any attempt's log, whether it runs or is over."""

    def __init__(self, database: Database, clusters: Clusters) -> None:
        self._database, self._clusters = database, clusters
        self._readers: dict[str, _AttemptLogReader] = {}

    async def lines(
        self, location: LogLocation, after: int, *, follow: bool = False
    ) -> Iterator[tuple[int, str]]:
        """Number and text of the lines after number `after`, complete ones only while the attempt goes on.

        From the store where it has them, else from Ray; with `follow` a reader stays for the next call.
        Raises ClusterError when Ray is needed and away.
        """
        if location.stored:
            async with self._database.read() as session:
                first, text = await stored_log(session, location.attempt_id)
            window = LogWindow(len(text.encode()) + 1)
            window.add(text.encode())
            window.first_line = first
            return window.lines(after, ended=True)
        if not location.submitted:
            return iter(())
        window = await self._reader(location).window(follow=follow)
        return window.lines(after, ended=location.ended)

    async def close(self) -> None:
        readers = list(self._readers.values())
        self._readers.clear()
        for reader in readers:
            reader.stop()

    def _reader(self, location: LogLocation) -> _AttemptLogReader:
        """The reader of this attempt; above the limit the least recently used reader is stopped."""
        reader = self._readers.pop(location.attempt_id, None)
        if reader is None:
            reader = _AttemptLogReader(self._clusters.of(location.cluster).ray, location, LOG_LIMIT_BYTES)
        self._readers[location.attempt_id] = reader
        while len(self._readers) > _READER_LIMIT:
            self._readers.pop(next(iter(self._readers))).stop()
        return reader


class _AttemptLogReader:
    """Reads one attempt's log for all callers: once whole and then, while a caller follows, its additions."""

    def __init__(self, cluster: Cluster, location: LogLocation, limit_bytes: int) -> None:
        self._cluster, self._limit_bytes = cluster, limit_bytes
        self._driver = location.driver_of or location.attempt_id
        self._part = LogPart.of(location.attempt_id, location.driver_of)
        self._window = LogWindow(limit_bytes, self._part)
        self._read_at = -_WINDOW_FRESH_S
        self._lock = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._follow_timeout: asyncio.Timeout | None = None

    async def window(self, *, follow: bool) -> LogWindow:
        """The log as it is now. Raises ClusterError."""
        async with self._lock:
            if self._following is not None and not self._following.done():
                if follow and self._follow_timeout is not None and not self._follow_timeout.expired():
                    self._follow_timeout.reschedule(asyncio.get_running_loop().time() + _FOLLOW_UNUSED_S)
                return self._window
            if time.monotonic() - self._read_at >= _WINDOW_FRESH_S:
                window = LogWindow(self._limit_bytes, self._part)
                async for piece in self._cluster.read_log(self._driver):
                    window.add(piece)
                    await asyncio.sleep(0)  # a long log is many pieces: let other coroutines run
                self._window, self._read_at = window, time.monotonic()
            if follow:
                self._following = asyncio.create_task(self._follow())
            return self._window

    def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()

    async def _follow(self) -> None:
        """Append to the window until no caller has asked for a while; the next caller meets an error by itself."""
        known = self._window.read_bytes
        try:
            async with asyncio.timeout(_FOLLOW_UNUSED_S) as self._follow_timeout:
                async for piece in self._cluster.read_log(self._driver, follow=True):
                    new = piece[known:]
                    known = max(0, known - len(piece))
                    if new:
                        self._window.add(new)
                    await asyncio.sleep(0)
        except (TimeoutError, ClusterError):
            pass
        finally:
            self._follow_timeout = None


class LogKeeper:
    """Stores the logs of drivers that have ended, their last LOG_LIMIT_BYTES."""

    def __init__(self, database: Sessions, clusters: Clusters) -> None:
        self._database, self._clusters = database, clusters
        self._busy, self._looked_at = set[str](), -_LOG_SETTLES_S

    @property
    def due(self) -> bool:
        """True when it is time for `keep_logs` again."""
        return time.monotonic() - self._looked_at >= _LOG_SETTLES_S

    async def keep_logs(self) -> None:
        """Store the logs of drivers that reported their own end, before Ray forgets them.

        Each cluster has a task of its own: one that hangs delays no other.
        """
        self._looked_at = time.monotonic()
        before = utc_now() - timedelta(seconds=_LOG_SETTLES_S)
        async with self._database.read() as session:
            ended = await attempts_without_log(session, ended_before=before)
        self._looked_at = time.monotonic()
        by_cluster = defaultdict[str, list[AttemptRow]](list)
        for attempt in ended:
            by_cluster[attempt.cluster].append(attempt)
        free = [name for name in by_cluster if name not in self._busy]
        keeping = [self._keep_logs_of(name, by_cluster[name]) for name in free]
        for result in await asyncio.gather(*keeping, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _keep_logs_of(self, cluster: str, attempts: Sequence[AttemptRow]) -> None:
        """Store the logs of one cluster, one after the other."""
        known = self._clusters.of(cluster)
        self._busy.add(cluster)
        try:
            for attempt in attempts:
                if known.watcher.snapshot.available or cluster not in self._clusters.names:
                    await self._keep_log(attempt)
        finally:
            self._busy.discard(cluster)

    async def last_log(self, attempt: AttemptRow) -> DriverLog | None:
        """The last LOG_LIMIT_BYTES of an attempt's log in Ray now; None where Ray does not give it out."""
        window = LogWindow(LOG_LIMIT_BYTES, LogPart.of(attempt.id, attempt.driver_of))
        try:
            async for piece in self._clusters.of(attempt.cluster).ray.read_log(attempt.driver_id):
                window.add(piece)
                await asyncio.sleep(0)
        except ClusterError:
            return None
        return DriverLog(window.first_line, window.text())

    async def _keep_log(self, attempt: AttemptRow) -> None:
        """Store one log. A log that Ray does not give out (its node is gone) is given up after _LOG_GIVEN_UP_S."""
        log = await self.last_log(attempt)
        ended_at = 0.0 if attempt.finished_at is None else attempt.finished_at.timestamp()
        if log is None and time.time() - ended_at < _LOG_GIVEN_UP_S:
            return
        async with self._database.write() as session:
            if fresh := await find_attempt(session, attempt.id):
                fresh.log_first_line, fresh.log = log or (1, "[Ray did not give this log out]\n")


class LogPart(NamedTuple):
    """The part of a driver's log that is an attempt's; `begins`: it begins with the log, and not with a line of its own."""

    attempt_id: str
    begins: bool

    @classmethod
    def of(cls, attempt_id: str, driver_of: str | None) -> Self:
        return cls(attempt_id, driver_of is None)


class LogWindow:
    """The last `limit_bytes` of a log, or of an attempt's `part` of it, in whole lines; earlier lines are dropped."""

    def __init__(self, limit_bytes: int, part: LogPart | None = None) -> None:
        self.read_bytes = 0
        self.first_line = 1
        self._limit_bytes = limit_bytes
        self._part, self._inside = part, part is None or part.begins
        self._lines: deque[bytes] = deque()
        self._held_bytes = 0
        self._partial_line = b""

    @property
    def next_line(self) -> int:
        """Number of the line that is not complete yet."""
        return self.first_line + len(self._lines)

    def add(self, piece: bytes) -> None:
        """Append the next piece of the log."""
        self.read_bytes += len(piece)
        *whole, rest = (
            (self._partial_line + piece).split(b"\n") if b"\n" in piece else (self._partial_line + piece,)
        )
        self._partial_line = rest[-self._limit_bytes :]
        if self._part is not None:
            whole = [line for line in whole if self._is_inside(line)]
        self._lines.extend(whole)
        self._held_bytes += sum(map(len, whole)) + len(whole)
        while self._held_bytes > self._limit_bytes and self._lines:
            self._held_bytes -= len(self._lines.popleft()) + 1
            self.first_line += 1

    def lines(self, after: int, *, ended: bool) -> Iterator[tuple[int, str]]:
        """Number and text of the lines after number `after`; the last one only when complete or `ended`."""
        skip = max(after + 1 - self.first_line, 0)
        for number, line in enumerate(islice(self._lines, skip, None), self.first_line + skip):
            yield number, _decode_line(line)
        if ended and self._inside and self._partial_line and after < self.next_line:
            yield self.next_line, _decode_line(self._partial_line)

    def text(self) -> str:
        """The text of the window, from line `first_line` on."""
        partial = _decode_line(self._partial_line) if self._inside else ""
        return "".join(f"{_decode_line(line)}\n" for line in self._lines) + partial

    def _is_inside(self, line: bytes) -> bool:
        if (begun := attempt_of_line(line)) is not None:
            self._inside = begun == self._part.attempt_id
        return self._inside


def _decode_line(line: bytes) -> str:
    """The line as a terminal shows it in the end: of a progress bar, which begins anew behind each \\r, the last state."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    return harmless_text(shown.replace(b"\x00", b"").decode("utf-8", "replace"))
