"""``option("aggregate", ...)``: the same as Spark's own recount of the same snapshot, from headers where they do."""

from __future__ import annotations

import datetime as dt

import pytest

from kivi.errors import InvalidArgument
from kivi.spark.options import Options
from kivi.spark.summary import measures_of

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

AGGREGATE = (
    "count(), count(resp_time_us) as timed, sum(resp_time_us), min(ts), MAX(resp_time_us) as slowest, "
    "sum(price) as revenue, min(price)"
)


@pytest.fixture(scope="module")
def shop(db) -> str:
    """Events of ten hours, some without a price or a time, in blocks and pending, with a floor; and what is kept."""
    columns = {"ts": "timestamp", "endpoint_id": "int64", "resp_time_us": "int64", "price": "decimal(9,2)"}
    db.create_event_table("shop", event_time="ts", columns=columns)
    start = 1_750_000_000_000_000
    for hour in range(10):
        db.append(
            "shop",
            [
                {
                    "ts": start + hour * 3_600_000_000 + i * 1_000_000,
                    "endpoint_id": i % 7,
                    "resp_time_us": None if i % 5 == 0 else i * hour,
                    "price": None if i % 3 == 0 else f"{hour}.{i % 90 + 10}",
                }
                for i in range(1_000)
            ],
        )
        if hour in (4, 8):
            db.consolidate()
    return "shop"


def recount(frame):
    return frame.selectExpr(
        "count(*) as `count()`", "count(resp_time_us) as timed", "sum(resp_time_us) as `sum(resp_time_us)`",
        "min(ts) as `min(ts)`", "max(resp_time_us) as slowest", "cast(sum(price) as decimal(18, 2)) as revenue",
        "min(price) as `min(price)`",
    ).toArrow().to_pylist()  # fmt: skip


def test_it_equals_what_spark_counts_itself(spark, server, db, shop) -> None:
    def load(**options):
        return spark.read.format("kivi").options(endpoint=server.endpoint, table=shop, **options).load()

    start = "2025-06-15T18:00:00Z"
    then = db.watermark() - 2
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    for options, frame in (
        ({}, load()),
        ({"asOf": then}, load(asOf=then)),
        ({"start": start, "end": "2025-06-15T20:30:00Z"},
         load().where(f"ts >= timestamp'{start}' and ts < timestamp'2025-06-15 20:30:00'")),
        ({"where": "endpoint_id in [1, 2] & ~(resp_time_us > 3000)"},
         load().where("endpoint_id in (1, 2) and not resp_time_us > 3000")),
    ):  # fmt: skip
        before = db.stats()
        found = load(aggregate=AGGREGATE, **options)
        row = found.toArrow().to_pylist()
        after = db.stats()
        assert row == recount(frame), options
        if not options:
            assert [f.simpleString() for f in found.schema] == [
                "count():bigint", "timed:bigint", "sum(resp_time_us):bigint", "min(ts):timestamp", "slowest:bigint",
                "revenue:decimal(18,2)", "min(price):decimal(9,2)",
            ]  # fmt: skip
            assert after["summary_blocks_known"] > before["summary_blocks_known"]
            assert after["summary_blocks_read"] == before["summary_blocks_read"], "headers were enough"
    assert load(aggregate="count() as n, max(ts) as newest").where("n > 1000000").count() == 0
    one = load(aggregate="max(ts) as newest").collect()[0].newest
    assert one.replace(tzinfo=dt.UTC) == load().agg({"ts": "max"}).collect()[0][0].replace(tzinfo=dt.UTC)


def test_what_is_refused(spark, server, shop, table) -> None:
    def load(table=shop, **options):
        return spark.read.format("kivi").options(endpoint=server.endpoint, table=table, **options).load()

    for options, what in (
        ({"aggregate": "avg(resp_time_us)"}, "an average is a sum divided by a count"),
        ({"aggregate": "sum(nowhere)"}, "no column 'nowhere'"),
        ({"aggregate": "count()", "table": f"{table}_5m"}, "no event table"),
        ({"start": "2025-06-15T18:00:00Z"}, "belongs to option aggregate"),
        ({"aggregate": "count()", "start": "2025-06-15"}, "no time zone"),
    ):
        with pytest.raises(Exception, match=what):
            load(**options).schema  # noqa: B018
    with pytest.raises(Exception, match="option where: there is no column 'x'"):
        load(aggregate="count()", where="x == 1").collect()


def test_how_measures_are_written() -> None:
    found = measures_of("count(*), count( a ) , Sum(b) AS c,min(d)")
    assert {name: str(call) for name, call in found.items()} == {
        "count()": "count()", "count(a)": "count(a)", "c": "sum(b)", "min(d)": "min(d)"
    }  # fmt: skip
    for wrong in ("", "count", "sum()", "sum(a, b)", "count(), count()", "sum(a) b", "sum(a) as", "sum(a); drop"):
        with pytest.raises(InvalidArgument, match="option aggregate"):
            measures_of(wrong)
    with pytest.raises(InvalidArgument, match="leave out option columns"):
        Options.of({"table": "t", "aggregate": "count()", "columns": "a"})
