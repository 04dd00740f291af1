"""Prometheus' query API, compared with a real Prometheus that has the same samples."""

from __future__ import annotations

import math
import random
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import kivi
from tests.otlp import free_port
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

BEGIN_S = 1_767_225_600  # 2026-01-01
SLOT_S, SLOTS = 300, 48
EVENTS: list[dict[str, Any]] = [
    {
        "endpoint": random.Random(i).choice(["/a", "/b", "/c"]),
        "host": f"h{(i * 7) % 3}",
        "ts": (BEGIN_S + (i * i * 31) % (SLOT_S * SLOTS)) * 1_000_000,
        "us": (i * 7919) % 500 - 40 * (i % 97 == 0),
    }
    for i in range(600)
]


def base(server: ServerProcess) -> str:
    return next(line for line in server.output if line.startswith("http on ")).split()[-1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("prom") / "data", "--http", "localhost:0") as running:
        with running.connect() as db:
            columns = {"endpoint": "string", "host": "string", "ts": "timestamp", "us": "int64"}
            db.create_event_table("calls", event_time="ts", columns=columns)
            db.create_aggregate(
                "calls_5m",
                source="calls",
                group_by=["endpoint", "host", kivi.time_slot("ts", "5m", name="slot")],
                measures={
                    "n": kivi.count(),
                    "total": kivi.sum("us"),
                    "most": kivi.max("us"),
                    "latency": kivi.quantiles("us"),
                },
                derived={"mean": "total / n"},
            )
            db.append("calls", EVENTS)
        yield running


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base(server) + "/api/v1", timeout=60) as client:
        yield client


def samples(bounds: Sequence[str]) -> str:
    """What a scrape at the end of every slot would have seen, as OpenMetrics; ``bounds`` are those of the histogram."""
    by: dict[str, dict[tuple[str, ...], list[int]]] = {name: {} for name in ("n", "total", "latency_bucket")}
    for event in EVENTS:
        key, slot = (event["endpoint"], event["host"]), (event["ts"] // 1_000_000 - BEGIN_S) // SLOT_S
        for name, value in (("n", 1), ("total", event["us"])):
            by[name].setdefault(key, [0] * SLOTS)[slot] += value
        for bound in bounds:
            by["latency_bucket"].setdefault((*key, bound), [0] * SLOTS)[slot] += event["us"] <= float(bound)
    seen: dict[tuple[str, str], list[int]] = defaultdict(list)
    for event in EVENTS:
        seen[event["endpoint"], event["host"]].append((event["ts"] // 1_000_000 - BEGIN_S) // SLOT_S)
    lines = []
    for name, series in by.items():
        lines.append(f"# TYPE calls_5m_{name} gauge")
        for labelled, slots in series.items():
            endpoint, host, *bounded = labelled
            total, first = 0, min(seen[endpoint, host])
            labels = f'endpoint="{endpoint}",host="{host}"' + "".join(f',le="{each}"' for each in bounded)
            lines.append(f"calls_5m_{name}{{{labels}}} 0 {BEGIN_S + first * SLOT_S}")
            for slot, value in enumerate(slots):
                total += value
                if slot >= first:
                    at = BEGIN_S + (slot + 1) * SLOT_S
                    lines.append(f"calls_5m_{name}{{{labels}}} {total} {at}")
    return "\n".join([*lines, "# EOF\n"])


@pytest.fixture
def real(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[[str], str], api: httpx.Client
) -> Iterator[httpx.Client]:
    prometheus, promtool = require("prometheus"), require("promtool")
    home = tmp_path_factory.mktemp("prometheus")
    (home / "samples").write_text(samples(api.get("/label/le/values").json()["data"]))
    (home / "prometheus.yml").write_text("")
    command = [promtool, "tsdb", "create-blocks-from", "openmetrics", str(home / "samples"), str(home / "data")]
    subprocess.run(command, check=True, capture_output=True)
    port = free_port()
    process = subprocess.Popen(
        [prometheus, f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data",
         "--storage.tsdb.retention.time=100y", f"--web.listen-address=localhost:{port}", "--log.level=error"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://localhost:{port}/api/v1", timeout=60) as client:

            def ready() -> bool:
                try:
                    return client.get("/status/buildinfo").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(ready)
            yield client
    finally:
        process.kill()
        process.wait()


class Questions:
    """Made-up PromQL of the subset."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def _pick(self, *each: str) -> str:
        return self._random.choice(each)

    def selector(self) -> str:
        matchers = self._pick(
            "",
            '{endpoint="/a"}',
            '{host!="h1"}',
            '{endpoint=~"/a|/b"}',
            '{host!~"h[01]"}',
            '{nope=""}',
            '{host="x"}',
        )
        return self._pick("calls_5m_n", "calls_5m_total") + matchers

    def ranged(self) -> str:
        function = self._pick(
            "rate", "rate", "increase", "increase", "delta", "irate", "idelta", "resets", "changes", "sum_over_time",
            "avg_over_time", "count_over_time", "min_over_time", "max_over_time", "last_over_time", "present_over_time",
        )  # fmt: skip
        width = self._pick("5m", "10m", "17m", "1h", "4m")
        return f"{function}({self.selector()}[{width}]{self._pick('', '', ' offset 10m', ' offset 7m')})"

    def histogram(self) -> str:
        by = self._pick("le", "le", "le, endpoint", "le, host, endpoint", "endpoint")
        matchers = self._pick("", '{endpoint="/a"}', '{le!="+Inf"}')
        function = self._pick("rate", "increase", "delta")
        inner = f"sum by ({by}) ({function}(calls_5m_latency_bucket{matchers}[{self._pick('5m', '17m', '1h')}]))"
        if self._random.random() < 0.2:
            inner = f"calls_5m_latency_bucket{matchers}"
        return f"histogram_quantile({self._pick('0.5', '0.9', '0.99', '0', '1', '1.5')}, {inner})"

    def vector(self, depth: int = 0) -> str:
        if depth > 2:
            return self._pick(self.selector(), self.ranged())
        match self._random.randrange(10):
            case 9:
                return self.histogram()
            case 0:
                return self.selector()
            case 1 | 2:
                return self.ranged()
            case 3 | 4:
                by = self._pick(
                    "", " by (endpoint)", " by (host)", " without (host)", " by (endpoint, host)", " by (nope)"
                )
                op = self._pick("sum", "avg", "min", "max", "count", "group", "stddev", "stdvar", "quantile", "sum")
                inner = self.vector(depth + 1)
                return f"{op}{by} ({'0.3, ' if op == 'quantile' else ''}{inner})"
            case 5:
                function = self._pick("abs", "ceil", "floor", "sqrt", "sgn", "ln", "exp", "round")
                return f"{function}({self.vector(depth + 1)})"
            case 6:
                op = self._pick("+", "-", "*", "/", "%", "^", ">", "<= bool", "== bool", "!=", ">=", "<")
                sides = [f"({self.vector(depth + 1)})", self._pick("3", "0.5", "time()", "scalar(sum(calls_5m_n))")]
                self._random.shuffle(sides)
                return f"{sides[0]} {op} {sides[1]}"
            case 7:
                left, right = self.ranged(), self.ranged()
                op = self._pick("+", "-", "*", "/", "> bool", "and", "or", "unless", "<")
                return f"sum by (endpoint) ({left}) {op}{self._pick('', ' on (endpoint)')} sum by (endpoint) ({right})"
            case _:
                return f"clamp_max({self.vector(depth + 1)}, 40)"


def asked(client: httpx.Client, path: str, **parameters: Any) -> Any:
    reply = client.post(path, data=parameters)
    said = reply.json()
    if said["status"] == "error":
        return reply.status_code
    if isinstance(said["data"], dict) and said["data"].get("resultType") == "scalar":
        return said["data"]["result"]
    rows = said["data"]["result"]
    return {tuple(sorted(row["metric"].items())): row.get("values") or [row["value"]] for row in rows}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        keys = isinstance(found, dict) and found.keys() == expected.keys()
        return keys and all(same(found[key], expected[key]) for key in found)
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(same, found, expected))
    if not isinstance(found, (int, float, str)):
        return False
    left, right = float(found), float(expected)
    return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-9) or (left != left and right != right)


@pytest.mark.prometheus
def test_answers_are_those_of_a_real_prometheus(api: httpx.Client, real: httpx.Client) -> None:
    questions, random_, compared = Questions(11), random.Random(12), 0
    for _ in range(250):
        text = questions.vector()
        at = BEGIN_S + random_.randrange(-600, SLOTS * SLOT_S)
        if random_.random() < 0.5:
            at -= at % SLOT_S
        path, parameters = "/query", {"query": text, "time": at}
        if random_.random() < 0.5:
            path = "/query_range"
            parameters = {"query": text, "start": at, "end": min(at + 4_000, BEGIN_S + SLOTS * SLOT_S), "step": "4m10s"}
        expected = asked(real, path, **parameters)
        found = asked(api, path, **parameters)
        assert same(found, expected), f"{parameters}\n{found}\n{expected}"
        compared += bool(expected) and isinstance(expected, dict)
    assert compared > 150


@pytest.mark.prometheus
def test_promtool_asks_it(server: ServerProcess, require: Callable[[str], str]) -> None:
    at = BEGIN_S + SLOTS * SLOT_S
    command = [require("promtool"), "query", "instant", f"--time={at}", base(server), "sum(increase(calls_5m_n[5m]))"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    last = sum(event["ts"] >= (at - SLOT_S) * 1_000_000 for event in EVENTS)
    assert said.startswith(f"{{}} => {last} @"), said


def test_grafanas_sequence(api: httpx.Client, server: ServerProcess) -> None:
    """What its data source asks: version, metadata, labels for variables, series, a panel, an alert rule."""
    end = BEGIN_S + SLOTS * SLOT_S

    def data(path: str, **parameters: Any) -> Any:
        said = api.get(path, params=parameters).json()
        assert said["status"] == "success", said
        return said["data"]

    assert data("/status/buildinfo")["version"]
    assert data("/metadata")["calls_5m_n"][0]["type"] == "counter"
    assert set(data("/label/__name__/values")) == {"calls_5m_n", "calls_5m_total", "calls_5m_latency_bucket"}
    assert data("/labels", **{"match[]": "calls_5m_n"}) == ["__name__", "endpoint", "host"]
    assert data("/label/endpoint/values", start=BEGIN_S, end=end) == ["/a", "/b", "/c"]
    series = data("/series", **{"match[]": ['calls_5m_n{endpoint="/a"}', 'calls_5m_total{endpoint="/a"}']})
    assert {(each["__name__"], each["host"]) for each in series} == {
        (name, f"h{i}") for name in ("calls_5m_n", "calls_5m_total") for i in range(3)
    }
    rates = "sum by (endpoint) (rate(calls_5m_n[5m]))"
    panel = data("/query_range", query=rates, start=BEGIN_S + SLOT_S, end=end, step="300")
    assert len(panel["result"]) == 3
    with server.connect() as db, db.snapshot() as snap:
        rows = list(snap.rollup("calls_5m", by=["endpoint"], step="5m", measures=["n"]))
    expected = {(row["endpoint"], int(row["slot"].timestamp()) + SLOT_S): row["n"] / SLOT_S for row in rows}
    for line in panel["result"]:
        for at, value in line["values"]:
            key = line["metric"]["endpoint"], int(at)
            assert float(value) == pytest.approx(expected.get(key, 0.0), abs=1e-12)
    assert data("/query", query="vector(1) + time() > bool 0", time=end)["resultType"] == "vector"
    p90 = "histogram_quantile(0.9, sum by (le) (increase(calls_5m_latency_bucket[4h])))"
    ((_, found),) = [each["value"] for each in data("/query", query=p90, time=end)["result"]]
    exact = sorted(event["us"] for event in EVENTS)[int(0.9 * len(EVENTS)) - 1]
    assert float(found) == pytest.approx(exact, rel=0.012)  # twice the accuracy: somewhere in the value's bucket


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("sum(", 400),
        ("calls_5m_n[5m]", 422),
        ("max_over_time(rate(calls_5m_n[5m])[1h:5m])", 422),
        ("calls_5m_n @ 17", 422),
        ("histogram_sum(calls_5m_n)", 422),
        ('label_replace(calls_5m_n, "a", "b", "c", "d")', 422),
        ("calls_5m_n * on (endpoint) group_left sum by (endpoint) (calls_5m_n)", 422),
        ("calls_5m_n + on (endpoint) calls_5m_total", 400),
        ('calls_5m_n{host=~"("}', 400),
        ("calls_5m_n or_matchers", 400),
        ("", 400),
        ("sum(" * 5_000, 400),
    ],
)
def test_what_is_not_supported_is_named(api: httpx.Client, query: str, status: int) -> None:
    reply = api.get("/query", params={"query": query[:20_000]})
    assert reply.status_code == status and reply.json()["status"] == "error" and reply.json()["error"]


def test_tokens_hide_tables(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("root admin\ndash reader tables=a*\n")
    with ServerProcess(tmp_path / "data", "--http", "localhost:0", "--token-file", str(tokens)) as server:
        with server.connect(access_token="root") as db:
            for name in ("a", "b"):
                db.create_event_table(name, event_time="ts", columns={"ts": "timestamp"})
                slots = kivi.time_slot("ts", "5m", name="slot")
                db.create_aggregate(f"{name}_5m", source=name, group_by=[slots], measures={"n": kivi.count()})
                db.append(name, [{"ts": BEGIN_S * 1_000_000}])
        with httpx.Client(base_url=base(server) + "/api/v1", timeout=60) as api:
            assert api.get("/labels").status_code == 401
            api.headers["Authorization"] = "Bearer dash"
            assert api.get("/label/__name__/values").json()["data"] == ["a_5m_n"]
            at = BEGIN_S + 300
            assert len(asked(api, "/query", query='{__name__=~".*_n"}', time=at)) == 1
            assert asked(api, "/query", query="b_5m_n", time=at) == {}
