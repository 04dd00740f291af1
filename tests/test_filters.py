"""Filters of others: what is read of a pyarrow expression is true wherever the filter is, exact where it says so."""

from __future__ import annotations

import datetime as dt
import functools
import operator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.api.dataset import Dataset
from kivi.arrow.filters import read_filter
from kivi.arrow.predicates import filter_batch
from kivi.errors import InvalidArgument, NotFound, SchemaError
from kivi.model.declarations import event_table_schema
from kivi.model.expressions import bind
from kivi.model.types import ColumnType

TYPES = {
    "i": ColumnType("int64"),
    "f": ColumnType("float64"),
    "s": ColumnType("string"),
    "b": ColumnType("bool"),
    "t": ColumnType("timestamp"),
}
MOMENT = pa.timestamp("us", "UTC")
ARROW = {"i": pa.int64(), "f": pa.float64(), "s": pa.string(), "b": pa.bool_(), "t": MOMENT}
VALUES: dict[str, list[Any]] = {
    "i": [None, -1, 0, 1, 2**53 + 1, 2**53],
    "f": [None, -0.0, 0.0, 1.0, 2.0**53],
    "s": [None, "", "a", 'a"b', "ü"],
    "b": [None, True, False],
    "t": [None, 0, 1, 10**15],
}
ROWS = pa.RecordBatch.from_pydict(
    {name: pa.array([VALUES[name][(i * k + i) % len(VALUES[name])] for i in range(60)], ARROW[name])
     for k, name in enumerate(ARROW, 1)}
).append_column("row", pa.array(range(60)))  # fmt: skip


def type_of(name: str) -> ColumnType:
    if name not in TYPES:
        raise SchemaError(f"no column {name!r}")
    return TYPES[name]


@st.composite
def expressions(draw: Any, depth: int = 3) -> Any:
    """As DuckDB and Polars make them, and some more that cannot be said in our words."""
    if depth and draw(st.booleans()):
        parts = draw(st.lists(expressions(depth - 1), min_size=1, max_size=3))
        how = draw(st.sampled_from(["and", "or", "not", "known"]))
        if how == "not":
            return ~parts[0]
        if how == "known":
            return pc.if_else(
                pc.field(draw(st.sampled_from("ifsbt"))).is_valid(), parts[0], pa.scalar(None, pa.bool_())
            )
        return functools.reduce(operator.and_ if how == "and" else operator.or_, parts)
    name = draw(st.sampled_from("ifsbt"))
    column, value = pc.field(name), draw(st.sampled_from(VALUES[name][1:]))
    literal = pa.scalar(value, ARROW[name])
    listed = pa.array([value or 1.0 if name == "f" else value], ARROW[name])  # to Arrow's lists -0.0 is no 0.0
    match draw(st.sampled_from(["compare", "mirrored", "in", "listed", "null", "valid", "cast", "bool"])):
        case "compare":
            return draw(st.sampled_from([operator.eq, operator.ne, operator.lt, operator.ge]))(column, literal)
        case "mirrored":
            return draw(st.sampled_from([operator.gt, operator.le]))(pc.scalar(literal), column)
        case "in":
            return column.isin(listed)
        case "listed":
            return pc.if_else(column.is_valid(), column.isin(listed), pa.scalar(None, pa.bool_()))
        case "null":
            return column.is_null()
        case "valid":
            return column.is_valid()
        case "cast":
            return pc.field("i").cast(pa.float64(), safe=False) == 2.0**53
    return pc.field("b")


@given(expressions())
def test_what_is_read_selects_at_least_what_the_filter_does(expression: Any) -> None:
    wanted = pa.Table.from_batches([ROWS]).filter(expression)["row"].to_pylist()
    said = read_filter(expression, type_of)
    found = ROWS if said.where is None else filter_batch(ROWS, bind(said.where, type_of), TYPES)
    rows = found.column("row").to_pylist()
    assert set(wanted) <= set(rows)
    if said.is_exact:
        assert rows == wanted


def test_terms_of_an_and_are_read_one_by_one() -> None:
    moment = pa.scalar(5, MOMENT)
    said = read_filter((pc.field("t") > moment) & (pc.field("i").cast(pa.float64()) > 1.5), type_of)
    assert said.where is not None
    assert (said.where.op, said.where.column) == (">", "t")
    assert said.where.value == dt.datetime(1970, 1, 1, 0, 0, 0, 5, tzinfo=dt.UTC)
    assert not said.is_exact
    assert said.columns == frozenset({"t", "i"})
    exact = read_filter((pc.field("i") > 1) & pc.field("s").isin(["a", "b"]), type_of)
    assert exact.is_exact
    assert not read_filter(pc.field("i") == 2.0**53, type_of).is_exact  # which Arrow compares rounded


def dataset(failing: bool = False) -> Dataset:
    schema = event_table_schema("e", "t", {name: str(type_) for name, type_ in TYPES.items()})

    def read(wanted: Any) -> Any:
        if failing:
            raise NotFound("gone")
        scan = wanted.bound(schema)
        found = ROWS if scan.where is None else filter_batch(ROWS, scan.where, TYPES)
        yield found.select(wanted.columns or schema.output_names)

    return Dataset(schema, read)


@given(expressions(), st.lists(st.sampled_from("ifsbt"), unique=True, min_size=1))
def test_a_dataset_answers_as_the_rows_do(expression: Any, columns: list[str]) -> None:
    wanted = pa.Table.from_batches([ROWS]).filter(expression).select(columns)
    assert dataset().to_table(columns=columns, filter=expression).to_pylist() == wanted.to_pylist()


def test_a_dataset_counts_and_renames_and_says_what_it_is_not() -> None:
    found = dataset()
    assert found.count_rows() == 60
    assert found.to_table(columns={"twice": pc.field("i") * 2}).column_names == ["twice"]
    assert found.head(7).num_rows == 7
    for refused in (found.get_fragments, lambda: found.filter(pc.field("b")), lambda: found.partition_expression):
        with pytest.raises(InvalidArgument, match="no fragments"):
            refused()
    broken = dataset(failing=True)
    with pytest.raises(NotFound):
        broken.to_table()
    assert isinstance(broken.failure, NotFound)
