"""Roles: what a table is of, for consoles that show it. Nothing is stored or computed otherwise because of one.

============== ========== ===========================================================
role           of         what its rows are
============== ========== ===========================================================
services       aggregates a service's calls in a time slot
endpoints      aggregates an endpoint's
dependencies   aggregates what services call
models         aggregates calls to language models
traces         events     spans, by their ``trace_id``
============== ========== ===========================================================

A console looks for measures by their names: calls, errors, error_rate, p50_us, p95_us, p99_us, apdex, slowest_us,
slowest_trace_id; what a table does not have is not shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.schema import TableSchema

__all__ = ["ROLES", "TRACES", "check_role", "with_role"]

TRACES: Final = "traces"
ROLES: Final = ("services", "endpoints", "dependencies", "models", TRACES)


def check_role(role: object) -> str:
    """A role; "" is none. Raises InvalidArgument."""
    if role == "" or (isinstance(role, str) and role in ROLES):
        return str(role)
    raise InvalidArgument(f"a role is {', '.join(ROLES)}, or '' for none, and not {role!r}")


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
    elif role and not any(group.slot is not None for group in schema.group_by):
        raise SchemaError(f"{schema.name!r} cannot have the role {role!r}: that is an aggregate's with a time slot")
    return replace(schema, role=role)
