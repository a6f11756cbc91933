"""Spans of what happens to jobs: from the request over submission, plan and attempt to checkpoints and profiled steps.

Other rooms record; where to is decided in trace_export.py. The ids of a job's and of an attempt's span are derived from
theirs: their children can name them before they are over, and whoever sees them end tells them, also when the driver
was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from worker.logs import TraceParent

logger = logging.getLogger(__name__)
_SAMPLED = 0x01

Attribute = str | bool | int | float
REQUEST: ContextVar[TraceParent | None] = ContextVar("slotline_request_span", default=None)
"""The span of the request that is being answered, where it has one."""


@dataclass(frozen=True)
class Span:
    """Something that is over; its times are Unix seconds."""

    name: str
    context: TraceParent
    started_at: float
    ended_at: float
    parent_id: str | None = None
    attributes: Mapping[str, Attribute | None] = field(default_factory=dict)
    error: str | None = None
    server: bool = False
    of_driver: bool = False


class Exporter(Protocol):
    """Takes spans without waiting, from any thread."""

    def take(self, span: Span) -> None: ...
    def close(self) -> None: ...


_exporter: Exporter | None = None


def exporting() -> bool:
    """Whether spans go anywhere."""
    return _exporter is not None


def record(span: Span) -> None:
    """Export a span, unless nobody wants it: none is set, or its trace is not sampled. Never waits, never raises."""
    if _exporter is None or not int(span.context.flags, 16) & _SAMPLED:
        return
    try:
        _exporter.take(span)
    except Exception:
        logger.exception("a span was not exported: %s", span.name)


def record_within(name: str, seconds: float, *, error: str | None = None) -> None:
    """What took so long, until now, to answer the present request; nothing where that has no span."""
    if _exporter is not None and (request := REQUEST.get()) is not None:
        now = time.time()
        record(Span(name, request.child(), now - seconds, now, request.span_id, error=error))


def derived(trace: TraceParent, what: str) -> TraceParent:
    """The span of `what` in a trace: always the same one."""
    digest = hashlib.sha256(f"{trace.trace_id} {what}".encode()).hexdigest()
    return TraceParent(trace.trace_id, digest[:16], trace.flags)


def attempt_context(traceparent: str | None, attempt_id: str) -> TraceParent | None:
    """The span of an attempt of the job that was submitted with `traceparent`."""
    trace = TraceParent.read(traceparent)
    return None if trace is None else derived(trace, attempt_id)


@contextlib.contextmanager
def exported_to(exporter: Exporter | None) -> Iterator[None]:
    """Hand what is recorded within to `exporter`, or to nobody; afterwards to who had it before."""
    global _exporter
    before, _exporter = _exporter, exporter
    try:
        yield
    finally:
        _exporter = before
