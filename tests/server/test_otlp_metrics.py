"""Metrics by OTLP: those of the real SDK over HTTP and gRPC, as protobuf and JSON, into tables that count each once."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from kivi_server.otlp.metric_tables import SCALE
from kivi_server.otlp.points import Points, points_of
from kivi_server.otlp.tables import INVOCATIONS_KIND, LLM_KIND
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as pb
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation
from opentelemetry.sdk.resources import Resource

import kivi
from kivi.cli.commands import main
from kivi.model.quantiles import accuracy_of, bias_of, codes_of, rank_of
from tests.measures import code
from tests.otlp import PLACE, Recorder, Server
from tests.otlp import export as export_spans
from tests.server.test_otlp_http import JSON, PROTOBUF, base
from tests.serverproc import ServerProcess

EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
DELTA: dict[type, AggregationTemporality] = dict.fromkeys(
    (sdk.Counter, sdk.Histogram, sdk.ObservableCounter), AggregationTemporality.DELTA
)
EXPONENTIAL: dict[type, Any] = {sdk.Histogram: ExponentialBucketHistogramAggregation()}


class Meter:
    """Instruments of the SDK, and what they have recorded since it was asked last, as requests."""

    def __init__(self, exponential: bool = True, temporality: Any = DELTA) -> None:
        aggregation = EXPONENTIAL if exponential else {}
        self.reader = InMemoryMetricReader(preferred_temporality=temporality, preferred_aggregation=aggregation)
        provider = sdk.MeterProvider([self.reader], Resource.create(PLACE), shutdown_on_exit=False)
        self.meter = provider.get_meter("tests")
        self.latency = self.meter.create_histogram("latency", "ms")
        self.calls = self.meter.create_counter("calls")

    def request(self) -> pb.ExportMetricsServiceRequest:
        data = self.reader.get_metrics_data()
        assert data is not None
        return encode_metrics(data)


def export(target: str, request: pb.ExportMetricsServiceRequest, token: str = "") -> Any:
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary(
            EXPORT, pb.ExportMetricsServiceRequest.SerializeToString, pb.ExportMetricsServiceResponse.FromString
        )
        return call(request, timeout=60, metadata=(("authorization", f"Bearer {token}"),) if token else None)


def post(server: ServerProcess, request: pb.ExportMetricsServiceRequest, **how: Any) -> Any:
    content: Any = {"content": request.SerializeToString(), "headers": PROTOBUF} | how
    reply = httpx.post(f"{base(server)}/v1/metrics", timeout=60, **content)
    assert reply.status_code == 200, reply.text
    return pb.ExportMetricsServiceResponse.FromString(reply.content).partial_success


def nearest(values: Sequence[float], q: float) -> float:
    return sorted(values)[rank_of(q, len(values)) - 1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("metrics") / "data", "--http", "localhost:0") as running:
        yield running


def test_percentiles_are_those_of_what_was_recorded_over_kills_and_repeats(server: Server) -> None:
    """Each export several times, in all forms and over both protocols, regrouped, and again after ``kill -9``."""
    chance, meter = random.Random(3), Meter()
    recorded: dict[str, list[float]] = {"/find": [], "/buy": []}
    requests, calls = [], 0
    for _ in range(8):
        for route, spread in (("/find", 0.7), ("/buy", 1.5)):
            for _ in range(200):
                value = chance.lognormvariate(4, spread)
                recorded[route].append(value)
                meter.latency.record(value, {"http.route": route, "z": 1, "a": True})
            meter.calls.add(200, {"http.route": route})
            calls += 200
        requests.append(meter.request())
    points: list[Any] = [
        point
        for request in requests
        for metric in request.resource_metrics[0].scope_metrics[0].metrics
        for point in (*metric.exponential_histogram.data_points, *metric.sum.data_points)
    ]
    for point in points:
        point.time_unix_nano -= 600 * 10**9  # its slot is over, so that PromQL has all of it
    scales = {point.scale for point in points if hasattr(point, "scale")}
    assert scales and min(scales) >= 3
    for turn in range(24):
        if turn in (9, 17):
            server.restart()
        request = pb.ExportMetricsServiceRequest()
        for each in chance.sample(requests, 3):
            request.MergeFrom(each)
        match turn % 4:
            case 0:
                assert not export(server.otlp, request).HasField("partial_success")
            case 1:
                post(server, request, content=gzip.compress(request.SerializeToString()),
                     headers={**PROTOBUF, "Content-Encoding": "gzip"})  # fmt: skip
            case 2:
                for metric in request.resource_metrics[0].scope_metrics[0].metrics:
                    for point in metric.exponential_histogram.data_points:
                        attributes = list(point.attributes)[::-1]
                        del point.attributes[:]
                        point.attributes.extend(attributes)
                post(server, request)
            case _:
                body = json.dumps(json_format.MessageToDict(request, use_integers_for_enums=True)).encode()
                reply = httpx.post(f"{base(server)}/v1/metrics", content=body, headers=JSON, timeout=60)
                assert (reply.status_code, reply.content) == (200, b"{}")
    for each in requests:
        export(server.otlp, each)
    with server.connect() as db, db.snapshot() as snap:
        rows = snap.rollup("metric_histograms_5m", by=["service", "metric", "attributes"])
        found = {json.loads(row["attributes"])["http.route"]: row for row in rows if row["metric"] == "latency"}
        assert set(found) == set(recorded)
        for route, values in recorded.items():
            row = found[route]
            assert row["count"] == row["distribution"].count == len(values)
            assert math.isclose(row["total"], sum(values))
            assert (row["least"], row["most"]) == (min(values), max(values))
            assert min(scales) <= row["scale"] <= max(scales)
            accuracy = (1 + accuracy_of(min(row["scale"], SCALE))) * (1 + accuracy_of(SCALE)) - 1
            for q in (0, 0.25, 0.5, 0.9, 0.95, 0.99, 1):
                exact = nearest(values, q)
                assert abs(row["distribution"].quantile(q) - exact) <= accuracy * exact * (1 + 1e-9)
            assert row["p95"] == row["distribution"].quantile(0.95)
        (sums,) = snap.rollup("metric_sums_5m", by=["metric"], where=kivi.col("attributes").contains("http.route"))
        assert (sums["metric"], sums["whole"], sums["total"]) == ("calls", calls, float(calls))
    asked: dict[str, Any] = {"query": "histogram_quantile(0.5, sum by (le) (metric_histograms_5m_distribution_bucket))",
             "time": max(point.time_unix_nano for point in points) / 1e9 + 300}  # fmt: skip
    (answer,) = httpx.get(f"{base(server)}/api/v1/query", params=asked).json()["data"]["result"]
    exact = nearest([v for values in recorded.values() for v in values], 0.5)
    assert abs(float(answer["value"][1]) - exact) <= 0.15 * exact


def test_the_sdks_exporter(tmp_path: Path) -> None:
    """On a server that is told nothing of OpenTelemetry: each table is made by the first point of its kind."""
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server:
        exporter = OTLPMetricExporter(
            f"{base(server)}/v1/metrics", preferred_temporality=DELTA, preferred_aggregation=EXPONENTIAL
        )
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
        provider = sdk.MeterProvider([reader], Resource.create(PLACE), shutdown_on_exit=False)
        meter = provider.get_meter("tests")
        histogram, busy = meter.create_histogram("h"), meter.create_up_down_counter("busy")
        level, calls = meter.create_gauge("level"), meter.create_counter("weight")
        for turn in range(1, 4):
            for value in (0, 1, 2, 4):
                histogram.record(value * turn)
            busy.add(1)
            level.set(turn / 2)
            calls.add(0.5)
            assert provider.force_flush()
        provider.shutdown()
        with server.connect() as db, db.snapshot() as snap:
            assert sorted(db.tables()) == sorted(
                f"metric_{name}{end}" for name in ("histograms", "sums", "gauges") for end in ("", "_5m")
            )
            (row,) = snap.rollup("metric_histograms_5m", by=["metric"])
            assert (row["count"], row["total"], row["least"], row["most"]) == (12, 42.0, 0.0, 12.0)
            assert row["distribution"].fraction_below(0.5) == 0.25
            (sums,) = snap.rollup("metric_sums_5m", by=["metric"])
            assert (sums["whole"], sums["real"], sums["points"]) == (0, 1.5, 3)
            gauges = {row["metric"]: row for row in snap.rollup("metric_gauges_5m", by=["metric"])}
            assert gauges["level"]["last"] == 1.5 and gauges["level"]["least"] == 0.5
            assert gauges["busy"]["last"] == 3.0, "which is cumulative, whatever is set"


def test_explicit_buckets_and_what_is_refused(server: Server) -> None:
    meter = Meter(exponential=False)
    for value in (1, 7, 7, 80, 20_000):
        meter.latency.record(value, {"x": "explicit"})
    request = meter.request()
    for _ in range(2):
        assert not export(server.otlp, request).HasField("partial_success")
    with server.connect() as db, db.snapshot() as snap:
        rows = {row["le"]: row for row in snap.rollup("metric_buckets_5m", by=["le"])}
    assert {le: rows[le]["count"] for le in ("0.0", "5.0", "10.0", "100.0", "10000.0", "+Inf")} == {
        "0.0": 0, "5.0": 1, "10.0": 3, "100.0": 4, "10000.0": 4, "+Inf": 5,
    }  # fmt: skip
    assert sum(row["total"] for row in rows.values()) == 20_095
    cumulative = Meter(temporality={})
    cumulative.latency.record(3)
    cumulative.calls.add(1)
    delta = Meter()
    delta.calls.add(1)
    assert not export(server.otlp, delta.request()).HasField("partial_success")
    before = Counter(row["metric"] for row in server.read("metric_sums"))
    said = post(server, cumulative.request())
    assert said.rejected_data_points == 2 and "TEMPORALITY_PREFERENCE=delta" in said.error_message
    assert Counter(row["metric"] for row in server.read("metric_sums")) == before
    broken = Meter()
    broken.latency.record(3)
    request = broken.request()
    point = request.resource_metrics[0].scope_metrics[0].metrics[0].exponential_histogram.data_points[0]
    point.count += 1
    said = export(server.otlp, request).partial_success
    assert said.rejected_data_points == 1 and "add up" in said.error_message
    for body, headers in ((b"\xff\xff", PROTOBUF), (b'{"resourceMetrics": 7}', JSON)):
        assert httpx.post(f"{base(server)}/v1/metrics", content=body, headers=headers).status_code == 400


def test_a_table_that_does_not_fit_and_a_token_for_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is for it is refused, point by point, and the rest is stored; the server starts, too."""
    tokens = tmp_path / "tokens"
    tokens.write_text("root admin\nsend writer tables=metric_*\nsums writer tables=metric_sums*\nread reader\n"
                      "acme writer rows=service:shop\n")  # fmt: skip
    how = ("--http", "localhost:0", "--token-file", str(tokens))
    meter = Meter()
    for value in range(50):
        meter.latency.record(value)
    meter.calls.add(7)
    request = meter.request()

    def sent(server: ServerProcess, token: str) -> Any:
        return post(server, request, headers={**PROTOBUF, "Authorization": f"Bearer {token}"})

    with Server(tmp_path / "data", *how) as server:
        with server.connect(access_token="root") as db:
            db.create_event_table("metric_histograms", event_time="at", columns={"at": "timestamp"})
        for token in ("read", "acme"):  # a tenant's, too: it would write rows of all services
            with pytest.raises(grpc.RpcError, match="PERMISSION_DENIED"):
                export(server.otlp, request, token)
            refused = httpx.post(f"{base(server)}/v1/metrics", content=request.SerializeToString(),
                                 headers={**PROTOBUF, "Authorization": f"Bearer {token}"})  # fmt: skip
            assert refused.status_code == 403
        said = sent(server, "sums")
        assert said.rejected_data_points == 1 and "not for table 'metric_histograms'" in said.error_message
        said = sent(server, "send")
        assert said.rejected_data_points == 1 and "'metric_histograms'" in said.error_message
        page = httpx.get(f"{base(server)}/metrics", headers={"Authorization": "Bearer root"}).text
        assert 'kivi_otlp_tables_unfit{kind="metric_histograms"} 1.0' in page
        assert 'kivi_otlp_points_total{outcome="repeated"} 1.0' in page
        code, problems = status(server, capsys)
        assert code == 1 and "'metric_histograms'" in problems
        assert "is no event table whose event time is 'ts': drop it" in problems
        with server.connect(access_token="root") as db:
            db.create_table(LLM_KIND.name, key={"id": "int64"}, columns={"n": "int64"})
        assert status(server, capsys)[1] == problems  # nothing was sent for that one, and nothing refused
        with server.connect(access_token="root") as db:
            db.drop(LLM_KIND.name)
        server.restart()
        assert status(server, capsys)[1] == ""  # nothing was refused yet
        assert sent(server, "send").rejected_data_points == 1
        with server.connect(access_token="root") as db:
            db.drop("metric_histograms")
            columns = {"ts": "timestamp", "namespace": "int64"}
            db.create_event_table("metric_histograms", event_time="ts", columns=columns)
        assert "it should have a column 'namespace' of type string, and has int64" in status(server, capsys)[1]
        with server.connect(access_token="root") as db:
            db.drop("metric_histograms")
        assert status(server, capsys)[1] == ""
        assert sent(server, "send").rejected_data_points == 0
        (row,) = server.read("metric_sums_5m", access_token="root")
        assert (row["whole"], row["points"]) == (7, 1)
        (row,) = server.read("metric_histograms_5m", access_token="root")
        assert row["count"] == row["distribution"].count == 50


def test_of_another_name_the_table_of_spans_is_not_taken_for_one_that_has_the_usual(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    recorder.span("/r")
    with Server(tmp_path / "data", "--otlp-table", "mine") as server:
        with server.connect(access_token="root") as db:
            for name in ("mine_service_5m", "mine_endpoint_5m", "mine"):
                db.drop(name)
            for name in ("mine", INVOCATIONS_KIND.name):  # the second one is somebody's, and nothing comes for it
                db.create_event_table(name, event_time="at", columns={"at": "timestamp"})
        assert status(server, capsys) == (0, "")
        said = export_spans(server.otlp, recorder.memory.get_finished_spans())
        assert said.partial_success.rejected_spans == 1 and "'mine'" in said.partial_success.error_message
        code, problems = status(server, capsys)
        assert code == 1 and "the table of --otlp-table has other columns" in problems and "'" not in problems


def status(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of ``kivi status``, and the problems that it tells."""
    code = main(["--endpoint", server.endpoint, "--token", "root", "-o", "json", "status"])
    return code, json.loads(capsys.readouterr().out).get("problems", "")


def histogram_of(values: Sequence[float], scale: int) -> pb.ExportMetricsServiceRequest:
    """As OpenTelemetry defines it: bucket i holds (g**i, g**(i + 1)]."""
    request = pb.ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="m")
    metric.exponential_histogram.aggregation_temporality = metrics_pb2.AGGREGATION_TEMPORALITY_DELTA
    point = metric.exponential_histogram.data_points.add(time_unix_nano=10**18, scale=scale, count=len(values))
    point.zero_count = sum(value == 0 for value in values)
    for buckets, sign in ((point.positive, 1), (point.negative, -1)):
        indexes = Counter(code(sign * v, scale) - bias_of(scale) - 2 for v in values if sign * v > 0)
        if indexes:
            buckets.offset = min(indexes)
            buckets.bucket_counts.extend(indexes[i] for i in range(min(indexes), max(indexes) + 1))
    return request


FEW = st.floats(0.5, 64)
VALUES = st.lists(st.one_of(st.just(0.0), FEW, st.floats(-64, -0.5)), min_size=1, max_size=40)


@given(VALUES, st.integers(-2, 9))
def test_finer_histograms_are_scaled_down_exactly_and_coarser_ones_keep_their_scale(
    values: list[float], scale: int
) -> None:
    points: Points = points_of(histogram_of(values, scale))[0]
    assert not points.rejected and points.items == 1
    given_, counts = np.array(points.columns["value"]), points.columns["n"]
    if scale >= SCALE:
        found = dict(zip(codes_of(given_, SCALE).tolist(), counts, strict=True))
        assert found == Counter(codes_of(np.array(values), SCALE).tolist())
    else:
        listed = np.repeat(given_, counts)
        for value, exact in zip(listed.tolist(), sorted(values), strict=True):
            assert abs(value - exact) <= accuracy_of(scale) * abs(exact) * (1 + 1e-9)
