"""Nodes compare what they store, by hashes of it at one timestamp: damage is found, and nothing else is."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.cluster import ClusterNode
from kivi.cluster.founding import adopt
from kivi.cluster.verifying import Compared, compare, why_stop
from kivi.embedded.database import Database
from kivi.encoding.base_rows import RowLayout
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, meta_key, space_prefix, table_prefix
from kivi.engine import WriteBatch
from kivi.engine.rocks import Records, RocksEngine
from kivi.log.features import MOVES
from kivi.log.members import Member, State
from kivi.log.shards import EVERY, shown_shards
from kivi.store.opening import claim_node, content_of, hold_shards, mark, note_differs, note_features
from tests.cluster.sharded import Sharded
from tests.cluster.simulation import Node, Simulation
from tests.cluster.test_operation import Nodes
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.waiting import wait_until

REST = "not sharded"


def damage(node: Node, table: str) -> None:
    """What a base row says is another number now, or the events of a block are gone."""
    assert node.store is not None
    node.store.consolidate()
    schema = node.store.table(table)
    space = Space.EVENT if schema.kind == "event" else Space.ROW
    prefix = table_prefix(space, schema.id) + (b"\x01" if schema.kind == "event" else b"")
    key, value = [*node.engine.scan(prefix, prefix_end(prefix))][-1]
    batch = WriteBatch()
    if schema.kind == "event":
        batch.delete(key)
    else:
        at = 9 + RowLayout.of(schema).null_bytes  # the first column, a number that is never null
        batch.put(key, value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])
    node.engine.write(batch)


@pytest.mark.parametrize(("kind", "table"), [(Simulation, "t"), (Simulation, "agg"), (Simulation, "e"), (Sharded, "t")])
def test_what_was_damaged_at_rest_on_one_node_is_found(kind: type[Simulation], table: str) -> None:
    simulation = kind(1)
    simulation.run(250)
    simulation.finish()
    found = list[Compared]()
    damaged = next(node for node in simulation.nodes if node.held == EVERY)
    damage(damaged, table)
    ts = damaged.db.watermark()
    simulation.told.clear()
    for node in simulation.nodes:
        found = simulation.contents(node, ts)
    differing = [one for one in found if one.state in ("differ", "undecided")]
    assert len(differing) == 1
    one = differing[0]
    assert damaged.id in one.nodes
    assert (one.shards == REST) is (kind is Simulation or table == "t")
    if one.state == "differ":
        assert one.nodes == (damaged.id,)
        assert why_stop(found, damaged.id) is not None
    for node in simulation.nodes:
        assert node is damaged or why_stop(found, node.id) is None


# -- comparing ----------------------------------------------------------------------------------------


def member(node: int, hashes: dict[str, str] | None, held: int = EVERY, ts: int = 7, tables: str = "1") -> Member:
    said: dict[str, Any] = {"ts": ts, "error": "it is damaged"}
    if hashes is not None:
        said = {"ts": ts, "tables": tables, "shards": shown_shards(held), "hashes": hashes}
    return Member(node, State.LIVE, 1, {"content": said}).with_shards(held)


def test_a_node_that_says_otherwise_than_most_stops_and_no_other_one() -> None:
    members = [member(1, {"64": "a"}), member(2, {"64": "b"}), member(3, {"64": "a"})]
    found = compare(members)
    assert found == [Compared("0-63", 7, "agree"), Compared(REST, 7, "differ", (2,))]
    why = why_stop(found, 2)
    assert why is not None
    assert "at commit timestamp 7" in why.message and "not sharded" in why.message
    assert [why_stop(found, node) for node in (1, 3)] == [None, None]


def test_what_cannot_be_read_is_no_hash_that_others_have() -> None:
    found = compare([member(1, {"64": "a"}), member(2, None), member(3, {"64": "a"})])
    assert found == [Compared("0-63", 7, "differ", (2,)), Compared(REST, 7, "differ", (2,))]


def test_where_no_hash_has_a_majority_of_those_that_hold_it_nobody_stops() -> None:
    members = [member(1, {"64": "a"}), member(2, {"64": "b"})]
    found = compare(members)
    assert found == [Compared("0-63", 7, "agree"), Compared(REST, 7, "undecided", (1, 2))]
    assert why_stop(found, 1) is why_stop(found, 2) is None
    silent = [Member(node, State.LIVE, 1) for node in (3, 4)]
    assert Compared(REST, 7, "undecided", (1, 2, 5)) in compare([*members, member(5, {"64": "a"}), *silent])


def test_who_holds_a_shard_alone_agrees_with_nobody_and_older_words_are_not_compared() -> None:
    low, high = (1 << 32) - 1, EVERY & ~((1 << 32) - 1)
    members = [member(1, {"0": "a"}, low), member(2, {"40": "b"}, high), member(3, {"64": "c"}, EVERY, ts=6)]
    assert compare(members) == [Compared("0-63", 7, "waiting"), Compared(REST, 7, "waiting")]
    assert compare(members[:2]) == [Compared("0-63", 7, "alone"), Compared(REST, 7, "agree")]
    gone = Member(3, State.EVICTED, 1, member(3, {"64": "d"}).about)
    assert compare([*members[:2], gone])[1].state == "agree"


def test_tables_that_were_dropped_meanwhile_are_no_difference() -> None:
    members = [member(1, {"64": "a"}), member(2, {"64": "b"}, tables="2"), member(3, {"64": "a"})]
    assert compare(members) == [Compared("0-63", 7, "waiting"), Compared(REST, 7, "waiting")]


def test_what_came_of_a_comparison_is_told_without_hashes_and_a_newer_one_counts() -> None:
    over = Member(1, State.LIVE, 1, {"content": {"at_us": 5, "over": {"ts": 7, "found": [[REST, "agree", []]]}}})
    told = [member(2, {"64": "a"}), Member(3, State.LIVE, 1)]  # which have not heard, or said anything
    assert compare([over, *told]) == compare([over]) == [Compared(REST, 7, "agree")]
    newer = compare([over, member(2, {"64": "a"}, ts=8), Member(3, State.LIVE, 1)])
    assert newer == [Compared("0-63", 8, "waiting"), Compared(REST, 8, "waiting")]


# -- real nodes ---------------------------------------------------------------------------------------


@pytest.mark.story
def test_a_node_whose_base_was_damaged_while_it_was_stopped_stops_and_the_others_go_on(tmp_path: Path) -> None:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as nats, Nodes(tmp_path, nats) as nodes:
        one, two, three = (nodes.start(name) for name in ("one", "two", "three"))
        db = Database(one.store)
        db.create_table("accounts", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        with db.transaction() as tx:
            for i in range(20):
                tx.delta("accounts", (i,), n=i)
        ts = db.verify_cluster()
        wait_until(lambda: _states(one, ts) == {"agree"})
        wait_until(lambda: not any(_hashes(node, said) for node in (one, two, three) for said in (one, two, three)))
        assert [_states(node, ts) for node in (one, two, three)] == [{"agree"}] * 3
        schema = three.store.table("accounts")
        three.store.consolidate()
        nodes.stop("three")
        flip(str(tmp_path / "three"), table_prefix(Space.ROW, schema.id))
        three = nodes.start("three")
        ts = Database(two.store).verify_cluster()
        wait_until(lambda: three.log.failed is not None)
        wait_until(lambda: _states(one, ts) >= {"differ"})  # it may hear of the last hashes after the third one
        with pytest.raises(kivi.Unavailable, match=f"at commit timestamp {ts} is other than that of most nodes"):
            Database(three.store).snapshot()
        assert any("(three) has other content than most nodes" in said for said in one.status().problems())
        for node in (one, two):
            with Database(node.store).transaction() as tx:
                tx.delta("accounts", (1,), n=1)
        nodes.stop("three")
        with pytest.raises(kivi.DataLoss, match="make it anew"):
            nodes.start("three")
        nodes.open.pop("three", None)


def _hashes(node: ClusterNode, other: ClusterNode) -> bool:
    """Whether a node has it that another one's heartbeats carry hashes, or has not heard of what came of them."""
    said = node.log.members.find(other.id)
    return said is None or "over" not in said.about.get("content", {}) or "hashes" in said.about["content"]


def _states(node: ClusterNode, ts: int) -> set[str]:
    return {one.state for one in node.status().content if one.ts == ts}


def flip(path: str, prefix: bytes) -> None:
    """Of the last row below a prefix of keys a bit of its only column."""
    records = Records(meta_key("records"), space_prefix(Space.ROW))
    engine = RocksEngine(os.path.join(path, "engine"), records=records)
    key, value = [*engine.scan(prefix, prefix_end(prefix))][-1]
    batch = WriteBatch()
    batch.put(key, value[:10] + bytes([value[10] ^ 1]) + value[11:])
    engine.write(batch)
    engine.flush()
    engine.close()


def test_a_directory_that_differs_stays_refused_whatever_is_noted_behind_it(tmp_path: Path) -> None:
    path, generation = str(tmp_path / "one"), b"g" * 16
    claim_node(path, "apm", generation)
    (tmp_path / "one" / "engine").mkdir()
    note_differs(path, "it differs from most nodes")
    hold_shards(path, 0xFF, [(7, 0x0F)])  # a copy of shards that ends now
    note_features(path, [MOVES])
    with pytest.raises(kivi.DataLoss, match="it differs from most nodes"):
        claim_node(path, "apm", generation)
    with pytest.raises(kivi.DataLoss, match="it differs from most nodes"):
        adopt(path, "apm", replace=True)
    assert content_of(path)["cluster"] == "apm", "nothing has become of it"


def test_what_is_noted_at_the_same_time_is_all_there(tmp_path: Path) -> None:
    path = str(tmp_path)
    mark(path, b"s" * 16, cluster="apm", node=7)
    notes: list[Callable[[], None]] = [
        lambda: note_differs(path, "it differs"),
        lambda: hold_shards(path, 0xFF, []),
        lambda: note_features(path, [MOVES]),
    ]
    for _ in range(20):
        mark(path, b"s" * 16, cluster="apm", node=7)
        with ThreadPoolExecutor(len(notes)) as pool:
            for done in [pool.submit(note) for note in notes]:
                done.result()
        assert {"differs", "shards", "features"} <= content_of(path).keys()
