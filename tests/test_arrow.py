"""Arrow input: what is accepted, that nothing is lost on the way, and that a stranger's stream cannot hurt."""

from __future__ import annotations

import datetime as dt
import decimal
import operator
import random
import struct
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.arrow.columns import arrow_schema, arrow_type, literal, rows_batch, rows_from_batch, stored_rows
from kivi.arrow.ipc import decode_ipc, encode_ipc
from kivi.arrow.predicates import filter_batch, true_places
from kivi.arrow.records import event_batch
from kivi.errors import InvalidArgument, OutOfRange, ResourceExhausted, SchemaError
from kivi.model.declarations import aggregate_schema, event_table_schema, row_table_schema
from kivi.model.expressions import bind, col, matches
from kivi.model.schema import OperatorCall as Call
from kivi.model.types import MOMENT_MAX_US, MOMENT_MIN_US, ColumnType

UTC = dt.UTC
DECLARED = {
    "ts": "timestamp",
    "b": "bool",
    "i": "int64",
    "f": "float64",
    "d": "decimal(6,2)",
    "s": "string",
    "y": "bytes",
}
EVENTS = event_table_schema("invocations", "ts", DECLARED)
NOON = dt.datetime(2026, 7, 1, 12, 0, 0, 123456, tzinfo=UTC)
NOON_US = 1_782_907_200_123_456
LIMITS: Any = {"max_bytes": 1 << 20, "max_rows": 10_000}


def one(name, array):
    """What ``event_batch`` makes of one Arrow column."""
    rows = len(array)
    return event_batch(EVENTS, pa.table({"ts": pa.array([0] * rows), name: array})).column(name)


# -- types ------------------------------------------------------------------------------------------


def test_types_of_every_kind_of_table():
    row = row_table_schema("r", {"k": "string"}, {"d": "decimal(5,1)", "n": Call("sum", "int64")})
    assert arrow_schema(row).names == ["k", "d", "n"]
    assert arrow_schema(row).types == [pa.string(), pa.decimal128(5, 1), pa.int64()]
    assert arrow_schema(EVENTS).field("ts").type == pa.timestamp("us", "UTC")
    aggregate = aggregate_schema(
        "a", EVENTS, ["s"], {"total": Call("sum", "i"), "n": Call("count")}, {"avg": "total / n"}
    )
    assert arrow_schema(aggregate).names == ["s", "total", "n", "avg"]
    assert arrow_schema(aggregate).field("avg").type == pa.float64()


# -- dicts ------------------------------------------------------------------------------------------


def test_dicts_become_columns_in_the_tables_order():
    batch = event_batch(
        EVENTS,
        [
            {"y": b"\x00", "ts": NOON, "i": 5, "f": -0.0, "d": decimal.Decimal("1.5"), "s": "é", "b": True},
            {"ts": NOON_US, "f": 3, "d": "0.25"},
        ],
    )
    assert batch.schema == arrow_schema(EVENTS)
    assert stored_rows(batch) == [
        {"ts": NOON_US, "b": True, "i": 5, "f": 0.0, "d": 150, "s": "é", "y": b"\x00"},
        {"ts": NOON_US, "b": None, "i": None, "f": 3.0, "d": 25, "s": None, "y": None},
    ]
    assert str(batch.column("f")[0].as_py()) == "0.0"


def test_a_generator_and_no_events():
    assert event_batch(EVENTS, ({"ts": i} for i in range(3))).num_rows == 3
    assert event_batch(EVENTS, []).schema == arrow_schema(EVENTS)


@pytest.mark.parametrize(
    ("records", "error", "words"),
    [
        ([{"ts": 0}, {"ts": 0, "nope": 1}], SchemaError, ["'nope'", "ts, b, i"]),
        ([{"ts": 0}, {"ts": 0, "i": "7"}], SchemaError, ["records[1]['i']", "'7'", "int64"]),
        ([{"ts": 0, "i": 1.0}], SchemaError, ["records[0]['i']"]),
        ([{"ts": 0, "i": True}], SchemaError, ["records[0]['i']"]),
        ([{"ts": 0, "f": True}], SchemaError, ["records[0]['f']"]),
        ([{"ts": 0, "b": 1}], SchemaError, ["records[0]['b']"]),
        ([{"ts": 0, "s": b"x"}], SchemaError, ["records[0]['s']"]),
        ([{"ts": 0, "y": "x"}], SchemaError, ["records[0]['y']"]),
        ([{"ts": "2026"}], SchemaError, ["records[0]['ts']"]),
        ([{"ts": 0, "i": 2**63}], InvalidArgument, ["records[0]['i']", "64 bits"]),
        ([{"ts": 0}, {"ts": 0, "f": float("nan")}], InvalidArgument, ["records[1]['f']", "NaN"]),
        ([{"ts": 0, "f": float("-inf")}], InvalidArgument, ["records[0]['f']"]),
        ([{"ts": 0, "s": "\ud800"}], InvalidArgument, ["records[0]['s']", "Unicode"]),
        ([{"ts": 0, "d": decimal.Decimal("1.001")}], InvalidArgument, ["records[0]['d']"]),
        ([{"ts": 0, "d": 10_000}], InvalidArgument, ["records[0]['d']"]),
        ([{"ts": 0, "d": decimal.Decimal("NaN")}], InvalidArgument, ["records[0]['d']"]),
        ([{"ts": NOON.replace(tzinfo=None)}], InvalidArgument, ["records[0]['ts']", "time zone"]),
        ([{"ts": 0}, {"i": 1}], InvalidArgument, ["records[1]", "'ts'", "event time"]),
        ([{"ts": None}], InvalidArgument, ["'ts'"]),
        ([{"ts": 0}, 7], InvalidArgument, ["records[1]", "int"]),
        ([{"ts": 0}, "x"], InvalidArgument, ["records[1]", "str"]),
        ({"ts": 0}, InvalidArgument, ["list of dicts"]),
        (7, InvalidArgument, ["list of dicts"]),
    ],
)
def test_dicts_that_do_not_fit(records, error, words):
    with pytest.raises(error) as caught:
        event_batch(EVENTS, records)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


def test_events_go_to_event_tables():
    with pytest.raises(InvalidArgument, match="row table"):
        event_batch(row_table_schema("r", {"k": "int64"}, {}), [])


def test_other_time_zones_and_subclasses():
    class Text(str):
        pass

    zone = dt.timezone(dt.timedelta(hours=2))
    batch = event_batch(EVENTS, [{"ts": NOON.astimezone(zone), "i": np.int32(4), "s": Text("x")}])
    assert {n: v for n, v in stored_rows(batch)[0].items() if v is not None} == {"ts": NOON_US, "i": 4, "s": "x"}


VALUES = {
    "ts": st.one_of(
        st.integers(MOMENT_MIN_US, MOMENT_MAX_US),
        st.datetimes(timezones=st.sampled_from([UTC, dt.timezone(dt.timedelta(hours=-5))])),
    ),
    "b": st.booleans(),
    "i": st.integers(-(2**63), 2**63 - 1),
    "f": st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**70), 2**70).map(float).map(int)),
    "d": st.one_of(st.decimals(-9999, 9999, places=2), st.integers(-9999, 9999)),
    "s": st.text(st.characters(exclude_categories=["Cs"])),
    "y": st.binary(),
}


@given(st.lists(st.fixed_dictionaries({"ts": VALUES["ts"]}, optional={n: v for n, v in VALUES.items() if n != "ts"})))
def test_dicts_are_what_to_stored_makes_of_them(records):
    expected = [{c.name: c.type.to_stored(record.get(c.name)) for c in EVENTS.columns} for record in records]
    batch = event_batch(EVENTS, records)
    assert stored_rows(batch) == expected
    batch.validate(full=True)
    assert stored_rows(event_batch(EVENTS, batch)) == expected
    assert stored_rows(rows_batch(EVENTS, list(DECLARED), expected)) == expected
    if batch.num_rows:
        table = decode_ipc(encode_ipc(batch), max_bytes=1 << 24, max_rows=10_000)
        assert stored_rows(event_batch(EVENTS, table)) == expected


# -- Arrow ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        ("i", pa.array([1, None], pa.int32()), [1, None]),
        ("i", pa.array([2**63 - 1], pa.uint64()), [2**63 - 1]),
        ("i", pa.nulls(2), [None, None]),
        ("f", pa.array([1.5, -0.0], pa.float32()), [1.5, 0.0]),
        ("f", pa.array([2**53], pa.int64()), [2.0**53]),
        ("f", pa.array([2**60, None, -(2**63)], pa.int64()), [2.0**60, None, -(2.0**63)]),
        ("f", pa.array([2**63], pa.uint64()), [2.0**63]),
        ("d", pa.array(["1.5", None]).cast(pa.decimal256(30, 10)), [150, None]),
        ("d", pa.array([9999, -9999], pa.int16()), [999900, -999900]),
        ("s", pa.array(["a", None], pa.large_string()), ["a", None]),
        ("s", pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        ("s", pa.array(["a"], pa.string_view()), ["a"]),
        ("y", pa.array([b"ab"], pa.binary(2)), [b"ab"]),
        ("y", pa.array([b"ab"], pa.large_binary()), [b"ab"]),
        ("i", pa.array([1, 2, 3, 4])[1:3], [2, 3]),
        ("i", pa.chunked_array([[1], [], [2]]), [1, 2]),
        ("d", pa.array([None, decimal.Decimal("1.00"), None]).cast(pa.decimal128(6, 2))[1:], [100, None]),
    ],
)
def test_lossless_casts(name, array, expected):
    column = one(name, array)
    assert column.type == arrow_type(EVENTS.column(name).type)
    assert [row["x"] for row in stored_rows(pa.record_batch({"x": column}))] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (pa.array([NOON_US * 1000], pa.timestamp("ns")), NOON_US),
        (pa.array([NOON_US // 1000], pa.timestamp("ms", "UTC")), NOON_US // 1000 * 1000),
        (pa.array([NOON_US // 10**6], pa.timestamp("s", "Asia/Tokyo")), NOON_US // 10**6 * 10**6),
        (pa.array([NOON_US], pa.timestamp("us")), NOON_US),
        (pa.array([NOON_US], pa.int64()), NOON_US),
        (pa.array([7], pa.uint32()), 7),
    ],
)
def test_timestamps_of_every_unit(given, expected):
    assert stored_rows(event_batch(EVENTS, pa.table({"ts": given})))[0]["ts"] == expected


@pytest.mark.parametrize(
    ("name", "array", "error"),
    [
        ("i", pa.array([1.0]), SchemaError),
        ("i", pa.array([True]), SchemaError),
        ("i", pa.array(["1"]), SchemaError),
        ("i", pa.array([2**63], pa.uint64()), InvalidArgument),
        ("f", pa.array([float("nan")]), InvalidArgument),
        ("f", pa.array([1.0, float("inf")]), InvalidArgument),
        ("f", pa.array([2**53 + 1]), InvalidArgument),
        ("f", pa.array([2**63 - 1]), InvalidArgument),
        ("f", pa.array([2**64 - 1], pa.uint64()), InvalidArgument),
        ("f", pa.array(["1"]), SchemaError),
        ("d", pa.array([1.0]), SchemaError),
        ("d", pa.array([10_000]), InvalidArgument),
        ("d", pa.array([-(2**63)]), InvalidArgument),
        ("d", pa.array(["0.001"]).cast(pa.decimal128(6, 3)), InvalidArgument),
        ("d", pa.array(["10000"]).cast(pa.decimal128(9, 3)), InvalidArgument),
        ("s", pa.array([b"a"]), SchemaError),
        ("s", pa.array([["a"]]), SchemaError),
        ("y", pa.array(["a"]), SchemaError),
        ("b", pa.array([1]), SchemaError),
        ("ts2", pa.array([1]), SchemaError),
    ],
)
def test_arrow_columns_that_do_not_fit(name, array, error):
    with pytest.raises(error, match=repr(name)) as caught:
        one(name, array)
    assert type(caught.value) is error


def test_timestamps_that_lose_digits():
    for array in (pa.array([1], pa.timestamp("ns")), pa.array([2**62], pa.timestamp("s"))):
        with pytest.raises(InvalidArgument, match="'ts'"):
            event_batch(EVENTS, pa.table({"ts": array}))


def broken_text():
    return pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff")]
    )


def test_invalid_text_and_decimals_beyond_their_precision():
    with pytest.raises(InvalidArgument, match=r"'s'.*UTF8"):
        one("s", broken_text())
    with pytest.raises(InvalidArgument, match=r"'s'.*UTF8"):
        one("s", pa.DictionaryArray.from_arrays(pa.array([0]), broken_text()))
    wide = pa.Array.from_buffers(pa.decimal128(6, 2), 1, [None, pa.py_buffer(np.array([10**6, 0], np.int64))])
    with pytest.raises(InvalidArgument, match=r"'d'.*precision"):
        one("d", wide)


def test_tables_without_event_time_or_with_a_column_twice():
    for table in (pa.table({"i": [1]}), pa.table({"ts": pa.array([1, None])})):
        with pytest.raises(InvalidArgument, match="event time"):
            event_batch(EVENTS, table)
    twice = pa.table([pa.array([1]), pa.array([2])], names=["ts", "ts"])
    with pytest.raises(SchemaError, match="'ts' twice"):
        event_batch(EVENTS, twice)


def test_what_exports_an_arrow_stream():
    class Frame:
        def __arrow_c_stream__(self, requested_schema=None):
            return pa.table({"ts": [1, 2]}).__arrow_c_stream__(requested_schema)

    assert event_batch(EVENTS, Frame()).num_rows == 2


def test_pandas():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {
            "ts": pd.to_datetime(["2026-07-01T12:00:00.123456Z", "2026-07-01T12:00:00.0Z"]),
            "i": [1, None],
            "f": [0.5, float("nan")],
            "s": pd.Categorical(["a", "b"]),
        }
    )
    rows = stored_rows(event_batch(EVENTS, frame))
    assert rows[0]["ts"] == NOON_US
    assert [(row["i"], row["f"], row["s"]) for row in rows] == [(1, 0.5, "a"), (None, None, "b")]
    with pytest.raises(InvalidArgument, match="'i'"):
        event_batch(EVENTS, pd.DataFrame({"ts": [1], "i": [1.5]}))
    with pytest.raises(InvalidArgument, match="microseconds"):
        event_batch(EVENTS, [{"ts": pd.Timestamp(1, tz="UTC")}])
    with pytest.raises(SchemaError, match=r"'i'|column i"):
        event_batch(EVENTS, pd.DataFrame({"ts": [1, 2], "i": [1, "x"]}))


# -- stored form ------------------------------------------------------------------------------------


def test_rows_batch_narrows_and_refuses():
    schema = row_table_schema(
        "t", {"k": "int64"}, {"n": Call("sum", "int64"), "d": Call("sum", "decimal(4,2)"), "f": Call("sum", "float64")}
    )
    rows: list[dict[str, Any]] = [{"k": 1, "n": 5, "d": -150, "f": None}, {"k": 2, "n": None, "d": None, "f": 0.5}]
    batch = rows_batch(schema, ["d", "k"], rows)
    assert batch.schema.names == ["d", "k"]
    assert batch.column("d").to_pylist() == [decimal.Decimal("-1.50"), None]
    assert rows_from_batch(rows_batch(schema, ["n", "f"], rows)) == [{"n": 5, "f": None}, {"n": None, "f": 0.5}]
    for name, value in (("n", 2**63), ("n", -(2**80)), ("d", 10_000), ("d", 2**100), ("f", float("inf"))):
        with pytest.raises(OutOfRange, match=name):
            rows_batch(schema, [name], [rows[0], {name: value}])


@pytest.mark.parametrize(
    ("name", "stored"),
    [("int64", -5), ("float64", 0.5), ("bool", True), ("decimal(5,2)", -123), ("string", "x"), ("bytes", b"x"),
     ("timestamp", 2**62)],
)  # fmt: skip
def test_literals(name, stored):
    type_ = ColumnType.parse(name)
    scalar = literal(type_, stored)
    assert scalar.type == arrow_type(type_)
    assert literal(type_, None).as_py() is None
    if name != "timestamp":
        assert scalar.as_py() == type_.from_stored(stored)


_COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


def leaves(name, values):
    column = col(name)
    return st.one_of(
        st.builds(lambda compare, value: compare(column, value), st.sampled_from(_COMPARISONS), values),
        st.lists(values, max_size=3).map(column.isin),
        st.just(column.is_null()),
    )


PREDICATES = st.recursive(
    st.one_of(*[leaves(name, values) for name, values in VALUES.items()]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda t: t[0] & t[1]),
        st.tuples(inner, inner).map(lambda t: t[0] | t[1]),
        inner.map(lambda e: ~e),
    ),
    max_leaves=5,
)


@given(
    st.lists(st.fixed_dictionaries({"ts": VALUES["ts"]}, optional={n: v for n, v in VALUES.items() if n != "ts"})),
    PREDICATES,
)
def test_predicates_select_the_same_rows_as_one_by_one(records, predicate):
    bound = bind(predicate, lambda name: EVENTS.column(name).type)
    types = {c.name: c.type for c in EVENTS.columns}
    batch = event_batch(EVENTS, records)
    rows = stored_rows(batch)
    assert stored_rows(filter_batch(batch, bound, types)) == [row for row in rows if matches(bound, row)]


# -- a stranger's stream ----------------------------------------------------------------------------


def sample(compression=None, rows=50, dictionary=False):
    table = pa.table(
        {
            "ts": pa.array(range(rows), pa.timestamp("us", "UTC")),
            "i": pa.array([None if i % 7 == 0 else i for i in range(rows)]),
            "s": pa.array([f"text {i % 5}" for i in range(rows)]),
            "d": pa.array([decimal.Decimal(i) for i in range(rows)]).cast(pa.decimal128(6, 2)),
            "b": pa.array([i % 2 == 0 for i in range(rows)]),
        }
    )
    if dictionary:
        table = table.set_column(2, "s", table.column("s").dictionary_encode())
    return bytes(encode_ipc(table, compression))


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_honest_streams(compression, dictionary):
    data = sample(compression, dictionary=dictionary)
    table = decode_ipc(data, **LIMITS)
    assert table.num_rows == 50
    assert table.column("s").type == pa.string()
    assert table.to_pylist() == pa.ipc.open_stream(data).read_all().to_pylist()
    assert decode_ipc(memoryview(bytearray(data)), **LIMITS).num_rows == 50


def test_an_empty_table_and_several_batches():
    empty = pa.table({"ts": pa.array([], pa.int64())})
    assert decode_ipc(encode_ipc(empty), **LIMITS).num_rows == 0
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, empty.schema) as writer:
        for at in range(3):
            writer.write_batch(pa.record_batch({"ts": pa.array([at])}))
    assert decode_ipc(sink.getvalue(), **LIMITS).column("ts").to_pylist() == [0, 1, 2]


def test_a_small_stream_that_expands():
    zeros = pa.table({"i": pa.array(np.zeros(1 << 22, np.int64))})
    data = bytes(encode_ipc(zeros, "zstd"))
    assert len(data) < 20_000
    with pytest.raises(ResourceExhausted, match="bytes"):
        decode_ipc(data, max_bytes=1 << 24, max_rows=1 << 30)
    with pytest.raises(ResourceExhausted, match="rows"):
        decode_ipc(data, max_bytes=1 << 30, max_rows=1 << 20)


def test_a_small_stream_that_declares_many_rows():
    batch = pa.record_batch([pa.nulls(2**31 - 1)], names=["n"])
    data = bytes(encode_ipc(batch))
    assert len(data) < 400
    with pytest.raises(ResourceExhausted, match="rows"):
        decode_ipc(data, **LIMITS)


def test_a_dictionary_that_expands():
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(5_000, np.int32)), pa.array(["x" * 10_000]))
    data = bytes(encode_ipc(pa.table({"s": text})))
    assert len(data) < 40_000
    with pytest.raises(ResourceExhausted, match="dictionaries"):
        decode_ipc(data, **LIMITS)
    assert decode_ipc(data, max_bytes=1 << 26, max_rows=5_000).num_rows == 5_000


def test_empty_batches_are_not_free():
    sink = pa.BufferOutputStream()
    schema = pa.schema([pa.field(f"c{i}", pa.null()) for i in range(100)])
    with pa.ipc.new_stream(sink, schema) as writer:
        for _ in range(200):
            writer.write_batch(pa.RecordBatch.from_pylist([], schema=schema))
    with pytest.raises(ResourceExhausted, match="bytes"):
        decode_ipc(sink.getvalue(), **LIMITS)


def test_bad_offsets_and_bad_text_are_found():
    offsets = pa.py_buffer(np.array([0, 1 << 30, 2, 3], np.int32))
    array = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abc")])
    array.validate()
    for bad in (array, broken_text()):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, pa.schema([pa.field("s", pa.string())])) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays([bad], names=["s"]))
        with pytest.raises(InvalidArgument, match="not a valid Arrow IPC stream"):
            decode_ipc(sink.getvalue(), **LIMITS)


@pytest.mark.parametrize(
    "array",
    [pa.array([[1]]), pa.array([{"a": 1}]), pa.array(["x"], pa.string_view()), pa.array([1], pa.date32()),
     pa.RunEndEncodedArray.from_arrays([1], [1])],
)  # fmt: skip
def test_columns_that_are_not_plain(array):
    with pytest.raises(InvalidArgument):
        decode_ipc(encode_ipc(pa.table({"x": array})), **LIMITS)


def test_a_decimal_of_absurd_scale():
    """Casting one crashes pyarrow 26; found by the mutations below."""
    scale = struct.pack("<i", 2)
    table = pa.table({"d": pa.array(["1.00"]).cast(pa.decimal128(6, 2))})
    data = bytes(encode_ipc(table))
    found = 0
    for at in range(len(data) - 4):
        if data[at : at + 4] == scale:
            changed = data[:at] + struct.pack("<i", -(2**31)) + data[at + 4 :]
            with pytest.raises(InvalidArgument) as caught:
                event_batch(EVENTS, decode_ipc(changed, **LIMITS))
            found += "plain type" in str(caught.value)
    assert found


def test_streams_cut_off_anywhere():
    data = sample("lz4", 5)
    for end in range(len(data)):
        with pytest.raises(InvalidArgument):
            decode_ipc(data[:end], **LIMITS)
    with pytest.raises(InvalidArgument, match="follow"):
        decode_ipc(data + b"\x00", **LIMITS)


def test_no_streams_at_all():
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([])) as writer:
        writer.close()
    for data in (b"", b"x", b"\xff" * 64, bytes(64), bytes(sink.getvalue()), struct.pack("<Ii", 0xFFFFFFFF, 0)):
        with pytest.raises(InvalidArgument, match="not a valid Arrow IPC stream"):
            decode_ipc(data, **LIMITS)


@given(st.binary(max_size=300))
def test_any_bytes_after_a_mark(data):
    with pytest.raises(InvalidArgument):
        decode_ipc(struct.pack("<Ii", 0xFFFFFFFF, len(data) or 8) + data, **LIMITS)


def mutate_many(count, seed):
    """Changes bytes of valid streams and uses whatever still decodes; run in a process of its own."""
    rng = random.Random(seed)
    originals = [sample(c, rows, d) for c in (None, "lz4", "zstd") for d in (False, True) for rows in (3, 50)]
    decoded = 0
    for _ in range(count):
        data = bytearray(rng.choice(originals))
        for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] ^= 1 << rng.randrange(8)
                case 1:
                    data[at] = rng.randrange(256)
                case 2:
                    number = rng.choice((0, 1, -1, 2**31 - 1, -(2**31), 1 << 20, len(data)))
                    data[at : at + 4] = struct.pack("<i", number)[: len(data) - at]
                case 3:
                    number = rng.choice((-1, 2**63 - 1, -(2**63), 1 << 40, len(data)))
                    data[at : at + 8] = struct.pack("<q", number)[: len(data) - at]
        try:
            table = decode_ipc(bytes(data), **LIMITS)
            event_batch(EVENTS, table)
        except (InvalidArgument, ResourceExhausted):
            continue
        decoded += 1
        stored = [row for batch in table.to_batches() for row in stored_rows(batch)]
        zlib.crc32(repr(stored).encode())
    return decoded


@pytest.mark.story
@pytest.mark.timeout(300)
def test_twenty_thousand_damaged_streams_in_a_process_of_their_own():
    code = "from tests.test_arrow import mutate_many; print(mutate_many(20_000, 7))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"it ended with {done.returncode}\n{done.stderr[-2000:]}"
    assert 0 < int(done.stdout) < 20_000


@given(st.data())
def test_damaged_streams_raise_typed_errors(data):
    stream = bytearray(sample(data.draw(st.sampled_from([None, "lz4"])), 5))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(stream) - 1))
        stream[at] = data.draw(st.integers(0, 255))
    try:
        table = decode_ipc(bytes(stream), **LIMITS)
    except (InvalidArgument, ResourceExhausted):
        return
    table.validate(full=True)


@given(st.lists(st.sampled_from([True, False, None]), max_size=40), st.integers(0, 40))
def test_places_of_what_is_true(values: list[bool | None], skip: int) -> None:
    array = pa.array(values, pa.bool_()).slice(skip)
    assert true_places(array).tolist() == [i for i, value in enumerate(values[skip:]) if value]
