"""A job over a cluster whose nodes hold a part of the shards each: every task reads at a node that holds what it reads.

So nothing is asked of another node, as long as nothing has moved and nobody has died; and whatever does, each row is
there once, as one snapshot of kivi has it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import kivi
from kivi.spark.feed import AggregateFeed
from kivi.spark.options import Options
from kivi.spark.reading import Reader
from kivi.spark.schemas import Target, spark_schema
from kivi.spark.tail import EventTail, stream_schema
from tests.cluster.inprocess import Loop, Served
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

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
        with Served(path / first, nats, loop) as whole, kivi.connect(whole.endpoint) as db:
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
        with kivi.connect(self.nodes[name].endpoint) as db:
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
