"""OTLP/HTTP: the same exports as protobuf or JSON, for ``/v1/traces``, ``/v1/metrics`` (``kivi_server.http.routes``).

OTLP's JSON is that of protobuf, but for ids, which are hexadecimal, and for enumerations, which are numbers. It is made
a message first, so that everything behind it is one. Names of enumerations that OTLP has are read, too; a text that is
none is kept as a number that is none (``NEITHER``), for protobuf's reader would leave it out, and a span without a kind
is none that counts.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Final, NamedTuple

from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import status_pb2
from kivi_server.clients import Client
from kivi_server.otlp.answers import MESSAGE_BYTES_MAX, metrics_response, response, retry_s
from kivi_server.otlp.exports import Exports
from kivi_server.otlp.intake import Taken
from kivi_server.otlp.points import decode_points, points_of
from kivi_server.otlp.spans import Spans, decode, spans_of
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kivi.errors import InvalidArgument, KiviError
from kivi.model.json_texts import read_json
from kivi.wire.status import status_code

__all__ = ["OverHttp"]

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
NEITHER: Final = -1
_KINDS: Final = frozenset(Span.SpanKind.keys())
_STATUS_CODES: Final = frozenset(Status.StatusCode.keys())
_TEMPORALITIES: Final = frozenset(AggregationTemporality.keys())
_IDS: Final = ("traceId", "spanId", "parentSpanId")


class Signal(NamedTuple):
    """What exports are of: how they are read, and what is answered."""

    of_protobuf: Callable[[bytes], Sequence[Spans]]
    of_json: Callable[[bytes], Sequence[Spans]]
    response: Callable[[Taken], Message]


class OverHttp:
    """``signals``: by the end of their path."""

    bytes_max: Final = MESSAGE_BYTES_MAX
    media: Final = (PROTOBUF, JSON)
    signals: Final = ("traces", "metrics")

    def __init__(self, exports: Exports) -> None:
        self._exports = exports

    async def export(
        self, signal: str, body: bytes, media: str, allows: Callable[[str], bool], client: Client
    ) -> bytes:
        """Answers once all is durable and visible. Raises what the request deserves."""
        of = _SIGNALS[signal]
        decode = of.of_protobuf if media == PROTOBUF else of.of_json
        said = of.response(await self._exports.take(body, decode, allows, client))
        return said.SerializeToString() if media == PROTOBUF else json_format.MessageToJson(said, indent=None).encode()

    def failure(self, error: KiviError, media: str) -> tuple[bytes, float | None]:
        """The body of an answer that is an error, and after how many seconds to try again, if at all."""
        said = status_pb2.Status(code=status_code(error).value[0], message=error.message)
        body = said.SerializeToString() if media == PROTOBUF else json_format.MessageToJson(said, indent=None).encode()
        return body, retry_s(error)


def decode_json(data: bytes) -> list[Spans]:
    """Raises InvalidArgument."""
    try:
        found = _loaded(data)
        for span in _spans(found):
            _number(span, "kind", _KINDS)
            _number(span.get("status") or {}, "code", _STATUS_CODES)
            for each in (span, *(span.get("links") or ())):
                for name in _IDS:
                    if each.get(name):  # null is what is not there, as everywhere in JSON
                        each[name] = base64.b64encode(bytes.fromhex(each[name])).decode()
        request = json_format.ParseDict(found, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (ValueError, TypeError, AttributeError, RecursionError, json_format.ParseError) as error:
        raise InvalidArgument(f"this is no ExportTraceServiceRequest of OTLP in JSON: {_why(error)}") from None
    return spans_of(request).parts


def _number(said: dict[str, Any], name: str, known: Container[str]) -> None:
    """Of an enumeration."""
    if isinstance(text := said.get(name), str) and text not in known and not text.isdecimal():
        said[name] = NEITHER


def _why(error: Exception) -> str:
    """What is no object, or no text, is found by going through it as if it were."""
    if isinstance(error, (AttributeError, TypeError)):
        return "it has another kind of value where OTLP has an object, a list or a text"
    return str(error)


def _loaded(data: bytes) -> Any:
    """Raises ValueError, also for halves of characters, which protobuf does not look for."""
    found = read_json(data, "the export")
    if b"\\u" in data:
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _spans(found: Any) -> Iterator[dict[str, Any]]:
    for resource in found.get("resourceSpans") or ():
        for scope in resource.get("scopeSpans") or ():
            yield from scope.get("spans") or ()


def decode_points_json(data: bytes) -> Sequence[Spans]:
    """Raises InvalidArgument. Ids are of exemplars alone, which are not kept."""
    try:
        found = _loaded(data)
        for each in _data(found):
            _number(each, "aggregationTemporality", _TEMPORALITIES)
            for point in each.get("dataPoints") or ():
                point.pop("exemplars", None)
        request = json_format.ParseDict(found, ExportMetricsServiceRequest(), ignore_unknown_fields=True)
    except (ValueError, TypeError, AttributeError, RecursionError, json_format.ParseError) as error:
        raise InvalidArgument(f"this is no ExportMetricsServiceRequest of OTLP in JSON: {_why(error)}") from None
    return points_of(request)


def _data(found: Any) -> Iterator[dict[str, Any]]:
    for resource in found.get("resourceMetrics") or ():
        for scope in resource.get("scopeMetrics") or ():
            for metric in scope.get("metrics") or ():
                yield from (data for data in metric.values() if isinstance(data, dict))


_SIGNALS: Final = {
    "traces": Signal(decode, decode_json, response),
    "metrics": Signal(decode_points, decode_points_json, metrics_response),
}
