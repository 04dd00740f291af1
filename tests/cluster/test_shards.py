"""Nodes that hold a part of the shards: simulated, as sets and pieces by themselves, and on a real nats-server."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest

import kivi
from kivi.arrow.columns import arrow_schema
from kivi.arrow.dictionaries import together
from kivi.arrow.ipc import encode_ipc, own_batches
from kivi.cli.cluster import shards
from kivi.cli.commands import parser
from kivi.cluster import ClusterNode
from kivi.cluster.asking import Asking
from kivi.cluster.founding import adopt
from kivi.cluster.moving import node_named
from kivi.delta.derive import derive_all
from kivi.embedded.database import Database, Snapshot
from kivi.encoding.event_names import POSITION, STAMP
from kivi.encoding.shards import shard_of, shards_of_events
from kivi.errors import PermissionDenied
from kivi.log.features import FEATURES, NO_SHARDS
from kivi.log.frames import Frame, decode_message
from kivi.log.members import Member, Members, State, truncation
from kivi.log.moves import Move, asked_entry
from kivi.log.replicated import ReplicatedLog
from kivi.log.shards import EVERY, SHARDS, parse_shards, refined, shown_shards
from kivi.model.declarations import aggregate_schema, event_table_schema
from kivi.model.tenants import Tenant
from kivi.runtime.settings import Settings
from kivi.store.backfill import Backfill
from kivi.store.facade import Store
from kivi.store.moving import erase
from kivi.store.reads import Reads
from kivi.store.shards import Shards
from kivi.store.spanning import Spanning
from tests.cluster.sharded import Altering, Moving, Sharded
from tests.cluster.simulation import VALUES, Node, Others
from tests.cluster.test_operation import Nodes
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.seeds import stories
from tests.waiting import wait_until

EVENTS = event_table_schema("calls", "ts", {"ts": "timestamp", "user": "string", "us": "int64"}, shard_by=["user"])
SUMS = aggregate_schema("sums", EVENTS, ["user"], {"n": kivi.count(), "us": kivi.sum("us")})


def told_by_shard(node: Node, shard: int, ts: int, *, reverse: bool) -> list[dict[str, Any]]:
    """Events of a shard as a node tells them to one that puts them together with those of others."""
    assert node.store is not None
    request = {
        "table": "e", "id": node.store.table("e").id, "ts": ts, "shards": str(shard), "after": 0, "times": [None, None],
        "where": None, "reverse": reverse, "columns": ["a", "s", "x"], "by_shard": True,
    }  # fmt: skip
    frames = node.store.spanning.serve(json.dumps(request).encode())
    return [row for frame in frames for batch in own_batches(frame) for row in batch.to_pylist()]


def stamps(node: Node, ts: int, upto: int | None) -> list[int]:
    """The commits of all events, of whomever, that a node sees at ``ts``; those at or below ``upto`` only."""
    assert node.store is not None
    store, names = node.store, [STAMP, POSITION]
    with store.snapshots.opened(as_of_ts=ts) as lease:
        captured = store.reads.captured(lease, store.table("e", lease), asked=EVERY, upto=upto)
        with captured.view as view:
            recent = list(captured.in_memory((None, None), None, ["x", *names]))
            return sorted(
                stamp
                for batch in itertools.chain(view.scan(columns=["x"], naming=names), recent)
                for stamp in batch.column(STAMP).to_pylist()
            )


@functools.cache
def sharded(seed: int) -> Sharded:
    """A history that has come to its end, of which more than one test asks."""
    simulation = Sharded(seed)
    simulation.run(400)
    simulation.finish()
    simulation.calm = True
    return simulation


@pytest.mark.parametrize("seed", [4, *stories(1, 12)])
def test_what_a_node_holds_is_the_replay_of_the_log_and_it_asks_others_for_the_rest(seed: int) -> None:
    simulation = sharded(seed)
    assert simulation.counted["commits"] > 10
    assert simulation.counted["in parts"] > 10
    assert simulation.counted["spanned"] > 10 and simulation.counted["raised, of several"]
    ts = min(node.db.watermark() for node in simulation.nodes)
    for a, reverse in itertools.product(VALUES, (False, True)):  # so another one can go on where an owner went away
        shard = shard_of(simulation.nodes[0].store.table("e"), (a,), SHARDS)  # type: ignore[union-attr]
        owners = [node for node in simulation.nodes if node.holds(a, ts)]
        first, *others = [told_by_shard(node, shard, ts, reverse=reverse) for node in owners]
        assert first and all(other == first for other in others)
        assert first == sorted(first, key=itemgetter("\0cts", "\0position"), reverse=reverse)
    every = stamps(simulation.nodes[0], ts, None)
    for node in simulation.nodes:  # what a backfill sums up: others tell what the snapshot sees
        for upto in every[:: len(every) // 5]:
            assert stamps(node, ts, upto) == [stamp for stamp in every if stamp <= upto]
    assert any(node.store.shards.is_partial(node.store.table("e")) for node in simulation.nodes if node.store)


@pytest.mark.story
@pytest.mark.parametrize("seed", [4, 10])
def test_measures_are_added_by_nodes_that_hold_a_part(seed: int) -> None:
    """While others write, shards are moved, and nodes die over it: whoever reads them finds the replay of the log."""
    simulation = Altering(seed)
    simulation.run(130)
    simulation.finish()
    assert simulation.counted["altered, of several"] and simulation.counted["added, read, of several"] > 5


@pytest.mark.parametrize("seed", [4, *stories(1)])
def test_a_tenant_is_told_of_its_own_rows_wherever_they_lie(seed: int) -> None:
    """By each node, and what it asks of others is narrowed before they are asked."""
    simulation = sharded(seed)
    asked: list[dict[str, Any]] = []
    ask = Others.ask

    def noted(self: Others, node: int, request: bytes) -> Iterator[bytes]:
        asked.append(json.loads(request))
        return ask(self, node, request)

    assert any(node.held != EVERY for node in simulation.nodes)
    cases = [
        ("s", "b", "e"),
        ("a", "1", "e"),
        ("a", "1", "agg"),
        ("a", "1", "shares"),
    ]  # the first is of several shards
    for node, (column, text, table) in itertools.product(simulation.nodes, cases):
        assert node.store is not None
        with node.db.snapshot() as everything:
            every = node.scan(everything, table)
            keys = [everything.get("agg", (a,)) for a in VALUES]
        mine = [row for row in every if str(row[column]) == text]
        assert len(mine) < len(every)
        with (
            patch.object(Others, "ask", noted),
            contextlib.closing(Snapshot(node.db, node.store.begin(tenant=Tenant(column, text)))) as snap,
        ):
            assert sorted(map(repr, node.scan(snap, table))) == sorted(map(repr, mine))
            if table == "e":
                (counted,) = snap.query("e", measures={"n": kivi.count(), "x": kivi.sum("x")})
                assert counted["n"] == len(mine) and (counted["x"] or 0) == sum(row["x"] for row in mine)
            elif table == "agg":
                found = [snap.get("agg", (a,)) for a in VALUES]
                assert found == [row if str(a) == text else None for a, row in zip(VALUES, keys, strict=True)]
            for unseen in ("t", "nothing"):
                with pytest.raises(PermissionDenied, match="no table that keeps"):
                    list(snap.scan(unseen))
    assert asked and all("keys" in one or one["where"] or one["start"] for one in asked)  # of a key: its range


class Behind(Sharded):
    """Nodes die, come back behind the others, and tell of that; these fold, sweep, and have snapshots and pins open."""

    STEPS = (
        ("pump", 40), ("write", 12), ("append_each", 8), ("many", 2), ("retry", 3), ("snapshot", 5), ("look", 10),
        ("fold", 16), ("pin", 3), ("read_at_pin", 10), ("kill", 2), ("stop", 1), ("narrow", 4), ("live", 8),
        ("truncate", 2),
    )  # fmt: skip


@pytest.mark.parametrize("seed", [6, *stories(3, 10)])
def test_a_node_that_comes_back_behind_takes_nothing_from_snapshots_of_others(seed: int) -> None:
    simulation = Behind(seed)
    simulation.run(300)
    simulation.finish()
    assert simulation.counted["pinned"] > 5 and simulation.counted["kill"] > 1


@pytest.mark.parametrize(("seed", "what"), [(20, "erased"), *stories((6, "taken"))])
def test_shards_are_moved_at_one_place_of_the_log(seed: int, what: str) -> None:
    simulation = Moving(seed)
    simulation.run(195)
    simulation.finish()
    assert simulation.counted["taken"] and simulation.counted[what] and simulation.counted["in parts"] > 10


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


def test_the_tables_of_a_rule_that_are_sharded_are_sharded_alike() -> None:
    columns = {"ts": "timestamp", "user": "string", "route": "string", "us": "int64"}
    with kivi.open() as db:
        for name, shard_by in (("calls", ["user"]), ("slow", ["user"]), ("plain", []), ("routes", ["route"])):
            db.create_event_table(name, event_time="ts", columns=columns, shard_by=shard_by)
        for name, source, by in (("sums", "calls", "user"), ("of_routes", "routes", "route")):
            db.create_aggregate(name, source=source, group_by=[by], measures={"us": kivi.sum("us")})

        def create(source: str, looked: str, by: str, into: str, **select: Any) -> None:
            against = kivi.lookup(looked, by=[by])
            where = kivi.col("us") > kivi.ref("us")
            db.create_rule(source, source=source, against=against, where=where, into=into, select=select)

        for wrong in (
            ("calls", "sums", "route", "slow"),
            ("plain", "sums", "user", "routes"),
            ("plain", "of_routes", "route", "slow"),
            ("calls", "sums", "user", "routes"),
        ):
            with pytest.raises(kivi.SchemaError, match="sharded by the same columns of the event, or not at all"):
                create(*wrong)
        with pytest.raises(kivi.SchemaError, match="'slow' is sharded by user"):
            create("calls", "sums", "user", "slow", user=kivi.col("route"))
        create("calls", "sums", "user", "slow")
        create("routes", "of_routes", "route", "plain")


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
@pytest.mark.parametrize("alone", [False, True])
def test_another_owner_goes_on_where_one_went_away(lives: int, reverse: bool, alone: bool) -> None:
    """``alone``: it was asked for all events, and answers in its own order."""
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
            with contextlib.ExitStack() as patched:
                patched.enter_context(patch.object(Reads, "check_visible"))
                if not alone:
                    patched.enter_context(patch.object(Spanning, "_whole", return_value=None))
                events, order = Spanning.events, list[tuple[int, int]]()

                def named(*asked: Any) -> Iterator[Any]:
                    for batch in events(*asked):
                        order.extend(zip(*(batch[name].to_pylist() for name in (STAMP, POSITION)), strict=True))
                        yield batch

                patched.enter_context(patch.object(Spanning, "events", named))
                there = [list(snap.scan(name, reverse=reverse)) for name in ("calls", "sums")]
                assert order == sorted(set(order), reverse=reverse), "each event has a place of its own"
                few = [row["us"] for row in snap.scan("calls", columns=["us"], reverse=reverse)]
                assert few == [row["us"] for row in there[0]]
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


def test_a_read_does_not_wait_for_a_process_that_is_another_one_by_now(nodes: Nodes, tmp_path: Path) -> None:
    """Who was asked ended before it answered, and was started again before anybody took it for silent."""
    db = Database(nodes.start("one").store)
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "user": "string", "us": "int64"},
                          shard_by=["user"])  # fmt: skip
    db.create_aggregate("sums", source="calls", group_by=["user"], measures={"n": kivi.count()})
    append(db, 1)
    for name in ("two", "part"):
        db.checkpoint(str(tmp_path / name))
    nodes.start("two")
    part, asked, answer = nodes.start("part", "0-31"), list[int](), Asking._answer

    def answer_all_but_the_first(self: Asking, *request: Any) -> None:
        asked.append(self._log.node)
        if len(asked) > 1:
            answer(self, *request)

    def read() -> list[int]:
        with Database(part.store).snapshot() as snap:
            return [len(list(snap.scan(table))) for table in ("calls", "sums")]

    never_silent = patch("kivi.log.members.ANSWERS_S", 3_600.0)
    with patch.object(Asking, "_answer", answer_all_but_the_first), never_silent, ThreadPoolExecutor() as threads:
        found = threads.submit(read)
        wait_until(lambda: bool(asked))
        (name,) = (name for name, node in nodes.open.items() if node.log.node == asked[0])
        nodes.stop(name)
        nodes.start(name)
        assert found.result(60) == [len(USERS)] * 2


def test_a_node_answers_others_when_it_has_applied_what_there_was_at_its_start(nodes: Nodes, tmp_path: Path) -> None:
    """Before that its log is at an earlier time, in which pins have not ended yet whose versions it has swept."""
    one = nodes.start("one")
    make_sums(Database(one.store))
    append(Database(one.store), 1)
    Database(one.store).checkpoint(str(tmp_path / "low"))
    low = nodes.start("low", "0-31")
    nodes.stop("one")
    pump, is_there, may_come = ReplicatedLog.pump, threading.Event(), threading.Event()

    def when_it_may(log: ReplicatedLog, *count: int) -> int:
        if log is not low.log:
            is_there.set()
            may_come.wait(60)
        return pump(log, *count)

    def read() -> list[int]:
        with Database(low.store).snapshot() as snap:
            return [len(list(snap.scan(table))) for table in ("calls", "sums")]

    never_silent = patch("kivi.log.members.ANSWERS_S", 3_600.0)
    with patch.object(ReplicatedLog, "pump", when_it_may), never_silent, ThreadPoolExecutor() as threads:
        starting = threads.submit(nodes.start, "one")
        assert is_there.wait(60)
        found = threads.submit(read)
        assert not wait([found], 2.0).done
        may_come.set()
        assert starting.result(60).id and found.result(60) == [len(USERS)] * 2


def make_sums(db: Any) -> None:
    """A table of events that is sharded by user, and their sums."""
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "user": "string", "us": "int64"},
                          shard_by=["user"])  # fmt: skip
    db.create_aggregate("sums", source="calls", group_by=["user"], measures={"n": kivi.count(), "us": kivi.sum("us")})


@pytest.mark.story
def test_shards_move_between_nodes_that_run(nodes: Nodes, tmp_path: Path) -> None:
    one = nodes.start("one")
    db = Database(one.store)
    make_sums(db)
    append(db, 2)
    for name in ("low", "new"):
        db.checkpoint(str(tmp_path / name))
    low, new = nodes.start("low", "0-31"), nodes.start("new", "32-39")
    append(Database(new.store), 1)
    with pytest.raises(kivi.InvalidArgument, match="it would hold all shards"):
        db.move_shards("32-63", "low", source="one")
    with pytest.raises(kivi.InvalidArgument, match="no node is 'two'"):
        db.move_shards("0", "two")
    with pytest.raises(kivi.InvalidArgument, match="one, low hold some of the shards 0-15: say which one"):
        db.move_shards("0-15", "new")
    append(Database(low.store), 1)
    with Database(low.store).snapshot(min_snapshot=one.store.watermark()) as old:
        append(Database(one.store), 1)  # so whatever the new owner copies at is above that snapshot
        db.move_shards("0-15", "new", source="low")
        wait_until(lambda: new.store.shards.held == parse_shards("0-15,32-39"))
        wait_until(lambda: low.status().moves and low.status().moves[0].since)
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


SLOT_US = 60_000_000


def test_r25_rules_measure_events_against_rows_that_lie_on_other_nodes(nodes: Nodes, tmp_path: Path) -> None:
    """No node has all of the tables; a brute force says what is raised, and each commit follows the one before."""
    columns = {"ts": "timestamp", "user": "string", "us": "int64"}
    users = [f"user {i}" for i in range(200)]  # so many that the rows of a node's own are followed
    db = Database(nodes.start("one").store)
    for name in ("calls", "slow"):
        db.create_event_table(name, event_time="ts", columns=columns, shard_by=["user"])
    db.create_aggregate("mean", source="calls", group_by=["user", kivi.time_slot("ts", "1m")],
                        measures={"mean_us": kivi.avg("us")})  # fmt: skip
    db.create_aggregate("slows", source="slow", group_by=["user"], measures={"n": kivi.count(), "us": kivi.sum("us")})
    db.create_rule("slow", source="calls", against=kivi.previous_slot("mean", by=["user"]), into="slow",
                   where=kivi.col("us") > 2 * kivi.ref("mean_us"))  # fmt: skip
    for name in ("low", "high"):
        db.checkpoint(str(tmp_path / name))
    low, high = nodes.start("low", "0-31"), nodes.start("high", "32-63")
    low.committer.newest(30.0)  # it has heard of the other one
    nodes.stop("one")
    rng, before, raised = random.Random(3), dict[str, list[int]](), list[tuple[int, str, int]]()

    def take(who: ClusterNode, slot: int, *, each: bool) -> None:
        nonlocal before
        now: dict[str, list[int]] = {}
        events = [(slot * SLOT_US + i, user, rng.randint(1, 100)) for i, user in enumerate(users * 3)]
        for ts, user, us in events:
            now.setdefault(user, []).append(us)
            if user in before and us > 2 * sum(before[user]) / len(before[user]):
                raised.append((ts, user, us))
        before = now
        rows = [dict(zip(columns, event, strict=True)) for event in events]
        one = Database(who.store)
        with one.snapshot(min_snapshot=max(low.store.watermark(), high.store.watermark())):
            pass  # what the slot before has is what it is measured against
        if each:
            with one.appender("calls", each=True) as appender:
                for row in rows:
                    appender.append(**row)
        else:
            one.append("calls", rows)

    def check() -> None:
        last = max(low.store.watermark(), high.store.watermark())
        for who in (low, high):
            with Database(who.store).snapshot(min_snapshot=last) as snap:
                found = [(ts_of(row), row["user"], row["us"]) for row in snap.scan("slow")]
                assert sorted(found) == sorted(raised)
                sums = {row["user"]: (row["n"], row["us"]) for row in snap.scan("slows")}
                mine = {user: [us for _, of, us in raised if of == user] for user in {user for _, user, _ in raised}}
                assert sums == {user: (len(us), sum(us)) for user, us in mine.items()}

    for slot, (who, each) in enumerate([(low, False), (high, False), (low, True), (high, True), (low, False)]):
        take(who, slot, each=each)
    check()
    assert len(raised) > 20
    nodes.stop("low")
    low = nodes.start("low")
    low.store.consolidate()
    check()
    Database(low.store).move_shards("0-15", "high", source="low")
    wait_until(lambda: not low.status().moves and low.store.shards.held == parse_shards("16-31"))
    for slot, (who, each) in enumerate([(high, False), (low, False), (high, True)], 5):
        take(who, slot, each=each)
    check()
    nodes.stop("low")
    with pytest.raises(kivi.Unavailable, match="no other node"):
        Database(high.store).append("calls", [{"ts": 0, "user": user, "us": 1} for user in users])


def ts_of(row: dict[str, Any]) -> int:
    return row["ts"] if isinstance(row["ts"], int) else int(row["ts"].timestamp() * 1_000_000)


def make(db: Any) -> None:
    make_sums(db)


def downgraded(one: ClusterNode) -> None:
    """From now on it says that it is of a version that knows no nodes without shards."""
    one.log.features = frozenset(one.log.features) - {NO_SHARDS}
    wait_until(lambda: NO_SHARDS not in one.log.members.find(one.id).features)  # type: ignore[union-attr]


def heartbeats(one: ClusterNode) -> list[dict[str, Any]]:
    """What nodes have said of themselves in all of the log."""
    first, last = one.stream.bounds()
    found = []
    for message in one.stream.fetch(first, last, 2):
        frame = decode_message(message.data)
        for entry in frame.entries if isinstance(frame, Frame) else ():
            if entry.kind.is_about_nodes and isinstance(content := json.loads(bytes(entry.body[0])), list):
                found.append(content[3])
    return found


def test_what_an_older_node_cannot_build_another_one_takes_up(nodes: Nodes, tmp_path: Path) -> None:
    """In an upgrade in turn, while each node holds a part; the older one would be the first by its number."""
    one = nodes.start("one")
    db = Database(one.store)
    make(db)
    append(db, 2)
    db.checkpoint(str(tmp_path / "low"))
    low = nodes.start("low", "0-31")
    nodes.stop("one")
    older, newer = sorted((low, nodes.start("one", "32-63")), key=lambda each: each.id)
    says = older.live

    def said(held: int | None = None) -> Member:
        member = says(held)
        return dataclasses.replace(member, about={k: v for k, v in member.about.items() if k != "building"})

    with patch.object(older, "live", said), patch.object(older, "_take_up", lambda: None):
        wait_until(lambda: len(newer.status().shards()) == 2)
        wait_until(lambda: "building" not in newer.log.members.find(older.id).about)  # type: ignore[union-attr]
        with patch.object(Backfill, "build", lambda self, schemas, progress: schemas):  # its node dies here
            Database(newer.store).create_aggregate(
                "more", source="calls", group_by=["user"], measures={"n": kivi.count()}
            )
        with patch("kivi.cluster.node._UNCLAIMED_S", 0.5):
            wait_until(lambda: not newer.store.table("more").is_building)
    with Database(newer.store).snapshot() as snap:
        assert [row["n"] for row in snap.scan("more")] == [2] * len(USERS)


def test_a_node_without_shards_says_nothing_before_every_other_one_can_read_it(nodes: Nodes, tmp_path: Path) -> None:
    one = nodes.start("one")
    make(Database(one.store))
    downgraded(one)
    Database(one.store).checkpoint(str(tmp_path / "new"))
    wait_for_it = ClusterNode._catch_up

    def slow(self: ClusterNode, timeout_s: float) -> None:
        wait_for_it(self, timeout_s)
        time.sleep(1.0)  # as a log of some seconds

    with patch.object(ClusterNode, "_catch_up", slow), pytest.raises(kivi.FeatureOff, match="no_shards is off"):
        nodes.start("new", "none")
    assert NO_SHARDS not in one.log.members.on
    told = heartbeats(one)
    assert told and all(about.get("shards") != "none" for about in told)


def test_a_move_that_leaves_a_node_nothing_is_refused_while_some_node_cannot_read_it(
    nodes: Nodes, tmp_path: Path
) -> None:
    one = nodes.start("one")
    db = Database(one.store)
    make(db)
    for name, some in (("low", "0-15"), ("new", "16-31"), ("high", "32-63")):
        db.checkpoint(str(tmp_path / name))
        nodes.start(name, some)
    downgraded(one)
    with pytest.raises(kivi.FeatureOff, match="no_shards is off"):
        db.move_shards("0-15", "new", source="low")
    with pytest.raises(kivi.FeatureOff, match="no_shards is off"):
        db.rebalance_shards(away_from=["low"], keep=["one"])
    assert not one.log.members.moves
    first = db.move_shards("0-7", "new", source="low")
    with pytest.raises(kivi.FeatureOff, match="no_shards is off"):
        db.move_shards("8-15", "new", source="low")
    wait_until(lambda: first not in one.log.members.moves)


def test_what_keeps_a_node_from_giving_shards_up_is_said_and_nothing_else_waits_for_it(
    nodes: Nodes, tmp_path: Path
) -> None:
    one = nodes.start("one")
    db = Database(one.store)
    make(db)
    append(db, 1)
    for name in ("low", "new"):
        db.checkpoint(str(tmp_path / name))
    low, new = nodes.start("low", "0-15"), nodes.start("new", "16-31")
    downgraded(one)
    one.committer.newest(30.0, [asked_entry(Move("all", parse_shards("0-15"), new.id, low.id))])  # as in two at once
    wait_until(lambda: any(move.since for move in low.log.members.moves.values()))
    wait_until(
        lambda: any("are not given up by node" in said and "no_shards" in said for said in one.status().problems())
    )
    with patch.object(low.verifying, "look") as look:
        wait_until(lambda: look.call_count)
    one.log.features = FEATURES
    wait_until(lambda: not one.log.members.moves)
    wait_until(lambda: not low.store.shards.held)
    assert not any("given up" in said for said in one.status().problems())


def test_who_was_told_what_to_hold_keeps_what_moves_have_made_of_it(nodes: Nodes, tmp_path: Path) -> None:
    """A service starts a node with the same words each time."""
    one = nodes.start("one")
    db = Database(one.store)
    make(db)
    for name, some in (("low", "0-31"), ("high", "32-63")):
        db.checkpoint(str(tmp_path / name))
        nodes.start(name, some)
    db.move_shards("0-7", "high", source="low")
    wait_until(lambda: not one.log.members.moves)
    db.move_shards("40", "low", copy=True)
    wait_until(lambda: not one.log.members.moves)
    expected = {"one": "0-63", "low": "8-31,40", "high": "0-7,32-63"}
    for name, told in (("low", "0-31"), ("high", "32-63")):
        nodes.stop(name)
        nodes.start(name, told)
        wait_until(lambda: held(one) == expected)
    nodes.stop("high")
    nodes.start("high", "0-7")  # other words are an order
    wait_until(lambda: held(one) == {**expected, "high": "0-7"})


def test_the_last_holder_of_shards_is_not_forgotten_in_part(nodes: Nodes, tmp_path: Path) -> None:
    """Its server of the log keeps its vote, too."""
    one = nodes.start("one")
    make(Database(one.store))
    Database(one.store).checkpoint(str(tmp_path / "low"))
    low = nodes.start("low", "0-31")
    low.about["server"] = "low:7430"
    nodes.stop("one")
    one = nodes.start("one", "32-63")
    wait_until(lambda: one.log.members.find(low.id).about.get("server"))  # type: ignore[union-attr]
    nodes.stop("low")
    one._own_server = SimpleNamespace(name="one:7430", problem="", restarts=0)  # type: ignore[assignment]
    silent = patch.object(ReplicatedLog, "is_heard", lambda *of, **named: False)
    with silent, patch.object(one, "_remove_server") as remove, pytest.raises(kivi.InvalidArgument, match="0-31"):
        one.forget("low")
    assert not remove.called
    assert one.log.members.find(low.id).state is State.LIVE  # type: ignore[union-attr]


def test_nodes_of_one_address_are_told_apart_by_number() -> None:
    both = [Member(number, State.LIVE, 1, {"address": "a:7420"}) for number in (0xAB, 0xCD)]
    with pytest.raises(kivi.InvalidArgument, match=r"several nodes have the address 'a:7420'.* ab, cd"):
        node_named(both, "a:7420")
    assert node_named(both, "cd") is both[1]


def test_a_copy_that_is_on_its_way_has_applied_nothing_else(nodes: Nodes, tmp_path: Path) -> None:
    one = nodes.start("one")
    Database(one.store).checkpoint(str(tmp_path / "copy"))
    (copy,) = [found for found in one.status().nodes if found.state is State.JOINING]
    assert copy.agrees is None
    assert not any("something else" in said for said in one.status().problems())


def _at_pin(one: ClusterNode, name: bytes) -> int:
    with one.committer.entry_lock:
        lease = one.committer.pins.find(name)
    [row] = Snapshot(Database(one.store), lease).query("calls", measures={"n": kivi.count()})
    return int(row["n"])


def test_a_pin_sees_what_was_forgotten_since_though_shards_move(nodes: Nodes, tmp_path: Path) -> None:
    """The new owner's blocks would not have it, so it takes nothing until nobody may ask for it."""
    hour, one = 3_600_000_000, nodes.start("one")
    db = Database(one.store)
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "user": "string", "us": "int64"},
                          shard_by=["user"], retention="1h")  # fmt: skip

    def append_at(ts: int) -> None:
        db.append("calls", [{"ts": ts + i, "user": f"user {i}", "us": i} for i in range(200)])

    append_at(hour)
    for name in ("low", "new"):
        db.checkpoint(str(tmp_path / name))
    every = one, _, new = one, nodes.start("low", "0-31"), nodes.start("new", "32-39")
    pin, number = one.committer.pin(600.0, 30.0)
    for each in every:
        wait_until(lambda each=each: each.store.watermark() >= number)  # type: ignore[misc]
    append_at(10 * hour)

    def is_forgotten() -> bool:
        one.store.consolidate()
        one.store.housekeeping.move_floors()
        [row] = db.snapshot().query("calls", measures={"n": kivi.count()})
        return bool(row["n"] == 200)

    wait_until(is_forgotten, pause_s=0.1)
    last = one.store.watermark()
    for each in every:
        wait_until(lambda each=each: each.store.watermark() >= last)  # type: ignore[misc]
        assert _at_pin(each, pin) == 200
    move = db.move_shards("0-15", "new", source="low")
    wait_until(lambda: any("were forgotten: it is tried again" in each.problem for each in one.status().moves))
    for each in every:
        assert _at_pin(each, pin) == 200
    one.committer.prolong(pin, 0)
    wait_until(lambda: all(each.id != move for each in one.status().moves))
    assert new.store.shards.held == parse_shards("0-15,32-39")
    for each in every:
        [row] = Database(each.store).snapshot().query("calls", measures={"n": kivi.count()})
        assert row["n"] == 200


@pytest.mark.parametrize("place", ["memory", "blocks"])
def test_a_new_owner_has_all_commits_behind_the_newest_with_something_forgotten(
    nodes: Nodes, tmp_path: Path, place: str
) -> None:
    """So whoever follows the table misses nothing, and is refused only what is not there; ``place``: where the owner
    has what is forgotten, and has not dropped it, as it lies among what is not."""
    hour, one = 3_600_000_000, nodes.start("one")
    db = Database(one.store)
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "user": "string", "us": "int64"},
                          shard_by=["user"], retention="1h")  # fmt: skip
    for name in ("low", "new"):
        db.checkpoint(str(tmp_path / name))
    every = one, owner, taker = one, nodes.start("low", "0-31"), nodes.start("new", "none")

    def append_at(*hours: int) -> int:
        return db.append(
            "calls", [{"ts": hour * at + i, "user": f"user {i}", "us": i} for i in range(200) for at in hours]
        )

    def is_forgotten() -> bool:
        one.store.consolidate()
        one.store.housekeeping.move_floors()
        return len(list(db.snapshot().scan("calls"))) == 800

    def changes(at: ClusterNode, since: int) -> list[tuple[int, str]]:
        found = (
            Database(at.store).snapshot(min_snapshot=last).changes("calls", since=since, shards=parse_shards("0-15"))
        )
        return sorted((change["_commit_ts"], change["user"]) for change in found)

    with owner.store.consolidator.paused() if place == "memory" else contextlib.nullcontext():
        append_at(1)
        hidden = append_at(2, 10)
        last = [append_at(10) for _ in range(3)][-1]
        wait_until(is_forgotten, pause_s=0.1)
        last = one.store.watermark()
        for each in every:
            wait_until(lambda each=each: each.store.watermark() >= last)  # type: ignore[misc]
        move = db.move_shards("0-15", "new", source="low")
        wait_until(lambda: all(each.since for each in one.status().moves if each.id == move))
        wait_until(lambda: taker.store.shards.held == parse_shards("0-15"))
    assert changes(taker, hidden) == changes(one, hidden)
    assert len(changes(taker, hidden)) > 100
    with pytest.raises(kivi.SnapshotTooOld, match=f"all of those committed after {hidden} are still there"):
        changes(taker, hidden - 1)


def held(one: Any) -> dict[str, str]:
    """By address, as a node has heard of it."""
    return {member.address: member.shards for member in one.status().nodes if member.state is State.LIVE}


@pytest.mark.story
def test_a_fourth_node_begins_with_nothing_and_takes_its_part(nodes: Nodes, tmp_path: Path) -> None:
    one = nodes.start("one")
    db = Database(one.store)
    make_sums(db)
    append(db, 2)
    with pytest.raises(kivi.InvalidArgument, match="2 copies of each shard need as many nodes, and there are 0"):
        db.rebalance_shards(copies=2)
    for name in ("low", "high", "new"):
        db.checkpoint(str(tmp_path / name))
    low, high, new = (nodes.start(*how) for how in (("low", "0-31"), ("high", "32-63"), ("new", "none")))
    all_of_them = {"one": "0-63", "low": "0-31", "high": "32-63", "new": "none"}
    wait_until(lambda: all(held(node) == all_of_them for node in (one, low, high)))
    everything = dict.fromkeys(USERS, 2)
    assert counted(new, one.store.watermark()) == everything, "it asks the others for all of it"
    planned = Database(low.store).rebalance_shards(dry_run=True)
    assert sum(parse_shards(move["shards"]).bit_count() for move in planned) == 21
    assert {(move["move"], move["to"], move["source"]) for move in planned} == {("", "new", "low"), ("", "new", "high")}
    assert not one.status().moves
    ordered = Database(low.store).rebalance_shards()
    assert [{**move, "move": ""} for move in ordered] == planned and all(move["move"] for move in ordered)
    assert Database(high.store).rebalance_shards() == [], "what is on its way is taken for done"
    append(Database(new.store), 1)
    one.committer.newest(30.0)  # it has heard of the moves
    wait_until(lambda: not one.status().moves)
    append(Database(high.store), 1)
    loads = sorted(parse_shards(shards).bit_count() for name, shards in held(one).items() if name != "one")
    assert loads == [21, 21, 22]
    last = high.store.watermark()
    for who in (new, low, high, one):
        assert counted(who, last) == dict.fromkeys(USERS, 4)
    words = ["cluster", "shards", "rebalance", "--away-from", "low", "--wait"]
    assert shards(db, parser().parse_args([*words, "--dry-run"])) == 0
    assert held(one)["low"] != "none"
    assert shards(db, parser().parse_args(words)) == 0
    assert held(one)["low"] == "none" and not one.status().moves
    nodes.stop("low")
    low = nodes.start("low")
    append(Database(low.store), 1)
    last = low.store.watermark()
    for who in (new, low, high, one):
        assert counted(who, last) == dict.fromkeys(USERS, 5)


@pytest.mark.story
def test_nodes_that_hold_all_shards_give_some_up_in_turn(nodes: Nodes, tmp_path: Path) -> None:
    one = nodes.start("one")
    db = Database(one.store)
    make_sums(db)
    append(db, 2)
    others = ("two", "three", "four")
    for name in others:
        db.checkpoint(str(tmp_path / name))
    for name in others:
        nodes.start(name)
    with pytest.raises(kivi.InvalidArgument, match="all nodes hold all shards: say which of them go on"):
        db.rebalance_shards(copies=1)
    with pytest.raises(kivi.InvalidArgument, match="no node is 'five'"):
        db.rebalance_shards(copies=1, keep=["five"])
    with pytest.raises(kivi.InvalidArgument, match="4 copies of each shard need as many nodes, and there are 3"):
        db.rebalance_shards(copies=4, keep=["one"])
    rounds = 0
    while moves := db.rebalance_shards(copies=1, keep=["one"]):
        rounds += 1
        assert any(move["move"] for move in moves)
        wait_until(lambda: not one.status().moves)
    assert rounds == 2, "each shard is given up by two nodes, one after the other"
    assert sorted(parse_shards(shards).bit_count() for shards in held(one).values()) == [21, 21, 22, 64]
    append(Database(nodes.open["two"].store), 1)
    last = nodes.open["two"].store.watermark()
    for who in nodes.open.values():
        assert counted(who, last) == dict.fromkeys(USERS, 3)


def on_disk(path: Path) -> int:
    """Bytes of tables, and of settled files; what is deleted meanwhile has none."""
    found = 0
    for file in (file for kind in ("*.sst", "*.blob", "*.parquet") for file in path.rglob(kind)):
        with contextlib.suppress(FileNotFoundError):
            found += file.stat().st_size
    return found


@patch("kivi.engine.rocks._GARBAGE_BYTES_MIN", 1 << 16)  # of 64 MiB
def test_what_a_node_gave_up_leaves_its_disk(nodes: Nodes, tmp_path: Path) -> None:
    """Rows, blocks and settled files; meanwhile it takes events, and reads of what it holds are as ever.

    What settles by itself meanwhile is on the disk twice, until as many blocks have gone as are given back at a time.
    """
    nodes.settings = dataclasses.replace(nodes.settings, settle_idle_s=1e6, flush_every_s=1.0)
    one = nodes.start("one")
    db = Database(one.store)
    columns = {"ts": "timestamp", "user": "string", "us": "int64", "pad": "bytes"}
    db.create_event_table("calls", event_time="ts", columns=columns, shard_by=["user"])
    db.create_aggregate("sums", source="calls", group_by=["user", "us"], measures={"n": kivi.count()})
    rng = random.Random(1)
    for i in range(20):
        db.append("calls", [{"ts": j, "user": user, "us": 50 * i + j, "pad": rng.randbytes(150)} for user in USERS
                            for j in range(50)])  # fmt: skip
        if i == 9:
            one.store.settle()
    db.consolidate()
    db.checkpoint(str(tmp_path / "low"))
    least = 20 * 50 * len(USERS) * 150  # of all users, as pads do not get smaller
    assert on_disk(tmp_path / "low") > least
    low = nodes.start("low", "0-31")
    held = [user for user in USERS if HALF >> shard_of(low.store.table("calls"), (user,), SHARDS) & 1]
    append = Database(low.store).append
    append("calls", [{"ts": i, "user": user, "us": i, "pad": b""} for i, user in enumerate(USERS)])

    def left() -> float:
        low.store.consolidate()
        with low.store.consolidator.mutex:
            low.store.consolidator.flush()
        return on_disk(tmp_path / "low") / least

    def is_small_again() -> None:
        share = len(held) / len(USERS)
        wait_until(lambda: left() < share + 0.15, timeout_s=180, reason=left, pause_s=0.5)
        assert left() > share  # `least` is less than what these users alone have for their part

    is_small_again()
    last = low.store.watermark()
    for who in (one, low):
        with Database(who.store).snapshot(min_snapshot=last) as snap:
            assert snap.query("calls", measures={"n": kivi.count()}).to_arrow().to_pylist() == [{"n": 40_040}]
            of_one = kivi.col("user") == held[0]
            assert list(snap.query("calls", measures={"n": kivi.count()}, where=of_one)) == [{"n": 1_001}]
            assert sum(row["n"] for row in snap.scan("sums", prefix=(held[0],))) == 1_001
    nodes.stop("low")
    low = nodes.start("low")
    is_small_again()


def test_what_base_has_above_its_position_stays_where_shards_are_erased() -> None:
    """Full blocks are made before base is folded up to them."""
    with contextlib.closing(Store.open(None, settings=Settings.of({"background": False, "block_rows": 8}))) as store:
        db = Database(store)
        columns = {"ts": "timestamp", "user": "string", "us": "int64"}
        db.create_event_table("calls", event_time="ts", columns=columns, shard_by=["user"])
        schema = store.table("calls")
        for us in range(2):
            db.append("calls", [{"ts": us, "user": user, "us": us} for user in USERS])
            if not us:
                db.consolidate()
        store.consolidator.run_light()
        events = store.event_tables.of(schema.id)
        assert events is not None and events.events_upto > store.consolidator.position
        store.shards.held = HALF
        erase(store, EVERY & ~HALF, check=lambda: None)
        db.append("calls", [{"ts": 2, "user": USERS[0], "us": 2}])
        db.consolidate()
        held = [user for user in USERS if HALF >> shard_of(schema, (user,), SHARDS) & 1]
        assert 0 < len(held) < len(USERS)
        with db.snapshot() as snap:
            for user in held:
                found = [row["us"] for row in snap.scan("calls", where=kivi.col("user") == user)]
                assert found == [0, 1, *([2] if user == USERS[0] else [])]


@pytest.mark.story
def test_shards_move_with_copies(nodes: Nodes, tmp_path: Path) -> None:
    one = nodes.start("one")
    db = Database(one.store)
    make_sums(db)
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
    db = Database(copy.store)
    db.create_aggregate("more", source="calls", group_by=["user"], measures={"n": kivi.count()})
    db.alter_aggregate("more", add_measures={"us": kivi.sum("us"), "newest": kivi.last("us")})
    for who in (low, one, copy):
        with Database(who.store).snapshot(min_snapshot=db.watermark()) as snap:
            found = list(snap.scan("more"))
        assert found == [{"user": user, "n": 6, "us": 6, "newest": 1} for user in sorted(USERS)]
    with pytest.raises(kivi.Unavailable, match="this node holds 0-15"):
        next(iter(Database(copy.store).subscribe("calls")))
