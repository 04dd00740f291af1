"""The demonstration's web service, traced by OpenTelemetry's SDK: every call it answers is an invocation, once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import httpx

from apm_demo.children import Child
from apm_demo.endpoints import ENDPOINTS
from tests.otlp import Server

CALLS = 12


def test_calls_of_the_web_service_are_invocations_though_the_server_is_killed(tmp_path: Path) -> None:
    (tmp_path / "landing").mkdir()
    with Server(tmp_path / "data") as server:
        service = Child(
            "service", tmp_path / "service.log", "apm_demo.service",
            "--land", str(tmp_path / "landing"), "--otlp", f"http://{server.otlp}",
        )  # fmt: skip
        try:
            ports: dict[str, int] = json.loads(service.wait_for("ready", 60))
            answered: Counter[tuple[str, ...]] = Counter()
            with httpx.Client(trust_env=False, timeout=60) as client:
                for turn in range(CALLS):
                    if turn == CALLS // 2:
                        server.restart()
                    for e in ENDPOINTS:
                        url = f"http://127.0.0.1:{ports[e.server]}{e.path}"
                        sent = {} if turn % 2 else {"traceparent": f"00-{turn + 1:032x}-{e.endpoint_id:016x}-01"}
                        client.request(e.method, url, params={"q": "python"}, headers=sent).raise_for_status()
                        answered[e.customer, e.application, e.server, e.path, e.method] += 1
                assert client.post(f"http://127.0.0.1:{ports['shop-1']}/cart").status_code == 405  # no endpoint
            service.terminate()
            assert int(service.wait_for("landed", 60)) == answered.total() == CALLS * len(ENDPOINTS)
        finally:
            service.stop()
        events = server.read("invocations")
        calls = server.read("invocations_endpoint_5m")
    place = ("namespace", "service", "instance", "route", "method")
    assert Counter(tuple(row[name] for name in place) for row in events) == answered
    assert len({(row["trace_id"], row["span_id"]) for row in events}) == len(events)
    assert {row["status_code"] for row in events} == {200} and all(row["duration_us"] > 0 for row in events)
    assert sum(row["calls"] for row in calls) == len(events)
    assert sum(row["sum_duration_us"] for row in calls) == sum(row["duration_us"] for row in events)
    assert max(row["slowest_us"] for row in calls) == max(row["duration_us"] for row in events)
    # The service measured the same calls by itself, inside of what the spans measure, and names the same traces.
    landed = [json.loads(line) for file in (tmp_path / "landing").iterdir() for line in file.read_text().splitlines()]
    assert sum(event["duration_us"] for event in landed) <= sum(row["duration_us"] for row in events)
    traces = Counter(event["trace_id"] for event in landed)
    assert traces == Counter(row["trace_id"].hex() for row in events)
    assert all(traces[f"{turn + 1:032x}"] == len(ENDPOINTS) for turn in range(0, CALLS, 2))
