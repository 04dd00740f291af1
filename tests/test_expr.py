"""Predicates: three values as in SQL, the same on rows as on Arrow batches, and refused when they are a mistake.

The model is a truth table over True, False and None, written out below; ``matches`` and ``filter_batch`` are
compared with it on random predicates and rows.
"""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.arrow.columns import arrow_from_stored
from kivi.arrow.predicates import filter_batch
from kivi.errors import InvalidArgument, SchemaError
from kivi.model.expressions import Expr, bind, col, matches, names
from kivi.model.types import ColumnType

TYPES = {
    "i": ColumnType("int64"),
    "f": ColumnType("float64"),
    "d": ColumnType("decimal", 5, 2),
    "s": ColumnType("string"),
    "y": ColumnType("bytes"),
    "b": ColumnType("bool"),
    "t": ColumnType("timestamp"),
}


def type_of(name: str) -> ColumnType:
    if name not in TYPES:
        raise SchemaError(f"no column {name!r}")
    return TYPES[name]


def bound(expr: Expr) -> Expr:
    return bind(expr, type_of)


# -- three values -----------------------------------------------------------------------------------

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
NOT = {True: False, False: True, None: None}
AND = {
    (True, True): True, (True, False): False, (True, None): None,
    (False, True): False, (False, False): False, (False, None): False,
    (None, True): None, (None, False): False, (None, None): None,
}  # fmt: skip


def truth(expr: Expr, row: dict[str, Any]) -> bool | None:
    """The model."""
    if expr.op == "not":
        return NOT[truth(expr.args[0], row)]
    if expr.op in ("and", "or"):
        truths = [truth(arg, row) for arg in expr.args]
        if expr.op == "and":
            return functools.reduce(lambda left, right: AND[left, right], truths)
        return functools.reduce(lambda left, right: NOT[AND[NOT[left], NOT[right]]], truths)
    value = row[expr.column]
    if expr.op == "is_null":
        return value is None
    if value is None:
        return None
    if expr.op == "isin":
        return any(value == one for one in expr.value)
    return bool(COMPARE[expr.op](value, expr.value))


VALUES: dict[str, st.SearchStrategy[Any]] = {  # few, so that comparisons are equal often
    "i": st.integers(-1, 1) | st.sampled_from([-(2**63), 2**63 - 1]),
    "f": st.sampled_from([-0.5, 0.0, 0.5, 1e300]),
    "d": st.integers(-1, 1) | st.just(99_999),
    "s": st.sampled_from(["", "a", "a\0", "b", "é"]),
    "y": st.sampled_from([b"", b"\0", b"a"]),
    "b": st.booleans(),
    "t": st.integers(-1, 1) | st.just(2**62),  # an integer may be no moment of these centuries
}
ROWS = st.lists(st.fixed_dictionaries({name: st.none() | values for name, values in VALUES.items()}), max_size=8)


def literals(name: str) -> st.SearchStrategy[Any]:
    """As a caller writes them."""
    if name == "d":
        return VALUES[name].map(lambda unscaled: decimal.Decimal(unscaled).scaleb(-2))
    return VALUES[name]


def leaves(name: str) -> st.SearchStrategy[Expr]:
    return (
        st.builds(lambda op, value: COMPARE[op](col(name), value), st.sampled_from(list(COMPARE)), literals(name))
        | st.lists(literals(name), max_size=3).map(col(name).isin)
        | st.just(col(name).is_null())
    )


PREDICATES = st.recursive(
    st.sampled_from(sorted(TYPES)).flatmap(leaves),
    lambda inner: (
        st.builds(operator.and_, inner, inner) | st.builds(operator.or_, inner, inner) | inner.map(operator.inv)
    ),
    max_leaves=6,
)


def batch_of(rows: list[dict[str, Any]]) -> Any:
    arrow = {"i": pa.int64(), "f": pa.float64(), "s": pa.string(), "y": pa.binary(), "b": pa.bool_()}
    arrays = []
    for name, type_ in TYPES.items():
        values = [row[name] for row in rows]
        if name in arrow:
            arrays.append(pa.array(values, arrow[name]))
        else:
            filled = arrow_from_stored(type_, np.array([v or 0 for v in values], np.int64))
            arrays.append(filled.take(pa.array([None if v is None else i for i, v in enumerate(values)], pa.int64())))
    return pa.RecordBatch.from_arrays([*arrays, pa.array(range(len(rows)), pa.int64())], [*TYPES, "row"])


@given(PREDICATES, ROWS)
def test_rows_and_batches_follow_the_truth_table(predicate: Expr, rows: list[dict[str, Any]]) -> None:
    expr = bound(predicate)
    expected = [i for i, row in enumerate(rows) if truth(expr, row) is True]
    assert [i for i, row in enumerate(rows) if matches(expr, row)] == expected
    assert filter_batch(batch_of(rows), expr, TYPES)["row"].to_pylist() == expected
    unselected = bound(~predicate)
    assert [i for i, row in enumerate(rows) if matches(unselected, row)] == [
        i for i, row in enumerate(rows) if truth(expr, row) is False
    ]


def test_null_is_unknown_and_only_true_selects() -> None:
    null: dict[str, Any] = dict.fromkeys(TYPES)
    for expr in (col("i") == 1, col("i") != 1, ~(col("i") == 1), col("i").isin([]), ~col("i").isin([1])):
        assert not matches(bound(expr), null)
    assert matches(bound((col("i") == 1) | col("s").is_null()), null)
    assert not matches(bound(~((col("i") == 1) & (col("s") != "a"))), null)
    assert matches(bound(~((col("i") == 1) & ~col("s").is_null())), null)  # false and unknown is false


def test_comparing_with_none_asks_for_null() -> None:
    assert str(col("i") == None) == "i.is_null()"  # noqa: E711
    assert str(col("i") != None) == "~i.is_null()"  # noqa: E711
    for expr in (col("i") < None, col("i").isin([1, None])):
        with pytest.raises(SchemaError, match=r"compare 'i' with null by is_null\(\)"):
            bound(expr)


# -- literals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expr", "stored"),
    [
        (col("d") == "1.5", 150),
        (col("d") >= 2, 200),
        (col("t") < dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC), 1_000_000),
        (col("f") > 1, 1.0),
        (col("f") != -0.0, 0.0),
        (col("i") <= np.int8(3), 3),
        (col("y") == bytearray(b"x"), b"x"),
        (col("d").isin(["0.01", 1]), (1, 100)),
        (col("s").isin(x for x in "ab"), ("a", "b")),
    ],
)
def test_bind_brings_literals_to_the_stored_form(expr: Expr, stored: Any) -> None:
    value = bound(expr).value
    assert value == stored and type(value) is type(stored)


def test_literals_stand_on_either_side() -> None:
    assert str(3 < col("i")) == "(i > 3)"  # noqa: SIM300
    assert str(3 == col("i")) == "(i == 3)"  # noqa: SIM300


@pytest.mark.parametrize(
    ("expr", "error"),
    [
        (col("i") == "1", SchemaError),
        (col("i") == 1.0, SchemaError),
        (col("b") == 1, SchemaError),
        (col("s").isin(["a", b"b"]), SchemaError),
        (col("x") == 1, SchemaError),
        (col("x").is_null(), SchemaError),
        (col("i") == 2**63, InvalidArgument),
        (col("f") == float("nan"), InvalidArgument),
        (col("d") == "0.001", InvalidArgument),
        (col("t") == dt.datetime(2026, 1, 1), InvalidArgument),  # noqa: DTZ001
    ],
)
def test_what_a_column_cannot_be_compared_with(expr: Expr, error: type[Exception]) -> None:
    for whole in (expr, ~expr, (col("i") == 1) & expr, expr | (col("i") == 1)):
        with pytest.raises(error):
            bound(whole)


# -- mistakes ---------------------------------------------------------------------------------------


def test_a_predicate_has_no_truth_of_its_own() -> None:
    one = col("i") == 1
    for use in (
        lambda: bool(one),
        lambda: not one,
        lambda: one and one,
        lambda: one or one,
        lambda: 0 < col("i") < 5,
        lambda: col("i") in [1, 2],
        lambda: [1] if one else [],
    ):
        with pytest.raises(InvalidArgument, match="with & | ~ and parentheses, not with and, or, not"):
            use()


def test_only_predicates_are_combined_and_only_values_compared() -> None:
    one: Any = col("i") == 1
    for use in (
        lambda: one & True,
        lambda: one & None,
        lambda: bind(col("i"), type_of),
        lambda: bind(one | col("s"), type_of),
    ):
        with pytest.raises(InvalidArgument, match="is not a predicate"):
            use()
    with pytest.raises(InvalidArgument, match="isin takes values"):
        col("i").isin([col("f")])
    with pytest.raises(SchemaError, match="compares int64 with bool"):
        bind(col("i") < one, type_of)
    with pytest.raises(TypeError):
        hash(col("i"))


@pytest.mark.parametrize(
    "expr",
    [
        Expr("like", "s", "a"),
        Expr("", "s", "a"),
        Expr("and"),
        Expr("or"),
        Expr("not", args=(col("i") == 1, col("i") == 2)),
        Expr("not"),
    ],
    ids=lambda expr: f"{expr.op}-{len(expr.args)}",
)
def test_what_no_caller_can_write_is_refused_all_the_same(expr: Expr) -> None:
    """A predicate may have come over the wire."""
    with pytest.raises(InvalidArgument):
        bound(expr)


# -- limits -----------------------------------------------------------------------------------------


def chain(count: int) -> Expr:
    return functools.reduce(operator.or_, [col("i") == i for i in range(count)])


def tree(depth: int) -> Expr:
    """A little over 2 ** depth nodes: "and" and "or" by turns, so that they nest."""
    if depth == 0:
        return col("i") == 1
    return (operator.and_ if depth % 2 else operator.or_)(tree(depth - 1), tree(depth - 1))


def nest(depth: int) -> Expr:
    return functools.reduce(lambda inner, _: ~inner, range(depth), col("i") == 1)


def test_a_long_chain_is_not_deep() -> None:
    long = bound(chain(5_000))
    assert matches(long, {"i": 4_999}) and not matches(long, {"i": 5_000})
    assert names(long) == {"i"}


def test_depth_is_limited() -> None:
    assert matches(bound(nest(50)), {"i": 1})
    with pytest.raises(InvalidArgument, match="at most 10000 nodes and 50 deep"):
        bound(nest(51))


def test_size_is_limited() -> None:
    bound(tree(12))
    bound(col("i").isin(range(9_999)))
    for large in (tree(13), col("i").isin(range(10_000)), tree(11) & col("i").isin(range(6_000))):
        with pytest.raises(InvalidArgument, match="the predicate is too large"):
            bound(large)


def test_a_predicate_is_read_as_it_is_written() -> None:
    expr = ((col("i") == 1) & ~col("s").isin(["a"])) | col("f").is_null()
    assert str(expr) == "(((i == 1) & ~s.isin(['a'])) | f.is_null())"
    assert names(expr) == {"i", "s", "f"}
