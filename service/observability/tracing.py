"""Spans of jobs, from the request over submission, plan and attempt to checkpoints, and their OTLP export.

Other packages record; export is configured by OpenTelemetry's own variables, and its packages (slotline[otel]) are
imported only where one names an endpoint. The ids of the spans of a job and an attempt are derived from their ids:
children can name them before they end, and any process that sees them end records them, also after a killed driver.
Recording never waits and never raises: the queue is bounded (OTEL_BSP_MAX_QUEUE_SIZE, 2048 by default) and drops what
is too much, a thread sends, and the flush at the end is limited to FLUSH_LIMIT_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Protocol

from worker.contract.logs import TraceParent

logger = logging.getLogger(__name__)
_SAMPLED = 0x01

Attribute = str | bool | int | float
REQUEST_SPAN: ContextVar[TraceParent | None] = ContextVar("slotline_request_span", default=None)
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
    """True while spans are exported."""
    return _exporter is not None


def record_span(span: Span) -> None:
    """Export a span, unless nobody wants it: none is set, or its trace is not sampled. Never waits, never raises."""
    if _exporter is None or not int(span.context.flags, 16) & _SAMPLED:
        return
    try:
        _exporter.take(span)
    except Exception:
        logger.exception("a span was not exported: %s", span.name)


def record_request_span(name: str, seconds: float, *, error: str | None = None) -> None:
    """Export a span of `seconds`, ending now, below the present request's span; nothing where it has none."""
    if _exporter is not None and (request := REQUEST_SPAN.get()) is not None:
        now = time.time()
        record_span(Span(name, request.child(), now - seconds, now, request.span_id, error=error))


def derived_span(trace: TraceParent, what: str) -> TraceParent:
    """The span of `what` in a trace: always the same one."""
    digest = hashlib.sha256(f"{trace.trace_id} {what}".encode()).hexdigest()
    return TraceParent(trace.trace_id, digest[:16], trace.flags)


def attempt_context(traceparent: str | None, attempt_id: str) -> TraceParent | None:
    """The span of an attempt of the job that was submitted with `traceparent`."""
    trace = TraceParent.read(traceparent)
    return None if trace is None else derived_span(trace, attempt_id)


@contextlib.contextmanager
def export_spans_to(exporter: Exporter | None) -> Iterator[None]:
    """Hand what is recorded within to `exporter`, or to nobody; afterwards to who had it before."""
    global _exporter
    before, _exporter = _exporter, exporter
    try:
        yield
    finally:
        _exporter = before


FLUSH_LIMIT_S = 5.0
_NANOSECONDS_PER_S = 1_000_000_000
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@contextlib.asynccontextmanager
async def export_traces(environment: Mapping[str, str] = os.environ) -> AsyncIterator[None]:
    """Export what is recorded within, where the environment names an endpoint and the packages are there."""
    exporter = _make_exporter(environment)
    try:
        with export_spans_to(exporter):
            yield
    finally:
        if exporter is not None:
            await asyncio.to_thread(exporter.close)


def _make_exporter(environment: Mapping[str, str]) -> Exporter | None:
    endpoint = next((name for name in ENDPOINT_VARIABLES if environment.get(name)), None)
    if endpoint is None or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if "otlp" not in environment.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        return None
    protocol = next(
        (environment[name] for name in _PROTOCOL_VARIABLES if environment.get(name)), "http/protobuf"
    )
    if protocol != "http/protobuf":
        logger.warning(
            "%s is set, but no traces are exported by %s: set %s to http/protobuf and the endpoint to the collector's "
            "port for it (4318)",
            endpoint,
            protocol,
            _PROTOCOL_VARIABLES[1],
        )
        return None
    try:
        return _OtlpExporter()
    except ImportError as error:
        logger.warning(
            "%s is set, but no traces are exported (%s): pip install 'slotline[otel]'", endpoint, error
        )
        return None
    except Exception as error:  # a certificate that is not there, a number that is none
        logger.error("no traces are exported: %s: set OTEL_EXPORTER_OTLP_... right", error)
        return None


class _OtlpExporter:
    """Exports spans to an OpenTelemetry collector over OTLP/HTTP: one queue and one thread; the environment says where to
    and how. Imports OpenTelemetry, which is an extra, when it is made."""

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._exporter = OTLPSpanExporter()
        self._queue = BatchSpanProcessor(self._exporter)
        self._scope = InstrumentationScope("slotline", version("slotline"))
        configured = dict(OTELResourceDetector().detect().attributes)  # goes before our own names
        name = str(configured.get("service.name") or "slotline")
        self._resource, self._driver_resource = (
            Resource.create({"service.version": version("slotline")} | configured | {"service.name": service})
            for service in (name, f"{name}-driver")
        )

    def take(self, span: Span) -> None:
        """Queue a span; it is dropped where the queue is full."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def span_context(span_id: str) -> SpanContext:
            trace_id, flags = int(span.context.trace_id, 16), TraceFlags(int(span.context.flags, 16))
            return SpanContext(trace_id, int(span_id, 16), False, flags)

        self._queue.on_end(
            ReadableSpan(
                span.name,
                context=span_context(span.context.span_id),
                parent=span_context(span.parent_id) if span.parent_id else None,
                resource=self._driver_resource if span.of_driver else self._resource,
                attributes={name: value for name, value in span.attributes.items() if value is not None},
                kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
                status=Status(StatusCode.UNSET if span.error is None else StatusCode.ERROR, span.error),
                start_time=int(span.started_at * _NANOSECONDS_PER_S),
                end_time=int(max(span.started_at, span.ended_at) * _NANOSECONDS_PER_S),
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Send what is queued, for FLUSH_LIMIT_S at most; what has not gone then is lost."""
        shutdown = threading.Thread(target=self._queue.shutdown, name="slotline-last-spans", daemon=True)
        shutdown.start()
        shutdown.join(FLUSH_LIMIT_S)
        if shutdown.is_alive():
            self._exporter.shutdown()  # ends its pauses between two tries; both threads are daemons
