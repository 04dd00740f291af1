"""One event packed at a time says what ``ColumnType.to_stored`` says: same values, same refusals, for every type."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import math
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kivi import errors
from kivi.arrow.columns import stored_rows
from kivi.arrow.packed_events import EventRows
from kivi.arrow.records import event_batch
from kivi.model.declarations import event_table_schema
from kivi.model.schema import Column, TableSchema
from kivi.model.types import ColumnType, check_moment

TYPES = ["bool", "int64", "float64", "decimal(9,2)", "string", "bytes", "timestamp"]
NOW = dt.datetime(2024, 5, 1, 12, 30, 0, 123456, tzinfo=dt.UTC)


class Text(str):
    __slots__ = ()


class Color(str, enum.Enum):  # noqa: UP042 - its str() is not its text
    RED = "red"


class Later(dt.datetime):
    pass


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**63) - 2, 2**63 + 1),
    st.sampled_from([-(2**63) - 1, -(2**63), 2**63 - 1, 2**63]),
    st.floats(),
    st.sampled_from([-0.0, math.nan, math.inf, -math.inf, 1.5, 2.0]),
    st.text(),
    st.text(st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010)),  # lone surrogates among them
    st.binary(),
    st.binary().map(bytearray),
    st.binary().map(lambda value: memoryview(value)),
    st.datetimes(timezones=st.one_of(st.none(), st.just(dt.UTC), st.timezones())),
    st.builds(lambda hours: NOW.astimezone(dt.timezone(dt.timedelta(hours=hours))), st.integers(-23, 23)),
    st.decimals(),
    st.decimals(-10_000_000, 10_000_000, places=2),
    st.integers(-128, 127).map(np.int8),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.booleans().map(np.bool_),
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.text().map(Text),
    st.sampled_from(
        [
            Color.RED,
            Later(2024, 1, 1, tzinfo=dt.UTC),
            Later(2024, 1, 1),
            NOW.astimezone(ZoneInfo("Asia/Kathmandu")),
            dt.date(2024, 1, 1),
            dt.timedelta(1),
            pd.Timestamp("2024-01-01T00:00:00.123456Z"),
            np.datetime64("2024-01-01"),
            np.array([1]),
            np.str_("text"),
            object(),
            [],
            {},
        ]
    ),
)


def schema_of(*columns: tuple[str, str]) -> TableSchema:
    return event_table_schema("ev", event_time="ts", columns={**dict(columns), "ts": "timestamp"})


def appended(schema: TableSchema, *events: dict[str, Any], value_bytes_max: int = 1 << 20) -> Any:
    """The Arrow batch of the events."""
    rows = EventRows(schema, value_bytes_max)
    append = rows.compiled(lambda row: row, lambda row, size: row)
    return rows.batch([append(**event) for event in events]).batch


def outcome(function: Any) -> Any:
    try:
        return function()
    except errors.KiviError as error:
        return type(error), str(error)


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)  # -0.0 is not 0.0 here


@pytest.mark.parametrize("type_", TYPES)
@given(value=VALUES)
@example(value=True)
@example(value="\ud800")
@example(value="é" * 300)
def test_each_value_is_stored_or_refused_as_to_written_says(type_, value):
    schema = schema_of(("a", "int64"), ("v", type_), ("z", "string"))
    expected = outcome(lambda: schema.by_name["v"].type.to_written(value, "column 'v'"))
    found = outcome(lambda: stored_rows(appended(schema, {"a": 1, "v": value, "z": "z", "ts": 7}))[0]["v"])
    assert same(found, expected)


@given(st.lists(st.tuples(st.sampled_from(TYPES), VALUES), max_size=12), VALUES)
def test_whole_events_are_stored_or_refused_as_to_stored_says(cells, time):
    columns = [(f"c{i}", type_) for i, (type_, _) in enumerate(cells)]
    schema = schema_of(*columns)
    event = {f"c{i}": value for i, (_, value) in enumerate(cells)} | {"ts": time}

    def expected() -> dict[str, Any]:
        if time is None:
            raise errors.SchemaError
        row = {c.name: c.type.to_stored(event[c.name], f"column {c.name!r}") for c in schema.columns}
        check_moment(row["ts"], "column 'ts'")
        return row

    first, found = outcome(expected), outcome(lambda: stored_rows(appended(schema, event))[0])
    if isinstance(first, dict):
        assert same(found, first)
    else:
        assert isinstance(found, tuple)  # which of several faults is named is not promised


GOOD = {
    "bool": st.booleans(),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float64": st.floats(allow_nan=False, allow_infinity=False),
    "decimal(9,2)": st.decimals(-9_999_999, 9_999_999, places=2),
    "string": st.text(st.characters(codec="utf-8")),
    "bytes": st.binary(),
    "timestamp": st.datetimes(timezones=st.just(dt.UTC)),
}


@given(st.lists(st.fixed_dictionaries({t: st.none() | GOOD[t] for t in TYPES} | {"ts": GOOD["timestamp"]}), min_size=1))
def test_a_batch_is_what_the_same_dicts_make(events):
    schema = schema_of(*((f"a_{type_.partition('(')[0]}", type_) for type_ in TYPES))
    named = [{"ts" if k == "ts" else f"a_{k.partition('(')[0]}": v for k, v in e.items()} for e in events]
    wanted = event_batch(schema, named)
    batch = appended(schema, *named)
    batch.validate(full=True)
    assert batch.schema == wanted.schema
    assert same(stored_rows(batch), stored_rows(wanted))


def test_nulls_of_more_columns_than_a_word_has_bits():
    names = [f"c{i}" for i in range(150)]
    schema = schema_of(*((name, "int64") for name in names))
    events = [{"ts": 1, **{name: i for i, name in enumerate(names) if (i + row) % 3}} for row in range(5)]
    assert stored_rows(appended(schema, *events)) == [
        {"ts": 1, **{name: event.get(name) for name in names}} for event in events
    ]


AWKWARD = ["from", "None", "self", "type", "len", "int", "append", "rows", "_kivi_row", "_kivi_type", "__class__"]


def test_columns_may_have_any_name():
    schema = schema_of(*((name, "int64") for name in AWKWARD))
    event = {name: i for i, name in enumerate(AWKWARD)} | {"ts": 1}
    assert stored_rows(appended(schema, event, {"ts": 2})) == [event, dict.fromkeys(AWKWARD) | {"ts": 2}]
    with pytest.raises(errors.SchemaError, match="column 'type'"):
        appended(schema, {"ts": 1, "type": "x"})


def test_a_name_that_a_server_made_up_is_never_code():
    hostile = "a=__import__('os').abort()"
    columns = (Column(hostile, ColumnType("int64")), Column("ts", ColumnType("timestamp")))
    schema = TableSchema("ev", "event", (), columns, event_time="ts")
    assert stored_rows(appended(schema, {hostile: 5, "ts": 1})) == [{hostile: 5, "ts": 1}]


@pytest.mark.parametrize("event", [{"v": 1}, {"v": 1, "ts": None}, {}])
def test_an_event_needs_its_event_time(event):
    with pytest.raises(errors.SchemaError, match="needs its event time 'ts'"):
        appended(schema_of(("v", "int64")), event)


def test_an_unknown_column_is_named():
    with pytest.raises(errors.SchemaError, match="'ev' has no column 'nonsense'; it has ts, v"):
        appended(schema_of(("v", "int64")), {"ts": 1, "nonsense": None})


def test_only_large_events_are_put_as_large_and_a_value_has_a_limit():
    rows = EventRows(schema_of(("s", "string"), ("b", "bytes")), 1_000)
    append = rows.compiled(lambda row: ("small", 0), lambda row, size: ("large", size))
    assert append(ts=1, s="x" * 156, b=bytes(100)) == ("small", 0)
    assert append(ts=1, s="x" * 157, b=bytes(100)) == ("large", 257)
    assert append(ts=1, s="é" * 200) == ("large", 400)
    assert append(ts=1, s="x" * 1_000, b=bytes(1_000)) == ("large", 2_000)
    for bad in ({"s": "x" * 1_001}, {"s": "é" * 501}, {"b": bytes(1_001)}):
        with pytest.raises(errors.ResourceExhausted, match="over the limit of 1000"):
            append(ts=1, **bad)
    tight = EventRows(schema_of(("s", "string")), 10).compiled(lambda row: row, lambda row, size: row)
    with pytest.raises(errors.ResourceExhausted):
        tight(ts=1, s="x" * 11)


def test_a_batch_of_another_generation_of_the_table_is_looked_at_again():
    old, new = schema_of(("v", "int64")), schema_of(("v", "string"))
    rows = EventRows(old, 1_000)
    batch = rows.batch([rows.compiled(lambda row: row, lambda row, size: row)(v=1, ts=1)])
    assert event_batch(old, batch) is batch.batch
    with pytest.raises(errors.SchemaError, match="column 'v' is string"):
        event_batch(new, batch)
    assert isinstance(event_batch(schema_of(("v", "int64"), ("w", "int64")), batch), pa.RecordBatch)


def test_the_callers_decimal_context_changes_nothing():
    with decimal.localcontext(prec=2):
        batch = appended(schema_of(("d", "decimal(9,2)")), {"ts": 1, "d": decimal.Decimal("1234567.89")})
    assert stored_rows(batch)[0]["d"] == 123456789
