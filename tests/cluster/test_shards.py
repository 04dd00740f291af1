"""Nodes that hold a part of the shards: simulated, as sets and pieces by themselves, and on a real nats-server."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest

import kivi
from kivi.arrow.columns import arrow_schema
from kivi.arrow.dictionaries import together
from kivi.arrow.ipc import encode_ipc, own_batches
from kivi.cluster.founding import adopt
from kivi.delta.derive import derive_all
from kivi.embedded.database import Database
from kivi.encoding.shards import shards_of_events
from kivi.log.members import Member, Members, State, truncation
from kivi.log.shards import EVERY, SHARDS, parse_shards, refined, shown_shards
from kivi.model.declarations import aggregate_schema, event_table_schema
from kivi.store.facade import Store
from kivi.store.reads import Reads
from kivi.store.shards import Shards
from kivi.store.spanning import Spanning
from tests.cluster.sharded import Moving, Sharded
from tests.cluster.test_operation import Nodes
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.waiting import wait_until

EVENTS = event_table_schema("calls", "ts", {"ts": "timestamp", "user": "string", "us": "int64"}, shard_by=["user"])
SUMS = aggregate_schema("sums", EVENTS, ["user"], {"n": kivi.count(), "us": kivi.sum("us")})


@pytest.mark.parametrize("seed", [1, 4, 12])
def test_what_a_node_holds_is_the_replay_of_the_log_and_it_asks_others_for_the_rest(seed: int) -> None:
    simulation = Sharded(seed)
    simulation.run(400)
    simulation.finish()
    assert simulation.counted["commits"] > 10
    assert simulation.counted["in parts"] > 10
    assert simulation.counted["spanned"] > 10


@pytest.mark.parametrize("seed", [1, 2])
def test_shards_are_moved_at_one_place_of_the_log(seed: int) -> None:
    simulation = Moving(seed)
    simulation.run(260)
    simulation.finish()
    assert simulation.counted["taken"] and simulation.counted["in parts"] > 10


# -- sets ---------------------------------------------------------------------------------------------


def test_sets_of_shards_are_written_as_ranges() -> None:
    for text in ("0-63", "0", "3-5,7,9-63"):
        assert shown_shards(parse_shards(text)) == text
    for wrong in ("", "64", "5-3", "a", "1-", "-1", "0-15;"):
        with pytest.raises(kivi.InvalidArgument, match="no set of shards"):
            parse_shards(wrong)


def test_a_partition_has_every_shard_once_and_tears_no_set_apart() -> None:
    rng = random.Random(1)
    for _ in range(50):
        sets = [rng.getrandbits(64) or 1 for _ in range(rng.randint(0, 4))]
        parts = refined(sets)
        assert sum(parts) == EVERY
        assert all(part & held in (0, part) for part in parts for held in sets)


# -- what the log says of them ------------------------------------------------------------------------

HALF, OTHER = parse_shards("0-31"), parse_shards("32-63")


def live(node: int, held: int, needed: int = 1) -> Member:
    return Member(node, State.LIVE, needed).with_shards(held)


def said(members: Members, one: Member, at_us: int = 0) -> int:
    """What it holds once that is said."""
    members.enter(one.entry(), at_us)
    found = members.find(one.node)
    assert found is not None
    return found.shards


def test_the_last_node_that_holds_a_shard_gives_it_up_to_nobody() -> None:
    members = Members()
    assert said(members, live(1, EVERY)) == EVERY
    assert said(members, live(1, HALF)) == EVERY
    assert said(members, live(2, OTHER)) == OTHER
    assert said(members, live(1, HALF)) == HALF
    assert members.cuts == (HALF, OTHER)
    assert said(members, live(1, EVERY)) == HALF, "it has missed what it gave up"
    members.enter(Member(2, State.EVICTED, 9).entry(), 0)
    assert [one.node for one in members.holders(OTHER)] == [2]


def test_shards_are_asked_of_few_nodes_and_of_such_as_answer() -> None:
    members = Members()
    for node, held in ((1, HALF), (2, OTHER), (3, HALF), (4, EVERY)):
        said(members, live(node, held), 10_000_000 if node == 4 else 13_000_000)
    assert members.owners(EVERY, besides=1, time_us=13_500_000) == [(4, EVERY)]
    assert members.owners(EVERY, besides=1, time_us=15_000_000) == [(2, OTHER), (3, HALF)], "4 is silent"
    assert members.owners(HALF, besides=2, time_us=15_000_000, without=frozenset({3})) == [(1, HALF)]
    assert members.owners(HALF, besides=1, time_us=15_000_000, without=frozenset({3})) == [(4, HALF)]
    with pytest.raises(kivi.Unavailable, match="no other node that was heard lately holds 32-63"):
        members.owners(EVERY, besides=2, time_us=21_000_000)


def test_shards_are_not_given_up_to_a_node_that_may_be_gone() -> None:
    members = Members()
    assert said(members, live(2, EVERY)) == EVERY
    assert said(members, live(1, EVERY), 60_000_000) == EVERY
    assert said(members, live(1, HALF), 60_000_000) == EVERY
    assert said(members, live(2, EVERY), 61_000_000) == EVERY
    assert said(members, live(1, HALF), 62_000_000) == HALF


def test_the_log_is_kept_while_a_shard_has_no_node() -> None:
    members = Members()
    said(members, live(1, HALF, needed=8))
    members.enter(truncation(8), 0)
    assert members.floor == 1
    said(members, live(2, OTHER, needed=8))
    members.enter(truncation(8), 0)
    assert members.floor == 8


# -- pieces -------------------------------------------------------------------------------------------


def made(rng: random.Random, rows: int) -> pa.RecordBatch:
    users = [rng.choice(("", "a", "ab", "\0", "ü", *map(str, range(40)))) for _ in range(rows)]
    columns = {"ts": pa.array(range(rows), pa.timestamp("us", "UTC")), "user": users, "us": range(rows)}
    return pa.RecordBatch.from_pydict(columns, arrow_schema(EVENTS))


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_what_was_cut(seed: int) -> None:
    """Of each node exactly what it holds, in the order of before; of one that holds all, what was there to the bit."""
    rng = random.Random(seed)
    batch = made(rng, rng.choice((1, 63, 64, 500)))
    held = [rng.getrandbits(64) or 1 for _ in range(rng.randint(1, 3))]
    gateway = Shards(cuts=lambda: refined(held))
    events = b"".join(map(bytes, gateway.cut_events(EVENTS, batch) or [encode_ipc(batch)]))
    (run,) = derive_all([SUMS], batch)
    deltas = b"".join(map(bytes, gateway.cut_run(SUMS, run)))
    shards = shards_of_events(EVENTS, batch, SHARDS)
    by_key = {key: (cts, cells) for key, cts, cells in run.items(range(run.rows))}
    for mask in (*held, EVERY, rng.getrandbits(64)):
        node = Shards(held=mask)
        kept = np.flatnonzero([bool(mask >> int(shard) & 1) for shard in shards])
        found, places = node.read_events(EVENTS, events)
        rows = together(found).to_pylist() if found else []
        assert rows == batch.take(pa.array(kept)).to_pylist()
        if places is not None:
            assert places.tolist() == kept.tolist()
        else:
            assert len(kept) == batch.num_rows
        users = {row["user"] for row in rows}
        items = [item for one in node.read_run(SUMS, deltas) for item in one.items(range(one.rows))]
        assert len(items) == len(users)
        assert all(by_key[key] == (cts, cells) for key, cts, cells in items)


def test_an_aggregate_groups_by_the_columns_of_its_shards_first() -> None:
    with pytest.raises(kivi.SchemaError, match="group by these first"):
        aggregate_schema("wrong", EVENTS, ["us", "user"], {"n": kivi.count()})
    with pytest.raises(kivi.SchemaError, match="shard_by= names columns"):
        event_table_schema("wrong", "ts", {"ts": "timestamp"}, shard_by=["ts"])


def test_a_rule_looks_up_no_table_that_a_node_may_not_have() -> None:
    with kivi.open() as db:
        columns = {"ts": "timestamp", "user": "string", "us": "int64"}
        db.create_event_table("calls", event_time="ts", columns=columns, shard_by=["user"])
        db.create_event_table("slow", event_time="ts", columns=columns)
        db.create_aggregate("sums", source="calls", group_by=["user"], measures={"us": kivi.sum("us")})
        with pytest.raises(kivi.SchemaError, match="which may not have its rows"):
            db.create_rule(
                "slow", source="calls", against=kivi.lookup("sums", by=["user"]), into="slow",
                where=kivi.col("us") > kivi.ref("us"),
            )  # fmt: skip


class Mortal:
    """Nodes 1 and 2 have the same; node 1 goes away after some frames."""

    def __init__(self, frames: Callable[[dict[str, Any]], list[bytes]], lives: int) -> None:
        self.frames, self.lives = frames, lives

    def plan(self, shards: int, without: frozenset[int], ts: int) -> list[tuple[int, int]]:
        return [(1 if 1 not in without else 2, shards)]

    def ask(self, node: int, request: bytes) -> Iterator[bytes]:
        for i, frame in enumerate(self.frames(json.loads(request))):
            if node == 1 and i == self.lives:
                raise kivi.Unavailable("gone")
            yield frame


@pytest.mark.parametrize("lives", range(4))
@pytest.mark.parametrize("reverse", [False, True])
def test_another_owner_goes_on_where_one_went_away(lives: int, reverse: bool) -> None:
    with contextlib.closing(Store.open(None)) as store:
        db = Database(store)
        columns = {"ts": "timestamp", "user": "string", "us": "int64"}
        db.create_event_table("calls", event_time="ts", columns=columns, shard_by=["user"])
        db.create_aggregate("sums", source="calls", group_by=["user"], measures={"n": kivi.count()})
        for i in range(4):
            db.append("calls", [{"ts": i, "user": user, "us": i} for user in USERS])
        serve = store.spanning.serve

        def frames(asked: dict[str, Any]) -> list[bytes]:
            """Some rows or events each."""
            batch = together([found for frame in serve(json.dumps(asked).encode()) for found in own_batches(frame)])
            return [bytes(encode_ipc(batch.slice(at, 15))) for at in range(0, batch.num_rows, 15)]

        with db.snapshot() as snap:
            here = [list(snap.scan(name, reverse=reverse)) for name in ("calls", "sums")]
            store.spanning.owners, store.shards.held = Mortal(frames, lives), HALF
            with patch.object(Spanning, "_whole", return_value=None), patch.object(Reads, "check_visible"):
                there = [list(snap.scan(name, reverse=reverse)) for name in ("calls", "sums")]
            store.shards.held = EVERY
        assert there[1] == here[1]
        for at in range(0, len(here[0]), len(USERS)):
            commits = [sorted(map(repr, side[0][at : at + len(USERS)])) for side in (here, there)]
            assert commits[0] == commits[1], "in the order of a commit shards come one after the other"
        assert len(there[0]) == len(here[0])


# -- real nodes ---------------------------------------------------------------------------------------


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as nats, Nodes(tmp_path, nats) as found:
        yield found


USERS = [f"user {i}" for i in range(40)]


def append(db: Any, times: int) -> None:
    """Of each user so many events: some in one commit, some each in a commit of its own."""
    events = [{"ts": i, "user": user, "us": 1} for i in range(times) for user in USERS]
    half = len(events) // 2
    with db.transaction() as tx:
        tx.append("calls", events[:half])
    with db.appender("calls", each=True) as appender:
        for event in events[half:]:
            appender.append(**event)


def counted(one: Any, at_least: int) -> dict[str, int]:
    """By user, whoever holds them: each way of reading says the same."""
    counts = {}
    with Database(one.store).snapshot(min_snapshot=at_least) as snap:
        for user in USERS:
            row = snap.get("sums", (user,))
            events = list(snap.scan("calls", where=kivi.col("user") == user))
            rolled = snap.rollup("sums", prefix=(user,), measures=["us"]).to_arrow().to_pylist()
            asked = snap.query("calls", measures={"n": kivi.count()}, where=kivi.col("user") == user)
            assert row is not None
            assert [row["n"], row["us"]] == [len(events), rolled[0]["us"]]
            assert list(asked) == [{"n": row["n"]}]
            counts[user] = row["n"]
        assert [(row["user"], row["n"]) for row in snap.scan("sums")] == sorted(counts.items())
        assert [row["user"] for row in snap.scan("sums", reverse=True, limit=3)] == sorted(USERS)[:-4:-1]
        assert list(snap.query("calls", measures={"n": kivi.count()})) == [{"n": sum(counts.values())}]
        assert snap.sql("SELECT count(*) AS n FROM calls").to_pylist() == [{"n": sum(counts.values())}]
        assert Counter(snap.to_arrow("calls")["user"].to_pylist()) == counts
        if one.store.shards.held != EVERY:
            with pytest.raises(kivi.Unavailable, match="may have rows of the shards 0-63"):
                list(snap.changes("calls", since=0))
    return counts


def test_shards_move_between_nodes_that_run(nodes: Nodes, tmp_path: Path) -> None:
    one = nodes.start("one")
    db = Database(one.store)
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "user": "string", "us": "int64"},
                          shard_by=["user"])  # fmt: skip
    db.create_aggregate("sums", source="calls", group_by=["user"], measures={"n": kivi.count(), "us": kivi.sum("us")})
    append(db, 2)
    for name in ("low", "new"):
        db.checkpoint(str(tmp_path / name))
    low, new = nodes.start("low", "0-31"), nodes.start("new", "32-39")
    append(Database(new.store), 1)
    with pytest.raises(kivi.InvalidArgument, match="it would hold all shards"):
        db.move_shards("32-63", "low", source="one")
    with pytest.raises(kivi.InvalidArgument, match="no live node is 'two'"):
        db.move_shards("0", "two")
    with pytest.raises(kivi.InvalidArgument, match="one, low hold some of the shards 0-15: say which one"):
        db.move_shards("0-15", "new")
    db.move_shards("0-15", "new", source="low")
    append(Database(low.store), 1)
    with Database(low.store).snapshot(min_snapshot=one.store.watermark()) as old:
        wait_until(lambda: new.store.shards.held == parse_shards("0-15,32-39"))
        wait_until(lambda: low.status().moves and low.status().moves[0].since)
        append(Database(one.store), 1)
        last = one.store.watermark()
        for who in (new, low, one):
            assert counted(who, last) == dict.fromkeys(USERS, 5)
        assert [row["n"] for row in old.scan("sums", limit=5)] == [4] * 5
        assert low.store.shards.held == HALF, "somebody reads there at a snapshot that the new owner has not"
        assert low.status().moves
    wait_until(lambda: not low.status().moves and low.store.shards.held == parse_shards("16-31"))
    append(Database(low.store), 1)
    nodes.stop("new")
    new = nodes.start("new")
    new.store.consolidate()
    append(Database(new.store), 1)
    last = new.store.watermark()
    for who in (new, low, one):
        assert counted(who, last) == dict.fromkeys(USERS, 7)
    assert new.store.shards.held == parse_shards("0-15,32-39")
    back = db.move_shards(
        "0-15", "low", source="new"
    )  # what it has of these from before is not taken for what there is
    wait_until(
        lambda: all(move.id != back for move in one.status().moves) and new.store.shards.held == parse_shards("32-39")
    )
    append(Database(low.store), 1)
    last = low.store.watermark()
    for who in (new, low, one):
        assert counted(who, last) == dict.fromkeys(USERS, 8)


def test_shards_move_with_copies(nodes: Nodes, tmp_path: Path) -> None:
    one = nodes.start("one")
    db = Database(one.store)
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "user": "string", "us": "int64"},
                          shard_by=["user"])  # fmt: skip
    db.create_aggregate("sums", source="calls", group_by=["user"], measures={"n": kivi.count(), "us": kivi.sum("us")})
    append(db, 2)
    nodes.stop("one")
    with pytest.raises(kivi.InvalidArgument, match="no other node that was heard lately holds the shards 0-31"):
        nodes.start("one", "32-63")
    one = nodes.start("one")
    db = Database(one.store)
    db.checkpoint(str(tmp_path / "low"))
    append(db, 1)
    low = nodes.start("low", "0-31")
    append(Database(low.store), 1)
    nodes.stop("one")
    one = nodes.start("one", "32-63")
    append(Database(low.store), 1)
    append(Database(one.store), 1)
    last = one.store.watermark()
    for who in (low, one):
        assert counted(who, last) == dict.fromkeys(USERS, 6)
        who.store.consolidate()
        assert counted(who, last) == dict.fromkeys(USERS, 6)
    wait_until(lambda: [one for _, one in low.status().shards()] != [])
    assert [(held, [n.address for n in who]) for held, who in low.status().shards()] == [
        ("0-31", ["low"]),
        ("32-63", ["one"]),
    ]
    assert any("only node low holds the shards 0-31" in said for said in low.status().problems())
    Database(low.store).checkpoint(str(tmp_path / "copy"))
    with pytest.raises(kivi.NotAStore, match="holds the shards 0-31 alone"):
        kivi.open(tmp_path / "copy")
    with pytest.raises(kivi.InvalidArgument, match="holds the shards 0-31 alone"):
        adopt(str(tmp_path / "copy"), "other")
    with pytest.raises(kivi.InvalidArgument, match="not 32-40: begin with a copy"):
        nodes.start("copy", "0-40")
    copy = nodes.start("copy", "0-15")
    assert counted(copy, last) == dict.fromkeys(USERS, 6)
    with pytest.raises(kivi.Unavailable, match="ask for values of user"):
        Database(copy.store).create_aggregate("more", source="calls", group_by=["user"], measures={"n": kivi.count()})
    with pytest.raises(kivi.Unavailable, match="this node holds 0-15"):
        next(iter(Database(copy.store).subscribe("calls")))
