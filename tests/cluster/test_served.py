"""Three servers of a cluster, processes of their own over a real nats-server: any takes writes, all answer alike."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import kivi
from tests.alerts.receiver import Receiver
from tests.cluster.traffic import (
    START,
    Client,
    answers_of,
    make_tables,
    make_tables_everywhere,
    newest_of,
    wait_for,
)
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.server.test_raising import all_are_raised, calls, make_rule
from tests.serverproc import ServerProcess
from tests.waiting import wait_until


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsCluster]:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as cluster:
        yield cluster


@pytest.fixture
def nodes(tmp_path: Path, nats: NatsCluster) -> Iterator[list[ServerProcess]]:
    how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ServerProcess(tmp_path / f"node-{i}", *how)) for i in range(3)]


def test_any_node_takes_writes_and_all_answer_alike(nodes: list[ServerProcess]) -> None:
    make_tables_everywhere(nodes)
    clients = [Client(node.endpoint, seed, 40) for seed, node in enumerate([*nodes, *nodes])]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert [client.failure for client in clients] == [None] * len(clients)
    wanted = sum((client.done for client in clients), Counter())
    last = newest_of(nodes)
    answers = [answers_of(node, last) for node in nodes]
    assert answers[0] == answers[1] == answers[2]
    _, totals, aggregate, events = answers[0]
    assert {row["endpoint"]: row["us"] for row in totals} == dict(wanted)  # type: ignore[attr-defined]
    assert {row["endpoint"]: row["us"] for row in aggregate} == dict(wanted)  # type: ignore[attr-defined]
    assert events == [{"us": sum(wanted.values()), "n": 240}]


def _remove(tx: Any, low: int) -> int:
    found: int = tx.retract("calls", where=(kivi.col("us") >= low) & (kivi.col("us") < low + 75))
    return found


def test_any_node_removes_events_while_others_append(nodes: list[ServerProcess]) -> None:
    make_tables_everywhere(nodes)
    with nodes[0].connect() as db:
        db.create_aggregate("slowest", source="calls", group_by=["endpoint"], measures={"us": kivi.max("us")})
    removed = beside = 0
    clients = [Client(node.endpoint, seed, 40, while_=lambda: not beside) for seed, node in enumerate(nodes)]
    for client in clients:
        client.start()
    for i in itertools.count():
        running = any(client.is_alive() for client in clients)
        low = 150 * (i % 6)
        with kivi.connect(nodes[i % 3].endpoint) as db:  # which may not know yet of the one before
            found = db.run(partial(_remove, low=low))
        removed += found
        beside += running and found > 0
        if not running and i > 6:
            break
    for client in clients:
        client.join()
    assert [client.failure for client in clients] == [None] * len(clients)
    assert beside
    last = newest_of(nodes)
    answers = []
    for node in nodes:
        with node.connect() as db, db.snapshot(min_snapshot=last) as snap:
            answers.append([list(snap.scan(name)) for name in ("calls", "by_endpoint", "slowest")])
    assert answers[0] == answers[1] == answers[2]
    calls, sums, slowest = answers[0]
    assert 0 < removed == sum(client.count for client in clients) - len(calls)
    by_endpoint: dict[int, list[int]] = {}
    for call in calls:
        by_endpoint.setdefault(call["endpoint"], []).append(call["us"])
    assert {row["endpoint"]: (row["us"], row["n"]) for row in sums} == {
        endpoint: (sum(us), len(us)) for endpoint, us in by_endpoint.items()
    }
    assert {row["endpoint"]: row["us"] for row in slowest} == {e: max(us) for e, us in by_endpoint.items()}


def test_a_node_that_was_killed_comes_back_with_all_that_was_acknowledged(nodes: list[ServerProcess]) -> None:
    make_tables_everywhere(nodes)
    first = Client(nodes[0].endpoint, 1, 20)
    first.run()
    nodes[1].kill()
    second = Client(nodes[2].endpoint, 2, 20)
    second.run()
    assert first.failure is None and second.failure is None
    nodes[1].start()
    wanted = first.done + second.done
    last = newest_of(nodes)
    answers = [answers_of(node, last) for node in nodes]
    assert answers[0] == answers[1] == answers[2]
    assert {row["endpoint"]: row["us"] for row in answers[1][1]} == dict(wanted)  # type: ignore[attr-defined]


@pytest.mark.story
def test_a_new_node_begins_with_the_copy_of_another_one(nodes: list[ServerProcess], tmp_path: Path) -> None:
    make_tables_everywhere(nodes)
    with nodes[0].connect() as db:
        before = Client(nodes[0].endpoint, 1, 10)
        before.run()
        db.checkpoint(str(tmp_path / "copy"))
        db.checkpoint(str(tmp_path / "alone"))
    after = Client(nodes[1].endpoint, 2, 10)
    after.run()
    assert before.failure is None and after.failure is None
    with nodes[1].connect() as db:
        last = db.watermark()
    with ServerProcess(tmp_path / "copy", *nodes[0].arguments) as fourth:
        assert answers_of(fourth, last) == answers_of(nodes[2], last)
        later = Client(fourth.endpoint, 3, 10)
        later.run()
        assert later.failure is None
        fourth.kill()
        fourth.start()
        with fourth.connect() as db:
            last = db.watermark()
        wanted = before.done + after.done + later.done
        answers = [answers_of(node, last) for node in (*nodes, fourth)]
        assert answers == [answers[0]] * 4
        assert {row["endpoint"]: row["us"] for row in answers[0][1]} == dict(wanted)  # type: ignore[attr-defined]
    with kivi.open(tmp_path / "alone") as db:  # a backup is a store of its own, too; and then it is no copy any more
        assert {row["endpoint"]: row["us"] for row in db.snapshot().scan("totals")} == dict(before.done)
    with pytest.raises(RuntimeError, match="a store of its own"):
        ServerProcess(tmp_path / "alone", *nodes[0].arguments).start()


@pytest.mark.story
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_client_of_several_nodes_goes_on_with_another_one(nodes: list[ServerProcess], how: str) -> None:
    """Each node ends once and comes back, while clients commit: no call fails, and nothing counts twice."""
    everywhere = ",".join(node.endpoint for node in nodes)
    make_tables_everywhere(nodes)
    clients = [Client(everywhere, seed, 60) for seed in range(3)]
    for client in clients:
        client.start()
    for node in nodes:
        getattr(node, how)()
        node.start()
    for client in clients:
        client.join()
    assert [client.failure for client in clients] == [None] * len(clients)
    wanted = sum((client.done for client in clients), Counter())
    last = newest_of(nodes)
    answers = [answers_of(node, last) for node in nodes]
    assert answers[0] == answers[1] == answers[2]
    assert {row["endpoint"]: row["us"] for row in answers[0][1]} == dict(wanted)  # type: ignore[attr-defined]


@pytest.mark.story
def test_who_follows_matches_goes_on_at_another_node(nodes: list[ServerProcess]) -> None:
    """Each is told once, though the node that told the first one is killed."""
    rises = kivi.pattern(
        "A B+",
        within="1m",
        define={"B": kivi.col("us") > kivi.prev("us")},
        measures={"began": kivi.first("A.us"), "rises": kivi.count("B")},
    )

    def append(db: Any, seconds: int, *values: int) -> None:
        rows = [
            {"ts": START + dt.timedelta(seconds=seconds + i), "endpoint": 1, "us": us} for i, us in enumerate(values)
        ]
        db.append("calls", rows)

    def told(node: ServerProcess, **since: Any) -> tuple[list[Any], dict[str, int]]:
        with node.connect() as db:
            wait_for(since["since"], db)  # it may be behind the one that was killed
            with db.subscribe_matches("calls", rises, interval_ms=10, **since) as live:
                update = live.next(60.0)
                assert update is not None
                return [(change.kind, change.row) for change in update.changes], {"since": live.ts, "skip": live.skip}

    make_tables_everywhere(nodes)
    with nodes[0].connect() as db:
        append(db, 0, 5, 6, 7, 1)
        first, position = told(nodes[1], since=0)
        assert first == [("add", {"began": 5, "rises": 2})]
        nodes[1].kill()
        append(db, 600, 8, 9, 2)
        second, _ = told(nodes[2], **position)
        assert second == [("add", {"began": 8, "rises": 1})]


@pytest.mark.story
def test_clients_leave_nodes_that_stand_still(nodes: list[ServerProcess]) -> None:
    """Most of them, so that nearly every client has to, and none fails: in the time that a machine needs which has
    other work for its processors (a client finds a node still after seconds, and the one that it asks next, too)."""
    everywhere = ",".join(node.endpoint for node in nodes)
    make_tables_everywhere(nodes)
    clients = [Client(everywhere, seed, 100) for seed in range(6)]
    for client in clients:
        client.start()
    wait_until(lambda: all(client.done for client in clients))
    with contextlib.ExitStack() as stopped:
        for node in nodes[1:]:
            node.signal(signal.SIGSTOP)
            stopped.callback(node.signal, signal.SIGCONT)
        for client in clients:
            client.join()
    assert [client.failure for client in clients] == [None] * len(clients)
    wanted = sum((client.done for client in clients), Counter())
    last = newest_of(nodes)
    answers = [answers_of(node, last) for node in nodes]
    assert answers[0] == answers[1] == answers[2]
    assert {row["endpoint"]: row["us"] for row in answers[0][1]} == dict(wanted)  # type: ignore[attr-defined]


def test_a_fresh_read_has_what_was_acknowledged_by_any_node(nodes: list[ServerProcess]) -> None:
    with nodes[0].connect() as one, kivi.connect(nodes[1].endpoint, read="fresh") as other:
        make_tables(one)
        for n in range(1, 30):
            with one.transaction() as tx:
                tx.delta("totals", (1,), us=1, n=1)
            if n % 2:
                assert other.get("totals", (1,)) == {"endpoint": 1, "us": n, "n": n}
            else:
                with other.snapshot() as snap:
                    assert snap.ts >= (tx.commit_ts or 0)
                    assert snap.get("totals", (1,)) == {"endpoint": 1, "us": n, "n": n}
            assert other.get("totals", (1,), max_staleness=0) == {"endpoint": 1, "us": n, "n": n}
        for n in range(20):  # definitions, too
            one.create_table(f"made{n}", key={"id": "int64"}, columns={"n": "int64"})
            assert other.describe(f"made{n}")["name"] == f"made{n}" in other.tables()


def test_a_shared_snapshot_is_read_by_any_node_and_outlives_the_one_that_began_it(nodes: list[ServerProcess]) -> None:
    make_tables_everywhere(nodes)
    with nodes[0].connect() as db:
        with db.transaction() as tx:
            tx.delta("totals", (1,), us=5, n=1)
        shared = db.snapshot(shared=True, ttl_s=600)
        shared.__enter__()
        at = shared.ts
    with nodes[1].connect() as db:
        for _ in range(3):
            with db.transaction() as tx:
                tx.delta("totals", (1,), us=7, n=1)
            db.consolidate()
        later = db.watermark()
    nodes[0].kill()
    nodes[0].start()
    for node in nodes:
        with node.connect() as db:
            wait_for(later, db)
            db.consolidate()
            with db.snapshot(lease=shared.lease, min_snapshot=at) as snap:
                assert (snap.ts, snap.get("totals", (1,))) == (at, {"endpoint": 1, "us": 5, "n": 1})
            with db.snapshot(as_of=at) as snap:
                assert list(snap.scan("totals")) == [{"endpoint": 1, "us": 5, "n": 1}]
    with nodes[2].connect() as db:
        short = db.snapshot(shared=True, ttl_s=60)
        with short:
            snapshot = db.snapshot(lease=short.lease, min_snapshot=short.ts)
            with snapshot:
                snapshot.renew(600)

        def is_over() -> bool:  # its maker has closed it, and so it ends everywhere
            with nodes[1].connect() as other:
                try:
                    with other.snapshot(lease=short.lease, min_snapshot=short.ts) as snap:
                        return snap.ts < 0
                except kivi.SnapshotTooOld:
                    return True

        wait_until(is_over, reason="it ends on other nodes")


@pytest.mark.story
def test_without_its_log_a_cluster_reads_and_takes_no_writes(nodes: list[ServerProcess], nats: NatsCluster) -> None:
    with nodes[0].connect() as db:
        make_tables(db)
        with db.transaction() as tx:
            tx.delta("totals", (1,), us=5, n=1)
        wait_until(
            lambda: {one["address"] for one in db.cluster_status()["nodes"]} >= {node.endpoint for node in nodes}
        )
        hasty = kivi.connect(nodes[0].endpoint, timeout=3)
        with hasty, pytest.raises((kivi.Unavailable, kivi.CommitUnknown)), hasty.transaction() as tx:
            tx.delta("totals", (1,), us=7, n=1)
            nats.servers[0].kill()  # so the node has not noticed yet, and proposes it
        assert db.get("totals", (1,)) == {"endpoint": 1, "us": 5, "n": 1}
        assert db.get("totals", (1,), max_staleness="1h") == {"endpoint": 1, "us": 5, "n": 1}
        with pytest.raises(kivi.Unavailable, match=r"may be \d+\.\d s old") as refused:
            db.get("totals", (1,), max_staleness="1s")
        [better] = refused.value.details["addresses"]  # as the other node said that was asked then
        assert better in {node.endpoint for node in nodes}
        with kivi.connect(nodes[0].endpoint, timeout=2, read="fresh") as fresh, pytest.raises(kivi.Unavailable):
            fresh.get("totals", (1,))
        nats.servers[0].start()
        wait_until(lambda: (db.get("totals", (1,)) or {})["n"] == 2, reason="what was proposed came back")


def test_an_alert_is_the_same_on_every_node_and_told_once(nodes: list[ServerProcess]) -> None:
    begin = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    dbs = [node.connect() for node in nodes]

    def append(db: Any, minute: float, us: int) -> None:
        db.append("calls", [{"ts": begin + dt.timedelta(minutes=minute), "endpoint": 1, "us": us}])

    def all_say(state: str) -> None:
        for db in dbs:
            wait_until(partial(says, db, state), reason=db.alerts)

    def says(db: Any, state: str) -> bool:
        return [one["state"] for one in db.alerts()] == [state]

    with Receiver() as receiver:
        dbs[0].create_event_table(
            "calls", event_time="ts", columns={"ts": "timestamp", "endpoint": "int64", "us": "int64"}
        )
        group_by: list[Any] = ["endpoint", kivi.time_slot("ts", "5m")]
        dbs[0].create_aggregate("slowest", source="calls", group_by=group_by, measures={"us": kivi.max("us")})
        append(dbs[0], 0, 1)
        dbs[0].create_alert("slow", on="slowest", where=kivi.col("us") > 9, for_="2m", notify=receiver.url)
        made = dbs[0].watermark()
        for db in dbs:  # each has heard of the table
            wait_for(made, db)
        append(dbs[1], 1, 10)
        append(dbs[2], 7.5, 1)
        all_say("firing")
        append(dbs[1], 10.5, 1)
        all_say("resolved")
        wait_until(lambda: len(receiver.taken) == 2)
        found = dbs[0].alerts()
        assert all(db.alerts() == found for db in dbs)
        assert [one.message["status"] for one in receiver.received] == ["firing", "resolved"]
    for db in dbs:
        db.close()


@pytest.mark.story
def test_whichever_node_evaluates_alerts_is_killed_and_another_one_goes_on(nodes: list[ServerProcess]) -> None:
    """Each of three is killed in turn, so one of them was at it: all that fires is told, and all nodes say the same."""
    begin = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    everywhere = ",".join(node.endpoint for node in nodes)

    def firing(db: kivi.Database) -> set[int]:
        return {one["key"]["endpoint"] for one in db.alerts() if one["state"] == "firing"}

    with Receiver() as receiver, kivi.connect(everywhere, timeout=120) as db:
        make_tables(db)
        group_by: list[Any] = ["endpoint", kivi.time_slot("ts", "5m")]
        db.create_aggregate("slowest", source="calls", group_by=group_by, measures={"us": kivi.max("us")})
        db.create_alert("slow", on="slowest", where=kivi.col("us") > 9, notify=receiver.url)
        for killed, node in enumerate(nodes):
            node.kill()
            ts = begin + dt.timedelta(minutes=10 * killed)
            db.append("calls", [{"ts": ts, "endpoint": endpoint, "us": 10} for endpoint in range(killed + 1)])
            db.append("calls", [{"ts": ts + dt.timedelta(minutes=6), "endpoint": 99, "us": 1}])  # the slot is over
            wait_until(lambda: firing(db) == set(range(killed + 1)), timeout_s=90, reason=db.alerts)  # noqa: B023
            node.start()
        wait_until(
            lambda: (
                {one["labels"]["endpoint"] for got in receiver.taken for one in got.message["alerts"]}
                >= {"0", "1", "2"}
            ),
            timeout_s=90,
            reason=lambda: [got.message for got in receiver.taken],
        )
        found, last = db.alerts(), db.watermark()
        for node in nodes:
            with kivi.connect(node.endpoint, timeout=120) as one:
                wait_for(last, one)
                assert one.alerts() == found


@pytest.mark.story
def test_whichever_node_evaluates_a_pattern_is_killed_and_no_match_is_raised_twice(nodes: list[ServerProcess]) -> None:
    """Each of three is killed in turn, in mid-stream, so one of them was at it: all nodes have what matches, once."""
    with kivi.connect(",".join(node.endpoint for node in nodes), timeout=120) as db:
        make_rule(db)
        written = 0
        for node in nodes:
            for _ in range(25):
                db.append("calls", calls(written), f"token-{written}")
                written += 1
            judged_us = db.rules()[0]["judged_us"]
            wait_until(lambda: db.rules()[0]["judged_us"] > judged_us, timeout_s=90, reason=db.rules)  # noqa: B023
            db.append("calls", calls(written), f"token-{written}")
            written += 1
            node.kill()
            for _ in range(15):
                db.append("calls", calls(written), f"token-{written}")
                written += 1
            wait_until(lambda: db.rules()[0]["judged_us"] > judged_us + 20 * 60_000_000, timeout_s=90)  # noqa: B023
            node.start()
        all_are_raised(db, written)
        found, last = db.rules(), db.watermark()
        for node in nodes:
            with kivi.connect(node.endpoint, timeout=120) as one:
                wait_for(last, one)
                assert one.rules() == found


def test_a_directory_is_of_one_cluster(nodes: list[ServerProcess], tmp_path: Path) -> None:
    nodes[0].stop()
    with pytest.raises(kivi.KiviError, match="a node of the cluster apm"):
        kivi.open(nodes[0].data)
    kivi.open(tmp_path / "alone").close()
    other = ServerProcess(tmp_path / "alone", *nodes[0].arguments)
    with pytest.raises(RuntimeError, match="a store of its own"):
        other.start()


@pytest.mark.story
def test_the_node_that_builds_is_killed_and_another_one_builds(nodes: list[ServerProcess]) -> None:
    """Real processes: an aggregate of a million events is on its way, then its node is not there any more."""
    count, step = 1_000_000, 100_000
    with kivi.connect(nodes[1].endpoint, timeout=120) as other:
        other.create_event_table("hits", event_time="ts", columns={"ts": "timestamp", "key": "int64", "us": "int64"})
        for low in range(0, count, step):
            ids = pa.array(range(low, low + step), pa.int64())
            columns = {"ts": ids.cast(pa.timestamp("us", tz="UTC")), "key": ids, "us": pc.bit_wise_and(ids, 1_023)}
            last = other.append("hits", pa.table(columns))
        with kivi.connect(nodes[0].endpoint, timeout=120) as db:
            wait_for(last, db)

        def create() -> None:
            with contextlib.suppress(kivi.KiviError), kivi.connect(nodes[0].endpoint, timeout=120) as db:
                db.create_aggregate("built", source="hits", group_by=["key"], measures={"us": kivi.sum("us")})

        asked = threading.Thread(target=create)
        asked.start()
        wait_until(lambda: "built" in other.tables())
        nodes[0].kill()
        asked.join()
        assert other.describe("built")["state"] == "building"
        wait_until(lambda: other.describe("built")["state"] == "ready", timeout_s=120)
        nodes[0].start()
        for node in nodes:
            with kivi.connect(node.endpoint, timeout=120, read="fresh") as db, db.snapshot(ttl_s=600) as snap:
                (found,) = snap.sql("select count(*) as n, sum(us) as us from built").to_pylist()
                assert found == {"n": count, "us": sum(i & 1_023 for i in range(count))}
