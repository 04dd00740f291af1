"""A server that takes OpenTelemetry's spans, spans of the real SDK, and a single export, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from tests.ports import Port
from tests.serverproc import ServerProcess

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
PLACE = {"service.namespace": "acme", "service.name": "shop", "service.instance.id": "shop-1"}


class Server(ServerProcess):
    """One that takes spans, at ``otlp``, after a restart too."""

    def __init__(self, data: Path, *arguments: str) -> None:
        self._otlp = Port()
        self.otlp = f"localhost:{self._otlp.number}"
        super().__init__(data, "--otlp", self.otlp, *arguments)

    def read(self, table: str, **arguments: Any) -> list[dict[str, Any]]:
        with self.connect(**arguments) as db, db.snapshot() as snapshot:
            return list(snapshot.scan(table))


class Recorder:
    """Spans of the SDK, for tests that send them by themselves."""

    def __init__(self, **place: str) -> None:
        self.memory = InMemorySpanExporter()
        provider = TracerProvider(resource=Resource.create(place or PLACE), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.tracer = provider.get_tracer("tests")

    def span(self, route: str, kind: SpanKind = SpanKind.SERVER, **at: int) -> None:
        span = self.tracer.start_span(route, kind=kind, attributes={"http.route": route}, start_time=at.get("start"))
        span.end(at.get("end"))

    def spans(self, count: int) -> Sequence[ReadableSpan]:
        """So many new ones, of a few routes."""
        before = len(self.memory.get_finished_spans())
        for i in range(count):
            self.span(f"/r{i % 7}")
        return self.memory.get_finished_spans()[before:]


def export(target: str, spans: Sequence[ReadableSpan] | pb.ExportTraceServiceRequest, **call: Any) -> Any:
    """One call, without retries. Raises grpc.RpcError."""
    request = spans if isinstance(spans, pb.ExportTraceServiceRequest) else encode_spans(spans)
    with grpc.insecure_channel(target) as channel:
        made = channel.unary_unary(
            EXPORT, pb.ExportTraceServiceRequest.SerializeToString, pb.ExportTraceServiceResponse.FromString
        )
        return made(request, timeout=call.pop("timeout", 20), **call)
