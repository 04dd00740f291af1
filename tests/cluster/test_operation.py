"""What becomes of a cluster over time, on a real nats-server: the log is cut, nodes are left behind, it begins anew."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

import kivi
from kivi.cli import main
from kivi.cluster import ClusterNode, node
from kivi.cluster.founding import Founded, adopt
from kivi.cluster.status import ClusterStatus
from kivi.embedded.database import Database
from kivi.log import replicated
from kivi.log.features import FEATURES, LATE_STAGES, WEIGHTED_QUANTILES
from kivi.log.jetstream import delete_stream
from kivi.log.members import State
from kivi.log.replicated import ReplicatedLog
from kivi.runtime.settings import Settings
from kivi.store.backfill import Backfill
from kivi.store.opening import FORMAT, content_of
from kivi.store.view_filling import ViewFilling
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.story

MIB = 1 << 20
LOG_BYTES = 16 * MIB
SETTINGS = Settings.of({"fold_every_s": 0.2})


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsCluster]:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as cluster:
        yield cluster


class Nodes:
    """In this process; each is closed at the end."""

    def __init__(self, path: Path, nats: NatsCluster, log_bytes: int = LOG_BYTES) -> None:
        self.path, self.nats, self.log_bytes = path, nats, log_bytes
        self.open: dict[str, ClusterNode] = {}
        self.timeout_s = 60.0
        self.settings = SETTINGS

    def start(self, name: str, shards: str | None = None) -> ClusterNode:
        found = self.open[name] = ClusterNode(
            str(self.path / name), "apm", self.nats.urls, about={"address": name, "version": "1"},
            settings=self.settings, log_bytes=self.log_bytes, timeout_s=self.timeout_s, shards=shards,
        )  # fmt: skip
        return found

    def stop(self, name: str) -> None:
        self.open.pop(name).close()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *exc: object) -> None:
        for one in self.open.values():
            one.close()


@pytest.fixture
def nodes(tmp_path: Path, nats: NatsCluster) -> Iterator[Nodes]:
    with Nodes(tmp_path, nats) as found:
        yield found


def make(db: Any) -> None:
    db.create_table("blobs", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "data": "bytes"})


def write(db: Any, mebibytes: int, begin: int = 0) -> None:
    """A commit of a mebibyte each."""
    for i in range(begin, begin + mebibytes):
        with db.transaction() as tx:
            tx.put("blobs", (i % 4,), data=bytes([i % 256]) * MIB)
            tx.delta("blobs", (i % 4,), n=1)


def total(one: ClusterNode, at_least: int = 0) -> int:
    with Database(one.store).snapshot(min_snapshot=at_least) as snap:
        return sum(row["n"] for row in snap.scan("blobs"))


def used(one: ClusterNode) -> float:
    """Of the log, as of now."""
    one.stream._bounds_until = 0.0
    one.stream.bounds()
    return one.stream.used


def first_of(one: ClusterNode) -> int:
    found: int = one.stream.info()["state"]["first_seq"]
    return found


def test_a_node_whose_log_server_stands_still_sends_clients_to_others_until_it_answers(
    nodes: Nodes, nats: NatsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = nodes.start("one")
    db = Database(one.store)
    make(db)
    held_up_s = replicated._HELD_UP_S
    monkeypatch.setattr(replicated, "_HELD_UP_S", 1.0)
    time.sleep(1.5)
    wait_until(lambda: not one.log.is_held_up)  # once it has nothing to wait for
    with nats.stopped(0):
        wait_until(lambda: one.log.is_held_up)  # by what it says of itself every second
        asked: list[Callable[[], object]] = [
            lambda: write(db, 1), lambda: one.committer.newest(5.0), lambda: db.outcome("a token")
        ]  # fmt: skip
        for ask in asked:
            with pytest.raises(kivi.Unavailable, match="ask another node") as refused:
                ask()
            assert refused.value.details["stopping"]
    wait_until(lambda: not one.log.is_held_up)
    monkeypatch.setattr(replicated, "_HELD_UP_S", held_up_s)  # a busy machine may take a second for what it writes
    write(db, 1)
    assert total(one) == 1


def test_what_all_nodes_have_leaves_the_log(nodes: Nodes) -> None:
    one, other = nodes.start("one"), nodes.start("other")
    make(Database(one.store))
    with patch.object(node, "_SLACK", 2):
        for begin in range(0, 40, 8):  # two and a half times what the log may have
            write(Database(one.store), 8, begin)
            wait_until(lambda: used(one) < 0.5)
    last = one.store.watermark()
    assert first_of(one) > 1
    assert total(one) == total(other, last) == 40
    nodes.stop("other")
    write(Database(one.store), 2)
    assert total(nodes.start("other")) == 42


def test_whoever_holds_a_full_log_back_is_left_behind(nodes: Nodes, tmp_path: Path) -> None:
    one, other = nodes.start("one"), nodes.start("other")
    make(Database(one.store))
    gone = other.id
    nodes.stop("other")
    with patch.object(node, "_SLACK", 2), patch.object(node, "SILENT_S", 2.0):
        for begin in range(32):
            wait_until(lambda: used(one) < 0.95)
            write(Database(one.store), 1, begin)
        wait_until(lambda: first_of(one) > 8 and used(one) < 0.9)
    member = one.log.members.find(gone)
    assert member is not None and member.state is State.EVICTED
    assert any("was evicted: make it anew" in said for said in one.status().problems())
    with pytest.raises(kivi.KiviError, match="bootstrap it again"):
        nodes.start("other")
    Database(one.store).checkpoint(str(tmp_path / "again"))
    write(Database(one.store), 1)
    assert total(nodes.start("again")) == total(one) == 33


def test_a_full_log_refuses_what_clients_write_and_goes_on_when_it_has_room(nodes: Nodes) -> None:
    with patch.object(node, "_KEPT", 2.0):  # nobody cuts it
        one = nodes.start("one")
        db = Database(one.store)
        make(db)
        with pytest.raises(kivi.DiskFull, match="the log is full: nothing was applied"):
            for i in range(64):
                write(db, 1, i)
                used(one)  # it hears at once
        held = total(one)
        assert 8 <= held < 64
        said = one.log.place.sequence
        wait_until(lambda: one.log.place.sequence > said + 1)  # what nodes say of themselves has room
    with patch.object(node, "_SLACK", 2):
        wait_until(lambda: used(one) < 1)
        write(db, 1)
    assert total(one) == held + 1


def _with_events(db: Any) -> kivi.Database:
    """Events and rows, of which somebody wants an aggregate and a view."""
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "host": "int64", "us": "int64"})
    db.append("calls", [{"ts": 1_000_000 * i, "host": i % 3, "us": i} for i in range(300)])
    db.create_table("people", key={"id": "int64"}, columns={"desk": "int64"})
    with db.transaction() as tx:
        for i in range(100):
            tx.put("people", (i,), desk=1_000 + i)
    return db


def _create(db: Any, what: str) -> None:
    if what == "view":
        db.create_view("built", source="people", key=["desk", "id"])
    elif what == "measure":
        db.alter_aggregate("built", add_measures={"us": kivi.sum("us")})
    else:
        measures = {"us": kivi.sum("us")} if what == "aggregate" else {"n": kivi.count()}
        db.create_aggregate("built", source="calls", group_by=["host"], measures=measures)


def _is_built(db: Any, what: str) -> bool:
    """All or nothing of it can be read."""
    try:
        with db.snapshot() as snap:
            rows = list(snap.scan("built"))
    except kivi.KiviError:
        return False
    if what == "measure" and "us" not in rows[0]:
        return False
    if what == "view":
        assert [row["desk"] for row in rows] == [1_000 + i for i in range(100)]
    else:
        assert {row["host"]: row["us"] for row in rows} == {h: sum(range(h, 300, 3)) for h in range(3)}
    return True


def _append_stage(db: Any, stage: bytes) -> int:
    with db.transaction() as tx:
        tx.append_stages("e", [stage], late="drop")
    return int(tx.commit_ts)


def test_events_that_were_staged_and_came_late_are_left_out_by_every_node(nodes: Nodes) -> None:
    """Tails have them nowhere, and a retraction that names an event by its position removes the same one everywhere.
    Older versions kept them, so nothing is left out before no node is of one."""
    first, second = nodes.start("one"), nodes.start("other")
    one, other = Database(first.store), Database(second.store)
    minute = 60_000_000
    one.create_event_table("e", event_time="ts", retention="1h", columns={"ts": "timestamp", "x": "int64"})
    one.store.retention.set_floor(one.store.table("e"), 40 * minute)
    second.log.features = frozenset(FEATURES) - {LATE_STAGES}
    wait_until(lambda: [node.node for node in first.log.lacking(LATE_STAGES)] == [second.id])
    in_time, stage = (one.stage("e", [{"ts": i * minute, "x": i} for i in some]) for some in ([40], range(60)))
    _append_stage(one, in_time)
    with one.transaction() as tx:
        assert tx.retract("e", where=kivi.col("x") == 40) == 1
    with pytest.raises(kivi.FeatureOff, match="late_stages is off in this cluster; the node other"):
        _append_stage(one, stage)
    second.log.features = FEATURES
    wait_until(lambda: not first.log.lacking(LATE_STAGES))
    since = _append_stage(one, stage) - 1
    assert first.log.members.on == {LATE_STAGES}
    with one.transaction() as tx:
        assert tx.retract("e", where=kivi.col("x") == 50) == 1
    for db in (one, other):
        with db.snapshot(min_snapshot=tx.commit_ts) as snap:
            assert [row["x"] for row in snap.scan("e")] == [i for i in range(40, 60) if i != 50]
            tail = snap.changes("e", since=since, retractions="ignore")
            assert [row["x"] for row in tail] == [i for i in range(40, 60) if i != 50]


WHAT = ("aggregate", "measure", "view")


@pytest.mark.parametrize("what", WHAT)
def test_what_a_node_did_not_live_to_build_another_one_builds(nodes: Nodes, what: str) -> None:
    one, other = Database(nodes.start("one").store), Database(nodes.start("other").store)
    _with_events(one)
    if what == "measure":
        _create(one, "an aggregate without it")
    with patch.object(Backfill, "build", lambda self, schemas, progress: schemas):  # it dies here
        _create(one, what)
    with one.snapshot() as snap, other.snapshot(min_snapshot=snap.ts):
        assert not _is_built(other, what)
    nodes.stop("one")
    with patch.object(node, "SILENT_S", 1.0), patch.object(node, "_UNCLAIMED_S", 0.5):
        wait_until(lambda: _is_built(other, what))
    one = Database(nodes.start("one").store)
    assert _is_built(one, what)
    assert not nodes.open["one"].store.stages.live() and not nodes.open["other"].store.stages.live()


@pytest.mark.parametrize("fails", ["nobody", "who began", "who took it up"])
@pytest.mark.parametrize("what", WHAT)
def test_a_node_that_was_thought_dead_finds_what_it_builds_ready(nodes: Nodes, what: str, fails: str) -> None:
    """Also if its own attempt fails then, since its snapshot is not kept any more; and so does who took it up."""
    first = nodes.start("one")
    one, other = Database(first.store), Database(nodes.start("other").store)
    _with_events(one)
    if what == "measure":
        _create(one, "an aggregate without it")
    reached, go_on, taken_up, fail = (threading.Event() for _ in range(4))

    def stands_still(real: Any) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            took_it_up = threading.current_thread().name == "kivi-backfill"  # on either node
            if self.store is first.store and not took_it_up and not reached.is_set():
                reached.set()
                first.store.backfill.building.clear()  # it says nothing any more
                assert go_on.wait(60)
                if fails == "who began":
                    raise kivi.SnapshotTooOld("it stood still for longer than its snapshot is kept")
            elif took_it_up and fails == "who took it up":
                taken_up.set()
                assert fail.wait(60)
                raise kivi.SnapshotTooOld("it stood still for longer than its snapshot is kept")
            return real(self, *arguments)

        return call

    where: tuple[Any, str] = (ViewFilling, "_fill_some") if what == "view" else (Backfill, "_staged")
    with (
        patch.object(where[0], where[1], stands_still(getattr(*where))),
        patch.object(node, "_UNCLAIMED_S", 0.5),
        ThreadPoolExecutor() as pool,
    ):
        building = pool.submit(_create, one, what)
        assert reached.wait(60)
        if fails == "who took it up":
            assert taken_up.wait(60)
        else:
            wait_until(lambda: _is_built(other, what))
        go_on.set()
        building.result()
        fail.set()
        wait_until(lambda: not any(each.store.backfill.building for each in nodes.open.values()))
    assert _is_built(one, what)
    wait_until(lambda: _is_built(other, what))  # it may not have heard yet that the first one is done
    for each in nodes.open.values():
        wait_until(lambda each=each: not each.store.stages.live())  # type: ignore[misc]


def test_an_expired_copy_holds_nothing(nodes: Nodes, tmp_path: Path) -> None:
    one = nodes.start("one")
    make(Database(one.store))
    Database(one.store).checkpoint(str(tmp_path / "copy"))
    assert [member.state for member in one.log.members] == [State.LIVE, State.JOINING]
    with patch("kivi.log.members.JOINING_US", 0), patch.object(node, "_SLACK", 2), patch.object(node, "_KEPT", 0.0):
        write(Database(one.store), 8)
        wait_until(lambda: first_of(one) > 4)
    assert [member.state for member in one.log.members] == [State.LIVE]


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A store that was used before anybody thought of a cluster."""
    path = tmp_path / "alone"
    with kivi.open(path) as db:
        make(db)
        write(db, 3)
    return path


def test_a_store_becomes_a_cluster(nodes: Nodes, alone: Path, tmp_path: Path) -> None:
    with kivi.open(alone) as db:
        last = db.watermark()
        with db.transaction(token="before") as tx:
            tx.delta("blobs", (1,), n=1)
    command = [sys.executable, "-m", "kivi.cli", "cluster", "adopt", str(alone), "--cluster", "apm"]
    said = subprocess.run([*command, "--nats", nodes.nats.urls[0]], capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"apm begins with the store in {alone}, which ends with commit timestamp {last + 1}\n")
    founded = Founded("apm", last + 1)
    again = adopt(str(alone), "apm", nodes.nats.urls)  # it was interrupted, say
    assert again == founded
    one = nodes.start("alone")
    assert total(one) == 4
    assert Database(one.store).outcome("before") == founded.last
    with pytest.raises(kivi.InvalidArgument, match="begin with a copy of a node"):
        nodes.start("empty")
    Database(one.store).checkpoint(str(tmp_path / "copy"))
    other = nodes.start("copy")
    write(Database(other.store), 2)
    last = other.store.watermark()
    assert total(one, last) == total(other) == 6
    with kivi.open(tmp_path / "second") as db:
        make(db)
    with pytest.raises(kivi.AlreadyExists, match="there is a cluster apm already"):
        adopt(str(tmp_path / "second"), "apm", nodes.nats.urls)
    with kivi.open(tmp_path / "second") as db:  # nothing has become of it
        assert db.tables() == ["blobs"]
    nodes.stop("alone")
    with pytest.raises(kivi.KiviError, match="a node of the cluster apm"):
        adopt(str(alone), "other", nodes.nats.urls)
    assert total(nodes.start("alone")) == 6


def test_a_store_that_is_to_begin_a_log_is_told_when_another_one_did(nodes: Nodes, alone: Path) -> None:
    """Whoever was started with an empty directory was quicker; that log is ended, and nothing of the store was lost."""
    adopt(str(alone), "apm", nodes.nats.urls)
    nodes.start("empty")
    with pytest.raises(kivi.InvalidArgument, match=r"begins without it.*kivi cluster reseed"):
        nodes.start("alone")
    nodes.stop("empty")
    adopt(str(alone), "apm", nodes.nats.urls, replace=True)
    assert total(nodes.start("alone")) == 3


def _without_its_newest(nats: NatsCluster, tmp_path: Path, between: Any) -> None:
    """The servers' disk is set back to what it was before ``between`` was called."""
    server = nats.servers[0]
    server.stop()
    shutil.copytree(server.directory, tmp_path / "kept")
    server.start()
    wait_until(nats.is_ready)
    between()
    server.stop()
    shutil.rmtree(server.directory)
    shutil.copytree(tmp_path / "kept", server.directory)
    server.start()
    wait_until(nats.is_ready)


@pytest.mark.parametrize("how", ["a copy of the node that has most", "that node, stopped"])
def test_a_log_that_lost_something_begins_anew_with_the_best_node(
    nodes: Nodes, nats: NatsCluster, tmp_path: Path, how: str
) -> None:
    one, other = nodes.start("one"), nodes.start("other")
    make(Database(one.store))
    write(Database(one.store), 2)

    def both_have_more() -> None:
        wait_until(lambda: not one.log.is_held_up)  # by servers that were away, for however long
        write(Database(one.store), 3)
        assert total(other, one.store.watermark()) == 5

    _without_its_newest(nats, tmp_path, both_have_more)
    for each in (one, other):
        each.log._lost_after_s = 0.0
        wait_until(lambda each=each: each.log.lost_suffix is not None)  # type: ignore[misc]
        assert any("kivi cluster reseed" in said for said in each.status().problems())
    with pytest.raises(kivi.Unavailable, match="has lost what it had acknowledged"):
        write(Database(one.store), 1)
    assert total(one) == 5  # reads go on
    if how.startswith("a copy"):
        Database(one.store).checkpoint(str(tmp_path / "best"))
        nodes.stop("one")
    else:
        nodes.stop("one")
        (tmp_path / "one").rename(tmp_path / "best")
    nodes.stop("other")
    with pytest.raises(kivi.AlreadyExists):
        adopt(str(tmp_path / "best"), "apm", nats.urls)
    founded = adopt(str(tmp_path / "best"), "apm", nats.urls, replace=True)
    assert founded.lost is None if how.startswith("a copy") else founded.lost is not None and founded.lost <= 0
    best = nodes.start("best")
    write(Database(best.store), 1)
    assert total(best) == 6
    with pytest.raises(kivi.InvalidArgument, match="an earlier generation"):
        nodes.start("other")


def test_a_backup_of_a_node_begins_a_new_generation(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an operator does it, by the commands: what was committed by then is there, with its tokens and its past. A
    node that nobody has stopped says nothing in the new log, and is refused when it is started again."""
    one, other = nodes.start("one"), nodes.start("other")
    db = Database(one.store)
    db.create_table("past", key={"id": "int64"}, columns={"n": kivi.sum("int64")}, history="1h")
    make(db)
    moments = []
    for i in range(3):
        with db.transaction(token=f"token {i}") as tx:
            tx.delta("past", (1,), n=10)
        moments.append(tx.commit_ts)
    write(db, 2)
    last = one.store.watermark()
    assert total(other, last) == 2
    made = Database(other.store).backup(str(tmp_path / "backups"))
    with db.transaction(token="after") as tx:
        tx.delta("past", (1,), n=100)
    nodes.stop("one")
    assert main(["restore", str(tmp_path / "backups"), str(tmp_path / "new")]) == 0
    how = [str(tmp_path / "new"), "--cluster", "apm", "--nats", nodes.nats.urls[0]]
    assert main(["cluster", "adopt", *how]) == 1
    assert "kivi cluster reseed" in capsys.readouterr().err
    assert main(["cluster", "reseed", *how, "--yes"]) == 0
    new = nodes.start("new")
    again = Database(new.store)
    assert made["watermark"] == last
    with again.snapshot() as snap:
        assert [*snap.scan("past")] == [{"id": 1, "n": 30}]
    assert total(new) == 2
    for i, moment in enumerate(moments):
        assert again.outcome(f"token {i}") == moment
        with again.snapshot(as_of=moment) as snap:
            assert [*snap.scan("past")] == [{"id": 1, "n": 10 * (i + 1)}]
    with again.transaction(token="token 2") as tx:  # it has come
        tx.delta("past", (1,), n=10)
    assert tx.commit_ts == moments[2]
    with again.transaction(token="after") as tx:  # it had not by the backup
        tx.delta("past", (1,), n=100)
    assert (tx.commit_ts or 0) > last
    wait_until(lambda: other.log.is_held_up)  # nothing that it says is in a log
    with pytest.raises(kivi.Unavailable):
        Database(other.store).run(lambda tx: tx.delta("past", (1,), n=1000), timeout=1.0)
    nodes.stop("other")
    for old in ("one", "other"):
        with pytest.raises(kivi.InvalidArgument, match="an earlier generation"):
            nodes.start(old)
    again.checkpoint(str(tmp_path / "next"))
    with Database(nodes.start("next").store).snapshot(min_snapshot=again.watermark()) as snap:
        assert [*snap.scan("past")] == [{"id": 1, "n": 130}]


@pytest.mark.parametrize("was_alone", [False, True])
def test_a_log_that_begins_anew_has_the_features_of_its_store(nodes: Nodes, tmp_path: Path, was_alone: bool) -> None:
    """So no node of an older version takes what it cannot read."""
    if was_alone:
        with kivi.open(tmp_path / "one") as db:
            _weighed(db)
    else:
        _weighed(Database(nodes.start("one").store))
        nodes.stop("one")
    adopt(str(tmp_path / "one"), "apm", nodes.nats.urls, replace=not was_alone)
    found = content_of(str(tmp_path / "one"))
    assert (found["features"], found["format"]) == ([WEIGHTED_QUANTILES], FORMAT)
    one = nodes.start("one")
    assert one.log.members.on == {WEIGHTED_QUANTILES}
    Database(one.store).checkpoint(str(tmp_path / "copy"))
    with kivi.open(tmp_path / "copy"):
        pass
    assert content_of(str(tmp_path / "copy"))["features"] == [WEIGHTED_QUANTILES]


def _weighed(db: Any) -> None:
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "us": "int64"})
    measures = {"p": kivi.weighted_quantiles("us", by="us")}
    db.create_aggregate("weighed", source="calls", group_by=["us"], measures=measures)


@pytest.mark.parametrize("how", ["it ends before", "it went on with something else"])
def test_what_the_log_lost_is_noticed_when_every_node_was_killed(
    nodes: Nodes, nats: NatsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Their bases are at a place that the log still has: each knows by itself that it had come further."""
    defaults = ReplicatedLog.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "lost_after_s", 1.0)
    names = "one", "other"
    make(Database(nodes.start("one").store))
    write(Database(nodes.start("other").store), 1)
    for name in names:
        nodes.stop(name)
        shutil.copytree(tmp_path / name / "engine", tmp_path / f"{name}'s base")

    def more() -> None:
        one, _ = map(nodes.start, names)
        write(Database(one.store), 1)
        last = one.log.place.sequence
        for each in nodes.open.values():
            wait_until(lambda each=each: each._reached.read()[0] >= last)  # type: ignore[misc]
        for name in names:
            nodes.stop(name)
            shutil.rmtree(tmp_path / name / "engine")  # it was killed, and had not folded that
            shutil.copytree(tmp_path / f"{name}'s base", tmp_path / name / "engine")

    _without_its_newest(nats, tmp_path, more)
    if how != "it ends before":
        mark = json.loads((tmp_path / "one" / "reached").read_text())["sequence"]
        (tmp_path / "other" / "reached").unlink()
        other = nodes.start("other")
        wait_until(lambda: other.log.place.sequence > mark)
    for _ in range(3):  # whatever of that place the first start, which stopped there, has saved
        with pytest.raises(kivi.Unavailable, match="has lost what it had acknowledged.*kivi cluster reseed"):
            nodes.start("one")
    if how == "it ends before":
        adopt(str(tmp_path / "one"), "apm", nats.urls, replace=True)
        assert total(nodes.start("one")) == 1
        with pytest.raises(kivi.InvalidArgument, match="an earlier generation"):
            nodes.start("other")


def test_a_log_that_is_gone_is_not_made_again_for_a_node(nodes: Nodes, nats: NatsCluster) -> None:
    one = nodes.start("one")
    make(Database(one.store))
    delete_stream(one._nats, one.stream.name, 10.0)
    nodes.stop("one")
    with pytest.raises(kivi.NotFound, match="kivi cluster reseed"):
        nodes.start("one")
    founded = adopt(str(nodes.path / "one"), "apm", nats.urls, replace=True)
    assert founded.lost is None
    assert total(nodes.start("one")) == 0


def test_the_status_of_a_cluster(nats: NatsCluster, tmp_path: Path) -> None:
    """By the API and on the terminal; and what is wrong, each in a sentence."""
    how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
    with contextlib.ExitStack() as stack:
        one, other = (stack.enter_context(ServerProcess(tmp_path / f"node-{i}", *how)) for i in range(2))
        with one.connect() as db:
            make(db)
            wait_until(lambda: {n["state"] for n in db.cluster_status()["nodes"]} == {"live"})
            both = {one.endpoint, other.endpoint}
            wait_until(lambda: {n["address"] for n in db.cluster_status()["nodes"]} == both)
            found = db.cluster_status()
            assert found["cluster"] == "apm" and found["log"]["last"] > 2 and found["log"]["copies"][0]["leads"]
            assert all(n["agrees"] is not False and n["disk_bytes"] for n in found["nodes"])
            assert found["problems"] == ["the log has one copy: what is committed is lost with that server; run three"]
        command = [sys.executable, "-m", "kivi.cli", "cluster", "status", "--endpoint", one.endpoint]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        assert shown.returncode == 1 and other.endpoint in shown.stdout and "* the log has one copy" in shown.stdout
        needed = f"needed from message [0-9]+ on by node ({one.endpoint}|{other.endpoint}): to fold what"
        assert re.search(needed, shown.stdout)
        told = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, check=False)
        assert json.loads(told.stdout)["cluster"] == "apm"
        nats.servers[0].kill()
        with one.connect() as db:
            wait_until(lambda: db.cluster_status()["log"] is None)
            assert any("log's servers do not answer" in said for said in db.cluster_status()["problems"])
        nats.servers[0].start()
    with (
        ServerProcess(tmp_path / "single") as single,
        single.connect() as db,
        pytest.raises(kivi.InvalidArgument, match="no node of a cluster"),
    ):
        db.cluster_status()


def test_what_is_wrong_with_a_node_is_said(nodes: Nodes) -> None:
    one = nodes.start("one")
    make(Database(one.store))
    found = one.status()
    (mine,) = found.nodes

    def said(**changes: Any) -> list[str]:
        return _of_nodes(dataclasses.replace(found, nodes=(dataclasses.replace(mine, **changes),)))

    assert said() == []
    assert "has said nothing for 95 s: start it again, or kivi cluster forget it" in said(silent_s=95.0)[0]
    assert "has said nothing for 5 s: see whether it runs" in said(silent_s=5.0)[0]
    assert said(silent_s=3.0) == []
    assert [one["state"] for one in dataclasses.replace(found, nodes=(mine,)).described()["nodes"]] == ["live"]
    assert "has applied something else" in said(agrees=False)[0]
    assert "was evicted" in said(state=State.EVICTED)[0]
    assert "1,000,000 messages behind" in said(behind=1_000_000)[0]
    assert "is almost full: make room" in said(disk_free_bytes=MIB)[0]
    two = dataclasses.replace(found, nodes=(mine, dataclasses.replace(mine, version="2")))
    assert "go on with the upgrade" in _of_nodes(two)[0]


def test_it_is_said_for_whom_the_log_is_kept_and_what_for(nodes: Nodes, tmp_path: Path) -> None:
    """However full it is: for what was staged, for a copy, for a node that is away."""
    one, other = nodes.start("one"), nodes.start("other")
    db = Database(one.store)
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "x": "int64"})

    def kept(*said: str) -> bool:
        """Once both nodes have folded what they have, but for what they need."""
        for each in nodes.open.values():
            each._fold_all()
        return all(word in each.status().kept() for each in nodes.open.values() for word in said)

    wait_until(lambda: kept("by node", "to fold what it has not on its disk yet"))
    stage = db.stage("e", [{"ts": 1_000_000 * i, "x": i} for i in range(100)])
    first = min(min(sequences) for sequences, _ in one.log._stages.values())
    wait_until(lambda: kept(f"needed from message {first} on by node", "for what a client has staged"))
    db.discard_stages([stage])
    wait_until(lambda: kept("to fold what it has not"))
    db.checkpoint(str(tmp_path / "copy"))
    last = db.append("e", [{"ts": 1, "x": 1}])
    wait_until(lambda: other.store.watermark() >= last)
    wait_until(lambda: kept("on by a copy of a node: to begin with", "for 60 more minutes at most"))
    nodes.start("copy")  # it is another one by then, and the hold, which ends with its hour, is not its own
    wait_until(lambda: kept("on by a copy of a node"))


def _of_nodes(status: ClusterStatus) -> list[str]:
    return [said for said in status.problems() if not said.startswith("the log")]


def test_a_node_may_take_as_long_to_catch_up_as_it_gets_on(nodes: Nodes) -> None:
    """One that stands still is given up; one that is slow, for a multiple of that time, is not."""
    first = nodes.start("a")
    with contextlib.closing(Database(first.store)) as db:
        make(db)
        for i in range(40):
            with db.transaction() as tx:
                tx.delta("blobs", (i % 4,), n=1)
        pump, catch_up, here = ReplicatedLog.pump, ClusterNode._catch_up, threading.get_ident()
        came, patience_s = 0, 90.0

        def slowly(log: ReplicatedLog, count: int = 1) -> int:
            nonlocal came
            time.sleep(0.05)  # so that it is looked at between two messages
            found = pump(log, 1)
            came += found if log is not first.log else 0
            return found

        def clock() -> float:
            """To whoever waits for the node, each message takes a minute."""
            return 60.0 * came if threading.get_ident() == here else time.monotonic()

        def patiently(found: ClusterNode, timeout_s: float) -> None:
            with patch.object(node, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep, time=time.time)):
                catch_up(found, patience_s)

        with patch.object(ReplicatedLog, "pump", slowly), patch.object(ClusterNode, "_catch_up", patiently):
            late = nodes.start("b")
        assert 60.0 * came > 3 * patience_s
        assert total(late) == 40
        with (
            patch.object(ReplicatedLog, "pump", lambda log: 0),
            patch.object(ClusterNode, "_catch_up", lambda found, timeout_s: catch_up(found, 1.0)),
            pytest.raises(kivi.Unavailable, match="give nothing"),
        ):
            nodes.start("c")
