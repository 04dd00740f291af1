"""The table that spans go to, and its aggregates: created where they are missing, with these columns and names.

For ``--otlp-table invocations``::

    invocations               an event for each invocation (``COLUMNS``)
    invocations_endpoint_5m   (namespace, service, route, method, slot)   calls, errors, sum_duration_us, slowest_us,
    invocations_service_5m    (namespace, service, slot)                  latency, slowest_trace_id; avg_duration_us,
                                                                          error_rate, p50_us, p95_us, p99_us, apdex

``latency`` is the distribution of durations, from which any quantile can be read within 1 %. ``slowest_trace_id`` is
the trace of the slowest invocation, of equals the first. ``apdex`` is that of T = 500 ms by duration: the mean of the
fractions of invocations below T and below 4 T, each within 1 % of the bound.

``ts``, the event time, is the moment the span *ended*: an invocation counts when it is over, so a slot that has passed
changes only by what exporters held back. No column is ever null, so that aggregates may group by any of them: what a
span does not say is "" or 0.

A table that is there already is used as it is, with its own retention and aggregates, if it has these columns; others
are null. Aggregates are only created while a table has no events, so those that somebody dropped stay away; those of an
older server keep the measures that they have (``db.alter_aggregate`` adds others).
"""

from __future__ import annotations

import contextlib
from typing import Final

from kivi.errors import AlreadyExists, InvalidArgument, NotFound
from kivi.model import surface
from kivi.model.declarations import aggregate_schema, event_table_schema, time_slot
from kivi.model.expressions import col
from kivi.model.schema import TableSchema
from kivi.store.facade import Store

__all__ = ["COLUMNS", "EVENT_TIME", "ensure"]

EVENT_TIME: Final = "ts"
COLUMNS: Final = {
    "namespace": "string",  # service.namespace
    "service": "string",  # service.name
    "instance": "string",  # service.instance.id
    "route": "string",  # http.route, else rpc.service/rpc.method, else the span's name
    "method": "string",  # http.request.method
    "kind": "string",  # server, consumer
    "status_code": "int64",  # http.response.status_code, or gRPC's
    "error": "int64",  # 1 if the span's status is an error
    "ts": "timestamp",  # its end
    "duration_us": "int64",  # whole microseconds
    "trace_id": "bytes",  # 16
    "span_id": "bytes",  # 8
}
_GROUPS: Final = {
    "endpoint_5m": ("namespace", "service", "route", "method"),
    "service_5m": ("namespace", "service"),
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


def ensure(store: Store, name: str, retention_s: float) -> TableSchema:
    """The table, created with its aggregates if it is missing; ``retention_s`` 0 keeps events for ever.

    Raises SchemaError for a name that is none, InvalidArgument for a table that does not fit.
    """
    try:
        table, is_new = store.table(name), False
    except NotFound:
        retention = None if not retention_s else int(retention_s * 1_000_000)
        try:
            table, is_new = store.create(event_table_schema(name, EVENT_TIME, COLUMNS, retention)), True
        except AlreadyExists:  # a client was quicker
            table, is_new = store.table(name), False
    _check(table)
    if is_new or not store.statistics(table).get("rows"):
        taken = {schema.name for schema in store.tables()}
        for ending, groups in _GROUPS.items():
            if (aggregate := f"{name}_{ending}") not in taken:
                slots = time_slot(EVENT_TIME, "5m")
                with contextlib.suppress(AlreadyExists):  # another node of the cluster was quicker
                    store.create(aggregate_schema(aggregate, table, [*groups, slots], _MEASURES, _DERIVED))
    return table


def _check(table: TableSchema) -> None:
    if table.kind != "event" or table.event_time != EVENT_TIME:
        raise InvalidArgument(
            f"--otlp-table {table.name!r} is there already and is no event table whose event time is {EVENT_TIME!r}: "
            "name another one"
        )
    for name, type_ in COLUMNS.items():
        column = table.by_name.get(name)
        if column is None or str(column.type) != type_:
            found = "none" if column is None else str(column.type)
            raise InvalidArgument(
                f"--otlp-table {table.name!r} is there already and does not fit: it should have a column {name!r} of "
                f"type {type_}, and has {found}; name another table, which is then created"
            )
