"""Declarations made into schemas: every rule of what a caller may declare is here.

A definition is checked in full before anything is stored: names, types, that an operator fits its column, that an
aggregate's groups and measures are columns of its source, and that its derived columns are arithmetic over them. So
whoever reads a schema later checks nothing again.

Durations (``history``, ``retention``) are written like "5m", as a timedelta, or as microseconds; so are the widths of
slots, which may be by calendar too (``kivi.model.slots``).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.changes import COMMIT_TS, check_not_hidden
from kivi.model.derived_columns import parse_expression
from kivi.model.given import is_among
from kivi.model.lifetimes import slot_index
from kivi.model.measuring import TIMED, delta_column, measured, observed_columns
from kivi.model.names import check_disjoint, check_name, name_list
from kivi.model.schema import Alteration, Column, GroupKey, OperatorCall, TableSchema
from kivi.model.slots import Slot, parse_duration_us
from kivi.model.types import ColumnType, shown

__all__ = [
    "TimeSlot",
    "aggregate_schema",
    "declared_columns",
    "derived_columns",
    "event_table_schema",
    "grouped",
    "parse_duration_us",
    "row_table_schema",
    "time_slot",
    "with_columns",
    "with_measures",
]


@dataclass(frozen=True, slots=True)
class TimeSlot:
    """A group key: the start of the slot that a timestamp column falls in (``kivi.model.slots``)."""

    column: str
    slot: Slot
    name: str


def time_slot(column: str, width: str | int | dt.timedelta, name: str = "slot", tz: str | None = None) -> TimeSlot:
    """``kivi.time_slot("ts", "5m", name="slot")``: group by 5-minute slots [start, start + 5 min) of ``ts``.

    ``width`` is a duration, or by calendar "1w" (from Monday), "1month", "1quarter", "1year". ``tz``, an IANA name such
    as "Europe/Madrid", has them begin at its local midnight, or, hours and less, with its clock; without it they are
    those of UTC. Raises InvalidArgument for what is no width, SchemaError for a zone that is not known and for widths
    that do not divide its day.
    """
    return TimeSlot(column, Slot.parse(width, tz), name)


# -- tables ----------------------------------------------------------------------------------------


def _value_column(name: object, declared: object, what: str) -> Column:
    if isinstance(declared, OperatorCall):
        raise SchemaError(f"{what} {name!r} is declared as {declared}: an operator is not allowed here")
    return Column(check_name(name, what), ColumnType.parse(declared))


def row_table_schema(
    name: str, key: Mapping[str, object], columns: Mapping[str, object], history: str | int | dt.timedelta | None = None
) -> TableSchema:
    """The schema of a row table. Raises SchemaError, InvalidArgument."""
    _check_columns(name, key=key, columns=columns)
    if not key:
        raise SchemaError(f"table {name!r} needs at least one key column")
    built = declared_columns(columns)
    check_disjoint(name, [*key, *columns])
    return TableSchema(
        name=check_name(name, "table"),
        kind="row",
        key=tuple(_value_column(n, t, "key column") for n, t in key.items()),
        columns=tuple(built),
        history_us=None if history is None else parse_duration_us(history, "history"),
    )


def _check_columns(table: str, **parts: object) -> None:
    check_name(table, "table")
    for part, given in parts.items():
        if not isinstance(given, Mapping):
            raise SchemaError(f"{part} of table {table!r} maps column names to types, and is not {shown(given)}")


def declared_columns(columns: Mapping[str, object]) -> list[Column]:
    """The columns of a row table, or more of them. Raises SchemaError."""
    built = []
    for column_name, declared in columns.items():
        check_name(column_name, "column")
        if isinstance(declared, OperatorCall):
            if declared.where is not None or declared.expression is not None:
                raise SchemaError(
                    f"column {column_name!r} of a table has a type and an operator, like kivi.sum('int64'): a where= "
                    "and a source are for the measures of aggregates"
                )
            argument = "int64" if declared.operator == "count" else declared.argument
            built.append(delta_column(column_name, declared, ColumnType.parse(argument)))
        else:
            built.append(_value_column(column_name, declared, "column"))
    return built


def with_columns(schema: TableSchema, columns: Mapping[str, object]) -> TableSchema:
    """A row table or an event table with more columns. Raises SchemaError, InvalidArgument."""
    if schema.kind == "aggregate":
        raise InvalidArgument(f"{schema.name!r} is an aggregate: measures are added to it, by alter_aggregate")
    if schema.kind == "view":
        raise InvalidArgument(f"{schema.name!r} is a view: drop it, and create it again with the columns it is to have")
    if not isinstance(columns, Mapping) or not columns:
        raise SchemaError(
            f"add_columns maps the names of new columns of {schema.name!r} to types, and is {shown(columns)}"
        )
    if schema.kind == "event":
        built = [_value_column(n, t, "column") for n, t in columns.items()]
        check_not_hidden(f"event table {schema.name!r}", columns)
    else:
        built = declared_columns(columns)
    _check_new(schema, columns)
    alteration = Alteration(len(schema.columns))
    return replace(schema, columns=(*schema.columns, *built), alterations=(*schema.alterations, alteration))


def with_measures(
    schema: TableSchema,
    source: TableSchema,
    measures: Mapping[str, OperatorCall],
    derived: Mapping[str, str] | None = None,
    backfill: bool = True,
) -> TableSchema:
    """An aggregate of ``source`` with more measures; ``backfill``: which are being built from then on.

    Raises SchemaError, InvalidArgument.
    """
    if schema.kind != "aggregate":
        raise InvalidArgument(f"{schema.name!r} is no aggregate: columns are added to it, by alter_table")
    if schema.is_building:
        raise InvalidArgument(
            f"aggregate {schema.name!r} is still being built, or measures are being added to it: wait until it is done"
        )
    if not isinstance(measures, Mapping) or not measures:
        raise SchemaError(f"add_measures maps the names of new measures of {schema.name!r} to kivi.sum and others")
    columns, built = measured(source, measures)
    _check_order(source, measures)
    _check_new(schema, [*measures, *(derived or {})])
    more = derived_columns((*schema.key, *schema.shown_columns, *columns), derived)
    alteration = Alteration(
        len(schema.columns),
        len(schema.derived),
        state="building" if backfill else "ready",
        backfilled=backfill,
        more=more if backfill else (),
    )
    return replace(
        schema,
        columns=(*schema.columns, *columns),
        measures=(*schema.measures, *built),
        observes=tuple(sorted((dict(schema.observes) | dict(observed_columns(source, built))).items())),
        event_time=schema.event_time or (source.event_time if any(c.state is not None for c in columns) else None),
        derived=schema.derived if backfill else (*schema.derived, *more),
        alterations=(*schema.alterations, alteration),
    )


def _check_new(schema: TableSchema, names: Iterable[str]) -> None:
    check_disjoint(schema.name, names)
    known = set(schema.output_names)
    if (twice := next((name for name in names if name in known), None)) is not None:
        raise SchemaError(f"table {schema.name!r} has a column {twice!r} already: choose another name")


INDEXED: Final = frozenset({"string", "bytes", "int64"})
"""Of columns of these types events can be looked for by an index."""


def event_table_schema(
    name: str,
    event_time: str,
    columns: Mapping[str, object],
    retention: str | int | dt.timedelta | None = None,
    local: str | int | dt.timedelta | None = None,
    cold: str | None = None,
    index: Sequence[str] = (),
    shard_by: Sequence[str] = (),
    expires: str | None = None,
) -> TableSchema:
    """The schema of an append-only event table; ``event_time`` names one of its timestamp columns.

    ``index``: columns of text, bytes or integers by whose values events are looked for, as a trace id is. Settled files
    get a filter of each, as they do of others that hardly repeat.
    ``shard_by``: columns of the same types by whose values a cluster spreads the events over its nodes.
    ``local`` and ``cold`` ("30d", "s3://bucket/prefix") come together: settled files of older events lie there.
    ``expires``: a timestamp column that says of each event when it ends; null: never.
    """
    _check_columns(name, columns=columns)
    if (local is None) != (cold is None):
        raise InvalidArgument(
            f"event table {name!r}: local= and cold= come together, as in local='30d', cold='s3://...'"
        )
    built = tuple(_value_column(n, t, "column") for n, t in columns.items())
    check_not_hidden(f"event table {name!r}", columns)
    by_name = {c.name: c for c in built}
    moments = [c.name for c in built if c.type.name == "timestamp"]
    if not is_among(event_time, moments):
        raise SchemaError(
            f"event table {name!r}: event_time must name one of its timestamp columns, not {shown(event_time)}"
        )
    index = name_list(index, f"event table {name!r}: index")
    shard_by = name_list(shard_by, f"event table {name!r}: shard_by")
    for option, named in (("index", index), ("shard_by", shard_by)):
        for column in named:
            if column not in by_name or by_name[column].type.name not in INDEXED:
                raise SchemaError(
                    f"event table {name!r}: {option}= names columns of text, bytes or int64 of the table, not "
                    f"{column!r}"
                )
    if expires is not None and not is_among(expires, moments):
        raise SchemaError(f"event table {name!r}: expires must name one of its timestamp columns, not {shown(expires)}")
    if expires is not None and shard_by:
        raise SchemaError(
            f"event table {name!r}: events that expire lie on every node: leave shard_by= or expires= out"
        )
    return TableSchema(
        name=check_name(name, "table"),
        kind="event",
        key=(),
        columns=built,
        event_time=event_time,
        index=tuple(dict.fromkeys(index)),
        shard_by=tuple(dict.fromkeys(shard_by)),
        retention_us=None if retention is None else parse_duration_us(retention, "retention"),
        local_us=None if local is None else parse_duration_us(local, "local"),
        cold=None if cold is None else _object_store(name, cold),
        expires=expires,
    )


def _object_store(name: str, url: object) -> str:
    """The URL of an object store, as it is kept. Raises InvalidArgument for one that cannot be, or has secrets."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
    except ValueError:
        parts = urlsplit("")
    if not parts.scheme or not (parts.netloc or parts.path.strip("/")) or ".." in parts.path.split("/"):
        raise InvalidArgument(
            f"event table {name!r}: cold= is the URL of an object store, such as 's3://bucket/prefix' or "
            f"'file:///mnt/archive', not {shown(url)}"
        )
    if any(map(str.isspace, str(url))):
        raise InvalidArgument(f"event table {name!r}: cold= has a space in it, which a URL writes as %20, in {url!r}")
    secret = {"access_key", "secret_key", "session_token"} & {key for key, _ in parse_qsl(parts.query)}
    if parts.password is not None or secret:
        raise InvalidArgument(
            f"event table {name!r}: cold= has a secret in it, which whoever may describe the table could read: "
            "give it to the process, in AWS_SECRET_ACCESS_KEY for example"
        )
    return parts._replace(path=parts.path.rstrip("/"), fragment="").geturl()


def aggregate_schema(
    name: str,
    source: TableSchema,
    group_by: Sequence[str | TimeSlot],
    measures: Mapping[str, OperatorCall],
    derived: Mapping[str, str] | None = None,
    history: str | int | dt.timedelta | None = None,
    retention: str | int | dt.timedelta | None = None,
) -> TableSchema:
    """The schema of an aggregate table over the event table ``source``. Raises SchemaError, InvalidArgument."""
    if source.kind != "event":
        raise SchemaError(
            f"aggregate {name!r}: its source {source.name!r} is a {source.kind} table, not an event table"
        )
    if not group_by or not measures:
        raise SchemaError(f"aggregate {name!r} needs at least one group key and one measure")
    groups, keys = grouped(f"aggregate {name!r}", source, group_by)
    if [(group.source, group.slot) for group in groups[: len(source.shard_by)]] != [(n, None) for n in source.shard_by]:
        raise SchemaError(
            f"aggregate {name!r}: its source {source.name!r} is sharded by {', '.join(source.shard_by)}, so group by "
            "these first: then its rows lie with their events"
        )
    if retention is not None and slot_index(groups) is None:
        raise SchemaError(
            f"aggregate {name!r} has no time slot in its key, and retention forgets rows by their slots: group by "
            'kivi.time_slot("ts", "5m"), or leave retention out'
        )
    columns, built = measured(source, measures)
    _check_order(source, measures)
    every = [*(k.name for k in keys), *measures, *(derived or {})]
    check_disjoint(name, every)
    check_not_hidden(f"aggregate {name!r}", every)
    return TableSchema(
        name=check_name(name, "table"),
        kind="aggregate",
        key=tuple(keys),
        columns=tuple(columns),
        history_us=None if history is None else parse_duration_us(history, "history"),
        retention_us=None if retention is None else parse_duration_us(retention, "retention"),
        source=source.name,
        source_id=source.id,
        shard_by=source.shard_by,
        group_by=tuple(groups),
        measures=tuple(built),
        observes=observed_columns(source, built),
        event_time=source.event_time if any(c.state is not None for c in columns) else None,
        derived=derived_columns((*keys, *columns), derived),
    )


def grouped(what: str, source: TableSchema, group_by: Iterable[str | TimeSlot]) -> tuple[list[GroupKey], list[Column]]:
    """The groups that columns and slots of a source make, and the key columns that they are. Raises SchemaError."""
    groups, keys = [], []
    for item in group_by:
        if isinstance(item, TimeSlot):
            column = source.column(item.column)
            if column.type.name != "timestamp":
                raise SchemaError(f"{what}: time_slot needs a timestamp, {item.column!r} is {column.type}")
            groups.append(GroupKey.of_slot(check_name(item.name, "group key"), item.column, item.slot))
        else:
            column = source.column(item)
            groups.append(GroupKey(item, item))
        keys.append(Column(groups[-1].name, column.type))
    return groups, keys


def _check_order(source: TableSchema, measures: Mapping[str, OperatorCall]) -> None:
    """Raises SchemaError for a measure of the total order where a column has the name of the commits in it."""
    for name, call in measures.items():
        if call.operator in TIMED and COMMIT_TS in source.by_name:
            raise SchemaError(
                f"measure {name!r}: {call.operator} orders events by their commits too, which the column "
                f"{COMMIT_TS!r} of {source.name!r} would hide: name that otherwise"
            )


def derived_columns(columns: Sequence[Column], derived: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    expressions = []
    for derived_name, text in (derived or {}).items():
        check_name(derived_name, "derived column")
        parse_expression(text, {c.name: c.type for c in columns})
        expressions.append((derived_name, text))
    return tuple(expressions)
