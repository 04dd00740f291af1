"""OTLP/HTTP: spans of the real SDK and its exporter, as protobuf and JSON, into the intake of gRPC's spans."""

from __future__ import annotations

import base64
import gzip
import json
import random
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import json_format
from google.rpc import status_pb2
from kivi_server.otlp.spans import decode
from kivi_server.otlp.tables import INVOCATIONS_KIND, LLM_KIND, OUTGOING_KIND, Kind
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode

from tests.otlp import PLACE, Recorder, Server, export
from tests.serverproc import ServerProcess

PROTOBUF = {"Content-Type": "application/x-protobuf"}
JSON = {"Content-Type": "application/json"}


def base(server: ServerProcess) -> str:
    return next(line for line in reversed(server.output) if line.startswith("http on ")).split()[-1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("otlp") / "data", "--http", "localhost:0") as running:
        yield running


def as_json(request: pb.ExportTraceServiceRequest) -> bytes:
    """With ids in hexadecimal, as OTLP has them."""
    found = json_format.MessageToDict(request, use_integers_for_enums=True)
    for resource in found["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in span:
                        span[name] = base64.b64decode(span[name]).hex()
    return json.dumps(found).encode()


def test_every_form_is_counted_once_and_with_grpc(server: Server) -> None:
    """Batches of one set of spans, again and again, regrouped, in all forms and over both protocols, and a kill."""
    recorder, shuffled = Recorder(), random.Random(5)
    spans = list(recorder.spans(300))
    for turn in range(10):
        if turn == 5:
            server.restart()
        some = shuffled.sample(spans, 60)
        request = encode_spans(some)
        body = request.SerializeToString()
        match turn % 5:
            case 0:
                export(server.otlp, some)
                continue
            case 1:
                sent: Any = {"content": body, "headers": PROTOBUF}
            case 2:
                sent = {"content": gzip.compress(body), "headers": {**PROTOBUF, "Content-Encoding": "gzip"}}
            case 3:
                sent = {"content": zlib.compress(body), "headers": {**PROTOBUF, "Content-Encoding": "deflate"}}
            case _:
                sent = {"content": as_json(request), "headers": JSON}
        reply = httpx.post(f"{base(server)}/v1/traces", timeout=60, **sent)
        assert reply.status_code == 200 and reply.headers["Content-Type"] == sent["headers"]["Content-Type"]
        empty = b"{}" if sent["headers"] is JSON else b""
        assert reply.content == empty
    export(server.otlp, spans)
    found = Counter((row["trace_id"], row["span_id"]) for row in server.read("invocations"))
    contexts = [context for span in spans if (context := span.get_span_context())]
    assert found == Counter((c.trace_id.to_bytes(16, "big"), c.span_id.to_bytes(8, "big")) for c in contexts)
    assert sum(row["calls"] for row in server.read("invocations_endpoint_5m")) == 300


def test_the_sdks_exporter(tmp_path: Path) -> None:
    """On a server that is told nothing of OpenTelemetry: the table is made by the first span."""
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server:
        with server.connect() as db:
            assert db.tables() == []
        provider = TracerProvider(resource=Resource.create(PLACE), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(f"{base(server)}/v1/traces", compression=Compression.Gzip)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        tracer = provider.get_tracer("tests")
        for i in range(700):
            with tracer.start_as_current_span(f"/r{i % 3}", kind=SpanKind.SERVER):
                pass
        provider.shutdown()
        with server.connect() as db, db.snapshot() as snap:
            assert snap.to_arrow("invocations").num_rows == 700


def test_what_cannot_be_used_is_told(server: Server) -> None:
    url = f"{base(server)}/v1/traces"
    request = encode_spans(Recorder().spans(2))
    request.resource_spans[0].scope_spans[0].spans[0].trace_id = b"short"
    reply = httpx.post(url, content=request.SerializeToString(), headers=PROTOBUF)
    said = pb.ExportTraceServiceResponse.FromString(reply.content).partial_success
    assert reply.status_code == 200 and said.rejected_spans == 1 and "trace id" in said.error_message
    reply = httpx.post(url, content=as_json(request), headers=JSON)
    assert reply.json()["partialSuccess"]["rejectedSpans"] == "1"
    span = {**json.loads(as_json(request))["resourceSpans"][0]["scopeSpans"][0]["spans"][1], "parentSpanId": None}
    for spans in (None, [{**span, "links": None, "attributes": None}]):
        scopes = [{"scope": None, "spans": spans}, {"spans": None}]
        content = json.dumps({"resourceSpans": [{"scopeSpans": scopes}, {"scopeSpans": None}]}).encode()
        reply = httpx.post(url, content=content, headers=JSON)
        assert (reply.status_code, reply.json()) == (200, {})
    for content in (
        b"[]",
        b"null",
        b'{"resourceSpans": [null]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [7]}]}]}',
    ):
        assert "another kind of value" in httpx.post(url, content=content, headers=JSON).json()["message"]
    for content, headers, status in (
        (b"\xff\xff", PROTOBUF, 400),
        (b"{}}", JSON, 400),
        (b'{"resourceSpans": 7}', JSON, 400),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "zz"}]}]}]}', JSON, 400),
        (b"x" * (9 << 20), PROTOBUF, 413),
        (gzip.compress(bytes(9 << 20)), {**PROTOBUF, "Content-Encoding": "gzip"}, 413),
    ):
        reply = httpx.post(url, content=content, headers=headers)
        assert reply.status_code == status
        if headers is JSON:
            assert reply.json()["message"]
        else:
            assert status_pb2.Status.FromString(reply.content).message
    assert httpx.post(url, content=b"", headers={"Content-Type": "text/plain"}).status_code == 415
    assert httpx.post(url, content=b"", headers=PROTOBUF).status_code == 200


def test_exporters_need_a_token_that_may_write(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("root admin\nread reader\nsend writer tables=invocations\nother writer tables=b\n"
                      "models writer tables=llm_calls\n")  # fmt: skip
    with ServerProcess(tmp_path / "data", "--http", "localhost:0", "--token-file", str(tokens)) as server:
        url = f"{base(server)}/v1/traces"
        for token, result in (
            ("read", SpanExportResult.FAILURE),
            ("other", SpanExportResult.FAILURE),
            ("send", SpanExportResult.SUCCESS),
        ):
            exporter = OTLPSpanExporter(url, headers={"Authorization": f"Bearer {token}"})
            assert exporter.export(Recorder().spans(1)) is result
        assert httpx.post(url, content=b"", headers=PROTOBUF).status_code == 401
        recorder = Recorder()
        asked = recorder.tracer.start_span("ask", kind=SpanKind.CLIENT, attributes={"gen_ai.request.model": "m"})
        asked.end()
        content = encode_spans((*recorder.memory.get_finished_spans(), *recorder.spans(2))).SerializeToString()
        reply = httpx.post(url, content=content, headers={**PROTOBUF, "Authorization": "Bearer models"})
        said = pb.ExportTraceServiceResponse.FromString(reply.content).partial_success
        assert reply.status_code == 200 and said.rejected_spans == 2
        assert said.error_message == "2 spans left out: the access token is not for table 'invocations'"
        with server.connect(access_token="root") as db, db.snapshot() as snap:
            assert len(list(snap.scan("llm_calls"))) == len(list(snap.scan("invocations"))) == 1


def test_calls_that_a_service_makes_and_models_that_it_asks(tmp_path: Path) -> None:
    """Each span is in one table; tokens are those of the calls to models, and of nothing that wraps them."""
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server:
        with server.connect() as db:
            db.create_table(
                "outgoing_calls_5m", key={"id": "int64"}, columns={}
            )  # the aggregate of that name is not made
            money = {"input_price": "decimal(18,10)", "output_price": "decimal(18,10)"}
            db.create_table("llm_prices", key={"provider": "string", "model": "string"}, columns=money)
            with db.transaction() as tx:
                tx.put("llm_prices", ("p", "m1"), input_price="0.0000025", output_price="0.00001")
        provider = TracerProvider(resource=Resource.create(PLACE), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{base(server)}/v1/traces")))
        tracer = provider.get_tracer("tests")
        usage = {"gen_ai.usage.input_tokens": 120, "gen_ai.usage.output_tokens": 30}
        chat: dict[str, Any] = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m1", **usage}
        said: list[tuple[str, SpanKind, dict[str, Any]]] = [
            ("serve", SpanKind.SERVER, {"http.route": "/ask", **chat}),
            ("GET", SpanKind.CLIENT, {"server.address": "stock", "http.request.method": "GET", "http.route": "/s"}),
            ("GET", SpanKind.CLIENT, {"http.method": "GET", "http.url": "https://a:b@api.example:8443/x?y=1"}),
            ("GET", SpanKind.CLIENT, {"http.request.method": "GET", "url.full": "http://[none/"}),
            ("select", SpanKind.CLIENT, {"db.system.name": "postgresql", "db.namespace": "shop"}),
            ("send", SpanKind.PRODUCER, {"messaging.system": "kafka", "messaging.destination.name": "orders"}),
            ("chat m1", SpanKind.CLIENT, {**chat, "gen_ai.provider.name": "p", "tenant.id": "acme"}),
            (
                "chat m1",
                SpanKind.CLIENT,
                {**chat, "gen_ai.response.model": "m2", "gen_ai.system": "p", "user.id": "u"},
            ),
            ("local", SpanKind.INTERNAL, {**chat, "gen_ai.usage.input_tokens": 120.0}),
            ("invoke_agent x", SpanKind.CLIENT, {**chat, "gen_ai.operation.name": "invoke_agent"}),
            ("retrieval kb", SpanKind.CLIENT, {**chat, "gen_ai.operation.name": "retrieval", "server.address": "kb"}),
            ("retrieval in", SpanKind.INTERNAL, {**chat, "gen_ai.operation.name": "retrieval"}),
            ("GET", SpanKind.CLIENT, {"db.system": "redis", "net.sock.peer.addr": "10.0.0.9"}),
            ("S3.Get", SpanKind.CLIENT, {"rpc.system": "aws-api", "rpc.service": "S3", "rpc.method": "Get"}),
            ("old send", SpanKind.PRODUCER, {"messaging.system": "kafka", "messaging.destination": "old"}),
            ("execute_tool y", SpanKind.INTERNAL, {"gen_ai.operation.name": "execute_tool"}),
            ("chat m3", SpanKind.CLIENT, {**chat, "gen_ai.request.model": "m3", **dict.fromkeys(usage, 2**63 - 1)}),
            ("inside", SpanKind.INTERNAL, {}),
        ]
        for turn in range(3):
            for name, kind, attributes in said:
                with tracer.start_as_current_span(name, kind=kind, attributes=attributes) as span:
                    if turn == 2 and name in ("select", "serve"):
                        span.record_exception(TimeoutError("slow"))
                        span.set_status(Status(StatusCode.ERROR))
        provider.shutdown()
        with server.connect() as db, db.snapshot() as snap:
            assert [(r["route"], r["error_type"]) for r in snap.scan("invocations")] == [
                ("/ask", ""), ("/ask", ""), ("/ask", "TimeoutError"),
            ]  # fmt: skip
            outgoing = list(snap.scan("outgoing_calls"))
            assert Counter((r["peer"], r["system"], r["operation"], r["method"], r["kind"]) for r in outgoing) == {
                ("stock", "http", "/s", "GET", "client"): 3,
                ("api.example", "http", "GET", "GET", "client"): 3,
                ("", "http", "GET", "GET", "client"): 3,
                ("shop", "postgresql", "select", "", "client"): 3,
                ("orders", "kafka", "send", "", "producer"): 3,
                ("kb", "", "retrieval kb", "", "client"): 3,
                ("10.0.0.9", "redis", "GET", "", "client"): 3,
                ("S3", "aws-api", "S3/Get", "", "client"): 3,
                ("old", "kafka", "old send", "", "producer"): 3,
            }
            assert [r["error_type"] for r in outgoing if r["error"]] == ["TimeoutError"]
            models = Counter((r["tenant"], r["provider"], r["model"]) for r in snap.scan("llm_calls"))
            assert models == {("acme", "p", "m1"): 3, ("u", "p", "m2"): 3, ("", "", "m1"): 3, ("", "", "m3"): 3}
            sums = snap.rollup("llm_calls_5m", by=["service"], measures=["calls", "input_tokens", "output_tokens"])
            assert [tuple(row.values()) for row in sums] == [("shop", 12, 1080, 270)]
            costs = snap.rollup("llm_costs_5m", by=["tenant", "service", "provider", "model"])
            each = 120 * Decimal("0.0000025") + 30 * Decimal("0.00001")
            assert [tuple(row.values()) for row in costs] == [("acme", "shop", "p", "m1", 3 * each, 3)]
            (rule,) = db.rules()
            assert (rule["judged"], rule["raised"], rule["missing"], rule["failed"]) == (12, 3, 9, 0)


def test_a_call_costs_nothing_yet_while_a_price_that_it_needs_is_missing(tmp_path: Path) -> None:
    """A row of prices may have one of the two: a call is as one without a price only if it has tokens of the other."""
    with Server(tmp_path / "data") as server:
        recorder = Recorder()

        def ask(model: str, inputs: int, outputs: int) -> None:
            said: dict[str, str | int] = {
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": inputs,
                "gen_ai.usage.output_tokens": outputs,
            }
            recorder.tracer.start_span("a", kind=SpanKind.CLIENT, attributes=said).end()

        ask("first", 1, 1)
        export(server.otlp, recorder.memory.get_finished_spans())
        with server.connect() as db, db.transaction() as tx:
            tx.put("llm_prices", ("", "embedding"), input_price="0.5")
            tx.put("llm_prices", ("", "half"), output_price="0.25")
            tx.put("llm_prices", ("", "none"))
        recorder.memory.clear()
        for model in ("embedding", "half", "none"):
            for tokens in ((4, 0), (0, 4), (4, 4)):
                ask(model, *tokens)
        export(server.otlp, recorder.memory.get_finished_spans())
        costs = {row["model"]: (row["calls"], row["cost"]) for row in server.read("llm_costs_5m")}
        assert costs == {"embedding": (1, 2), "half": (1, 1)}


def test_calls_of_an_older_server_have_costs_from_now_on_and_what_was_dropped_stays_away(tmp_path: Path) -> None:
    def called(server: Server, name: str) -> None:
        recorder = Recorder()
        usage = {"gen_ai.usage.input_tokens": 1_000_000}
        attributes: dict[str, Any] = {"gen_ai.request.model": "m", "gen_ai.provider.name": "p", **usage}
        recorder.tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes).end()
        export(server.otlp, recorder.memory.get_finished_spans())

    def costs(server: Server) -> list[Decimal]:
        return [row["cost"] for row in server.read("llm_costs")]

    with Server(tmp_path / "data", "--http", "localhost:0") as server:
        called(server, "before")
        with server.connect() as db:
            db.drop_rule("llm_costs")
            for table in ("llm_costs_5m", "llm_costs", "llm_prices"):  # an older server has none of them
                db.drop(table)
    with Server(tmp_path / "data", "--http", "localhost:0") as server:
        called(server, "first")
        with server.connect() as db, db.transaction() as tx:
            tx.put("llm_prices", ("p", "m"), input_price="0.0000000375")
        called(server, "second")
        assert costs(server) == [Decimal("0.0375")] and len(server.read("llm_calls")) == 3
        with server.connect() as db:
            db.drop_rule("llm_costs")
    with Server(tmp_path / "data", "--http", "localhost:0") as server:
        called(server, "third")
        assert costs(server) == [Decimal("0.0375")]


def test_costs_that_cannot_be_declared_stop_no_call_from_being_counted(tmp_path: Path) -> None:
    with Server(tmp_path / "data", "--http", "localhost:0") as server:
        with server.connect() as db:
            db.create_table("llm_prices", key={"model": "string"}, columns={"price": "float64"})
        recorder = Recorder()
        recorder.tracer.start_span("a", kind=SpanKind.CLIENT, attributes={"gen_ai.request.model": "m"}).end()
        export(server.otlp, recorder.memory.get_finished_spans())
        assert len(server.read("llm_calls")) == 1 and [row["calls"] for row in server.read("llm_calls_5m")] == [1]
        assert any("calls to language models have no costs: " in line for line in server.output)


def test_a_table_that_does_not_fit_stops_nobody(tmp_path: Path) -> None:
    with Server(tmp_path / "data", "--http", "localhost:0") as server:
        with server.connect() as db:
            db.create_event_table("llm_calls", event_time="at", columns={"at": "timestamp"})
        recorder = Recorder()
        recorder.span("/r")
        for name in ("a", "b"):
            span = recorder.tracer.start_span(name, kind=SpanKind.CLIENT, attributes={"gen_ai.request.model": "m"})
            span.end()
        request = encode_spans(recorder.memory.get_finished_spans()).SerializeToString()
        for _ in range(2):
            reply = httpx.post(f"{base(server)}/v1/traces", content=request, headers=PROTOBUF)
            said = pb.ExportTraceServiceResponse.FromString(reply.content).partial_success
            assert reply.status_code == 200 and said.rejected_spans == 2 and "'llm_calls'" in said.error_message
        assert len(server.read("invocations")) == 1
        assert 'kivi_otlp_tables_unfit{kind="llm_calls"} 1.0' in httpx.get(f"{base(server)}/metrics").text
        with server.connect() as db:
            db.drop("llm_calls")
        export(server.otlp, recorder.memory.get_finished_spans())
        assert len(server.read("llm_calls")) == 2 and len(server.read("invocations")) == 1


def said_of(server: ServerProcess, spans: list[dict[str, Any]], signal: str = "traces") -> tuple[int, str]:
    """How many of these spans, as JSON, are told as left out, and why."""
    content = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()
    reply = httpx.post(f"{base(server)}/v1/{signal}", content=content, headers=JSON, timeout=60)
    assert reply.status_code == 200
    said = reply.json().get("partialSuccess", {})
    return int(said.get("rejectedSpans", 0)), said.get("errorMessage", "")


def test_times_that_no_span_has_are_told(tmp_path: Path) -> None:
    """Nanoseconds of another unit, and what stands for no end: the sender is told, and no reader ever meets them."""
    at = 1_767_268_800_000_000_000
    faulty = [
        (at, 2**64 - 1),
        (at, at * 3),
        (at // 1_000, at // 1_000 + 5),
        (1, at),
        (at, at - 1),
        (2**63, 2**63 + 1),
        (at, time.time_ns() + 3_600 * 10**9),
        (at, 4_102_444_800 * 10**9 - 1),
    ]
    times = [*faulty, (at, at), (631_152_000 * 10**9, time.time_ns() + 300 * 10**9)]
    with Server(tmp_path / "data", "--http", "localhost:0") as server:
        for kind, table in ((2, "invocations"), (3, "outgoing_calls")):
            spans = [
                {
                    "traceId": f"{kind:032x}",
                    "spanId": f"{number:016x}",
                    "name": "n",
                    "kind": kind,
                    "startTimeUnixNano": str(start),
                    "endTimeUnixNano": str(end),
                }
                for number, (start, end) in enumerate(times, 1)
            ]
            rejected, why = said_of(server, spans)
            assert rejected == len(faulty)
            assert "5 spans left out: its times are not within the years 1990 to 2099" in why
            assert "1 span left out: it ends before it starts" in why
            assert "2 spans left out: it is of more than 10 minutes after this server's clock" in why
            assert sorted(row["span_id"][-1] for row in server.read(table)) == [9, 10]
        point = {"attributes": [], "asInt": "1"}
        moments = (2**64 - 1, time.time_ns() + 3_600 * 10**9, at)
        metrics = [{"name": "m", "gauge": {"dataPoints": [{**point, "timeUnixNano": str(each)} for each in moments]}}]
        content = json.dumps({"resourceMetrics": [{"scopeMetrics": [{"metrics": metrics}]}]}).encode()
        said = httpx.post(f"{base(server)}/v1/metrics", content=content, headers=JSON, timeout=60).json()
        assert said["partialSuccess"]["rejectedDataPoints"] == "2"
        assert "1990 to 2099" in said["partialSuccess"]["errorMessage"]
        assert "after this server's clock" in said["partialSuccess"]["errorMessage"]
        assert len(server.read("metric_gauges")) == 1


def test_kinds_and_statuses_that_otlp_has_not_are_told(server: Server) -> None:
    """OTLP's JSON has numbers for them; a text that names none may be a span of a server, or an error."""
    at = 1_767_268_800_000_000_000
    span = {"name": "n", "kind": 2, "startTimeUnixNano": str(at), "endTimeUnixNano": str(at)}
    said: list[dict[str, Any]] = [
        {"kind": "server"},
        {"kind": "SPAN_KIND_GATEWAY"},
        {"kind": 17},
        {"kind": -1},
        {"status": {"code": "ERROR"}},
        {"status": {"code": 9}},
        {"kind": 3, "status": {"code": "bad"}},
        {"kind": "SPAN_KIND_SERVER", "status": {"code": "STATUS_CODE_ERROR"}},
        {"kind": 1, "status": {"code": "bad"}},
        {"kind": None, "status": None},
        {"status": {"code": None}},
    ]
    ids = [{"traceId": f"{77:032x}", "spanId": f"{number:016x}"} for number in range(1, len(said) + 1)]
    rejected, why = said_of(server, [{**span, **own, **each} for own, each in zip(ids, said, strict=True)])
    assert rejected == 7
    assert "4 spans left out: its kind is none that OTLP has" in why
    assert "3 spans left out: its status code is none that OTLP has" in why
    rows = [row for row in server.read("invocations") if row["trace_id"] == (77).to_bytes(16)]
    assert sorted((row["span_id"][-1], row["error"]) for row in rows) == [(8, 1), (11, 0)]


def test_the_temporality_of_points_is_one_that_otlp_has(server: Server) -> None:
    at = "1767268800000000000"
    points = {"dataPoints": [{"asInt": "1", "timeUnixNano": at}], "isMonotonic": True}
    content = json.dumps(
        {
            "resourceMetrics": [
                {"scopeMetrics": [{"metrics": [{"name": "m", "sum": {**points, "aggregationTemporality": said}}]}]}
                for said in ("delta", 7, "AGGREGATION_TEMPORALITY_DELTA")
            ]
        }
    ).encode()
    said = httpx.post(f"{base(server)}/v1/metrics", content=content, headers=JSON, timeout=60).json()
    assert said["partialSuccess"]["rejectedDataPoints"] == "2"
    assert "its temporality is none that OTLP has" in said["partialSuccess"]["errorMessage"]
    assert len(server.read("metric_sums")) == 1


def test_what_is_refused_beside_a_table_that_is_not_the_tokens_is_told_too(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("send writer tables=invocations\nroot admin\n")
    at = 1_767_268_800_000_000_000
    span = {"traceId": "7" * 32, "name": "n", "kind": 3, "startTimeUnixNano": str(at), "endTimeUnixNano": str(at)}
    good, bad = {**span, "spanId": "1" * 16}, {**span, "spanId": "2" * 14}
    with ServerProcess(tmp_path / "data", "--http", "localhost:0", "--token-file", str(tokens)) as server:
        for some, told in (([good, bad], ["1 span left out: the access token", "span id"]), ([bad], ["span id"])):
            content = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": some}]}]}).encode()
            headers = {**JSON, "Authorization": "Bearer send"}
            reply = httpx.post(f"{base(server)}/v1/traces", content=content, headers=headers, timeout=60)
            said = reply.json()["partialSuccess"]
            assert int(said["rejectedSpans"]) == len(some)
            assert all(each in said["errorMessage"] for each in told) and "0 span" not in said["errorMessage"]
        reply = httpx.get(f"{base(server)}/metrics", headers={"Authorization": "Bearer root"})
        assert 'kivi_otlp_spans_total{outcome="rejected"} 3.0' in reply.text


@pytest.mark.parametrize("kind", [INVOCATIONS_KIND, OUTGOING_KIND, LLM_KIND], ids=lambda kind: kind.name)
def test_texts_that_are_too_long_are_cut_and_names_that_calls_are_grouped_by_are_refused(kind: Kind) -> None:
    """So no call is lost for what an exception says, and none is counted under a name that is not its own."""
    said = {
        "namespace": "service.namespace", "service": "service.name", "instance": "service.instance.id",
        "route": "http.route", "peer": "peer.service", "system": "db.system.name", "method": "http.request.method",
        "tenant": "tenant.id", "provider": "gen_ai.provider.name", "model": "gen_ai.request.model",
        "operation": "gen_ai.operation.name" if kind is LLM_KIND else "http.route", "error_type": "error.type",
    }  # fmt: skip
    texts = [name for name, type_ in kind.columns.items() if type_ == "string" and name != "kind"]
    grouped = {name for names in kind.groups.values() for name in names} | {"namespace", "service"}
    for name in texts:
        attributes = {said["operation"]: "chat", said["model"]: "m"} if kind is LLM_KIND else {}
        attributes[said[name]] = "x" + "é" * 2_100
        request, now = pb.ExportTraceServiceRequest(), time.time_ns()
        to = request.resource_spans.add()
        span = to.scope_spans.add().spans.add(
            trace_id=bytes([1] * 16), span_id=bytes([1] * 8), start_time_unix_nano=now, end_time_unix_nano=now,
            kind=Span.SPAN_KIND_SERVER if kind is INVOCATIONS_KIND else Span.SPAN_KIND_CLIENT,
        )  # fmt: skip
        for key, text in attributes.items():
            place = to.resource.attributes if key.startswith("service.") else span.attributes
            place.add(key=key).value.string_value = text
        (spans,) = [each for each in decode(request.SerializeToString()) if len(each) or each.rejected]
        assert spans.kind is kind
        if name in grouped:
            assert not len(spans) and spans.rejected.total() == 1
            assert name in min(spans.rejected) and "more than 4,096 bytes" in min(spans.rejected)
        else:
            assert not spans.rejected and spans.columns[name] == ["x" + "é" * 2_047]
            assert 4_095 < spans.nbytes < 4_700
