"""Which spans count, and what becomes of them: export requests as columns.

The loop in ``decode`` is all the Python that runs once per span; it makes lists, which take no room for names that
repeat. ``gathered`` makes Arrow of what is committed together, since columns of one span cost as much as of a thousand.

A span that cannot be used is left out and reported (``rejected``): no valid ids, no times or such as no span has
(``TIME_MIN_NS``, ``AHEAD_NS``), an end before its beginning, a kind or status code that OTLP has not, or a name of more
than ``NAME_BYTES_MAX`` bytes by which its table's aggregates group (``Kind.groups``): cut, it would be that of others.
Another text that is longer is cut, as OpenTelemetry's limits of attributes do, and its call counts. What names are
looked for is stated in ``kivi_server.otlp.tables``; the older names of the semantic conventions are understood too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import chain
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from google.protobuf.message import DecodeError
from kivi_server.otlp.tables import INVOCATIONS_KIND, LLM_KIND, OUTGOING_KIND, Kind
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kivi.arrow.columns import TIMESTAMP
from kivi.arrow.id_window import ID, Ids
from kivi.errors import InvalidArgument
from kivi.model.rollups import AHEAD_US
from kivi.model.types import LIKELY_US

__all__ = [
    "AHEAD",
    "AHEAD_NS",
    "NAME_BYTES_MAX",
    "TIMELESS",
    "TIME_MAX_NS",
    "TIME_MIN_NS",
    "Export",
    "Spans",
    "decode",
    "gathered",
    "spans_of",
]

NAME_BYTES_MAX: Final = 4_096
"""Four of them make a key of an aggregate, and a key has at most 64 KiB."""
_LONG: Final = f"has more than {NAME_BYTES_MAX:,} bytes"
TIME_MIN_NS: Final = LIKELY_US[0] * 1_000
TIME_MAX_NS: Final = LIKELY_US[1] * 1_000 - 1
"""Of spans and points. What is in another unit is not within them, nor 2**64 - 1 for "never"."""
TIMELESS: Final = "not within the years 1990 to 2099: they are nanoseconds since 1970"
AHEAD_NS: Final = AHEAD_US * 1_000
"""A clock may be ahead of the server's. What is later than that is of a wrong one, as ``last`` has it, too."""
AHEAD: Final = "it is of more than 10 minutes after this server's clock: set the clock of the machine that sends it"
_KINDS: Final = {
    Span.SPAN_KIND_SERVER: "server",
    Span.SPAN_KIND_CONSUMER: "consumer",
    Span.SPAN_KIND_CLIENT: "client",
    Span.SPAN_KIND_PRODUCER: "producer",
}
_KNOWN_KINDS: Final = frozenset(Span.SpanKind.values())
_CODES_OF_STATUS: Final = frozenset(Status.StatusCode.values())
_ANSWERED: Final = ("server", "consumer")
_PLACES: Final = ("service.namespace", "service.name", "service.instance.id")
_METHODS: Final = ("http.request.method", "http.method")
_CODES: Final = ("http.response.status_code", "http.status_code", "rpc.grpc.status_code", "rpc.response.status_code")
_PATHS: Final = ("url.path", "http.target")
_ERROR_TYPE: Final = "error.type"
_WANTED: Final = frozenset({"http.route", "rpc.service", "rpc.method", _ERROR_TYPE, *_METHODS, *_PATHS, *_CODES})
_PEERS: Final = (
    "peer.service",
    "server.address",
    "net.peer.name",
    "messaging.destination.name",
    "db.namespace",
    "db.name",
)
_URLS: Final = ("url.full", "http.url")
"""Whose host is the peer where nothing else says it, as in the spans of Python's ``requests``."""
_LAST_PEERS: Final = (
    "net.sock.peer.name",
    "network.peer.address",
    "net.sock.peer.addr",
    "messaging.destination",
    "rpc.service",
)
"""Of older instrumentations, and of a cloud's services, as ``S3``."""
_SYSTEMS: Final = ("db.system.name", "db.system", "messaging.system", "rpc.system.name", "rpc.system")
_TENANTS: Final = ("tenant.id", "enduser.id", "user.id")
_PROVIDERS: Final = ("gen_ai.provider.name", "gen_ai.system")
_MODELS: Final = ("gen_ai.response.model", "gen_ai.request.model")
_INPUTS: Final = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUTS: Final = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_GEN_AI: Final = "gen_ai.operation.name"
_OUTGOING: Final = frozenset(
    chain(_WANTED, _PEERS, _URLS, _LAST_PEERS, _SYSTEMS, _TENANTS, _PROVIDERS, _MODELS, _INPUTS, _OUTPUTS, [_GEN_AI])
)
_WRAPPING: Final = frozenset({"create_agent", "invoke_agent", "invoke_workflow", "execute_tool"})
"""Operations that call no model themselves: the calls in them have spans of their own."""
_RETRIEVAL: Final = "retrieval"
"""Asks an index, and no model."""
_TYPES: Final = {
    "string": pa.string(),
    "float64": pa.float64(),
    "bytes": pa.binary(),
    "int64": pa.int64(),
    "timestamp": TIMESTAMP,
}
_EVENT_BYTES: Final = 100  # of a span's event, beside its names
_TOKENS_MAX: Final = 10**15
_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)


class Spans:
    """The spans of one request that go to one table, and of the others how many.

    ``columns`` are the lists of its kind's columns, ``nbytes`` what they take as events, ``rejected`` counts by reason.
    """

    __slots__ = ("columns", "kind", "nbytes", "passed_over", "rejected")

    def __init__(self, kind: Kind = INVOCATIONS_KIND) -> None:
        self.kind = kind
        self.columns: dict[str, list[Any]] = {name: [] for name in kind.columns}
        self.nbytes = self.passed_over = 0
        self.rejected = Counter[str]()

    def __len__(self) -> int:
        return len(self.columns["ts"])

    @property
    def items(self) -> int:
        """How many the exporter calls them."""
        return len(self)

    def are_items(self) -> npt.NDArray[np.bool_]:
        """Which of the events the exporter counts."""
        return np.ones(len(self), bool)


class Export:
    """The spans of one request, by where they go."""

    __slots__ = ("invocations", "llm", "outgoing")

    def __init__(self) -> None:
        self.invocations = Spans(INVOCATIONS_KIND)
        self.outgoing = Spans(OUTGOING_KIND)
        self.llm = Spans(LLM_KIND)

    @property
    def parts(self) -> list[Spans]:
        return [self.invocations, self.outgoing, self.llm]


def decode(data: bytes) -> list[Spans]:
    """An ``ExportTraceServiceRequest``. Raises InvalidArgument if it is none."""
    try:
        request = ExportTraceServiceRequest.FromString(data)
    except DecodeError:
        raise InvalidArgument("this is no ExportTraceServiceRequest of OTLP") from None
    return spans_of(request).parts


def spans_of(request: ExportTraceServiceRequest) -> Export:
    export = Export()
    spans, latest = export.invocations, time.time_ns() + AHEAD_NS
    add = [column.append for column in spans.columns.values()]
    for resource_spans in request.resource_spans:
        place = _named(resource_spans.resource.attributes, _PLACES)
        namespace, service, instance = (_text(place, name) for name in _PLACES)
        service = service or "unknown_service"
        instance = _cut(instance)
        of_place = [_length(name) for name in (namespace, service, instance)]
        nowhere = f"its service's name or namespace {_LONG}" if max(of_place) > NAME_BYTES_MAX else ""
        fixed = _EVENT_BYTES + sum(of_place)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                kind = _KINDS.get(span.kind)
                if kind not in _ANSWERED:
                    _made(export, span, kind, (namespace, service, instance), nowhere, fixed, latest)
                    continue
                trace_id, span_id = span.trace_id, span.span_id
                began, ended = span.start_time_unix_nano, span.end_time_unix_nano
                said = _named(span.attributes, _WANTED)
                method = _text(said, *_METHODS)
                route = _route(said) or _without_path(span.name, said)
                code = span.status.code
                error = int(code == Status.STATUS_CODE_ERROR)
                error_type = _error_type(span, said, error)
                lengths = _length(route), _length(method)
                if fault := nowhere or _fault(
                    trace_id, span_id, began, ended, latest, code, ("route", "method"), lengths
                ):
                    spans.rejected[fault] += 1
                    continue
                values = (
                    namespace, service, instance, route, method, kind, _status_code(said),
                    error, error_type, ended // 1_000, (ended - began) // 1_000, trace_id, span_id, _parent(span),
                )  # fmt: skip
                for append, value in zip(add, values, strict=True):
                    append(value)
                spans.nbytes += fixed + sum(lengths) + _length(error_type)
    return export


def _made(
    export: Export, span: Any, kind: str | None, place: tuple[str, str, str], nowhere: str, fixed: int, latest: int
) -> None:
    """A call that a service made."""
    if kind is None and span.kind not in _KNOWN_KINDS:  # which may be one that counts
        export.invocations.rejected["its kind is none that OTLP has, which are the numbers 0 to 5"] += 1
        return
    said = _named(span.attributes, _OUTGOING)
    operation, model = _text(said, _GEN_AI), _text(said, *_MODELS)
    is_llm = bool(operation or model) and operation != _RETRIEVAL
    if operation in _WRAPPING or (kind is None and not (is_llm and operation and model)):
        export.invocations.passed_over += 1
        return
    spans = export.llm if is_llm else export.outgoing
    code = span.status.code
    error = int(code == Status.STATUS_CODE_ERROR)
    error_type = _error_type(span, said, error)
    began, ended = span.start_time_unix_nano, span.end_time_unix_nano
    over = (ended // 1_000, (ended - began) // 1_000, span.trace_id, span.span_id, _parent(span))
    values: tuple[Any, ...]
    others: tuple[str, ...]
    if is_llm:
        grouping = {"tenant": _text(said, *_TENANTS), "provider": _text(said, *_PROVIDERS), "model": model}
        others = (_cut(operation),)
        tokens = _number(said, _INPUTS), _number(said, _OUTPUTS)
        values = (*place, *grouping.values(), *others, *tokens, error, error_type, *over)
    else:
        method = _text(said, *_METHODS)
        grouping = {
            "peer": _text(said, *_PEERS) or _host(said) or _text(said, *_LAST_PEERS),
            "system": _text(said, *_SYSTEMS) or ("http" if method else ""),
        }
        others = (_cut(_route(said) or span.name), _cut(method))
        values = (*place, *grouping.values(), *others, kind, _status_code(said), error, error_type, *over)
    lengths = [*map(_length, grouping.values())]
    if fault := nowhere or _fault(span.trace_id, span.span_id, began, ended, latest, code, [*grouping], lengths):
        spans.rejected[fault] += 1
        return
    for column, value in zip(spans.columns.values(), values, strict=True):
        column.append(value)
    spans.nbytes += fixed + sum(lengths) + sum(map(_length, (*others, error_type)))


def _error_type(span: Any, said: dict[str, str | int], error: int) -> str:
    """As it says; of an error that does not, the type of the last exception that it recorded. Cut, if it is long."""
    if (found := _text(said, _ERROR_TYPE)) or not error:
        return _cut(found) if found else found
    for event in reversed(span.events):
        if event.name == "exception":
            return _cut(_text(_named(event.attributes, ("exception.type",)), "exception.type"))
    return ""


def _parent(span: Any) -> bytes:
    """No bytes for the first of a trace, which some exporters say by zeros."""
    found: bytes = span.parent_span_id
    return found if len(found) == 8 and found != _NO_SPAN else b""


def _number(said: dict[str, str | int], names: Sequence[str]) -> int:
    """0 for what is none, or less, or more than any call has: two such numbers would be too much for a sum."""
    for name in names:
        value = said.get(name, 0)
        if isinstance(value, str):
            value = int(value) if value.isascii() and value.isdigit() and len(value) < 16 else 0
        if 0 < value < _TOKENS_MAX:
            return value
    return 0


def gathered(requests: Sequence[Spans]) -> tuple[Any, Ids]:
    """The spans of several requests, of one kind, one after the other, as an Arrow table; and their ids."""
    types, names = requests[0].kind.columns, requests[0].kind.ids
    columns = {name: list(chain.from_iterable(each.columns[name] for each in requests)) for name in types}
    parts = chain.from_iterable(zip(*(columns[name] for name in names), strict=True))
    arrays = {name: pa.array(values, _TYPES[types[name]]) for name, values in columns.items()}
    return pa.table(arrays), np.frombuffer(b"".join(parts), ID)


def _named(attributes: Iterable[Any], wanted: Container[str]) -> dict[str, str | int]:
    """Texts and whole numbers by their names; of a name that comes twice the last, as in a map."""
    found = {}
    for attribute in attributes:
        if (key := attribute.key) in wanted:
            value = attribute.value
            found[key] = value.string_value or value.int_value or _whole(value.double_value)
    return found


def _whole(number: float) -> int:
    """Some write whole numbers as doubles, as where all numbers are; 0 for what is none."""
    return int(number) if number.is_integer() and abs(number) < 1 << 53 else 0


def _text(said: dict[str, str | int], *names: str) -> str:
    return next((value for name in names if isinstance(value := said.get(name), str)), "")


def _host(said: dict[str, str | int]) -> str:
    try:
        return urlsplit(_text(said, *_URLS)).hostname or ""
    except ValueError:  # it is no address
        return ""


def _route(said: dict[str, str | int]) -> str:
    if route := _text(said, "http.route"):
        return route
    service, method = _text(said, "rpc.service"), _text(said, "rpc.method")
    return f"{service}/{method}" if service and method else service or method


def _without_path(name: str, said: dict[str, str | int]) -> str:
    """A span's name but for the path of its request, which some instrumentations put into it where no route matches.

    The semantic conventions have the method alone there: each path that a scanner tries would be an endpoint.
    """
    path = _text(said, *_PATHS).partition("?")[0]
    if not path or not f" {name}".endswith(f" {path}"):
        return name
    return name.removesuffix(path).rstrip(" ") or _text(said, *_METHODS) or "HTTP"


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


def _cut(text: str) -> str:
    """Its first whole characters of ``NAME_BYTES_MAX`` bytes at most."""
    return text if _length(text) <= NAME_BYTES_MAX else text.encode()[:NAME_BYTES_MAX].decode(errors="ignore")


def _fault(
    trace_id: bytes,
    span_id: bytes,
    began: int,
    ended: int,
    latest: int,
    code: int,
    grouping: Sequence[str],
    lengths: Sequence[int],
) -> str:
    """Why a span cannot be used; empty if it can. ``latest``: after which no span ends; ``grouping``: the columns that
    it is grouped by, of so many bytes."""
    if len(trace_id) != 16 or trace_id == _NO_TRACE:
        return "the trace id is not 16 bytes, or all zero"
    if len(span_id) != 8 or span_id == _NO_SPAN:
        return "the span id is not 8 bytes, or all zero"
    if not began or not ended:
        return "it has no start or no end time"
    if ended < began:
        return "it ends before it starts"
    if began < TIME_MIN_NS or ended > TIME_MAX_NS:
        return f"its times are {TIMELESS}"
    if ended > latest:
        return AHEAD
    if code not in _CODES_OF_STATUS:
        return "its status code is none that OTLP has, which are the numbers 0 to 2"
    if (longest := max(lengths)) > NAME_BYTES_MAX:
        return f"its {grouping[lengths.index(longest)]} {_LONG}: a name that calls are grouped by is not cut"
    return ""
