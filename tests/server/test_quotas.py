"""Quotas of tokens: what is taken in the long run, what is refused, when to ask again, and what neighbours notice."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import grpc
import httpx
import pytest
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st
from kivi_server.auth import Tokens
from kivi_server.clients import Client
from kivi_server.http.errors import retry_after
from kivi_server.pages import Pages
from kivi_server.quotas import Bucket, Quota
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

import kivi
from kivi.errors import InvalidArgument, ResourceExhausted, Unavailable
from tests.otlp import Recorder, Server, export
from tests.server.test_otlp import retry_s
from tests.server.test_otlp_http import PROTOBUF
from tests.server.test_otlp_metrics import Meter
from tests.serverproc import ROOT as ROOT_FOLDER
from tests.serverproc import ServerProcess

BEGIN_US: Final = 1_767_225_600_000_000  # 2026-01-01
ROOT, METERED, BYTES, READER, FOLLOWER = "root-q1", "metered-q2", "bytes-q3", "reader-q4", "follower-q5"
WATCHERS: Final = ("watcher-q6", "watcher-q7")
LINES = [
    f"{ROOT} admin",
    f"{METERED} writer rows=customer:acme events=100/d",
    f"{BYTES} writer rows=customer:acme bytes=1KiB/h",
    f"{READER} reader rows=customer:acme query=0.000001/h",
    f"{FOLLOWER} reader rows=customer:acme subscriptions=2",
    *(f"{watcher} reader rows=customer:acme query=0.000001/h" for watcher in WATCHERS),
]


def base(server: ServerProcess) -> str:
    return next(line for line in server.output if line.startswith("http on ")).split()[-1]


def event(i: int, customer: str = "acme") -> dict[str, Any]:
    return {"customer": customer, "ts": BEGIN_US + i, "us": i}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("quotas")
    (folder / "tokens").write_text("\n".join(LINES))
    arguments = ["--http", "localhost:0", "--token-file", str(folder / "tokens")]
    with ServerProcess(folder / "data", *arguments) as running:
        with running.connect(access_token=ROOT) as db:
            columns = {"customer": "string", "ts": "timestamp", "us": "int64"}
            db.create_event_table("calls", event_time="ts", columns=columns)
            db.create_table("accounts", key={"customer": "string", "id": "int64"}, columns={"n": kivi.sum("int64")})
        yield running


steps = st.tuples(st.floats(0, 30), st.integers(1, 500))


@given(st.floats(1, 1_000), st.sampled_from(["s", "m"]), st.lists(steps, min_size=1, max_size=60))
def test_what_is_taken_is_the_quota_and_one_request_beyond_it(amount: float, period: str, asked: list[Any]) -> None:
    """And who asks again when it was told to is let in."""
    quota = Quota.parse(f"{amount}/{period}", float)
    now, taken, largest = 100.0, 0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kivi_server.quotas.time.monotonic", lambda: now)
        bucket = Bucket(quota)
        for pause, wanted in asked:
            now += pause
            try:
                bucket.check("client_events", "events")
            except ResourceExhausted as error:
                now += float(error.details["retry_s"]) + 0.001
                bucket.check("client_events", "events")
            bucket.take(wanted)
            taken, largest = taken + wanted, max(largest, wanted)
            assert taken <= quota.amount * (1 + (now - 100.0) / quota.period_s) + largest + 1e-6


@pytest.mark.parametrize("word", ["events=10", "events=0/s", "bytes=1XB/s", "query=1/w", "query=/s", "subscriptions=0"])
def test_a_quota_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(InvalidArgument, match="line 1"):
        Tokens([f"t reader {word}"])


def refused(call: Any, limit: str) -> float:
    with pytest.raises(ResourceExhausted) as error:
        call()
    assert error.value.details["limit"] == limit
    return float(error.value.details["retry_s"])


def test_events_beyond_the_quota_are_refused_everywhere_and_told_when_to_come_again(server: ServerProcess) -> None:
    with server.connect(access_token=METERED) as db, server.connect(access_token=ROOT) as root:

        def there() -> int:
            with root.snapshot() as snap:
                return len(list(snap.scan("calls"))) + len(list(snap.scan("accounts")))

        written, before = 0, there()
        with contextlib.suppress(ResourceExhausted):
            for i in range(200):
                if i % 2:
                    db.append("calls", [event(i)])
                else:
                    with db.transaction() as tx:
                        tx.delta("accounts", ("acme", i), n=1)
                written += 1
        assert 100 <= written <= 102  # what a bucket holds, one beyond it, and one for each 864 s that this takes
        db_refused = [
            lambda: db.append("calls", [event(1)]),
            lambda: db.append("calls", [event(i) for i in range(5_000)]),
            lambda: db.write("accounts", [{"customer": "acme", "id": 1, "n": 1}]),
            lambda: db.stage("calls", [event(1)]),
        ]
        for call in db_refused:
            assert 0 < refused(call, "client_events") <= 86_400 / 100
        with contextlib.suppress(ResourceExhausted), db.appender("calls") as appender:
            appender.append(**event(1))
        with httpx.Client(base_url=base(server), headers={"Authorization": f"Bearer {METERED}"}, timeout=60) as http:
            reply = http.post("/v1/tables/calls/append", json=[event(1)])
            assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
            assert http.get("/v1/tables/calls/rows").status_code == 200  # it may read
        assert there() == before + written
        root.append("calls", [event(0, "beta")])  # nobody else is refused


@pytest.mark.parametrize("wait_s", [0.001, 1.0, 1.4, 17.143])
def test_whoever_waits_as_long_as_http_says_does_not_come_too_early(wait_s: float) -> None:
    error = ResourceExhausted("wait", limit="client_events", maximum="7/m", retry_s=wait_s)
    ((_, said),) = retry_after(429, error)
    assert wait_s <= int(said) < wait_s + 1
    assert retry_after(429, ResourceExhausted("ask for less", limit="http_answer_bytes", maximum=1)) == []
    assert retry_after(503, Unavailable("the server is stopping")) == [("Retry-After", "1")]


def exported(server: Server, token: str, spans: int, over: str) -> float | None:
    """After how many seconds the sender is to come again; None: the export was taken."""
    request, headers = encode_spans(Recorder().spans(spans)), {"authorization": f"Bearer {token}"}
    if over == "http":
        content = request.SerializeToString()
        reply = httpx.post(f"{base(server)}/v1/traces", content=content, headers=PROTOBUF | headers)
        if reply.status_code == 200:
            return None
        assert reply.status_code == 429 and "quota" in status_pb2.Status.FromString(reply.content).message
        return float(reply.headers["retry-after"])
    try:
        export(server.otlp, request, metadata=tuple(headers.items()))
    except grpc.RpcError as error:
        return retry_s(error) if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else -1.0
    return None


@pytest.mark.parametrize("over", ["http", "grpc"])
def test_spans_and_points_are_events_of_a_quota(over: str, tmp_path: Path) -> None:
    """As many as appends bring; a refused export is sent again after as long as it is told, and nothing is lost."""
    lines = ["feed writer events=100/d", "size writer bytes=10KiB/d", "points writer events=5/d", "read-me reader"]
    (tmp_path / "tokens").write_text("\n".join(lines))
    with Server(tmp_path / "data", "--http", "localhost:0", "--token-file", str(tmp_path / "tokens")) as server:
        taken = [count for count in (60, 39, 0, 2, 1, 1) if exported(server, "feed", count, over) is None]
        assert taken == [60, 39, 0, 2]
        wait = exported(server, "feed", 1, over)
        assert wait is not None and 600 < wait <= 864
        assert exported(server, "size", 200, over) is None
        assert exported(server, "size", 1, over) is not None
        meter = Meter()
        for route in range(6):
            meter.calls.add(1, {"http.route": str(route)})
            meter.latency.record(route + 1, {"http.route": "/"})
            meter.latency.record(route + 100, {"http.route": "/"})
        content, url = meter.request().SerializeToString(), f"{base(server)}/v1/metrics"
        headers = PROTOBUF | {"Authorization": "Bearer points"}
        assert httpx.post(url, content=content, headers=headers).status_code == 200
        again = httpx.post(url, content=content, headers=headers)
        assert again.status_code == 429  # 7 points of 5: two days' worth is owed, whatever the events of a point
        assert 86_400 * 1 / 5 < int(again.headers["retry-after"]) <= 86_400 * 2 / 5
        assert len(server.read("invocations", access_token="read-me")) == 301


def test_bytes_and_query_time_and_subscriptions_have_an_end(server: ServerProcess) -> None:
    with server.connect(access_token=BYTES) as db:
        db.append("calls", [event(i) for i in range(1_000)])  # taken whole
        assert refused(lambda: db.append("calls", [event(1)]), "client_bytes") > 3_600
    with server.connect(access_token=READER) as db:
        db.get("accounts", ("acme", 0))

        def ask() -> None:
            def follow() -> Any:
                with db.subscribe("calls", limit=1) as subscription:
                    return next(iter(subscription))

            for read in (lambda: db.get("accounts", ("acme", 0)), lambda: scan(db), lambda: question(db), follow):
                assert refused(read, "client_query") > 0

        ask()
        with httpx.Client(base_url=base(server), headers={"Authorization": f"Bearer {READER}"}, timeout=60) as http:
            for where in (
                "/v1/tables/calls/rows",
                "/rows?table=calls",
                "/api/v1/query?query=x",
                "/v1/live?table=calls",
            ):
                answer = http.get(where)
                assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1, where
    with server.connect(access_token=FOLLOWER) as db:
        with db.subscribe("calls"), db.subscribe("calls", limit=3):
            assert refused(lambda: next(iter(db.subscribe("calls"))), "client_subscriptions") > 0
            with httpx.Client(base_url=base(server), timeout=60) as http:
                live = http.stream("GET", "/v1/live?table=calls", headers={"Authorization": f"Bearer {FOLLOWER}"})
                with live as reply:
                    assert "client_subscriptions" in next(
                        line for line in reply.iter_lines() if line.startswith("data")
                    )
        deadline = time.monotonic() + 60
        while True:  # those that were ended count no more, as soon as the server has heard of it
            try:
                with db.subscribe("calls") as again:
                    next(iter(again))
                break
            except ResourceExhausted:
                assert time.monotonic() < deadline
                time.sleep(0.05)


@pytest.mark.parametrize("where", ["/v1/live?table=calls&limit=2&order_by=us", "/v1/live?table=calls&since=0"])
def test_what_a_stream_begins_with_is_a_read(server: ServerProcess, where: str) -> None:
    token = WATCHERS["since" in where]
    with server.connect(access_token=ROOT) as root:
        root.append("calls", [event(0)])
    with httpx.Client(base_url=base(server), headers={"Authorization": f"Bearer {token}"}, timeout=60) as http:
        with http.stream("GET", where) as live:
            assert any(line.startswith("data: ") for line in live.iter_lines())
        with http.stream("GET", where) as again:
            assert again.status_code == 429


def scan(db: Any) -> list[Any]:
    with db.snapshot() as snap:
        return list(snap.scan("calls"))


def question(db: Any) -> list[Any]:
    with db.snapshot() as snap:
        return list(snap.query("calls", measures={"n": kivi.count()}))


def test_a_page_that_is_read_ahead_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    for where in ("kivi_server.clients.time", "kivi_server.quotas.time"):
        monkeypatch.setattr(where, SimpleNamespace(monotonic=lambda: now))
    client = Client("t", Tokens(["t reader query=0.01/h"]).of_header("Bearer t").allowance)

    def pages() -> Iterator[Any]:
        nonlocal now
        yield b"first", True
        now += 0.02  # the quota is half of it
        yield b"last", False

    with ThreadPoolExecutor(1) as pool:
        read = Pages(pages(), threading.Semaphore(1), pool, client.reading)
        assert read.next() == (b"first", True)
        client.check_reads()
        read.read_ahead()
        assert read.next() == (b"last", False)
    with pytest.raises(ResourceExhausted):
        client.check_reads()


def test_the_first_request_is_taken_at_once_however_slow_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("kivi_server.clients.time", SimpleNamespace(monotonic=lambda: now))
    client = Client("t", Tokens(["t reader rate=0.5"]).of_header("Bearer t").allowance)
    for _ in range(2):
        client.take(1)
        with pytest.raises(ResourceExhausted) as refused:
            client.take(1)
        assert refused.value.details["retry_s"] == 2.0
        now += 2.0


def test_a_client_counts_by_the_line_that_its_token_has_now() -> None:
    def allowance(line: str) -> Any:
        return Tokens([line]).of_header("Bearer t").allowance

    client = Client("t", allowance("t writer events=10/h"))
    client.take_writes(11, 0)
    with pytest.raises(ResourceExhausted):
        client.check_writes()
    client.allowance = allowance("t writer events=20/h")
    client.check_writes()
    client.allowance = allowance("t writer")
    client.check_writes()


# -- neighbours -----------------------------------------------------------------------------------------------------


def at_ms(samples: list[float], quantile: float) -> float:
    return sorted(samples)[int(len(samples) * quantile)] * 1_000


def asks(db: Any, seconds: float) -> list[float]:
    """A neighbour: an append, a read by key and a question of an aggregate's row, fifty of each a second at most."""
    took, until, i = [], time.monotonic() + seconds, 0
    while time.monotonic() < until:
        began = time.perf_counter()
        db.append("calls", [event(i, "beta")])
        with db.snapshot() as snap:
            snap.get("accounts", ("beta", 1))
            list(snap.scan("calls_1m", prefix=("beta",), limit=5))
        took.append(time.perf_counter() - began)
        i += 1
        time.sleep(max(0.0, 0.02 - took[-1]))
    return took


QUOTAS: Final = {"rate": 30, "events": 300, "query": 0.05}


def pressing(endpoint: str, token: str) -> None:
    """In a process of its own: asks for ten times each quota, from one line of its input to the next."""
    os.nice(10)  # it is the server that is measured, and this machine has it all
    asking: list[tuple[float, Any]] = [
        (10 * QUOTAS["events"] / 100, lambda db: db.append("calls", [event(i) for i in range(100)])),
        (10 * QUOTAS["rate"] - 60, lambda db: db.get("accounts", ("acme", 1))),
        (15, question),
        (15, scan),
    ]
    counts = [0, 0]

    def press(per_s: float, ask: Any, stop: threading.Event) -> None:
        with kivi.connect(endpoint, access_token=token) as db:
            at = time.monotonic()
            while not stop.is_set():
                counts[0] += 1
                try:
                    ask(db)
                except ResourceExhausted:
                    counts[1] += 1
                at = max(at + 1 / per_s, time.monotonic() - 1)
                stop.wait(max(0.0, at - time.monotonic()))

    for _ in sys.stdin:
        counts[:], stop = [0, 0], threading.Event()
        threads = [threading.Thread(target=press, args=(*each, stop)) for each in asking]
        for thread in threads:
            thread.start()
        sys.stdin.readline()
        stop.set()
        for thread in threads:
            thread.join()
        print(*counts, flush=True)


@pytest.mark.story
def test_a_tenant_at_ten_times_its_quota_is_refused_and_its_neighbour_goes_on(tmp_path: Path) -> None:
    """Quiet, busy, busy, quiet: each some seconds. What the neighbour notices is printed (``pytest -s``), to be judged
    on a machine that does nothing else: at most twice its p99."""
    heavy, beta, seconds = "heavy-n1", "beta-n2", 10
    limits = f"rate={QUOTAS['rate']} events={QUOTAS['events']}/s query={QUOTAS['query']}/s snapshots=4"
    (tmp_path / "tokens").write_text(
        f"{ROOT} admin\n{beta} writer rows=customer:beta\n{heavy} writer rows=customer:acme {limits}\n"
    )
    with ServerProcess(tmp_path / "data", "--token-file", str(tmp_path / "tokens")) as server:
        with server.connect(access_token=ROOT) as root:
            columns = {"customer": "string", "ts": "timestamp", "us": "int64"}
            root.create_event_table("calls", event_time="ts", columns=columns)
            groups = ["customer", kivi.time_slot("ts", "1m", name="slot")]
            root.create_aggregate("calls_1m", source="calls", group_by=groups, measures={"n": kivi.count()})
            root.create_table("accounts", key={"customer": "string", "id": "int64"}, columns={"n": kivi.sum("int64")})
            root.append("calls", [event(i * 1_000, "acme" if i % 2 else "beta") for i in range(100_000)])
        run = f"from tests.server.test_quotas import pressing; pressing({server.endpoint!r}, {heavy!r})"
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        other = subprocess.Popen([sys.executable, "-c", run], cwd=ROOT_FOLDER, **pipes)
        assert other.stdin is not None and other.stdout is not None
        asked = refused_ = 0
        pressed_s = 0.0
        found: dict[str, list[float]] = {"quiet": [], "busy": []}
        try:
            with server.connect(access_token=beta) as db:
                asks(db, 2)
                for what in ("quiet", "busy", "busy", "quiet"):
                    began = time.monotonic()
                    if what == "busy":
                        other.stdin.write("go on\n")
                    found[what] += asks(db, seconds)
                    if what == "busy":
                        other.stdin.write("stop\n")
                        counts = [int(word) for word in other.stdout.readline().split()]
                        asked, refused_ = asked + counts[0], refused_ + counts[1]
                        pressed_s += time.monotonic() - began
        finally:
            other.kill()
            other.communicate()
        quiet, busy = at_ms(found["quiet"], 0.99), at_ms(found["busy"], 0.99)
        middle = [at_ms(found[what], 0.5) for what in ("quiet", "busy")]
        times = asked / pressed_s / QUOTAS["rate"]
        print(
            f"p99 {quiet:.1f} ms quiet, {busy:.1f} ms busy, {busy / quiet:.2f} times (of {len(found['busy'])}); "
            f"p50 {middle[0]:.1f} and {middle[1]:.1f} ms; "
            f"asked for {times:.1f} times the rate, refused {refused_} of {asked}"
        )
        # A machine that has little time for the one who presses lets it ask for less. What holds then, too: it is given
        # no more than its rate, of which a second's worth may have been saved up before each of the two times.
        assert refused_ > asked / 2 or (refused_ > 0 and times < 2)
        assert asked - refused_ <= QUOTAS["rate"] * (pressed_s + 2)
        assert len(found["busy"]) > len(found["quiet"]) / 10
