"""How long a job's snapshot lasts: what each task does, in this process."""

from __future__ import annotations

import time

import pytest

from kivi.errors import SnapshotTooOld
from kivi.spark.options import Options
from kivi.spark.reading import Reader
from kivi.spark.schemas import Target, spark_schema
from kivi.spark.source import KiviDataSource
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(120)]


@pytest.fixture
def rows(db) -> str:
    name = f"rows_{time.monotonic_ns()}"
    db.create_table(name, key={"id": "int64"}, columns={"v": "int64"})
    with db.transaction() as tx:
        for i in range(10):
            tx.put(name, (i,), v=1)
    return name


def planned(server, table: str, lease_ttl_s: float):
    options = Options(table=table, endpoint=server.endpoint, lease_ttl_s=lease_ttl_s)
    target = Target.of(options.client(), table)
    reader = Reader(options, target, spark_schema(target))
    return reader, reader.partitions()[0]


def change(db, table: str) -> None:
    with db.transaction() as tx:
        for i in range(10):
            tx.put(table, (i,), v=2)
    db.consolidate()


def values(reader, part) -> set[int]:
    return {v for batch in reader.read(part) for v in batch.column("v").to_pylist()}


def test_every_task_prolongs_it_from_its_end(server, db, rows) -> None:
    reader, part = planned(server, rows, 4.0)
    change(db, rows)
    for _ in range(3):
        time.sleep(2.0)
        assert values(reader, part) == {1}
    slow = reader.read(part)
    first = next(slow)
    time.sleep(5.0)  # a task that takes its time
    assert {v for batch in (first, *slow) for v in batch.column("v").to_pylist()} == {1}
    time.sleep(1.0)
    assert values(reader, part) == {1}


def test_a_task_that_comes_too_late_says_what_to_do(server, db, rows) -> None:
    reader, part = planned(server, rows, 0.5)
    change(db, rows)
    time.sleep(1.5)
    db.consolidate()
    with pytest.raises(SnapshotTooOld, match="longer option leaseTtl"):
        values(reader, part)


def test_event_tables_answer_later_too(server, db, table) -> None:
    event = {"seq": 1, "endpoint_id": 1, "ts": 1_750_000_000_000_000, "resp_time_us": 1}
    db.append(table, [event])
    reader, part = planned(server, table, 0.5)
    db.append(table, [event])
    db.consolidate()
    time.sleep(1.5)
    assert sum(batch.num_rows for batch in reader.read(part)) == 1
    with db.transaction() as tx:
        tx.overwrite(table)

    def let_go() -> bool:
        assert sum(batch.num_rows for batch in reader.read(part)) == 1
        db.consolidate()
        return False

    with pytest.raises(SnapshotTooOld, match="overwritten"):
        wait_until(let_go, pause_s=0.1)


def test_a_job_of_an_older_snapshot_has_the_columns_of_then(server, db) -> None:
    table = f"grown_{time.monotonic_ns()}"
    db.create_event_table(table, event_time="ts", columns={"ts": "timestamp", "v": "int64"})
    db.append(table, [{"ts": 1, "v": 5}])
    then = db.watermark()
    db.alter_table(table, {"w": "int64"})
    db.append(table, [{"ts": 2, "v": 5, "w": 1}])
    for as_of, columns, count in (({"asOf": str(then)}, ["ts", "v"], 1), ({}, ["ts", "v", "w"], 2)):
        source = KiviDataSource({"table": table, "endpoint": server.endpoint, **as_of})
        assert source.schema().fieldNames() == columns
        reader = source.reader(source.schema())
        read = [batch for part in reader.partitions() for batch in reader.read(part)]
        assert sum(batch.num_rows for batch in read) == count and read[0].schema.names == columns


def test_history_answers_later_too(server, db) -> None:
    name = f"history_{time.monotonic_ns()}"
    db.create_table(name, key={"id": "int64"}, columns={"v": "int64"}, history="1h")
    with db.transaction() as tx:
        tx.put(name, (0,), v=1)
    reader, part = planned(server, name, 0.5)
    change(db, name)
    time.sleep(1.5)
    db.consolidate()
    assert values(reader, part) == {1}
    with db.snapshot() as snap:
        assert snap.get(name, (0,))["v"] == 2
