"""Delta runs: columns must do exactly what plain Python does, to the last bit of a float.

The models here are a dozen lines each: ``derived`` groups events one by one, ``fold_row`` folds one row with
``kivi.delta.ops``. Everything columnar is compared with them on random events, runs and base rows.
"""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.arrow.columns import arrow_from_stored
from kivi.delta import grouping
from kivi.delta.derive import Derivation, derive, derive_all, derive_each, derive_small, run_from_rows
from kivi.delta.gather import gather, merged_items
from kivi.delta.ops import Barrier, RowOp, fold
from kivi.delta.runs import Cells, DeltaRun, with_cts
from kivi.encoding.base_rows import RowLayout, Version
from kivi.encoding.keys import encode_key
from kivi.errors import DataLoss, InvalidArgument, OutOfRange
from kivi.model.declarations import aggregate_schema, event_table_schema, time_slot
from kivi.model.schema import OperatorCall, TableSchema
from kivi.model.types import INT64_MAX, INT64_MIN, MOMENT_MAX_US, MOMENT_MIN_US, ColumnType

EVENTS = event_table_schema(
    "events",
    "ts",
    {
        "ts": "timestamp", "i": "int64", "f": "float64", "d": "decimal(12,2)", "s": "string", "b": "bytes",
        "t": "bool", "n": "int64", "x": "float64", "m": "decimal(18,3)",
    },
)  # fmt: skip
NAMES = [column.name for column in EVENTS.columns]
MEASURES = {
    "count": OperatorCall("count"),
    "count_n": OperatorCall("count", "n"),
    "count_s": OperatorCall("count", "s"),
    "sum_n": OperatorCall("sum", "n"),
    "min_n": OperatorCall("min", "n"),
    "max_n": OperatorCall("max", "n"),
    "sum_x": OperatorCall("sum", "x"),
    "min_x": OperatorCall("min", "x"),
    "max_x": OperatorCall("max", "x"),
    "sum_m": OperatorCall("sum", "m"),
    "max_m": OperatorCall("max", "m"),
    "last": OperatorCall("max", "ts"),
}
SLOT = time_slot("ts", 300)


@pytest.fixture(scope="module", autouse=True, params=[0, grouping._FEW], ids=["by kernels", "in Python"])
def how_few_are_grouped(request: pytest.FixtureRequest) -> Iterator[None]:
    with patch.object(grouping, "_FEW", request.param):
        yield


def aggregate(*group_by: Any) -> TableSchema:
    return aggregate_schema("sums", EVENTS, group_by or ("i", SLOT), MEASURES)


SUMS = aggregate()


def batch_of(rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """Events in stored form -> Arrow, as ``kivi.arrow`` types them."""
    arrays = []
    for column in EVENTS.columns:
        values = [row.get(column.name) for row in rows]
        if column.type.name in ("decimal", "timestamp"):
            filled = arrow_from_stored(column.type, np.array([v or 0 for v in values], np.int64))
            arrays.append(filled.take(pa.array([None if v is None else i for i, v in enumerate(values)], pa.int64())))
        else:
            types = {"int64": pa.int64(), "float64": pa.float64(), "string": pa.string(), "bytes": pa.binary()}
            arrays.append(pa.array(values, types.get(column.type.name, pa.bool_())))
    return pa.RecordBatch.from_arrays(arrays, NAMES)


def bits(value: Any) -> Any:
    return struct.pack("<d", value) if isinstance(value, float) else value


def exact(deltas: dict[int, Any]) -> dict[int, Any]:
    return {i: (type(v), bits(v)) for i, v in deltas.items()}


def contents(run: DeltaRun) -> list[tuple[bytes, int, dict[int, Any]]]:
    """Every row read one by one; the ways to read many at once must agree."""
    listed = [(run.key_at(i), run.cts_at(i), run.deltas_at(i)) for i in range(run.rows)]
    assert [(k, c, exact(d)) for k, c, d in run.items(range(run.rows))] == [(k, c, exact(d)) for k, c, d in listed]
    assert listed[1:2] == run.items(range(1, min(2, run.rows))) if run.rows > 1 else True
    assert [key for key, _, _ in listed] == sorted(run.keys.to_pylist())
    return [(key, cts, exact(deltas)) for key, cts, deltas in listed]


def derived(schema: TableSchema, rows: Sequence[dict[str, Any]]) -> list[tuple[bytes, dict[int, Any]]]:
    """The model: one event at a time, one measure at a time."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        key = []
        for group in schema.group_by:
            value = row[group.source]
            key.append(value - value % group.slot_us if group.slot_us else value)
        groups[tuple(key)].append(row)
    out = []
    for group_key, members in groups.items():
        deltas: dict[int, Any] = {}
        for i, (measure, column) in enumerate(zip(schema.measures, schema.columns, strict=True)):
            seen = [row[measure.source] for row in members if measure.source and row[measure.source] is not None]
            if measure.operator == "count":
                deltas[i] = len(seen) if measure.source else len(members)
            elif measure.operator == "sum":
                total: Any = 0.0 if column.type.name == "float64" else 0
                for value in seen:
                    total += value
                deltas[i] = total
            elif seen:
                deltas[i] = min(seen) if measure.operator == "min" else max(seen)
        out.append((encode_key([c.type for c in schema.key], group_key), deltas))
    return sorted(out, key=lambda item: item[0])


INTS = st.integers(INT64_MIN, INT64_MAX) | st.integers(-9, 9) | st.sampled_from([INT64_MIN, INT64_MAX])
FLOATS = st.floats(-1e300, 1e300).map(lambda v: v + 0.0) | st.sampled_from([0.1, 0.2, 0.3, 1e16, -1e16, 1.0])
EVENT = st.fixed_dictionaries(
    {
        "ts": st.integers(-1_000, 1_000) | st.integers(MOMENT_MIN_US + 300, MOMENT_MAX_US),
        "i": st.integers(0, 2) | INTS,
        "f": st.sampled_from([0.0, -1.5, 1.5]) | FLOATS,
        "d": st.integers(-(10**12) + 1, 10**12 - 1),
        "s": st.sampled_from(["", "a", "a\0", "b", "é"]),
        "b": st.binary(max_size=2),
        "t": st.booleans(),
        "n": st.none() | INTS,
        "x": st.none() | FLOATS,
        "m": st.none() | st.integers(-(10**18) + 1, 10**18 - 1),
    }
)
GROUPINGS = [
    ("i", SLOT), ("s",), (SLOT,), ("f",), ("t", "s"), ("d", "b"), ("s", "b", "i", "f", "d", SLOT), ("i", "f", "d"),
]  # fmt: skip


# -- deriving ---------------------------------------------------------------------------------------


@given(st.sampled_from(GROUPINGS), st.lists(EVENT, max_size=30))
def test_derive_and_derive_small_are_the_model(group_by: tuple[Any, ...], rows: list[dict[str, Any]]) -> None:
    schema = aggregate(*group_by)
    expected = [(key, exact(deltas)) for key, deltas in derived(schema, rows)]
    assert [(key, exact(deltas)) for key, deltas in derive_small(schema, rows)] == expected
    batch = batch_of(rows)
    whole = pa.Table.from_batches([batch])
    chunked = pa.Table.from_batches([batch.slice(0, 3), batch.slice(3)]) if rows else whole
    sliced = batch_of([*rows[:1], *rows, *rows[:1]]).slice(min(1, len(rows)), len(rows))
    for events in (batch, chunked, sliced):
        run = derive(schema, events, 7)
        assert contents(run) == [(key, 7, deltas) for key, deltas in expected]


def test_derive_of_many_events_is_the_model() -> None:
    """Enough rows that a sum needs both limbs, groups are sorted instead of looked up, and floats round."""
    rng = np.random.default_rng(5)
    count = 5_000
    rows = [
        {
            "ts": int(ts), "i": int(i), "f": 0.5, "d": 1, "s": f"s{i % 7}", "b": b"", "t": True,
            "n": None if skip else int(n), "x": float(x), "m": 1,
        }
        for ts, i, n, x, skip in zip(
            rng.integers(0, 10**15, count), rng.integers(0, 50, count), rng.integers(2**62, 2**63 - 1, count),
            rng.normal(0, 1e6, count), rng.random(count) < 0.1, strict=True,
        )
    ]  # fmt: skip
    for group_by in (("i",), ("i", SLOT), ("s", "i")):
        schema = aggregate(*group_by)
        run = derive(schema, batch_of(rows))
        assert contents(run) == [(key, 0, exact(deltas)) for key, deltas in derived(schema, rows)]
        assert isinstance(run.columns[3], Cells)
        assert (run.columns[3].high is not None) == (group_by != ("i", SLOT))


def test_an_integer_sum_leaves_64_bits() -> None:
    rows = [{"ts": 0, "i": 1, "n": INT64_MAX}] * 3 + [{"ts": 0, "i": 2, "n": INT64_MIN}] * 2
    run = derive(SUMS, batch_of(rows))
    assert [run.deltas_at(i)[3] for i in range(2)] == [3 * INT64_MAX, 2 * INT64_MIN]


def test_slots_are_aligned_to_the_epoch_on_both_sides() -> None:
    stamps = [-301, -300, -1, 0, 299, 300]
    schema = aggregate(SLOT)
    key_types = [ColumnType("timestamp")]
    expected = [encode_key(key_types, [slot]) for slot in (-600, -300, 0, 300)]
    events = [{"ts": ts} for ts in stamps]
    assert [derive(schema, batch_of(events)).key_at(i) for i in range(4)] == expected
    assert [key for key, _ in derive_small(schema, events)] == expected


@st.composite
def _aggregates_of_one_source(draw: st.DrawFn) -> list[TableSchema]:
    """Some that share columns, keys or slots with each other, and some that do not."""
    slotted = st.tuples(
        st.sampled_from([(), ("i",), ("s",), ("s", "i"), ("f",), ("b", "d", "t")]),
        st.sampled_from([60, 120, 300, 600, 900, 3600, 86400]).map(lambda width_us: (time_slot("ts", width_us),)),
        st.sampled_from([(), (), ("i",)]),
    ).map(lambda parts: (*parts[0], *parts[1], *parts[2]))
    whole = st.sampled_from([("i",), ("s", "i"), ("ts",), (SLOT, "ts")])
    keys: list[tuple[Any, ...]] = draw(st.lists(slotted | slotted | whole, min_size=1, max_size=6))
    measures = st.lists(st.sampled_from(list(MEASURES)), min_size=1, unique=True)
    chosen = [draw(measures) for _ in keys]
    return [
        aggregate_schema(f"sums{n}", EVENTS, key, {name: MEASURES[name] for name in names})
        for n, (key, names) in enumerate(zip(keys, chosen, strict=True))
        if len({getattr(part, "source", part) for part in key}) == len(key)
    ]


@given(_aggregates_of_one_source(), st.lists(EVENT, max_size=30))
def test_deriving_for_many_aggregates_at_once_is_deriving_for_each(
    schemas: list[TableSchema], rows: list[dict[str, Any]]
) -> None:
    rows = [{**row, "ts": max(row["ts"], MOMENT_MIN_US + 86_400)} for row in rows]
    runs = derive_all(schemas, batch_of(rows), 7)
    for schema, run in zip(schemas, runs, strict=True):
        alone = derive(schema, batch_of(rows), 7)
        assert contents(run) == contents(alone)
        assert run.to_buffers() == alone.to_buffers()
        assert contents(run) == [(key, 7, exact(deltas)) for key, deltas in derived(schema, rows)]


STATES = {
    "avg": OperatorCall("avg", "x"),
    "newest": OperatorCall("last", "n"),
    "dearest": OperatorCall("argmax", "n", options=(("by", "x"),)),
    "different": OperatorCall("distinct", "s"),
}


@given(st.lists(st.tuples(st.integers(0, 5), EVENT), max_size=30), st.sampled_from([("i",), ("s", SLOT)]))
def test_deriving_of_several_commits_at_once_is_deriving_of_each(
    brought: list[tuple[int, dict[str, Any]]], group_by: tuple[Any, ...]
) -> None:
    """Some bring no event, and some bring several to a key, whose order is that in their commit."""
    brought = [(at, {**row, "ts": row["ts"] % 900}) for at, row in sorted(brought, key=lambda one: one[0])]
    schemas = [aggregate_schema("all", EVENTS, group_by, MEASURES | STATES), aggregate("i")]
    events = Derivation(batch_of([row for _, row in brought]), commits=np.array([at for at, _ in brought], np.int64))
    for schema, run in zip(schemas, derive_each(schemas, events), strict=True):
        alone = [
            row
            for at in range(6)
            for row in contents(derive(schema, batch_of([row for of, row in brought if of == at]), at))
        ]
        assert contents(run) == sorted(alone, key=lambda row: row[:2])


def test_the_slots_of_many_aggregates_are_each_checked() -> None:
    schemas = [aggregate("i", time_slot("ts", width_us)) for width_us in (1, 604_800_000_000)]
    rows = [{"ts": MOMENT_MIN_US, "i": 1}]
    assert derive(schemas[0], batch_of(rows)).rows == 1
    with pytest.raises(InvalidArgument, match="would begin outside the years 1 to 9999"):
        derive_all(schemas, batch_of(rows))


def both(schema: TableSchema, rows: list[dict[str, Any]]) -> list[Any]:
    """Both derivations as calls."""
    return [lambda: derive(schema, batch_of(rows)), lambda: derive_small(schema, rows)]


def test_a_slot_that_would_begin_before_time_is_refused() -> None:
    for call in both(SUMS, [{"ts": MOMENT_MIN_US - 1, "i": 1}]):
        with pytest.raises(InvalidArgument, match="would begin outside the years 1 to 9999"):
            call()


def test_a_null_group_key_is_refused_by_name() -> None:
    for call in both(SUMS, [{"ts": 0, "i": 1}, {"ts": 0, "i": None}]):
        with pytest.raises(InvalidArgument, match="'i' is null"):
            call()


def test_a_float_sum_that_leaves_the_finite_numbers_is_refused() -> None:
    for values in ([1e308, 1e308], [1e308, 1e308, -1e308, -1e308]):
        for call in both(SUMS, [{"ts": 0, "i": 1, "x": x} for x in values]):
            with pytest.raises(OutOfRange, match="sum_x"):
                call()


def test_negative_zero_is_normalised() -> None:
    rows = [{"ts": 0, "i": 1, "f": -0.0, "x": -0.0}]
    schema = aggregate("f")
    small = derive_small(schema, rows)
    assert contents(derive(schema, batch_of(rows))) == [(key, 0, exact(deltas)) for key, deltas in small]
    assert all(bits(v) == bits(0.0) for v in small[0][1].values() if isinstance(v, float))
    assert small[0][0] == encode_key([ColumnType("float64")], [0.0])


def test_no_events_are_an_empty_run() -> None:
    for group_by in GROUPINGS:
        run = derive(aggregate(*group_by), batch_of([]))
        assert run.rows == 0 and contents(run) == [] and run.find(b"") == range(0)
        assert run.slice_range(None, None) == range(0) == run.slice_range(b"a", b"b")
        assert contents(DeltaRun.from_buffer(aggregate(*group_by), 1, run.to_buffers()[0])) == []


# -- runs -------------------------------------------------------------------------------------------

DELTAS = st.fixed_dictionaries(
    {0: st.integers(0, 9), 1: st.just(0), 2: st.just(0), 3: INTS | st.integers(-(2**90), 2**90), 6: FLOATS, 9: INTS},
    optional={4: INTS, 5: INTS, 7: FLOATS, 8: FLOATS, 10: INTS, 11: INTS},
)
FIXED_KEY = st.tuples(st.integers(-2, 2), st.integers(0, 1)).map(
    lambda values: encode_key([c.type for c in SUMS.key], values)
)
BY_NAME = aggregate("s", "i")
NAMED_KEY = st.tuples(st.sampled_from(["", "a", "a\0", "ab", "b" * 20]), st.integers(0, 1)).map(
    lambda values: encode_key([c.type for c in BY_NAME.key], values)
)
CTS = st.integers(1, 12)


@st.composite
def rows_of_a_table(draw: st.DrawFn) -> tuple[TableSchema, list[tuple[bytes, int, dict[int, Any]]]]:
    """(key, cts, deltas), at most one of each (key, cts)."""
    schema, keys = draw(st.sampled_from([(SUMS, FIXED_KEY), (BY_NAME, NAMED_KEY)]))
    found = draw(st.dictionaries(st.tuples(keys, CTS), DELTAS, max_size=25))
    return schema, [(key, cts, deltas) for (key, cts), deltas in found.items()]


Rows = list[tuple[bytes, int, dict[int, Any]]]
NO_BARRIERS: Mapping[int, Barrier] = {}


def as_runs(
    schema: TableSchema, rows: Rows, single: set[int], barriers: Mapping[int, Barrier] = NO_BARRIERS
) -> list[DeltaRun]:
    """Commits whose CTS is in ``single``, and those with a barrier, become a run each, the others share one."""
    single = single | barriers.keys()
    runs = []
    for cts in sorted(single & {row[1] for row in rows}):
        run = with_cts(run_from_rows(schema, [row for row in rows if row[1] == cts]), cts)
        runs.append(DeltaRun(run.keys, cts, run.columns, barrier=barriers.get(cts, Barrier.PATCH)))
    rest = [row for row in rows if row[1] not in single]
    return [*runs, run_from_rows(schema, rest)] if rest else runs


def by_key(rows: Rows, upto: int = 2**62) -> dict[bytes, list[tuple[int, dict[int, Any]]]]:
    out: dict[bytes, list[tuple[int, dict[int, Any]]]] = defaultdict(list)
    for key, cts, deltas in sorted(rows, key=lambda row: row[:2]):
        if cts <= upto:
            out[key].append((cts, deltas))
    return dict(out)


@given(rows_of_a_table())
def test_run_from_rows_keeps_them(case: tuple[TableSchema, Rows]) -> None:
    schema, rows = case
    run = run_from_rows(schema, rows)
    assert contents(run) == [(k, c, exact(d)) for k, c, d in sorted(rows, key=lambda row: row[:2])]
    restored = DeltaRun.from_buffer(schema, 0, memoryview(run.to_buffers()[0]))
    assert contents(restored) == contents(run)
    assert run.nbytes >= sum(len(key) for key, _, _ in rows)
    if rows:
        assert (run.first_key, run.last_key) == (min(rows)[0], max(r[0] for r in rows))


def test_a_sum_that_is_left_out_is_zero() -> None:
    run = run_from_rows(SUMS, [(b"k" * 16, 3, {5: 1})])
    assert run.deltas_at(0) == {0: 0, 1: 0, 2: 0, 3: 0, 5: 1, 6: 0.0, 9: 0}


@given(rows_of_a_table(), st.binary(max_size=18) | FIXED_KEY | NAMED_KEY, st.binary(max_size=3) | FIXED_KEY)
def test_bisection(case: tuple[TableSchema, Rows], key: bytes, other: bytes) -> None:
    schema, rows = case
    merged = run_from_rows(schema, rows)
    for run in (merged, *(r for r in as_runs(schema, rows, set(range(13))))):
        keys = run.keys.to_pylist()
        for wanted in (key, key[:9], key + b"\0", *keys):
            assert [i for i, k in enumerate(keys) if k == wanted] == list(run.find(wanted))
            assert run.lower(wanted) == sum(k < wanted for k in keys)
        for start, end in ((key, other), (None, key), (key, None), (None, None)):
            inside = [i for i, k in enumerate(keys) if (start is None or k >= start) and (end is None or k < end)]
            assert list(run.slice_range(start, end)) == inside


def test_keys_that_end_in_zeros_are_told_apart() -> None:
    """NumPy drops trailing zeros of byte strings; keys of one width may not be confused by it."""
    keys = [b"\0" * 8, b"\0" * 7 + b"\1", b"\1" + b"\0" * 7]
    run = run_from_rows(SUMS, [(key, 1, {}) for key in keys])
    assert [list(run.find(key)) for key in keys] == [[0], [1], [2]]
    assert [key for key, _, _ in run.items(range(3))] == keys
    assert list(run.find(b"\0")) == [] and list(run.find(b"\0" * 9)) == []
    assert run.lower(b"\0" * 9) == 1


def test_with_cts_changes_nothing_else() -> None:
    run = derive(SUMS, batch_of([{"ts": 0, "i": 1, "n": 3}]))
    other = with_cts(run, 9)
    assert (run.cts, other.cts, other.rows, other.find(run.first_key)) == (0, 9, 1, range(1))
    assert other.keys is run.keys and other.columns is run.columns and other.nbytes == run.nbytes


def test_the_log_form_is_not_copied() -> None:
    rows = [{"ts": 0, "i": i, "n": 2**62, "x": 0.5} for i in range(1_000)]
    run = derive(SUMS, batch_of(rows))
    data = b"".join(bytes(part) for part in run.to_buffers())
    before = pa.total_allocated_bytes()
    restored = DeltaRun.from_buffer(SUMS, 5, data)
    assert pa.total_allocated_bytes() - before < len(data) // 20
    assert contents(restored) == contents(with_cts(run, 5))


def test_the_log_form_may_lie_at_any_address() -> None:
    rows: Rows = [(bytes([i]) * 16, 3, {3: 2**80, 5: 1, 6: 0.5}) for i in range(20)]
    run = run_from_rows(SUMS, rows)
    data = b"x" * 13 + bytes(run.to_buffers()[0])
    restored = DeltaRun.from_buffer(SUMS, 0, memoryview(data)[13:])
    assert contents(restored) == contents(run)
    folded = [gather([r], None, 100, 9).fold(RowLayout.of(SUMS), [None] * 20, 9) for r in (run, restored)]
    assert folded[0] == folded[1]


def test_every_truncation_of_the_log_form_is_data_loss() -> None:
    run = run_from_rows(SUMS, [(b"k" * 16, 3, {3: 2**80, 5: 1}), (b"l" * 16, 3, {})])
    data = bytes(run.to_buffers()[0])
    assert contents(DeltaRun.from_buffer(SUMS, 1, data)) == contents(run)
    for size in range(len(data)):
        with pytest.raises(DataLoss):
            DeltaRun.from_buffer(SUMS, 1, data[:size])


def test_the_log_form_of_another_table_is_data_loss() -> None:
    data = bytes(run_from_rows(SUMS, [(b"k" * 16, 3, {})]).to_buffers()[0])
    for measures in ({"a": OperatorCall("sum", "x")}, {**MEASURES, "z": OperatorCall("count")}):
        with pytest.raises(DataLoss, match="table 'other' is damaged"):
            DeltaRun.from_buffer(aggregate_schema("other", EVENTS, ("i",), measures), 1, data)


# -- consolidation ----------------------------------------------------------------------------------


def fold_row(
    schema: TableSchema,
    base: bytes | None,
    ops: list[tuple[int, dict[int, Any]]],
    upto: int,
    barriers: Mapping[int, Barrier] = NO_BARRIERS,
) -> bytes | None:
    """The model: kivi.delta.ops on one row; None where nothing was folded."""
    layout = RowLayout.of(schema)
    version = None if base is None else layout.decode(base)
    full = [(cts, RowOp(barriers.get(cts, Barrier.PATCH), {}, deltas)) for cts, deltas in ops]
    folded = fold(schema, version, full, upto)
    return None if folded is None or folded == version else layout.encode(folded)


def gather_all(runs: list[DeltaRun], limit: int, upto: int) -> list[Any]:
    out, start = [], None
    while True:
        gathered = gather(runs, start, limit, upto)
        assert len(gathered.keys) <= limit and (len(gathered.keys) == limit or gathered.next_start is None)
        assert gathered.next_start is None or gathered.keys[-1] < gathered.next_start
        out.append(gathered)
        start = gathered.next_start
        if start is None:
            return out


BASE_CELLS = st.fixed_dictionaries(
    {
        **dict.fromkeys((0, 1, 2, 3, 9), st.integers(-(2**100), 2**100) | INTS),
        6: FLOATS,
        **dict.fromkeys((4, 5, 10, 11), st.none() | INTS),
        **dict.fromkeys((7, 8), st.none() | FLOATS),
    }
)


@given(rows_of_a_table(), st.data())
def test_fold_is_the_model_in_one_step_and_in_several(case: tuple[TableSchema, Rows], data: st.DataObject) -> None:
    schema, rows = case
    layout = RowLayout.of(schema)
    barriers = data.draw(st.just(NO_BARRIERS) | st.dictionaries(CTS, st.sampled_from(Barrier), max_size=4))
    runs = as_runs(schema, rows, data.draw(st.sets(CTS)), barriers)
    runs = data.draw(st.permutations(runs))
    upto = data.draw(st.integers(0, 13))
    limit = data.draw(st.integers(1, 5))
    expected = by_key(rows, upto)
    gathered = gather_all(runs, limit, upto)
    assert [key for part in gathered for key in part.keys] == sorted(expected)
    for part in gathered:
        base: list[bytes | None] = []
        for _ in part.keys:
            kind = data.draw(st.sampled_from(["none", "alive", "dead"]))
            cts = data.draw(st.integers(0, 12))
            cells = data.draw(BASE_CELLS)
            version = Version(cts, kind == "alive", tuple(cells[i] for i in range(12)) if kind == "alive" else ())
            base.append(None if kind == "none" else layout.encode(version))
        for at in {upto, upto // 2}:
            model = [
                fold_row(schema, row, expected[key], at, barriers) for key, row in zip(part.keys, base, strict=True)
            ]
            assert part.fold(layout, base, at) == model
        model_of = dict[bytes, list[bytes]]()
        for key, row in zip(part.keys, base, strict=True):
            ats = sorted({cts for cts, _ in expected[key]})
            states = [fold_row(schema, row, expected[key], at, barriers) for at in ats]
            model_of[key] = [new for old, new in itertools.pairwise([None, *states]) if new is not None and new != old]
        found_of = {key: list[bytes]() for key in part.keys}
        with patch("kivi.delta.gather._COMMITS", data.draw(st.integers(1, 4))):
            for numbers, states in part.states(layout, base):
                for i, state in zip(numbers, states, strict=True):
                    found_of[part.keys[i]].append(state)
        assert found_of == model_of
        current = list(base)
        for boundary in sorted({*data.draw(st.sets(CTS, max_size=3)), upto}):
            if boundary <= upto:
                folded = part.fold(layout, current, boundary)
                current = [new or old for new, old in zip(folded, current, strict=True)]
        once = part.fold(layout, base, upto)
        assert current == [new or old for new, old in zip(once, base, strict=True)]


def test_fold_of_many_runs_is_the_model() -> None:
    """Sizes at which gather looks more than once and both limbs of a sum overflow their words."""
    rng = np.random.default_rng(3)
    rows: Rows = []
    for cts in range(1, 30):
        for i in rng.choice(400, 150, replace=False):
            key = encode_key([c.type for c in SUMS.key], (int(i), 0))
            rows.append((key, cts, {0: 1, 3: int(rng.integers(-(2**62), 2**62)) * 2**20, 6: float(rng.normal(0, 1e9))}))
    expected = by_key(rows)
    layout = RowLayout.of(SUMS)
    runs = as_runs(SUMS, rows, set(range(1, 25)))
    for limit in (1, 7, 100, 399, 400, 1_000):
        parts = gather_all(runs, limit, 100)
        folded = [row for part in parts for row in part.fold(layout, [None] * len(part.keys), 100)]
        assert folded == [fold_row(SUMS, None, expected[key], 100) for key in sorted(expected)]


def test_a_fold_carries_through_128_bits_and_back() -> None:
    layout = RowLayout.of(SUMS)
    key = b"k" * 16
    base: bytes | None = None
    total = 0
    for cts, value in enumerate([INT64_MAX, 1, 2**94, -(2**94) - INT64_MAX, -2, INT64_MIN], 1):
        total += value
        (base,) = gather([run_from_rows(SUMS, [(key, cts, {3: value})])], None, 10, 100).fold(layout, [base], 100)
        assert base is not None
        assert layout.decode(base).cells[3] == total


def test_a_float_fold_that_leaves_the_finite_numbers_stays_in_base() -> None:
    layout = RowLayout.of(SUMS)
    rows: Rows = [(b"k" * 16, cts, {6: 1.7e308}) for cts in (1, 2)]
    (row,) = gather([run_from_rows(SUMS, rows)], None, 10, 9).fold(layout, [None], 9)
    assert row is not None
    assert layout.decode(row).cells[6] == float("inf")


def test_a_tombstone_is_the_identity_and_hides_what_it_includes() -> None:
    layout = RowLayout.of(SUMS)
    runs = [run_from_rows(SUMS, [(b"k" * 16, cts, {0: 1, 5: cts}) for cts in (4, 5, 6)])]
    (row,) = gather(runs, None, 10, 9).fold(layout, [layout.encode(Version(5, False, ()))], 9)
    assert row is not None
    assert layout.decode(row) == Version(6, True, (1, 0, 0, 0, None, 6, 0.0, None, None, 0, None, None))


def test_a_base_row_of_another_size_is_data_loss() -> None:
    gathered = gather([run_from_rows(SUMS, [(b"k" * 16, 1, {}), (b"l" * 16, 1, {})])], None, 10, 9)
    width = RowLayout.of(SUMS).width
    with pytest.raises(DataLoss):
        gathered.fold(RowLayout.of(SUMS), [bytes(width - 1), bytes(width + 1)], 9)


def test_nothing_to_gather() -> None:
    run = run_from_rows(SUMS, [(b"k" * 16, 5, {})])
    for runs, start, upto in (([], None, 9), ([run], None, 4), ([run], b"l", 9)):
        gathered = gather(runs, start, 10, upto)
        assert gathered.keys == [] and gathered.next_start is None
        assert gathered.fold(RowLayout.of(SUMS), [], 9) == []


@given(rows_of_a_table(), st.sets(CTS), st.integers(0, 13), st.none() | FIXED_KEY, st.none() | FIXED_KEY)
def test_merged_items(
    case: tuple[TableSchema, Rows], single: set[int], upto: int, start: bytes | None, end: bytes | None
) -> None:
    schema, rows = case
    runs, expected = as_runs(schema, rows, single), by_key(rows, upto)
    keys = [k for k in sorted(expected) if (start is None or k >= start) and (end is None or k < end)]
    found = list(merged_items(runs, start, end, upto))
    assert [(key, [(cts, exact({**op.deltas})) for cts, op in ops]) for key, ops in found] == [
        (key, [(cts, exact(d)) for cts, d in expected[key]]) for key in keys
    ]


def test_merged_items_is_lazy() -> None:
    key_types = [c.type for c in SUMS.key]
    rows: Rows = [(encode_key(key_types, (i, 0)), 1, {0: 1}) for i in range(5_000)]
    run = with_cts(run_from_rows(SUMS, rows), 1)
    first = list(itertools.islice(merged_items([run, with_cts(run, 2)], None, None, 9), 3))
    assert [(key, [cts for cts, _ in ops]) for key, ops in first] == [(key, [1, 2]) for key, _, _ in rows[:3]]


def test_a_step_of_the_states_of_a_row_takes_no_longer_where_it_has_more_commits() -> None:
    """What is looked at, in all steps together, grows as the commits do."""
    looked = list[int]()
    flatnonzero, arange = np.flatnonzero, np.arange

    def counted(*args: Any) -> Any:
        found = arange(*args)
        looked.append(len(found))
        return found

    def counted_places(array: Any) -> Any:
        looked.append(len(array))
        return flatnonzero(array)

    found = []
    for commits in (1_000, 4_000):
        run = run_from_rows(SUMS, [(b"k", cts, {0: 1}) for cts in range(1, commits + 1)])
        part = gather([run], None, 1, commits)
        looked.clear()
        with patch("numpy.flatnonzero", counted_places), patch("numpy.arange", counted):
            states = [row for _, rows in part.states(RowLayout.of(SUMS), [None]) for row in rows]
        assert len(states) == commits
        found.append(sum(looked))
    assert found[1] < 6 * found[0]
