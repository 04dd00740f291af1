"""Combining the runs of one transaction: columns must do what plain Python does, to the last bit of a float."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.delta.combine import Combining, combine, pieces
from kivi.delta.derive import derive, run_from_rows
from kivi.delta.gather import gather
from kivi.delta.operators import operator_of
from kivi.delta.runs import Cells, DeltaRun, with_cts
from kivi.encoding.base_rows import RowLayout
from kivi.errors import OutOfRange
from kivi.model.declarations import aggregate_schema
from kivi.model.schema import TableSchema
from kivi.model.types import INT64_MAX
from tests.delta.test_runs import (
    BY_NAME,
    DELTAS,
    EVENTS,
    FIXED_KEY,
    MEASURES,
    NAMED_KEY,
    SLOT,
    SUMS,
    batch_of,
    contents,
    exact,
)

Chunk = dict[bytes, dict[int, Any]]


@st.composite
def chunks_of_a_table(draw: st.DrawFn) -> tuple[TableSchema, list[Chunk]]:
    """What each chunk of a transaction does to the rows that it touches."""
    schema, keys = draw(st.sampled_from([(SUMS, FIXED_KEY), (BY_NAME, NAMED_KEY)]))
    return schema, draw(st.lists(st.dictionaries(keys, DELTAS, max_size=6), min_size=1, max_size=8))


def run_of(schema: TableSchema, chunk: Chunk) -> DeltaRun:
    return with_cts(run_from_rows(schema, [(key, 7, deltas) for key, deltas in chunk.items()]), 7)


def folded(schema: TableSchema, chunks: list[Chunk]) -> list[Any]:
    """The model: one delta at a time, with the operators themselves."""
    rows: dict[bytes, dict[int, Any]] = {}
    for chunk in chunks:
        for key, deltas in chunk.items():
            row = rows.setdefault(key, {})
            for i, column in enumerate(schema.columns):
                operator = operator_of(column)
                row[i] = operator.combine(row.get(i, operator.identity(column)), deltas.get(i))
    out = []
    for key, row in sorted(rows.items()):
        out.append((key, 7, exact({i: delta for i, delta in row.items() if delta is not None})))
    return out


@given(chunks_of_a_table())
def test_combine_is_the_model(case: tuple[TableSchema, list[Chunk]]) -> None:
    schema, chunks = case
    combined = combine(schema, [run_of(schema, chunk) for chunk in chunks])
    assert contents(combined) == folded(schema, chunks)
    assert contents(DeltaRun.from_buffer(schema, 7, combined.to_buffers()[0])) == contents(combined)


@pytest.mark.story
@given(chunks_of_a_table(), st.integers(0, 12), st.integers(1, 4))
def test_when_it_is_combined_changes_no_bit(case: tuple[TableSchema, list[Chunk]], rows_min: int, size: int) -> None:
    schema, chunks = case
    combining = Combining(schema, rows_min)
    for chunk in chunks:
        combining.add(run_of(schema, chunk))
    combined = combining.result()
    assert combined is not None and combining.result() is None
    whole = combine(schema, [run_of(schema, chunk) for chunk in chunks])
    assert combined.to_buffers() == whole.to_buffers()
    cut = list(pieces(combined, size))
    assert all(0 < piece.rows <= size for piece in cut)
    restored = [DeltaRun.from_buffer(schema, 7, piece.to_buffers()[0]) for piece in cut]
    for listed in (cut, restored):
        assert [row for piece in listed for row in contents(piece)] == contents(combined)


def test_combining_many_chunks_of_events() -> None:
    """Enough rows that sums need both limbs; the same as adding up the chunks one by one."""
    rng = np.random.default_rng(3)
    combining, chunks = Combining(SUMS, 500), []
    for _ in range(40):
        rows = [
            {"ts": int(ts), "i": int(i), "n": None if n % 5 == 0 else int(n), "x": float(x), "m": 1}
            for ts, i, n, x in zip(
                rng.integers(0, 3_000, 150), rng.integers(0, 20, 150), rng.integers(2**62, 2**63 - 1, 150),
                rng.normal(0, 1e6, 150), strict=True,
            )
        ]  # fmt: skip
        run = derive(SUMS, batch_of(rows), 7)
        combining.add(run)
        chunks.append({key: deltas for key, _, deltas in run.items(range(run.rows))})
    combined = combining.result()
    assert combined is not None and isinstance(combined.columns[3], Cells)
    assert combined.columns[3].high is not None
    assert contents(combined) == folded(SUMS, chunks)


def test_what_is_held_is_bounded_by_the_distinct_rows() -> None:
    """Runs wait until they are as many as the combined rows: twice the distinct ones, or the least, and one run."""
    combining = Combining(SUMS, 100)
    held = 0
    for chunk in range(300):
        combining.add(run_of(SUMS, {b"%016d" % ((chunk * 7 + i) % 400): {0: 1} for i in range(50)}))
        held = max(held, sum(run.rows for run in combining._runs))
    assert held <= 2 * 400 + 50
    result = combining.result()
    assert result is not None
    assert (result.rows, sum(cells["count"] for cells in _counted(result))) == (400, 300 * 50)


def _counted(run: DeltaRun) -> list[dict[str, int]]:
    return [{"count": deltas[0]} for _, _, deltas in run.items(range(run.rows))]


def test_a_float_sum_that_leaves_the_finite_numbers_is_refused_by_name() -> None:
    runs = [run_of(SUMS, {b"k" * 16: {6: value}}) for value in (1.7e308, 1.7e308, -1.7e308)]
    with pytest.raises(OutOfRange, match="sum_x"):
        combine(SUMS, runs)


def test_a_sum_becomes_plain_again_where_it_fits() -> None:
    """Equal deltas are equal bytes, whichever way they were computed."""
    values = [INT64_MAX, INT64_MAX, -INT64_MAX, -INT64_MAX, 5]
    combined = combine(SUMS, [run_of(SUMS, {b"k" * 16: {3: value}}) for value in values])
    assert combined.to_buffers() == run_of(SUMS, {b"k" * 16: {3: 5}}).to_buffers()


ORDERLESS = {name: call for name, call in MEASURES.items() if name != "sum_x"}
"""Measures without a SUM of floats: what is left of SUMS' columns, in their order."""
OVER_COMMITS = {
    FIXED_KEY: aggregate_schema("sums", EVENTS, ("i", SLOT), ORDERLESS),
    NAMED_KEY: aggregate_schema("sums", EVENTS, ("s", "i"), ORDERLESS),
}


@pytest.mark.story
@given(st.data())
def test_combining_commits_changes_no_base_row(data: st.DataObject) -> None:
    """Whichever neighbours become one before they are folded, and whatever small commits are among them."""
    keys, schema = data.draw(st.sampled_from(sorted(OVER_COMMITS.items(), key=lambda item: id(item[0]))))
    commits = data.draw(st.lists(st.dictionaries(keys, DELTAS, max_size=5), min_size=1, max_size=7))
    kept = [i for i, name in enumerate(MEASURES) if name in ORDERLESS]
    runs = []
    for cts, commit in enumerate(commits, start=20):
        rows = [
            (key, cts, {kept.index(i): d for i, d in deltas.items() if i in kept}) for key, deltas in commit.items()
        ]
        run = run_from_rows(schema, rows)
        runs.append(run if data.draw(st.booleans()) else with_cts(run, cts))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(runs)))) | {0, len(runs)})
    combined = [combine(schema, runs[a:b]) for a, b in itertools.pairwise(cuts)]
    layout = RowLayout.of(schema)

    def base(of: list[DeltaRun], start: list[bytes | None] | None = None) -> list[tuple[bytes, bytes | None]]:
        found = gather(of, None, 1_000, 2**63)
        return list(zip(found.keys, found.fold(layout, start or [None] * len(found.keys), 2**63), strict=True))

    before = base(combined)
    assert before == base(runs)
    assert base(combined, [row for _, row in before]) == [(key, None) for key, _ in before]  # inert where base has it


def test_deltas_of_two_commits_are_never_combined_where_floats_are_added() -> None:
    one = run_of(SUMS, {b"k" * 16: {0: 1}})
    mixed = DeltaRun(pa.array([b"k" * 16], pa.large_binary()), np.array([3], np.uint64), one.columns)
    for runs in ([one, with_cts(one, 8)], [mixed, mixed]):
        with pytest.raises(ValueError, match="one commit"):
            combine(SUMS, runs)


def test_runs_without_rows() -> None:
    empty = run_of(SUMS, {})
    one = run_of(SUMS, {b"k" * 16: {0: 1}})
    assert combine(SUMS, [empty, empty]).rows == 0
    assert contents(combine(SUMS, [empty, one, empty])) == contents(one)
    assert list(pieces(empty, 10)) == []
    assert Combining(SUMS, 1).result() is None
    assert isinstance(one.columns[0], Cells)
