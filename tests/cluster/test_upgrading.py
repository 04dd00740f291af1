"""Nodes of several versions in one cluster: what one does not know is not written until every live node does."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.errors import DataLoss, FeatureOff, FormatTooNew
from kivi.log import Entry, Kind
from kivi.log.features import FEATURES, LATE_STAGES, MOVES, WEIGHTED_QUANTILES, on_entry
from kivi.log.frames import NO_HASH, Frame, FrameId, decode_frame, decode_message
from kivi.log.members import Member, Members, State
from kivi.runtime.checksum import crc32
from kivi.store.opening import FORMAT, content_of, hold_shards, mark, node_said, note_features, read_marker
from tests.cluster.upgrading import Upgrading
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.seeds import AT_NIGHT
from tests.serverproc import ROOT, EndedError, ServerProcess
from tests.waiting import wait_until

BEFORE_FEATURES = "863aaca205b857402d084142b6fa384a2329fe8b"
"""The newest commit before the log knew of moves, and so of features."""


@pytest.mark.story
@pytest.mark.hypothesis
def test_nodes_of_several_versions_answer_alike() -> None:
    counted: Counter[str] = Counter()
    for seed in (5, 10, 31) if AT_NIGHT else (5, 31):  # where features are switched on, refused, and used by commits
        simulation = Upgrading(seed)
        simulation.run(350)
        simulation.finish()
        counted.update(simulation.counted)
    for what in ("on moves", "on weighted_quantiles", "FeatureOff moves", "refused", "weighed", "asked"):
        assert counted[what], what
    assert counted["commits"] > 100


# -- what is judged from the prefix ---------------------------------------------------------------------------------


def live(node: int, *features: str, said_us: int = 0) -> tuple[Entry, int]:
    return Member(node, State.LIVE, 1, {"features": [*features]} if features else {}).entry(), said_us


def test_a_feature_is_on_once_every_live_node_can_and_stays_on() -> None:
    members = Members()
    members.enter(*live(1, MOVES))
    members.enter(*live(2))
    members.enter(on_entry(MOVES), 0)
    assert not members.on
    assert [one.node for one in members.lacking(MOVES, 0)] == [2]
    members.enter(*live(2, MOVES))
    members.enter(on_entry(MOVES), 0)
    assert members.on == {MOVES}
    members.enter(*live(3))
    members.enter(*live(2))
    assert members.find(3) is None, "who lacks what is on is no node"
    assert members.find(2) == Member(2, State.LIVE, 1, {"features": [MOVES]}), "what it says is void"
    assert Members(members.encode()).on == {MOVES}


def test_a_node_that_was_silent_for_a_day_is_not_waited_for() -> None:
    members = Members()
    members.enter(*live(1))
    day_us = 86_400_000_000
    members.enter(*live(2, MOVES, said_us=day_us))
    assert [one.node for one in members.lacking(MOVES, day_us - 1)] == [1]
    members.enter(on_entry(MOVES), day_us)
    assert members.on == {MOVES}


def test_what_older_versions_read_where_a_feature_is_switched_on_names_it() -> None:
    """They take it for what a node says of itself, and its state for one that there is not."""
    node, state, needed, about = json.loads(bytes(on_entry(MOVES).body[0]))
    assert (node, needed, about) == (0, 0, {"on": MOVES})
    with pytest.raises(ValueError, match="uses the feature moves: upgrade this node"):
        State(state)


def test_what_a_later_version_says_of_nodes_is_not_passed_over() -> None:
    with pytest.raises(FormatTooNew, match="a rename"):
        Members().enter(Entry(Kind.MEMBER, (json.dumps({"a rename": [1, 2]}).encode(),), 0), 0)


def test_a_frame_of_a_later_version_is_no_damage() -> None:
    data = Frame(b"g" * 16, FrameId(1, 1, 1), 0, 0, 0, NO_HASH, [Entry(Kind.PIN, (b"",))]).encode()
    for at, byte in ((4 + 3, ord("9")), (92, 200)):
        later = bytearray(data)
        later[at] = byte
        later[:4] = crc32(bytes(later[4:])).to_bytes(4, "little")
        for decode in (decode_frame, decode_message):
            with pytest.raises(FormatTooNew, match="does not know: use a newer one"):
                decode(bytes(later))
        later[-1] ^= 1
        with pytest.raises(DataLoss, match="checksum"):
            decode_message(bytes(later))


def test_a_marker_names_the_features_of_its_log(tmp_path: Path) -> None:
    path = str(tmp_path)
    mark(path, b"s" * 16, cluster="apm", node=7)
    read_marker(path)
    note_features(path, [MOVES])
    hold_shards(path, 3, [])
    note_features(path, [MOVES])
    assert content_of(path)["format"] == FORMAT, "so versions from before features refuse it"
    assert node_said(path) == {"shards": "0-1", "features": [MOVES]}
    note_features(path, ["one of a later version"])
    with pytest.raises(FormatTooNew, match="one of a later version"):
        read_marker(path)
    assert content_of(path)["features"] == sorted([MOVES, "one of a later version"])


# -- three real nodes are upgraded one by one -------------------------------------------------------------------------


COLUMNS = {"ts": "timestamp", "user": "string", "us": "int64"}
USERS = [f"user {i}" for i in range(100)]
WEIGHED = {"p": kivi.weighted_quantiles("us", by="us")}


def before_features(path: Path) -> str:
    """A folder with the version from before features, for ``PYTHONPATH``. Skips without the history."""
    archive = subprocess.run(
        ["git", "archive", BEFORE_FEATURES, "kivi", "server"], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode:
        reason = f"the history of this clone does not reach back to {BEFORE_FEATURES}: fetch all of it"
        if os.environ.get("KIVI_CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(path)
    (path / "server").rename(path / "kivi_server")
    return str(path)


class Appending:
    """A client that appends until it is told to stop; ``failed`` is what a call has raised."""

    def __init__(self, endpoints: str) -> None:
        self.acknowledged, self._ending = 0, False
        self.failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(endpoints,))
        self._thread.start()

    def _run(self, endpoints: str) -> None:
        def append(i: int, tx: Any) -> None:
            tx.append("calls", [{"ts": i, "user": user, "us": i} for user in USERS])

        try:
            with kivi.connect(endpoints) as db:
                i = 0
                while not self._ending:
                    db.run(functools.partial(append, i))
                    self.acknowledged, i = self.acknowledged + len(USERS), i + 1
                    time.sleep(0.02)
        except Exception as error:
            self.failed = error

    def stop(self) -> int:
        self._ending = True
        self._thread.join()
        return self.acknowledged


class Upgraded:
    """A node that is started with either version."""

    def __init__(self, old: str, server: ServerProcess) -> None:
        self.old, self.server = old, server
        self.new = [*server.command]

    def start(self, *, old: bool) -> None:
        self.server.command = [sys.executable, "-P", "-m", "kivi_server"] if old else self.new
        self.server.environment = {"PYTHONPATH": self.old} if old else {}
        self.server.start()

    def restart(self, *, old: bool) -> None:
        assert self.server.stop() == 0
        self.start(old=old)


def features(db: Any) -> dict[str, tuple[bool, set[str]]]:
    """Which are on, and the addresses of the nodes that lack them."""
    found = db.cluster_status()
    address = {one["node"]: one["address"] for one in found["nodes"]}
    return {one["name"]: (one["is_on"], {address[node] for node in one["lack"]}) for one in found["features"]}


def all_said(db: Any, endpoints: list[str]) -> bool:
    """Whether every node has said where it is, which it does once it listens."""
    return {one["address"] for one in db.cluster_status()["nodes"] if one["state"] == "live"} >= {*endpoints}


@pytest.mark.story
def test_a_cluster_is_upgraded_node_by_node_under_load(tmp_path: Path) -> None:
    require("nats-server")
    old = before_features(tmp_path / "old")
    with contextlib.ExitStack() as opened:
        nats = opened.enter_context(NatsCluster(tmp_path, 1))
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        nodes = [Upgraded(old, ServerProcess(tmp_path / name, *how)) for name in "abc"]
        a, b, c = nodes
        for node in nodes:
            opened.callback(node.server.kill)
        a.start(old=True)
        with a.server.connect() as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, shard_by=["user"])
            db.create_aggregate("sums", source="calls", group_by=["user"], measures={"us": kivi.sum("us")})
            db.checkpoint(tmp_path / "c")
        b.start(old=True)
        c.server.arguments = [*how, "--shards", "0-31"]
        c.start(old=True)
        c.server.arguments = [*how]
        endpoints = [node.server.endpoint for node in nodes]
        clients = [Appending(",".join(endpoints)) for _ in range(2)]
        try:
            a.restart(old=False)
            with kivi.connect(endpoints[0]) as db:
                wait_until(lambda: features(db) == dict.fromkeys(FEATURES, (False, {*endpoints[1:]})))
                wait_until(lambda: all_said(db, endpoints))
                assert any("upgrade it" in problem for problem in db.cluster_status()["problems"])
                with pytest.raises(FeatureOff, match="upgrade first") as refused:
                    db.move_shards("32-39", endpoints[2], copy=True)
                assert {*refused.value.details["nodes"]} == {*endpoints[1:]}
                with pytest.raises(FeatureOff, match="weighted_quantiles"):
                    db.create_aggregate("weighed", source="calls", group_by=["user"], measures=WEIGHED)
            a.restart(old=True)  # nothing is on: it may go back
            for node in (a, b):
                node.restart(old=False)
            with kivi.connect(endpoints[0]) as db:
                wait_until(lambda: features(db) == dict.fromkeys(FEATURES, (False, {endpoints[2]})))
                wait_until(lambda: all_said(db, endpoints))
                with pytest.raises(FeatureOff, match=endpoints[2]):
                    db.move_shards("32-39", endpoints[2], copy=True)
            c.restart(old=False)
            with kivi.connect(endpoints[1]) as db:
                wait_until(lambda: all_said(db, endpoints))
                wait_until(lambda: features(db) == dict.fromkeys(FEATURES, (False, set())))
                db.move_shards("32-39", endpoints[2], copy=True)
                wait_until(lambda: not db.cluster_status()["moves"])
                assert features(db)[MOVES] == (True, set())
                db.create_aggregate("weighed", source="calls", group_by=["user"], measures=WEIGHED)
                assert {what for what, (is_on, _) in features(db).items() if is_on} == {MOVES, WEIGHTED_QUANTILES}
        finally:
            acknowledged = sum(client.stop() for client in clients)
        assert [client.failed for client in clients] == [None, None]
        assert acknowledged > 1_000
        at_all = [opened.enter_context(kivi.connect(endpoint)) for endpoint in endpoints]
        newest = max(db.watermark() for db in at_all)
        with at_all[0].snapshot(shared=True, min_snapshot=newest) as snap:
            for db in at_all:
                with db.snapshot(lease=snap.lease, min_snapshot=newest) as there:
                    (asked,) = there.query("calls", measures={"n": kivi.count(), "us": kivi.sum("us")})
                    assert asked["n"] == acknowledged
                    assert sum(row["us"] for row in there.scan("sums")) == asked["us"]
                    assert len(list(there.scan("weighed"))) == len(USERS)
        assert nodes[1].server.stop() == 0
        with pytest.raises(EndedError, match=f"format {FORMAT}"):
            b.start(old=True)
        d = Upgraded(old, ServerProcess(tmp_path / "d", *how))
        with pytest.raises(EndedError, match=f"uses the feature {MOVES}: upgrade this node"):
            d.start(old=True)


@pytest.mark.story
def test_what_nodes_of_two_versions_would_apply_otherwise_waits_for_the_upgrade(tmp_path: Path) -> None:
    """Of a stage with late events the old version kept those, so an event's position would name another one there."""
    require("nats-server")
    old, minute = before_features(tmp_path / "old"), 60_000_000
    with contextlib.ExitStack() as opened:
        nats = opened.enter_context(NatsCluster(tmp_path, 1))
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        a, b = (Upgraded(old, ServerProcess(tmp_path / name, *how)) for name in "ab")
        for node in (a, b):
            opened.callback(node.server.kill)
        a.start(old=True)
        b.start(old=False)
        db = opened.enter_context(b.server.connect())
        db.create_event_table("e", event_time="ts", retention="1h", columns={"ts": "timestamp", "x": "int64"})
        db.append("e", [{"ts": 0, "x": -1}])
        stage = db.stage("e", [{"ts": i * minute, "x": i} for i in range(60)])
        db.append("e", [{"ts": 100 * minute, "x": 100}])
        wait_until(lambda: -1 not in {row["x"] for row in db.snapshot().scan("e")}, pause_s=0.5)

        def append(tx: Any) -> None:
            tx.append_stages("e", [stage], late="drop")

        with pytest.raises(FeatureOff, match=LATE_STAGES):
            db.run(append)
        a.restart(old=False)
        wait_until(lambda: features(db)[LATE_STAGES] == (False, set()))
        db.run(append)
        with db.transaction() as tx:
            assert tx.retract("e", where=kivi.col("x") == 50) == 1
        for node in (a, b):
            with node.server.connect() as one, one.snapshot(min_snapshot=tx.commit_ts) as snap:
                assert sorted(row["x"] for row in snap.scan("e")) == [*range(40, 50), *range(51, 60), 100]
