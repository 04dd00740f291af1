"""A job over a cluster whose nodes hold a part of the shards each: every task reads at a node that holds what it reads.

So nothing is asked of another node, as long as nothing has moved and nobody has died; and whatever does, each row is
there once, as one snapshot of kivi has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from kivi_server.translate import Translator
from pyspark.sql import SparkSession
from pyspark.sql.datasource import EqualTo
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import kivi
from kivi.client.database import Database
from kivi.spark.feed import AggregateFeed
from kivi.spark.filters import Range
from kivi.spark.options import Options
from kivi.spark.reading import FilteringReader, Reader
from kivi.spark.schemas import Target, spark_schema
from kivi.spark.shares import Share
from kivi.spark.summary import SummaryReader, summary_of
from kivi.spark.tail import EventTail, stream_schema
from tests.cluster.inprocess import Loop, Served
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.spark import helpers
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.story, pytest.mark.timeout(300)]

COLUMNS = {"ts": "timestamp", "user": "string", "us": "int64"}
USERS = [f"user {i}" for i in range(60)]
HALVES = {"low": "0-31", "high": "32-63"}
TWICE = {"a": "0-41", "b": "22-63", "c": "0-21,42-63"}
"""Each shard is held by two of them."""


class Cluster:
    """Nodes in this process, by their names."""

    def __init__(self, path: Path, opened: contextlib.ExitStack, held: dict[str, str]) -> None:
        nats, loop = opened.enter_context(NatsCluster(path, 1)), opened.enter_context(Loop())
        first, *others = held
        with Served(path / first, nats, loop) as whole, whole.connect() as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, shard_by=["user"])
            db.create_aggregate("sums", source="calls", group_by=["user"], measures={"us": kivi.sum("us")})
            self.append(db, range(20))
            for other in others:
                db.checkpoint(path / other)
        self._opened = {name: contextlib.ExitStack() for name in held}
        self.nodes = dict[str, Served]()
        for name in (*others, first):  # the first may give shards up once others hold them
            self.nodes[name] = self._opened[name].enter_context(Served(path / name, nats, loop, held[name]))
            opened.push(self._opened[name])
        endpoints = {node.endpoint for node in self.nodes.values()}
        wait_until(lambda: all(node.knows >= endpoints for node in self.nodes.values()))
        wait_until(lambda: {one["shards"] for one in self.status(first)["nodes"]} >= {*held.values()})

    @staticmethod
    def append(db: Any, times: range) -> int:
        return [db.append("calls", [{"ts": i, "user": user, "us": i} for user in USERS]) for i in times][-1]

    def status(self, name: str) -> Any:
        with self.at(name) as db:
            return db.cluster_status()

    @contextlib.contextmanager
    def at(self, name: str) -> Iterator[Any]:
        with self.nodes[name].connect() as db:
            yield db

    def options(self, table: str, **more: Any) -> Options:
        return Options(table=table, endpoint=",".join(node.endpoint for node in self.nodes.values()), **more)

    @property
    def asked(self) -> int:
        """How often these nodes have asked one another for rows."""
        return sum(node.node.asking.asked for node in self.nodes.values())

    def move(self, shards: str, to: str, source: str, *, given_up: bool = True) -> None:
        """Returns when the one has given them up, or the other one has them: no shard that some snapshot may have to
        read as it was is given up."""
        with self.at(source) as db:
            move = db.move_shards(shards, self.nodes[to].endpoint, source=self.nodes[source].endpoint)

            def left() -> list[dict[str, Any]]:
                return [one for one in db.cluster_status()["moves"] if one["id"] == move]

            wait_until(lambda: not left() if given_up else all(one["since"] for one in left()))

    def end(self, name: str) -> None:
        self._opened[name].close()
        del self.nodes[name]


@pytest.fixture
def cluster_of(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], Cluster]]:
    require("nats-server")
    with contextlib.ExitStack() as opened:
        yield lambda held: Cluster(tmp_path, opened, held)


def reader_of(cluster: Cluster, table: str, lease_ttl_s: float = 60.0) -> Reader:
    options = cluster.options(table, partition_rows=300, lease_ttl_s=lease_ttl_s)
    target = Target.of(options.client(), table)
    return Reader(options, target, spark_schema(target))


def counted(batches: Iterator[Any]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for batch in batches for row in batch.to_pylist())


def read_by(reader: Any, parts: list[Any]) -> Counter[tuple[Any, ...]]:
    return sum((counted(reader.read(part)) for part in parts), Counter())


def rows_of(cluster: Cluster, name: str, table: str, ts: int) -> Counter[tuple[Any, ...]]:
    """At a timestamp after which no event is appended. Without a name of its own it need not be readable for long."""
    with cluster.at(name) as db, db.snapshot(min_snapshot=ts) as snapshot:
        return counted(snapshot.scan_batches(table))


@pytest.mark.parametrize("table", ["calls", "sums"])
@pytest.mark.parametrize("held", [HALVES, TWICE])
def test_tasks_read_at_owners_and_nothing_is_asked_of_another_node(
    cluster_of: Callable[..., Cluster], table: str, held: dict[str, str]
) -> None:
    cluster = cluster_of(held)
    reader = reader_of(cluster, table)
    parts = reader.partitions()
    wanted = rows_of(cluster, next(iter(held)), table, parts[0].ts)  # type: ignore[attr-defined]
    assert sum(wanted.values()) == len(USERS) * (20 if table == "calls" else 1)
    before = cluster.asked
    assert before, "no node holds everything: this read has asked others"
    with cluster.at(next(iter(held))) as db:
        Cluster.append(db, range(20, 22))  # which the job does not see
    assert read_by(reader, parts) == wanted
    assert cluster.asked == before


@pytest.mark.parametrize("table", ["calls", "sums"])
def test_a_shard_that_has_moved_since_is_read_where_it_is(cluster_of: Callable[..., Cluster], table: str) -> None:
    cluster = cluster_of(TWICE)
    is_event = table == "calls"
    reader = reader_of(cluster, table, lease_ttl_s=1.0 if is_event else 60.0)
    parts = reader.partitions()
    wanted = rows_of(cluster, "a", table, parts[0].ts)  # type: ignore[attr-defined]
    cluster.move("0-9", to="b", source="a", given_up=is_event)
    cluster.move("22-25", to="c", source="a", given_up=is_event)
    assert read_by(reader, parts) == wanted


@pytest.mark.parametrize("table", ["calls", "sums"])
@pytest.mark.parametrize("name", TWICE)
def test_a_node_that_has_died_since_is_not_needed(cluster_of: Callable[..., Cluster], table: str, name: str) -> None:
    cluster = cluster_of(TWICE)
    reader = reader_of(cluster, table)
    parts = reader.partitions()
    wanted = rows_of(cluster, "b", table, parts[0].ts)  # type: ignore[attr-defined]
    cluster.end(name)
    assert read_by(reader, parts) == wanted


def stream_of(cluster: Cluster, table: str, **more: Any) -> Any:
    options = cluster.options(table, **more)
    target = Target.of(options.client(), table)
    kind = EventTail if table == "calls" else AggregateFeed
    return kind(options, target, stream_schema(target, options))


def test_a_stream_of_events_has_each_once_by_owners(cluster_of: Callable[..., Cluster]) -> None:
    """Also those of shards that move between the planning of a batch and its tasks, and where a batch has a size."""
    cluster = cluster_of(TWICE)
    stream = stream_of(cluster, "calls", commit_ts=True)
    begin, found = stream.initialOffset(), Counter[tuple[Any, ...]]()
    before, batches = cluster.asked, 0
    while (end := stream.latestOffset(begin, ReadMaxRows(250))) != begin:
        found += read_by(stream, stream.partitions(begin, end))
        begin, batches = end, batches + 1
    assert batches >= 4
    assert cluster.asked == before
    with cluster.at("c") as db:
        Cluster.append(db, range(20, 30))
    wait_until(lambda: stream.latestOffset(begin, ReadAllAvailable()) != begin)
    end = stream.latestOffset(begin, ReadAllAvailable())
    parts = stream.partitions(begin, end)
    cluster.move("0-9", to="b", source="a")
    cluster.move("22-25", to="c", source="a")
    found += read_by(stream, parts)
    cluster.end("b")
    with cluster.at("a") as db:
        Cluster.append(db, range(30, 33))
    wait_until(lambda: stream.latestOffset(end, ReadAllAvailable()) != end)
    last = stream.latestOffset(end, ReadAllAvailable())
    found += read_by(stream, stream.partitions(end, last))
    with cluster.at("a") as db, db.snapshot(min_snapshot=last["ts"]) as snapshot:
        assert found == counted(snapshot.scan_batches("calls", columns=[*COLUMNS, "_commit_ts"]))
    assert sum(found.values()) == 33 * len(USERS)


@pytest.mark.parametrize("table", ["calls", "sums"])
@pytest.mark.parametrize("name", TWICE)
def test_a_batch_of_a_stream_is_read_though_a_node_has_died_since(
    cluster_of: Callable[..., Cluster], table: str, name: str
) -> None:
    """Also where no other node holds all that it was to read: two do."""
    cluster = cluster_of(TWICE)
    stream = stream_of(cluster, table)
    begin = stream.initialOffset()
    end = stream.latestOffset(begin, ReadAllAvailable())
    parts = stream.partitions(begin, end)
    wanted = rows_of(cluster, "a", table, end["ts"])
    cluster.end(name)
    assert read_by(stream, parts) == wanted


def test_a_stream_of_an_aggregate_has_its_state_at_each_batch(cluster_of: Callable[..., Cluster]) -> None:
    cluster = cluster_of(HALVES)
    stream = stream_of(cluster, "sums", commit_ts=True)
    begin, state, before = stream.initialOffset(), {}, cluster.asked
    for i in range(3):
        end = stream.latestOffset(begin, ReadAllAvailable())
        parts = stream.partitions(begin, end)
        with cluster.at("low") as db:
            newest = db.append("calls", [{"ts": i, "user": user, "us": 1_000} for user in USERS[i::7]])
        for user, us, commit_ts in read_by(stream, parts):
            state[user] = us
            assert commit_ts == end["ts"]
        asked = cluster.asked
        with cluster.at("high") as db, db.snapshot(lease=parts[0].lease) as snapshot:
            assert state == {row["user"]: row["us"] for row in snapshot.scan("sums")}
        before += cluster.asked - asked
        begin = end
        while stream._points(0).watermark < newest:
            pass
    assert cluster.asked == before
    stream.stop()


@pytest.mark.story
def test_spark_reads_by_owners(cluster_of: Callable[..., Cluster], spark: SparkSession) -> None:
    cluster = cluster_of(TWICE)
    before = cluster.asked
    endpoint = cluster.nodes["a"].endpoint
    for table, total in (("calls", 190 * len(USERS)), ("sums", 190 * len(USERS))):
        frame = spark.read.format("kivi").options(endpoint=endpoint, table=table, partitionRows=300).load()
        assert frame.groupBy().sum("us").collect()[0][0] == total
    assert cluster.asked == before
    frame = spark.read.format("kivi").options(endpoint=endpoint, table="sums").load()
    cluster.end("c")
    assert frame.groupBy().sum("us").collect()[0][0] == 190 * len(USERS)


@pytest.mark.parametrize("table", ["calls", "sums"])
def test_a_node_that_has_nothing_reads_at_one_that_has_everything(
    cluster_of: Callable[..., Cluster], table: str
) -> None:
    cluster = cluster_of({"all": "0-63", "none": "none"})
    options = dataclasses.replace(
        cluster.options(table, partition_rows=300, timeout_s=5.0), endpoint=cluster.nodes["none"].endpoint
    )
    target = Target.of(options.client(), table)
    reader = Reader(options, target, spark_schema(target))
    parts = reader.partitions()
    wanted = rows_of(cluster, "all", table, parts[0].ts)  # type: ignore[attr-defined]
    assert read_by(reader, parts) == wanted
    kind = EventTail if table == "calls" else AggregateFeed
    stream = kind(options, target, stream_schema(target, options))
    begin = stream.initialOffset()
    end = stream.latestOffset(begin, ReadAllAvailable())
    assert read_by(stream, stream.partitions(begin, end)) == wanted
    assert not cluster.asked


def test_a_node_without_an_address_is_read_by_way_of_another(cluster_of: Callable[..., Cluster]) -> None:
    cluster = cluster_of(HALVES)
    high = cluster.nodes["high"].node
    high.about["address"] = ""
    high._say()
    wait_until(lambda: "" in {one["address"] for one in cluster.status("low")["nodes"]})
    for table in ("calls", "sums"):
        options = dataclasses.replace(
            cluster.options(table, partition_rows=300, timeout_s=5.0), endpoint=cluster.nodes["low"].endpoint
        )
        target = Target.of(options.client(), table)
        reader = Reader(options, target, spark_schema(target))
        parts = reader.partitions()
        found = read_by(reader, parts)
        assert sum(found.values()) == len(USERS) * (20 if table == "calls" else 1)
        assert found == rows_of(cluster, "low", table, parts[0].ts)  # type: ignore[attr-defined]


def test_one_row_of_measures_is_of_all_shards(cluster_of: Callable[..., Cluster]) -> None:
    """It is read at one node, which asks the others for what it has not."""
    cluster = cluster_of(HALVES)
    options = cluster.options("calls", aggregate="count(), sum(us), max(ts) as newest", where="us > 3")
    for name, node in cluster.nodes.items():
        options = dataclasses.replace(options, endpoint=node.endpoint)
        target = Target.of(options.client(), "calls")
        reader = SummaryReader(options, target, summary_of(target, options.aggregate or ""))
        (part,) = reader.partitions()
        (row,) = [row for batch in reader.read(part) for row in batch.to_pylist()]
        assert (row["count()"], row["sum(us)"]) == (16 * len(USERS), sum(range(4, 20)) * len(USERS)), name


def test_a_filter_that_leaves_one_shard(cluster_of: Callable[..., Cluster]) -> None:
    """All other shares are empty then."""
    cluster = cluster_of(HALVES)
    for table, count in (("calls", 20), ("sums", 1)):
        for user in USERS[:6]:
            options = cluster.options(table, partition_rows=300)
            target = Target.of(options.client(), table)
            reader = FilteringReader(options, target, spark_schema(target))
            assert not list(reader.pushFilters([EqualTo(("user",), user)]))
            found = read_by(reader, reader.partitions())
            assert sum(found.values()) == count
            assert {row[1 if table == "calls" else 0] for row in found} == {user}


@pytest.mark.parametrize("late", TWICE)
def test_a_node_that_does_not_come_to_the_snapshot_is_not_needed(cluster_of: Callable[..., Cluster], late: str) -> None:
    cluster = cluster_of(TWICE)
    other = next(name for name in TWICE if name != late)
    options = cluster.options("sums", timeout_s=2.0)
    options = dataclasses.replace(options, endpoint=cluster.nodes[other].endpoint)
    target = Target.of(options.client(), "sums")
    reader = Reader(options, target, spark_schema(target))
    parts = reader.partitions()
    with cluster.nodes[late].behind(), cluster.at(other) as db, db.snapshot(shared=True) as snapshot:
        again = [dataclasses.replace(part, lease=snapshot.lease, ts=snapshot.ts) for part in parts]  # type: ignore[type-var]
        assert {user for user, _ in read_by(reader, again)} == {*USERS}


@pytest.mark.parametrize("late", HALVES)
def test_a_feed_that_begins_with_what_changes_next_knows_what_was_there(
    cluster_of: Callable[..., Cluster], late: str
) -> None:
    """Though a node has not come so far when it is asked, and others have."""
    cluster = cluster_of(HALVES)
    other = "low" if late == "high" else "high"
    stream = stream_of(cluster, "sums", stream_start="latest")
    with stream._shares():
        pass
    with contextlib.ExitStack() as opened:
        behind = opened.enter_context(contextlib.ExitStack())
        db, pool = opened.enter_context(cluster.at(other)), opened.enter_context(ThreadPoolExecutor())
        before = db.watermark()
        behind.enter_context(cluster.nodes[late].behind(cluster.nodes[other]))
        Cluster.append(db, range(20, 22))
        begin = pool.submit(stream.initialOffset)
        time.sleep(0.3)
        behind.close()
        assert begin.result()["ts"] >= before
        newest = db.append("calls", [{"ts": 1, "user": USERS[0], "us": 5}])
    wait_until(lambda: stream.latestOffset(begin.result(), ReadAllAvailable())["ts"] == newest)
    end = stream.latestOffset(begin.result(), ReadAllAvailable())
    found = read_by(stream, stream.partitions(begin.result(), end))
    assert {user for user, _ in found} <= {*USERS} and len(found) in (1, len(USERS))
    stream.stop()


@pytest.mark.parametrize("late", HALVES)
def test_a_feed_goes_on_while_commits_come(cluster_of: Callable[..., Cluster], late: str) -> None:
    """Between the answers of two nodes there always is one."""
    cluster = cluster_of(HALVES)
    stream = stream_of(cluster, "sums", stream_start="latest")
    begin, users, ask = stream.initialOffset(), itertools.cycle(USERS), Database.tail_points

    def busy(self: Any, *args: Any, **kwargs: Any) -> Any:
        with cluster.at(late) as db:
            newest = db.append("calls", [{"ts": 1, "user": next(users), "us": 5}])
        wait_until(lambda: all(node.node.store.watermark() >= newest for node in cluster.nodes.values()))
        return ask(self, *args, **kwargs)

    with patch.object(Database, "tail_points", busy):
        asked = [stream.latestOffset(begin, ReadAllAvailable())["ts"] for _ in range(3)]
    assert asked[-1] > begin["ts"]
    stream.stop()


def test_a_stream_of_a_table_that_one_node_has_not_heard_of(cluster_of: Callable[..., Cluster]) -> None:
    cluster = cluster_of(HALVES)
    options = dataclasses.replace(cluster.options("later"), endpoint=cluster.nodes["low"].endpoint)
    target = dataclasses.replace(Target.of(options.client(), "calls"), table="later")
    stream = EventTail(options, target, stream_schema(target, options))
    with contextlib.ExitStack() as opened:
        pool, behind = opened.enter_context(ThreadPoolExecutor()), opened.enter_context(contextlib.ExitStack())
        behind.enter_context(cluster.nodes["high"].behind(cluster.nodes["low"]))
        with cluster.at("low") as db:
            db.create_event_table("later", event_time="ts", columns=COLUMNS, shard_by=["user"])
        begin = pool.submit(stream.initialOffset)
        time.sleep(0.3)
        behind.close()
        assert begin.result()["ts"] == 0


@pytest.mark.parametrize("table", ["calls", "sums"])
def test_a_server_that_does_not_know_of_shards_is_not_read_several_times(
    cluster_of: Callable[..., Cluster], table: str
) -> None:
    """An earlier version parses what it is asked without them, and gives the rows of all."""
    cluster = cluster_of(HALVES)
    reader, stream = reader_of(cluster, table), stream_of(cluster, table, timeout_s=2.0)
    parts, begin = reader.partitions(), stream.initialOffset()
    batch = stream.partitions(begin, stream.latestOffset(begin, ReadAllAvailable()))
    scan = Translator.scan

    def earlier(self: Translator, schema: Any, spec: Any, *, reads: bool = False) -> Any:
        spec.ClearField("shards")
        return scan(self, schema, spec, reads=reads)

    with patch.object(Translator, "scan", earlier):
        for part in parts:
            with pytest.raises(kivi.FeatureOff, match="upgrade it"):
                list(reader.read(part))
        for part in batch:  # changes it asks nobody else for
            with pytest.raises((kivi.FeatureOff, kivi.Unavailable)):
                list(stream.read(part))


def first_batch(cluster: Cluster, table: str) -> tuple[Any, Any, Counter[tuple[Any, ...]]]:
    """Its offsets and its rows, of a driver that has ended."""
    stream = stream_of(cluster, table)
    begin = stream.initialOffset()
    end = stream.latestOffset(begin, ReadAllAvailable())
    then = read_by(stream, stream.partitions(begin, end))
    stream.stop()
    return begin, end, then


@pytest.mark.parametrize("table", ["calls", "sums"])
def test_a_batch_is_read_again_by_another_driver_when_other_nodes_hold_its_shards(
    cluster_of: Callable[..., Cluster], table: str
) -> None:
    """It has the rows of then, or those of a later state; no other, and each once."""
    cluster = cluster_of(HALVES)
    begin, end, then = first_batch(cluster, table)
    with cluster.at("low") as db:
        newest = Cluster.append(db, range(20, 23))
    cluster.move("0-9", to="high", source="low")
    for name, node in cluster.nodes.items():
        again = stream_of(cluster, table)
        again._options = dataclasses.replace(again._options, endpoint=node.endpoint, timeout_s=8.0)
        found = read_by(again, again.partitions(begin, end))
        assert found == then or (table == "sums" and found == rows_of(cluster, name, table, newest))
        later = again.latestOffset(end, ReadAllAvailable())
        assert later["ts"] == newest
        rest = read_by(again, again.partitions(end, later))
        if table == "calls":
            assert then + rest == rows_of(cluster, name, table, newest)
        else:
            assert rest == rows_of(cluster, name, table, newest)
        again.stop()


@pytest.mark.parametrize("name", TWICE)
def test_a_batch_is_read_again_when_one_node_has_not_its_rows_any_more(
    cluster_of: Callable[..., Cluster], name: str
) -> None:
    """Base of that one has gone on, and that of the others has not."""
    cluster = cluster_of(TWICE)
    begin, end, then = first_batch(cluster, "sums")
    with cluster.at(name) as db:
        newest = Cluster.append(db, range(20, 23))
        db.consolidate()
    for driver in TWICE:
        again = stream_of(cluster, "sums")
        again._options = dataclasses.replace(again._options, endpoint=cluster.nodes[driver].endpoint)
        found = read_by(again, again.partitions(begin, end))
        assert found in (then, rows_of(cluster, name, "sums", newest))
        again.stop()


def test_what_a_batch_is_read_again_from_stays_until_it_has_been_read(cluster_of: Callable[..., Cluster]) -> None:
    """Nodes go on between the plan and the tasks, before they hear of the snapshot of which the batch is: each that is
    read has one of its own."""
    cluster = cluster_of(TWICE)
    begin, end, then = first_batch(cluster, "sums")
    with cluster.at("a") as db:
        newest = Cluster.append(db, range(20, 23))
    for driver in TWICE:
        again = stream_of(cluster, "sums")
        again._options = dataclasses.replace(again._options, endpoint=cluster.nodes[driver].endpoint)
        parts = again.partitions(begin, end)
        if parts[0].ts == end["ts"]:
            read = {part.share.nodes[0] for part in parts}
            assert all(served.leases for served in cluster.nodes.values() if served.endpoint in read)
        for name in TWICE:
            with cluster.at(name) as db:
                db.consolidate()
        assert read_by(again, parts) in (then, rows_of(cluster, "a", "sums", newest))
        again.stop()


@pytest.mark.story
def test_a_query_goes_on_from_its_checkpoint_when_shards_have_moved(
    cluster_of: Callable[..., Cluster], spark: SparkSession, tmp_path: Path
) -> None:
    """Its last batch is run again, by nodes that hold other shards by then. Its offsets say nothing of them, and are
    those of version 0.1.0."""
    cluster, checkpoint = cluster_of(TWICE), tmp_path / "checkpoint"
    read, found = spark.readStream.format("kivi"), dict[int, Counter[tuple[Any, ...]]]()
    again = list[int]()

    def keep(frame: Any, batch: int) -> None:
        rows = Counter(tuple(row) for row in frame.collect())
        again.extend([batch] if batch in found else [])
        assert found.setdefault(batch, rows) == rows

    def run() -> None:
        given: dict[str, Any] = {
            "endpoint": cluster.options("calls").endpoint,
            "table": "calls",
            "maxRowsPerTrigger": 900,
        }
        rows = read.options(**given).load().select("ts", "user", "us")
        query = rows.writeStream.foreachBatch(keep).option("checkpointLocation", str(checkpoint))
        query.trigger(availableNow=True).start().awaitTermination()

    run()
    with cluster.at("c") as db:
        Cluster.append(db, range(20, 25))
    run()
    files = (checkpoint / "offsets").glob("[0-9]*")
    offsets = [json.loads(line) for file in files for line in file.read_text().splitlines()[2:]]
    assert {*offsets[-1]} <= {"ts", "table", "store", "floor"}
    forgotten = helpers.forget_last(checkpoint)
    cluster.move("0-9", to="b", source="a")
    cluster.move("22-25", to="c", source="a")
    with cluster.at("b") as db:
        Cluster.append(db, range(25, 27))
    run()
    assert again == [forgotten]
    total = sum(found.values(), Counter())
    assert len(total) == sum(total.values()) == 27 * len(USERS)


def test_a_job_as_of_a_time_at_which_other_nodes_held_the_shards(cluster_of: Callable[..., Cluster]) -> None:
    """The new owner of some has no rows of aggregates from before it had them, and asks the old one."""
    cluster, taken = cluster_of(HALVES), 0x3FF
    with cluster.at("low") as db:
        db.create_aggregate("kept", source="calls", group_by=["user"], measures={"us": kivi.sum("us")}, history="1h")
        then = db.watermark()
        Cluster.append(db, range(20, 23))
    cluster.move("0-9", to="high", source="low", given_up=False)
    low, high = (cluster.nodes[name].endpoint for name in HALVES)
    for table, count in (("calls", 20 * len(USERS)), ("kept", len(USERS))):
        options = cluster.options(table, partition_rows=300, as_of=then)
        target = Target.of(options.client(), table)
        reader = Reader(options, target, spark_schema(target))
        parts = reader.partitions()
        wanted = read_by(reader, parts)
        assert sum(wanted.values()) == count
        part: Any = parts[0]
        part = dataclasses.replace(part, range=Range())
        cut = (Share(taken, (high,)), Share(((1 << 64) - 1) & ~taken, (low,)))
        assert read_by(reader, [dataclasses.replace(part, share=share) for share in cut]) == wanted
