"""Lines of a job's driver logs: of one attempt, with a text in them, written since a time, or the last ones.

A stored log is read from the database, a running attempt's from Ray.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from service.jobs.service import Service
from service.schemas.activity import LogLine
from service.store.attempts import log_locations

LinePlace = tuple[int, int]
"""Number of the attempt, number of the line."""


@dataclass(frozen=True)
class LogFilter:
    """Selects lines: of one attempt, with a text in them, written since a time, or the last `tail` ones."""

    attempt: int | None = None
    search: str | None = None
    since: datetime | None = None
    tail: int | None = None


async def log_lines(
    service: Service,
    job_id: str,
    wanted: LogFilter,
    *,
    after: LinePlace,
    limit: int | None = None,
    follow: bool = False,
    read: set[str] | None = None,
) -> list[LogLine]:
    """Lines of the drivers' logs behind `after`, at most `limit`. Raises ClusterError when Ray is needed and away.

    Attempts in `read` (their ids) are passed over; attempts whose stored log was read to its end are added to it.
    """
    async with service.database.read() as session:
        places = await log_locations(session, job_id)
    lines: deque[LogLine] = deque(maxlen=wanted.tail)
    for place in places:
        if (
            place.number < after[0]
            or wanted.attempt not in (None, place.number)
            or place.attempt_id in (read or ())
        ):
            continue
        behind = after[1] if place.number == after[0] else 0
        numbered = await service.logs.lines(place, behind, follow=follow)
        for number, text in _filtered_lines(numbered, wanted, place.created_at):
            lines.append(LogLine(attempt=place.number, number=number, text=text))
            if wanted.tail is None and limit is not None and len(lines) >= limit:
                return list(lines)
        if place.stored and read is not None:
            read.add(place.attempt_id)
    return list(lines)


def _filtered_lines(
    lines: Iterator[tuple[int, str]], wanted: LogFilter, begin: datetime
) -> Iterator[tuple[int, str]]:
    """A line without a time of its own is as old as the one before it."""
    written, search = begin, None if wanted.search is None else wanted.search.casefold()
    for number, text in lines:
        if wanted.since is not None:
            written = written_at(text) or written
            if written < wanted.since:
                continue
        if search is None or search in text.casefold():
            yield number, text


def written_at(line: str) -> datetime | None:
    """The UTC time at the begin of a line of a driver, as worker/contract/logs.py writes it."""
    line = line.removeprefix('{"time": "')
    if not line[:1].isdigit() or line[19:20] != "." or line[23:24] != "Z":
        return None
    try:
        return datetime.fromisoformat(line[:24])
    except ValueError:
        return None
