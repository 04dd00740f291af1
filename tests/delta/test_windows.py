"""Sliding windows over rows of panes, and rows of one transaction: what folding each window by itself gives."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.delta import windows
from kivi.delta.derive import run_from_rows
from kivi.delta.ops import Barrier, RowOp, fold
from kivi.delta.overlay import FixedRows, fold_over
from kivi.delta.rolling import CTS, folded
from kivi.delta.runs import DeltaRun, with_cts
from kivi.delta.windows import slid
from kivi.encoding.base_rows import RowLayout
from kivi.encoding.keys import encode_key
from kivi.errors import OutOfRange
from kivi.model.schema import TableSchema
from kivi.model.types import INT64_MAX, INT64_MIN, ColumnType
from tests.delta.test_runs import SLOT, aggregate

_TIME = ColumnType("timestamp")
_WIDE = st.sampled_from([INT64_MIN, -1, 0, 1, 2**32, INT64_MAX]) | st.integers(-9, 9)
_VALUES = {"float64": st.integers(-8, 8).map(lambda n: n / 4)}
TABLES = {1: aggregate("i", SLOT), 2: aggregate("s", SLOT), 3: aggregate(SLOT)}
HEADS: dict[int, list[tuple[Any, ...]]] = {1: [(-1,), (0,), (7,)], 2: [("",), ("a",), ("a\0b",)], 3: [()]}


@st.composite
def panes(draw: st.DrawFn, table: int, pane: int) -> dict[tuple[Any, ...], dict[int, Any]]:
    """Deltas by key, of some panes of some groups. A SUM has one always."""
    schema, found = TABLES[table], {}
    columns = {i: _VALUES.get(c.type.name, _WIDE) for i, c in enumerate(schema.columns)}
    for _ in range(draw(st.integers(1, 25))):
        key = (*draw(st.sampled_from(HEADS[table])), draw(st.integers(-30, 60)) * pane)
        kept = [i for i, c in enumerate(schema.columns) if c.operator == "sum" or draw(st.booleans())]
        found[key] = {i: draw(columns[i]) for i in kept}
    return found


def run_of(schema: TableSchema, rows: dict[tuple[Any, ...], dict[int, Any]]) -> DeltaRun:
    types = [column.type for column in schema.key]
    return with_cts(run_from_rows(schema, [(encode_key(types, key), CTS, deltas) for key, deltas in rows.items()]), CTS)


def combined(schema: TableSchema, parts: list[dict[int, Any]]) -> tuple[Any, ...]:
    version = fold(schema, None, [(at, RowOp(Barrier.PATCH, {}, each)) for at, each in enumerate(parts, 1)], len(parts))
    assert version is not None
    return version.cells


def cells_of(schema: TableSchema, rows: FixedRows) -> dict[bytes, tuple[Any, ...]]:
    layout = RowLayout.of(schema)
    versions = map(layout.decode, layout.bytes_of(rows.rows))
    return dict(zip(rows.keys.to_pylist(), (version.cells for version in versions), strict=True))


@given(
    st.data(),
    st.sampled_from(sorted(TABLES)),
    st.sampled_from([(10, 5), (15, 10), (60, 1), (13, 1), (120, 7), (9, 9), (7, 3)]),
    st.sampled_from([1, 3, 65_536]),
)
def test_a_window_is_what_its_panes_are_together(
    data: st.DataObject, table: int, lengths: tuple[int, int], at_once: int
) -> None:
    """However many panes are missing, of whatever groups, wherever parts are cut, beyond 64 bits too."""
    size, slide = lengths
    schema = TABLES[table]
    rows = data.draw(panes(table, math.gcd(size, slide)))
    expected: dict[bytes, list[dict[int, Any]]] = {}
    for key in sorted(rows):
        for begins in range(key[-1] // slide * slide, key[-1] - size, -slide):
            name = encode_key([column.type for column in schema.key], (*key[:-1], begins))
            expected.setdefault(name, []).append(rows[key])
    with mock.patch.object(windows, "_ROWS", at_once):
        parts = [part() for part in slid(schema, run_of(schema, rows), size, slide, lambda held: None)]
    found = [item for part in parts for item in cells_of(schema, folded(schema, part)).items()]
    assert found == [(key, combined(schema, expected[key])) for key in sorted(expected)]


@given(st.data())
def test_rows_of_one_transaction_are_folded_over_nothing(data: st.DataObject) -> None:
    run = run_of(TABLES[1], data.draw(panes(1, 1)))
    layout = RowLayout.of(TABLES[1])
    expected = fold_over(layout, FixedRows.none(layout), [(run, range(run.rows))], CTS)
    found = folded(TABLES[1], run)
    assert found.keys.equals(expected.keys)
    assert np.array_equal(found.rows, expected.rows)


def test_windows_that_are_too_many_are_refused_before_they_are_counted() -> None:
    """With the error that the caller's limit has."""
    schema = TABLES[3]
    run = run_of(schema, {(0,): {0: 1}, (1,): {0: 1}})

    def check(held: int) -> None:
        if held > 2**40:
            raise MemoryError

    with pytest.raises(MemoryError):
        list(slid(schema, run, 2**62, 1, check))


def test_a_part_has_no_more_windows_than_are_held_at_once() -> None:
    """However many there are of one pane: a day long, and one every microsecond."""
    schema, day_us = TABLES[3], 86_400_000_000
    run = run_of(schema, {(0,): {0: 1}, (day_us,): {0: 2}})
    part = next(slid(schema, run, day_us, 1, lambda held: None))()
    assert 0 < part.rows <= windows._ROWS
    assert part.key_at(0) == encode_key([_TIME], (1 - day_us,))


def test_sums_of_floats_that_leave_the_finite_numbers_are_out_of_range() -> None:
    schema = TABLES[3]
    real = schema.index_of["sum_x"]
    run = run_of(schema, {(0,): {real: 1e308}, (1,): {real: 1e308}, (5,): {real: 1e308}})
    assert sum(part().rows for part in slid(schema, run, 1, 1, lambda held: None)) == 3
    with pytest.raises(OutOfRange, match="add up to more than a float64"):
        [part() for part in slid(schema, run, 2, 1, lambda held: None)]
