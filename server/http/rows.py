"""Rows over HTTP, for whoever speaks no gRPC: Grafana's Infinity data source, a spreadsheet, curl.

::

    GET /rows?table=endpoint_5m&prefix=251&from=1767225600000&to=2026-01-02T00:00:00Z&step=1h&limit=1000
    GET /v1/tables/endpoint_5m/rows?prefix=251&from=1767225600000&step=1h
    Authorization: Bearer TOKEN

====================== =============================================================================================
table                  the table (required, of /rows)
key                    the whole key of one row, one parameter a column, in order; 404 if there is none
prefix                 the first key columns, one parameter each, in order; of either ``null`` is null, and quotes
                       around a text are left out: ``'null'`` is that text, and ``"'x'"`` one with quotes
from, to               of the time, ``to`` exclusive: milliseconds since 1970 (Grafana's ``${__from}``), or ISO 8601;
                       numbers that must be seconds are refused
step                   aggregates: slots of so long (``5m``, ``1h``) instead of the table's own, a multiple of these
by                     aggregates: combined to these key columns, names with commas, none (``by=``): all in one;
                       without step there is no slot
last                   aggregates: with by or step, the time up to the end of the newest slot (``15m``) that is not of
                       the future, in place of from and to
tz                     the time zone of step, default the table's
columns                names with commas; default all
where                  a predicate: ``resp_time_us > 1000 & customer == 'acme'``
order_by               columns with commas, ``-slowest`` from the largest down; not with step or by
limit                  rows at most, default 10,000, up to 100,000; ``X-Kivi-More: true`` says that there are more
as_of                  a commit timestamp, or a moment in ISO 8601
min_snapshot           a commit timestamp that the snapshot has to have: that of the caller's own write
format                 of /rows json (default): a list of flat objects; csv: the same with a header line. Elsewhere
                       what Accept says, or json, ndjson, csv, arrow here
====================== =============================================================================================

Quantiles are ``{"count": 1000, "p50": 344.8, "p95": 651.0, "p99": 689.6}`` (any other one as a column:
``columns=quantile(latency, 0.999)``), the largest and smallest values a list, the most frequent ones a list of
``[value, count]``, with ``[null, count]`` of the others at its end if there are any; in CSV all of these as JSON.

The time column is the event time, or the last timestamp in the key. Times are ISO 8601 in UTC, bytes hexadecimal. All
of an answer is one snapshot, whose timestamp ``X-Kivi-Snapshot`` tells. Its ``ETag`` is the last change of the table,
or of what a predicate may mean by ``under``: who sends it as ``If-None-Match`` is told 304 while there is no newer one.
Errors are ``{"error": ..., "reason": ...}`` with the status that fits.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

import pyarrow as pa
from kivi_server.sessions import Sessions

from kivi.api.arguments import OrderedScanArguments, RollupArguments, type_of
from kivi.arrow.columns import arrow_schema
from kivi.errors import InvalidArgument, NotFound, ResourceExhausted
from kivi.model.expressions import Expr
from kivi.model.given import shown
from kivi.model.predicate_text import parse_moment, parse_value, split_names, where
from kivi.model.rollups import rolled_outputs, stored_slot
from kivi.model.schema import TableSchema
from kivi.model.slots import Slot
from kivi.model.tenants import Tenant
from kivi.model.types import MOMENT_MAX_US, MOMENT_MIN_US, check_unit
from kivi.store.facade import Lease, Scan, Store

__all__ = [
    "ANSWER_BYTES_MAX",
    "LIMIT",
    "LIMIT_MAX",
    "TIMEOUT_S",
    "Asked",
    "Found",
    "begun",
    "gathered",
    "moment_us",
    "names_of",
    "parameters",
    "prefix_of",
    "read",
    "slot_from",
    "whole",
]

TIMEOUT_S: Final = 10.0
"""For a snapshot that is to come."""
ANSWER_BYTES_MAX: Final = 64 << 20
"""Of an answer's rows in memory."""
LIMIT: Final = 10_000
LIMIT_MAX: Final = 100_000
_PARAMETERS: Final = frozenset(
    "key prefix from to last step columns where order_by limit as_of min_snapshot format by tz".split()  # noqa: SIM905
)
_SEVERAL: Final = ("key", "prefix")


def parameters(
    query: str, known: frozenset[str], several: Sequence[str]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Those that are given, by name, without empty ones (but ``by``, of no column); and those that may be given several
    times, in order.

    Raises InvalidArgument for one that is not known, or given twice.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=64)
    except ValueError:
        raise InvalidArgument("the query is not name=value&name=value") from None
    given: dict[str, str] = {}
    lists: dict[str, list[str]] = {name: [] for name in several}
    for name, text in pairs:
        if name not in known:
            raise InvalidArgument(f"there is no parameter {shown(name)}; there are {', '.join(sorted(known))}")
        if name in lists:
            lists[name].append(text)
        elif name in given:
            raise InvalidArgument(f"parameter {shown(name)} is given twice")
        elif text or name == "by":
            given[name] = text
    return given, lists


class Asked:
    """The parameters, of a table or, where they name it, of ``table``. Raises InvalidArgument for one that is not
    known."""

    def __init__(self, query: str, table: str | None = None) -> None:
        known = _PARAMETERS if table is not None else _PARAMETERS | {"table"}
        self.given, self.several = parameters(query, known, _SEVERAL)
        if table is None and "table" not in self.given:
            raise InvalidArgument("parameter table is required")
        self.table = self.given["table"] if table is None else table
        if self.several["key"] and self.several["prefix"]:
            raise InvalidArgument("a key is whole: leave prefix out")
        self.prefix = self.several["key"] or self.several["prefix"]
        limit = whole(text := self.given.get("limit", str(LIMIT)))
        if limit is None or not 0 < limit <= LIMIT_MAX:
            raise InvalidArgument(f"parameter limit is a number of rows from 1 to {LIMIT_MAX:,}, not {shown(text)}")
        self.limit = limit
        self.min_snapshot: int | None = None
        if (text := self.given.get("min_snapshot", "")) and (ts := whole(text)) is None:
            raise InvalidArgument(f"parameter min_snapshot is a commit timestamp, not {shown(text)}")
        elif text:
            self.min_snapshot = ts
        self.names: tuple[str, ...] = ()

    @property
    def is_now(self) -> bool:
        """Whether it asks for the newest snapshot, which is there."""
        return "as_of" not in self.given and self.min_snapshot is None

    @property
    def question(self) -> tuple[Any, ...]:
        """What it asks for, without the format: two that are equal have one answer at one snapshot."""
        given = {name: text for name, text in self.given.items() if name not in ("format", "as_of", "min_snapshot")}
        return (self.table, *self.prefix), bool(self.several["key"]), tuple(sorted(given.items()))


def moment_us(given: Mapping[str, str], name: str) -> int | None:
    """A parameter that is a moment, in microseconds. Raises InvalidArgument."""
    text = given.get(name)
    if text is None:
        return None
    if (number := whole(text.removeprefix("-"))) is not None:
        if not text.startswith("-"):
            check_unit([number], f"parameter {name}", "milliseconds")
        us = number * (-1_000 if text.startswith("-") else 1_000)
        if not MOMENT_MIN_US <= us <= MOMENT_MAX_US:
            raise InvalidArgument(
                f"parameter {name}: {text} milliseconds since 1970 are outside the years 1 to 9999: "
                "divide microseconds by 1,000, or write a time like 2023-11-16T18:00:00Z"
            )
        return us
    return (parse_moment(text, f"parameter {name}") - _EPOCH) // dt.timedelta(microseconds=1)


_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def whole(text: str) -> int | None:
    """A whole number of a commit timestamp's size; None if it is none."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
    return number if number is None or number < 1 << 63 else None


class Found(NamedTuple):
    """``table``: the rows, in Arrow; ``ts``: their snapshot; ``more``: there are others beyond the limit."""

    table: Any
    ts: int
    more: bool


def read(sessions: Sessions, asked: Asked, tenant: Tenant | None = None) -> Found:
    """In a thread: it may take long. Raises what the request deserves."""
    store = sessions.store
    lease = begun(store, asked.given.get("as_of"), asked.min_snapshot, tenant)
    try:
        schema = store.table(asked.table, lease)
        if _rolls_up(schema, asked):
            wanted = _rolled(schema, asked)
            assert wanted.rollup is not None
            types = arrow_schema(schema, rolled_outputs(schema, wanted.rollup))
        else:
            names = asked.given.get("columns")
            asked.names = schema.output_columns(None if names is None else split_names(names))
            wanted = _wanted(schema, asked)
            types = arrow_schema(schema, asked.names)
        table = gathered(store.scan(lease, schema, wanted), types).select(list(asked.names))
        if asked.several["key"] and not table.num_rows:
            raise NotFound(f"table {asked.table!r} has no row with this key", table=asked.table)
        return Found(table.slice(0, asked.limit), lease.ts, table.num_rows > asked.limit)
    finally:
        store.release(lease)


def gathered(batches: Any, types: Any) -> Any:
    """As one Arrow table. Raises ResourceExhausted for more than an answer may take."""
    kept, nbytes = [], 0
    for batch in batches:
        nbytes += batch.nbytes
        if nbytes > ANSWER_BYTES_MAX:
            raise ResourceExhausted(
                f"the answer takes more than {ANSWER_BYTES_MAX:,} bytes: ask for fewer rows or columns at once",
                limit="http_answer_bytes",
                maximum=ANSWER_BYTES_MAX,
            )
        kept.append(batch)
    return pa.Table.from_batches(kept, types if not kept else None)


def begun(store: Store, as_of: str | None, min_snapshot: int | None, tenant: Tenant | None = None) -> Lease:
    """The snapshot: of a commit timestamp or a moment, as text, or the newest one from ``min_snapshot`` on."""
    if as_of is None:
        return store.begin(min_snapshot=min_snapshot, timeout_s=TIMEOUT_S, tenant=tenant)
    if (ts := whole(as_of)) is not None:
        return store.begin(as_of_ts=ts, min_snapshot=min_snapshot, timeout_s=TIMEOUT_S, tenant=tenant)
    moment = parse_moment(as_of, "parameter as_of")
    as_of_us = (moment - _EPOCH) // dt.timedelta(microseconds=1)
    return store.begin(as_of_us=as_of_us, min_snapshot=min_snapshot, timeout_s=TIMEOUT_S, tenant=tenant)


def _where(schema: TableSchema, asked: Asked) -> Expr | None:
    if "where" not in asked.given:
        return None
    types = {name: str(type_of(schema, name)) for name in schema.output_names}
    return where(asked.given["where"], types, "parameter where")


def _wanted(schema: TableSchema, asked: Asked) -> Scan:
    time_column = _time_column(schema)
    low, high = moment_us(asked.given, "from"), moment_us(asked.given, "to")
    if time_column is None and not (low is None and high is None):
        raise InvalidArgument(f"table {schema.name!r} has no time in its key: leave out from and to")
    predicate = _where(schema, asked)
    start: tuple[int] | None = None
    end: tuple[int] | None = None
    if schema.kind == "event":
        if asked.prefix:
            raise InvalidArgument(f"event table {schema.name!r} has no row keys: use where, or from and to")
        start, end = ((bound,) if bound is not None else None for bound in (low, high))
    else:
        for op, bound in ((">=", low), ("<", high)):
            if bound is not None:
                term = Expr(op, time_column or "", bound)
                predicate = term if predicate is None else predicate & term
    prefix, limit = _prefix(schema, asked), asked.limit + 1
    order = split_names(asked.given["order_by"]) if "order_by" in asked.given else ()
    return OrderedScanArguments(schema.name, prefix, start, end, predicate, asked.names, limit, order_by=order).bound(
        schema
    )


def _prefix(schema: TableSchema, asked: Asked) -> Sequence[Any]:
    if asked.several["key"] and len(asked.prefix) != len(schema.key):
        raise InvalidArgument(f"the key of {schema.name!r} is {', '.join(schema.key_names)}: give a key for each")
    return prefix_of(schema, asked.prefix)


def prefix_of(schema: TableSchema, texts: Sequence[str]) -> Sequence[Any]:
    """The first key columns. Raises InvalidArgument."""
    if len(texts) > len(schema.key):
        raise InvalidArgument(
            f"the key of {schema.name!r} has {len(schema.key)} columns: give at most as many prefixes"
        )
    return [
        parse_value(str(column.type), text, f"prefix {column.name}")
        for column, text in zip(schema.key, texts, strict=False)
    ]


def _time_column(schema: TableSchema) -> str | None:
    if schema.kind == "event":
        return schema.event_time
    return next((column.name for column in reversed(schema.key) if column.type.name == "timestamp"), None)


# -- rollups ------------------------------------------------------------------------------------------------


def _rolls_up(schema: TableSchema, asked: Asked) -> bool:
    """Whether rows are combined: not if the step is the table's own."""
    given = next((name for name in ("by", "step", "tz", "last") if name in asked.given), None)
    if given is not None and schema.kind != "aggregate":
        raise InvalidArgument(f"parameter {given} is for aggregates, and {schema.name!r} is none")
    stored = stored_slot(schema)
    if asked.given.keys() & {"by", "last"} or "step" not in asked.given or stored is None:
        return bool(asked.given.keys() & {"by", "step", "last"})
    return Slot.parse(asked.given["step"], asked.given.get("tz", stored[2].zone or None)) != stored[2]


def _rolled(schema: TableSchema, asked: Asked) -> Scan:
    """The rollup by the key columns asked for, or by all that are no slot."""
    if "order_by" in asked.given:
        raise InvalidArgument("rows that are combined come in the order of by and slot: leave order_by out")
    plain = [group.name for group in schema.group_by if group.slot is None]
    by = names_of(asked.given["by"]) if "by" in asked.given else plain
    given = asked.given.get("columns")
    names = None if given is None else [name for name in split_names(given) if name not in schema.key_names]
    start, end = (slot_from(schema, moment_us(asked.given, name)) for name in ("from", "to"))
    where, prefix = _where(schema, asked), _prefix(schema, asked)
    step, tz = asked.given.get("step"), asked.given.get("tz")
    last = asked.given.get("last")
    wanted = RollupArguments(schema.name, by, step, start, end, prefix, where, names, tz=tz, last=last).bound(schema)
    assert wanted.rollup is not None
    outputs = rolled_outputs(schema, wanted.rollup)
    asked.names = outputs if given is None else tuple(split_names(given))
    if unknown := [name for name in asked.names if name not in outputs]:
        raise InvalidArgument(f"{shown(unknown[0])} is no column of this rollup: it has {', '.join(outputs)}")
    return replace(wanted, limit=asked.limit + 1)


def names_of(text: str) -> list[str]:
    return split_names(text) if text else []


def slot_from(schema: TableSchema, moment_us: int | None) -> int | None:
    """Where the first slot begins that does not begin before a moment."""
    stored = stored_slot(schema)
    if moment_us is None or stored is None:
        return moment_us
    start = stored[2].start(moment_us)
    return start if start == moment_us else stored[2].end(start)
