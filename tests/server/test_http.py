"""The ASGI application: a real server on loopback, what it answers compared with what a client of gRPC reads."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pyarrow as pa
import pytest
from kivi_server.http import routes
from kivi_server.http.prometheus import PATHS

import kivi
from tests.serverproc import EndedError, ServerProcess
from tests.waiting import wait_until

BEGIN_US = 1_767_225_600_000_000  # 2026-01-01
ARROW = {"Content-Type": "application/vnd.apache.arrow.stream"}
LINES = {"Content-Type": "application/x-ndjson"}


def base(server: ServerProcess) -> str:
    return next(line for line in server.output if line.startswith("http on ")).split()[-1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = ["--http", "localhost:0", "--http-origins", "https://board.example"]
    with ServerProcess(tmp_path_factory.mktemp("http") / "data", *arguments) as running:
        with running.connect() as db:
            db.create_table(
                "accounts",
                key={"id": "int64"},
                columns={"name": "string", "photo": "bytes", "at": "timestamp", "balance": kivi.sum("decimal(12,2)")},
            )
            db.create_event_table(
                "calls",
                event_time="ts",
                columns={
                    "endpoint": "int64",
                    "ts": "timestamp",
                    "us": "int64",
                    "cost": "decimal(12,2)",
                    "x": "float64",
                },
            )
            db.create_aggregate(
                "calls_5m",
                source="calls",
                group_by=["endpoint", kivi.time_slot("ts", "5m", name="slot")],
                measures={"n": kivi.count(), "total": kivi.sum("us"), "latency": kivi.quantiles("us")},
            )
            db.create_table("quiet", key={"id": "int64"}, columns={"n": "int64"})
            db.create_table("latest", key={"id": "int64"}, columns={"at": kivi.max("timestamp")})
            db.create_event_table("due", event_time="ts", columns={"ts": "timestamp", "due": "timestamp"})
        yield running


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base(server), timeout=60) as client:
        yield client


def transact(http: httpx.Client, *operations: Any, status: int = 200, token: str | None = None, **more: Any) -> Any:
    headers = {} if token is None else {"Idempotency-Key": token}
    reply = http.post("/v1/transactions", json={"operations": operations, **more}, headers=headers)
    assert reply.status_code == status, reply.text
    return reply.json()


def test_a_transaction_is_one_commit_and_its_values_are_exact(server: ServerProcess, http: httpx.Client) -> None:
    at = "2026-07-01T12:00:00.000001Z"
    ts = transact(
        http,
        {"op": "put", "table": "accounts", "key": [1], "values": {"name": "ada", "photo": "0x00ff", "at": at}},
        {"op": "delta", "table": "accounts", "key": [1], "values": {"balance": "12345678.91"}},
        {"op": "insert", "table": "accounts", "key": [2], "values": {"name": "bob"}},
        {"op": "delete", "table": "accounts", "key": [3]},
        {"op": "append", "table": "calls", "records": [{"endpoint": 7, "ts": at, "us": 9, "cost": 0.1, "x": 0.1}]},
    )["commit_ts"]
    with server.connect() as db:
        with db.snapshot(as_of=ts) as snap:
            ada, bob = snap.get_many("accounts", [(1,), (2,)])
            (event,) = snap.scan("calls", where=kivi.col("endpoint") == 7)
        assert (ada["name"], ada["photo"], ada["balance"]) == ("ada", b"\x00\xff", Decimal("12345678.91"))
        assert bob["name"] == "bob" and ada["at"] == event["ts"]
        assert (event["cost"], event["x"]) == (Decimal("0.10"), 0.1)
    large = '[{"endpoint": 8, "ts": 0, "x": 123456789012345680000}]'  # as JavaScript writes that float64
    reply = http.post("/v1/tables/calls/append", content=large, headers={"Content-Type": "application/json"})
    assert reply.status_code == 200, reply.text
    with server.connect() as db, db.snapshot(min_snapshot=reply.json()["commit_ts"]) as snap:
        assert [row["x"] for row in snap.scan("calls", where=kivi.col("endpoint") == 8)] == [1.2345678901234568e20]
    reply = http.get("/v1/tables/accounts/rows", params={"key": "1", "min_snapshot": ts})
    (row,) = reply.json()["rows"]
    assert (row["balance"], row["photo"], row["at"]) == ("12345678.91", "0x00ff", at)
    assert int(reply.headers["X-Kivi-Snapshot"]) >= ts
    assert http.get("/v1/tables/accounts/rows", params={"key": "77"}).status_code == 404


def test_a_snapshot_before_all_tables_or_before_its_own_is_named(server: ServerProcess, http: httpx.Client) -> None:
    """What is wrong is said: no read has told of snapshot 0, and a table that came later conflicts as a whole."""
    operation = {"op": "append", "table": "later", "records": [{"ts": BEGIN_US}]}
    with server.connect() as db:
        before = db.watermark()
        db.create_event_table("later", event_time="ts", columns={"ts": "timestamp"})
        created = db.watermark()

    def post(**body: Any) -> httpx.Response:
        return http.post("/v1/transactions", json={"operations": [operation], **body})

    zero = post(snapshot=0)
    assert zero.status_code == 400 and "at which there is no table: leave it out" in zero.json()["error"]
    earlier = post(snapshot=before)
    assert earlier.status_code == 409 and earlier.json()["reason"] == "Conflict"
    assert "table 'later' itself was created, altered" in earlier.json()["error"]
    assert f"by the commit at {created}, after this transaction's snapshot {before}" in earlier.json()["error"]
    assert post(snapshot=created).status_code == 200 and post().status_code == 200


@pytest.mark.parametrize("unit_us", [1_000_000, 1_000])
def test_times_that_must_be_in_another_unit_are_refused(
    server: ServerProcess, http: httpx.Client, unit_us: int
) -> None:
    """As ``kivi append`` refuses them: they would be of 1970, whole numbers being microseconds."""
    at = BEGIN_US // unit_us
    unit = "seconds" if unit_us == 1_000_000 else "milliseconds"
    event = {"endpoint": unit_us, "ts": at}
    for body, headers in (
        (json.dumps([event, {**event, "ts": at + 1}]), {"Content-Type": "application/json"}),
        (json.dumps(event), LINES),
    ):
        reply = http.post("/v1/tables/calls/append", content=body, headers=headers)
        assert reply.status_code == 400 and f"column 'ts' has {at}: that is 2026-" in reply.json()["error"]
        assert f"in {unit}" in reply.json()["error"] and f"multiply by {unit_us:,}" in reply.json()["error"]
    put = {"op": "put", "table": "accounts", "key": [unit_us], "values": {"at": at}}
    for operation in ({"op": "append", "table": "calls", "records": [event]}, put):
        assert f"in {unit}" in transact(http, operation, status=400)["error"]
    with server.connect() as db, db.snapshot() as snap:
        assert not [*snap.scan("calls", where=kivi.col("endpoint") == unit_us)] and not snap.get("accounts", (unit_us,))
    early = [{**event, "ts": ts} for ts in (at, 0, -at)] + [{**event, "ts": "1970-01-01T00:20:00Z"}]
    assert http.post("/v1/tables/calls/append", json=early).status_code == 200  # these say what they are
    transact(
        http, {**put, "values": {"at": "1970-01-01T00:20:00Z"}}, {**put, "key": [unit_us + 1], "values": {"at": 1}}
    )


@pytest.mark.parametrize("at", [BEGIN_US * 1_000, -(2**63), "0001-01-01T00:00:00+05:00"])
def test_a_time_that_no_reader_could_be_given_is_refused(http: httpx.Client, at: Any) -> None:
    """It would be in the way of every reader of its table."""
    put = {"op": "put", "table": "accounts", "key": [4001], "values": {"at": at}}
    delta = {"op": "delta", "table": "latest", "key": [4001], "values": {"at": at}}
    append = {"op": "append", "table": "due", "records": [{"ts": BEGIN_US, "due": at}]}
    for operation in (put, {**put, "op": "insert"}, delta, append):
        assert "outside the years 1 to 9999" in transact(http, operation, status=400)["error"]
    for table in ("accounts", "latest", "due"):
        assert http.get(f"/v1/tables/{table}/rows").status_code == 200


def test_csv_tells_null_from_a_text_without_characters(http: httpx.Client) -> None:
    names = {3001: "", 3002: None, 3003: 'a "b", \r\n', 3004: "\r"}
    transact(
        http,
        *({"op": "put", "table": "accounts", "key": [key], "values": {"name": name}} for key, name in names.items()),
    )
    for path in ("/v1/tables/accounts/rows?", "/rows?table=accounts&"):
        text = http.get(f"{path}format=csv&columns=id,name&where=id > 3000 and id < 3005").text
        assert text == 'id,name\r\n3001,""\r\n3002,\r\n3003,"a ""b"", \r\n"\r\n3004,"\r"\r\n'


def test_conflicts_and_repetitions(server: ServerProcess, http: httpx.Client) -> None:
    put = {"op": "put", "table": "quiet", "key": [1], "values": {"n": 1}}
    seen = transact(http, put)["commit_ts"]
    transact(http, {**put, "values": {"n": 2}})
    for mine in (put, {"op": "guard", "table": "quiet", "key": [1], "column": "n"}):
        other = {"op": "put", "table": "quiet", "key": [2], "values": {"n": 0}}
        lost = transact(http, mine, other, snapshot=seen, status=409)
        assert lost["reason"] == "Conflict" and lost["details"]["key"] == [1]
    with server.connect() as db:
        assert db.get("quiet", (2,)) is None
    insert = {"op": "insert", "table": "quiet", "key": [9], "values": {"n": 9}}
    first = transact(http, insert, token="insert-9")
    assert transact(http, insert, token="insert-9") == first
    assert transact(http, insert, status=409)["reason"] == "RowExists"
    assert transact(http, insert, token="insert-9", snapshot=seen) == first
    for other in ({**insert, "key": [10]}, {**insert, "values": {"n": 10}}):
        assert transact(http, other, token="insert-9", status=400)["reason"] == "InvalidArgument"


def test_r16_what_happened_and_was_not_answered_is_answered_when_it_comes_again(
    server: ServerProcess, http: httpx.Client
) -> None:
    """Its row is there, by its own first attempt, and that is no RowExists."""
    insert = {"op": "insert", "table": "accounts", "key": [61], "values": {"name": "cy"}}
    delta = {"op": "delta", "table": "accounts", "key": [62], "values": {"balance": "1.50"}}
    body = json.dumps({"operations": [insert, delta]}).encode()
    head = f"Content-Type: application/json\r\nIdempotency-Key: lost\r\nContent-Length: {len(body)}"
    address = urlsplit(base(server))
    with server.connect() as db:
        with socket.create_connection((address.hostname, address.port)) as lost:
            lost.sendall(f"POST /v1/transactions HTTP/1.1\r\nHost: {address.netloc}\r\n{head}\r\n\r\n".encode() + body)
            wait_until(lambda: db.get("accounts", (61,)))
        last = db.watermark()
        again = [transact(http, insert, delta, token="lost")["commit_ts"] for _ in range(2)]
        assert again[0] == again[1] <= last
        assert transact(http, insert, delta, status=409)["reason"] == "RowExists"
        assert db.get("accounts", (62,))["balance"] == Decimal("1.50")


@pytest.mark.parametrize("form", ["json", "lines", "arrow", "gzip"])
def test_appends_in_every_form_are_the_same_events(server: ServerProcess, http: httpx.Client, form: str) -> None:
    endpoint = {"json": 11, "lines": 12, "arrow": 13, "gzip": 14}[form]
    events = [{"endpoint": endpoint, "ts": BEGIN_US + i, "us": i, "cost": f"{i}.25", "x": i / 4} for i in range(500)]
    lines = "\n".join(map(json.dumps, events)).encode()
    columns = {name: [event[name] for event in events] for name in events[0]}
    columns["cost"] = [Decimal(str(cost)) for cost in columns["cost"]]
    table = pa.table({**columns, "ts": pa.array(columns["ts"], pa.timestamp("us", "UTC"))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: dict[str, Any] = {
        "json": {"json": events},
        "lines": {"content": lines, "headers": LINES},
        "arrow": {"content": sink.getvalue().to_pybytes(), "headers": ARROW},
        "gzip": {"content": gzip.compress(lines), "headers": {**LINES, "Content-Encoding": "gzip"}},
    }
    sent = content[form]
    sent["headers"] = {**sent.get("headers", {}), "Idempotency-Key": f"append-{form}"}
    replies = [http.post("/v1/tables/calls/append", **sent) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200] * 3
    assert len({reply.json()["commit_ts"] for reply in replies}) == 1
    reply = http.get("/v1/tables/calls/rows", params={"where": f"endpoint == {endpoint}", "format": "arrow"})
    with pa.ipc.open_stream(reply.content) as reader:
        read = reader.read_all()
    with server.connect() as db, db.snapshot() as snap:
        assert read.equals(snap.to_arrow("calls", where=kivi.col("endpoint") == endpoint, any_order=False))
    assert read.select(table.column_names).to_pylist() == table.to_pylist()


def test_questions_are_those_of_a_client(server: ServerProcess, http: httpx.Client) -> None:
    http.post("/v1/tables/calls/append", json=[{"endpoint": i % 3, "ts": BEGIN_US, "us": i} for i in range(90)])
    asked = {
        "table": "calls", "group_by": ["endpoint"], "where": "endpoint < 3", "order_by": ["-total"], "limit": 2,
        "measures": {"total": "sum(us)", "latency": "quantiles(us)"}, "derived": {"p90": "quantile(latency, 0.9)"},
        "columns": ["endpoint", "total", "p90"], "having": "total > 0",
    }  # fmt: skip
    reply = http.post("/v1/query", json=asked).json()
    with server.connect() as db, db.snapshot() as snap:
        expected = snap.query(
            "calls", group_by=["endpoint"], where=kivi.col("endpoint") < 3, order_by="-total",
            measures={"total": kivi.sum("us"), "latency": kivi.quantiles("us")},
            derived={"p90": "quantile(latency, 0.9)"}, columns=["endpoint", "total", "p90"],
        ).to_arrow().to_pylist()  # fmt: skip
    assert reply["rows"] == expected[:2] and reply["more"] and len(expected) == 3
    one = {"table": "calls", "group_by": "endpoint", "where": "endpoint < 3", "measures": {"total": "sum(us)"}}
    told = http.post("/v1/query", json={**one, "order_by": "-total", "columns": "endpoint"})  # one name, as in Python
    assert told.json()["rows"] == [{"endpoint": row["endpoint"]} for row in expected]
    for wrong in ({"order_by": 1}, {"order_by": ["total", 1]}, {"columns": {"endpoint": 1}}):
        refused = http.post("/v1/query", json={**one, **wrong})
        assert refused.status_code == 400 and "is a text or a list of texts" in refused.json()["error"]
    assert http.post("/v1/query", json={**one, "order_by": "-total,endpoint"}).status_code == 400  # no column has it
    sql = {"sql": "select endpoint, sum(us)::bigint as total from calls where endpoint < $most group by 1 order by 1"}
    told = http.post("/v1/sql", json={**sql, "parameters": {"most": 3}}, headers={"Accept": "application/x-ndjson"})
    assert [json.loads(line) for line in told.text.splitlines()] == [
        {"endpoint": row["endpoint"], "total": row["total"]} for row in sorted(expected, key=lambda r: r["endpoint"])
    ]
    assert http.post("/v1/sql", json={"sql": "drop table calls"}).status_code == 400
    assert http.post("/v1/query", json={"table": "calls", "measures": {"n": "nothing(us)"}}).status_code == 400


def test_whole_numbers_that_no_double_holds_are_texts_to_readers_that_say_so(
    server: ServerProcess, http: httpx.Client
) -> None:
    """Each keeps the form that it asked for, also of what is kept for equal questions, and its tag is of that form."""
    wide = {"id": 2**53 + 1, "n": 2**53 - 1, "x": -(2**53), "l": [2**62, 7]}
    with server.connect() as db:
        columns: dict[str, Any] = {"ts": "timestamp", **dict.fromkeys(("id", "n", "x", "y"), "int64")}
        db.create_event_table("wide", event_time="ts", columns=columns)
        measures = {"n": kivi.max("n"), "x": kivi.min("x"), "l": kivi.largest("y", 2)}
        db.create_aggregate("widest", source="wide", group_by=["id"], measures=measures)
    records = [{"id": wide["id"], "n": wide["n"], "x": wide["x"], "y": y, "ts": BEGIN_US} for y in (2**62, 7)]
    assert http.post("/v1/tables/wide/append", json=records).status_code == 200
    texts = {"id": str(2**53 + 1), "n": 2**53 - 1, "x": str(-(2**53)), "l": [str(2**62), 7]}
    names = {"columns": "id,n,x,l"}
    tags = set()
    for _ in range(2):
        for accept, expected in (("application/json", wide), ("application/json; integers=text", texts)):
            reply = http.get("/v1/tables/widest/rows", params=names, headers={"Accept": accept})
            assert reply.json()["rows"] == [expected] and "Accept" in reply.headers["Vary"]
            tags.add(reply.headers["ETag"])
            asked = {"table": "wide", "group_by": "id", "measures": {"n": "max(n)", "x": "min(x)"}}
            told = http.post("/v1/query", json=asked, headers={"Accept": accept}).json()["rows"]
            assert told == [{name: expected[name] for name in ("id", "n", "x")}]
            sql = http.post("/v1/sql", json={"sql": "select id, n from widest"}, headers={"Accept": accept}).json()
            assert sql["rows"] == [{name: expected[name] for name in ("id", "n")}]
            assert sql["types"] == {"id": "int64", "n": "int64"}
            with http.stream("GET", "/v1/live?table=widest", headers={"Accept": accept}) as stream:
                data = next(line for line in stream.iter_lines() if line.startswith("data: "))
            (change,) = json.loads(data.removeprefix("data: "))["changes"]
            assert change["row"] == expected
    assert len(tags) == 2
    lines = http.get("/v1/tables/widest/rows", params=names, headers={"Accept": "application/x-ndjson;integers=text"})
    assert json.loads(lines.text) == texts
    empty = http.post("/v1/sql", json={"sql": "select id, 1.5 as d from widest where false"}).json()
    assert (empty["rows"], empty["types"]) == ([], {"id": "int64", "d": "decimal128(2, 1)"})


def test_a_question_that_nobody_waits_for_any_more_makes_room_for_others(
    server: ServerProcess, http: httpx.Client
) -> None:
    """As of a page that was left, or whose button to stop it was pressed: more than there may be at a time."""
    slow = {"sql": "select count(*) from range(3000000000) a, range(1000) b where (a.range * b.range) % 7 = 3"}
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/sql", json=slow, timeout=0.5)
    assert http.post("/v1/sql", json={"sql": "select 1 as one"}, timeout=45).json()["rows"] == [{"one": 1}]
    with server.connect() as db:
        assert db.stats()["server_sql_killed"] >= 1


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("select 1 as a, 2 as a", {"a": 1, "a_1": 2}),
        ("select sum(x) as s, 5::decimal(18,0) as d from range(4) t(x)", {"s": 6, "d": "5"}),
        ("select sum(x) as s from range(0) t(x)", {"s": None}),
        ("select timestamp_ns '1970-01-19' as t", {"t": "1970-01-19T00:00:00Z"}),
        ("select timestamp_s '2020-01-01' as t", {"t": "2020-01-01T00:00:00Z"}),
        ("select date '2020-01-01' as d, time '10:00:00' as t", {"d": "2020-01-01", "t": "10:00:00"}),
        ("select 'inf'::double as x, 'nan'::double as n", {"x": "Infinity", "n": None}),
        ("select date '99999-01-01' as d", "OutOfRange"),
        ("select timestamp 'infinity' as t", "OutOfRange"),
    ],
)
def test_answers_of_sql_have_their_columns_and_values(http: httpx.Client, sql: str, said: Any) -> None:
    reply = http.post("/v1/sql", json={"sql": sql}).json()
    assert (reply.get("rows") or reply["reason"]) == ([said] if isinstance(said, dict) else said)


@pytest.mark.parametrize("start", [1_767_225_600, 1_767_225_600_000, "1767225600000"])
def test_a_question_from_a_time_in_another_unit_on_is_refused(http: httpx.Client, start: Any) -> None:
    reply = http.post("/v1/query", json={"table": "calls", "measures": {"n": "count()"}, "start": start})
    assert reply.status_code == 400 and "whole numbers are microseconds" in reply.json()["error"]


def test_who_asks_for_too_much_is_not_told_to_ask_again(http: httpx.Client) -> None:
    reply = http.post("/v1/sql", json={"sql": "select repeat('x', 1000) as x from range(100000)"})
    assert (reply.status_code, reply.json()["details"]["limit"]) == (429, "http_answer_bytes")
    assert "Retry-After" not in reply.headers


@pytest.mark.parametrize("number", ["1e400", "-1e999999"])
def test_a_number_that_no_float_holds_is_refused_and_no_infinity(http: httpx.Client, number: str) -> None:
    for path, body in (
        ("/v1/sql", f'{{"sql": "select ? as a", "parameters": [{number}]}}'),
        ("/v1/tables/calls/append", f'[{{"endpoint": 1, "ts": {BEGIN_US}, "x": {number}}}]'),
    ):
        reply = http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code == 400 and "NaN and infinities are not accepted" in reply.json()["error"], path


def test_a_tag_is_the_last_change_of_its_table_and_no_other(server: ServerProcess, http: httpx.Client) -> None:
    def get(table: str, tag: str = "") -> httpx.Response:
        return http.get(f"/v1/tables/{table}/rows", headers={"If-None-Match": tag})

    tag = get("quiet").headers["ETag"]
    transact(http, {"op": "put", "table": "accounts", "key": [5], "values": {"name": "x"}})
    unchanged = get("quiet", f'"other", {tag}')
    assert unchanged.status_code == 304 and unchanged.headers["ETag"] == tag and not unchanged.content
    of_aggregate = get("calls_5m").headers["ETag"]
    transact(http, {"op": "put", "table": "quiet", "key": [5], "values": {"n": 1}})
    changed = get("quiet", tag)
    assert changed.status_code == 200 and changed.headers["ETag"] != tag
    assert get("calls_5m", of_aggregate).status_code == 304
    http.post("/v1/tables/calls/append", json=[{"endpoint": 1, "ts": BEGIN_US, "us": 1}])
    assert get("calls_5m", of_aggregate).status_code == 200  # it follows its source
    csv = http.get("/v1/tables/quiet/rows", headers={"Accept": "text/csv", "If-None-Match": changed.headers["ETag"]})
    assert csv.status_code == 200 and csv.headers["ETag"] != changed.headers["ETag"]
    with server.connect() as db:
        db.drop("quiet")
        db.create_table("quiet", key={"id": "int64"}, columns={"n": "int64"})
    assert get("quiet", changed.headers["ETag"]).json()["rows"] == []


def test_who_says_nothing_of_an_answer_gets_it(http: httpx.Client) -> None:
    every = {"If-None-Match": "*"}
    assert http.get("/v1/tables/quiet/rows?key=987654", headers=every).status_code == 404
    assert http.get("/v1/tables/calls/rows", headers=every).status_code == 200


def test_an_answer_about_a_hierarchy_changes_with_it(server: ServerProcess, http: httpx.Client) -> None:
    """Neither a 304 nor an answer that is kept is of a hierarchy as it was."""
    with server.connect() as db:
        db.create_event_table("stories", event_time="ts", columns={"topic": "string", "ts": "timestamp"})
        db.create_hierarchy("topics", parent="parent")
    http.post("/v1/tables/stories/append", json=[{"topic": "b", "ts": BEGIN_US}])
    asked = {"where": "topic.under('a')"}
    question = {"table": "stories", "measures": {"n": "count()"}, **asked}

    def rows(tag: str = "") -> httpx.Response:
        return http.get("/v1/tables/stories/rows", params=asked, headers={"If-None-Match": tag})

    tag = ""
    for parent, below in (("other", 0), ("a", 1), (None, 0)):
        transact(http, {"op": "put", "table": "topics", "key": ["b"], "values": {"parent": parent}})
        reply = rows(tag)
        assert reply.status_code == 200 and len(reply.json()["rows"]) == below
        assert http.post("/v1/query", json=question).json()["rows"] == [{"n": below}]
        tag = reply.headers["ETag"]
        assert rows(tag).status_code == 304
    with server.connect() as db:
        db.drop("topics_by_parent")
    assert rows(tag).status_code == 400


def test_no_answer_is_older_than_what_was_acknowledged(http: httpx.Client) -> None:
    """Writers and pollers at once: a poll that begins after a commit was acknowledged shows it, shared or not."""
    transact(http, {"op": "put", "table": "accounts", "key": [100], "values": {"name": "0"}})
    newest, stop = [0], threading.Event()

    def write() -> None:
        for i in range(1, 60):
            transact(http, {"op": "put", "table": "accounts", "key": [100], "values": {"name": str(i)}})
            newest[0] = i
        stop.set()

    def poll(_: int) -> int:
        polls, tag, seen = 0, "", 0
        while not stop.is_set():
            least = newest[0]
            reply = http.get("/v1/tables/accounts/rows", params={"key": "100"}, headers={"If-None-Match": tag})
            if reply.status_code == 200:
                tag, seen = reply.headers["ETag"], int(reply.json()["rows"][0]["name"])
            assert seen >= least, (seen, least, reply.status_code)
            polls += 1
        return polls

    with ThreadPoolExecutor(4) as pool:
        pollers = [pool.submit(poll, i) for i in range(3)]
        write()
        assert sum(poller.result() for poller in pollers) > 20


def test_errors_are_named(server: ServerProcess, http: httpx.Client) -> None:
    get, post = http.get, http.post
    deep = b"[" * 100_000
    bomb = gzip.compress(bytes(80 << 20))
    js, text, packed = {"Content-Type": "application/json"}, {"Content-Type": "text/html"}, {"Content-Encoding": "gzip"}

    def append(content: Any, headers: dict[str, str]) -> httpx.Response:
        return post("/v1/tables/calls/append", content=content, headers=headers)

    cases: list[tuple[httpx.Response, int, str]] = [
        (get("/v1/tables/nothing"), 404, "NotFound"),
        (get("/v1/tables/nothing/rows"), 404, "NotFound"),
        (get("/v1/tables/calls/rows", params={"nope": "1"}), 400, "InvalidArgument"),
        (get("/v1/tables/calls/rows", headers={"Accept": "image/png"}), 406, "NotAcceptable"),
        (get("/v1/tables/accounts/rows", params={"as_of": 1 << 62}), 400, "InvalidArgument"),
        (append(b"x", text), 415, "UnsupportedMediaType"),
        (append(b"x", ARROW), 400, "InvalidArgument"),
        (append(b'{"ts": 1}', js), 400, "InvalidArgument"),
        (append(b'[{"ts": "yesterday"}]', js), 400, "InvalidArgument"),
        (append(b'[{"ts": 1, "colour": 1}]', js), 400, "SchemaError"),
        (append(deep, js), 400, "InvalidArgument"),
        (append(bomb, LINES | packed), 413, "BodyTooLarge"),
        (append(b"no", LINES | packed), 400, "InvalidArgument"),
        (append(b"no", {**LINES, "Content-Encoding": "br"}), 415, "UnsupportedMediaType"),
        (post("/v1/tables/accounts/append", json=[{"id": 1}]), 400, "InvalidArgument"),
        (post("/v1/transactions", content=b'{"operations": NaN}', headers=js), 400, "InvalidArgument"),
        (post("/v1/query", content=b"\xff"), 400, "InvalidArgument"),
        (append(b'[{"ts": 1, "ts": 2}]', js), 400, "InvalidArgument"),
        (append(b'{"ts": 1, "us": 1, "us": 2}', LINES), 400, "InvalidArgument"),
        (append(b'[{"ts": "%s"}]' % (b"9" * 5_000), js), 400, "InvalidArgument"),
        (post("/v1/query", content=b'{"table": "calls", "table": "due"}'), 400, "InvalidArgument"),
        (
            post("/v1/sql", content=b'{"sql": "select ?", "parameters": [%s1%s]}' % (b"[" * 150, b"]" * 150)),
            400,
            "InvalidArgument",
        ),
        (post("/v1/query", content=b"{" + b" " * (2 << 20)), 413, "BodyTooLarge"),
    ]
    for reply, status, reason in cases:
        told = reply.json()
        assert (reply.status_code, told["reason"]) == (status, reason), told
        assert told["error"] and reply.headers["X-Request-Id"]
    said = append(b'{"ts": 1}\n\n{"ts": "x"}', LINES).json()["error"]
    assert said.startswith("line 3 of the body, column 'ts': 'x' is not a time")
    put = {"op": "put", "table": "accounts", "key": [1]}
    for operation in (7, {"op": "drop"}, {**put, "key": 1}, {**put, "more": 1}, {**put, "values": {"id": 1}}):
        transact(http, operation, status=400)
    assert get("/healthz", headers={"X-Request-Id": "mine"}).headers["X-Request-Id"] == "mine"


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("photo", "null", "the text 'null', which is no bytes"),
        ("at", "null", "the text 'null', which is no timestamp"),
        ("at", "'2026-01-01'", "no timestamp"),
        ("photo", "'0xff'", "no bytes"),
        ("photo", "AP8=", "write bytes as 0x and hexadecimal"),
        ("at", "20260101", "write the day as 2026-01-01"),
        ("balance", "1_000", "not a decimal"),
        ("balance", "null", "no decimal"),
    ],
)
def test_a_text_of_json_is_no_null_and_nothing_else_than_it_says(
    http: httpx.Client, column: str, value: str, said: str
) -> None:
    put = {"op": "put", "table": "accounts", "key": [77], "values": {column: value}}
    assert said in transact(http, put, status=400)["error"]
    assert http.get("/v1/tables/accounts/rows", params={"key": 77}).status_code == 404


@pytest.mark.parametrize("levels", [250, 985, 100_000])
@pytest.mark.parametrize(
    ("path", "before", "where"),
    [
        ("/v1/query", '{"table": "calls", "measures": ', "the body"),
        ("/v1/sql", '{"sql": "select 1", "parameters": ', "the body"),
        ("/v1/transactions", '{"operations": ', "the body"),
        ("/v1/tables/calls/append", '[{"ts": ', "the body"),
        ("/v1/tables/calls/append", '{"ts": 1}\n\n{"ts": ', "line 3 of the body"),
        ("/v1/traces", '{"resourceSpans": ', "the export"),
        ("/v1/metrics", '{"resourceMetrics": ', "the export"),
    ],
)
def test_json_that_is_nested_deeply_is_refused_by_what_it_is(
    http: httpx.Client, path: str, before: str, where: str, levels: int
) -> None:
    body = before + "[" * levels + "]" * levels + ("}]" if before[0] == "[" else "}")
    headers = LINES if "line" in where else {"Content-Type": "application/json"}
    reply = http.post(path, content=body, headers=headers)
    said = reply.json()
    assert reply.status_code == 400
    assert f"{where} has more than 200 levels" in said.get("error", said.get("message"))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/query", '{"table": "\\ud800"}', 404),
        ("/v1/query", '{"table": "calls", "where": "x = \\ud800"}', 400),
        ("/v1/sql", '{"sql": "select \\ud800"}', 400),
        ("/v1/transactions", '{"operations": [{"op": "delete", "table": "\\ud800", "key": [1]}]}', 404),
        ("/v1/tables/calls/append", '[{"\\udfff": 1}]', 400),
        ("/v1/traces", '{"\\ud800": []}', 400),
        ("/v1/metrics", '{"resourceMetrics": [{"schemaUrl": "\\udfff"}]}', 400),
        ("/v1/traces", '{"schemaUrl": "\\ud83d\\ude00"}', 200),
    ],
)
def test_half_a_character_is_named_as_any_other_mistake(http: httpx.Client, path: str, body: str, status: int) -> None:
    reply = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == status and isinstance(reply.json(), dict)


def raw(server: ServerProcess, *parts: bytes, ends: bool = True) -> bytes:
    """What the server says to these bytes, and that it closes the connection then."""
    host, _, port = base(server).rpartition("/")[2].partition(":")
    with socket.create_connection((host, int(port)), 60) as connection:
        for part in parts:
            connection.sendall(part)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        said = b""
        while more := connection.recv(65_536):
            said += more
        return said


def test_bodies_that_lie_about_their_length(server: ServerProcess) -> None:
    head = b"POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Length: %s\r\n\r\n"
    assert raw(server, head % b"999999999999999999999").startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))
    assert raw(server, head % b"-5").startswith(b"HTTP/1.1 400")
    assert b"HTTP/1.1 4" in raw(server, head % b"4", b"{}{}GET / nonsense\r\n\r\n")
    raw(server, head % b"400", b"{}")  # it went away: nobody is there to be told
    assert raw(server, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000).startswith(b"HTTP/1.1 4")
    with server.connect() as db:
        assert "calls" in db.tables()


def test_a_body_that_is_none_is_no_failure_of_the_server(server: ServerProcess, http: httpx.Client) -> None:
    head = b" /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for method in (b"GET", b"POST"):
        assert raw(server, method + head + b"zz\r\n", ends=False).startswith(b"HTTP/1.1 400")
    assert 'code="INTERNAL",rpc="HTTP/' not in http.get("/metrics").text


def test_pages_of_others_get_nothing(server: ServerProcess, http: httpx.Client) -> None:
    known = http.get("/v1/tables", headers={"Origin": "https://board.example"})
    assert known.headers["Access-Control-Allow-Origin"] == "https://board.example"
    asks = {"Origin": "https://board.example", "Access-Control-Request-Method": "POST"}
    assert http.options("/v1/query", headers=asks).status_code == 204
    for headers in ({"Origin": "https://other.example"}, {"Origin": "null"}, {"Host": "rebound.example"}):
        for reply in (http.get("/v1/tables", headers=headers), http.post("/v1/query", json={}, headers=headers)):
            assert reply.status_code == 403 and "Access-Control-Allow-Origin" not in reply.headers
    same = http.get("/v1/tables", headers={"Origin": base(server)})
    assert same.status_code == 200


def test_roles_tables_and_limits_are_those_of_grpc(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("root admin\nread reader tables=a*\nwrite writer tables=a*\nslow reader rate=1\n")
    with ServerProcess(tmp_path / "data", "--http", "localhost:0", "--token-file", str(tokens)) as server:
        with server.connect(access_token="root") as db:
            for name in ("a", "b"):
                db.create_table(name, key={"id": "int64"}, columns={"n": "int64"})
        with httpx.Client(base_url=base(server), timeout=60) as http:

            def status(method: str, path: str, token: str, **more: Any) -> int:
                return http.request(method, path, headers={"Authorization": f"Bearer {token}"}, **more).status_code

            def put(*tables: str) -> Any:
                return {"json": {"operations": [{"op": "put", "table": t, "key": [1], "values": {}} for t in tables]}}

            assert http.get("/healthz").status_code == 200 and http.get("/openapi.json").status_code == 200
            for path in ("/metrics", "/v1/tables", "/v1/tables/a", "/v1/tables/a/rows", "/rows?table=a"):
                assert http.get(path).status_code == 401
                assert status("GET", path, "read") == 200
            assert status("GET", "/v1/tables/b", "read") == status("GET", "/v1/tables/b/rows", "read") == 403
            seen = http.get("/v1/tables", headers={"Authorization": "Bearer read"}).json()
            assert [table["name"] for table in seen["tables"]] == ["a"]
            assert status("POST", "/v1/transactions", "read", **put("a")) == 403
            assert status("POST", "/v1/transactions", "write", **put("a")) == 200
            assert status("POST", "/v1/transactions", "write", **put("a", "b")) == 403
            assert status("POST", "/v1/query", "read", json={"table": "b"}) == 403
            assert status("POST", "/v1/sql", "read", json={"sql": "select * from b"}) == 403
            replies = [http.get("/v1/tables", headers={"Authorization": "Bearer slow"}) for _ in range(3)]
            assert replies[-1].status_code == 429 and int(replies[-1].headers["Retry-After"]) >= 1


def test_a_tag_is_not_that_of_what_a_token_was_for_before(tmp_path: Path) -> None:
    """A token whose line changes sees other tables, or other rows, under the name that it had."""
    tokens = tmp_path / "tokens"
    tokens.write_text("root admin\nsome reader tables=calls\ntenant reader rows=customer:acme\n")
    with ServerProcess(tmp_path / "data", "--http", "localhost:0", "--token-file", str(tokens)) as server:
        with server.connect(access_token="root") as db:
            for name in ("calls", "others"):
                columns = {"customer": "string", "ts": "timestamp"}
                db.create_event_table(name, event_time="ts", columns=columns)
            db.append("calls", [{"customer": each, "ts": BEGIN_US} for each in ("acme", "beta", "beta")])
        with httpx.Client(base_url=base(server), timeout=60) as http:

            def get(token: str, path: str, tag: str = "") -> httpx.Response:
                return http.get(path, headers={"Authorization": f"Bearer {token}", "If-None-Match": tag})

            asked = [("some", "/v1/tables"), ("tenant", "/v1/tables/calls/rows")]
            tags = [get(*each).headers["ETag"] for each in asked]
            assert [get(*each, tag).status_code for each, tag in zip(asked, tags, strict=True)] == [304, 304]
            tokens.write_text("root admin\nsome reader tables=calls,others\ntenant reader rows=customer:beta\n")
            wait_until(lambda: get("some", "/v1/tables/others").status_code == 200)
            tables, rows = (get(*each, tag) for each, tag in zip(asked, tags, strict=True))
            assert [each["name"] for each in tables.json()["tables"]] == ["calls", "others"]
            assert [row["customer"] for row in rows.json()["rows"]] == ["beta", "beta"]


def test_columns_come_in_the_order_of_ones_own_question(http: httpx.Client) -> None:
    """An answer that is shared is that of a question with the same columns in the same order."""
    measures = {"n": "count()", "total": "sum(us)"}
    for names in (["n", "total"], ["total", "n"]):
        asked = {"table": "calls", "measures": {name: measures[name] for name in names}}
        reply = http.post("/v1/query", json=asked, headers={"Accept": "text/csv"})
        assert reply.text.splitlines()[0].split(",") == names


def test_beyond_loopback_without_tokens_it_is_read_only(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "data", "--http", "0.0.0.0:0", "--insecure") as server,
        httpx.Client(base_url=base(server).replace("0.0.0.0", "localhost"), timeout=60) as http,
    ):
        assert http.get("/v1/tables").status_code == 200
        refused = transact(http, {"op": "delete", "table": "a", "key": [1]}, status=403)
        assert "--token-file" in refused["error"]
        assert http.post("/v1/tables/a/append", json=[]).status_code == 403


def test_equal_questions_are_computed_once(http: httpx.Client) -> None:
    rows = [{"endpoint": 50, "ts": BEGIN_US + i, "us": i} for i in range(20_000)]
    question = {"table": "calls", "group_by": ["x"], "measures": {"d": "distinct(us)"}}

    async def ask(count: int) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=http.base_url, timeout=60) as client:
            return await asyncio.gather(*(client.post("/v1/query", json=question) for _ in range(count)))

    def answers() -> dict[str, float]:
        lines = [
            line.split() for line in http.get("/metrics").text.splitlines() if line.startswith("kivi_http_answers")
        ]
        return {name: float(value) for name, value in lines}

    for _ in range(2):
        assert http.post("/v1/tables/calls/append", json=rows).status_code == 200
        before = answers()
        replies = asyncio.run(ask(100))
        after = answers()
        gained = {name: after[name] - before[name] for name in after}
        assert gained == {'kivi_http_answers_total{by="computing"}': 1, 'kivi_http_answers_total{by="sharing"}': 99}
        assert len({reply.content for reply in replies}) == 1 and replies[0].status_code == 200


def test_a_stop_lets_what_is_asked_end(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server:
        with server.connect() as db:
            db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "us": "int64"})
        body = json.dumps([{"ts": BEGIN_US + i, "us": i} for i in range(50_000)]).encode()
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=base(server), timeout=60) as http:
            assert http.get("/healthz").status_code == 200
            headers = {"Content-Type": "application/json"}
            asked = pool.submit(http.post, "/v1/tables/calls/append", content=body, headers=headers)
            time.sleep(0.15)  # it is there, or is just coming: either way what is acknowledged is kept
            server.signal(signal.SIGTERM)
            try:
                acknowledged = asked.result().status_code == 200
            except httpx.TransportError:
                acknowledged = False
        assert server.wait() == 0
        server.start()
        with server.connect() as db, db.snapshot() as snap:
            count = snap.summary("calls", {"n": kivi.count()})["n"]
        assert count == 50_000 if acknowledged else count in (0, 50_000)


def test_what_cannot_be_served_is_said_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(EndedError, match="no origin"):
        ServerProcess(tmp_path / "data", "--http", "localhost:0", "--http-origins", "board.example").start()
    assert not (tmp_path / "data").exists()


def test_rules_alerts_and_statistics_are_those_of_the_tables_that_a_token_is_for(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("root admin\nread reader tables=a*\n")
    with (
        ServerProcess(tmp_path / "data", "--http", "localhost:0", "--token-file", str(tokens)) as server,
        server.connect(access_token="root") as db,
        httpx.Client(base_url=base(server), timeout=60) as http,
    ):
        for name in ("a", "b"):
            db.create_event_table(name, event_time="ts", columns={"ts": "timestamp", "x": "int64"})
            db.create_event_table(f"{name}_high", event_time="ts", columns={"ts": "timestamp", "x": "int64"})
            slots = [kivi.time_slot("ts", "5m", name="slot")]
            db.create_aggregate(f"{name}_5m", source=name, group_by=slots, measures={"n": kivi.count()})
            db.create_rule(f"{name}_rule", source=name, where=kivi.col("x") > 5, into=f"{name}_high")
            db.create_alert(f"{name}_alert", on=f"{name}_5m", where=kivi.col("n") > 5)
        db.append("a", [{"ts": BEGIN_US, "x": x} for x in range(8)])

        def asked(path: str, token: str) -> Any:
            reply = http.get(path, headers={"Authorization": f"Bearer {token}"})
            assert reply.status_code == 200, reply.text
            return reply.json()

        rules = {each["name"]: each for each in asked("/v1/rules", "root")["rules"]}
        assert rules.keys() == {"a_rule", "b_rule"}
        assert (rules["a_rule"]["judged"], rules["a_rule"]["raised"]) == (8, 2)
        assert [each["name"] for each in asked("/v1/rules", "read")["rules"]] == ["a_rule"]
        assert {each["name"] for each in asked("/v1/alerts", "root")["alerts"]} == {"a_alert", "b_alert"}
        assert {each["name"] for each in asked("/v1/alerts", "read")["alerts"]} == {"a_alert"}
        told = asked("/v1/stats", "read")
        assert told["stats"].keys() == db.stats().keys() and told["version"] == kivi.__version__
        assert told["snapshot"] >= 1 and told["stats"]["tables"] == db.stats()["tables"]
        assert http.get("/v1/rules").status_code == 401


def test_the_console_is_there_for_everybody_and_asks_nobody_else(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("root admin\n")
    with (
        ServerProcess(tmp_path / "data", "--http", "localhost:0", "--token-file", str(tokens)) as server,
        httpx.Client(base_url=base(server), timeout=60) as http,
    ):
        page = http.get("/")
        assert page.status_code == 200 and page.headers["Content-Type"].startswith("text/html")
        policy = dict(each.split(" ", 1) for each in page.headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'" and policy["script-src"] == "'self'"
        assert "unsafe" not in page.headers["Content-Security-Policy"]
        waiting, read = set(re.findall(r'(?:src|href)="(/[^"#]*)"', page.text)) - {"/openapi.json"}, set[str]()
        while waiting - read:
            path = min(waiting - read)
            read.add(path)
            reply = http.get(path)
            assert reply.status_code == 200, path
            again = http.get(path, headers={"If-None-Match": reply.headers["ETag"]})
            assert again.status_code == 304 and not again.content
            if "uPlot" in path:
                continue
            addresses = set(re.findall(r"https?://[^\s\"'`)]+", reply.text))
            assert addresses <= {"http://www.w3.org/2000/svg"}, path
            waiting |= {f"/console/{name}" for name in re.findall(r'from "\./([\w.]+)"', reply.text)}
        assert {"/console/main.js", "/console/uPlot.esm.js", "/console/grid.js"} <= read
        assert http.get("/console/uPlot.LICENSE.txt").text.startswith("The MIT License")
        for path in ("/console/nobody.js", "/console/..%2Fconsole.py", "/console/"):
            assert http.get(path).status_code == 404


@pytest.mark.parametrize("path", ["/rows", "/v1/tables/{table}/rows", "/v1/live"])
def test_each_parameter_is_described(http: httpx.Client, path: str) -> None:
    described = http.get("/openapi.json").json()["paths"][path]["get"]["parameters"]
    names = {each["name"] for each in described if each["in"] == "query"}
    said = http.get(path.format(table="quiet"), params={"no_such": "x"}).json()["error"]
    assert names - {"of"} == set(re.findall(r"\w+", said.partition("there are ")[2]))  # of: in place of all others


def test_every_path_for_programs_is_described(http: httpx.Client) -> None:
    """Those that the routes' own text names; the console's are for browsers."""
    assert routes.__doc__ is not None
    paths = set(re.findall(r"(?:``|GET |POST )(/[^`]*)``", routes.__doc__)) - {"/", "/console/{file}", "/openapi.json"}
    paths = paths - {"/api/v1/..."} | {f"/api/v1/{path}" for path in PATHS}
    assert {"/rows", "/v1/sql", "/v1/traces", "/api/v1/query_range"} <= paths
    assert paths == set(http.get("/openapi.json").json()["paths"])


def test_no_answer_waits_for_a_delayed_acknowledgement(tmp_path: Path) -> None:
    """A head and a body that leave one after the other, on a connection that is kept: 40 ms where the second waits."""
    with (
        ServerProcess(tmp_path / "data", "--http", "localhost:0") as server,
        httpx.Client(base_url=base(server)) as http,
    ):
        took = []
        for _ in range(60):
            began = time.perf_counter()
            reply = http.get("/v1/tables")
            assert reply.json() == {"tables": []} and reply.headers["X-Kivi-Snapshot"] == "0"
            took.append(time.perf_counter() - began)
        assert sorted(took[30:])[3] < 0.03  # after the first ones, which Linux acknowledges at once
