"""Schemas: the table of ``kivi/model/types.py`` line by line, the shapes of keys and tables, derived columns.

A value goes in as the caller wrote it and comes out the same, or is refused in a sentence that names it. Nothing is
rounded, whatever the caller's decimal context; nothing a caller can hand in raises anything but a KiviError.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime as dt
import decimal
import enum
import math
import pickle
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi.errors import InvalidArgument, KiviError, OutOfRange, ResourceExhausted, SchemaError
from kivi.model.declarations import aggregate_schema, event_table_schema, parse_duration_us, row_table_schema, time_slot
from kivi.model.derived_columns import evaluator, parse_expression
from kivi.model.schema import COLUMNS_MAX, Column, OperatorCall, TableSchema
from kivi.model.types import INT64_MAX, INT64_MIN, ColumnType, shown

T = ColumnType.parse
D = decimal.Decimal
HUGE = 10**5_000  # Python refuses to write it out
DAY_US = 86_400_000_000

AB = dict.fromkeys("ab", ColumnType("int64"))


class Text(str, enum.Enum):  # noqa: UP042  str() of a StrEnum is its value; of this one it is Text.RED
    RED = "red"


class Number(enum.IntEnum):
    TWO = 2


class NoOffset(dt.tzinfo):
    """A time zone that does not say how far it is from UTC: Python calls such a datetime naive."""

    def utcoffset(self, _: dt.datetime | None) -> None:
        return None

    dst = utcoffset

    def tzname(self, _: dt.datetime | None) -> str:
        return "nowhere"

    def __repr__(self) -> str:  # part of a test's name, which is the same in every run
        return "NoOffset()"


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


# -- types ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["bool", "int64", "float64", "string", "bytes", "timestamp", "decimal(12,2)"])
def test_a_type_is_written_as_it_is_read(text: str) -> None:
    assert str(T(text)) == text
    assert T(f"  {text.upper()} ") == T(text) == T(T(text))


def test_a_decimal_may_hold_blanks_and_only_fractions() -> None:
    assert T("decimal( 18 , 18 )") == ColumnType("decimal", 18, 18)
    assert T("decimal(1,0)") == ColumnType("decimal", 1, 0)


@pytest.mark.parametrize(
    "text",
    [
        "int32", "", "decimal", "decimal(5)", "decimal(5,2)x", "decimal(-5,2)", "decimal(0,0)", "decimal(19,2)",
        "decimal(5,6)", f"decimal({'1' * 5_000},2)", "decimal(\u0663,1)", 5, None, HUGE, b"int64", int, Unprintable(),
    ],
    ids=shown,
)  # fmt: skip
def test_what_is_not_a_type(text: object) -> None:
    with pytest.raises(SchemaError):
        T(text)


# Of every type: what a caller may give, and its stored form.
STORED: list[tuple[str, Any, Any]] = [
    ("bool", True, True),
    ("bool", np.False_, False),
    ("int64", INT64_MIN, INT64_MIN),
    ("int64", INT64_MAX, INT64_MAX),
    ("int64", np.int8(-1), -1),
    ("int64", np.uint64(7), 7),
    ("int64", np.array(3), 3),
    ("int64", Number.TWO, 2),
    ("float64", 0.1, 0.1),
    ("float64", -0.0, 0.0),
    ("float64", np.float64(-0.0), 0.0),
    ("float64", np.float32(0.1), 0.10000000149011612),
    ("float64", np.float16(1.5), 1.5),
    ("float64", 3, 3.0),
    ("float64", np.int64(3), 3.0),
    ("float64", 2**60, 2.0**60),
    ("float64", np.uint64(2**63), 2.0**63),
    ("float64", 5e-324, 5e-324),
    ("decimal(5,2)", D("1.20"), 120),
    ("decimal(5,2)", D("-1.2"), -120),
    ("decimal(5,2)", "999.99", 99_999),
    ("decimal(5,2)", D("1E+2"), 10_000),
    ("decimal(5,2)", 12, 1_200),
    ("decimal(5,2)", np.int32(-3), -300),
    ("decimal(5,2)", D("1." + "0" * 200), 100),
    ("decimal(5,2)", D("-0"), 0),
    ("decimal(5,2)", D("0E+999999"), 0),
    ("decimal(5,2)", D("0E-999999"), 0),
    ("decimal(18,0)", 10**18 - 1, 10**18 - 1),
    ("decimal(18,18)", "-0.999999999999999999", -(10**18) + 1),
    ("string", "", ""),
    ("string", "a\0é😀", "a\0é😀"),
    ("string", np.str_("x"), "x"),
    ("string", Text.RED, "red"),
    ("bytes", b"\0\xff", b"\0\xff"),
    ("bytes", bytearray(b"x"), b"x"),
    ("bytes", memoryview(b"xyz")[::2], b"xz"),
    ("bytes", np.bytes_(b"x"), b"x"),
    ("timestamp", dt.datetime(1970, 1, 1, tzinfo=dt.UTC), 0),
    ("timestamp", dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, dt.UTC), -1),
    ("timestamp", dt.datetime(1970, 1, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=2))), 0),
    ("timestamp", dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=14))), -62_135_647_200_000_000),
    ("timestamp", INT64_MIN, INT64_MIN),
    ("timestamp", np.int64(5), 5),
]


@pytest.mark.parametrize(("type_", "given_", "stored"), STORED)
def test_to_stored(type_: str, given_: Any, stored: Any) -> None:
    found = T(type_).to_stored(given_)
    assert found == stored
    assert type(found) is type(stored)  # plain Python, whatever the caller used
    assert not isinstance(found, float) or math.copysign(1, found) == math.copysign(1, stored)


@pytest.mark.parametrize("type_", ["bool", "int64", "float64", "decimal(5,2)", "string", "bytes", "timestamp"])
def test_null_stays_null(type_: str) -> None:
    assert T(type_).to_stored(None) is None and T(type_).from_stored(None) is None


WRONG_TYPE: list[tuple[str, Any]] = [
    ("bool", 1), ("bool", "true"), ("bool", type("bool_", (), {"__repr__": lambda _: "bool_()"})()),
    ("int64", True), ("int64", np.True_), ("int64", 1.0), ("int64", "1"), ("int64", D(1)), ("int64", np.array([1, 2])),
    ("int64", Unprintable()),
    ("float64", True), ("float64", "1"), ("float64", D(1)), ("float64", 1j), ("float64", Fraction(1, 2)),
    ("decimal(5,2)", 1.5), ("decimal(5,2)", np.float64(1)), ("decimal(5,2)", True), ("decimal(5,2)", "abc"),
    ("decimal(5,2)", ""),
    ("string", b"x"), ("string", 1), ("bytes", "x"), ("bytes", 1), ("bytes", [1]),
    ("timestamp", "2026-01-01"), ("timestamp", 1.0), ("timestamp", dt.date(2026, 1, 1)), ("timestamp", True),
    ("timestamp", np.datetime64("2026-01-01")),
]  # fmt: skip


@pytest.mark.parametrize(("type_", "value"), WRONG_TYPE, ids=shown)
def test_a_value_of_the_wrong_type_names_itself_and_the_type(type_: str, value: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        T(type_).to_stored(value, "column 'v'")
    assert caught.value.message.startswith("column 'v' is ") and f"which is not a {type_}" in caught.value.message


WRONG_VALUE: list[tuple[str, Any, str]] = [
    ("int64", INT64_MAX + 1, "9223372036854775808, which does not fit in 64 bits"),
    ("int64", np.uint64(2**64 - 1), "does not fit in 64 bits"),
    ("int64", HUGE, "an integer of 16610 bits"),
    ("float64", math.nan, "nan: NaN and infinities"),
    ("float64", np.float64("inf"), "NaN and infinities"),
    ("float64", 10**400, "too large"),
    ("float64", 2**53 + 1, "9007199254740993, which has more digits than a float64 keeps"),
    ("float64", np.int64(-(2**63) + 1), "more digits than a float64 keeps"),
    ("float64", 10**200 + 1, "more digits than a float64 keeps"),
    ("float64", HUGE, "too large"),
    ("decimal(5,2)", "1.234", "more than 2 digits after the point"),
    ("decimal(5,2)", D("1E-999999"), "more than 2 digits"),
    ("decimal(5,2)", D("1." + "0" * 80 + "1"), "more than 2 digits"),  # nothing is rounded away, however small
    ("decimal(5,2)", "1000", "does not fit in decimal(5,2)"),
    ("decimal(5,2)", D("-1E+999999"), "does not fit"),
    ("decimal(5,2)", HUGE, "does not fit"),
    ("decimal(5,2)", "9" * 5_000, "characters"),
    ("decimal(5,2)", D("NaN"), "NaN and infinities"),
    ("decimal(5,2)", "sNaN", "NaN and infinities"),
    ("decimal(5,2)", "-Infinity", "NaN and infinities"),
    ("string", "\ud800", "not valid Unicode"),
    ("timestamp", dt.datetime(2026, 1, 1), "without a time zone"),  # noqa: DTZ001
    ("timestamp", dt.datetime(2026, 1, 1, tzinfo=NoOffset()), "without a time zone"),
    ("timestamp", INT64_MIN - 1, "does not fit in 64 bits"),
    ("timestamp", HUGE, "an integer of 16610 bits"),
]


@pytest.mark.parametrize(("type_", "value", "says"), WRONG_VALUE, ids=shown)
def test_a_value_that_cannot_be_kept_is_refused(type_: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        T(type_).to_stored(value, "column 'v'")
    assert not isinstance(caught.value, SchemaError)
    assert says in caught.value.message and caught.value.message.startswith("column 'v'")
    assert len(caught.value.message) < 300


@given(st.decimals(allow_nan=False, allow_infinity=False), st.integers(1, 18), st.integers(0, 18), st.integers(1, 40))
def test_a_decimal_is_exact_or_refused(value: D, precision: int, scale: int, context_digits: int) -> None:
    """The model is fractions; the caller's context has few digits and traps everything."""
    type_ = ColumnType("decimal", precision, min(scale, precision))
    exact = Fraction(value) * 10**type_.scale
    fits = exact.denominator == 1 and abs(exact) < 10**precision
    with decimal.localcontext(decimal.Context(prec=context_digits, traps=list(decimal.Context().flags))):
        if not fits:
            with pytest.raises(InvalidArgument):
                type_.to_stored(value)
            return
        stored = type_.to_stored(value)
        back = type_.from_stored(stored)
    assert stored == exact
    assert back == value and back.as_tuple().exponent == -type_.scale


ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.decimals() | st.datetimes()
    | st.datetimes(timezones=st.timezones()) | st.just(HUGE) | st.lists(st.integers(), max_size=2)
)  # fmt: skip
TYPES = st.sampled_from(["bool", "int64", "float64", "decimal(9,3)", "string", "bytes", "timestamp"]).map(T)


@given(TYPES, ANYTHING)
def test_what_goes_in_comes_out_or_is_refused(type_: ColumnType, value: Any) -> None:
    try:
        stored = type_.to_stored(value)
    except InvalidArgument:
        return
    try:
        back = type_.from_stored(stored)
    except OutOfRange:  # an integer that is no moment between the years 1 and 9999
        assert type_.name == "timestamp" and isinstance(value, int)
        return
    assert back == value or (type_.name == "timestamp" and isinstance(value, int)) or type_.name == "float64"
    assert type_.to_stored(back) == stored


@pytest.mark.parametrize(
    ("type_", "stored", "says"),
    [
        ("int64", INT64_MAX + 1, "9223372036854775808"),
        ("int64", -(2**100), "does not fit in 64 bits; it is kept exactly"),
        ("decimal(5,2)", 100_000, "does not fit in decimal(5,2); it is kept exactly"),
        ("decimal(5,2)", -100_000, "does not fit"),
        ("float64", math.inf, "left the finite numbers"),
        ("float64", math.nan, "left the finite numbers"),
        ("timestamp", INT64_MAX, "outside the years 1 to 9999"),
        ("timestamp", INT64_MIN, "outside the years"),
    ],
)
def test_a_sum_that_outgrew_its_type_is_out_of_range_and_names_the_column(type_: str, stored: Any, says: str) -> None:
    with pytest.raises(OutOfRange) as caught:
        T(type_).from_stored(stored, "balance")
    assert says in caught.value.message and caught.value.details == {"column": "balance"}


@pytest.mark.parametrize("type_", ["timestamp", "decimal(9,2)", "int64", "string"])
def test_from_stored_all_is_from_stored_of_each(type_: str) -> None:
    stored = ["a", "", None] if type_ == "string" else [0, -5, 10**9 - 1, None, 7]
    for values in (stored, [value for value in stored if value is not None], []):
        assert T(type_).from_stored_all(values) == [T(type_).from_stored(value) for value in values]
    if type_ == "timestamp":
        with pytest.raises(OutOfRange, match="outside the years"):
            T(type_).from_stored_all([0, 10**18], "ts")


def test_from_stored() -> None:
    assert T("timestamp").from_stored(-1) == dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, dt.UTC)
    assert str(T("decimal(5,2)").from_stored(-5)) == "-0.05"
    assert T("decimal(18,0)").from_stored(10**18 - 1) == 10**18 - 1


# -- durations --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "micros"),
    [
        ("1us", 1), ("250ms", 250_000), ("2s", 2_000_000), ("5m", 300_000_000), ("1h", 3_600_000_000),
        ("30d", 30 * DAY_US),
        (" 5 m ", 300_000_000), ("007s", 7_000_000), (1, 1), (dt.timedelta(milliseconds=1), 1_000),
        (2**62, 2**62), ("53375995d", 53_375_995 * DAY_US), ("0" * 90 + "1s", 1_000_000),
    ],
)  # fmt: skip
def test_a_duration(value: Any, micros: int) -> None:
    assert parse_duration_us(value) == micros


@pytest.mark.parametrize(
    ("value", "says"),
    [
        *(
            (v, "is not a duration")
            for v in ("", "5", "5M", "-5m", "5.5m", "\u0663m", True, 1.5, [5], "9" * 5_000 + "d", Unprintable())
        ),
        *((v, "must be greater than zero") for v in ("0s", 0, -1, -HUGE, dt.timedelta(0), -dt.timedelta.resolution)),
        *((v, "is too long") for v in (2**62 + 1, HUGE, "53375996d", "9" * 100 + "us", dt.timedelta.max)),
    ],
    ids=shown,
)  # fmt: skip
def test_what_is_not_a_duration(value: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match="history") as caught:
        parse_duration_us(value, "history")
    assert says in caught.value.message and len(caught.value.message) < 300


def test_a_duration_and_a_moment_add_up_within_64_bits() -> None:
    """Which is why 2**62 is the limit: no schema can hold a width that a moment of these centuries overflows with."""
    now = T("timestamp").to_stored(dt.datetime.max.replace(tzinfo=dt.UTC))
    assert now + parse_duration_us(2**62) <= INT64_MAX
    for build in (
        lambda: time_slot("ts", "53375996d"),
        lambda: event_table_schema("e", "ts", {"ts": "timestamp"}, retention=2**63),
        lambda: row_table_schema("t", {"k": "int64"}, {}, history="99999999d"),
    ):
        with pytest.raises(InvalidArgument, match="is too long"):
            build()


# -- tables -----------------------------------------------------------------------------------------

ACCOUNTS = row_table_schema(
    "accounts",
    {"branch": "string", "id": "int64"},
    {"owner": "string", "balance": OperatorCall("sum", "decimal(12,2)"), "visits": OperatorCall("count"),
     "last": OperatorCall("max", "timestamp")},
)  # fmt: skip
EVENTS = event_table_schema(
    "calls", "ts", {"ts": "timestamp", "endpoint": "int64", "us": "int64", "cost": "decimal(9,4)", "name": "string"}
)
SUMS = aggregate_schema(
    "calls_5m",
    EVENTS,
    ("endpoint", time_slot("ts", "5m")),
    {"n": OperatorCall("count"), "total": OperatorCall("sum", "us"), "cost": OperatorCall("sum", "cost"),
     "named": OperatorCall("count", "name"), "last": OperatorCall("max", "ts")},
    {"avg": "total / n"},
)  # fmt: skip


def test_lookups() -> None:
    assert ACCOUNTS.key_names == ("branch", "id")
    assert list(ACCOUNTS.by_name) == ["branch", "id", "owner", "balance", "visits", "last"]
    assert ACCOUNTS.index_of == {"owner": 0, "balance": 1, "visits": 2, "last": 3}
    assert [column.describe() for column in ACCOUNTS.columns] == [
        "string", "sum(decimal(12,2))", "sum(int64)", "max(timestamp)",
    ]  # fmt: skip
    assert SUMS.output_names == ("endpoint", "slot", "n", "total", "cost", "named", "last", "avg")
    assert SUMS.column("cost").type == T("decimal(18,4)")  # a sum has all the digits a decimal can have
    with pytest.raises(SchemaError, match="no column 'x'; it has branch, id, owner"):
        ACCOUNTS.column("x")


@pytest.mark.parametrize("schema", [ACCOUNTS, EVENTS, SUMS])
def test_a_schema_survives_json_pickle_and_replacement(schema: TableSchema) -> None:
    schema = dataclasses.replace(schema, id=7, created_ts=9, history_us=5)
    for copy in (TableSchema.from_json(schema.to_json()), pickle.loads(pickle.dumps(schema))):
        assert copy == schema and hash(copy) == hash(schema)
        assert (copy.by_name, copy.index_of) == (schema.by_name, schema.index_of)
    narrow = dataclasses.replace(schema, columns=schema.columns[1:], derived=())
    assert narrow.index_of == {column.name: i for i, column in enumerate(schema.columns[1:])}
    assert set(narrow.by_name) == {*schema.key_names, *narrow.index_of}
    assert schema.description()["id"] == 7


def test_a_name_twice_is_refused_wherever_it_comes_from() -> None:
    column = Column("a", T("int64"))
    for columns in ((column,), (Column("a", T("string")),), (Column("b", T("int64")),) * 2):
        with pytest.raises(SchemaError, match="twice"):
            TableSchema("t", "row", (column,), columns)
    with pytest.raises(SchemaError, match="'k' twice"):
        row_table_schema("t", {"k": "int64"}, {"k": "int64"})
    count = OperatorCall("count")
    cases: tuple[tuple[Any, dict[str, OperatorCall], dict[str, str]], ...] = (
        (["endpoint", "endpoint"], {"n": count}, {}),
        (["endpoint"], {"endpoint": count}, {}),
        (["endpoint"], {"n": count}, {"n": "n + 1"}),
        (["endpoint"], {"n": count}, {"endpoint": "n + 1"}),
        (["endpoint", time_slot("ts", "5m", "endpoint")], {"n": count}, {}),
    )
    for group_by, measures, derived in cases:
        with pytest.raises(SchemaError, match="twice"):
            aggregate_schema("a", EVENTS, group_by, measures, derived)


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", "a.b", "é", "a\n", "a" * 129, 5, None, HUGE, b"a"], ids=shown)
def test_a_name_is_letters_digits_and_underscores(name: Any) -> None:
    builds = (
        lambda: row_table_schema(name, {"k": "int64"}, {}),
        lambda: row_table_schema("t", {name: "int64"}, {}),
        lambda: row_table_schema("t", {"k": "int64"}, {name: "int64"}),
        lambda: row_table_schema("t", {"k": "int64"}, {name: OperatorCall("count")}),
        lambda: event_table_schema("t", "ts", {"ts": "timestamp", name: "int64"}),
        lambda: aggregate_schema("t", EVENTS, ["endpoint"], {name: OperatorCall("count")}),
        lambda: aggregate_schema("t", EVENTS, [time_slot("ts", "5m", name)], {"n": OperatorCall("count")}),
        lambda: aggregate_schema("t", EVENTS, ["endpoint"], {"n": OperatorCall("count")}, {name: "n"}),
    )
    for build in builds:
        with pytest.raises(SchemaError, match="name"):
            build()
    row_table_schema("_" + "a" * 127, {"K9": "int64"}, {})


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"v": OperatorCall("sum", "string")}, "sum needs int64, float64 or decimal, not string"),
        ({"v": OperatorCall("sum", "timestamp")}, "not timestamp"),
        ({"v": OperatorCall("max", "bytes")}, "max needs a number or a timestamp"),
        ({"v": OperatorCall("min", "bool")}, "min needs a number"),
        ({"v": OperatorCall("min")}, "None is not a column type"),
        ({"v": "text"}, "'text' is not a column type"),
    ],
)
def test_a_row_table_that_cannot_be(columns: dict[str, object], says: str) -> None:
    with pytest.raises(SchemaError) as caught:
        row_table_schema("t", {"k": "int64"}, columns)
    assert says in caught.value.message


def test_keys_and_events_have_no_operators_and_a_table_has_a_key() -> None:
    with pytest.raises(SchemaError, match="an operator is not allowed here"):
        row_table_schema("t", {"k": OperatorCall("count")}, {})
    with pytest.raises(SchemaError, match="an operator is not allowed here"):
        event_table_schema("t", "ts", {"ts": "timestamp", "n": OperatorCall("count")})
    with pytest.raises(SchemaError, match="at least one key column"):
        row_table_schema("t", {}, {"v": "int64"})
    for event_time in ("x", "v"):
        with pytest.raises(SchemaError, match="event_time must name one of its timestamp columns"):
            event_table_schema("t", event_time, {"ts": "timestamp", "v": "int64"})


COUNT: Mapping[str, OperatorCall] = {"n": OperatorCall("count")}


@pytest.mark.parametrize(
    ("group_by", "measures", "says"),
    [
        ([], COUNT, "at least one group key and one measure"),
        (["endpoint"], {}, "at least one group key and one measure"),
        (["x"], COUNT, "no column 'x'"),
        ("endpoint", COUNT, "no column 'e'"),
        ([time_slot("x", "5m")], COUNT, "no column 'x'"),
        ([time_slot("us", "5m")], COUNT, "time_slot needs a timestamp"),
        (["endpoint"], {"n": OperatorCall("count", "x")}, "no column 'x'"),
        (["endpoint"], {"n": OperatorCall("sum", "name")}, "sum needs int64"),
        (["endpoint"], {"n": OperatorCall("max")}, "max needs a column of 'calls'"),
        (["endpoint"], {"n": "count"}, "must be kivi.sum, count, quantiles or another measure"),
    ],
)
def test_an_aggregate_that_cannot_be(group_by: Any, measures: Any, says: str) -> None:
    with pytest.raises(SchemaError) as caught:
        aggregate_schema("a", EVENTS, group_by, measures)
    assert says in caught.value.message


def test_an_aggregate_is_of_events() -> None:
    with pytest.raises(SchemaError, match="'accounts' is a row table"):
        aggregate_schema("a", ACCOUNTS, ["id"], COUNT)


# -- what callers hand in ---------------------------------------------------------------------------


def test_a_key_is_a_tuple_of_every_key_column() -> None:
    assert ACCOUNTS.stored_key(("b", 5)) == ("b", 5) == ACCOUNTS.stored_key(["b", np.int64(5)])
    for key in ("b", {"branch": "b", "id": 5}, 5, None, HUGE, Unprintable()):
        with pytest.raises(SchemaError, match="is a tuple of branch, id, not"):
            ACCOUNTS.stored_key(key)
    for short in ((), ("b",), ("b", 5, 6), (HUGE,)):
        with pytest.raises(SchemaError, match="has 2 columns"):
            ACCOUNTS.stored_key(short)
    with pytest.raises(SchemaError, match="key column 'id' is '5'"):
        ACCOUNTS.stored_key(("b", "5"))
    with pytest.raises(InvalidArgument, match="key column 'branch' of 'accounts' must not be null"):
        ACCOUNTS.stored_key((None, 5))
    with pytest.raises(SchemaError, match="'calls' has no row keys"):
        EVENTS.stored_key((1,))


def test_a_bound_is_a_prefix_of_a_key_or_a_moment() -> None:
    assert ACCOUNTS.stored_bound(()) == () and ACCOUNTS.stored_bound(("b",)) == ("b",)
    assert ACCOUNTS.stored_key(("b",), partial=True) == ("b",)
    with pytest.raises(SchemaError, match="has 2 columns"):
        ACCOUNTS.stored_bound(("b", 5, 6))
    with pytest.raises(InvalidArgument, match="must not be null"):
        ACCOUNTS.stored_bound((None,))
    assert EVENTS.stored_bound(7) == EVENTS.stored_bound((7,)) == EVENTS.stored_bound([7]) == (7,)
    for bound in ((), (1, 2), None, (None,)):
        with pytest.raises(InvalidArgument, match="a bound of event table 'calls' is its event time"):
            EVENTS.stored_bound(bound)
    with pytest.raises(SchemaError, match="bound of 'ts'"):
        EVENTS.stored_bound("now")


def test_puts_and_deltas_name_columns() -> None:
    assert ACCOUNTS.stored_put({"owner": None, "balance": "1.5"}) == {"owner": None, "balance": 150}
    assert ACCOUNTS.stored_put({}) == {}
    assert ACCOUNTS.stored_delta({"visits": 1, "balance": None}) == {"visits": 1}  # every operator skips null
    with pytest.raises(InvalidArgument, match="names no column"):
        ACCOUNTS.stored_delta({})
    with pytest.raises(SchemaError, match="'owner' of 'accounts' is a value column"):
        ACCOUNTS.stored_delta({"owner": "x"})
    for call in (ACCOUNTS.stored_put, ACCOUNTS.stored_delta):
        with pytest.raises(SchemaError, match="'id' is a key column"):
            call({"id": 1})
        with pytest.raises(SchemaError, match="no column 'x'"):
            call({"x": 1})
    for table, says in ((EVENTS, "use append"), (SUMS, "append events there instead")):
        for call in (table.stored_put, table.stored_delta):
            with pytest.raises(InvalidArgument, match=says):
                call({"us": 1})


def test_guards_name_a_cell_or_a_row() -> None:
    for schema, column in ((ACCOUNTS, None), (ACCOUNTS, "owner"), (SUMS, "total")):
        schema.check_guardable(column)
    for schema, column in ((EVENTS, None), (ACCOUNTS, "id"), (ACCOUNTS, "x"), (SUMS, "avg")):
        with pytest.raises(InvalidArgument):
            schema.check_guardable(column)


def test_outputs_are_named_once_and_known() -> None:
    assert SUMS.output_columns(None) == SUMS.output_names
    assert SUMS.output_columns(["avg", "n", "avg"]) == ("avg", "n") and SUMS.output_columns([]) == ()
    with pytest.raises(SchemaError, match="no column 'x'"):
        SUMS.output_columns(["n", "x"])
    with pytest.raises(InvalidArgument, match="list of names, not the string 'n'"):
        SUMS.output_columns("n")


def test_a_row_as_a_caller_sees_it() -> None:
    row = {"endpoint": 1, "cost": 15_000, "avg": 2.5}
    assert SUMS.row_from_stored(row) == {"endpoint": 1, "cost": D("1.5000"), "avg": 2.5}
    with pytest.raises(OutOfRange) as caught:
        SUMS.row_from_stored({"total": 2**63})
    assert caught.value.details == {"column": "total"}


# -- derived columns --------------------------------------------------------------------------------


def value_of(text: str, **row: Any) -> float | None:
    return evaluator(parse_expression(text, dict.fromkeys(row, ColumnType("int64"))))(row)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a / b", 1.5), ("a - b - 1", 1.0), ("a - (b - 1)", 3.0), ("a + b * 2", 14.0), ("-a + +b", -2.0), ("(a)", 6.0),
        ("1e3", 1000.0), ("a / 0", None), ("a / (b - 4)", None), ("0 / 0", None), ("a + n", None), ("-n", None),
        ("n / 0", None), ("d * 2", 3.0), ("a +\\\n b", 10.0),
    ],
)  # fmt: skip
def test_an_expression(text: str, value: float | None) -> None:
    found = value_of(text, a=6, b=4, n=None, d=D("1.5"))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "", "  a", "a b", "a; b", "a = b", "a := b", "import os", "a ** b", "a // b", "a % b", "a @ b", "a << b", "~a",
        "not a", "a and b", "a < b", "a if b else a", "a.real", "1.0.real", "a[0]", "abs(a)", "(lambda: a)()", "[a]",
        "{a}", "(a, b)", "[a for a in b]", "f'{a}'", "'x'", "b'x'", "True", "None", "...", "1j", "x", "nan", "inf",
        "await a", "(yield)", "*a", "__import__('os').system('true')", "().__class__.__bases__", "a\0", "\ud800",
        "1e999",
        "9" * 400, "0x" + "f" * 900, "a" * 1_001, "a+" * 200 + "a", "-" * 900 + "a", "(" * 300 + "a" + ")" * 300,
        "a+(" * 120 + "a" + ")" * 120, None, 5, b"a", HUGE,
    ],
    ids=shown,
)  # fmt: skip
def test_anything_but_arithmetic_on_known_columns_is_refused(text: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        parse_expression(text, AB)
    assert len(caught.value.message) < 1_200


def test_the_deepest_expression_is_evaluated_on_a_deep_stack() -> None:
    """Measured where it is defined, not where it is read."""
    tree = parse_expression("+".join(["a"] * 101), AB)
    with pytest.raises(SchemaError, match="nested too deeply: at most 100 operations"):
        parse_expression("+".join(["a"] * 102), AB)

    def below(depth: int) -> float | None:
        return below(depth - 1) if depth else evaluator(tree)({"a": 1})

    assert below(500) == 101


@pytest.mark.parametrize("text", ["a * a", "a + a", "-a - a", "a / 1e-300", "a * a - a * a", "a * 10 / 10"])
def test_what_leaves_the_finite_numbers_is_an_overflow(text: str) -> None:
    with pytest.raises(OverflowError):
        value_of(text, a=1.5e308)


EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "b", "n", "0", "2", "0.5"]),
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from("+-*/"), inner) | st.builds("(-{})".format, inner)
    ),
    max_leaves=12,
)


@given(EXPRESSIONS, st.integers(-3, 3), st.integers(-3, 3))
def test_an_expression_is_what_python_makes_of_it(text: str, a: int, b: int) -> None:
    """In floats; null where an operand is null or a divisor is 0."""
    try:
        expected = None if "n" in text else eval(text, {"a": float(a), "b": float(b)})
    except ZeroDivisionError:
        expected = None
    if len(text) <= 1_000:
        assert value_of(text, a=a, b=b, n=None) == expected


@given(st.text(max_size=30) | st.text("ab+-*/()1.e ,_[]'\n", max_size=30))
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    try:
        tree = parse_expression(text, AB)
    except KiviError:
        return
    assert isinstance(tree, ast.expr)
    try:
        found = evaluator(tree)({"a": 2, "b": 3})
    except OverflowError:
        return
    assert found is None or math.isfinite(found)


@pytest.mark.parametrize(
    ("derived", "says"),
    [
        ({"x": "n / missing"}, "names 'missing'"),
        ({"x": "last + 1"}, "names 'last'"),  # a timestamp is no number
        ({"x": "n", "y": "x"}, "names 'x'"),  # nor does one derived column use another
    ],
)
def test_a_derived_column_uses_numeric_columns_only(derived: dict[str, str], says: str) -> None:
    measures = {"n": OperatorCall("count"), "last": OperatorCall("max", "ts")}
    with pytest.raises(SchemaError) as caught:
        aggregate_schema("a", EVENTS, ["endpoint"], measures, derived)
    assert says in caught.value.message


def test_more_columns_than_a_log_record_can_number_are_refused() -> None:
    """By name and when the table is made, not by the first commit that writes to the last of them."""
    columns = dict.fromkeys([f"c{i}" for i in range(COLUMNS_MAX)], "int64")
    assert len(row_table_schema("t", {"id": "int64"}, columns).columns) == COLUMNS_MAX
    with pytest.raises(ResourceExhausted, match="columns_max = 32,767") as caught:
        row_table_schema("t", {"id": "int64"}, {**columns, "one_more": "int64"})
    assert caught.value.details == {"limit": "columns_max", "maximum": COLUMNS_MAX}


def test_measures_say_at_once_what_they_do_not_take() -> None:
    assert kivi.argmax("a", by=kivi.col("b")) == kivi.argmax("a", by="b")
    for by in (kivi.col("b") * 2, None, 3):
        with pytest.raises(kivi.SchemaError, match="by of argmin is a column's name"):
            kivi.argmin("a", by=by)
    for where in ("b > 1", True, lambda row: row):
        with pytest.raises(kivi.InvalidArgument, match="is not a predicate"):
            kivi.count(where=where)
