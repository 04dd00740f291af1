"""What crosses the wire comes back as it was: values, predicates, definitions, errors."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi import errors
from kivi.model import declarations as definitions
from kivi.model import expressions as expr
from kivi.model.schema import Alteration
from kivi.model.views import view_schema
from kivi.wire import status as client_errors
from kivi.wire.codec import fill_values, from_expr, from_table, from_values, to_expr, to_table
from kivi.wire.v1 import types_pb2

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(),
)


@given(st.lists(VALUES))
def test_values(values):
    key = types_pb2.Key()
    fill_values(key.values, values)
    back = from_values(types_pb2.Key.FromString(key.SerializeToString()).values)
    assert [(type(v), v) for v in back] == [(type(v), v) for v in values]


def row(i: int) -> dict[str, Any]:
    return {"a": i, "b": i % 3}


PREDICATES = st.recursive(
    st.builds(
        lambda op, name, value: expr.Expr(op, name, value),
        st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
        st.sampled_from("ab"),
        st.integers(0, 9),
    )
    | st.builds(lambda values: expr.col("a").isin(values), st.lists(st.integers(0, 9)))
    | st.just(expr.col("b").is_null()),
    lambda inner: (
        st.builds(lambda a, b: a & b, inner, inner)
        | st.builds(lambda a, b: a | b, inner, inner)
        | st.builds(lambda a: ~a, inner)
    ),
    max_leaves=20,
)


@given(PREDICATES)
def test_predicates_mean_the_same(predicate):
    back = from_expr(types_pb2.Expr.FromString(to_expr(predicate).SerializeToString()))
    for i in range(10):
        assert expr.matches(back, row(i)) == expr.matches(predicate, row(i))


def test_a_predicate_without_operands_is_refused():
    for bad in (types_pb2.Expr(), types_pb2.Expr(op=types_pb2.Expr.OP_AND), types_pb2.Expr(op=types_pb2.Expr.OP_EQ)):
        with pytest.raises(kivi.InvalidArgument):
            from_expr(bad)


def test_definitions():
    events = definitions.event_table_schema(
        "ev", "ts", {"e": "int64", "ts": "timestamp", "p": "decimal(9,2)", "s": "string"}, retention="30d"
    )
    aggregate = definitions.aggregate_schema(
        "agg",
        events,
        ["e", kivi.time_slot("ts", "5m"), kivi.time_slot("ts", "1month", "month", tz="Europe/Madrid")],
        {"s": kivi.sum("p"), "n": kivi.count(), "m": kivi.max("ts"), "c": kivi.count("s")},
        {"avg": "s / n"},
        history="1h",
    )
    rows = definitions.row_table_schema("t", {"id": "int64"}, {"v": kivi.min("float64"), "b": "bytes"}, history="1h")
    stored: dict[str, Any] = {"id": 7, "created_ts": 3, "state": "building", "source_id": 6, "complete_since_us": -1}
    stored["declared_source"] = "finer"
    stored["alterations"] = (Alteration(1, cts=2),)
    view = view_schema("v", rows, ["b", "id"], unique=True)
    tables = [events, aggregate, rows, view, dataclasses.replace(aggregate, **stored)]
    for table in tables:
        back = from_table(types_pb2.Table.FromString(to_table(table).SerializeToString()))
        assert back == table
        assert back.description() == table.description()
    events = dataclasses.replace(events, index=("e",), cold="s3://bucket/prefix", local_us=86_400_000_000)
    events = dataclasses.replace(events, shard_by=("e",), expires="ts", role="endpoints")
    overwritten = dataclasses.replace(events, id=30, origin_id=7)
    assert from_table(to_table(overwritten)) == dataclasses.replace(events, id=7)
    assert from_table(to_table(overwritten)).id == 7, "a client knows a table by its first generation"
    for field in dataclasses.fields(aggregate):  # whoever adds one is told here that it does not cross the wire yet
        # What it observes is for deriving, which a client does not do.
        assert field.name == "observes" or any(
            getattr(table, field.name) != field.default for table in (*tables, overwritten)
        ), field.name


KEYS: list[tuple[Any, ...]] = [
    (1, "x"),
    (b"\x00\xff", True),
    (dt.datetime(2023, 11, 16, tzinfo=dt.UTC),),
    (decimal.Decimal("1.50"),),
]


@pytest.mark.parametrize("key", KEYS)
def test_a_conflict_keeps_its_attributes(key):
    error = errors.Conflict(table="t", key=key, start_ts=4, commit_ts=None, column="c")
    back = client_errors.from_error(types_pb2.Error.FromString(client_errors.to_error(error).SerializeToString()))
    assert type(back) is errors.Conflict
    assert (back.table, back.key, back.column, back.start_ts, back.commit_ts) == ("t", key, "c", 4, None)
    assert back.message == error.message


def every_error() -> list[type[errors.KiviError]]:
    return [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", every_error())
def test_every_error_has_a_status_and_comes_back(kind):
    error = kind("what happened", token="k") if kind is errors.CommitUnknown else kind("what happened")
    assert isinstance(client_errors.status_code(error), grpc.StatusCode)

    class Failed(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return client_errors.status_code(error)

        def details(self) -> str:
            return error.message

        def trailing_metadata(self) -> Any:
            return ((client_errors.DETAILS_KEY, client_errors.to_rich_status(error)),)

    back = client_errors.from_rpc_error(Failed())
    assert type(back) is kind
    assert (back.message, back.details) == (error.message, error.details)


def test_faults_of_the_server_say_nothing_of_its_insides():
    assert "secret" not in client_errors.to_error(ValueError("secret")).message
