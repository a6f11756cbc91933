"""Spans to an OTLP/HTTP endpoint, by OpenTelemetry's own queue and exporter (`pip install slotline[otel]`).

Nobody waits for the endpoint: the queue is bounded (OTEL_BSP_MAX_QUEUE_SIZE, 2048 by default) and drops what is too
much, a thread of its own sends, and the end waits for `LAST_S` at most. All of OpenTelemetry's variables count.
"""

from __future__ import annotations

import threading
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from service.tracing import Span

LAST_S = 5.0
_NANOSECONDS = 1_000_000_000


class OtlpExporter:
    """One queue and one thread; the environment says where to and how."""

    def __init__(self) -> None:
        self._exporter = OTLPSpanExporter()
        self._queue = BatchSpanProcessor(self._exporter)
        self._scope = InstrumentationScope("slotline", version("slotline"))
        given = dict(OTELResourceDetector().detect().attributes)  # what operators say of it goes before
        name = str(given.get("service.name") or "slotline")
        self._resource, self._of_driver = (
            Resource.create({"service.version": version("slotline")} | given | {"service.name": one})
            for one in (name, f"{name}-driver")
        )

    def take(self, span: Span) -> None:
        """Queue a span; it is dropped where the queue is full."""
        context = _context(span.context.trace_id, span.context.span_id, span.context.flags)
        parent = span.parent_id and _context(span.context.trace_id, span.parent_id, span.context.flags)
        self._queue.on_end(
            ReadableSpan(
                span.name,
                context=context,
                parent=parent or None,
                resource=self._of_driver if span.of_driver else self._resource,
                attributes={name: value for name, value in span.attributes.items() if value is not None},
                kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
                status=Status(StatusCode.UNSET if span.error is None else StatusCode.ERROR, span.error),
                start_time=int(span.started_at * _NANOSECONDS),
                end_time=int(max(span.started_at, span.ended_at) * _NANOSECONDS),
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Send what is queued, for `LAST_S` at most; what has not gone then is lost."""
        ending = threading.Thread(target=self._queue.shutdown, name="slotline-last-spans", daemon=True)
        ending.start()
        ending.join(LAST_S)
        if ending.is_alive():
            self._exporter.shutdown()  # ends its pauses between two tries; both threads are daemons


def _context(trace_id: str, span_id: str, flags: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), False, TraceFlags(int(flags, 16)))
