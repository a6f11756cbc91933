"""An OTLP/HTTP endpoint: takes what OpenTelemetry's own exporter sends, as its own protobuf messages read it."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """One span as it came."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    service: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = field(hash=False)
    error: str | None


class Receiver:
    """`spans` that came so far; `posts` requests."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.posts = 0
        self.came = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.headers["Content-Type"] == "application/x-protobuf" and self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                with receiver.came:
                    receiver.posts += 1
                    receiver.spans += _spans(body)
                    receiver.came.notify_all()
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def wait(self, done: Callable[[list[Received]], bool], limit_s: float = 60.0) -> list[Received]:
        """The spans once they are as wanted."""
        deadline = time.monotonic() + limit_s
        with self.came:
            while not done(self.spans):
                left = deadline - time.monotonic()
                assert left > 0 and self.came.wait(left), [span.name for span in self.spans]
            return list(self.spans)


@contextlib.contextmanager
def receiver() -> Iterator[Receiver]:
    """One that listens on a port of 127.0.0.1."""
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()


def _spans(body: bytes) -> list[Received]:
    out = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = {one.key: one.value.string_value for one in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                out.append(
                    Received(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        about["service.name"],
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        {
                            one.key: getattr(one.value, str(one.value.WhichOneof("value")))
                            for one in span.attributes
                        },
                        span.status.message if span.status.code == 2 else None,
                    )
                )
    return out
