"""``option("lateEvents", ...)``: events below the retention floor fail a batch, or are dropped and counted once."""

from __future__ import annotations

import time

import pytest

import kivi
from tests.spark.helpers import COLUMNS, forget_last
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


@pytest.fixture
def kept(db, source) -> tuple[str, int]:
    """A table whose floor lies within the input's hour, and where."""
    name = f"kept_{time.monotonic_ns()}"
    db.create_event_table(name, event_time="ts", retention="20m", columns=COLUMNS)
    db.create_aggregate(f"{name}_n", source=name, group_by=["endpoint_id"], measures={"n": kivi.count()})
    newest = {"seq": -1, "endpoint_id": 0, "ts": 1_750_000_000_000_000 + 3_600_000_000, "resp_time_us": 1}
    db.append(name, [newest, {**newest, "ts": 1_750_000_000_000_000}])
    db.consolidate()
    floor = wait_until(
        lambda: db.describe(name)["statistics"].get("complete_since_us"), 60, reason="the floor does not move"
    )
    source.add(3)
    return name, floor


def check(db, name: str, floor: int, rows) -> None:
    fit = [row for row in rows if row["ts"] >= floor]
    assert 0 < len(fit) < len(rows)
    with db.snapshot() as snap:
        assert sorted(row["seq"] for row in snap.scan(name)) == [-1, *sorted(row["seq"] for row in fit)]
        # the aggregate remembers the first late event, which was there before the floor
        assert sum(row["n"] for row in snap.scan(f"{name}_n")) == len(fit) + 2
    assert db.describe(name)["statistics"]["late_dropped"] == len(rows) - len(fit)


def test_they_fail_the_batch_or_are_dropped_once(run, db, source, kept, tmp_path) -> None:
    name, floor = kept
    with pytest.raises(Exception, match="lie before the retention floor"):
        run(table=name)
    assert "late_dropped" not in db.describe(name)["statistics"]
    run(table=name, lateEvents="drop")  # the same checkpoint: the batch that failed is tried again
    check(db, name, floor, source.rows)
    forget_last(tmp_path / "checkpoint")
    run(table=name, lateEvents="drop", partitions=3)
    check(db, name, floor, source.rows)


def test_a_batch_job_drops_them_too(spark, server, db, source, kept) -> None:
    name, floor = kept
    frame = spark.read.parquet(str(source.folder)).repartition(2)
    write = frame.write.format("kivi").options(endpoint=server.endpoint, table=name).mode("append")
    with pytest.raises(Exception, match="lie before the retention floor"):
        write.save()
    write.option("lateEvents", "drop").save()
    check(db, name, floor, source.rows)
    with pytest.raises(Exception, match='lateEvents is "fail" or "drop"'):
        write.option("lateEvents", "ignore").save()
