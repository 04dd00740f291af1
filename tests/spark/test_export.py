"""What ``kivi export`` writes, read by Spark without kivi: the rows of the snapshot, with their types.

Spark's own reader of Delta tables is in no wheel, so the log is read by ``deltalake``, and Spark reads the files that
it names.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kivi
from kivi.cli.export import export

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

deltalake = pytest.importorskip("deltalake")
pytestmark = pytest.mark.spark
T0 = dt.datetime(2026, 2, 28, 22, tzinfo=dt.UTC)
COLUMNS = {"ts": "timestamp", "host": "string", "x": "int64", "price": "decimal(10,2)", "f": "float64", "raw": "bytes"}
TYPES = ["timestamp", "string", "bigint", "decimal(10,2)", "double", "binary"]


def exported(db: Any, target: Path, form: str, by: str) -> list[dict[str, Any]]:
    """The rows of the snapshot."""
    with db.snapshot() as snap:
        export(snap, "calls", db.describe("calls"), str(target), format_=form, by=by)
        rows: list[dict[str, Any]] = snap.to_arrow("calls").to_pylist()
        return rows


@pytest.mark.parametrize("by", ["day", "none"])
@pytest.mark.parametrize("form", ["parquet", "delta"])
def test_spark_reads_what_the_snapshot_sees(spark: SparkSession, tmp_path: Path, form: str, by: str) -> None:
    target = tmp_path / "out"
    with kivi.open() as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        db.append(
            "calls",
            [
                {
                    "ts": T0 + dt.timedelta(hours=i % 30, microseconds=i),
                    "host": None if i % 7 == 0 else f"h{i % 3}",
                    "x": i - 2**40,
                    "price": Decimal(i) / 4,
                    "f": i / 3,
                    "raw": bytes([i]),
                }
                for i in range(90)
            ],
        )
        wanted = exported(db, target, form, by)
    files = deltalake.DeltaTable(str(target)).file_uris() if form == "delta" else [str(target)]
    frame = spark.read.option("basePath", str(target)).parquet(*files)
    days = {"day": "date"} if by == "day" else {}
    assert dict(frame.dtypes) == dict(zip(COLUMNS, TYPES, strict=True)) | days
    epoch = "unix_micros(ts) as ts"  # a moment, whatever the session's time zone
    found = [row.asDict() for row in frame.selectExpr(epoch, *list(COLUMNS)[1:]).collect()]
    for row in wanted:
        row["ts"] = (row["ts"] - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)
    assert sorted(found, key=lambda row: row["x"]) == sorted(wanted, key=lambda row: row["x"])
    if by == "day":
        assert frame.where(f"day = date '{T0.date()}'").count() == sum(
            row["ts"] < 1_772_323_200_000_000 for row in wanted
        )
