"""Server-sent events: every state is the query's at the snapshot that it names, through reconnects and slow readers."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import pytest
from kivi_server.http import rendering

import kivi
from kivi.model.subscriptions import Change, applied
from tests.serverproc import ServerProcess

BEGIN_US = 1_767_225_600_000_000  # 2026-01-01


def base(server: ServerProcess) -> str:
    return next(line for line in reversed(server.output) if line.startswith("http on ")).split()[-1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("live") / "data", "--http", "localhost:0") as running:
        with running.connect() as db:
            db.create_table(
                "scores", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "pad": "string"}, history="1h"
            )
            db.create_event_table("calls", event_time="ts", columns={"e": "int64", "ts": "timestamp", "us": "int64"})
            db.create_aggregate(
                "calls_5m",
                source="calls",
                group_by=["e", kivi.time_slot("ts", "5m", name="slot")],
                measures={"n": kivi.count(), "total": kivi.sum("us")},
            )
        yield running


class Stream:
    """What a browser's EventSource does, and the state that it leads to."""

    def __init__(self, server: ServerProcess, last: str = "", **parameters: Any) -> None:
        headers = {"Last-Event-ID": last} if last else {}
        self._client = httpx.Client(base_url=base(server), timeout=60)
        self._request = self._client.stream("GET", "/v1/live", params=parameters, headers=headers)
        self.reply = self._request.__enter__()
        self._lines = self.reply.iter_lines()
        self.last, self.rows, self.resets, self.events = last, list[Any](), 0, list[Any]()

    def next(self) -> dict[str, Any]:
        """The next event with data."""
        kind = ""
        for line in self._lines:
            name, _, value = line.partition(": ")
            if name == "id":
                self.last = value
            elif name == "event":
                kind = value
            elif name == "data":
                said = json.loads(value)
                if kind == "error":
                    return {"error": said}
                self._apply(said)
                return said
        raise EOFError

    def _apply(self, said: dict[str, Any]) -> None:
        if said["reset"]:
            self.rows, self.resets = [], self.resets + 1
        changes = [Change(**change) for change in said["changes"]]
        if changes and changes[0].new is None and changes[0].kind == "add":
            self.events += [change.row for change in changes]
        else:
            self.rows = applied(self.rows, changes, value=itemgetter(3))

    def until(self, ts: int) -> None:
        while not self.last or int(self.last.partition(".")[0]) < ts:
            self.next()

    def close(self) -> None:
        self._request.__exit__(None, None, None)
        self._client.close()


def test_states_are_those_of_their_snapshots_and_go_on_after_reconnects(server: ServerProcess) -> None:
    """Readers of one query, and of another; each event is compared with a scan of the snapshot that it names."""
    stop, random_ = threading.Event(), random.Random(7)
    asked = {
        "table": "scores",
        "where": "n > 0",
        "order_by": "-n",
        "limit": "5",
        "columns": "id,n",
        "interval_ms": "20",
    }

    def write() -> None:
        with server.connect() as db:
            while not stop.is_set():
                with db.transaction() as tx:
                    for _ in range(3):
                        tx.delta("scores", (random_.randrange(30),), n=random_.randint(-3, 5))
                time.sleep(0.005)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        streams = [Stream(server, **asked) for _ in range(3)] + [Stream(server, **{**asked, "limit": "2"})]
        with server.connect() as db:
            for turn in range(24):
                stream = streams[turn % 4]
                said = stream.next()
                with db.snapshot(as_of=said["snapshot"]) as snap:
                    found = snap.scan(
                        "scores",
                        where=kivi.col("n") > 0,
                        order_by="-n",
                        limit=5 if turn % 4 < 3 else 2,
                        columns=["id", "n"],
                    )
                    assert stream.rows == list(found)
                if turn % 5 == 4:  # the connection is lost: the other streams keep its query at hand
                    stream.close()
                    again = Stream(server, stream.last, **asked) if turn % 4 < 3 else Stream(server, **asked)
                    again.rows = stream.rows
                    streams[turn % 4] = again
                    if turn % 4 == 3:
                        streams[3] = Stream(server, **{**asked, "limit": "2"})
                        again.close()
        assert sum(stream.resets for stream in streams[:3]) <= 3  # the reconnected ones went on where they were
    finally:
        stop.set()
        writer.join()
    for stream in streams:
        stream.close()


def test_events_come_once_each_through_reconnects_and_a_kill(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server:
        with server.connect() as db:
            db.create_event_table("calls", event_time="ts", columns={"e": "int64", "ts": "timestamp"})
        stream, sent, seen = Stream(server, table="calls", where="e < 1000000"), 0, list[int]()
        for turn in range(6):
            with server.connect() as db:
                for _ in range(20):
                    db.append("calls", [{"e": sent + i, "ts": BEGIN_US + i} for i in range(3)])
                    sent += 3
            while len(seen) + len(stream.events) < sent - 10:
                stream.next()
            seen += [event["e"] for event in stream.events]
            stream.close()
            if turn == 2:
                server.restart()
            stream = Stream(server, stream.last, table="calls", where="e < 1000000")
        while len(seen) + len(stream.events) < sent:
            stream.next()
        seen += [event["e"] for event in stream.events]
        stream.close()
        assert seen == list(range(sent))


def test_a_rollup_and_who_reads_nothing(server: ServerProcess) -> None:
    stream = Stream(server, table="calls_5m", step="1h", columns="n,total")
    with server.connect() as db:
        ts = db.append("calls", [{"e": i % 4, "ts": BEGIN_US + i * 60_000_000, "us": i} for i in range(200)])
        stream.until(ts)
        with db.snapshot() as snap:
            rows = snap.rollup("calls_5m", step="1h", measures=["n", "total"])
            assert [(r["n"], r["total"]) for r in rows] == [(row["n"], row["total"]) for row in stream.rows]
            by_endpoint = [{"e": row["e"], "n": row["n"]} for row in snap.rollup("calls_5m", by=["e"], measures=["n"])]
        stream.close()
        for columns in ("n", "e,n"):  # as /rows is asked for it
            with contextlib.closing(Stream(server, table="calls_5m", by="e", columns=columns)) as named:
                named.until(ts)
                assert named.rows == by_endpoint
        # A client that takes nothing: others go on, and when it reads at last it has a real state.
        host, _, port = base(server).rpartition("/")[2].partition(":")
        with socket.create_connection((host, int(port)), 60) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            slow.sendall(b"GET /v1/live?table=scores&interval_ms=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            quick = Stream(server, table="scores", interval_ms="0")
            for i in range(60):
                with db.transaction() as tx:
                    tx.put("scores", (500 + i % 3,), pad=str(i) * 40_000)
            with db.transaction() as tx:
                tx.put("scores", (600,), pad="last")
            assert tx.commit_ts is not None
            quick.until(tx.commit_ts)
            quick.close()
            said = b""
            with http.client.HTTPResponse(slow) as slow_stream:  # a large state comes in several chunks
                slow_stream.begin()
                while b'"pad":"last"' not in said:
                    said = slow_stream.readline()
            state = json.loads(said.removeprefix(b"data: "))
            assert state["snapshot"] >= tx.commit_ts or state["changes"]


def test_columns_that_are_added_come_as_those_there_were(server: ServerProcess) -> None:
    """A stream of all columns has those of each snapshot, as JSON; one that names its columns keeps these."""
    with server.connect() as db:
        db.create_table("items", key={"id": "int64"}, columns={"n": "int64"}, history="1h")
        db.create_event_table("sales", event_time="ts", columns={"e": "int64", "ts": "timestamp", "d": "decimal(9,2)"})
        groups = ["e", kivi.time_slot("ts", "5m", name="slot")]
        db.create_aggregate("sales_5m", source="sales", group_by=groups, measures={"n": kivi.count()}, history="1h")
        streams = {
            "items": Stream(server, table="items", interval_ms="0"),
            "named": Stream(server, table="items", columns="n,id", interval_ms="0"),
            "rollup": Stream(server, table="sales_5m", by="e", interval_ms="0"),
            "sales": Stream(server, table="sales", interval_ms="0"),
        }

        def reads(snap: Any) -> dict[str, list[Any]]:
            items, rollup = snap.scan("items"), snap.rollup("sales_5m", by=["e"])
            named = snap.scan("items", columns=["n", "id"])
            found = {"items": items, "named": named, "rollup": rollup, "sales": snap.scan("sales")}
            return {
                name: [{k: rendering.plain(v, exact=True) for k, v in row.items()} for row in rows]
                for name, rows in found.items()
            }

        def follow(upto: int) -> None:
            for name, stream in streams.items():
                while not stream.last or int(stream.last.partition(".")[0]) < upto:
                    said = stream.next()
                    with db.snapshot(as_of=said["snapshot"]) as snap:
                        wanted = reads(snap)[name]
                        if name == "sales":  # of one event each: those of before keep the columns that they came with
                            assert [list(row) for row in stream.events[-1:]] == [list(row) for row in wanted[-1:]]
                            assert [row["e"] for row in stream.events] == [row["e"] for row in wanted]
                        else:
                            assert [[*row.items()] for row in stream.rows] == [[*row.items()] for row in wanted]

        for i in range(3):
            more = {f"price{i - 1}": "9.99", f"at{i - 1}": BEGIN_US} if i else {}
            with db.transaction() as tx:
                tx.put("items", (1,), n=i, **more)
                tx.append("sales", [{"e": i, "ts": BEGIN_US, "d": "1.25"} | more])
            assert tx.commit_ts is not None
            follow(tx.commit_ts)
            added = {f"price{i}": "decimal(9,2)", f"at{i}": "timestamp"}
            db.alter_table("items", add_columns=added)
            db.alter_table("sales", add_columns=added)
            db.alter_aggregate("sales_5m", add_measures={f"money{i}": kivi.sum("d"), f"last{i}": kivi.max("ts")})
        assert streams["items"].rows[0]["price1"] == "9.99"
        assert streams["items"].rows[0]["at1"] == "2026-01-01T00:00:00Z"
        assert streams["rollup"].rows[0]["money1"] == "1.25"
        for stream in streams.values():
            stream.close()


def test_who_comes_after_a_hierarchy_has_changed_follows_the_new_one(server: ServerProcess) -> None:
    with server.connect() as db:
        db.create_hierarchy("topics", parent="parent")
        db.create_table("news", key={"id": "int64"}, columns={"topic": "string"})
        with db.transaction() as tx:
            for topic, parent in (("all", None), ("a", "all"), ("b", None)):
                tx.put("topics", (topic,), parent=parent)
            for number, topic in enumerate("ab"):
                tx.put("news", (number,), topic=topic)
        asked = {"table": "news", "where": "topic.under('all')"}
        first, second = Stream(server, **asked), Stream(server, **asked)
        for stream in (first, second):
            assert [row["topic"] for row in (stream.next(), stream.rows)[1]] == ["a"]
        with db.transaction() as tx:
            tx.put("topics", ("b",), parent="all")
        third = Stream(server, **asked)
        third.next()
        assert sorted(row["topic"] for row in third.rows) == ["a", "b"]
        with db.transaction() as tx:
            tx.put("news", (2,), topic="b")
            tx.put("news", (3,), topic="a")
        for stream, topics in ((first, "aa"), (second, "aa"), (third, "abba")):
            assert tx.commit_ts is not None
            stream.until(tx.commit_ts)
            assert [row["topic"] for row in sorted(stream.rows, key=itemgetter("id"))] == [*topics]
            stream.close()


def test_what_ends_a_stream(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("root admin\ndash reader tables=a\n")
    with (
        ServerProcess(tmp_path / "data", "--http", "localhost:0", "--token-file", str(tokens)) as server,
        server.connect(access_token="root") as db,
    ):
        for name in ("a", "b"):
            db.create_table(name, key={"id": "int64"}, columns={"n": "int64"})
        http = httpx.Client(base_url=base(server), headers={"Authorization": "Bearer dash"}, timeout=60)
        for parameters, status in (
            ({"table": "b"}, 403),
            ({"table": "a", "where": "m > 1"}, 400),
            ({"table": "a", "step": "1h"}, 400),
            ({"table": "a", "since": "x"}, 400),
            ({"table": "a", "match": "A B"}, 400),  # matches are told over gRPC
            ({}, 400),
        ):
            assert http.get("/v1/live", params=parameters).status_code == status
        with http.stream("GET", "/v1/live", params={"table": "a", "interval_ms": "0"}) as reply:
            lines = reply.iter_lines()
            assert next(line for line in lines if line.startswith("data: "))
            tokens.write_text("root admin\n")
            until, said = time.monotonic() + 30, ""
            while "error" not in said and time.monotonic() < until:
                with db.transaction() as tx:
                    tx.put("a", (1,), n=time.monotonic_ns())
                said = next(line for line in lines if line.startswith(("event", "data")))
            assert "withdrawn" in next(line for line in lines if line.startswith("data: "))
        http.headers["Authorization"] = "Bearer root"
        with http.stream("GET", "/v1/live", params={"table": "b"}) as reply:
            lines = reply.iter_lines()
            assert next(line for line in lines if line.startswith("data: "))
            server.signal(15)
            assert next(line for line in lines if line.startswith("event: ")) == "event: error"
        http.close()
        assert server.wait() == 0


def test_several_states_in_one_stream_have_snapshots_in_common(tmp_path: Path) -> None:
    """Those of one aggregate, while events come: where all parts know a snapshot each is the rollup there."""
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server, server.connect() as db:
        db.create_event_table("calls", event_time="ts", columns={"e": "int64", "ts": "timestamp", "us": "int64"})
        measures = {"n": kivi.count(), "total": kivi.sum("us")}
        slots = ["e", kivi.time_slot("ts", "5m", name="slot")]
        db.create_aggregate("calls_5m", source="calls", group_by=slots, measures=measures, history="1h")
        minutes = [i * 60_000_000 + BEGIN_US for i in range(60)]
        db.append("calls", [{"e": i % 3, "ts": ts, "us": i} for i, ts in enumerate(minutes)])
        begin, end = f"{BEGIN_US // 1_000}", f"{BEGIN_US // 1_000 + 600_000}"
        asked: dict[str, dict[str, Any]] = {  # how it is asked for, and what it is
            "by=&last=15m": {"last": "15m"},
            "by=&step=5m&last=15m": {"step": "5m", "last": "15m"},
            "by=e&last=15m&columns=total": {"by": ["e"], "last": "15m", "measures": ["total"]},
            f"by=&from={begin}&to={end}": {"start": BEGIN_US, "end": BEGIN_US + 600_000_000},
        }
        queries = [f"table=calls_5m&interval_ms=50&{text}" for text in asked]
        states: list[list[Any]] = [[] for _ in asked]
        upto, seen, sent = [0] * len(asked), set[int](), 0
        with httpx.stream(
            "GET", f"{base(server)}/v1/live", params=[("of", each) for each in queries], timeout=60
        ) as reply:
            part, ts = 0, 0
            for line in reply.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    assert value.startswith("part"), value
                    part = int(value.removeprefix("part"))
                elif name == "id":
                    ts = int(value)
                elif name == "data":
                    said = json.loads(value)
                    changes = [Change(**change) for change in said["changes"]]
                    states[part] = applied([] if said["reset"] else states[part], changes, value=itemgetter(3))
                elif not line and ts:
                    upto[part], ts = ts, 0
                    if len({*upto}) > 1 or upto[0] in seen:
                        continue
                    seen.add(upto[0])
                    with db.snapshot(as_of=upto[0]) as snap:
                        for state, arguments in zip(states, asked.values(), strict=True):
                            assert state == [plain(row) for row in snap.rollup("calls_5m", **arguments)]
                    if len(seen) == 6:
                        break
                    sent += 1
                    db.append("calls", [{"e": sent, "ts": minutes[-1] + sent * 120_000_000, "us": sent}])
        for wrong, status in (
            ({"of": queries[0], "table": "calls_5m"}, 400),
            ({"of": "table=calls"}, 400),
            ({"of": [queries[0]] * 17}, 400),
            ({"of": "table=nobody"}, 404),
        ):
            assert httpx.get(f"{base(server)}/v1/live", params=httpx.QueryParams(wrong)).status_code == status


def plain(row: Any) -> dict[str, Any]:
    slot = {"slot": row["slot"].isoformat().replace("+00:00", "Z")} if "slot" in row else {}
    return {**row, **slot}
