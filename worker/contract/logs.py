"""Logging set-up for control plane and drivers: text or JSON lines with job and trace context, secrets blanked.

A JSON line has time (UTC), level, logger, message and, where known, job, attempt, step, trace_id; a traceback
stands under `error`. Time comes first: `slotline logs --since` looks there. Masking covers Python's stdout and
stderr (Ray passes workers' prints through them) and reports; what native code writes itself, and Ray's own log
files on the nodes, stay unmasked. Light: no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self, TextIO

LOG_FORMATS = ("text", "json")
_TEXT_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

_process_fields: dict[str, Any] = {}
_GOES_ON = "slotline: this driver goes on with attempt "


def goes_on_line(attempt_id: str) -> str:
    """The line with which the log of an attempt begins that is run by the driver of an earlier one."""
    return f"{_GOES_ON}{attempt_id}."


def attempt_of_line(line: bytes) -> str | None:
    """The attempt that begins with this line of its driver's log; None for any other line."""
    _, found, behind = line.partition(_GOES_ON.encode())
    return behind.partition(b".")[0].decode("ascii", "replace") if found else None


_task_fields: ContextVar[dict[str, Any] | None] = ContextVar("slotline_log_fields", default=None)


@dataclass(frozen=True)
class TraceParent:
    """A W3C trace context: the trace, and the span that caused this one."""

    trace_id: str
    span_id: str
    flags: str = "01"

    @classmethod
    def read(cls, text: str | None) -> Self | None:
        """Parse a `traceparent` header; None for values that W3C tells receivers to ignore."""
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


def bind_process_fields(**fields: Any) -> None:
    """Add `fields` to every line that this process logs from now on; a driver binds its job and attempt."""
    _process_fields.update(fields)


@contextlib.contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Add `fields` to the lines that this task logs in the body; fields that are None are left out."""
    token = _task_fields.set((_task_fields.get() or {}) | {k: v for k, v in fields.items() if v is not None})
    try:
        yield
    finally:
        _task_fields.reset(token)


def bind_task_fields(**fields: Any) -> None:
    """Add `fields` to the lines of this task and of its child tasks until it ends; None fields are left out."""
    _task_fields.set((_task_fields.get() or {}) | {k: v for k, v in fields.items() if v is not None})


def set_up_logging(
    *, level: str, log_format: str, line_format: str = _TEXT_FORMAT, time_format: str | None = _TIME_FORMAT
) -> None:
    """Log to standard error as text or JSON lines; `line_format` and `time_format` (None: logging's own) shape text.

    Raises ValueError for a `log_format` that is not one of LOG_FORMATS.
    """
    if log_format not in LOG_FORMATS:
        raise ValueError(f"SLOTLINE_LOG_FORMAT is {log_format!r}: use one of {', '.join(LOG_FORMATS)}")
    if time_format is not None:
        logging.Formatter.converter = (
            time.gmtime
        )  # the time ends in Z, and `slotline logs --since` compares it
    logging.basicConfig(level=level, format=line_format, datefmt=time_format)
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON line. The time comes first, where `slotline logs --since` reads it."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime(_TIME_FORMAT, time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{clock}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_process_fields,
            **(_task_fields.get() or {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LogCopy(logging.Handler):
    """Writes lines as JSON, with secrets masked, to `path` too: a container's standard output, say, for log collectors.

    Never waits: a line that is not taken at once is left out there. OSError where `path` cannot be written to.
    """

    def __init__(self, path: str, mask: SecretMask):
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        self._mask = mask
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        line = self._mask.text(self.format(record)) + "\n"
        with contextlib.suppress(OSError):  # full, or nobody reads
            os.write(self._file, line.encode(errors="backslashreplace"))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)
        super().close()


MASKED_TEXT = "***"
_MIN_SECRET_CHARS = 8
"""The control plane refuses shorter secrets; shorter lines of a multi-line secret stay readable."""


class SecretMask:
    """Replaces secret values in texts by MASKED_TEXT; it has no secrets at first."""

    def __init__(self) -> None:
        self._pattern: re.Pattern[str] | None = None

    def hide(self, values: Iterable[str]) -> None:
        """Mask `values` from now on, as a whole and line by line."""
        parts = {part for value in values for part in (value, value.strip(), *value.splitlines())}
        # longest first, since one secret may be a prefix of another
        hidden = sorted((part for part in parts if len(part) >= _MIN_SECRET_CHARS), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, hidden))) if hidden else None

    def text(self, text: str) -> str:
        return text if self._pattern is None else self._pattern.sub(MASKED_TEXT, text)

    def json(self, value: Any) -> Any:
        """The same JSON value with its strings masked, field names included."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.json(entry) for key, entry in value.items()}
        return [self.json(entry) for entry in value] if isinstance(value, list | tuple) else value


class MaskedStream:
    """A text stream that masks what is written to it."""

    def __init__(self, stream: TextIO, mask: SecretMask) -> None:
        self._stream, self._mask = stream, mask

    def write(self, text: str) -> int:
        self._stream.write(self._mask.text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mask_output() -> SecretMask:
    """Install an empty SecretMask on standard output and error of this process, and return it."""
    mask = SecretMask()
    sys.stdout, sys.stderr = MaskedStream(sys.stdout, mask), MaskedStream(sys.stderr, mask)
    return mask
