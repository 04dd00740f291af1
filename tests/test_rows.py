"""Base rows: what is encoded is decoded, NumPy reads the same bytes, and damage never crashes.

The byte table at the head of ``kivi/encoding/base_rows.py`` has one literal row here. If it changes, data on disk is
unreadable.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.encoding.base_rows import RowLayout, Version
from kivi.errors import DataLoss
from kivi.model.schema import Column, TableSchema
from kivi.model.types import INT64_MAX, INT64_MIN, ColumnType

INT64 = st.integers(INT64_MIN, INT64_MAX)
INT128 = st.integers(-(2**127), 2**127 - 1)
FLOAT = st.floats()  # a fold may have left the finite numbers
# What a column may be declared as, and its cells in stored form.
CELLS: dict[tuple[str, str | None], st.SearchStrategy[Any]] = {
    ("bool", None): st.booleans(),
    ("int64", None): INT64,
    ("float64", None): FLOAT,
    ("decimal(12,2)", None): INT64,
    ("timestamp", None): INT64,
    ("string", None): st.text(max_size=5),
    ("bytes", None): st.binary(max_size=5),
    ("int64", "sum"): INT128 | INT64,
    ("decimal(18,3)", "sum"): INT128,
    ("float64", "sum"): FLOAT,
    ("int64", "min"): INT64,
    ("timestamp", "max"): INT64,
    ("decimal(5,2)", "max"): INT64,
}
FIXED = sorted((d for d in CELLS if d[0] not in ("string", "bytes")), key=str)
CTS = st.integers(0, 2**64 - 1)


def schema_of(declared: list[tuple[str, Any]]) -> TableSchema:
    columns = [Column(f"c{i}", ColumnType.parse(name), op) for i, (name, op) in enumerate(declared)]
    return TableSchema("t", "row", (Column("k", ColumnType("int64")),), tuple(columns))


@st.composite
def rows(draw: st.DrawFn, kinds: Any = tuple(CELLS)) -> tuple[TableSchema, list[Version]]:
    declared = draw(st.lists(st.sampled_from(kinds), max_size=20))
    cells = st.tuples(*(st.none() | CELLS[kind] for kind in declared))
    alive = st.builds(Version, CTS, st.just(True), cells)
    dead = st.builds(Version, CTS, st.just(False), st.just(()))
    return schema_of(declared), draw(st.lists(alive | dead, max_size=5))


def exact(version: Version) -> Any:
    """Comparable: every nan is one, 0.0 is not -0.0, True is not 1."""
    return version.cts, version.alive, [(type(cell), repr(cell)) for cell in version.cells]


@given(rows())
def test_round_trip(case: tuple[TableSchema, list[Version]]) -> None:
    schema, versions = case
    layout = RowLayout.of(schema)
    assert RowLayout.of(schema) is layout
    for version in versions:
        data = layout.encode(version)
        assert exact(layout.decode(data)) == exact(version)
        assert RowLayout.stamp_of(data) == version.cts
        assert len(data) >= layout.width and (len(data) == layout.width or not layout.fixed)
        assert layout.encode(layout.decode(data)) == data


@given(rows(FIXED))
def test_numpy_reads_the_bytes_that_struct_wrote(case: tuple[TableSchema, list[Version]]) -> None:
    schema, versions = case
    layout = RowLayout(schema)
    assert layout.fixed and layout.dtype.itemsize == layout.width
    found = np.frombuffer(b"".join(layout.encode(version) for version in versions), layout.dtype)
    for row, version in zip(found, versions, strict=True):
        assert (int(row["cts"]), int(row["flags"])) == (version.cts, int(version.alive))
        for i, (column, cell) in enumerate(zip(schema.columns, version.cells, strict=False)):
            assert bool(row["nulls"][i >> 3] >> (i & 7) & 1) == (cell is None)
            if f"c{i}" in layout.dtype.names:  # type: ignore[operator]
                stored = row[f"c{i}"].item()
            else:
                stored = (int(row[f"c{i}_hi"]) << 64) + int(row[f"c{i}_lo"])
                assert column.operator == "sum" and column.type.is_integer
            assert repr(stored) == repr(type(stored)(cell or 0) if cell is None else type(stored)(cell))
        if not version.alive:
            assert not any(row.tobytes()[9:])  # consolidation folds over tombstones as zeros


@pytest.mark.parametrize(
    "value",
    [0, 1, -1, INT64_MAX, INT64_MAX + 1, INT64_MIN, INT64_MIN - 1, 2**64 - 1, 2**64, -(2**64), 2**127 - 1, -(2**127)],
)
@pytest.mark.parametrize("type_", ["int64", "decimal(18,0)"])
def test_a_sum_has_128_bits_and_the_same_width_whatever_it_holds(type_: str, value: int) -> None:
    layout = RowLayout(schema_of([(type_, "sum")]))
    data = layout.encode(Version(1, True, (value,)))
    assert len(data) == 8 + 1 + 1 + 16
    assert int.from_bytes(data[10:], "little", signed=True) == value  # low, then high: one number of 128 bits
    assert layout.decode(data).cells == (value,)


GOLDEN = schema_of(
    [("bool", None), ("int64", None), ("float64", None), ("decimal(5,2)", None), ("timestamp", None), ("string", None),
     ("bytes", None), ("int64", "sum"), ("int64", "max"), ("string", None)]
)  # fmt: skip
ROW = Version(0x0102, True, (True, -2, 1.5, 120, 1_000_000, "é", b"\0\xff", -(2**64) - 3, None, ""))
BYTES = bytes.fromhex(
    "0201000000000000"  # cts
    "01"  # alive
    "0001"  # nulls: bit 8
    "01"  # bool
    "feffffffffffffff"  # int64 -2
    "000000000000f83f"  # float64 1.5
    "7800000000000000"  # decimal 1.20
    "40420f0000000000"  # timestamp: 1 s
    "02000000"  # string: 2 bytes of the tail
    "02000000"  # bytes: 2
    "fdffffffffffffff" "feffffffffffffff"  # sum: low, high
    "0000000000000000"  # max: null
    "00000000"  # string: empty
    "c3a9" "00ff"  # tail
)  # fmt: skip


def test_golden_bytes() -> None:
    layout = RowLayout(GOLDEN)
    assert layout.encode(ROW).hex() == BYTES.hex()
    assert layout.decode(BYTES) == ROW
    dead = bytes.fromhex("030200000000000000") + bytes(layout.width - 9)
    assert layout.encode(Version(0x0203, False, ())).hex() == dead.hex()
    assert layout.decode(dead) == Version(0x0203, False, ())


def test_a_row_without_columns() -> None:
    layout = RowLayout(schema_of([]))
    assert layout.encode(Version(1, True, ())) == bytes([1, 0, 0, 0, 0, 0, 0, 0, 1])
    assert layout.dtype.itemsize == 9


def test_every_truncation_is_data_loss() -> None:
    layout = RowLayout(GOLDEN)
    for size in range(len(BYTES)):
        with pytest.raises(DataLoss, match=f"a base row of {size} bytes is damaged .*: run kivi verify"):
            layout.decode(BYTES[:size])


def test_bytes_after_the_end_are_data_loss() -> None:
    """As of a row of another schema. A tombstone has no tail at all."""
    for version in (ROW, Version(1, False, ())):
        with pytest.raises(DataLoss):
            RowLayout(GOLDEN).decode(RowLayout(GOLDEN).encode(version) + b"\0")
    fixed = RowLayout(schema_of([("int64", None)]))
    with pytest.raises(DataLoss):
        fixed.decode(fixed.encode(Version(1, True, (1,))) + bytes(8))


@pytest.mark.parametrize("tail", [b"\xc3\x28\x00\xff", b"\xff\xff\x00\xff"])
def test_text_that_is_not_utf8_is_data_loss(tail: bytes) -> None:
    with pytest.raises(DataLoss):
        RowLayout(GOLDEN).decode(BYTES[:-4] + tail)


@given(st.binary(max_size=90) | st.tuples(st.integers(0, len(BYTES) - 1), st.integers(1, 255)).map(
    lambda flip: BYTES[: flip[0]] + bytes([BYTES[flip[0]] ^ flip[1]]) + BYTES[flip[0] + 1 :]
))  # fmt: skip
def test_any_bytes_are_a_row_or_data_loss(data: bytes) -> None:
    """Whether it is the right row is for the checksums below to say."""
    try:
        version = RowLayout(GOLDEN).decode(data)
    except DataLoss:
        return
    assert len(version.cells) == (len(GOLDEN.columns) if version.alive else 0)


def test_a_layout_is_of_a_table_and_its_columns() -> None:
    one, two = schema_of([("int64", None)]), schema_of([("int64", "sum")])
    assert RowLayout.of(one) is not RowLayout.of(two)
    assert RowLayout.of(one).width + 8 == RowLayout.of(two).width
