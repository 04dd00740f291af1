"""Keys: the order of bytes is the order of values, prefixes are prefixes, and columns agree with single keys.

The tables at the heads of ``kivi/encoding/keys.py`` and ``kivi/encoding/keyspaces.py`` have a literal test per line;
the three properties that the store relies on are tested on random keys of every type.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.arrow.columns import arrow_from_stored
from kivi.encoding import keys
from kivi.encoding import keyspaces as spaces
from kivi.encoding.keys import decode_key, decode_key_columns, encode_key, encode_key_columns, prefix_end
from kivi.encoding.keyspaces import Space
from kivi.errors import DataLoss, InvalidArgument, ResourceExhausted
from kivi.model.types import ColumnType

T = ColumnType.parse
DECIMAL = T("decimal(18,3)")
INT64 = st.integers(-(2**63), 2**63 - 1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int64": INT64 | st.integers(-3, 3),
    "decimal(18,3)": st.integers(-(10**18) + 1, 10**18 - 1),
    "timestamp": INT64,
    "float64": st.floats(allow_nan=False, allow_infinity=False).map(lambda v: v + 0.0),
    "string": st.text(alphabet="\0\x01abé€\xff😀", max_size=5),
    "bytes": st.binary(max_size=5) | st.lists(st.sampled_from(b"\x00\x01\xff"), max_size=5).map(bytes),
}
ARROW = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "decimal": pa.decimal128(18, 3),
    "timestamp": pa.timestamp("us", "UTC"),
    "float64": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
}


@pytest.fixture(params=[keys.FEW_ROWS, 0], ids=["few one by one", "all in columns"], scope="module", autouse=True)
def few_rows(request: pytest.FixtureRequest) -> Iterator[None]:
    """A few rows are encoded one by one: what is asked of few is asked of columns, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "FEW_ROWS", request.param)
        yield


@st.composite
def typed_keys(draw: st.DrawFn, max_rows: int = 12) -> tuple[list[ColumnType], list[tuple[Any, ...]]]:
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=4))
    rows = draw(st.lists(st.tuples(*(VALUES[name] for name in names)), max_size=max_rows))
    return [T(name) for name in names], rows


def column(type_: ColumnType, values: list[Any]) -> Any:
    if type_.name in ("decimal", "timestamp"):
        return arrow_from_stored(type_, np.array(values, np.int64))
    return pa.array(values, ARROW[type_.name])


def columns(types: list[ColumnType], rows: list[tuple[Any, ...]]) -> list[Any]:
    return [column(type_, [row[i] for row in rows]) for i, type_ in enumerate(types)]


@pytest.mark.parametrize(
    ("type_", "value", "expected"),
    [
        ("bool", False, "00"),
        ("bool", True, "01"),
        ("int64", 0, "8000000000000000"),
        ("int64", -1, "7fffffffffffffff"),
        ("int64", -(2**63), "0000000000000000"),
        ("int64", 2**63 - 1, "ffffffffffffffff"),
        ("decimal(18,3)", 252, "80000000000000fc"),
        ("timestamp", 1, "8000000000000001"),
        ("float64", 0.0, "8000000000000000"),
        ("float64", -0.0, "8000000000000000"),
        ("float64", 1.0, "bff0000000000000"),
        ("float64", -1.0, "400fffffffffffff"),
        ("string", "", "0000"),
        ("string", "a", "610000"),
        ("string", "a\0", "6100ff0000"),
        ("string", "é", "c3a90000"),
        ("bytes", b"\0\0", "00ff00ff0000"),
        ("bytes", b"\xff", "ff0000"),
    ],
)
def test_byte_table(type_: str, value: Any, expected: str) -> None:
    assert encode_key([T(type_)], [value]).hex() == expected
    assert encode_key_columns([T(type_)], [column(T(type_), [value])]).to_pylist()[0].hex() == expected


@given(typed_keys())
def test_round_trip(case: tuple[list[ColumnType], list[tuple[Any, ...]]]) -> None:
    types, rows = case
    for row in rows:
        assert decode_key(types, encode_key(types, row)) == row
        assert keys.key_width(types) in (None, len(encode_key(types, row)))
    assert (keys.key_width(types) is None) == any(type_.name in ("string", "bytes") for type_ in types)


@given(typed_keys())
def test_order_of_bytes_is_order_of_values(case: tuple[list[ColumnType], list[tuple[Any, ...]]]) -> None:
    types, rows = case
    comparable = [tuple(v.encode() if isinstance(v, str) else v for v in row) for row in rows]
    for (left, a), (right, b) in itertools.combinations(zip(comparable, rows, strict=True), 2):
        assert (left < right) == (encode_key(types, a) < encode_key(types, b))
        assert (left == right) == (encode_key(types, a) == encode_key(types, b))


@given(typed_keys())
def test_a_prefix_of_the_values_is_a_prefix_of_exactly_their_keys(
    case: tuple[list[ColumnType], list[tuple[Any, ...]]],
) -> None:
    types, rows = case
    encoded = [encode_key(types, row) for row in rows]
    for row in rows:
        for count in range(len(types) + 1):
            prefix = encode_key(types, row[:count])
            end = prefix_end(prefix)
            for other, key in zip(rows, encoded, strict=True):
                expected = other[:count] == row[:count]
                assert key.startswith(prefix) == expected
                assert (prefix <= key and (end is None or key < end)) == expected


@given(typed_keys(), st.integers(0, 3), st.booleans())
def test_columns_agree_with_single_keys(
    case: tuple[list[ColumnType], list[tuple[Any, ...]]], skip: int, chunked: bool
) -> None:
    types, rows = case
    arrays = [array.slice(skip) for array in columns(types, rows)]
    if chunked:
        arrays = [pa.chunked_array([a.slice(0, 2), a.slice(2), a.slice(0, 0)]) for a in arrays]
    expected = [encode_key(types, row) for row in rows[skip:]]
    encoded = encode_key_columns(types, arrays)
    encoded.validate(full=True)
    assert encoded.type == pa.large_binary()
    assert encoded.to_pylist() == expected
    if len(encoded) > 1:
        assert decode_key(types, encoded.slice(1)[0].as_py()) == rows[skip + 1]


@given(typed_keys(), st.integers(0, 3), st.booleans(), st.data())
def test_columns_in_codes_and_keys_of_two_parts_agree_with_single_keys(
    case: tuple[list[ColumnType], list[tuple[Any, ...]]], skip: int, one_width: bool, data: st.DataObject
) -> None:
    types, rows = case
    if one_width:  # as services and servers often are
        rows = [tuple(v[:1] * 2 if isinstance(v, (str, bytes)) else v for v in row) for row in rows if "" not in row]
    rows = rows * 3
    arrays = [
        array.dictionary_encode() if array.type in (pa.string(), pa.binary()) and data.draw(st.booleans()) else array
        for array in (array.slice(skip) for array in columns(types, rows))
    ]
    expected = [encode_key(types, row) for row in rows[skip:]]
    at = data.draw(st.integers(0, len(types)))
    first: Any = encode_key_columns(types[:at], arrays[:at]) if at else None
    encoded: Any = encode_key_columns(types[at:], arrays[at:], first) if at < len(types) else first
    encoded.validate(full=True)
    assert encoded.type == pa.large_binary() and encoded.to_pylist() == expected


@given(typed_keys(), st.integers(0, 3))
def test_columns_of_keys_are_decoded(case: tuple[list[ColumnType], list[tuple[Any, ...]]], skip: int) -> None:
    types, rows = case
    keys = pa.array([encode_key(types, row) for row in rows], pa.large_binary()).slice(skip)
    decoded = decode_key_columns(types, keys)
    for array, expected in zip(decoded, columns(types, rows[skip:]), strict=True):
        array.validate(full=True)
        assert array.type == expected.type and array.equals(expected)


@given(typed_keys(), st.data())
def test_damaged_keys_in_columns(case: tuple[list[ColumnType], list[tuple[Any, ...]]], data: st.DataObject) -> None:
    """Bytes that are no key are found in columns as they are one by one, and no others are."""
    types, rows = case
    keys = [encode_key(types, row) for row in rows]
    for _ in range(data.draw(st.integers(0, 2)) if keys else 0):
        i = data.draw(st.integers(0, len(keys) - 1))
        at = data.draw(st.integers(0, len(keys[i])))
        new = data.draw(st.binary(max_size=2))
        keys[i] = keys[i][:at] + new + keys[i][at + data.draw(st.integers(0, 2)) :]
    try:
        expected = [decode_key(types, key) for key in keys]
    except DataLoss:
        with pytest.raises(DataLoss):
            decode_key_columns(types, pa.array(keys, pa.large_binary()))
        return
    decoded = decode_key_columns(types, pa.array(keys, pa.large_binary()))
    assert all(len(array) == len(expected) for array in decoded)
    for i, (type_, array) in enumerate(zip(types, decoded, strict=True)):
        if type_.name == "float64":  # damage may make a NaN, of any bits
            assert repr(array.to_pylist()) == repr([row[i] for row in expected])
        else:
            assert array.equals(column(type_, [row[i] for row in expected]))


@pytest.mark.parametrize("type_", sorted(VALUES))
def test_no_keys_to_decode(type_: str) -> None:
    (decoded,) = decode_key_columns([T(type_)], pa.array([], pa.large_binary()))
    assert decoded.type == ARROW[T(type_).name] and len(decoded) == 0


@pytest.mark.parametrize("type_", sorted(VALUES))
def test_no_rows(type_: str) -> None:
    kind = T(type_)
    for empty in (pa.array([], ARROW[kind.name]), pa.chunked_array([], ARROW[kind.name])):
        encoded = encode_key_columns([kind], [empty])
        assert encoded.type == pa.large_binary() and len(encoded) == 0


def test_dictionary_strings() -> None:
    plain = pa.array(["b", "a\0", "b", "", "x"])
    encoded = plain.dictionary_encode()
    for array in (encoded, encoded.slice(1, 3), plain.cast(pa.large_string())):
        expected = [encode_key([T("string")], [v]) for v in array.to_pylist()]
        assert encode_key_columns([T("string")], [array]).to_pylist() == expected


def test_a_zero_byte_outside_a_slice_is_not_looked_at() -> None:
    sliced = pa.array(["\0", "a", "b", "\0"]).slice(1, 2)
    assert encode_key_columns([T("string")], [sliced]).to_pylist() == [b"a\0\0", b"b\0\0"]


def test_a_null_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="a null key"):
        encode_key([T("int64")], [None])
    for type_, array in (
        ("int64", pa.array([1, None])),
        ("int64", pa.chunked_array([[None]], pa.int64())),
        ("string", pa.array(["a", None]).dictionary_encode()),
        ("string", pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))),
    ):
        with pytest.raises(InvalidArgument, match="a null key"):
            encode_key_columns([T(type_)], [array])


def test_a_key_has_at_most_64_kib() -> None:
    longest = "x" * (keys.KEY_BYTES_MAX - 2)
    assert len(encode_key([T("string")], [longest])) == keys.KEY_BYTES_MAX
    assert len(encode_key_columns([T("string")], [pa.array([longest])])[0].as_py()) == keys.KEY_BYTES_MAX
    with pytest.raises(ResourceExhausted, match="key_bytes_max"):
        encode_key([T("string")], [longest + "x"])
    with pytest.raises(ResourceExhausted, match="key_bytes_max"):
        encode_key_columns([T("string")], [pa.array(["a", longest + "x"])])


def test_more_values_than_columns_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="2 values"):
        encode_key([T("int64")], [1, 2])


@pytest.mark.parametrize(
    ("types", "data"),
    [
        (["int64"], b"\x80" * 7),
        (["int64"], b"\x80" * 9),
        (["bool"], b"\x02"),
        (["bool"], b""),
        (["string"], b"a"),
        (["string"], b"a\0"),
        (["string"], b"\xff\0\0"),
        (["string", "bool"], b"a\0\0"),
        (["bytes"], b""),
        (["float64"], b"1234567"),
    ],
)
def test_bytes_that_are_no_key_are_data_loss(types: list[str], data: bytes) -> None:
    parsed = [T(t) for t in types]
    with pytest.raises(DataLoss):
        decode_key(parsed, data)


@given(st.binary(max_size=4), st.binary(max_size=4))
def test_prefix_end(prefix: bytes, other: bytes) -> None:
    end = prefix_end(prefix)
    if end is None:
        assert prefix == b"\xff" * len(prefix)
    else:
        assert prefix < end
        assert not end.startswith(prefix)
        assert (prefix <= other < end) == other.startswith(prefix)


def test_timestamps_of_other_units_and_scales_are_converted() -> None:
    seconds = pa.array([1, 2], pa.timestamp("s"))
    assert encode_key_columns([T("timestamp")], [seconds]).to_pylist() == [
        encode_key([T("timestamp")], [n]) for n in (1_000_000, 2_000_000)
    ]
    narrow = pa.array([1, -2], pa.int64()).cast(pa.decimal128(20, 0))
    expected = [encode_key([DECIMAL], [n]) for n in (1000, -2000)]
    assert encode_key_columns([DECIMAL], [narrow]).to_pylist() == expected


def test_floats_are_ordered_through_the_extremes() -> None:
    ordered = [-1.7976931348623157e308, -1.0, -5e-324, 0.0, 5e-324, 1.0, math.pi, 1.7976931348623157e308]
    encoded = [encode_key([T("float64")], [v]) for v in ordered]
    assert encoded == sorted(encoded)


# -- key spaces -------------------------------------------------------------------------------------


def test_every_space_has_its_byte() -> None:
    names = "META CATALOG ROW VERSION EVENT EVENT_DATA TOKEN BATCH TIME TOMBSTONE TOKENS TOKEN_DATA FACT GATHERED TAKEN"
    listed = names.split()
    assert [(s.name, int(s)) for s in Space] == [(name, i) for i, name in enumerate(listed, 1)]


def test_golden_space_keys() -> None:
    assert spaces.meta_key("format") == b"\x01format"
    assert spaces.row_key(7, b"k") == b"\x03\0\0\0\x07k"
    assert spaces.version_key(7, b"k", 1) == b"\x04\0\0\0\x07k" + b"\xff" * 7 + b"\xfe"
    assert spaces.event_meta_key(7) == b"\x05\0\0\0\x07\0"
    assert spaces.event_header_key(7, 258) == b"\x05\0\0\0\x07\x01\0\0\0\0\0\0\x01\x02"
    assert spaces.event_data_key(7, 258) == b"\x06\0\0\0\x07\0\0\0\0\0\0\x01\x02"
    assert spaces.token_key("t") == b"\x07t"
    assert spaces.batch_key("s", 3) == b"\x08s\0\0\0\0\0\0\0\0\0\x03"
    assert spaces.tombstone_key(1, 7, b"k") == b"\x0a\0\0\0\0\0\0\0\x01\0\0\0\x07k"
    assert spaces.space_prefix(Space.TOKEN) == b"\x07"
    assert spaces.time_key(5) == b"\x09\0\0\0\0\0\0\0\x05"


@given(st.integers(0, 2**32 - 1), st.binary(max_size=9), st.integers(0, 2**64 - 1))
def test_split(table: int, key: bytes, cts: int) -> None:
    assert spaces.split_row_key(spaces.row_key(table, key)) == (table, key)
    assert spaces.split_version_key(spaces.version_key(table, key, cts)) == (table, key, cts)
    assert spaces.split_tombstone_key(spaces.tombstone_key(cts, table, key)) == (cts, table, key)
    assert spaces.version_key(table, key, cts).startswith(spaces.version_prefix(table, key))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_versions_are_newest_first(a: int, b: int) -> None:
    assert (spaces.version_key(1, b"k", a) < spaces.version_key(1, b"k", b)) == (a > b)


def test_meta_of_an_event_table_comes_before_its_headers_and_after_other_tables() -> None:
    listed = [
        spaces.event_header_key(6, 2**64 - 1),
        spaces.event_meta_key(7),
        spaces.event_header_key(7, 0),
        spaces.event_header_key(7, 1),
        spaces.event_meta_key(8),
    ]
    assert listed == sorted(listed)
    end = prefix_end(spaces.table_prefix(Space.EVENT, 7))
    assert end is not None and listed[3] < end <= listed[4]
