"""The tables that spans go to, and their aggregates: created where they are missing, with these columns and names.

Each span is in one table, so that nothing is counted twice: a call is an invocation where it was answered, and an
outgoing call where it was made.

For ``--otlp-table invocations``, spans of kind SERVER and CONSUMER::

    invocations               an event for each invocation (``COLUMNS``)
    invocations_endpoint_5m   (namespace, service, route, method, slot)   calls, errors, sum_duration_us, slowest_us,
    invocations_service_5m    (namespace, service, slot)                  latency, slowest_trace_id; avg_duration_us,
                                                                          error_rate, p50_us, p95_us, p99_us, apdex

Of kind CLIENT and PRODUCER, but for calls to language models; of whatever kind but SERVER and CONSUMER, calls to
language models (``gen_ai.*``, but ``retrieval``; operations that only wrap such calls, like ``invoke_agent``, are
passed over, or their tokens would count twice)::

    outgoing_calls            an event for each call that a service made (``OUTGOING``)
    outgoing_calls_5m         (namespace, service, peer, system, slot)        the same measures
    llm_calls                 an event for each call to a model (``LLM``)
    llm_calls_5m              (tenant, service, provider, model, slot)        the same, input_tokens, output_tokens

What calls to models cost is beside these, by prices that somebody keeps: ``kivi_server.otlp.costs``.

``latency`` is the distribution of durations, from which any quantile can be read within 1 %. ``slowest_trace_id`` is
the trace of the slowest invocation, of equals the first. ``apdex`` is that of T = 500 ms by duration: the mean of the
fractions of invocations below T and below 4 T, each within 1 % of the bound.

``ts``, the event time, is the moment the span *ended*: an invocation counts when it is over, so a slot that has passed
changes only by what exporters held back. No column is ever null, so that aggregates may group by any of them: what a
span does not say is "" or 0.

``invocations`` is created when a server with ``--otlp`` starts, the others by the first span of their kind. A table
that is there already is used as it is, with its own retention and aggregates, if it has these columns; others are null.
If it has not, its spans are refused, and the log, the metric ``kivi_otlp_tables_unfit`` and ``kivi status`` say so.
Aggregates are only created while a table has no events, so those that somebody dropped stay away; those of an older
server keep the measures that they have (``db.alter_aggregate`` adds others), and its tables the columns
(``db.alter_table``): without ``Kind.later`` of them they fit, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kivi_server.otlp import costs
from kivi_server.otlp.making import made

from kivi.errors import InvalidArgument, NotFound
from kivi.model import surface
from kivi.model.declarations import TimeSlot, aggregate_schema, event_table_schema, time_slot
from kivi.model.expressions import col
from kivi.model.roles import TRACES, with_role
from kivi.model.schema import OperatorCall, TableSchema
from kivi.store.facade import Store

__all__ = [
    "COLUMNS",
    "EVENT_TIME",
    "INVOCATIONS_KIND",
    "LLM_KIND",
    "OUTGOING_KIND",
    "DoesNotFit",
    "Kind",
    "ensure",
    "misfit",
]

EVENT_TIME: Final = "ts"
COLUMNS: Final = {
    "namespace": "string",  # service.namespace
    "service": "string",  # service.name
    "instance": "string",  # service.instance.id
    "route": "string",  # http.route, else rpc.service/rpc.method, else the span's name without url.path
    "method": "string",  # http.request.method
    "kind": "string",  # server, consumer
    "status_code": "int64",  # http.response.status_code, or gRPC's
    "error": "int64",  # 1 if the span's status is an error
    "error_type": "string",  # error.type, or of its exception
    "ts": "timestamp",  # its end
    "duration_us": "int64",  # whole microseconds
    "trace_id": "bytes",  # 16
    "span_id": "bytes",  # 8
    "parent_span_id": "bytes",  # 8, or none of a trace's first
}
OUTGOING: Final = {
    "namespace": "string",
    "service": "string",
    "instance": "string",
    "peer": "string",  # peer.service, else server.address, where a message goes to, the host of the URL, rpc.service
    "system": "string",  # db.system.name, messaging.system, rpc.system, else http
    "operation": "string",  # http.route, rpc.service/rpc.method, else the span's name
    "method": "string",  # http.request.method
    "kind": "string",  # client, producer
    "status_code": "int64",
    "error": "int64",
    "error_type": "string",
    "ts": "timestamp",
    "duration_us": "int64",
    "trace_id": "bytes",
    "span_id": "bytes",
    "parent_span_id": "bytes",
}
LLM: Final = {
    "namespace": "string",
    "service": "string",
    "instance": "string",
    "tenant": "string",  # tenant.id, else enduser.id, user.id
    "provider": "string",  # gen_ai.provider.name, gen_ai.system
    "model": "string",  # gen_ai.response.model, else gen_ai.request.model
    "operation": "string",  # gen_ai.operation.name
    "input_tokens": "int64",  # gen_ai.usage.input_tokens
    "output_tokens": "int64",  # gen_ai.usage.output_tokens
    "error": "int64",
    "error_type": "string",
    "ts": "timestamp",
    "duration_us": "int64",
    "trace_id": "bytes",
    "span_id": "bytes",
    "parent_span_id": "bytes",
}
_MEASURES: Final = {
    "calls": surface.count(),
    "errors": surface.count(where=col("error") == 1),
    "sum_duration_us": surface.sum("duration_us"),
    "slowest_us": surface.max("duration_us"),
    "latency": surface.quantiles("duration_us", accuracy=0.01),
    "slowest_trace_id": surface.argmax("trace_id", by="duration_us"),
}
_APDEX_US: Final = 500_000
_DERIVED: Final = {
    "avg_duration_us": "sum_duration_us / calls",
    "error_rate": "errors / calls",
    "p50_us": "quantile(latency, 0.5)",
    "p95_us": "quantile(latency, 0.95)",
    "p99_us": "quantile(latency, 0.99)",
    "apdex": f"(fraction_below(latency, {_APDEX_US}) + fraction_below(latency, {4 * _APDEX_US})) / 2",
}


@dataclass(frozen=True)
class Kind:
    """What becomes of some spans. ``groups``: of each aggregate, by the end of its name, its columns but the slot;
    ``roles``: likewise, what it is of, for consoles; ``role``: of the table itself."""

    name: str
    columns: Mapping[str, str]
    groups: Mapping[str, Sequence[str]]
    measures: Mapping[str, OperatorCall]
    roles: Mapping[str, str]
    derived: Mapping[str, str] = field(default_factory=lambda: _DERIVED)
    role: str = TRACES
    ids: tuple[str, str] = ("trace_id", "span_id")
    """Of each event, 16 and 8 bytes: what is found again by them is not stored again."""
    item: str = "span"
    """What an exporter calls what it sends."""
    later: frozenset[str] = frozenset()
    """Columns that tables of older servers do not have."""
    beside: Callable[[Store, TableSchema, bool], None] | None = None
    """Declares what else belongs to the table, which has no events yet if that is true."""


INVOCATIONS_KIND: Final = Kind(
    "invocations",
    COLUMNS,
    {"endpoint_5m": ("namespace", "service", "route", "method"), "service_5m": ("namespace", "service")},
    _MEASURES,
    {"endpoint_5m": "endpoints", "service_5m": "services"},
    later=frozenset({"error_type", "parent_span_id"}),
)
OUTGOING_KIND: Final = Kind(
    "outgoing_calls",
    OUTGOING,
    {"5m": ("namespace", "service", "peer", "system")},
    _MEASURES,
    {"5m": "dependencies"},
    later=frozenset({"parent_span_id"}),
)
LLM_KIND: Final = Kind(
    "llm_calls",
    LLM,
    {"5m": ("tenant", "service", "provider", "model")},
    {**_MEASURES, "input_tokens": surface.sum("input_tokens"), "output_tokens": surface.sum("output_tokens")},
    {"5m": "models"},
    later=frozenset({"parent_span_id"}),
    beside=costs.declare,
)


class DoesNotFit(InvalidArgument):
    """A table is there that has not the columns: what is for it is refused, and what is for others is not."""


def ensure(store: Store, name: str, retention_s: float, kind: Kind = INVOCATIONS_KIND) -> TableSchema:
    """The table, created with its aggregates if it is missing; ``retention_s`` 0 keeps events for ever.

    Raises SchemaError for a name that is none, DoesNotFit, Unavailable while others make them.
    """
    try:
        table = store.table(name)
    except NotFound:
        retention = None if not retention_s else int(retention_s * 1_000_000)
        table = made(store, with_role(event_table_schema(name, EVENT_TIME, kind.columns, retention), kind.role))
    if reason := misfit(table.description(), kind):
        raise DoesNotFit(reason)
    if is_fresh := not store.statistics(table).get("rows"):
        for ending, groups in kind.groups.items():
            keys: list[str | TimeSlot] = [*groups, time_slot(EVENT_TIME, "5m")]
            declared = aggregate_schema(f"{name}_{ending}", table, keys, kind.measures, kind.derived)
            made(store, with_role(declared, kind.roles.get(ending, "")))
    if kind.beside is not None:
        kind.beside(store, table, is_fresh)
    return table


def misfit(table: Mapping[str, Any], kind: Kind) -> str:
    """Why a table, as ``describe`` tells of it, cannot take the events of a kind; "" if it can."""
    name = table["name"]
    what = f"--otlp-table {name!r}" if kind is INVOCATIONS_KIND else f"table {name!r}, for {kind.item}s,"
    do = "name another table, which is then created" if kind is INVOCATIONS_KIND else "drop it, or alter it"
    if table.get("event_time") != EVENT_TIME:
        return f"{what} is there already and is no event table whose event time is {EVENT_TIME!r}: {do}"
    for column, type_ in kind.columns.items():
        found = table["columns"].get(column)
        if found != type_ and not (found is None and column in kind.later):
            return (
                f"{what} is there already and does not fit: it should have a column {column!r} of type {type_}, and "
                f"has {found or 'none'}; {do}"
            )
    return ""
