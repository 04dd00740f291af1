"""The calls ``Export`` of OpenTelemetry's ``TraceService`` and ``MetricsService``, on a listener of their own.

Tokens, TLS and clients' allowances are those of the main listener; an exporter needs a token that may write to one
of the tables at least. Exporters decide by the status what becomes of what they sent (OTLP, "Failures"): ``answers``.
"""

from __future__ import annotations

from typing import Any, Final

import grpc
from kivi_server.auth import Access, Tokens
from kivi_server.otlp.answers import MESSAGE_BYTES_MAX, metrics_response, response, retry_s
from kivi_server.otlp.exports import Exports
from kivi_server.otlp.points import decode_points
from kivi_server.otlp.spans import decode
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

__all__ = ["METRICS_SERVICE", "SERVICE", "Listener"]

SERVICE: Final = "opentelemetry.proto.collector.trace.v1.TraceService"
METRICS_SERVICE: Final = "opentelemetry.proto.collector.metrics.v1.MetricsService"


class Listener:
    """The gRPC server, to be bound by whoever starts it. gRPC unpacks messages that are compressed.

    ``NEEDS``: of each method of the services, what a token has to allow.
    """

    NEEDS: Final = {"Export": Access.WRITE}
    METRICS_NEEDS: Final = {"ExportMetrics": Access.WRITE}

    def __init__(self, exports: Exports, tokens: Tokens) -> None:
        self.exports = exports
        self.sessions = exports.sessions
        self._tokens = tokens
        self.server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        for service, name, answers in (
            (SERVICE, "Export", ExportTraceServiceResponse),
            (METRICS_SERVICE, "ExportMetrics", ExportMetricsServiceResponse),
        ):
            handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
                # requests come as bytes: they are parsed off the event loop
                self.sessions.calls.counted(f"OTLP/{name}", getattr(self, name), retry_s),
                response_serializer=answers.SerializeToString,
            )
            generic = grpc.method_handlers_generic_handler(service, {"Export": handler})
            self.server.add_generic_rpc_handlers((generic,))

    async def start(self) -> None:
        """Once the exports are open."""
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(grace=0.2)

    async def Export(self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> ExportTraceServiceResponse:
        grant = self._tokens.grant(context.invocation_metadata() or ())
        grant.require(self.NEEDS["Export"], "exporting spans")
        grant.require_all_rows("exporting spans")
        client = self.sessions.clients.of(grant, context.peer())
        client.take(1)
        return response(await self.exports.take(data, decode, grant.allows, client))

    async def ExportMetrics(
        self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ExportMetricsServiceResponse:
        """``Export`` of the other service."""
        grant = self._tokens.grant(context.invocation_metadata() or ())
        grant.require(self.METRICS_NEEDS["ExportMetrics"], "exporting metrics")
        grant.require_all_rows("exporting metrics")
        client = self.sessions.clients.of(grant, context.peer())
        client.take(1)
        return metrics_response(await self.exports.take(data, decode_points, grant.allows, client))
