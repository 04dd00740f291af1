"""The call ``opentelemetry.proto.collector.trace.v1.TraceService/Export``, on a listener of its own.

Tokens, TLS and clients' allowances are those of the main listener; an exporter needs a token that may write to the
table. Exporters decide by the status what becomes of their spans (OTLP, "Failures")::

    OK, partial_success           some spans cannot be used: how many, and why. They are not to be sent again
    UNAVAILABLE, RetryInfo        the server is stopping, or the table changes: again in a second
    RESOURCE_EXHAUSTED, RetryInfo too much waits, the window or the disk is full, the client asks too often
    INVALID_ARGUMENT              no OTLP, or more in one request than a transaction takes: never again as it is
    UNAUTHENTICATED, PERMISSION_DENIED
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
from kivi_server.auth import Access, Tokens
from kivi_server.otlp.intake import Intake, Taken
from kivi_server.otlp.spans import decode
from kivi_server.requests import stopping
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from kivi.errors import KiviError
from kivi.wire.status import status_code

__all__ = ["MESSAGE_BYTES_MAX", "SERVICE", "Listener"]

SERVICE: Final = "opentelemetry.proto.collector.trace.v1.TraceService"
MESSAGE_BYTES_MAX: Final = 8 << 20
"""Unpacked; twice what collectors take by default. Messages of nothing but empty spans take 85 times that in memory."""
_RETRY_S: Final = 1.0


class Listener:
    """The gRPC server, to be bound by whoever starts it, and the writer. gRPC unpacks messages that are compressed.

    ``NEEDS``: of each method of the service, what a token has to allow.
    """

    NEEDS: Final = {"Export": Access.WRITE}

    def __init__(self, intake: Intake, tokens: Tokens) -> None:
        self.intake = intake
        self.sessions = intake.sessions
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
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(  # requests come as bytes: they are parsed off the event loop
                self.sessions.calls.counted(f"OTLP/{name}", getattr(self, name), _retry_s),
                response_serializer=ExportTraceServiceResponse.SerializeToString,
            )
            for name in self.NEEDS
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._writing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Once the intake is open."""
        self._writing = asyncio.create_task(self.intake.run())
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(grace=0.2)
        if self._writing is not None:
            self._writing.cancel()

    async def Export(self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> ExportTraceServiceResponse:
        grant = self._tokens.grant(context.invocation_metadata() or ())
        grant.require(self.NEEDS["Export"], "exporting spans", self.intake.table)
        self.sessions.clients.of(grant, context.peer()).take(1)
        return _response(await self._take(data))

    async def _take(self, data: bytes) -> Taken:
        if self.sessions.stopping:
            raise stopping()
        intake, nbytes = self.intake, len(data)
        intake.reserve(nbytes)
        try:
            spans = await asyncio.get_running_loop().run_in_executor(self.sessions.writes, decode, data)
            intake.check(spans)
            if self.sessions.stopping:
                raise stopping()
        except BaseException:
            intake.release(nbytes)
            raise
        return await intake.put(spans, nbytes)


def _retry_s(error: Exception) -> float | None:
    """After how many seconds an exporter should try again; None: not at all."""
    if not isinstance(error, KiviError):
        return None
    code = status_code(error)
    if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED):
        return None
    return float(error.details.get("retry_s", _RETRY_S))


def _response(taken: Taken) -> ExportTraceServiceResponse:
    response = ExportTraceServiceResponse()
    if taken.rejected:
        response.partial_success.rejected_spans = taken.rejected.total()
        response.partial_success.error_message = "; ".join(
            f"{count} span{'s' if count > 1 else ''} left out: {why}" for why, count in taken.rejected.most_common()
        )
    return response
