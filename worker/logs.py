"""Logs of the control plane and of drivers: lines for people, or JSON for machines, with what they are about.

With `json`, every line is an object with time (UTC), level, logger and message, and, where they are known, job,
attempt, step and trace_id; a traceback stands under `error`. Light: both sides use it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

FORMATS = ("text", "json")
_TEXT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"
_CLOCK = "%Y-%m-%dT%H:%M:%S"
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

_of_process: dict[str, Any] = {}
_of_task: ContextVar[dict[str, Any] | None] = ContextVar("slotline_log_fields", default=None)


@dataclass(frozen=True)
class TraceParent:
    """A W3C trace context: which trace something belongs to, and the span that caused it."""

    trace_id: str
    span_id: str
    flags: str = "01"

    @classmethod
    def read(cls, text: str | None) -> Self | None:
        """The context in a `traceparent`; None for what the specification has receivers ignore."""
        found = _TRACEPARENT.fullmatch((text or "").strip())
        if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
            return None
        if set(found[2]) == {"0"} or set(found[3]) == {"0"}:
            return None
        return cls(found[2], found[3], found[4])

    @classmethod
    def new(cls) -> Self:
        """The first span of a trace of its own."""
        return cls(secrets.token_hex(16), secrets.token_hex(8))

    def child(self) -> TraceParent:
        """A span of the same trace, caused by this one."""
        return TraceParent(self.trace_id, secrets.token_hex(8), self.flags)

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


def bind(**fields: Any) -> None:
    """Have every line of this process say these from now on (a driver has one job and one attempt)."""
    _of_process.update(fields)


@contextlib.contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Have the lines of this task, within, say these as well; what is None is left out."""
    token = _of_task.set((_of_task.get() or {}) | {k: v for k, v in fields.items() if v is not None})
    try:
        yield
    finally:
        _of_task.reset(token)


def bind_task(**fields: Any) -> None:
    """Have the lines of this task, and of what it begins, say these until it ends; what is None is left out."""
    _of_task.set((_of_task.get() or {}) | {k: v for k, v in fields.items() if v is not None})


def set_up(*, level: str, form: str, text: str = _TEXT, clock: str | None = _CLOCK) -> None:
    """Begin logging to standard error, as `form` says; `text` and `clock` are the format of lines for people."""
    if form not in FORMATS:
        raise ValueError(f"SLOTLINE_LOG_FORMAT is {form!r}: use one of {', '.join(FORMATS)}")
    if clock is not None:
        logging.Formatter.converter = time.gmtime  # it says Z: `slotline logs --since` compares it
    logging.basicConfig(level=level, format=text, datefmt=clock)
    if form == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())


class JsonFormatter(logging.Formatter):
    """One line a record, whatever is in it. The time stands first: who reads since a time looks there."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime(_CLOCK, time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{clock}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_of_process,
            **(_of_task.get() or {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
