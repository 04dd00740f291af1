"""What exporters are told, over gRPC and over HTTP: what was left out, and when to send again.

::

    gRPC                          HTTP
    OK, partial_success           200   some of it cannot be used: how much, and why. That is not to be sent again
    UNAVAILABLE, RetryInfo        503   the server is stopping, or the table changes: again in a second
    RESOURCE_EXHAUSTED, RetryInfo 429   too much waits, the window or the disk is full, the client asks too often
    INVALID_ARGUMENT              400   no OTLP, or more in one request than a transaction takes: never again as it is
    UNAUTHENTICATED, ...          401   ... and 403, 413, 415
"""

from __future__ import annotations

from typing import Final

import grpc
from kivi_server.otlp.intake import Taken
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from kivi.errors import KiviError
from kivi.wire.status import status_code

__all__ = ["MESSAGE_BYTES_MAX", "metrics_response", "response", "retry_s"]

MESSAGE_BYTES_MAX: Final = 8 << 20
"""Unpacked; twice what collectors take by default. Messages of nothing but empty spans take 85 times that in memory."""
_RETRY_S: Final = 1.0


def retry_s(error: Exception) -> float | None:
    """After how many seconds an exporter should try again; None: not at all."""
    if not isinstance(error, KiviError):
        return None
    code = status_code(error)
    if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED):
        return None
    return float(error.details.get("retry_s", _RETRY_S))


def response(taken: Taken) -> ExportTraceServiceResponse:
    said = ExportTraceServiceResponse()
    if taken.rejected:
        said.partial_success.rejected_spans = taken.rejected.total()
        said.partial_success.error_message = _reasons(taken, "span")
    return said


def metrics_response(taken: Taken) -> ExportMetricsServiceResponse:
    said = ExportMetricsServiceResponse()
    if taken.rejected:
        said.partial_success.rejected_data_points = taken.rejected.total()
        said.partial_success.error_message = _reasons(taken, "point")
    return said


def _reasons(taken: Taken, item: str) -> str:
    return "; ".join(
        f"{count} {item}{'s' if count > 1 else ''} left out: {why}" for why, count in taken.rejected.most_common()
    )
