"""A node whose own clock is set, by hours and by a year, back and forth: it ages nothing, and no answer changes."""

from __future__ import annotations

import datetime as dt
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

import kivi
from tests.cluster.traffic import Client, answers_of, make_tables_everywhere, newest_of, wait_for
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

JUMPS_S: Final = (3 * 3600, -3 * 3600, 400 * 86_400, -400 * 86_400, 0)
ANSWERS: Final = [(1, 10), (2, 20)]


class Clock:
    """Of a process that has ``environment``: how far it is ahead can be set while it runs."""

    def __init__(self, path: Path) -> None:
        require("cc")
        library, self._file = path / "clock.so", path / "ahead"
        source = Path(__file__).with_name("clock.c")
        flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
        subprocess.run(["cc", *flags, "-o", library, source, "-ldl"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_AHEAD": str(self._file)}
        self.set(0)

    def set(self, ahead_s: int) -> None:
        """At once: the bytes are where they were, for who has the file in memory."""
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("=q", ahead_s * 1_000_000_000))


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsCluster]:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as cluster:
        yield cluster


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def _kept(db: Any, moment: dt.datetime) -> int:
    with db.snapshot(as_of=moment) as snap:
        return int(snap.get("kept", (1,))["n"])


def _paid(db: Any, token: str) -> int:
    tx = db.transaction(token=token)
    tx.delta("totals", (99,), us=1, n=1)
    return int(tx.commit())


@pytest.mark.story
def test_a_node_whose_clock_is_set_ages_nothing(tmp_path: Path, nats: NatsCluster) -> None:
    clock = Clock(tmp_path)
    how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB", "--set", "settle_every_s=0.2")
    with ExitStack() as stack:
        nodes = [ServerProcess(tmp_path / f"node-{i}", *how) for i in range(3)]
        nodes[0].environment = clock.environment
        for node in nodes:
            stack.enter_context(node)
        make_tables_everywhere(nodes)
        first, *_ = clients = [stack.enter_context(kivi.connect(node.endpoint, timeout=60)) for node in nodes]
        columns = {"at": "timestamp", "until": "timestamp"}
        first.create_event_table("recent", event_time="at", columns=columns, retention="30d", expires="until")
        until = _now() + dt.timedelta(days=2)
        first.append("recent", [{"at": until - dt.timedelta(days=3 + day), "until": until} for day in range(20)])
        first.store_subscriptions("calls", [{"user": "ada", "name": "all of them"}], expires_in="2d")
        first.create_table("kept", key={"id": "int64"}, columns={"n": kivi.sum("int64")}, history="7d")
        tokens = [f"paid by {i}" for i in range(len(nodes))]
        paid = [_paid(db, token) for db, token in zip(clients, tokens, strict=True)]
        wanted = Counter[int]()
        before: list[tuple[dt.datetime, int]] = []
        for i, ahead_s in enumerate((0, *JUMPS_S), 1):
            clock.set(ahead_s)
            seen = newest_of(nodes)
            for db in clients:
                db.run(lambda tx: tx.delta("kept", (1,), n=1))
            wanted += _committed(nodes, 20)
            last = newest_of(nodes)
            answers = [answers_of(node, last) for node in nodes]
            assert answers == [answers[0]] * len(nodes) and last > seen
            totals = {row["endpoint"]: row["us"] for row in answers[0][1]}  # type: ignore[attr-defined]
            assert totals == {**wanted, 99: len(nodes)}
            for db in clients:
                wait_for(last, db)
                assert [db.outcome(token) for token in tokens] == paid, "no token is forgotten (R16)"
                assert _paid(db, tokens[0]) == paid[0], "nor counted again"
                with db.snapshot() as snap:
                    assert snap.query("recent", measures={"n": kivi.count()}).to_arrow()["n"].to_pylist() == [20]
                assert [one["name"] for one in db.subscriptions("ada")] == ["all of them"]
                for moment, n in before:
                    assert _kept(db, moment) == n
            moment = _now()
            # What is acknowledged has happened by then; and once that is said of a moment, nothing is added to it.
            assert _kept(clients[1], moment) == i * len(clients)
            before.append((moment, i * len(clients)))
        first.append("recent", [{"at": _now(), "until": until}])
        wait_until(lambda: all(db.cluster_status()["failed"] == "" for db in clients))


def _committed(nodes: list[ServerProcess], commits: int) -> Counter[int]:
    clients = [Client(node.endpoint, seed, commits) for seed, node in enumerate(nodes)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert [client.failure for client in clients] == [None] * len(clients)
    return sum((client.done for client in clients), Counter[int]())


@pytest.mark.story
@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_a_node_whose_clock_is_set_says_who_is_silent(tmp_path: Path, nats: NatsCluster, ahead_s: int) -> None:
    """None that speaks, and soon the one that was killed: also where nobody else is left, and the log's time stands
    since what comes has the clock of a node that is behind."""
    clock = Clock(tmp_path)
    how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
    with ExitStack() as stack:
        one, other = nodes = [ServerProcess(tmp_path / f"node-{i}", *how) for i in range(2)]
        one.environment = clock.environment
        for node in nodes:
            stack.enter_context(node)
        db = stack.enter_context(kivi.connect(one.endpoint, timeout=60))

        def shown() -> dict[str, tuple[str, float]]:
            return {n["address"]: (n["state"], n["silent_s"]) for n in db.cluster_status()["nodes"]}

        def advice() -> list[str]:
            return [said for said in db.cluster_status()["problems"] if not said.startswith("the log has one copy")]

        wait_until(lambda: shown().keys() == {one.endpoint, other.endpoint})
        clock.set(ahead_s)
        until = time.monotonic() + 6
        while time.monotonic() < until:  # an idle cluster: nothing is written but what nodes say of themselves
            assert {state for state, _ in shown().values()} == {"live"} and advice() == []
            time.sleep(0.1)
        killed_at = time.monotonic()
        other.kill()
        wait_until(lambda: shown()[other.endpoint][0] == "silent", timeout_s=10)
        with pytest.raises(kivi.InvalidArgument, match="in the last ten seconds"):
            db.forget_node(other.endpoint)
        assert shown()[one.endpoint][0] == "live"
        assert shown()[other.endpoint][1] <= time.monotonic() - killed_at + 2
        (said,) = advice()
        assert "has said nothing for" in said and "see whether it runs" in said and "forget" not in said
        status = [sys.executable, "-m", "kivi.cli", "cluster", "status", "--endpoint", one.endpoint]
        told = subprocess.run(status, capture_output=True, text=True, check=False)
        assert told.returncode == 1 and "silent" in told.stdout and "all is well" not in told.stdout
        wait_until(lambda: shown()[other.endpoint][1] > 10, timeout_s=20)
        db.forget_node(other.endpoint)
        assert shown()[other.endpoint][0] == "evicted"
