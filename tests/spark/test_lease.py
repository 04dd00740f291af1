"""How long a job's snapshot lasts: what each task does, in this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from kivi.errors import SnapshotTooOld
from kivi.spark.options import Options
from kivi.spark.reading import Reader
from kivi.spark.schemas import Target, spark_schema
from kivi.spark.source import KiviDataSource
from kivi.spark.tail import EventTail
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.story, pytest.mark.timeout(120)]


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
    began = time.monotonic()
    assert values(*planned(server, rows, 60.0)) == {1}
    ttl_s = max(4.0, 20 * (time.monotonic() - began))  # which leaves a busy machine its time
    reader, part = planned(server, rows, ttl_s)
    change(db, rows)
    for _ in range(3):
        time.sleep(ttl_s / 2)
        assert values(reader, part) == {1}
    slow = reader.read(part)
    first = next(slow)
    time.sleep(1.25 * ttl_s)  # a task that takes its time
    assert {v for batch in (first, *slow) for v in batch.column("v").to_pylist()} == {1}
    time.sleep(ttl_s / 4)
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


ROWS = 700


@pytest.fixture
def forgetful(tmp_path) -> Iterator[Any]:
    """A server of this test's own, on which nobody's snapshot keeps what retention would drop: its client, and what
    appends a block of events of a minute, each with a number of its own."""
    columns = {"n": "int64", "ts": "timestamp"}
    with ServerProcess(tmp_path / "data", "--set", f"block_rows={ROWS}") as server, server.connect() as db:
        db.create_event_table("calls", event_time="ts", columns=columns, retention="10m")
        numbers = itertools.count()

        def append(minute: int) -> int:
            at = 1_750_000_000_000_000 + minute * 60_000_000
            cts = db.append("calls", [{"n": next(numbers), "ts": at} for _ in range(ROWS)])
            db.consolidate()
            return cts

        yield server, db, append


def commits_of(db) -> list[int]:
    return [cts for cts, _ in db.tail_points("calls", 0, 1, most=100).points]


def wait_until_dropped(db, cts: int) -> None:
    wait_until(lambda: db.consolidate() or cts not in commits_of(db))


def wait_until_hidden(db, left: int) -> None:
    """New snapshots see so many events."""

    def seen() -> int:
        db.consolidate()
        with db.snapshot() as snapshot:
            return sum(batch.num_rows for batch in snapshot.scan_batches("calls"))

    wait_until(lambda: seen() == left)


def reader_of(server, **options):
    given = Options(table="calls", endpoint=server.endpoint, **options)
    target = Target.of(given.client(), "calls")
    return Reader(given, target, spark_schema(target))


def numbers_of(reader, parts) -> list[int]:
    return sorted(n for part in parts for batch in reader.read(part) for n in batch.column("n").to_pylist())


@pytest.mark.parametrize("rows", [300, ROWS, 5_000])
def test_what_was_dropped_since_is_missed_aloud_though_later_events_had_gone_before(forgetful, rows: int) -> None:
    server, db, append = forgetful
    first, late = append(19), append(10)
    append(22)
    wait_until_dropped(db, late)
    reader = reader_of(server, partition_rows=rows, lease_ttl_s=0.5)
    parts = reader.partitions()
    then = db.watermark()
    append(30)
    time.sleep(1.0)
    wait_until_dropped(db, first)
    with pytest.raises(SnapshotTooOld):
        numbers_of(reader, parts)
    past = reader_of(server, partition_rows=rows, as_of=then)
    with pytest.raises(SnapshotTooOld):
        numbers_of(past, past.partitions())


@pytest.mark.parametrize("rows", [300, ROWS, 5_000])
def test_what_a_job_does_not_see_may_be_dropped_while_it_reads(forgetful, rows: int) -> None:
    server, db, append = forgetful
    append(19)
    late = append(10)
    with db.snapshot() as before:
        assert before.ts
        append(22)
        wait_until_hidden(db, 2 * ROWS)
        reader = reader_of(server, partition_rows=rows, lease_ttl_s=60.0)
        parts = reader.partitions()
        assert late in commits_of(db)
    append(30)
    wait_until_dropped(db, late)
    assert numbers_of(reader, parts) == [*range(ROWS), *range(2 * ROWS, 3 * ROWS)]


def test_a_commit_of_which_a_part_is_dropped_between_two_tasks_is_not_cut_in_silence(forgetful) -> None:
    """Of a batch of a stream that begins with what is there, and does not see that part."""
    server, db, _ = forgetful
    minutes = [0] * ROWS + [9] * ROWS
    events = [{"n": n, "ts": 1_750_000_000_000_000 + at * 60_000_000} for n, at in enumerate(minutes)]
    large = db.append("calls", events)
    db.consolidate()
    with db.snapshot() as before:
        assert before.ts
        db.append("calls", [{"n": 2 * ROWS, "ts": 1_750_000_000_000_000 + 12 * 60_000_000}])
        wait_until_hidden(db, ROWS + 1)
        given = Options(table="calls", endpoint=server.endpoint, partition_rows=500, timeout_s=2.0)
        target = Target.of(given.client(), "calls")
        stream = EventTail(given, target, spark_schema(target))
        begin = stream.initialOffset()
        end = stream.latestOffset(begin, ReadAllAvailable())
        parts = stream.partitions(begin, end)
        assert [part.skip for part in parts[:3]] == [0, 500, 1000]  # type: ignore[attr-defined]
        found = numbers_of(stream, parts[:1])
    wait_until(lambda: db.consolidate() or db.tail_points("calls", 0, 1, most=1).points[0] == (large, ROWS))
    with pytest.raises(SnapshotTooOld, match="were dropped since"):
        found += numbers_of(stream, parts[1:])
    assert numbers_of(stream, stream.partitions(begin, end)) == [*range(ROWS, 2 * ROWS + 1)]
