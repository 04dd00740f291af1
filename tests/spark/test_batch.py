"""Batch jobs: a write is all or nothing, a read is one snapshot."""

from __future__ import annotations

import datetime as dt
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kivi
from kivi.spark.options import Options
from kivi.spark.reading import Reader
from kivi.spark.schemas import Target, spark_schema
from tests.client.proxy import Proxy
from tests.serverproc import ServerProcess
from tests.spark.helpers import check

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]


@pytest.fixture
def load(spark, server):
    """A data frame of a table."""

    def load(table: str, **options):
        return spark.read.format("kivi").options(endpoint=server.endpoint, table=table, **options).load()

    return load


@pytest.fixture
def save(spark, server, source, table):
    """Writes the input to the table as one job."""

    def save(format: str = "kivi", partitions: int = 3, mode: str = "append") -> None:
        frame = spark.read.parquet(str(source.folder)).repartition(partitions)
        frame.write.format(format).options(endpoint=server.endpoint, table=table).mode(mode).save()

    return save


def commits_of(db: Any, table: str) -> set[int]:
    """Those that the table's events are of: what a server of many tests commits besides is no part of this."""
    with db.snapshot() as snapshot:
        return {row["_commit_ts"] for row in snapshot.scan(table, columns=["_commit_ts"])}


def test_a_job_is_one_commit(save, source, db, table) -> None:
    source.add(2, rows=1000)
    save()
    check(db, table, source.rows)
    assert len(commits_of(db, table)) == 1


def test_a_task_that_dies_after_it_staged_counts_once(save, source, db, table) -> None:
    source.add(1)
    save("kivi_flaky")
    check(db, table, source.rows)


def test_a_job_that_fails_leaves_nothing(save, source, db, table) -> None:
    source.add(2)
    with pytest.raises(Exception, match="planted"):
        save("kivi_doomed")
    check(db, table, [])


@pytest.mark.parametrize(("format", "fails"), [("kivi", False), ("kivi_flaky", False), ("kivi_doomed", True)])
def test_overwrite_is_one_step_and_all_or_nothing(save, spark, server, source, db, table, format, fails) -> None:
    at = 1_750_000_000_000_000
    old = [{"seq": -i, "endpoint_id": 1, "ts": at, "resp_time_us": i} for i in range(50)]
    db.append(table, old)
    source.add(2)
    with db.snapshot(ttl_s=3_600) as snapshot:  # Spark may take long
        if fails:
            with pytest.raises(Exception, match="planted"):
                save(format, mode="overwrite")
            check(db, table, old)
            return
        save(format, mode="overwrite")
        check(db, table, source.rows)
        assert len(commits_of(db, table)) == 1
        assert sorted(row["seq"] for row in snapshot.scan(table)) == list(range(-49, 1)), (
            "the old snapshot is as it was"
        )
        assert snapshot.get(f"{table}_5m", (1, at - at % 300_000_000))["invocations"] == 50
    nothing = spark.read.parquet(str(source.folder)).where("seq < 0")
    nothing.write.format("kivi").options(endpoint=server.endpoint, table=table).mode("overwrite").save()
    check(db, table, [])


def test_a_job_may_overwrite_what_it_reads(load, spark, server, db, totals) -> None:
    with db.transaction() as tx:
        for i in range(100):
            tx.put(totals, (i,), name=f"name {i}")
            tx.delta(totals, (i,), n=i, last=i)
    frame = load(totals).where("id % 10 = 3").selectExpr("id", "upper(name) as name", "n * 2 as n")
    frame.write.format("kivi").options(endpoint=server.endpoint, table=totals).mode("overwrite").save()
    with db.snapshot() as snap:
        rows = [tuple(row.values()) for row in snap.scan(totals)]
    assert rows == [(i, f"NAME {i}", 2 * i, None) for i in range(3, 100, 10)]


def test_an_aggregate_is_not_overwritten_and_a_stream_overwrites_nothing(
    spark, server, table, source, tmp_path
) -> None:
    frame = spark.sql("select 1L as endpoint_id")
    with pytest.raises(Exception, match="InvalidArgument: .*is a table of kind aggregate"):
        frame.write.format("kivi").options(endpoint=server.endpoint, table=f"{table}_5m").mode("overwrite").save()
    source.add(1)
    counts = spark.readStream.schema("ts timestamp").parquet(str(source.folder)).groupBy("ts").count().select("ts")
    stream = counts.writeStream.format("kivi").outputMode("complete").option("table", table)
    stream = stream.options(endpoint=server.endpoint, checkpointLocation=str(tmp_path / "complete"))
    with pytest.raises(Exception, match='outputMode\\("append"\\)'):
        stream.trigger(availableNow=True).start().awaitTermination()


def test_types_go_both_ways(spark, server, db, load) -> None:
    columns = {
        "ts": "timestamp", "yes": "bool", "whole": "int64", "real": "float64", "money": "decimal(12,2)",
        "name": "string", "raw": "bytes",
    }  # fmt: skip
    db.create_event_table("every_type", event_time="ts", columns=columns)
    at = dt.datetime(2026, 7, 1, 12, 0, 0, 123456, tzinfo=dt.UTC)
    rows = [
        (at, True, -(2**63), -0.5, Decimal("1234567890.12"), "žluťoučký 🐎", b"\x00\xff"),
        (at + dt.timedelta(microseconds=1), None, None, None, None, None, None),
    ]
    kinds = [
        pa.timestamp("us", "UTC"), pa.bool_(), pa.int64(), pa.float64(), pa.decimal128(12, 2), pa.string(), pa.binary()
    ]  # fmt: skip
    given = pa.table([pa.array(list(c), k) for c, k in zip(zip(*rows, strict=True), kinds, strict=True)], list(columns))
    write = spark.createDataFrame(given).write.format("kivi").mode("append")
    write.options(endpoint=server.endpoint, table="every_type").save()
    frame = load("every_type")
    names = [field.simpleString() for field in frame.schema]
    assert names == [
        "ts:timestamp", "yes:boolean", "whole:bigint", "real:double", "money:decimal(12,2)", "name:string", "raw:binary"
    ]  # fmt: skip
    back = frame.orderBy("ts").toArrow().to_pylist()
    assert [tuple(row.values()) for row in back] == rows
    few = spark.sql("select current_timestamp() as ts, cast(7 as int) as whole").write.format("kivi").mode("append")
    few.options(endpoint=server.endpoint, table="every_type").save()  # a narrower type, and columns that are not there
    assert load("every_type", columns="whole, name").where("whole = 7").toArrow().to_pylist() == [
        {"whole": 7, "name": None}
    ]


def test_rows_and_aggregates_are_read_as_the_client_reads_them(load, save, source, db, table) -> None:
    source.add(1, rows=500)
    save()
    with db.snapshot() as snapshot:
        expected = snapshot.to_arrow(f"{table}_5m").to_pylist()
    frame = load(f"{table}_5m")
    assert [field.nullable for field in frame.schema] == [False, False, True, True, True, True]
    assert frame.orderBy("endpoint_id", "slot").toArrow().to_pylist() == expected
    db.create_table("accounts", key={"id": "int64"}, columns={"name": "string", "balance": kivi.sum("int64")})
    with db.transaction() as tx:
        tx.put("accounts", (1,), name="ada")
        tx.delta("accounts", (1,), balance=21)
    assert load("accounts").toArrow().to_pylist() == [{"id": 1, "name": "ada", "balance": 21}]
    assert load("accounts", columns="balance").toArrow().to_pylist() == [{"balance": 21}]


def test_every_measure_is_a_plain_column(load, spark, server, db, tmp_path) -> None:
    columns = {"ts": "timestamp", "g": "int64", "x": "int64", "price": "decimal(9,2)", "route": "string"}
    db.create_event_table("measured", event_time="ts", columns=columns)
    db.create_aggregate(
        "measured_g",
        source="measured",
        group_by=["g"],
        measures={
            "latency": kivi.quantiles("x"), "users": kivi.distinct("route"), "mean": kivi.avg("x"),
            "slowest": kivi.argmax("route", by="x"), "newest": kivi.last("ts"), "least": kivi.smallest("price", 2),
            "moments": kivi.largest("ts", 1), "routes": kivi.top("route", 1, most=2),
        },
        derived={"p90": "quantile(latency, 0.9)"},
    )  # fmt: skip
    db.append(
        "measured",
        [
            {"ts": i, "g": i % 2, "x": None if i == 0 else i, "price": Decimal(i), "route": f"/{i % 3}"}
            for i in range(30)
        ],
    )
    named = "quantile(latency, 0.5)"
    chosen = f"g,users,mean,slowest,newest,least,moments,routes,p90,{named}"
    frame = load("measured_g", columns=chosen)
    assert [field.simpleString() for field in frame.schema] == [
        "g:bigint", "users:bigint", "mean:double", "slowest:string", "newest:timestamp", "least:array<decimal(9,2)>",
        "moments:array<timestamp>", "routes:array<struct<value:string,count:bigint>>", "p90:double", f"{named}:double",
    ]  # fmt: skip
    with db.snapshot() as snap:
        expected = list(snap.scan("measured_g", columns=[*chosen.replace(f",{named}", "").split(","), named]))
    for row in expected:
        row["routes"] = [{"value": value, "count": count} for value, count in row["routes"].to_plain()]
        assert row["routes"][-1]["value"] is None
    assert frame.orderBy("g").toArrow().to_pylist() == expected
    assert load("measured_g").where("p90 > 27 and g >= 0").select("g").toArrow().to_pylist() == [{"g": 1}]
    assert load("measured_g", columns="latency").schema["latency"].dataType.simpleString() == "binary"
    feed = spark.readStream.format("kivi").options(endpoint=server.endpoint, table="measured_g", columns=chosen).load()
    query = feed.writeStream.format("memory").queryName("measured_feed").trigger(availableNow=True)
    query.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
    assert spark.table("measured_feed").orderBy("g").toArrow().to_pylist() == expected


def test_a_task_reads_a_batch_when_spark_asks_for_it(spark, server, db, table) -> None:
    """What a task does, in this process: of a large table it never holds more than a part."""
    numbers = pa.array(range(200_000))
    stamps = pa.array([1_750_000_000_000_000] * len(numbers), pa.int64())
    for _ in range(2):
        db.append(table, pa.table({"seq": numbers, "endpoint_id": numbers, "ts": stamps, "resp_time_us": numbers}))
    with Proxy(server.port) as proxy:
        options = Options(table=table, endpoint=proxy.endpoint)
        try:
            target = Target.of(options.client(), table)
            reader = Reader(options, target, spark_schema(target, ("resp_time_us",)))
            batches = reader.read(reader.partitions()[0])
            rows = next(batches).num_rows
            assert proxy.replied < 8 * 200_000
            assert rows + sum(batch.num_rows for batch in batches) == 400_000
            assert proxy.replied > 8 * 400_000
        finally:
            options.client().close()


def test_one_job_reads_one_snapshot_while_writers_go_on(load, save, source, db, table) -> None:
    """A frame is collected twice while the table grows in between."""
    source.add(1)
    save()
    frame = load(table)
    assert frame.count() == 200
    then = db.watermark()
    first = frame.agg({"seq": "sum"})
    assert first.collect()[0][0] == sum(row["seq"] for row in source.rows)
    db.append(table, [{"seq": 10_000, "endpoint_id": 1, "ts": 1_750_000_000_000_000, "resp_time_us": 1}])
    assert first.collect()[0][0] == sum(row["seq"] for row in source.rows)  # the plan keeps its snapshot
    assert load(table).count() == 201
    assert load(table, asOf=then).count() == 200


def test_a_table_that_is_not_there(load) -> None:
    with pytest.raises(Exception, match="NotFound"):
        load("nowhere")
    with pytest.raises(Exception, match="InvalidArgument"):
        load("", columns="")


def test_aggregates_are_not_written_to(spark, server, table) -> None:
    frame = spark.sql("select 1L as endpoint_id")
    with pytest.raises(Exception, match="is a table of kind aggregate"):
        frame.write.format("kivi").options(endpoint=server.endpoint, table=f"{table}_5m").mode("append").save()


@pytest.fixture
def totals(db) -> str:
    if "totals" in db.tables():
        db.drop("totals")
    columns = {"name": "string", "n": kivi.sum("int64"), "last": kivi.max("int64")}
    db.create_table("totals", key={"id": "int64"}, columns=columns)
    return "totals"


def test_rows_are_put_and_added_to_in_one_commit(spark, server, db, totals) -> None:
    with db.transaction() as tx:
        tx.put(totals, (0,), name="old")
        tx.delta(totals, (0,), n=1000)
    frame = spark.range(1_000).selectExpr("id % 10 as id", "1L as n", "id as last").repartition(4)
    write = frame.write.format("kivi").options(endpoint=server.endpoint, table=totals).mode("append")
    before = db.stats()["commits"]
    write.save()
    assert db.stats()["commits"] == before + 1
    names = spark.range(5).selectExpr("id", "concat('name ', id) as name")
    names.write.format("kivi").options(endpoint=server.endpoint, table=totals).mode("append").save()
    with db.snapshot() as snap:
        found = {row["id"]: row for row in snap.scan(totals)}
    assert len(found) == 10
    for i, row in found.items():
        assert row["n"] == 100 + (1000 if i == 0 else 0) and row["last"] == 990 + i
        assert row["name"] == (f"name {i}" if i < 5 else None)


def test_rows_are_deleted_by_a_column_of_the_data_frame(spark, server, db, totals) -> None:
    db.write(totals, [{"id": i, "name": "old", "n": 1} for i in range(10)])
    frame = spark.range(10).selectExpr("id", "'new' as name", "1L as n", "id % 2 = 0 as gone")
    write = frame.write.format("kivi").options(endpoint=server.endpoint, table=totals, deletes="gone").mode("append")
    write.save()
    with db.snapshot() as snap:
        assert [(row["id"], row["name"], row["n"]) for row in snap.scan(totals)] == [
            (i, "new", 2) for i in (1, 3, 5, 7, 9)
        ]
    for expression in ("1L as gone", "true as name", "true as other"):
        wrong = spark.range(1).selectExpr("id", expression)
        deletes = "name" if "name" in expression else "gone"
        with pytest.raises(Exception, match="delete"):
            wrong.write.format("kivi").options(endpoint=server.endpoint, table=totals, deletes=deletes).mode(
                "append"
            ).save()


@pytest.mark.parametrize(("format", "fails"), [("kivi_flaky", False), ("kivi_doomed", True)])
def test_rows_count_once_whatever_tasks_do(spark, server, db, totals, format, fails) -> None:
    frame = spark.range(100).selectExpr("id", "1L as n").repartition(3)
    write = frame.write.format(format).options(endpoint=server.endpoint, table=totals).mode("append")
    if fails:
        with pytest.raises(Exception, match="planted"):
            write.save()
    else:
        write.save()
    with db.snapshot() as snap:
        assert [row["n"] for row in snap.scan(totals)] == ([] if fails else [1] * 100)


def test_rows_that_do_not_fit(spark, server, totals) -> None:
    for frame, what in (
        (spark.sql("select 1L as n"), "lacks 'id', a key column"),
        (spark.sql("select 1L as id, 1L as other"), "has no column 'other'"),
        (spark.sql("select cast(null as bigint) as id, 1L as n"), "needs its key column 'id'"),
    ):
        with pytest.raises(Exception, match=what):
            frame.write.format("kivi").options(endpoint=server.endpoint, table=totals).mode("append").save()


def test_events_are_cut_by_their_commits_whatever_their_times_are(spark: Any, tmp_path: Path) -> None:
    """Small commits and one that is larger than many parts, times in no order, pending and in blocks: all parts
    together are the events, each once, also where filters are pushed down."""
    day_us = 86_400_000_000
    now_us = int(time.time() * 1e6)
    with ServerProcess(tmp_path / "data", "--set", "block_rows=700") as server, server.connect() as db:
        db.create_event_table("e", event_time="ts", columns={"id": "int64", "ts": "timestamp"}, retention="30d")
        sizes = [3, 1, 4_000, 250, 60, 900]
        first = 0
        for turn, size in enumerate(sizes):
            events = [{"id": i, "ts": now_us - (i * 7919 % 20) * day_us} for i in range(first, first + size)]
            db.append("e", events)
            first += size
            if turn == 3:
                db.consolidate()

        def read(**options: Any) -> Any:
            given = {"endpoint": server.endpoint, "table": "e", "partitionRows": 300, **options}
            return spark.read.format("kivi").options(**given).load()

        frame = read()
        assert sorted(row.id for row in frame.collect()) == list(range(first))
        parts = frame.rdd.getNumPartitions()
        assert sum(sizes) / 300 <= parts <= sum(sizes) / 300 + len(sizes)
        assert sorted(row.id for row in frame.filter("id % 2 = 0 and id > 100").collect()) == list(range(102, first, 2))
        moment = dt.datetime.fromtimestamp((now_us - 10 * day_us) / 1e6, dt.UTC)
        late = frame.filter(frame.ts >= moment).count()
        assert late == sum(i * 7919 % 20 <= 10 for i in range(first))
        before = db.watermark()
        db.append("e", [{"id": 10**6 + i, "ts": now_us} for i in range(500)])
        assert read(asOf=before).count() == first and read().count() == first + 500
