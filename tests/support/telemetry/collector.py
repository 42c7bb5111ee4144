"""A collector of OpenTelemetry: it takes traces by OTLP over HTTP, and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PATH = "/v1/traces"
OK, ERROR = 1, 2  # codes of a span's status


@dataclass(frozen=True)
class SpanSeen:
    name: str
    trace: bytes
    id: bytes
    parent: bytes
    start: int  # nanoseconds since 1970
    end: int
    attributes: Mapping[str, str | int]
    error: str | None
    resource: Mapping[str, str | int]

    @property
    def milliseconds(self) -> float:
        return (self.end - self.start) / 1e6


@dataclass
class Collector:
    """A context manager. `host`: the address of this machine at which it listens."""

    host: str = "127.0.0.1"
    spans: list[SpanSeen] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)  # of each request

    def __enter__(self) -> Collector:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path != PATH:
                    self.send_error(404)
                    return
                collector.headers.append(dict(self.headers))
                collector.spans += _spans(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *arguments: Any) -> None:
                del format, arguments

        self._server = ThreadingHTTPServer((self.host, 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self._server.server_port}"

    def recoveries(self) -> list[tuple[SpanSeen, dict[str, SpanSeen]]]:
        """Each span `recovery` with its children by name, in the order of their starts."""
        roots = sorted((span for span in self.spans if not span.parent), key=lambda span: span.start)
        ordered = sorted(self.spans, key=lambda span: span.start)
        return [(root, {s.name: s for s in ordered if (s.trace, s.parent) == (root.trace, root.id)}) for root in roots]


def _spans(body: bytes) -> list[SpanSeen]:
    return [
        SpanSeen(
            span.name, span.trace_id, span.span_id, span.parent_span_id, span.start_time_unix_nano,
            span.end_time_unix_nano, _values(span.attributes),
            span.status.message if span.status.code == ERROR else None, _values(group.resource.attributes),
        )
        for group in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]  # fmt: skip


def _values(attributes: Any) -> dict[str, str | int]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in attributes}
