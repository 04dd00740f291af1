"""Roles: what a table is of, for consoles that show it. Nothing is stored or computed otherwise because of one.

============== ========== ===========================================================
role           of         what its rows are
============== ========== ===========================================================
services       aggregates a service's calls in a time slot
endpoints      aggregates an endpoint's
dependencies   aggregates what services call
models         aggregates calls to language models
traces         events     spans, by their ``trace_id``
names          rows       what the values of a key column are called: ``name``, by a key
                          of that column alone; it is shown in their place
anomalies      aggregates how many ``anomalies`` rules have found in a time slot; shown
                          beside services, endpoints and so on whose keys are among its
costs          aggregates what calls ``cost`` in a time slot; shown beside models, likewise
============== ========== ===========================================================

A console looks for measures by their names: calls, errors, error_rate, p50_us, p95_us, p99_us, apdex, slowest_us,
slowest_trace_id; what a table does not have is not shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.given import is_among
from kivi.model.schema import TableSchema
from kivi.model.types import shown

__all__ = ["COSTS", "ROLES", "TRACES", "check_role", "with_role"]

TRACES: Final = "traces"
_NAMES: Final = "names"
COSTS: Final = "costs"
_MEASURED: Final = {"anomalies": "anomalies", COSTS: "cost"}
"""Roles of aggregates that are shown beside others, and the measure that is."""
ROLES: Final = ("services", "endpoints", "dependencies", "models", TRACES, _NAMES, *_MEASURED)


def check_role(role: object) -> str:
    """A role; "" is none. Raises InvalidArgument."""
    if is_among(role, ("", *ROLES)):
        return str(role)
    raise InvalidArgument(f"a role is {', '.join(ROLES)}, or '' for none, and not {shown(role)}")


def with_role(schema: TableSchema, role: str) -> TableSchema:
    """The table in another role. Raises InvalidArgument, and SchemaError for a role that the table cannot have."""
    check_role(role)
    if schema.is_building:
        raise InvalidArgument(f"{schema.name!r} is still being built: give it a role when that is done")
    if role == TRACES:
        column = schema.by_name.get("trace_id")
        if schema.kind != "event" or column is None or column.type.name not in ("bytes", "string"):
            raise SchemaError(
                f"{schema.name!r} has no traces: that is an event table with a column trace_id of bytes or text"
            )
    elif role == _NAMES:
        if schema.kind != "row" or len(schema.key) != 1 or "name" not in schema.by_name:
            raise SchemaError(
                f"{schema.name!r} names nothing: that is a row table of one key column, with a column name"
            )
    elif role and not any(group.slot is not None for group in schema.group_by):
        raise SchemaError(f"{schema.name!r} cannot have the role {role!r}: that is an aggregate's with a time slot")
    if (measure := _MEASURED.get(role, "")) and measure not in schema.by_name:
        raise SchemaError(f"{schema.name!r} has no {role}: that is an aggregate with a measure {measure!r}")
    return replace(schema, role=role)
