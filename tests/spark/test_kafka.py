"""A stream from Kafka, as far as it goes without Kafka: records of its source's shape, from files, into the sink.

``SCHEMA`` is what ``format("kafka")`` gives (Spark's Structured Streaming + Kafka Integration Guide). The connector's
jar does not come with PySpark, so the source itself is not run here.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kivi.spark
from kivi.errors import SchemaError
from tests.spark.helpers import Input, appear, check, committed

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]
SCHEMA = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
_KINDS = [pa.binary(), pa.binary(), pa.string(), pa.int32(), pa.int64(), pa.timestamp("us", "UTC"), pa.int32()]
_NAMES = [column.split()[0] for column in SCHEMA.split(", ")]


class Topic:
    """A folder with files of records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offset = 0
        self._began_s = time.time() - 3_600
        folder.mkdir()

    def put(self, values: list[bytes | None]) -> None:
        now = dt.datetime.now(dt.UTC)
        rows = [(None, value, "invocations", 0, self.offset + i, now, 0) for i, value in enumerate(values)]
        columns = [pa.array(list(column), kind) for column, kind in zip(zip(*rows, strict=True), _KINDS, strict=True)]
        path = self.folder / f"{self.offset:08}.parquet"
        appear(pa.table(columns, _NAMES), path, self._began_s + self.offset)
        self.offset += len(values)


def value(row: dict[str, int], **more: Any) -> bytes:
    moment = dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(microseconds=row["ts"])
    return json.dumps({**row, "ts": moment.isoformat(), **more}).encode()


@pytest.fixture
def topic(tmp_path) -> Topic:
    return Topic(tmp_path / "topic")


@pytest.fixture
def consume(spark, server, table, topic, tmp_path):
    """As the guide does it, with another source."""

    def consume() -> None:
        place = {"endpoint": server.endpoint, "table": table}
        columns = spark.read.format("kivi").options(**place).load().schema
        records = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(topic.folder))
        sink = kivi.spark.from_kafka(records, columns).writeStream.format("kivi").options(**place)
        sink = sink.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        sink.start().awaitTermination()

    return consume


def test_records_become_events_to_the_microsecond(consume, topic, source: Input, db, table, tmp_path) -> None:
    source.add(2)
    topic.put([value(row) for row in source.rows[:150]])
    topic.put([None, *(value(row, trace_id="žluťoučký") for row in source.rows[150:]), None])
    consume()
    check(db, table, source.rows)
    with db.snapshot() as snapshot:
        found = {row["seq"]: row["ts"] for row in snapshot.scan(table)}
    epoch = dt.datetime.fromtimestamp(0, dt.UTC)
    assert {seq: (ts - epoch) // dt.timedelta(microseconds=1) for seq, ts in found.items()} == {
        row["seq"]: row["ts"] for row in source.rows
    }
    assert committed(tmp_path / "checkpoint") == [0, 1]


@pytest.mark.parametrize(
    "bad",
    [b'{"seq": 1, "ts": ', b'{"seq": "one", "ts": "2026-07-01T12:00:00Z"}', b"\xff\xfe", b'{"seq": 1}'],
    ids=["cut", "type", "bytes", "no time"],
)
def test_a_value_that_is_no_event_stops_the_query_before_its_batch(
    consume, topic, source: Input, db, table, tmp_path, bad
) -> None:
    from pyspark.errors import StreamingQueryException

    source.add(1)
    topic.put([value(row) for row in source.rows])
    topic.put([value(source.rows[0]), bad])
    with pytest.raises(StreamingQueryException):
        consume()
    check(db, table, source.rows)
    assert committed(tmp_path / "checkpoint") == [0]


def test_what_is_no_record_is_said(spark) -> None:
    with pytest.raises(SchemaError, match="no binary column 'value'"):
        kivi.spark.from_kafka(spark.sql("select 'text' as value"), "seq long")


def test_the_guide_names_the_connector_of_this_spark(spark) -> None:
    scala = spark.sparkContext._jvm.scala.util.Properties.versionNumberString()
    wanted = f"org.apache.spark:spark-sql-kafka-0-10_{scala.rpartition('.')[0]}:{spark.version}"
    assert re.findall(r"org\.apache\.spark:spark-sql-kafka[\w.:-]+\w", (ROOT / "docs/howto/spark.md").read_text()) == [
        wanted
    ]
