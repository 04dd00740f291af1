"""Many queries and many rows at once select what each predicate selects of each row."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given

from kivi.arrow.columns import stored_column
from kivi.arrow.dictionaries import coded
from kivi.live.matching import BatchColumns, Matcher, RowColumns
from kivi.model.expressions import Expr, matches
from kivi.model.types import INT64_MAX, INT64_MIN, ColumnType

TYPES = {
    "i": ColumnType("int64"),
    "j": ColumnType("int64"),
    "f": ColumnType("float64"),
    "t": ColumnType("timestamp"),
    "d": ColumnType("decimal", 9, 2),
    "b": ColumnType("bool"),
    "s": ColumnType("string"),
    "y": ColumnType("bytes"),
}
_INTS = st.sampled_from([INT64_MIN, INT64_MIN + 1, -7, -1, 0, 1, 2, 3, 40, 41, INT64_MAX - 1, INT64_MAX])
_SMALL = st.integers(-5, 5)
VALUES: dict[str, Any] = {
    "i": _INTS | _SMALL,
    "j": _SMALL,
    "f": st.sampled_from([-1e308, -1.5, -0.1, 0.0, 0.1, 0.1 + 2**-56, 2.5, 1e-300, 1e308]),
    "t": st.integers(0, 10),
    "d": st.integers(-300, 300),
    "b": st.booleans(),
    "s": st.sampled_from(["", "a", "b", "bb", "\u00e9"]),
    "y": st.sampled_from([b"", b"a", b"\xff"]),
}


@st.composite
def terms(draw: st.DrawFn) -> Expr:
    name = draw(st.sampled_from(sorted(TYPES)))
    op = draw(st.sampled_from(["==", "==", "<", "<=", ">", ">=", "!=", "isin", "is_null"]))
    if name in "sy" and draw(st.booleans()):
        text = draw(VALUES[name])
        kinds = ["startswith", "contains", "matches"] if name == "s" else ["startswith", "contains"]
        op = draw(st.sampled_from(kinds))
        return Expr(op, name, "^" + text + "b?" if op == "matches" else text)
    if name == "f" and draw(st.booleans()):
        at = Expr("col", "f", type=TYPES["f"]), Expr("col", "i", type=TYPES["i"])
        if draw(st.booleans()):
            quads = Expr("quad", value=(6,), args=at, type=TYPES["s"])
            return Expr("startswith", value=draw(st.sampled_from(["", "1", "30", "122"])), args=(quads,))
        return Expr("within_km", value=draw(st.sampled_from([(0.0, 0.0, 100.0), (1.0, 359.5, 500.0)])), args=at)
    if op == "is_null":
        return Expr(op, name)
    if op == "isin":
        return Expr(op, name, tuple(draw(st.lists(VALUES[name], max_size=3))))
    return Expr(op, name, draw(VALUES[name]))


PREDICATES = st.none() | st.recursive(
    terms(),
    lambda inner: st.builds(
        lambda op, args: Expr(op, args=tuple(args[:1] if op == "not" else args)),
        st.sampled_from(["and", "and", "or", "or", "not"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=5,
)
ROWS = st.lists(st.fixed_dictionaries({name: st.none() | values for name, values in VALUES.items()}), max_size=12)


@given(rows=ROWS, predicates=st.lists(PREDICATES, max_size=30))
def test_hits_are_what_each_predicate_selects(rows: list[dict[str, Any]], predicates: list[Expr | None]) -> None:
    matcher: Matcher[int] = Matcher(TYPES)
    for i, where in enumerate(predicates):
        matcher.add(i, where)
    for i in range(0, len(predicates), 3):  # some come and go
        matcher.remove(i)
        matcher.remove(i)
        if i % 2:
            matcher.add(i, predicates[i])
    there = [i for i in range(len(predicates)) if i % 3 or i % 2]
    wanted = sorted(
        (at, i) for i in there for at, row in enumerate(rows) if (p := predicates[i]) is None or matches(p, row)
    )
    assert len(matcher) == len(there)
    assert sorted(hits(matcher, RowColumns(rows))) == wanted
    batch = pa.RecordBatch.from_arrays(
        [stored_column(type_, [row[name] for row in rows]) for name, type_ in TYPES.items()], names=list(TYPES)
    )
    assert sorted(hits(matcher, BatchColumns(batch))) == wanted


def hits(matcher: Matcher[Any], columns: Any) -> list[tuple[int, Any]]:
    """(row, query) for each; a query's rows come in order, and each once."""
    found: dict[Any, list[int]] = {}
    for query, rows in matcher.selected(columns):
        assert isinstance(rows, list)
        found.setdefault(query, []).extend(rows)
    assert all(a < b for rows in found.values() for a, b in itertools.pairwise(rows))
    return [(row, query) for query, rows in found.items() for row in rows]


@given(
    bounds=st.lists(st.tuples(*[st.floats(-1e3, 1e3) | st.integers(-200, 200).map(lambda n: n / 100)] * 2), min_size=1)
)
def test_a_range_has_both_its_bounds_however_its_width_is_rounded(bounds: list[tuple[float, float]]) -> None:
    ranges = [(min(both), max(both)) for both in bounds]
    matcher: Matcher[int] = Matcher(TYPES)
    for i, (low, high) in enumerate(ranges):
        matcher.add(i, Expr("and", args=(Expr(">=", "f", low), Expr("<=", "f", high))))
    rows: list[dict[str, Any]] = [{"f": bound} for both in ranges for bound in both]
    wanted = [(at, i) for at, row in enumerate(rows) for i, (low, high) in enumerate(ranges) if low <= row["f"] <= high]
    assert sorted(hits(matcher, RowColumns(rows))) == wanted


def test_what_is_indexed_is_asked_about_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicates of or, isin, prefixes and ranges of text are not evaluated, and others on what their clauses find."""
    asked: list[tuple[str, int]] = []
    select = RowColumns.select

    def counted(self: Any, where: Expr, types: Any, among: Any = None) -> Any:
        asked.append((where.op, self.rows if among is None else len(among)))
        return select(self, where, types, among)

    monkeypatch.setattr(RowColumns, "select", counted)
    equal = [Expr("==", "i", 1), Expr("==", "s", "w2")]
    rows = [dict.fromkeys(TYPES) | {"i": i, "s": f"w{i}", "f": float(i)} for i in range(100)]
    for where, hit, wanted in (
        (Expr("or", args=tuple(equal)), [1, 2], []),
        (Expr("isin", "s", ("w7", "x")), [7], []),
        (Expr("not", args=(Expr("or", args=(Expr(">", "s", "w10"), Expr("<", "s", "w1"))),)), [1, 10], []),
        (Expr("startswith", "s", "w9"), [9, *range(90, 100)], []),
        (Expr("and", args=(Expr("isin", "i", (1, 12)), Expr("contains", "s", "2"))), [12], [("and", 2)]),
        (Expr("matches", "s", "^w1(1|2)$"), [11, 12], [("matches", 11)]),
        (Expr("contains", "s", "99"), [99], [("contains", 100)]),
    ):
        matcher: Matcher[int] = Matcher(TYPES)
        matcher.add(0, where)
        asked.clear()
        assert [row for row, _ in hits(matcher, RowColumns(rows))] == hit
        assert asked == wanted


def test_more_values_than_are_clauses() -> None:
    values = tuple(range(0, 50_000, 2))
    matcher: Matcher[str] = Matcher(TYPES)
    matcher.add("even", Expr("isin", "i", values))
    matcher.add("both", Expr("and", args=(Expr("isin", "i", values[:200]), Expr("isin", "j", values[:200]))))
    rows = [{"i": i, "j": i} for i in (-2, 3, 4, 398, 399, 400, 49_998, 49_999)]
    assert sorted(hits(matcher, RowColumns(rows))) == [
        (2, "both"), (2, "even"), (3, "both"), (3, "even"), (5, "even"), (6, "even"),
    ]  # fmt: skip


def test_text_in_codes_and_a_sum_that_has_left_64_bits() -> None:
    matcher: Matcher[str] = Matcher(TYPES)
    matcher.add("word", Expr("==", "s", "w3"))
    matcher.add("other", Expr("==", "s", "w99"))
    batch = coded(pa.RecordBatch.from_pydict({"s": [None if i % 7 == 0 else f"w{i % 5}" for i in range(5_000)]}))
    assert pa.types.is_dictionary(batch.column(0).type)
    wanted = [(i, "word") for i in range(5_000) if i % 7 and i % 5 == 3]
    assert list(hits(matcher, BatchColumns(batch))) == wanted
    sums: Matcher[str] = Matcher(TYPES)
    sums.add("all", Expr(">=", "i", INT64_MIN))
    sums.add("large", Expr(">", "i", 10**18))
    sums.add("small", Expr("<", "i", 0))
    assert sorted(hits(sums, RowColumns([{"i": 2**70}, {"i": -(2**70)}, {"i": 5}]))) == [
        (0, "all"), (0, "large"), (1, "all"), (1, "small"), (2, "all"),
    ]  # fmt: skip


def test_many_of_each_kind() -> None:
    """More candidates than are compared at a time, and ranges of very different widths."""
    matcher: Matcher[int] = Matcher(TYPES)
    ranges = [(i % 1_000, i % 1_000 + (i % 13) ** 3) for i in range(3_000)]
    for i, (low, high) in enumerate(ranges):
        matcher.add(i, Expr("and", args=(Expr(">=", "i", low), Expr("<", "i", high))))
    rows = [{"i": 7 * i % 2_500} for i in range(400)]
    wanted = {(at, i) for at, row in enumerate(rows) for i, (low, high) in enumerate(ranges) if low <= row["i"] < high}
    found = list(hits(matcher, RowColumns(rows)))
    assert len(found) == len(wanted)
    assert set(found) == wanted


@pytest.mark.parametrize("op", ["==", "<", "<=", ">", ">="])
@pytest.mark.parametrize("bound", [-1e308, -1e19, 0.0, 1e19, 1e308])
def test_floats_are_not_bound_by_the_integers(op: str, bound: float) -> None:
    """A range of a float column may lie beyond every 64-bit integer, be wider than the largest float, or empty."""
    rows = [dict.fromkeys(TYPES) | {"f": value} for value in (-1e308, -1e19, -1.0, 0.0, 1e19, 1e308)]
    wide = Expr("and", args=(Expr(">=", "f", -1e308), Expr("<=", "f", 1e308)))
    empty = Expr("and", args=(Expr(">=", "f", 1e308), Expr("<=", "f", -1e308)))
    matcher: Matcher[int] = Matcher(TYPES)
    predicates = [Expr(op, "f", bound), wide, empty, Expr("==", "f", 1e-300)]
    for i, where in enumerate(predicates):
        matcher.add(i, where)
    wanted = sorted((at, i) for i, where in enumerate(predicates) for at, row in enumerate(rows) if matches(where, row))
    assert sorted(hits(matcher, RowColumns(rows))) == wanted
