"""Spark's filters as kivi's: the same rows by both, and a range that leaves none of them out."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pytest

from kivi.model.expressions import bind, matches
from kivi.model.predicate_text import where
from kivi.model.types import ColumnType
from kivi.spark.filters import Range, predicate, range_of
from kivi.spark.schemas import Target

pytest.importorskip("pyspark")
from pyspark.sql import datasource as spark

TYPES = {"host": "string", "slot": "timestamp", "n": "int64", "money": "decimal(12,2)", "x": "float64"}
ROWS = Target("t", "aggregate", ("host", "slot"), {n: ColumnType.parse(t) for n, t in TYPES.items()}, None)
EVENTS = Target("e", "event", (), ROWS.columns, "slot")
NOON = dt.datetime(2026, 7, 1, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (spark.EqualTo(("n",), 7), "(n == 7)"),
        (spark.Not(spark.EqualTo(("n",), 7)), "~(n == 7)"),
        (spark.GreaterThan(("x",), 0.5), "(x > 0.5)"),
        (spark.LessThanOrEqual(("money",), Decimal("1.50")), "(money <= Decimal('1.50'))"),
        (spark.In(("host",), ("a", "b")), "host.isin(['a', 'b'])"),
        (spark.StringStartsWith(("host",), "a"), "host.startswith('a')"),
        (spark.Not(spark.StringContains(("host",), "a")), "~host.contains('a')"),
        (spark.IsNull(("n",)), "n.is_null()"),
        (spark.IsNotNull(("n",)), "~n.is_null()"),
        (spark.EqualNullSafe(("n",), None), "n.is_null()"),
        (spark.EqualNullSafe(("n",), 7), "((n == 7) & ~n.is_null())"),
    ],
)
def test_predicates(given, text):
    assert str(predicate(ROWS, given)) == text


@pytest.mark.parametrize(
    "given",
    [
        spark.StringEndsWith(("host",), "a"),
        spark.EqualTo(("host", "inner"), "a"),
        spark.EqualTo(("elsewhere",), "a"),
        spark.EqualTo(("n",), "seven"),
        spark.EqualTo(("slot",), dt.datetime(2026, 7, 1)),  # noqa: DTZ001 (of nobody knows which zone)
        spark.GreaterThan(("money",), Decimal("0.001")),
        spark.In(("n",), (1, None)),
    ],
)
def test_what_stays_with_spark(given):
    assert predicate(ROWS, given) is None


def test_ranges_of_keys():
    host, later = spark.EqualTo(("host",), "a"), spark.GreaterThan(("slot",), NOON)
    sooner = spark.LessThan(("slot",), NOON + dt.timedelta(hours=1))
    assert range_of(ROWS, [spark.EqualTo(("n",), 7)]) == Range()
    assert range_of(ROWS, [later]) == Range()  # not the first column of the key
    assert range_of(ROWS, [sooner, host]) == Range(("a",), None, ("a", NOON + dt.timedelta(hours=1)))
    assert range_of(ROWS, [host, later, sooner]).start == ("a", NOON)
    assert range_of(ROWS, [host, spark.EqualTo(("slot",), NOON)]) == Range(("a", NOON))
    assert range_of(EVENTS, [host, later, sooner]) == Range((), (NOON,), (NOON + dt.timedelta(hours=1),))
    assert range_of(EVENTS, [spark.EqualTo(("slot",), NOON)]) == Range()


def test_ranges_are_cut():
    whole = Range((), ("b",), ("d",))
    assert whole.cut([("a", 1), ("b", 2), ("c", 1), ("d", 0)]) == [
        Range((), ("b",), ("b", 2)), Range((), ("b", 2), ("c", 1)), Range((), ("c", 1), ("d",)),
    ]  # fmt: skip
    assert Range(("b",)).cut([("a", 1), ("b", 2), ("c", 1)]) == [Range(("b",), None, ("b", 2)), Range(("b",), ("b", 2))]
    assert Range().cut([]) == [Range()]


@pytest.mark.spark
@pytest.mark.timeout(240)
@pytest.mark.parametrize("pushed", [True, False])
def test_the_same_rows_whoever_filters(spark, server, db, pushed):
    """Nulls, and both kinds of tables, in parts, against Spark's own evaluation."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", str(pushed).lower())
    for name in {"facts", "rows"} & set(db.tables()):
        db.drop(name)
    db.create_event_table("facts", event_time="ts", columns={"ts": "timestamp", "n": "int64", "s": "string"})
    db.create_table("rows", key={"s": "string", "n": "int64"}, columns={"v": "float64"})
    rows = [{"ts": NOON + dt.timedelta(seconds=i), "n": i % 7 or None, "s": "ab"[i % 2]} for i in range(1_000)]
    db.append("facts", rows)
    with db.transaction() as tx:
        for i in range(1_000):
            tx.put("rows", ("abc"[i % 3], i), v=None if i % 5 == 0 else float(i % 11))
    db.consolidate()
    for table, conditions in {
        "facts": ["n = 3", "n != 3", "not (n <=> 3)", "n in (1, 2) and s = 'a'", "n is null", "s like 'a%'",
                  "ts >= timestamp'2026-07-01 12:05:00' and ts < timestamp'2026-07-01 12:07:00'"],
        "rows": ["s = 'b'", "s = 'b' and n >= 100 and n < 200", "v > 3 and v <= 7.5", "v is null or n = 4", "s >= 'b'"],
    }.items():  # fmt: skip
        reads = spark.read.format("kivi").options(endpoint=server.endpoint, table=table, partitionRows=100)
        assert reads.load().rdd.getNumPartitions() == 10
        local = spark.createDataFrame(reads.load().toArrow())
        for condition in conditions:
            frame = reads.load().where(condition)
            wanted = local.where(condition)
            assert sorted(map(str, frame.collect())) == sorted(map(str, wanted.collect())), condition
            plan = frame._jdf.queryExecution().executedPlan().toString()
            stays = not pushed or " or " in condition
            assert ("Filter " in plan) == stays, plan


@pytest.mark.spark
@pytest.mark.timeout(240)
def test_expressions_mean_what_spark_means(spark):
    """Nulls, divisors of 0, mixed types. Spark divides by 0 with an error; ``try_divide`` is its way to a null."""
    types = {"i": "int64", "j": "int64", "f": "float64", "d": "decimal(9,2)", "b": "bool"}
    numbers = [None, -3, 0, 1, 2**40 + 1]
    rows = [
        {"i": i, "j": j, "f": f, "d": None if d is None else Decimal(d), "b": b}
        for i in numbers
        for j in (None, 0, 2)
        for f, d, b in ((None, "0.10", True), (0.1, None, False), (float(2**53), "-1.50", None))
    ]
    frame = spark.createDataFrame(rows, "i long, j long, f double, d decimal(9,2), b boolean")
    bound = {name: ColumnType.parse(text) for name, text in types.items()}
    stored = [{name: bound[name].to_stored(value) for name, value in row.items()} for row in rows]
    for text, sql in {
        "i + j > i - 1": None,
        "i * d <= 0": None,
        "i / j >= 0.5": "try_divide(i, j) >= 0.5D",
        "(i / j) is null": "try_divide(i, j) is null",
        "not (i < j | b)": "not (i < j or b)",
        "coalesce(i, j, 7) == 7": None,
        "case((i > j, 'x'), (b, 'y')) == 'x'": "case when i > j then 'x' when b then 'y' end = 'x'",
        "case((b, i), otherwise=d) > 0": "case when b then i else d end > 0",
        "-d * 2 == 3": None,
        "f + j > 0.5": "f + j > 0.5D",
    }.items():
        expr = bind(where(text, types), bound.__getitem__)
        selected = frame.where(sql or text.replace("==", "=")).collect()
        wanted = [row for row, kept in zip(rows, stored, strict=True) if matches(expr, kept)]
        assert sorted(str(row.asDict()) for row in selected) == sorted(map(str, wanted)), text
