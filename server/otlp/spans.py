"""Which spans count, and what becomes of them: export requests as columns.

The loop in ``decode`` is all the Python that runs once per span; it makes lists, which take no room for names that
repeat. ``gathered`` makes Arrow of what is committed together, since columns of one span cost as much as of a thousand.

A span that cannot be used is left out and reported (``rejected``): no valid ids, no times, an end before its beginning,
or a name of more than ``NAME_BYTES_MAX`` bytes. What names are looked for is stated in ``kivi_server.otlp.tables``; the
older names of the semantic conventions are understood too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError
from kivi_server.otlp.tables import COLUMNS
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kivi.arrow.columns import TIMESTAMP
from kivi.arrow.id_window import ID, Ids
from kivi.errors import InvalidArgument

__all__ = ["NAME_BYTES_MAX", "Spans", "decode", "gathered"]

NAME_BYTES_MAX: Final = 4_096
"""Four of them make a key of an aggregate, and a key has at most 64 KiB."""
_LONG: Final = f"has more than {NAME_BYTES_MAX:,} bytes"
_KINDS: Final = {Span.SPAN_KIND_SERVER: "server", Span.SPAN_KIND_CONSUMER: "consumer"}
_PLACES: Final = ("service.namespace", "service.name", "service.instance.id")
_METHODS: Final = ("http.request.method", "http.method")
_CODES: Final = ("http.response.status_code", "http.status_code", "rpc.grpc.status_code", "rpc.response.status_code")
_WANTED: Final = frozenset({"http.route", "rpc.service", "rpc.method", *_METHODS, *_CODES})
_TYPES: Final = {"string": pa.string(), "bytes": pa.binary(), "int64": pa.int64(), "timestamp": TIMESTAMP}
_EVENT_BYTES: Final = 100  # of a span's event, beside its names
_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)


class Spans:
    """The spans of one request that can be used, and of the others how many.

    ``columns`` are the lists of ``tables.COLUMNS``, ``nbytes`` what they take as events, ``rejected`` counts by reason.
    """

    __slots__ = ("columns", "nbytes", "passed_over", "rejected")

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        self.nbytes = self.passed_over = 0
        self.rejected = Counter[str]()

    def __len__(self) -> int:
        return len(self.columns["ts"])


def decode(data: bytes) -> Spans:
    """An ``ExportTraceServiceRequest``. Raises InvalidArgument if it is none."""
    try:
        request = ExportTraceServiceRequest.FromString(data)
    except DecodeError:
        raise InvalidArgument("this is no ExportTraceServiceRequest of OTLP") from None
    spans = Spans()
    add = [column.append for column in spans.columns.values()]
    for resource_spans in request.resource_spans:
        place = _named(resource_spans.resource.attributes, _PLACES)
        namespace, service, instance = (_text(place, name) for name in _PLACES)
        service = service or "unknown_service"
        lengths = [_length(name) for name in (namespace, service, instance)]
        nowhere = f"its service's name, namespace or instance id {_LONG}" if max(lengths) > NAME_BYTES_MAX else ""
        fixed = _EVENT_BYTES + sum(lengths)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                kind = _KINDS.get(span.kind)
                if kind is None:
                    spans.passed_over += 1
                    continue
                trace_id, span_id = span.trace_id, span.span_id
                began, ended = span.start_time_unix_nano, span.end_time_unix_nano
                said = _named(span.attributes, _WANTED)
                route, method = _route(said) or span.name, _text(said, *_METHODS)
                named = _length(route), _length(method)
                if fault := nowhere or _fault(trace_id, span_id, began, ended, named):
                    spans.rejected[fault] += 1
                    continue
                values = (
                    namespace, service, instance, route, method, kind, _status_code(said),
                    int(span.status.code == Status.STATUS_CODE_ERROR), ended // 1_000, (ended - began) // 1_000,
                    trace_id, span_id,
                )  # fmt: skip
                for append, value in zip(add, values, strict=True):
                    append(value)
                spans.nbytes += fixed + sum(named)
    return spans


def gathered(requests: Sequence[Spans]) -> tuple[Any, Ids]:
    """The spans of several requests, one after the other, as an Arrow table; and their ids."""
    columns = {name: list(chain.from_iterable(each.columns[name] for each in requests)) for name in COLUMNS}
    parts = chain.from_iterable(zip(columns["trace_id"], columns["span_id"], strict=True))
    arrays = {name: pa.array(values, _TYPES[COLUMNS[name]]) for name, values in columns.items()}
    return pa.table(arrays), np.frombuffer(b"".join(parts), ID)


def _named(attributes: Iterable[Any], wanted: Container[str]) -> dict[str, str | int]:
    """Texts and whole numbers by their names; of a name that comes twice the last, as in a map."""
    found = {}
    for attribute in attributes:
        if (key := attribute.key) in wanted:
            value = attribute.value
            found[key] = value.string_value or value.int_value  # 0 for what is neither
    return found


def _text(said: dict[str, str | int], *names: str) -> str:
    return next((value for name in names if isinstance(value := said.get(name), str)), "")


def _route(said: dict[str, str | int]) -> str:
    if route := _text(said, "http.route"):
        return route
    service, method = _text(said, "rpc.service"), _text(said, "rpc.method")
    return f"{service}/{method}" if service and method else service or method


def _status_code(said: dict[str, str | int]) -> int:
    """Some write numbers as text."""
    for name in _CODES:
        if name in said:
            value = said[name]
            if isinstance(value, str):
                value = int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0
            return value
    return 0


def _length(name: str) -> int:
    return len(name) if name.isascii() else len(name.encode())


def _fault(trace_id: bytes, span_id: bytes, began: int, ended: int, named: tuple[int, int]) -> str:
    """Why a span cannot be used; empty if it can."""
    if len(trace_id) != 16 or trace_id == _NO_TRACE:
        return "the trace id is not 16 bytes, or all zero"
    if len(span_id) != 8 or span_id == _NO_SPAN:
        return "the span id is not 8 bytes, or all zero"
    if not began or not ended:
        return "it has no start or no end time"
    if ended < began:
        return "it ends before it starts"
    if max(named) > NAME_BYTES_MAX:
        return f"its route or method {_LONG}"
    return ""
