"""Which spans count, and what becomes of them: an export request as columns.

The loop in ``decode`` is all the Python that runs once per span. Names that repeat become codes as they are met, so a
request takes no more memory than what it says, however often it says it.

A span that cannot be used is left out and reported (``rejected``): no valid ids, no times, an end before its beginning,
or a name of more than ``NAME_BYTES_MAX`` bytes. What names are looked for is stated in ``kivi_server.otlp.tables``; the
older names of the semantic conventions are understood too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError
from kivi_server.otlp.window import Ids
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kivi.arrow.coded import written_bytes
from kivi.arrow.columns import TIMESTAMP
from kivi.errors import InvalidArgument

__all__ = ["NAME_BYTES_MAX", "Spans", "decode", "ids_of"]

NAME_BYTES_MAX: Final = 4_096
"""Four of them make a key of an aggregate, and a key has at most 64 KiB."""
_LONG: Final = f"has more than {NAME_BYTES_MAX:,} bytes"
_KINDS: Final = {Span.SPAN_KIND_SERVER: "server", Span.SPAN_KIND_CONSUMER: "consumer"}
_PLACES: Final = ("service.namespace", "service.name", "service.instance.id")
_METHODS: Final = ("http.request.method", "http.method")
_CODES: Final = ("http.response.status_code", "http.status_code", "rpc.grpc.status_code", "rpc.response.status_code")
_WANTED: Final = frozenset({"http.route", "rpc.service", "rpc.method", *_METHODS, *_CODES})
_CODED: Final = ("namespace", "service", "instance", "route", "method", "kind")
_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)


@dataclass(slots=True)
class Spans:
    """One request. ``table`` has the columns of ``tables.COLUMNS``, ``ids`` the same spans' ids."""

    table: Any
    ids: Ids
    nbytes: int
    """Written out, as events."""
    passed_over: int = 0
    rejected: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.ids)


class _Codes:
    """A column of names that repeat."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self.codes: list[int] = []

    def code(self, name: str) -> int:
        return self.of.setdefault(name, len(self.of))

    def array(self) -> Any:
        return pa.DictionaryArray.from_arrays(pa.array(self.codes, pa.int32()), pa.array(list(self.of), pa.string()))


def decode(data: bytes) -> Spans:
    """An ``ExportTraceServiceRequest``. Raises InvalidArgument if it is none."""
    try:
        request = ExportTraceServiceRequest.FromString(data)
    except DecodeError:
        raise InvalidArgument("this is no ExportTraceServiceRequest of OTLP") from None
    coded = {name: _Codes() for name in _CODED}
    namespace, service, instance, route, method, kind = coded.values()
    status_code: list[int] = []
    error: list[bool] = []
    ended_us: list[int] = []
    duration_us: list[int] = []
    trace_ids: list[bytes] = []
    span_ids: list[bytes] = []
    passed_over, rejected = 0, Counter[str]()
    for resource_spans in request.resource_spans:
        place = _named(resource_spans.resource.attributes, frozenset(_PLACES))
        names = [place.get(name, "") for name in _PLACES]
        names[1] = names[1] or "unknown_service"
        nowhere = f"its service's name, namespace or instance id {_LONG}" if any(map(_too_long, names)) else ""
        where = namespace.code(names[0]), service.code(names[1]), instance.code(names[2])
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                which = _KINDS.get(span.kind)
                if which is None:
                    passed_over += 1
                    continue
                trace_id, span_id = span.trace_id, span.span_id
                began, ended = span.start_time_unix_nano, span.end_time_unix_nano
                said = _named(span.attributes, _WANTED)
                name = _route(said) or span.name
                verb = said.get(_METHODS[0]) or said.get(_METHODS[1], "")
                if fault := nowhere or _fault(trace_id, span_id, began, ended, name, verb):
                    rejected[fault] += 1
                    continue
                namespace.codes.append(where[0])
                service.codes.append(where[1])
                instance.codes.append(where[2])
                route.codes.append(route.code(name))
                method.codes.append(method.code(verb))
                kind.codes.append(kind.code(which))
                status_code.append(_status_code(said))
                error.append(span.status.code == Status.STATUS_CODE_ERROR)
                ended_us.append(ended // 1_000)
                duration_us.append((ended - began) // 1_000)
                trace_ids.append(trace_id)
                span_ids.append(span_id)
    columns = {name: codes.array() for name, codes in coded.items()}
    columns["status_code"] = pa.array(status_code, pa.int64())
    columns["error"] = pa.array(error, pa.bool_()).cast(pa.int64())
    columns["ts"] = pa.array(ended_us, pa.int64()).cast(TIMESTAMP)
    columns["duration_us"] = pa.array(duration_us, pa.int64())
    columns["trace_id"] = pa.array(trace_ids, pa.binary())
    columns["span_id"] = pa.array(span_ids, pa.binary())
    nbytes = sum(written_bytes(column) for column in columns.values())
    return Spans(pa.table(columns), ids_of(columns["trace_id"], columns["span_id"]), nbytes, passed_over, rejected)


def ids_of(trace_ids: Any, span_ids: Any) -> Ids:
    """Two columns of 16 and 8 bytes, without nulls, as words."""
    ids = np.empty((len(trace_ids), 3), np.uint64)
    if len(ids):
        for column, part in ((trace_ids, ids[:, :2]), (span_ids, ids[:, 2:])):
            width = 8 * part.shape[1]
            fixed = column.cast(pa.binary(width))
            part[:] = np.frombuffer(fixed.buffers()[1], np.uint64, part.size, width * fixed.offset).reshape(part.shape)
    return ids


def _named(attributes: Iterable[Any], wanted: frozenset[str]) -> dict[str, str]:
    """Texts, and whole numbers as texts; the first of a name that comes twice."""
    found: dict[str, str] = {}
    for attribute in attributes:
        if (key := attribute.key) in wanted:
            value = attribute.value
            match value.WhichOneof("value"):
                case "string_value":
                    found.setdefault(key, value.string_value)
                case "int_value":
                    found.setdefault(key, str(value.int_value))
    return found


def _route(said: dict[str, str]) -> str:
    if route := said.get("http.route"):
        return route
    service, method = said.get("rpc.service", ""), said.get("rpc.method", "")
    return f"{service}/{method}" if service and method else service or method


def _status_code(said: dict[str, str]) -> int:
    text = next((said[name] for name in _CODES if name in said), "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _too_long(name: str) -> bool:
    return len(name) > NAME_BYTES_MAX // 4 and len(name.encode()) > NAME_BYTES_MAX


def _fault(trace_id: bytes, span_id: bytes, began: int, ended: int, name: str, verb: str) -> str:
    """Why a span cannot be used; empty if it can."""
    if len(trace_id) != 16 or trace_id == _NO_TRACE:
        return "the trace id is not 16 bytes, or all zero"
    if len(span_id) != 8 or span_id == _NO_SPAN:
        return "the span id is not 8 bytes, or all zero"
    if not began or not ended:
        return "it has no start or no end time"
    if ended < began:
        return "it ends before it starts"
    if _too_long(name) or _too_long(verb):
        return f"its route or method {_LONG}"
    return ""
