"""Rows over HTTP: what Grafana's Infinity data source and a spreadsheet get, compared with what the client reads."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import ssl
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from kivi_server.wsgi import serving

import kivi
from tests.serverproc import ServerProcess

HOUR_US = 3_600_000_000
BEGIN_US = 1_767_225_600_000_000  # 2026-01-01
EVENTS: list[dict[str, Any]] = [
    {
        "customer": f"c{i % 2}",
        "endpoint": i % 3,
        "ts": BEGIN_US + i * 97_000_000,
        "us": (i * 7919) % 1000 if i % 5 else None,
        "cost": Decimal(i) / 4,
    }
    for i in range(300)
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("rows") / "data", "--http", "localhost:0") as running:
        with running.connect() as db:
            columns = {"customer": "string", "endpoint": "int64", "ts": "timestamp", "us": "int64"}
            db.create_event_table("calls", event_time="ts", columns={**columns, "cost": "decimal(12,2)"})
            db.create_aggregate(
                "by_endpoint",
                source="calls",
                group_by=["customer", "endpoint", kivi.time_slot("ts", "5m", name="slot")],
                measures={
                    "n": kivi.count(),
                    "total": kivi.sum("us"),
                    "least": kivi.min("us"),
                    "most": kivi.max("us"),
                    "cost": kivi.sum("cost"),
                },
                derived={"mean": "total / n"},
            )
            db.create_aggregate(
                "spread",
                source="calls",
                group_by=["customer"],
                measures={
                    "latency": kivi.quantiles("us"),
                    "mean": kivi.avg("us"),
                    "worst": kivi.largest("cost", 2),
                    "newest": kivi.last("ts"),
                    "ends": kivi.top("endpoint", 1, most=2),
                },
                derived={"p90": "quantile(latency, 0.9)"},
            )
            db.create_table("files", key={"id": "int64"}, columns={"data": "bytes", "ok": "bool"})
            db.append("calls", EVENTS)
            with db.transaction() as tx:
                tx.put("files", (1,), data=b"\x00\xff", ok=True)
        yield running


def address(server: ServerProcess) -> str:
    return next(line for line in server.output if line.startswith("rows on ")).split()[-1]


def get(server: ServerProcess, pairs: Any, token: str | None = None, **more: Any) -> tuple[bytes, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{address(server)}?{urllib.parse.urlencode(pairs)}", headers=headers)
    with urllib.request.urlopen(request, timeout=60, **more) as reply:
        return reply.read(), reply.headers


def rows(server: ServerProcess, **parameters: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(get(server, parameters)[0])
    return found


def flat(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return value.isoformat().replace("+00:00", "Z")
    return float(value) if isinstance(value, Decimal) else value


def test_rows_are_those_that_a_client_reads(server: ServerProcess) -> None:
    with server.connect() as db, db.snapshot() as snapshot:
        for table in ("by_endpoint", "calls"):
            expected = [{name: flat(value) for name, value in row.items()} for row in snapshot.scan(table)]
            assert rows(server, table=table) == expected
        _, headers = get(server, {"table": "by_endpoint"})
        assert headers["X-Kivi-Snapshot"] == str(snapshot.ts) and headers["X-Kivi-More"] == "false"
    assert rows(server, table="files") == [{"id": 1, "data": "0x00ff", "ok": True}]


def test_prefix_time_columns_where_and_limit(server: ServerProcess) -> None:
    everything = rows(server, table="by_endpoint")
    assert json.loads(get(server, [("table", "by_endpoint"), ("prefix", "c1"), ("prefix", "2")])[0]) == [
        row for row in everything if row["customer"] == "c1" and row["endpoint"] == 2
    ]
    low, high = BEGIN_US // 1000 + 3_600_000, "2026-01-01T03:00:00Z"
    inside = [row for row in everything if "2026-01-01T01:00:00Z" <= row["slot"] < high]
    assert inside and rows(server, table="by_endpoint", **{"from": str(low), "to": high}) == inside
    events = rows(server, table="calls", **{"from": "2026-01-01T01:00:00+00:00"}, where="us > 500 & customer == 'c0'")
    assert events == [
        row
        for row in rows(server, table="calls")
        if row["ts"] >= "2026-01-01T01:00:00" and (row["us"] or 0) > 500 and row["customer"] == "c0"
    ]
    body, headers = get(server, {"table": "by_endpoint", "columns": "slot,mean", "limit": "3"})
    assert json.loads(body) == [{"slot": row["slot"], "mean": row["mean"]} for row in everything[:3]]
    assert headers["X-Kivi-More"] == "true"


def test_longer_slots_are_the_same_events(server: ServerProcess) -> None:
    expected: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for event in EVENTS:
        hour = dt.datetime.fromtimestamp(event["ts"] // HOUR_US * 3600, dt.UTC)
        expected[event["customer"], event["endpoint"], flat(hour)].append(event)
    found = rows(server, table="by_endpoint", step="1h")
    assert [(row["customer"], row["endpoint"], row["slot"]) for row in found] == sorted(expected)
    for row in found:
        events = expected[row["customer"], row["endpoint"], row["slot"]]
        known = [event["us"] for event in events if event["us"] is not None]
        assert row["n"] == len(events) and row["total"] == sum(known)
        assert (row["least"], row["most"]) == (min(known, default=None), max(known, default=None))
        assert row["mean"] == sum(known) / len(events) and row["cost"] == float(sum(e["cost"] for e in events))
    assert rows(server, table="by_endpoint", step="5m") == rows(server, table="by_endpoint")
    assert rows(server, table="by_endpoint", step="1h", columns="slot,n", limit="2") == [
        {"slot": row["slot"], "n": row["n"]} for row in found[:2]
    ]


def test_the_same_page_as_csv(server: ServerProcess) -> None:
    body, headers = get(server, {"table": "by_endpoint", "format": "csv"})
    assert headers["Content-Type"].startswith("text/csv")
    found = list(csv.DictReader(io.StringIO(body.decode())))
    expected = rows(server, table="by_endpoint")
    assert found == [{name: "" if v is None else str(v) for name, v in row.items()} for row in expected]
    assert get(server, {"table": "files", "format": "csv"})[0].decode().splitlines()[1] == "1,0x00ff,true"


def test_measures_that_are_states(server: ServerProcess) -> None:
    chosen = "customer,latency,mean,worst,newest,ends,p90,quantile(latency, 0.5)"
    found = rows(server, table="spread", columns=chosen)
    with server.connect() as db, db.snapshot() as snap:
        read = list(snap.scan("spread"))
    for row, expected in zip(found, read, strict=True):
        latency = expected["latency"]
        assert row["latency"] == {"count": latency.count, **{f"p{q}": latency.quantile(q / 100) for q in (50, 95, 99)}}
        assert row["mean"] == expected["mean"]
        assert row["worst"] == [float(cost) for cost in expected["worst"]]
        assert row["newest"] == flat(expected["newest"])
        assert row["ends"][0] == [expected["ends"].items[0][0], expected["ends"].items[0][1]]
        assert row["ends"][1] == [None, expected["ends"].others]
        assert (row["p90"], row["quantile(latency, 0.5)"]) == (latency.quantile(0.9), latency.quantile(0.5))
    body, _ = get(server, {"table": "spread", "format": "csv", "columns": chosen})
    for line, row in zip(csv.DictReader(io.StringIO(body.decode())), found, strict=True):
        assert json.loads(line["latency"]) == row["latency"]
        assert json.loads(line["worst"]) == row["worst"]
    rolled = rows(server, table="spread", by="customer", columns="customer,quantile(latency, 0.5)")
    with server.connect() as db, db.snapshot() as snap:
        expected = [(row["customer"], row["latency"].quantile(0.5)) for row in snap.rollup("spread", by=["customer"])]
    assert [tuple(row.values()) for row in rolled] == expected
    selected = rows(server, table="spread", where=f"quantile(latency, 0.5) > {found[0]['p90']}")
    assert [row["customer"] for row in selected] == [
        row["customer"] for row in found if row["quantile(latency, 0.5)"] > found[0]["p90"]
    ]


def test_as_of_is_an_older_snapshot(server: ServerProcess) -> None:
    with server.connect() as db:
        before = db.watermark()
        count = len(rows(server, table="calls", limit="100000"))
        db.append("calls", EVENTS[:7])
    assert len(rows(server, table="calls", as_of=str(before), limit="100000")) == count
    assert len(rows(server, table="calls", limit="100000")) == count + 7


@pytest.mark.parametrize(
    ("parameters", "status", "words"),
    [
        ({}, 400, "table is required"),
        ({"table": "nothing"}, 404, "nothing"),
        ({"table": "calls", "tabel": "x"}, 400, "tabel"),
        ({"table": "calls", "limit": "0"}, 400, "limit"),
        ({"table": "calls", "limit": "1000000"}, 400, "100,000"),
        ({"table": "calls", "from": "yesterday"}, 400, "yesterday"),
        ({"table": "calls", "from": "1767225600000000"}, 400, "divide microseconds by 1,000"),
        ({"table": "by_endpoint", "to": "-1767225600000000"}, 400, "divide microseconds by 1,000"),
        ({"table": "calls", "from": "1767225600"}, 400, "2026-01-01 in seconds, but whole numbers are milliseconds"),
        ({"table": "by_endpoint", "to": "1767225600"}, 400, "multiply by 1,000"),
        ({"table": "calls", "where": "x" * 5_000}, 400, "... (5002 characters)"),
        ({"table": "calls", "step": "1h"}, 400, "step"),
        ({"table": "by_endpoint", "step": "7m"}, 400, "multiple"),
        ({"table": "by_endpoint", "columns": "n,nn"}, 400, "nn"),
        ({"table": "by_endpoint", "where": "n >"}, 400, "where"),
        ({"table": "calls", "prefix": "1"}, 400, "no row keys"),
        ({"table": "files", "from": "1"}, 400, "no time"),
        ({"table": "files", "prefix": "x"}, 400, "prefix id"),
        ({"table": "calls", "format": "xml"}, 400, "json or csv"),
        ({"table": "calls", "as_of": "999999999"}, 400, "watermark"),
    ],
)
def test_errors_are_told_with_a_status(
    server: ServerProcess, parameters: dict[str, str], status: int, words: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(server, parameters)
    with error.value as reply:
        told = json.loads(reply.read())
    assert reply.status == status and words in told["error"] and told["reason"]


def test_other_methods_and_paths_are_not_there(server: ServerProcess) -> None:
    for method, url, status in (
        ("POST", address(server), 405),
        ("GET", address(server) + "/more", 404),
        ("DELETE", address(server).replace("/rows", "/v1/tables"), 405),
    ):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60)
        error.value.close()
        assert error.value.code == status


def test_tokens_and_tls_are_those_of_everything_else(tmp_path: Path, require: Callable[[str], str]) -> None:
    key, cert, tokens = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "tokens"
    subprocess.run(
        [require("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key),
         "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    tokens.write_text("root admin\ndash reader tables=a*\n")
    arguments = ["--http", "localhost:0", "--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(tokens)]
    with ServerProcess(tmp_path / "data", *arguments) as server:
        with server.connect(access_token="root", tls=kivi.client.Tls(ca=str(cert))) as db:
            for table in ("a", "b"):
                db.create_table(table, key={"id": "int64"}, columns={"n": "int64"})
        assert address(server).startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        assert json.loads(get(server, {"table": "a"}, "dash", context=context)[0]) == []
        for table, token, status in (
            ("b", "dash", 403),
            ("a", None, 401),
            ("a", "wrong", 401),
            ("not there", "dash", 403),
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                get(server, {"table": table}, token, context=context)
            error.value.close()
            assert error.value.code == status


def test_plaintext_is_for_loopback(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="plaintext"):
        ServerProcess(tmp_path / "data", "--http", "0.0.0.0:0").start()


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_a_page_has_an_address_of_either_kind(host: str) -> None:
    def page(_: dict[str, Any], respond: Callable[..., Any]) -> list[bytes]:
        respond("200 OK", [("Content-Length", "4")])
        return [b"page"]

    with serving(f"{host}:0", "--metrics", page) as address:
        assert urllib.request.urlopen(address, timeout=60).read() == b"page"
