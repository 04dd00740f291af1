"""Tokens that are bound to rows: a tenant sees what a store with its rows alone would answer, and nothing else."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import httpx
import pyarrow as pa
import pytest
from kivi_server.auth import FOR_TENANTS, Grant, Tokens
from kivi_server.http.routes import Routes

import kivi
from kivi import col
from kivi.api import interface
from kivi.api.results import Result
from kivi.errors import InvalidArgument, KiviError, NotFound, PermissionDenied
from kivi.model.tenants import Tenant
from kivi.wire.methods import path
from kivi.wire.v1 import service_pb2
from tests.serverproc import ServerProcess

ROOT, ACME, BETA, SOME = "root-a1", "acme-b2", "beta-c3", "some-d4"
LINES = [
    f"{ROOT} admin",
    f"{ACME} writer rows=customer:acme",
    f"{BETA} writer rows=customer:beta",
    f"{SOME} reader rows=customer:acme tables=calls",
]
BEGIN_US: Final = 1_767_225_600_000_000  # 2026-01-01
METHODS = list(service_pb2.DESCRIPTOR.services_by_name["Kivi"].methods)
SECRET: Final = "zz-of-others"
"""In every row of another tenant that has a text, so that it is found in whatever tells of one."""


class Two(NamedTuple):
    """A server with the rows of all, and one that has those of acme alone."""

    all: ServerProcess
    own: ServerProcess


def base(server: ServerProcess) -> str:
    return next(line for line in server.output if line.startswith("http on ")).split()[-1]


def declare(db: Any) -> None:
    calls = {"customer": "string", "ts": "timestamp", "us": "int64", "what": "string"}
    db.create_event_table("calls", event_time="ts", columns=calls)
    db.create_aggregate(
        "calls_5m", source="calls", group_by=["customer", "what", kivi.time_slot("ts", "5m", name="slot")],
        measures={"n": kivi.count(), "total": kivi.sum("us"), "most": kivi.max("us"), "took": kivi.quantiles("us")},
        derived={"mean": "total / n"},
    )  # fmt: skip
    db.create_aggregate(
        "whats_5m", source="calls", group_by=["what", "customer", kivi.time_slot("ts", "5m", name="slot")],
        measures={"n": kivi.count(), "total": kivi.sum("us")}, derived={"mean": "total / n"},
    )  # fmt: skip
    db.create_aggregate(
        "slots", source="calls", group_by=[kivi.time_slot("ts", "5m", name="slot")], measures={"n": kivi.count()}
    )
    accounts = {"name": "string", "balance": kivi.sum("int64")}
    db.create_table("accounts", key={"customer": "string", "id": "int64"}, columns=accounts, history="1h")
    db.create_view("by_name", source="accounts", key=["customer", "name", "id"])
    db.create_table("prices", key={"id": "int64"}, columns={"customer": "string", "cents": "int64"})
    db.create_table("logins", key={"customer": "string", "id": "int64"}, columns={"mail": "string"})
    db.create_view("by_mail", source="logins", key=["mail"], unique=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "tokens").write_text("\n".join(LINES))
    more = ["--http", "localhost:0", "--token-file", str(folder / "tokens")]
    with ServerProcess(folder / "all", *more) as mixed, ServerProcess(folder / "own", *more) as alone:
        both = Two(mixed, alone)
        for server in both:
            with server.connect(access_token=ROOT) as db:
                declare(db)
        fill(both, random.Random(7))
        yield both


def event(rng: random.Random, customer: str) -> dict[str, Any]:
    ts = BEGIN_US + rng.randrange(3_600) * 1_000_000
    # A predicate, a sum or a mean that overflows for what others have must not say so.
    us, what = rng.randrange(1_000), rng.choice("abc")
    if customer != "acme":
        us, what = us + 4 * 10**18, SECRET + what
    return {"customer": customer, "ts": ts, "us": us, "what": what}


def fill(two: Two, rng: random.Random) -> None:
    """Random writes of three writers, in one order at both; of others than acme at one of them only."""
    with (
        two.all.connect(access_token=ROOT) as root,
        two.all.connect(access_token=ACME) as acme,
        two.all.connect(access_token=BETA) as beta,
        two.own.connect(access_token=ROOT) as alone,
    ):
        for step in range(60):
            customers = rng.choice([["acme"], ["beta"], ["acme", "beta", "gamma"]])
            events = [event(rng, rng.choice(customers)) for _ in range(rng.choice([1, 3, 40]))]
            mine = [each for each in events if each["customer"] == "acme"]
            by = {1: acme if customers == ["acme"] else beta, 3: root}[len(customers)]
            if step % 20 == 19 and len(customers) == 1:
                with by.transaction() as tx:
                    tx.append_stages("calls", [by.stage("calls", events)])
            else:
                by.append("calls", events)
            if mine:
                alone.append("calls", mine)
            number = rng.randrange(8)
            for customer in customers:
                into = [root if len(customers) == 3 else by, *([alone] if customer == "acme" else [])]
                for db in into:
                    with db.transaction() as tx:
                        key, name = (customer, number), f"n{step}" if customer == "acme" else f"{SECRET}{step}"
                        match step % 4:
                            case 0 | 1:
                                tx.put("accounts", key, name=name)
                            case 2:
                                tx.delta("accounts", key, balance=step)
                            case _:
                                tx.delete("accounts", key)
            if step == 40:
                for db, reader in ((acme, acme), (alone, alone)):
                    with db.transaction() as tx:
                        count = tx.retract("calls", where=col("us") < 100)
                        with reader.snapshot() as snap:
                            assert count == len(
                                list(snap.scan("calls", where=(col("us") < 100) & (col("customer") == "acme")))
                            )


# -- every way to read ----------------------------------------------------------------------------------------------


def plain(found: Any) -> Any:
    if isinstance(found, pa.Table):
        return found.schema.names, [plain(row) for row in found.to_pylist()]
    if isinstance(found, Result):
        return plain(found.to_arrow())
    if isinstance(found, Iterator):
        return [plain(each) for each in found]
    if isinstance(found, dict):
        return {name: str(value) for name, value in found.items() if not name.startswith("_commit")}
    if isinstance(found, list):
        return [plain(each) for each in found]
    return found


def asked(batches: Iterator[Any]) -> Any:
    return [plain(row) for batch in batches for row in pa.Table.from_batches([batch]).to_pylist()]


SEEN = ["calls", "calls_5m", "whats_5m", "accounts", "by_name"]
UNSEEN = ["slots", "prices", "by_mail", "nothing"]
BIG = col("us") * 100 > 5_000
AGAIN = kivi.pattern("A", define={}, within="1s", measures={"us": kivi.first("us")})
PATTERN = kivi.pattern("A B", define={"A": col("what") == "a", "B": col("what") != "a"}, measures={"n": kivi.count()})
READS: dict[str, Callable[[Any, str], list[Any]]] = {
    "get": lambda snap, t: (
        [snap.get("accounts", (c, i)) for c in ("acme", "beta") for i in range(8)]
        if t == "accounts"
        else [snap.get("by_name", ("beta", f"{SECRET}1", 1))]
        if t == "by_name"
        else []
    ),
    "get_many": lambda snap, t: (
        snap.get_many("accounts", [(c, i) for i in range(8) for c in ("beta", "acme")]) if t == "accounts" else []
    ),
    "scan": lambda snap, t: [
        *(plain(snap.scan(t, limit=limit, reverse=reverse)) for limit in (None, 3) for reverse in (False, True)),
        plain(snap.scan(t, where=col("customer") != "acme")),
        plain(
            snap.scan(
                t, where=(col("customer") == "beta") | (col("customer") == "acme"), order_by="-customer", offset=2
            )
        ),
        plain(snap.scan(t, prefix=("beta",))) if t not in ("calls",) else plain(snap.scan(t, where=BIG)),
        plain(snap.scan(t, prefix=("acme",), limit=2))
        if t not in ("calls",)
        else plain(snap.scan(t, columns=["us", "_commit_ts"])),
    ],
    "scan_batches": lambda snap, t: (
        [asked(snap.scan_batches(t))]
        + ([sorted(map(str, asked(snap.scan_batches(t, any_order=True))))] if t == "calls" else [])
    ),
    "to_arrow": lambda snap, t: [plain(snap.to_arrow(t, order_by="customer", limit=4))],
    "to_pandas": lambda snap, t: [snap.to_pandas(t).to_dict("list").keys()],
    "to_polars": lambda snap, t: [len(snap.to_polars(t))],
    "summary": lambda snap, t: (
        [plain(snap.summary("calls", {"n": kivi.count(), "top": kivi.max("us")}))] if t == "calls" else []
    ),
    "query": lambda snap, t: (
        [
            plain(
                snap.query(
                    "calls",
                    group_by=["customer", "what"],
                    measures={"n": kivi.count(), "s": kivi.sum("us")},
                    where=where,
                )
            )
            for where in (None, BIG, col("customer") == "beta")
        ]
        + [
            plain(snap.query("calls", measures={"n": kivi.count(), "q": kivi.distinct("customer")})),
            plain(
                snap.query("calls", group_by=[kivi.time_slot("ts", "5m", name="slot")], measures={"n": kivi.count()})
            ),
        ]
        if t == "calls"
        else [plain(snap.query(t, group_by=["what"])), plain(snap.query(t, group_by=[]))]
        if t == "calls_5m"
        else []
    ),
    "windows": lambda snap, t: (
        [
            plain(snap.windows(t, size="10m", slide="5m", measures={"n": kivi.count()} if t == "calls" else None)),
        ]
        if t.startswith("calls")
        else []
    ),
    "rollup": lambda snap, t: (
        [
            plain(snap.rollup(t, by=[], step="15m")),
            plain(snap.rollup(t, by=["customer"])),
            plain(snap.rollup(t, by=[], last="10m")),
        ]
        if t == "calls_5m"
        else []
    ),
    "match": lambda snap, t: [plain(snap.match("calls", PATTERN))] if t == "calls" else [],
    "sql": lambda snap, t: [
        plain(snap.sql(f"select customer, count(*) n from {t} group by all")),
        plain(snap.sql(f"select count(*) n from {t} where customer <> 'acme'")),
        plain(snap.sql("select table_name from information_schema.tables where table_schema = 'main' order by 1")),
    ],
    "changes": lambda snap, t: [plain(snap.changes(t, since=0))] if t.startswith("calls") else [],
    "change_batches": lambda snap, t: [asked(snap.change_batches(t, since=0))] if t.startswith("calls") else [],
    "dataset": lambda snap, t: [sorted(map(str, plain(snap.dataset(t).to_table(columns=["customer"]))[1]))],
    "relation": lambda snap, t: [sorted(snap.relation(t).project("customer").fetchall())],
}


def test_every_way_to_read_is_here() -> None:
    others = {"close", "ts", "renew", "lease", "started"}
    public = {name for name, _ in inspect.getmembers(interface.Snapshot) if not name.startswith("_")}
    assert public - others == READS.keys()


@pytest.mark.parametrize("way", READS)
def test_a_tenant_reads_what_a_store_with_its_rows_alone_would_answer(two: Two, way: str) -> None:
    for module in ("duckdb", "polars", "pandas"):
        pytest.importorskip(module)
    read = READS[way]
    with two.all.connect(access_token=ACME) as acme, two.own.connect(access_token=ACME) as alone:
        assert acme.tables() == alone.tables() == SEEN_SORTED
        compared = 0
        for table in SEEN:
            with acme.snapshot() as mine, alone.snapshot() as other:
                found, known = read(mine, table), read(other, table)
                assert found == known, table
                compared += len(known)
                assert SECRET not in str(found)
        assert compared
        for table in UNSEEN:
            with acme.snapshot() as mine, pytest.raises(PermissionDenied, match="no table that keeps"):
                list(mine.scan(table))
            with pytest.raises(PermissionDenied, match="no table that keeps"):
                acme.describe(table)


SEEN_SORTED = sorted([*SEEN, "logins"])


PATHS = [
    *(f"/rows?table={table}" for table in SEEN),
    *(f"/v1/tables/{table}/rows?limit=7" for table in SEEN),
    "/v1/tables/calls/rows?where=customer != 'acme'",
    "/v1/tables/calls_5m/rows?by=&step=15m",
    "/v1/tables/accounts/rows?prefix=beta",
    *(f"/api/v1/{path}" for path in ("labels", "metadata")),
    *(f"/api/v1/label/{name}/values" for name in ("customer", "what", "__name__")),
    "/api/v1/series?match[]={__name__=~'.+'}",
    f"/api/v1/query?query=sum(calls_5m_n)&time={BEGIN_US // 1_000_000 + 3_600}",
    f"/api/v1/query?query=calls_5m_n{{customer!='acme'}}&time={BEGIN_US // 1_000_000 + 3_600}",
    f"/api/v1/query_range?query=sum by (customer) (rate(calls_5m_total[10m]))&start={BEGIN_US // 1_000_000}"
    f"&end={BEGIN_US // 1_000_000 + 7_200}&step=300",
]
POSTS: list[tuple[str, Any]] = [
    ("/v1/query", {"table": "calls", "group_by": ["customer"], "measures": {"n": "count()"}, "explain": True}),
    ("/v1/query", {"table": "calls", "where": "us * 100 > 5000", "measures": {"n": "count()"}}),
    ("/v1/query", {"table": "calls_5m", "group_by": ["slot"]}),
    ("/v1/sql", {"sql": "select customer, sum(us) s from calls group by all"}),
]


def test_over_http_a_tenant_is_answered_likewise(two: Two) -> None:
    headers = {"Authorization": f"Bearer {ACME}"}
    with (
        httpx.Client(base_url=base(two.all), headers=headers, timeout=60) as acme,
        httpx.Client(base_url=base(two.own), headers=headers, timeout=60) as alone,
        httpx.Client(base_url=base(two.all), headers={"Authorization": f"Bearer {ROOT}"}, timeout=60) as root,
    ):

        def answers(client: httpx.Client, method: str, where: str, **body: Any) -> Any:
            reply = client.request(method, where, **body)
            assert reply.status_code == 200, (where, reply.text)
            found = reply.json()
            return {k: v for k, v in found.items() if k != "snapshot"} if isinstance(found, dict) else found

        for where in PATHS:
            root.get(where)  # what is kept of an answer is not another's
            found = answers(acme, "GET", where)
            assert found == answers(alone, "GET", where), where
            assert SECRET not in json.dumps(found)
        for where, body in POSTS:
            root.post(where, json=body)
            found = answers(acme, "POST", where, json=body)
            assert found == answers(alone, "POST", where, json=body), body
            assert "explanation" not in found
        tag = root.get("/v1/tables/calls/rows").headers["etag"]
        assert acme.get("/v1/tables/calls/rows", headers={"If-None-Match": tag}).status_code == 200
        described = acme.get("/v1/tables").json()["tables"]
        assert [table["name"] for table in described] == SEEN_SORTED
        assert (
            "statistics" not in acme.get("/v1/tables/calls").json()
            and "statistics" in root.get("/v1/tables/calls").json()
        )
        for table in UNSEEN:
            for where in (
                f"/rows?table={table}",
                f"/v1/tables/{table}/rows",
                f"/v1/tables/{table}",
                f"/v1/live?table={table}",
            ):
                assert acme.get(where).status_code == 403, where


def test_updates_tell_a_tenant_of_its_own_rows_alone(two: Two) -> None:
    rng = random.Random(11)
    headers = {"Authorization": f"Bearer {ACME}"}
    with (
        two.all.connect(access_token=ACME) as acme,
        two.all.connect(access_token=BETA) as beta,
        two.own.connect(access_token=ROOT) as alone,
        httpx.Client(base_url=base(two.all), headers=headers, timeout=60) as http,
    ):
        queries: list[dict[str, Any]] = [
            {"table": "calls", "since": acme.watermark(), "interval_ms": 0},
            {"table": "calls_5m", "interval_ms": 0},
            {"table": "calls_5m", "rollup": {"by": [], "step": "15m"}, "interval_ms": 0},
            {"table": "accounts", "order_by": "-balance", "limit": 3, "interval_ms": 0},
        ]
        subscriptions = [acme.subscribe(**query) for query in queries]
        with http.stream("GET", "/v1/live?table=calls&since=now&interval_ms=0") as live:
            lines = live.iter_lines()
            assert next(lines).startswith("retry")
            sent, lasts = list[dict[str, Any]](), dict[str, Any]()
            for step in range(8):
                beta.append("calls", [event(rng, "beta")])
                with beta.transaction() as tx:
                    tx.delta("accounts", ("beta", 1), balance=10**6)
                sent.append({**event(rng, "acme"), "us": 5_000 + step})
                for db in (acme, alone):
                    with db.transaction() as tx:
                        tx.delta("accounts", ("acme", 1), balance=step + 1)
                    last = {"accounts": tx.commit_ts, "calls": db.append("calls", sent[-1:])}
                    lasts = last if db is acme else lasts
            told = list[dict[str, Any]]()
            while len(told) < len(sent):
                line = next(lines)
                assert SECRET not in line
                if line.startswith("data: "):
                    told += [change["row"] for change in json.loads(line[6:])["changes"]]
            assert [row["us"] for row in told] == [row["us"] for row in sent]
        with two.own.connect(access_token=ACME) as other:
            for query, subscription in zip(queries, subscriptions, strict=True):
                with subscription:
                    text, rows = "", list[Any]()
                    last = lasts["accounts" if query["table"] == "accounts" else "calls"]
                    for update in subscription:
                        text += str(update)
                        rows += [change.row for change in update.changes]
                        if update.ts >= last:
                            break
                    assert SECRET not in text and "beta" not in text
                    if query["table"] == "calls":
                        assert [row["us"] for row in rows] == [row["us"] for row in sent]
                with (
                    other.subscribe(**{**query, "since": None}) as known,
                    acme.subscribe(**{**query, "since": None}) as mine,
                ):
                    firsts = [next(iter(each)) for each in (mine, known)]
                    assert plain([c.row for c in firsts[0].changes]) == plain([c.row for c in firsts[1].changes])


def test_what_others_retract_is_not_told(two: Two) -> None:
    """Neither as an error of a tail, nor as the end of a subscription."""
    rng = random.Random(12)
    with two.all.connect(access_token=ACME) as acme, two.all.connect(access_token=BETA) as beta:
        since = acme.append("calls", [event(rng, "acme")])
        beta.append("calls", [{**event(rng, "beta"), "us": 17}])
        last = {**event(rng, "acme"), "us": 4_321}
        with (
            acme.subscribe("calls", since=since, interval_ms=0) as events,
            acme.subscribe_matches("calls", AGAIN, since=since, lateness="0s", interval_ms=0) as matches,
        ):
            acme.append("calls", [{**event(rng, "acme"), "us": 4_320}])
            with beta.transaction() as tx:
                tx.retract("calls", where=col("us") == 17)
            assert tx.commit_ts > since
            acme.append("calls", [last])
            for subscription in events, matches:
                found = list[int]()
                while 4_321 not in found:
                    found += [change.row["us"] for change in next(iter(subscription)).changes]
        with acme.snapshot() as snap:
            assert [row["us"] for row in snap.changes("calls", since=since)] == [4_320, 4_321]
            assert [row["us"] for row in snap.changes("calls", since=since, retractions="deliver")] == [4_320, 4_321]
    with two.own.connect(access_token=ROOT) as alone:  # which has the same events again, for other tests
        alone.append("calls", [event(random.Random(12), "acme")])
    with two.all.connect(access_token=ACME) as acme, acme.transaction() as tx:
        tx.retract("calls", where=(col("us") == 4_320) | (col("us") == 4_321))


# -- writes ---------------------------------------------------------------------------------------------------------


FOREIGN: dict[str, Callable[[Any], Any]] = {
    "append": lambda db: db.append("calls", [{"customer": "beta", "ts": BEGIN_US, "us": 1, "what": "x"}]),
    "append of both": lambda db: db.append(
        "calls", [{"customer": c, "ts": BEGIN_US, "us": 1, "what": "x"} for c in ("acme", "beta")]
    ),
    "append without": lambda db: db.append("calls", [{"customer": None, "ts": BEGIN_US, "us": 1, "what": "x"}]),
    "append in columns": lambda db: db.append(
        "calls",
        pa.table(
            {
                "customer": ["acme"] * 99 + ["beta"],
                "ts": pa.array([BEGIN_US] * 100, pa.timestamp("us", "UTC")),
                "us": [1] * 100,
                "what": ["x"] * 100,
            }
        ),
    ),
    "stage": lambda db: db.stage("calls", [{"customer": "beta", "ts": BEGIN_US, "us": 1, "what": "x"}]),
    "put": lambda db: one(db, lambda tx: tx.put("accounts", ("beta", 1), name="x")),
    "delta": lambda db: one(db, lambda tx: tx.delta("accounts", ("beta", 1), balance=1)),
    "insert": lambda db: one(db, lambda tx: tx.insert("accounts", ("beta", 1), name="x")),
    "insert elsewhere": lambda db: one(db, lambda tx: tx.insert("accounts", ("beta", 1_000), name="x")),
    "delete": lambda db: one(db, lambda tx: tx.delete("accounts", ("beta", 1))),
    "guard": lambda db: one(db, lambda tx: tx.guard("accounts", ("beta", 1))),
    "write": lambda db: db.write("accounts", [{"customer": "beta", "id": 1, "name": "x"}]),
    "a table of all": lambda db: one(db, lambda tx: tx.put("prices", (1,), customer="acme", cents=1)),
    "a unique view of all": lambda db: one(db, lambda tx: tx.insert("logins", ("acme", 1), mail="x@y")),
    "overwrite": lambda db: one(db, lambda tx: tx.overwrite("calls")),
}


def one(db: Any, write: Callable[[Any], Any]) -> None:
    with db.transaction() as tx:
        write(tx)


def contents(server: ServerProcess) -> Any:
    with server.connect(access_token=ROOT) as root, root.snapshot() as snap:
        return [plain(snap.scan(table)) for table in ("calls", "accounts", "prices", "logins")]


@pytest.mark.parametrize("what", FOREIGN)
def test_a_tenant_writes_no_rows_of_others(two: Two, what: str) -> None:
    before = contents(two.all)
    with two.all.connect(access_token=ACME) as acme:
        with pytest.raises(PermissionDenied):
            FOREIGN[what](acme)
        stages = "stage" in what
    assert contents(two.all) == before
    if stages:  # staged by another, under a name that was passed on
        with two.all.connect(access_token=BETA) as beta, two.all.connect(access_token=ACME) as acme:
            name = beta.stage("calls", [event(random.Random(1), "beta")])
            with pytest.raises(PermissionDenied):
                one(acme, lambda tx: tx.append_stages("calls", [name]))


def test_over_http_a_tenant_writes_no_rows_of_others_and_its_tokens_are_its_own(two: Two) -> None:
    before = contents(two.all)
    row = {"customer": "acme", "ts": "2026-01-01T00:00:00Z", "us": 1, "what": "h"}
    with httpx.Client(base_url=base(two.all), timeout=60) as http:

        def post(token: str, where: str, body: Any, key: str = "") -> httpx.Response:
            headers = {"Authorization": f"Bearer {token}"} | ({"Idempotency-Key": key} if key else {})
            return http.post(where, json=body, headers=headers)

        assert post(ACME, "/v1/tables/calls/append", [{**row, "customer": "beta"}]).status_code == 403
        put = {"op": "put", "table": "accounts", "key": ["beta", 1], "values": {"name": "x"}}
        for more in ({}, {"snapshot": 1}):
            assert post(ACME, "/v1/transactions", {"operations": [put], **more}).status_code == 403
        insert = {**put, "op": "insert"}
        assert post(ACME, "/v1/transactions", {"operations": [insert]}).status_code == 403
        assert contents(two.all) == before
        mine = {"op": "delta", "table": "accounts", "key": ["acme", 77], "values": {"balance": 1}}
        theirs = {**mine, "key": ["beta", 77]}
        for token, operation in ((ACME, mine), (BETA, theirs), (ACME, mine), (BETA, theirs)):
            assert post(token, "/v1/transactions", {"operations": [operation]}, "order-1").status_code == 200
    with two.all.connect(access_token=ROOT) as root, two.all.connect(access_token=ACME) as acme:
        assert [root.get("accounts", (c, 77))["balance"] for c in ("acme", "beta")] == [1, 1]
        assert acme.outcome("order-1") == acme.outcome("customer:acme/order-1")
        with root.transaction() as tx:  # as it was, for other tests
            tx.delete("accounts", ("acme", 77))
            tx.delete("accounts", ("beta", 77))


def test_request_tokens_of_tenants_that_are_equal_are_two(two: Two) -> None:
    with (
        two.all.connect(access_token=ACME) as acme,
        two.all.connect(access_token=BETA) as beta,
        two.own.connect(access_token=ACME) as alone,
        two.all.connect(access_token=ROOT) as root,
    ):
        mine, theirs = event(random.Random(3), "acme"), event(random.Random(4), "beta")
        before = len(contents(two.all)[0])
        for _ in range(2):
            assert acme.append("calls", [mine], token="job-1") != beta.append("calls", [theirs], token="job-1")
            alone.append("calls", [mine], token="job-1")
        assert len(contents(two.all)[0]) == before + 2
        assert acme.outcome("job-1") != beta.outcome("job-1")
        assert root.outcome("customer:acme/job-1") == acme.outcome("job-1")


# -- what is for nobody with rows -----------------------------------------------------------------------------------


def ends(server: ServerProcess, method: Any) -> grpc.StatusCode:
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    message = method.input_type._concrete_class().SerializeToString()
    with grpc.insecure_channel(server.endpoint) as channel:
        made = getattr(channel, kind)(path(method.name), lambda data: data, lambda data: data)
        try:
            reply = made(
                iter([message]) if method.client_streaming else message,
                metadata=[("authorization", f"Bearer {ACME}")],
                timeout=60,
            )
            list(reply) if method.server_streaming else None
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def test_all_calls_that_are_not_listed_are_refused(two: Two) -> None:
    for method in METHODS:
        if method.name not in FOR_TENANTS:
            assert ends(two.all, method) is grpc.StatusCode.PERMISSION_DENIED, method.name
    listed = FOR_TENANTS - {method.name for method in METHODS} - {"prometheus"}
    assert listed <= {name for name, _ in inspect.getmembers(Routes)}
    with httpx.Client(base_url=base(two.all), headers={"Authorization": f"Bearer {ACME}"}, timeout=60) as http:
        for where in ("/metrics", "/v1/stats", "/v1/rules", "/v1/alerts"):
            assert http.get(where).status_code == 403, where
        media = {"Content-Type": "application/x-protobuf"}
        assert http.post("/v1/traces", content=b"", headers=media).status_code == 403
        assert http.post("/v1/metrics", content=b"", headers=media).status_code == 403
    with two.all.connect(access_token=ACME) as acme:
        refused: list[Callable[[], Any]] = [
            lambda: acme.snapshot(shared=True).__enter__(),
            lambda: acme.stats(),
            lambda: acme.tail_points("calls", 0, 10),
            lambda: list(acme.snapshot().scan("accounts", where=col("id").under(1))),
            lambda: next(iter(acme.subscribe("calls", name="n", user="u"))),
        ]
        for i, call in enumerate(refused):
            try:
                call()
            except PermissionDenied:
                continue
            pytest.fail(f"call {i} was not refused")
        with acme.snapshot() as snap, pytest.raises((InvalidArgument, PermissionDenied)):
            list(snap.changes("calls", since=0, skip=1))


def test_tables_and_rows_bind_together_and_a_token_is_regranted(two: Two, tmp_path: Path) -> None:
    with two.all.connect(access_token=SOME) as some:
        assert some.tables() == ["calls"]
        with some.snapshot() as snap:
            assert {row["customer"] for row in snap.scan("calls")} == {"acme"}
            with pytest.raises(PermissionDenied):
                list(snap.scan("accounts"))
        with pytest.raises(PermissionDenied):
            some.append("calls", [event(random.Random(1), "acme")])
    for line in ("t admin rows=customer:acme", "t rows=customer:acme", "t reader rows=customer", "t reader rows=:x"):
        with pytest.raises(InvalidArgument, match="line 1|rows="):
            Tokens([line])
    assert Tokens(["t reader rows=customer:a:b"]).of_header("Bearer t").tenant == Tenant("customer", "a:b")
    assert Grant().tenant is None


def test_an_error_is_that_of_a_store_without_the_others(two: Two) -> None:
    with two.all.connect(access_token=ACME) as acme, two.own.connect(access_token=ACME) as alone:
        for query in ("select * from slots", "select * from nothing", "select customer from calls, prices"):
            said = []
            for db in (acme, alone):
                with db.snapshot() as snap, pytest.raises(KiviError) as error:
                    snap.sql(query)
                said.append(type(error.value))
            assert (said[0] is said[1] and not issubclass(said[0], NotFound)) or said[0] is said[1]


def test_a_tenants_own_tokens_are_no_other_tenants() -> None:
    kept = {
        Tenant("customer", text).own_token(token)
        for text, token in (("a", "b/x"), ("a/b", "x"), ("a%2Fb", "x"), ("a", "x"))
    }
    assert len(kept) == 4
