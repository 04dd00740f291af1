"""OTLP/HTTP: the same exports as protobuf or JSON, for the path ``/v1/traces`` (``kivi_server.http.routes``).

OTLP's JSON is that of protobuf, but for ids, which are hexadecimal. It is made a message first, so that everything
behind it is one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from google.protobuf import json_format
from google.rpc import status_pb2
from kivi_server.otlp.answers import MESSAGE_BYTES_MAX, response, retry_s
from kivi_server.otlp.exports import Exports
from kivi_server.otlp.spans import Export, decode, spans_of
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kivi.errors import InvalidArgument, KiviError
from kivi.wire.status import status_code

__all__ = ["OverHttp"]

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
_IDS: Final = ("traceId", "spanId", "parentSpanId")


class OverHttp:
    """``tables``: those that an exporter's token has to be for."""

    bytes_max: Final = MESSAGE_BYTES_MAX
    media: Final = (PROTOBUF, JSON)

    def __init__(self, exports: Exports) -> None:
        self._exports = exports

    @property
    def tables(self) -> list[str]:
        return self._exports.tables

    async def export(self, body: bytes, media: str, allows: Callable[[str], bool]) -> bytes:
        """Answers once the spans are durable and visible. Raises what the request deserves."""
        said = response(await self._exports.take(body, decode if media == PROTOBUF else decode_json, allows))
        return said.SerializeToString() if media == PROTOBUF else json_format.MessageToJson(said, indent=None).encode()

    def failure(self, error: KiviError, media: str) -> tuple[bytes, float | None]:
        """The body of an answer that is an error, and after how many seconds to try again, if at all."""
        said = status_pb2.Status(code=status_code(error).value[0], message=error.message)
        body = said.SerializeToString() if media == PROTOBUF else json_format.MessageToJson(said, indent=None).encode()
        return body, retry_s(error)


def decode_json(data: bytes) -> Export:
    """Raises InvalidArgument."""
    try:
        found = json.loads(data)
        for span in _spans(found):
            for each in (span, *span.get("links", ())):
                for name in _IDS:
                    if name in each:
                        each[name] = base64.b64encode(bytes.fromhex(each[name])).decode()
        request = json_format.ParseDict(found, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (ValueError, TypeError, AttributeError, RecursionError, json_format.ParseError) as error:
        raise InvalidArgument(f"this is no ExportTraceServiceRequest of OTLP in JSON: {error}") from None
    return spans_of(request)


def _spans(found: Any) -> Iterator[dict[str, Any]]:
    for resource in found.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            yield from scope.get("spans", ())
