"""OpenTelemetry in: spans of the real SDK and its exporter, by a real server, each counted once."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from kivi_server.options import Options
from kivi_server.otlp.tables import COLUMNS, INVOCATIONS_KIND, LLM_KIND, ensure
from kivi_server.process.serve import credentials
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode

import kivi
from kivi.arrow.id_window import ID, Window, first_ones
from kivi.model.schema import TableSchema
from tests.otlp import EXPORT, PLACE, Recorder, Server, export
from tests.ports import Port
from tests.serverproc import ROOT
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("otlp") / "data") as running:
        yield running


@pytest.fixture
def empty(server: Server) -> Server:
    """The module's server without events: a table that is dropped is made anew, and its window with it."""
    with server.connect() as db:
        for name in sorted(db.tables(), key=lambda name: not name.endswith("_5m")):
            db.drop(name)
    return server


def ids(spans: Sequence[ReadableSpan]) -> Counter[tuple[bytes, bytes]]:
    contexts = [span.get_span_context() for span in spans]
    return Counter((c.trace_id.to_bytes(16, "big"), c.span_id.to_bytes(8, "big")) for c in contexts if c)


def stored(server: Server, table: str = "invocations") -> Counter[tuple[bytes, bytes]]:
    return Counter((row["trace_id"], row["span_id"]) for row in server.read(table))


def check_counted_once(server: Server, spans: Sequence[ReadableSpan]) -> None:
    """The events are these spans, each once, and the aggregates are their sums."""
    assert stored(server) == ids(spans)
    expected: dict[str, tuple[int, int]] = {}
    for span in spans:
        assert span.start_time is not None and span.end_time is not None
        calls, total = expected.get(span.name, (0, 0))
        expected[span.name] = calls + 1, total + (span.end_time - span.start_time) // 1_000
    found: dict[str, tuple[int, int]] = {}
    for row in server.read("invocations_endpoint_5m"):
        calls, total = found.get(row["route"], (0, 0))
        found[row["route"]] = calls + row["calls"], total + row["sum_duration_us"]
    assert found == expected


# -- what becomes of a span ---------------------------------------------------------------------------


def test_spans_of_the_sdk_become_invocations(empty: Server) -> None:
    exporter = OTLPSpanExporter(f"http://{empty.otlp}", compression=grpc.Compression.Gzip)
    provider = TracerProvider(resource=Resource.create(PLACE), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=60_000))
    tracer = provider.get_tracer("tests")
    said: list[tuple[str, SpanKind, dict[str, Any]]] = [
        ("GET /cart/{id}", SpanKind.SERVER, {"http.route": "/cart/{id}", "http.request.method": "GET"}),
        ("old names", SpanKind.SERVER, {"http.route": "/old", "http.method": "PUT", "http.status_code": 204}),
        ("rpc", SpanKind.SERVER, {"rpc.service": "shop.Cart", "rpc.method": "Add", "rpc.grpc.status_code": 0}),
        ("rpc", SpanKind.SERVER, {"rpc.method": "shop.Cart/Drop"}),
        ("orders process", SpanKind.CONSUMER, {"messaging.system": "kafka"}),
        ("inside", SpanKind.INTERNAL, {"http.route": "/no"}),
        ("call", SpanKind.CLIENT, {}),
        ("send", SpanKind.PRODUCER, {}),
    ]
    for i, (name, kind, attributes) in enumerate(said):
        span = tracer.start_span(name, kind=kind, attributes=attributes, start_time=1_767_268_800_000_000_000)
        if name == "rpc":
            span.set_status(Status(StatusCode.ERROR))
        span.end(1_767_268_800_000_000_000 + 121_000_000 + i * 1_000 + 999)
    provider.shutdown()
    rows = sorted(empty.read("invocations"), key=lambda row: row["duration_us"])
    assert [(r["route"], r["method"], r["kind"], r["status_code"], r["error"]) for r in rows] == [
        ("/cart/{id}", "GET", "server", 0, 0),
        ("/old", "PUT", "server", 204, 0),
        ("shop.Cart/Add", "", "server", 0, 1),
        ("shop.Cart/Drop", "", "server", 0, 1),
        ("orders process", "", "consumer", 0, 0),
    ]
    assert [row["duration_us"] for row in rows] == [121_000, 121_001, 121_002, 121_003, 121_004]
    assert {(r["namespace"], r["service"], r["instance"]) for r in rows} == {("acme", "shop", "shop-1")}
    assert {row["ts"].isoformat() for row in rows[:1]} == {"2026-01-01T12:00:00.121000+00:00"}
    (service,) = empty.read("invocations_service_5m")
    assert service["slot"].isoformat() == "2026-01-01T12:00:00+00:00"
    assert (service["calls"], service["errors"], service["slowest_us"]) == (5, 2, 121_004)
    assert (service["avg_duration_us"], service["error_rate"]) == (121_002.0, 0.4)
    for quantile, nearest in (("p50_us", 121_002), ("p95_us", 121_004), ("p99_us", 121_004)):
        assert abs(service[quantile] - nearest) <= 0.01 * nearest
    assert (service["latency"].count, service["apdex"]) == (5, 1.0)
    assert service["slowest_trace_id"] == rows[4]["trace_id"]
    assert len(empty.read("invocations_endpoint_5m")) == 5


def test_paths_that_no_route_matches_are_one_endpoint_of_their_method(empty: Server) -> None:
    """As Flask's instrumentation and others name them: a scanner would make an endpoint of each path that it tries."""
    recorder = Recorder()
    said: list[tuple[str, dict[str, str]]] = [
        ("GET /wp-login.php", {"http.method": "GET", "http.target": "/wp-login.php?x=1"}),
        ("GET /.env", {"http.request.method": "GET", "url.path": "/.env", "url.query": "a=/.env"}),
        ("/old", {"http.method": "PUT", "http.target": "/old"}),
        ("HTTP /odd", {"http.request.method": "_OTHER", "url.path": "/odd"}),
        ("/bare", {"url.path": "/bare"}),
        ("GET", {"http.request.method": "GET", "url.path": "/a"}),
        ("GET /items/{id}", {"http.request.method": "GET", "url.path": "/items/3"}),  # a name that somebody gave
        ("find/", {"http.request.method": "GET", "url.path": "/"}),
        ("GET /exact", {"http.request.method": "GET", "url.path": "/exact", "http.route": "/exact"}),
    ]
    for name, attributes in said:
        recorder.tracer.start_span(name, kind=SpanKind.SERVER, attributes=attributes).end()
    export(empty.otlp, recorder.memory.get_finished_spans())
    endpoints = {(row["route"], row["method"]): row["calls"] for row in empty.read("invocations_endpoint_5m")}
    assert endpoints == {
        ("GET", "GET"): 3,
        ("PUT", "PUT"): 1,
        ("HTTP", "_OTHER"): 1,
        ("HTTP", ""): 1,
        ("GET /items/{id}", "GET"): 1,
        ("find/", "GET"): 1,
        ("/exact", "GET"): 1,
    }


def test_a_span_that_says_little_and_one_that_cannot_be_used(empty: Server) -> None:
    def request() -> tuple[pb.ExportTraceServiceRequest, Any]:
        made = pb.ExportTraceServiceRequest()
        return made, made.resource_spans.add().scope_spans.add()

    def add(to: Any, number: int, **fields: Any) -> None:
        defaults: dict[str, Any] = {
            "trace_id": number.to_bytes(16),
            "span_id": number.to_bytes(8),
            "kind": 2,
            "name": "n",
        }
        times = {"start_time_unix_nano": 1_767_268_800_000_000_000, "end_time_unix_nano": 1_767_268_800_000_001_999}
        to.spans.add(**{**defaults, **times, **fields})

    good, spans = request()
    add(spans, 1, parent_span_id=bytes(8))  # zeros for none
    assert not export(empty.otlp, good).HasField("partial_success")
    (row,) = empty.read("invocations")
    assert row["parent_span_id"] == b""
    assert (row["namespace"], row["service"], row["instance"], row["route"]) == ("", "unknown_service", "", "n")
    assert (row["duration_us"], row["trace_id"], row["span_id"]) == (1, (1).to_bytes(16), (1).to_bytes(8))

    mixed, spans = request()
    add(spans, 2)
    faults: list[dict[str, Any]] = [
        {"trace_id": b""},
        {"trace_id": bytes(16)},
        {"span_id": b"1234567"},
        {"start_time_unix_nano": 0},
        {"end_time_unix_nano": 1},
        {"name": "é" * 2_049},
    ]
    for number, fault in enumerate(faults, 10):
        add(spans, number, **fault)
    add(spans, 3, name="x" * 4_096)
    add(spans, 4, kind=1, trace_id=b"")  # of a kind that is passed over: nobody asks for its ids
    answer = export(empty.otlp, mixed).partial_success
    assert answer.rejected_spans == 6
    assert "2 spans left out: the trace id" in answer.error_message and "4,096 bytes" in answer.error_message
    assert len(empty.read("invocations")) == 3

    for request_ in (pb.ExportTraceServiceRequest(), request()[0]):
        assert not export(empty.otlp, request_).HasField("partial_success")
    with grpc.insecure_channel(empty.otlp) as channel, pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(EXPORT, bytes, bytes)(b"\xff\xff no protobuf", timeout=60)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    made, spans = request()
    add(spans, 5, name="x" * (9 << 20))
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):  # 8 MiB a message, unpacked
        with pytest.raises(grpc.RpcError) as error:
            export(empty.otlp, made, compression=compression)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in str(error.value.details())
    assert len(empty.read("invocations")) == 3


def test_names_that_repeat_take_no_room_that_the_message_does_not(empty: Server) -> None:
    """A message of some megabytes cannot become gigabytes of events."""
    made = pb.ExportTraceServiceRequest()
    resource_spans = made.resource_spans.add()
    for name in PLACE:
        resource_spans.resource.attributes.add(key=name).value.string_value = "x" * 4_096
    spans = resource_spans.scope_spans.add().spans
    for number in range(1, 40_001):
        spans.add(
            trace_id=number.to_bytes(16), span_id=number.to_bytes(8), kind=2, start_time_unix_nano=10**18,
            end_time_unix_nano=10**18 + 5_000,
        )  # fmt: skip
    with pytest.raises(grpc.RpcError) as error:
        export(empty.otlp, made)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "smaller batches" in str(error.value.details())
    del spans[4_000:]
    export(empty.otlp, made)
    (row,) = empty.read("invocations_service_5m")
    assert (row["calls"], row["sum_duration_us"]) == (4_000, 20_000)


# -- each once ----------------------------------------------------------------------------------------


def regrouped(spans: Sequence[ReadableSpan], seed: int) -> Iterator[list[ReadableSpan]]:
    """The same spans in another order and other batches, with some of them twice in one."""
    dice = random.Random(seed)
    left = list(spans)
    dice.shuffle(left)
    while left:
        size = dice.randint(1, 60)
        batch, left = left[:size], left[size:]
        yield [*batch, *dice.choices(batch, k=2)]


def test_repeated_regrouped_and_concurrent_exports_count_once_and_so_after_a_kill(tmp_path: Path) -> None:
    recorder = Recorder()
    first = recorder.spans(300)
    with Server(tmp_path / "data") as server:

        def send_all(spans: Sequence[ReadableSpan], senders: int) -> None:
            def send(seed: int) -> None:
                try:
                    with grpc.insecure_channel(server.otlp) as channel:
                        made = channel.unary_unary(
                            EXPORT,
                            pb.ExportTraceServiceRequest.SerializeToString,
                            pb.ExportTraceServiceResponse.FromString,
                        )
                        calls = [made.future(encode_spans(batch), timeout=30) for batch in regrouped(spans, seed)]
                        for call in calls:
                            assert not call.result().HasField("partial_success")
                except BaseException as error:
                    failures.append(error)

            failures: list[BaseException] = []
            threads = [threading.Thread(target=send, args=(seed,)) for seed in range(senders)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failures

        send_all(first, 6)
        check_counted_once(server, first)
        second = recorder.spans(200)
        with server.connect() as db:
            db.consolidate()  # the first are in blocks, the second in the log only
        send_all([*first, *second], 3)
        server.restart()
        with server.connect() as db:
            commits = db.stats()["commits"]
        send_all([*first, *second], 2)
        check_counted_once(server, [*first, *second])
        with server.connect() as db:
            stats = db.stats()
        assert stats["commits"] == commits, "a repeat commits nothing"
        assert (stats["otlp_spans_stored"], stats["otlp_window_spans"]) == (0, 500)
        assert stats["otlp_spans_repeated"] >= 2 * 500
        assert server.stop() == 0


def over_grpc(server: Server, batch: list[ReadableSpan]) -> str:
    """What an export is answered, where nobody may be there."""
    try:
        export(server.otlp, batch, timeout=5)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def over_http(server: Server, batch: list[ReadableSpan]) -> str:
    body, headers = encode_spans(batch).SerializeToString(), {"Content-Type": "application/x-protobuf"}
    try:
        reply = httpx.post(f"http://{server.arguments[-1]}/v1/traces", content=body, headers=headers, timeout=5)
    except httpx.TransportError:
        return "UNAVAILABLE"
    return {200: "OK", 503: "UNAVAILABLE"}.get(reply.status_code, reply.text)


@pytest.mark.parametrize("over", [over_grpc, over_http])
def test_what_is_exported_while_the_server_is_killed_counts_once(
    over: Callable[[Server, list[ReadableSpan]], str], tmp_path: Path
) -> None:
    """Senders go on until each batch is acknowledged, and batch anew what was not."""
    recorders = [Recorder() for _ in range(4)]
    acknowledged: list[ReadableSpan] = []
    failures: list[BaseException] = []
    refused: set[str] = set()
    stop = threading.Event()
    http = Port()
    with Server(tmp_path / "data", "--http", f"localhost:{http.number}") as server:

        def send(recorder: Recorder, seed: int) -> None:
            dice, left = random.Random(seed), list[ReadableSpan]()
            try:
                while not stop.is_set() or left:
                    if not stop.is_set():
                        left += recorder.spans(dice.randint(1, 30))
                    batch = dice.sample(left, dice.randint(1, len(left)))
                    if (said := over(server, batch)) != "OK":
                        refused.add(said)
                        time.sleep(0.05)
                        continue
                    acknowledged.extend(batch)
                    left = [span for span in left if span not in batch]
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=send, args=(recorder, i)) for i, recorder in enumerate(recorders)]
        for thread in threads:
            thread.start()
        wait_until(lambda: failures or len(acknowledged) > 100)
        server.restart()
        before = len(acknowledged)
        wait_until(lambda: failures or len(acknowledged) > before + 100)
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert len(acknowledged) > 100
        assert refused and refused <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
        check_counted_once(server, acknowledged)


def test_a_drop_of_the_table_is_survived_and_forgets_its_ids(empty: Server) -> None:
    spans = Recorder().spans(30)
    export(empty.otlp, spans)
    with empty.connect() as db:
        for name in ("invocations_endpoint_5m", "invocations_service_5m", "invocations"):
            db.drop(name)
    export(empty.otlp, spans[:20])  # to another table of the same name, which has none of them
    export(empty.otlp, spans[:20])
    check_counted_once(empty, spans[:20])
    with empty.connect() as db, db.transaction() as tx:
        tx.overwrite("invocations")
    export(empty.otlp, spans)
    check_counted_once(empty, spans)


# -- the window ---------------------------------------------------------------------------------------


def test_the_window_against_a_dictionary() -> None:
    dice = random.Random(5)
    clock = [0.0]
    window = Window(80.0, 1_000_000, clock=lambda: clock[0])
    window._odd[:2] = 0  # hashes of the last word alone: many ids share one
    taken: dict[tuple[int, ...], float] = {}
    for _ in range(400):
        clock[0] += dice.choice([0.0, 0.1, 3.0, 25.0])
        asked = [tuple(dice.randrange(6) for _ in range(3)) for _ in range(dice.randint(1, 40))]
        array = np.array(asked, np.uint64).view(ID).ravel()
        assert [asked.index(each) == i for i, each in enumerate(asked)] == first_ones(array).tolist()
        window.expire()
        known = window.known(array)
        for each, is_known in zip(asked, known.tolist(), strict=True):
            age = clock[0] - taken.get(each, -1e9)
            assert is_known if age <= 80 else not (is_known and age > 90), (each, age)
        new = array[first_ones(array) & ~known]
        window.add(new)
        taken.update({tuple(each): clock[0] for each in new.view(np.uint64).reshape(-1, 3).tolist()})
        assert len(window) == sum(map(len, (run.hashes for run in window._runs)))
    assert len({run.slot for run in window._runs}) <= 9


def test_the_window_ends_and_is_bounded_and_what_is_too_old_is_left_out(tmp_path: Path) -> None:
    now, day = time.time_ns(), 86_400 * 10**9
    recorder, old = Recorder(), Recorder()
    settings = ["--otlp-window", "6s", "--otlp-window-spans", "50", "--otlp-retention", "2d"]
    with Server(tmp_path / "data", *settings, "--set", "consolidate_every_s=0.005") as server:
        spans = recorder.spans(60)
        with pytest.raises(grpc.RpcError) as error:  # never: whoever sent it need not try it again
            export(server.otlp, spans)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        export(server.otlp, spans[:40])
        export(server.otlp, spans[:40])
        with pytest.raises(grpc.RpcError) as error:
            export(server.otlp, spans[20:60])
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "otlp_window_spans" in str(error.value.details())
        assert 0 < retry_s(error.value) <= 6.8
        assert stored(server) == ids(spans[:40])
        exporter = OTLPSpanExporter(f"http://{server.otlp}", timeout=60)
        assert exporter.export(spans[20:60]) is SpanExportResult.SUCCESS  # it waits as it was told
        exporter.shutdown()
        assert stored(server) == ids(spans) + ids(spans[20:40])  # these came again too late to be found

        old.span("/forgotten", start=now - 10 * day - 5_000, end=now - 10 * day)
        export(server.otlp, old.memory.get_finished_spans())
        with server.connect() as db:
            db.consolidate()

        def routes() -> set[str]:
            return {row["route"] for row in server.read("invocations")}

        wait_until(lambda: "/forgotten" not in routes(), reason=routes, pause_s=0.1)
        before = routes()
        old.span("/late", start=now - 9 * day - 5_000, end=now - 9 * day)
        old.span("/good", start=now - day - 5_000, end=now - day)
        answer = export(server.otlp, old.memory.get_finished_spans()).partial_success
        assert (answer.rejected_spans, "retention floor" in answer.error_message) == (2, True)
        assert routes() - before == {"/good"}
        with server.connect() as db:
            assert "late_dropped" not in db.describe("invocations")["statistics"]
        assert server.stop() == 0
    with Server(tmp_path / "data", *settings, "--otlp-late", "drop") as server:
        old.memory.clear()
        old.span("/late", start=now - 9 * day - 5_000, end=now - 9 * day)
        old.span("/better", start=now - day - 5_000, end=now - day)
        for _ in range(2):
            assert not export(server.otlp, old.memory.get_finished_spans()).HasField("partial_success")
        assert routes() - before == {"/good", "/better"}
        with server.connect() as db:
            assert db.describe("invocations")["statistics"]["late_dropped"] == 1


def retry_s(error: Any) -> float:
    """As gRPC has it, and where OpenTelemetry's exporter for Python looks for it."""
    trailing = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    alone = error_details_pb2.RetryInfo.FromString(trailing["google.rpc.retryinfo-bin"])
    found = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(found) for detail in status.details) and found == alone
    return found.retry_delay.seconds + found.retry_delay.nanos / 1e9


# -- who may, and how it is told ------------------------------------------------------------------------


def test_tls_and_tokens_are_those_of_the_main_listener(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    (tmp_path / "tokens").write_text("feed-me writer tables=invocations\nread-me reader\n")
    arguments = ["--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(tmp_path / "tokens")]
    with Server(tmp_path / "data", *arguments) as server:
        for token, ends in (("feed-me", SpanExportResult.SUCCESS), ("read-me", SpanExportResult.FAILURE)):
            secure = OTLPSpanExporter(
                f"https://{server.otlp}",
                credentials=grpc.ssl_channel_credentials(cert.read_bytes()),
                headers=f"authorization=Bearer%20{token}",
                timeout=60,
            )
            assert secure.export(Recorder().spans(3)) is ends
            secure.shutdown()
        with pytest.raises(grpc.RpcError) as error:
            export(server.otlp, Recorder().spans(3), timeout=5)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert len(server.read("invocations", tls=kivi.client.Tls(ca=str(cert)), access_token="read-me")) == 3


def test_what_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    for endpoint, words in (
        ("0.0.0.0:0", "--otlp 0.0.0.0:0 would serve plaintext"),
        ("4317", "'4317' is not host:port"),
    ):
        with pytest.raises(kivi.InvalidArgument, match=words):
            credentials(Options("data", otlp=endpoint))
    for table in ("taken", "rows"):
        with kivi.open(tmp_path / "data") as db:
            if table == "taken":
                db.create_event_table("taken", event_time="ts", columns={"ts": "timestamp", "route": "int64"})
                db.create_table("rows", key={"id": "int64"}, columns={"ts": "timestamp"})
            with pytest.raises(kivi.InvalidArgument, match="name another"):
                ensure(db.store, table, 0)
            with pytest.raises(kivi.SchemaError):
                ensure(db.store, "no name", 0)
            assert db.tables() == ["rows", "taken"]
    with pytest.raises(RuntimeError, match="otlp_window_s is between"):
        Server(tmp_path / "data", "--otlp-window", "2d").start()


def test_intakes_that_make_the_same_tables_at_the_same_moment_fail_no_export(tmp_path: Path) -> None:
    """As those of two nodes of a cluster do, by the first spans of a kind: each has them, or is told to come again."""
    for turn in range(5):
        with kivi.open(tmp_path / f"{turn}") as db, ThreadPoolExecutor(4) as pool:
            together = threading.Barrier(4)

            def make(_: int, store: Any = db.store, together: threading.Barrier = together) -> TableSchema:
                together.wait()
                while True:
                    with contextlib.suppress(kivi.Unavailable):
                        return ensure(store, LLM_KIND.name, 0, LLM_KIND)

            assert len({table.id for table in pool.map(make, range(4))}) == 1
            assert db.tables() == ["llm_calls", "llm_calls_5m", "llm_costs", "llm_costs_5m", "llm_prices"]
            assert [rule["name"] for rule in db.rules()] == ["llm_costs"]


def test_the_tables_of_an_older_server_are_used_as_they_are(tmp_path: Path) -> None:
    older = {"calls": kivi.count(), "errors": kivi.sum("error")}
    with kivi.open(tmp_path / "data") as db:
        columns = {name: type_ for name, type_ in COLUMNS.items() if name not in INVOCATIONS_KIND.later}
        db.create_event_table("invocations", event_time="ts", columns={**columns, "own": "int64"})
        slots = kivi.time_slot("ts", "5m", name="slot")
        group_by: list[Any] = ["namespace", "service", slots]
        db.create_aggregate("invocations_service_5m", source="invocations", group_by=group_by, measures=older)
    with Server(tmp_path / "data") as server:
        export(server.otlp, Recorder().spans(3))
        (service,) = server.read("invocations_service_5m")
        assert (service["calls"], "latency" in service) == (3, False)
        assert sum(row["latency"].count for row in server.read("invocations_endpoint_5m")) == 3
        with server.connect() as db:
            db.alter_table("invocations", add_columns={"error_type": "string", "parent_span_id": "bytes"})
        export(server.otlp, Recorder().spans(2))
        assert [row["error_type"] for row in server.read("invocations")] == [None] * 3 + [""] * 2
        assert [row["parent_span_id"] for row in server.read("invocations")] == [None] * 3 + [b""] * 2


def test_without_the_extra_the_server_says_which(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['opentelemetry.proto'] = None\nfrom kivi.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["serve", "--data", str(tmp_path / "data"), "--listen", "localhost:0"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--otlp", "localhost:0"],
        capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0 and "pip install 'kivi[otlp]'" in done.stderr
    assert not (tmp_path / "data").exists()
