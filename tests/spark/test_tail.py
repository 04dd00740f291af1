"""Streams that read: each event once and each change, whatever fails on the way.

The oracle of an event table is the list of what was appended, with its commit timestamps; that of an aggregate is the
same list, added up to the snapshot that a batch names.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

import kivi
from kivi.spark.offsets import StreamDataLoss
from kivi.spark.options import Options, _clients
from kivi.spark.schemas import Target, spark_schema
from kivi.spark.tail import EventTail, stream_schema
from tests.seeds import seeds
from tests.serverproc import ServerProcess
from tests.spark import tail_job
from tests.spark.helpers import COLUMNS, committed, create, forget_last, wait_for_job
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]
SLOT_US = 300_000_000


class Written:
    """Appends to a table, and knows what: (commit timestamp, event) in the order of the commits."""

    def __init__(self, db: Any, table: str) -> None:
        self.db, self.table = db, table
        self.events: list[tuple[int, dict[str, int]]] = []
        self._random = random.Random(table)
        self._seq = 0

    def append(self, *sizes: int) -> list[int]:
        commits = []
        for size in sizes:
            events = []
            for _ in range(size):
                self._seq += 1
                ts = 1_750_000_000_000_000 + self._random.randrange(4 * SLOT_US)
                endpoint, us = self._random.randrange(20), self._random.randrange(1 << 40)
                events.append({"seq": self._seq, "endpoint_id": endpoint, "ts": ts, "resp_time_us": us})
            commits.append(self.db.append(self.table, events))
            self.events += [(commits[-1], event) for event in events]
        return commits

    def seqs(self, after: int = 0) -> list[int]:
        return [event["seq"] for at, event in self.events if at > after]

    def totals(self, upto: int) -> dict[tuple[int, int], tuple[int, int, int]]:
        """The aggregate at a snapshot: (endpoint, slot in seconds) -> (total, invocations, slowest)."""
        found: dict[tuple[int, int], list[int]] = {}
        for at, event in self.events:
            if at <= upto:
                key = event["endpoint_id"], event["ts"] // SLOT_US * 300
                found.setdefault(key, []).append(event["resp_time_us"])
        return {key: (sum(times), len(times), max(times)) for key, times in found.items()}


@pytest.fixture
def written(db: Any, table: str) -> Written:
    return Written(db, table)


class Stream:
    """A query whose batches are kept: number -> rows. A batch that is run again is kept as the last of its number."""

    def __init__(self, spark: Any, endpoint: str, table: str, checkpoint: Path) -> None:
        self._spark, self._endpoint, self._table, self.checkpoint = spark, endpoint, table, checkpoint
        self.batches: dict[int, list[Any]] = {}
        self.parts: dict[int, int] = {}
        self.every: list[tuple[int, list[Any]]] = []

    def start(self, *, available: bool = True, **options: Any) -> Any:
        frame = self._spark.readStream.format("kivi")
        frame = frame.options(**{"endpoint": self._endpoint, "table": self._table, **options}).load()

        def keep(batch: Any, number: int) -> None:
            self.parts[number] = batch.rdd.getNumPartitions()
            self.batches[number] = [row.asDict() for row in batch.collect()]
            self.every.append((number, self.batches[number]))

        sink = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(self.checkpoint))
        trigger = {"availableNow": True} if available else {"processingTime": "50 milliseconds"}
        return sink.trigger(**trigger).start()

    def run(self, **options: Any) -> Any:
        query = self.start(**options)
        query.awaitTermination()
        return query

    @property
    def rows(self) -> list[Any]:
        return [row for number in sorted(self.batches) for row in self.batches[number]]

    @property
    def seqs(self) -> list[int]:
        return [row["seq"] for row in self.rows]

    def offsets(self) -> list[dict[str, Any]]:
        """The end of each batch, from Spark's own log."""
        folder = self.checkpoint / "offsets"
        logs = sorted((f for f in folder.iterdir() if f.name.isdecimal()), key=lambda f: int(f.name))
        return [json.loads(log.read_text().splitlines()[2]) for log in logs]


@pytest.fixture
def stream(spark: Any, server: ServerProcess, table: str, tmp_path: Path) -> Stream:
    return Stream(spark, server.endpoint, table, tmp_path / "checkpoint")


@contextlib.contextmanager
def refused(match: str) -> Iterator[None]:
    from pyspark.errors import StreamingQueryException

    with pytest.raises(StreamingQueryException, match=match):
        yield


def wait_for(condition: Callable[[], object], query: Any = None, seconds: float = 60) -> None:
    def came() -> bool:
        held = bool(condition())
        assert held or query is None or query.isActive, query.exception()
        return held

    wait_until(came, seconds)


# -- event tables -----------------------------------------------------------------------------------------


def test_a_query_reads_what_is_there_and_then_what_comes(stream: Stream, written: Written, db: Any) -> None:
    commits = written.append(30, 50)
    db.consolidate()
    commits += written.append(20)
    query = stream.run(commitTs="true")
    assert stream.seqs == written.seqs()
    assert [row["_commit_ts"] for row in stream.rows] == [at for at, _ in written.events]
    (row, *_), (_, event) = stream.rows, written.events[0]
    assert row["ts"].replace(tzinfo=dt.UTC) == dt.datetime.fromtimestamp(event["ts"] / 1e6, dt.UTC)
    assert query.lastProgress["numInputRows"] in (100, 0)
    stream.run(commitTs="true")
    assert len(stream.batches) == 1  # nothing came, so no batch ran
    commits += written.append(5, 5)
    stream.run(commitTs="true")
    assert [len(rows) for rows in stream.batches.values()] == [100, 10]
    assert stream.seqs == written.seqs()
    assert [offset["ts"] for offset in stream.offsets()][-1] == commits[-1]


def test_the_rate_is_limited_at_commits(stream: Stream, written: Written, db: Any) -> None:
    written.append(10, 10, 10, 75, 3, 3, 20, 14)
    db.consolidate()
    written.append(1, 1, 1)
    stream.run(maxRowsPerTrigger=25)
    assert [len(rows) for rows in stream.batches.values()] == [20, 10, 75, 6, 20, 17]
    assert stream.seqs == written.seqs()
    written.append(24, 2)
    stream.run(maxRowsPerTrigger=25)
    assert [len(rows) for rows in stream.batches.values()][6:] == [24, 2]
    assert stream.seqs == written.seqs()


def test_a_large_batch_is_read_by_many_tasks_and_a_large_commit_too(stream: Stream, written: Written, db: Any) -> None:
    written.append(400, 90, 5, 10, 700)
    db.consolidate()
    written.append(250)
    stream.run(partitionRows=100)
    assert stream.parts == {0: 4 + 1 + 1 + 7 + 3}
    assert stream.seqs == written.seqs()  # the order of the tasks is that of the commits


def test_a_batch_that_is_run_again_has_the_same_rows(stream: Stream, written: Written, db: Any) -> None:
    written.append(40, 40, 40)
    stream.run(maxRowsPerTrigger=50, commitTs="true")
    before = dict(stream.batches)
    assert forget_last(stream.checkpoint) == 2
    written.append(10)
    db.consolidate()
    stream.run(maxRowsPerTrigger=1000, commitTs="true", partitionRows=7)
    assert [number for number, _ in stream.every] == [0, 1, 2, 2, 3]
    assert {n: stream.batches[n] for n in before} == before
    assert stream.seqs == written.seqs()


def test_where_a_query_begins(spark: Any, server: ServerProcess, written: Written, table: str, tmp_path: Path) -> None:
    def begun(name: str, **options: Any) -> Stream:
        stream = Stream(spark, server.endpoint, table, tmp_path / name)
        stream.run(**options)
        return stream

    commits = written.append(5, 5, 5)
    moment = dt.datetime.now(dt.UTC)
    time.sleep(0.01)
    written.append(5)
    assert begun("ts", startingTimestamp=commits[1]).seqs == written.seqs(commits[1])
    assert begun("offset", startingOffsets=commits[1]).seqs == written.seqs(commits[1])
    assert begun("moment", startingTimestamp=moment.isoformat()).seqs == written.seqs(commits[2])
    latest = begun("latest", startingOffsets="latest")
    assert latest.seqs == []
    last = written.append(7)[0]
    latest.run(startingOffsets="latest")
    assert latest.seqs == written.seqs(last - 1)
    columns = begun("columns", columns="resp_time_us, seq", startingOffsets=last - 1, commitTs="true")
    assert [list(row) for row in columns.rows] == [["resp_time_us", "seq", "_commit_ts"]] * 7


@pytest.mark.story
def test_available_now_ends_although_events_keep_coming(stream: Stream, written: Written) -> None:
    written.append(*[10] * 20)
    stopped = threading.Event()

    def keep_writing() -> None:
        # Slowly: what came before the query began is read in batches that take a second each where a machine is busy.
        while not stopped.wait(0.05):
            written.append(10)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        stream.run(maxRowsPerTrigger=50)
    finally:
        stopped.set()
        writer.join()
    assert 200 <= len(stream.seqs) < len(written.events)
    assert stream.seqs == written.seqs()[: len(stream.seqs)]
    stream.run()
    assert stream.seqs == written.seqs()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"table": "plain_rows"}, "InvalidArgument: .* is a row table, .* event tables and aggregates can be streamed"),
        ({"maxRowsPerTrigger": "0"}, "InvalidArgument: option maxRowsPerTrigger"),
        ({"startingOffsets": "newest"}, "InvalidArgument: option startingOffsets is earliest, latest or"),
        ({"startingOffsets": "10000000"}, "InvalidArgument: the stream would begin after commit 10000000"),
        ({"startingOffsets": "1", "startingTimestamp": "1"}, "InvalidArgument: give one of the options"),
        ({"failOnDataLoss": "maybe"}, 'InvalidArgument: option failOnDataLoss is "true" or "false"'),
        ({"asOf": "3"}, "InvalidArgument: option asOf is for batch reads"),
    ],
)
def test_what_cannot_be_streamed_is_refused(stream: Stream, db: Any, options: dict[str, str], match: str) -> None:
    if "plain_rows" not in db.tables():
        db.create_table("plain_rows", key={"id": "int64"}, columns={"n": "int64"})
    with pytest.raises(Exception, match=match):
        stream.run(**options)
    assert stream.batches == {}


def test_the_commit_timestamp_is_no_column_of_a_batch_read(spark: Any, server: ServerProcess, table: str) -> None:
    frame = spark.read.format("kivi").options(endpoint=server.endpoint, table=table, commitTs="true")
    with pytest.raises(Exception, match="InvalidArgument: option commitTs is for streams"):
        frame.load().collect()


def test_progress_says_how_many_rows_came_and_where_the_table_is(stream: Stream, written: Written) -> None:
    commits = written.append(30, 30, 30)
    query = stream.run(maxRowsPerTrigger=30)
    progress = [p for p in query.recentProgress if p["numInputRows"]]
    assert [p["numInputRows"] for p in progress] == [30, 30, 30]
    (source,) = progress[0]["sources"]
    assert json.loads(source["endOffset"])["ts"] == commits[0]
    assert json.loads(source["latestOffset"])["ts"] == commits[2]


# -- what fails -------------------------------------------------------------------------------------------


def test_the_server_is_killed_while_the_query_runs(spark: Any, tmp_path: Path) -> None:
    """Three times, under writers and consolidation. The query waits for it, and goes on."""
    with ServerProcess(tmp_path / "data") as server:
        with kivi.connect(server.endpoint, timeout=60) as db:
            create(db, "calls")
            written = Written(db, "calls")
            stream = Stream(spark, server.endpoint, "calls", tmp_path / "checkpoint")
            written.append(500)
            query = stream.start(available=False, maxRowsPerTrigger=200, partitionRows=50)
            for turn in range(3):
                for _ in range(5):
                    written.append(10, 90, 1)
                seen = len(stream.every)
                wait_for(lambda: len(stream.every) > seen, query)  # noqa: B023
                server.restart()
                if turn == 1:
                    db.consolidate()
            written.append(5)
            wait_for(lambda: len(stream.rows) >= len(written.events), query)
            query.stop()
        assert stream.seqs == written.seqs()


def test_the_server_is_gone_for_too_long_and_the_query_starts_again(spark: Any, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        with kivi.connect(server.endpoint, timeout=60) as db:
            create(db, "calls")
            written = Written(db, "calls")
            stream = Stream(spark, server.endpoint, "calls", tmp_path / "checkpoint")
            written.append(100, 100)
            query = stream.start(available=False, timeout=2)
            wait_for(lambda: stream.batches, query)
            server.kill()
            with refused("no answer from|Unavailable"):
                query.awaitTermination()
            server.start()
            written.append(100)
            stream.run()
        assert stream.seqs == written.seqs()


@pytest.mark.story
@pytest.mark.timeout(600)  # up to three sessions begin, each of which takes a busy machine a minute
@pytest.mark.parametrize("again", seeds(0, night=2))
def test_the_driver_is_killed(
    spark: Any, server: ServerProcess, db: Any, tmp_path: Path, table: str, again: int
) -> None:
    """From one table into another; the last driver goes on to the end. Events go by their number, each once."""
    target = f"{table}_copy"
    db.create_event_table(target, event_time="ts", columns=COLUMNS)
    written = Written(db, table)
    written.append(*[60] * (6 + 6 * again))
    checkpoint = tmp_path / "checkpoint"
    arguments = [server.endpoint, table, target, str(checkpoint)]
    for goal, end in ((2, 5), (6, 10))[: 1 + again]:  # it is killed between them, however late this process sees it
        paused = {"pause": f"before {end}", "note": str(tmp_path / "note")}
        job = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.tail_job", json.dumps([str(tmp_path), arguments, paused])],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        wait_for_job(job, lambda: len(committed(checkpoint)) >= goal)  # noqa: B023
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
        assert goal <= len(committed(checkpoint)) <= end
        written.append(7)
    tail_job.copy(spark, *arguments)
    with db.snapshot() as snapshot:
        found = Counter(snapshot.to_arrow(target, columns=["seq"]).column("seq").to_pylist())
    assert found == Counter(written.seqs())


def test_a_table_that_was_made_again_is_not_read_on_in_silence(stream: Stream, db: Any, table: str) -> None:
    written = Written(db, table)
    written.append(10)
    stream.run()
    db.drop(f"{table}_5m")
    db.drop(table)
    with pytest.raises(Exception, match="NotFound"):
        stream.run()
    create(db, table)
    again = Written(db, table)
    again.append(3, 4)
    for _ in range(2):
        with refused(f"StreamDataLoss: table '{table}' was dropped and created again.*new checkpoint.*failOnDataLoss"):
            stream.run()
    assert len(stream.rows) == 10
    stream.run(failOnDataLoss="false")
    assert stream.seqs == written.seqs() + again.seqs()
    again.append(2)
    stream.run()
    assert stream.seqs == written.seqs() + again.seqs()


@pytest.mark.story
def test_a_store_that_was_restored_from_a_backup_is_noticed(spark: Any, tmp_path: Path) -> None:
    """Be it that the offset is past it, or that other commits have taken the place of those that were read."""
    with ServerProcess(tmp_path / "data") as server:
        with server.connect() as db:
            create(db, "calls")
            written = Written(db, "calls")
            written.append(10)
            db.checkpoint(str(tmp_path / "backup"))
            written.append(*[10] * 20)
            stream = Stream(spark, server.endpoint, "calls", tmp_path / "checkpoint")
            stream.run()
        server.stop()
        assert stream.seqs == written.seqs()
        server.data = str(tmp_path / "backup")
        server.start()
        with server.connect() as db:
            with refused("StreamDataLoss: .* the store only goes to .* restored from an older backup"):
                stream.run()
            restored = Written(db, "calls")
            restored.append(1)
            stream.run(failOnDataLoss="false")
            after = restored.append(5, 6)
            stream.run()
            assert stream.seqs == written.seqs() + restored.seqs(after[0] - 1)
            other = Stream(spark, server.endpoint, "calls", tmp_path / "other")
            other.run(startingOffsets="latest")
        server.stop()
        server.data = str(tmp_path / "data")
        server.start()
        with refused("StreamDataLoss: the store with 'calls' is not the one"):
            stream.run()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[ServerProcess, Any]]:
    """A server of this test's own: nobody's snapshot keeps there what retention would drop."""
    with ServerProcess(tmp_path / "data") as server, kivi.connect(server.endpoint, timeout=30) as db:
        yield server, db


@pytest.mark.story
def test_events_that_retention_dropped_before_they_were_read_are_missed_aloud(
    spark: Any, alone: tuple[ServerProcess, Any], tmp_path: Path
) -> None:
    (server, db), table = alone, "calls"
    stream = Stream(spark, server.endpoint, table, tmp_path / "checkpoint")
    db.create_event_table(table, event_time="ts", retention="10m", columns=COLUMNS)

    def append(first: int, count: int, minute: int) -> int:
        at = 1_750_000_000_000_000 + minute * 60_000_000
        events = [{"seq": first + i, "endpoint_id": 1, "ts": at, "resp_time_us": 1} for i in range(count)]
        return db.append(table, events)

    append(0, 10, 0)
    stream.run()
    append(10, 5_000, 1)
    db.consolidate()
    append(6_000, 10, 100)

    def dropped() -> int:
        db.consolidate()
        return db.tail_points(table, most=0).kept_since

    wait_for(dropped)
    with refused(f"StreamDataLoss: retention has dropped events of '{table}'"):
        stream.run()
    assert stream.seqs == list(range(10))
    stream.run(failOnDataLoss="false")
    assert stream.seqs[-10:] == list(range(6_000, 6_010))
    append(7_000, 3, 101)
    stream.run()
    assert stream.seqs[-3:] == [7_000, 7_001, 7_002]
    other = Stream(stream._spark, stream._endpoint, table, stream.checkpoint.with_name("other"))
    other.run()  # what is forgotten by now is no loss to one who begins now
    assert other.seqs == [*range(6_000, 6_010), 7_000, 7_001, 7_002]


def test_what_a_query_began_with_and_lost_before_it_was_read(alone: tuple[ServerProcess, Any]) -> None:
    """All that is left of the first snapshot is dropped, so that nothing is there that could be missing something."""
    (server, db), table = alone, "calls"
    db.create_event_table(table, event_time="ts", retention="10m", columns={"seq": "int64", "ts": "timestamp"})

    def append(count: int, minute: int) -> int:
        return db.append(table, [{"seq": i, "ts": 1_750_000_000_000_000 + minute * 60_000_000} for i in range(count)])

    first = append(10, 0)
    append(5_000, 1)
    db.consolidate()  # into a block without what follows
    target = Target.of(db, table)
    options = Options(table, server.endpoint)
    reader = EventTail(options, target, spark_schema(target))
    start = reader.initialOffset()
    half = reader.latestOffset(start, ReadMaxRows(10))
    assert (half["ts"], half["floor"]) == (first, start["floor"])
    append(10, 100)

    def dropped() -> int:
        db.consolidate()
        return db.tail_points(table, most=0).kept_since

    wait_for(dropped)
    end = reader.latestOffset(half, ReadMaxRows(10))
    with pytest.raises(StreamDataLoss, match="retention has dropped events"):
        for part in reader.partitions(half, end):
            list(reader.read(part))
    lenient = EventTail(replace(options, fail_on_data_loss=False), target, spark_schema(target))
    batches = [batch for part in lenient.partitions(half, end) for batch in lenient.read(part)]
    assert batches == []
    rest = lenient.latestOffset(end, ReadMaxRows(10))
    (part,) = lenient.partitions(end, rest)
    assert sum(batch.num_rows for batch in lenient.read(part)) == 10


def test_events_that_were_retracted(db: Any, server: ServerProcess, table: str, written: Written) -> None:
    written.append(5, 5)
    target = Target.of(db, table)
    options = Options.of({"table": table, "endpoint": server.endpoint})
    reader = EventTail(options, target, spark_schema(target))
    read = reader.latestOffset(reader.initialOffset(), ReadMaxRows(100))
    with db.transaction() as tx:
        assert tx.retract(table, where=kivi.col("seq") <= 3) == 3
    written.append(2)
    end = reader.latestOffset(read, ReadMaxRows(100))
    (part,) = reader.partitions(read, end)
    with pytest.raises(kivi.EventsRetracted, match="ignore"):
        list(reader.read(part))
    options = Options.of({"table": table, "endpoint": server.endpoint, "retractions": "Ignore"})
    lenient = EventTail(options, target, spark_schema(target))
    assert sum(batch.num_rows for batch in lenient.read(part)) == 2
    with pytest.raises(kivi.InvalidArgument, match='retractions is "fail", "ignore" or "deliver"'):
        Options.of({"table": table, "retractions": "tell"})


def _marked(rows: list[Any]) -> list[tuple[int, int, bool]]:
    return [(row["_commit_ts"], row["seq"], row["_retracted"]) for row in rows]


def test_retracted_events_are_delivered_once_though_a_batch_is_repeated(
    spark: Any, db: Any, server: ServerProcess, table: str, written: Written, tmp_path: Path
) -> None:
    """R22: marked, where the retraction was committed, and those alone that an earlier batch had."""
    stream = Stream(spark, server.endpoint, table, tmp_path / "checkpoint")
    deliver = {"retractions": "deliver", "commitTs": "true"}
    written.append(5, 5)
    stream.run(**deliver)
    assert _marked(stream.batches[0]) == [(at, event["seq"], False) for at, event in written.events]

    def retract(where: Any) -> int:
        with db.transaction() as tx:
            assert tx.retract(table, where=where) == 3
        return int(tx.commit_ts)

    keeps = db.snapshot()  # the values of what is retracted stay as long as it may see them
    keeps.__enter__()
    assert keeps.ts == written.events[-1][0]
    (late,) = written.append(4)
    gone = retract(kivi.col("seq").isin([2, 6, 11]))  # 11 is in no batch yet
    (last,) = written.append(1)
    stream.run(**deliver)
    expected = [(late, seq, False) for seq in (12, 13, 14)]
    expected += [(gone, 2, True), (gone, 6, True), (last, 15, False)]
    assert _marked(stream.batches[1]) == expected

    # As if Spark had been killed before it noted the batch: it is run again, though more has been retracted since.
    alone = retract(kivi.col("seq").isin([1, 12, 15]))
    assert forget_last(stream.checkpoint) == 1
    stream.run(**deliver)
    assert [number for number, _ in stream.every] == [0, 1, 1, 2]
    assert _marked(stream.batches[1]) == expected
    assert _marked(stream.batches[2]) == [(alone, seq, True) for seq in (1, 12, 15)]  # a batch of its own
    stream.run(**deliver)
    assert len(stream.every) == 4
    keeps.close()

    copy: Counter[int] = Counter()
    for number in range(3):
        for row in stream.batches[number]:
            copy[row["seq"]] += -1 if row["_retracted"] else 1
    with db.snapshot() as snapshot:
        held = {row["seq"]: 1 for row in snapshot.scan(table)}
    assert {seq: count for seq, count in copy.items() if count} == held


def test_a_new_stream_is_not_told_of_retractions_from_before_it(
    db: Any, server: ServerProcess, table: str, written: Written
) -> None:
    """Cut into many tasks, or batches, though the values are gone: it has never had these events."""
    written.append(5, 5, 5)
    with db.transaction() as tx:
        assert tx.retract(table, where=kivi.col("seq").isin([2, 7])) == 2
    written.append(5)
    db.consolidate()
    target = Target.of(db, table)
    for retractions in ("fail", "ignore", "deliver"):
        given = {"table": table, "endpoint": server.endpoint, "retractions": retractions, "partitionRows": "3"}
        options = Options.of(given)
        reader = EventTail(options, target, stream_schema(target, options))
        start = reader.initialOffset()
        for rows in (5, 1_000):
            at, seen = start, []
            while (end := reader.latestOffset(at, ReadMaxRows(rows))) != at:
                for part in reader.partitions(at, end):
                    seen += [seq for batch in reader.read(part) for seq in batch.column("seq").to_pylist()]
                at = end
            assert seen == [seq for seq in written.seqs() if seq not in (2, 7)]


def test_a_stream_that_is_behind_a_retraction_whose_values_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has not read yet is read no more: an error that says so, or what is left. A new stream lacks nothing."""
    opened: Any = kivi.open(tmp_path / "store")
    with opened as db:
        monkeypatch.setitem(_clients, (os.getpid(), "here", None, None), db)
        create(db, "events")
        written = Written(db, "events")
        written.append(5)
        target = Target.of(db, "events")

        def tail(retractions: str) -> EventTail:
            options = Options.of({"table": "events", "endpoint": "here", "retractions": retractions})
            return EventTail(options, target, stream_schema(target, options))

        def seqs(reader: EventTail, start: Any, end: Any) -> list[int]:
            batches = [batch for part in reader.partitions(start, end) for batch in reader.read(part)]
            return [seq for batch in batches for seq in batch.column("seq").to_pylist()]

        every = ReadMaxRows(100)
        start = tail("fail").latestOffset(tail("fail").initialOffset(), every)
        written.append(5)
        end = tail("fail").latestOffset(start, every)
        with db.transaction() as tx:
            assert tx.retract("events", where=kivi.col("seq") == 7) == 1
        consolidator = db.store.consolidator
        consolidator.close()  # which flushes
        while db.describe("events")["statistics"]["retracted_in_blocks"]:
            consolidator.compact()
        for retractions in ("fail", "deliver"):
            with pytest.raises(kivi.EventsRetracted, match="before the stream read them"):
                seqs(tail(retractions), start, end)
        assert seqs(tail("ignore"), start, end) == [6, 8, 9, 10]
        for retractions in ("fail", "ignore", "deliver"):
            new = tail(retractions)
            begin = new.initialOffset()
            assert seqs(new, begin, new.latestOffset(begin, every)) == [1, 2, 3, 4, 5, 6, 8, 9, 10]


# -- aggregates -------------------------------------------------------------------------------------------


class Copy:
    """The aggregate as a consumer has it that puts each batch over what it had, and checks it after each."""

    def __init__(self, written: Written, stream: Stream) -> None:
        self._written, self._stream = written, stream
        self._seen = 0
        self.rows: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.at = 0

    def check(self) -> None:
        for number, rows in self._stream.every[self._seen :]:
            stamps = {row["_commit_ts"] for row in rows}
            keys = [_key(row) for row in rows]
            assert len(keys) == len(set(keys)), f"batch {number} has a row twice"
            if stamps:
                (at,) = stamps
                assert at >= self.at, f"batch {number} goes back"
                self.at = at
            for row in rows:
                assert row["average"] == row["total"] / row["invocations"]
                self.rows[_key(row)] = (row["total"], row["invocations"], row["slowest"])
            assert self.rows == self._written.totals(self.at), f"after batch {number}, at {self.at}"
        self._seen = len(self._stream.every)


def _key(row: dict[str, Any]) -> tuple[int, int]:
    return row["endpoint_id"], int(row["slot"].replace(tzinfo=dt.UTC).timestamp())


@pytest.fixture
def feed(spark: Any, server: ServerProcess, table: str, tmp_path: Path) -> Stream:
    return Stream(spark, server.endpoint, f"{table}_5m", tmp_path / "feed")


def test_a_feed_begins_with_the_table_and_goes_on_with_what_changes(feed: Stream, written: Written, db: Any) -> None:
    written.append(300, 20)
    copy = Copy(written, feed)
    feed.run(commitTs="true", partitionRows=20)
    copy.check()
    assert copy.rows == written.totals(2**62)
    for sizes in ((1,), (2, 3), (50,)):
        before = db.watermark()
        written.append(*sizes)
        feed.run(commitTs="true")
        copy.check()
        touched = {(e["endpoint_id"], e["ts"] // SLOT_US * 300) for at, e in written.events if at > before}
        assert {_key(row) for row in feed.every[-1][1]} == touched
    assert len(feed.every) == 4
    feed.run(commitTs="true")
    assert len(feed.every) == 4
    assert copy.rows == written.totals(2**62)


def test_a_feed_may_begin_with_what_changes_next(feed: Stream, written: Written) -> None:
    written.append(100)
    feed.run(startingOffsets="latest", commitTs="true", columns="endpoint_id, invocations")
    assert feed.rows == []
    (at,) = written.append(1)
    feed.run(startingOffsets="latest", commitTs="true", columns="endpoint_id, invocations")
    rows = feed.every[-1][1]
    key = written.events[-1][1]["endpoint_id"], written.events[-1][1]["ts"] // SLOT_US * 300
    assert rows == [{"endpoint_id": key[0], "invocations": written.totals(at)[key][1], "_commit_ts": at}]


def test_a_feed_under_writers_and_kills_of_the_server(spark: Any, tmp_path: Path) -> None:
    """After each batch the consumer's copy is the table at the batch's snapshot, exactly."""
    with ServerProcess(tmp_path / "data") as server, kivi.connect(server.endpoint, timeout=60) as db:
        create(db, "calls")
        written = Written(db, "calls")
        feed = Stream(spark, server.endpoint, "calls_5m", tmp_path / "checkpoint")
        copy = Copy(written, feed)
        written.append(500)
        query = feed.start(available=False, commitTs="true")
        for turn in range(3):
            for _ in range(10):
                written.append(1, 30)
            seen = len(feed.every)
            wait_for(lambda: len(feed.every) > seen, query)  # noqa: B023
            server.restart()
            if not query.isActive:  # the kill met a batch: its snapshot went with the server
                query = feed.start(available=False, commitTs="true")
            if turn == 1:
                db.consolidate()
        (last,) = written.append(5)

        def caught_up() -> bool:
            nonlocal query
            if any(row["_commit_ts"] >= last for _, rows in feed.every for row in rows[:1]):
                return True
            if not query.isActive:
                query = feed.start(available=False, commitTs="true")
            return False

        wait_until(caught_up, 100, pause_s=0.1)
        query.stop()
        copy.check()
        assert copy.rows == written.totals(2**62)


def test_a_batch_of_a_feed_that_is_run_again(feed: Stream, written: Written, db: Any) -> None:
    """The same rows if nothing came since; else those of a later snapshot, which say so, and it still adds up.

    (With the usual leaseTtl they would be the same ones for ten minutes.)
    """
    copy = Copy(written, feed)
    written.append(100)
    feed.run(commitTs="true")
    written.append(3)
    feed.run(commitTs="true", leaseTtl="1s")
    copy.check()
    assert forget_last(feed.checkpoint) == 1
    feed.run(commitTs="true", leaseTtl="1s")
    assert [number for number, _ in feed.every] == [0, 1, 1]
    assert feed.every[1] == feed.every[2]
    copy.check()
    assert forget_last(feed.checkpoint) == 1
    time.sleep(1.5)
    (_, newest) = written.append(4, 5)
    db.consolidate()
    feed.run(commitTs="true")
    assert [number for number, _ in feed.every] == [0, 1, 1, 1, 2]
    copy.check()
    for _, rows in feed.every[3:]:
        assert {row["_commit_ts"] for row in rows} == {newest}
    assert len(feed.every[3][1]) >= len(feed.every[1][1])
    assert copy.rows == written.totals(2**62)


def test_a_batch_of_a_feed_with_history_is_the_same_when_it_is_run_again(
    spark: Any, server: ServerProcess, written: Written, db: Any, table: str, tmp_path: Path
) -> None:
    db.create_aggregate(
        f"{table}_kept",
        source=table,
        group_by=["endpoint_id"],
        measures={"total": kivi.sum("resp_time_us")},
        history="1h",
    )
    feed = Stream(spark, server.endpoint, f"{table}_kept", tmp_path / "kept")
    written.append(100)
    feed.run(commitTs="true")
    written.append(3)
    feed.run(commitTs="true")
    assert forget_last(feed.checkpoint) == 1
    written.append(4)
    db.consolidate()
    feed.run(commitTs="true")
    assert [number for number, _ in feed.every] == [0, 1, 1, 2]
    assert feed.every[1] == feed.every[2]


def test_a_feed_of_an_aggregate_that_was_made_again(feed: Stream, written: Written, db: Any, table: str) -> None:
    written.append(50)
    feed.run(commitTs="true")
    db.drop(f"{table}_5m")
    with pytest.raises(Exception, match="NotFound"):
        feed.run(commitTs="true")
    db.create_aggregate(
        f"{table}_5m",
        source=table,
        group_by=["endpoint_id", kivi.time_slot("ts", "5m", name="slot")],
        measures={"total": kivi.sum("resp_time_us"), "invocations": kivi.count(), "slowest": kivi.max("resp_time_us")},
        derived={"average": "total / invocations"},
    )
    with refused("StreamDataLoss: .* was dropped and created again"):
        feed.run(commitTs="true")
    feed.run(commitTs="true", failOnDataLoss="false")
    assert len(feed.every) == 2
    copy = Copy(written, feed)
    copy.check()  # the whole table: it was summed again from the events that were there
    with pytest.raises(Exception, match="InvalidArgument: .* is an aggregate: .* maxRowsPerTrigger"):
        feed.run(maxRowsPerTrigger=5)
