"""Times in queries: ISO 8601 with a zone, as `format: date-time` says, and nothing else that could be read as one."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BeforeValidator

_DATE_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d([.,]\d{1,9})?)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def _iso(value: object) -> object:
    if isinstance(value, str) and not _DATE_TIME.fullmatch(value):
        raise ValueError(f"{value!r} is no time with a zone: write e.g. 2026-05-17T12:00:00Z")
    return value


def _in_utc(time: datetime) -> datetime:
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{time.isoformat()} is before or after all times: give another") from None


Time = Annotated[AwareDatetime, BeforeValidator(_iso), AfterValidator(_in_utc)]
"""A time in UTC."""
