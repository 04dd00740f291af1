"""Changes on every kind of database: the tail of an event table, and the changed rows of an aggregate.

The oracles are brute force: a list of what was appended with its commit timestamps, and whole tables read at each.
"""

from __future__ import annotations

import datetime as dt
import random
import threading

import pyarrow as pa
import pytest

import kivi
from kivi import errors
from tests.oracle import Aggregate, Attempt, EventTable, Op, Oracle

SLOT_US = 300_000_000
COLUMNS = {"seq": "int64", "name": "string", "ts": "timestamp", "us": "int64"}


def create(db, **more):
    db.create_event_table("calls", event_time="ts", columns=COLUMNS, **more)


def aggregate(db, **more):
    db.create_aggregate(
        "per_name",
        source="calls",
        group_by=["name", kivi.time_slot("ts", "5m", name="slot")],
        measures={"total": kivi.sum("us"), "calls": kivi.count(), "slowest": kivi.max("us")},
        derived={"average": "total / calls"},
        **more,
    )


class Log:
    """What was appended: (commit timestamp, event), in commit order."""

    def __init__(self, db):
        self.db = db
        self.events = []
        self.random = random.Random(5)
        self.commits = []

    def append(self, count):
        start = len(self.events)
        events = [
            {
                "seq": start + i,
                "name": f"n{self.random.randrange(12)}",
                "ts": 1_750_000_000_000_000 + self.random.randrange(4 * SLOT_US),
                "us": self.random.randrange(1 << 40),
            }
            for i in range(count)
        ]
        at = self.db.append("calls", events)
        self.events += [(at, event) for event in events]
        self.commits.append(at)
        return at

    def after(self, since, upto=2**62):
        return [event["seq"] for at, event in self.events if since < at <= upto]


def seqs(rows):
    return [row["seq"] for row in rows]


def test_a_tail_is_the_events_after_a_timestamp_in_commit_order(db):
    create(db)
    log = Log(db)
    for count in (1, 40, 3, 700, 1, 1, 60):
        log.append(count)
        if count == 3:
            db.consolidate()
    for _ in range(2):
        with db.snapshot() as snap:
            for since in (0, *log.commits):
                rows = list(snap.changes("calls", since=since))
                assert seqs(rows) == log.after(since)
                assert [row["_commit_ts"] for row in rows] == [at for at, _ in log.events if at > since]
        for a, b in ((log.commits[0], log.commits[3]), (0, log.commits[1]), (log.commits[4], log.commits[4])):
            with db.snapshot(as_of=b) as snap:
                assert seqs(snap.changes("calls", since=a, columns=["seq"])) == log.after(a, b)
        db.consolidate()


def test_a_tail_takes_the_arguments_of_a_scan(db):
    create(db)
    log = Log(db)
    for count in (30, 20, 10):
        log.append(count)
    since = log.commits[0]
    with db.snapshot() as snap:
        (batch,) = snap.change_batches("calls", since=since, where=kivi.col("seq") < 55, columns=["us", "seq"])
        assert batch.schema.names == ["us", "seq", "_commit_ts"]
        assert batch.schema.field("_commit_ts").type == pa.int64()
        assert batch.column("seq").to_pylist() == list(range(30, 55))
        assert list(snap.changes("calls", since=since, limit=2, columns=["seq"], commit_ts=False)) == [
            {"seq": 30},
            {"seq": 31},
        ]
        early = dt.datetime.fromtimestamp(1_750_000_000 + 300, dt.UTC)
        expected = [e["seq"] for at, e in log.events if at > since and e["ts"] < 1_750_000_300_000_000]
        assert seqs(snap.changes("calls", since=since, end=(early,))) == expected
        assert list(snap.change_batches("calls", since=log.commits[-1])) == []


def test_positions_in_a_tail_name_the_same_events_before_and_after_consolidation(db):
    create(db)
    log = Log(db)
    for count in (5, 100, 20):
        log.append(count)
    for turn in range(3):
        with db.snapshot() as snap:
            wanted = log.after(log.commits[0])
            for at in range(0, 130, 13):
                part = snap.changes("calls", since=log.commits[0], columns=["seq"], skip=at, take=13)
                assert seqs(part) == wanted[at : at + 13]
            rest = snap.changes("calls", since=log.commits[0], skip=110, where=kivi.col("seq") != 120)
            assert seqs(rest) == [seq for seq in wanted[110:] if seq != 120]
        if turn < 1:
            db.consolidate()
            log.append(9)  # and a part of it in memory again


def test_points_cut_a_tail_at_commits(db):
    create(db)
    log = Log(db)
    sizes = [3, 3, 3, 50, 1, 1, 8, 2]
    for size in sizes:
        log.append(size)
    for _ in range(2):
        found = db.tail_points("calls", 0, 10)
        assert found.points == (
            (log.commits[2], 9), (log.commits[3], 50), (log.commits[6], 10), (log.commits[7], 2),
        )  # fmt: skip
        assert (found.last, found.kept_since) == (log.commits[-1], 0)
        assert found.watermark >= found.last
        assert found.table_id == db.describe("calls")["id"]
        assert db.tail_points("calls", 0, 10, most=1).points == ((log.commits[2], 9),)
        assert db.tail_points("calls", log.commits[2], 10, upto=log.commits[4]).points == (
            (log.commits[3], 50), (log.commits[4], 1),
        )  # fmt: skip
        nothing = db.tail_points("calls", log.commits[-1], 10)
        assert (nothing.points, nothing.last) == ((), log.commits[-1])
        db.consolidate()


def test_changed_rows_are_those_of_the_events_in_between_at_the_snapshot(db):
    create(db)
    aggregate(db)
    log = Log(db)
    start = db.watermark()
    tables: dict = {start: []}
    for turn in range(12):
        log.append(1 + turn * 3)
        if turn % 4 == 3:
            db.consolidate()
        with db.snapshot() as snap:
            at = snap.ts
            tables[at] = snap.to_arrow("per_name").to_pylist()
            for since in tables:
                check_changes(snap, log, tables, since, at)
    with db.snapshot() as snap:
        assert list(snap.changes("per_name", since=snap.ts)) == []
        everything = list(snap.changes("per_name", since=0))
        assert [{n: v for n, v in row.items() if n != "_commit_ts"} for row in everything] == tables[at]


def key(row):
    return row["name"], int(row["slot"].timestamp() * 1_000_000)


def check_changes(snap, log, tables, since, at):
    touched = {(e["name"], e["ts"] // SLOT_US * SLOT_US) for cts, e in log.events if since < cts <= at}
    found = list(snap.changes("per_name", since=since))
    assert [{n: v for n, v in row.items() if n != "_commit_ts"} for row in found] == [
        row for row in tables[at] if key(row) in touched
    ]
    assert {row["_commit_ts"] for row in found} <= {log.commits[-1]}
    before = {key(row): row for row in tables[since]}
    differing = {key(row) for row in tables[at] if before.get(key(row)) != row}
    assert differing == {key(row) for row in found}  # a count is among the measures, so each of them differs


def test_changed_rows_take_the_arguments_of_a_scan(db):
    create(db)
    aggregate(db)
    log = Log(db)
    since = log.append(40)
    log.append(30)
    with db.snapshot() as snap:
        everything = list(snap.changes("per_name", since=since, columns=["name", "calls"], commit_ts=False))
        one = everything[3]["name"]
        assert list(
            snap.changes("per_name", since=since, columns=["name", "calls"], commit_ts=False, prefix=(one,))
        ) == [row for row in everything if row["name"] == one]
        high = snap.changes("per_name", since=since, start=(one,), columns=["name", "calls"], commit_ts=False)
        low = snap.changes("per_name", since=since, end=(one,), columns=["name", "calls"], commit_ts=False)
        assert [*low, *high] == everything
        found = list(snap.changes("per_name", since=since, where=kivi.col("calls") > 2, columns=["name", "calls"]))
        assert [row["calls"] for row in found] == [row["calls"] for row in everything if row["calls"] > 2]
        assert len(list(snap.changes("per_name", since=since, limit=3))) == 3


def test_an_aggregate_that_was_made_later_has_changed_everywhere(db):
    create(db)
    log = Log(db)
    before = log.append(50)
    aggregate(db)
    log.append(1)
    with db.snapshot() as snap:
        whole = snap.to_arrow("per_name").to_pylist()
        found = [{n: v for n, v in row.items() if n != "_commit_ts"} for row in snap.changes("per_name", since=before)]
        assert found == whole
        ready = db.describe("per_name")["created_ts"]
        assert len(list(snap.changes("per_name", since=ready))) == 1
    with pytest.raises(errors.NotFound), db.snapshot(as_of=before) as snap:
        list(snap.changes("per_name", since=0))


def test_a_column_that_would_hide_what_commits_show_is_refused(db):
    for name in ("_commit_ts", "_commit_time", "_removed", "_retracted"):
        with pytest.raises(errors.SchemaError, match=f"cannot be named '{name}'"):
            db.create_event_table("taken", event_time="ts", columns={"ts": "timestamp", name: "int64"})
    create(db)
    with pytest.raises(errors.SchemaError, match="_commit_ts"):
        db.alter_table("calls", add_columns={"_commit_ts": "int64"})
    with pytest.raises(errors.SchemaError, match="_commit_time"):
        db.create_aggregate("more", source="calls", group_by=["name"], measures={"_commit_time": kivi.max("ts")})


def test_a_store_of_before_may_have_such_a_column_which_is_one_like_others(tmp_path, monkeypatch):
    """Wherever events lie: in memory, in a block, or in a file."""
    with monkeypatch.context() as before, kivi.open(tmp_path / "data") as db:
        before.setattr("kivi.model.declarations.check_not_hidden", lambda *_: None)
        db.create_event_table("taken", event_time="ts", columns={"ts": "timestamp", "_commit_ts": "int64"})
    with kivi.open(tmp_path / "data") as db:
        db.append("taken", [{"ts": 0, "_commit_ts": 7}, {"ts": 1, "_commit_ts": 8}])
        for settle in (lambda: None, db.consolidate, db.store.settle):
            settle()
            with db.snapshot() as snap:
                assert [row["_commit_ts"] for row in snap.scan("taken")] == [7, 8]
                assert [row["_commit_ts"] for row in snap.scan("taken", where=kivi.col("_commit_ts") == 8)] == [8]
                assert [row["_commit_ts"] for row in snap.changes("taken", since=0, commit_ts=False)] == [7, 8]
                with pytest.raises(errors.SchemaError, match="_commit_ts"):
                    list(snap.changes("taken", since=0))


def test_what_has_no_changes_says_so(db):
    create(db)
    db.create_table("rows", key={"id": "int64"}, columns={"n": "int64"})
    log = Log(db)
    log.append(1)
    with db.snapshot() as snap:
        with pytest.raises(errors.InvalidArgument, match="row table"):
            list(snap.changes("rows", since=0))
        with pytest.raises(errors.InvalidArgument, match="older than since"):
            list(snap.changes("calls", since=10**6))
        with pytest.raises(errors.InvalidArgument, match="since is a commit timestamp"):
            snap.changes("calls", since=-1)
        with pytest.raises(errors.InvalidArgument, match="forwards"):
            list(snap.changes("calls", since=0, reverse=True))
        with pytest.raises(errors.NotFound):
            list(snap.changes("nothing", since=0))
    with pytest.raises(errors.InvalidArgument, match="row table"):
        db.tail_points("rows")
    with pytest.raises(errors.InvalidArgument, match="number of rows"):
        db.tail_points("calls", 0, 0)


def test_a_table_that_was_made_again_has_another_number_and_none_of_the_old_events(db):
    create(db)
    log = Log(db)
    at = log.append(3)
    first = db.tail_points("calls")
    db.drop("calls")
    create(db)
    again = db.tail_points("calls", at)
    assert again.table_id != first.table_id
    assert again.store == first.store
    assert again.created_ts > at
    assert (again.points, again.last) == ((), at)
    with pytest.raises(errors.NotFound), db.snapshot(as_of=at) as snap:
        list(snap.changes("calls", since=0))


@pytest.mark.parametrize("db", ["memory", "sync"], indirect=True)
def test_changes_under_concurrent_writers_equal_the_replay(db):
    """Four writers; a follower reads from snapshot to snapshot. Its events are all events, each once, in commit order;
    and after each step the rows that it was told of make its copy of the aggregate equal to the replay at that
    snapshot."""
    create(db)
    aggregate(db)
    oracle = Oracle(
        {
            "calls": EventTable(),
            "per_name": Aggregate(
                "calls",
                ("name", "slot"),
                lambda e: (e["name"], e["ts"] // SLOT_US * SLOT_US),
                {
                    "total": ("sum", lambda e: e["us"]),
                    "calls": ("sum", lambda e: 1),
                    "slowest": ("max", lambda e: e["us"]),
                },
            ),
        }
    )
    start = db.watermark()
    writers = 4

    def write(who):
        draw = random.Random(who)
        for turn in range(40):
            events = [
                {
                    "seq": who * 1_000_000 + turn * 1_000 + i,
                    "name": f"n{draw.randrange(9)}",
                    "ts": 1_750_000_000_000_000 + draw.randrange(3 * SLOT_US),
                    "us": draw.randrange(1000),
                }
                for i in range(draw.choice((1, 2, 300)))
            ]
            at = db.append("calls", events)
            oracle.attempt(Attempt(0, [Op("append", "calls", events=events)], "committed", at, who=str(who)))

    threads = [threading.Thread(target=write, args=(who,)) for who in range(writers)]
    for thread in threads:
        thread.start()
    tail, copy, copies, since, going = [], {}, [], start, True
    while going:
        going = any(thread.is_alive() for thread in threads)
        with db.snapshot() as snap:
            tail += [(row["_commit_ts"], row["seq"]) for row in snap.changes("calls", since=since)]
            changed = list(snap.changes("per_name", since=since))
            keys = [key(row) for row in changed]
            assert len(keys) == len(set(keys))
            for row in changed:
                copy[key(row)] = {name: row[name] for name in ("total", "calls", "slowest")}
            since = snap.ts
            copies.append((since, dict(copy)))
        if len(copies) % 5 == 0:
            db.consolidate()
    for thread in threads:
        thread.join()
    expected = [
        (attempt.commit_ts, event["seq"]) for attempt in oracle.committed() for op in attempt.ops for event in op.events
    ]
    assert tail == expected
    step = max(1, len(copies) // 12)
    for at, seen in [*copies[::step], copies[-1]]:
        assert seen == oracle.state(at).rows["per_name"], f"at {at}"
