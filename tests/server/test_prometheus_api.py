"""Prometheus' query API, compared with a real Prometheus that has the same samples."""

from __future__ import annotations

import datetime as dt
import math
import random
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from kivi_server.http import prom_ranges, prom_series
from kivi_server.http.prom_series import Matching, Reading, Series, Unanswerable, counters
from kivi_server.http.promql import Evaluation, parsed

import kivi
from kivi.arrow.columns import rows_from_batch
from tests.conftest import require
from tests.ports import Port
from tests.seeds import AT_NIGHT
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
            for slot, value in enumerate([*slots, 0, 0]):  # for what is asked of a time behind the last
                total += value
                if slot >= first:
                    at = BEGIN_S + (slot + 1) * SLOT_S
                    lines.append(f"calls_5m_{name}{{{labels}}} {total} {at}")
    return "\n".join([*lines, "# EOF\n"])


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, api: httpx.Client) -> Iterator[httpx.Client]:
    prometheus, promtool = require("prometheus"), require("promtool")
    home = tmp_path_factory.mktemp("prometheus")
    (home / "samples").write_text(samples(api.get("/label/le/values").json()["data"]))
    (home / "prometheus.yml").write_text("")
    command = [promtool, "tsdb", "create-blocks-from", "openmetrics", str(home / "samples"), str(home / "data")]
    subprocess.run(command, check=True, capture_output=True)
    port = Port()
    process = subprocess.Popen(
        [prometheus, f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data",
         "--storage.tsdb.retention.time=100y", f"--web.listen-address=localhost:{port.number}", "--log.level=error"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://localhost:{port.number}/api/v1", timeout=60) as client:

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
        if self._random.random() < 0.1:
            return self._pick(
                '{__name__=~"calls_5m_(n|total)", host=~"h1"}',
                '{__name__=~"calls_5m_(n|total)", host=~".*"}',
                '{__name__="calls_5m_n"}',
                '{__name__=~"5m_n|calls_5m_n|calls"}',
                '{__name__!~".*(bucket|total)", endpoint=~".+"}',
                '{__name__!="calls_5m_n", host="h1", __name__!~".*bucket"}',
            )
        matchers = self._pick(
            "",
            "",
            '{endpoint="/a"}',
            '{host!="h1"}',
            '{endpoint=~"/a|/b"}',
            '{endpoint=~"a"}',
            '{host!~"h[01]"}',
            '{host!~"1"}',
            '{nope=""}',
            '{nope=~"x*"}',
            '{nope!~".+", host!=""}',
            '{nope!=""}',
            '{host!~"", host!~"h1|"}',
            '{host="x"}',
            '{host=~"(?i)H1"}',
            '{endpoint=~"/[[:alpha:]]"}',
            '{host=~"h1\\\\z"}',
            '{host=~"h|h1"}',
        )
        return self._pick("calls_5m_n", "calls_5m_total") + matchers

    def when(self) -> str:
        return self._pick(*[""] * 6, " offset 10m", " offset 7m", " offset -7m", f" @ {BEGIN_S + 7_000}", " @ start()",
                          " @ end() offset 11m")  # fmt: skip

    def ranged(self, depth: int = 3) -> str:
        function = self._pick(
            "rate", "rate", "increase", "increase", "delta", "irate", "idelta", "resets", "changes", "sum_over_time",
            "avg_over_time", "count_over_time", "min_over_time", "max_over_time", "last_over_time", "present_over_time",
            "stddev_over_time", "stdvar_over_time", "absent_over_time", "quantile_over_time",
        )  # fmt: skip
        if self._random.random() < 0.2:
            steps = self._pick("30m:7m", "1h:", "1h:4m", "17m:5m", "1m:5m")
            of = f"({self.vector(depth + 1)})[{steps}]{self.when()}"
        else:
            of = f"{self.selector()}[{self._pick('5m', '10m', '17m', '1h', '4m')}]{self.when()}"
        return f"{function}({'0.4, ' if function.startswith('quantile') else ''}{of})"

    def histogram(self) -> str:
        by = self._pick("le", "le", "le, endpoint", "le, host, endpoint", "endpoint")
        matchers = self._pick("", '{endpoint="/a"}', '{host="h2", endpoint="/c"}', '{le!="+Inf"}')
        function = self._pick("rate", "increase", "delta")
        inner = f"sum by ({by}) ({function}(calls_5m_latency_bucket{matchers}[{self._pick('5m', '17m', '1h')}]))"
        if self._random.random() < 0.2:
            inner = f"calls_5m_latency_bucket{matchers}"
        elif self._random.random() < 0.3:
            one, other = (f"increase(calls_5m_latency_bucket{by}[1h])" for by in ('{host="h1"}', '{endpoint="/b"}'))
            inner = self._pick(f"sum by (le) ({one}) + sum by (le) ({other})", f"sum by (le) ({one} or {other})",
                               f"sum by (le) ({one}) - on (le) group_right sum by (le, endpoint) ({other})",
                               f"{one} + ignoring (host, endpoint) group_left sum by (le) ({other})")  # fmt: skip
        if self._random.random() < 0.1:
            inner = f"({inner}) / {self._pick('0', 'scalar(calls_5m_n % 2)')}"
        q = self._pick("0", "0", "0.5", "0.9", "0.99", "0.001", "1", "1.5", "-1", "NaN", "scalar(calls_5m_n) / 0")
        return f"histogram_quantile({q}, {inner})"

    def combined(self, left: str, right: str) -> str:
        """Of vectors, with all ways in which they may be matched."""
        op = self._pick("+", "-", "*", "/", "%", "^", ">", "<", "==", "!=", ">=", "<= bool", "== bool", "and", "or",
                        "unless")  # fmt: skip
        on = self._pick("", " on (endpoint, host)", " on (host)", " ignoring (host)", " ignoring (nope)", " on ()",
                        " ignoring ()", " on (__name__, host)", " ignoring (endpoint, host)")  # fmt: skip
        if on and op not in ("and", "or", "unless") and self._random.random() < 0.5:
            on += self._pick(" group_left", " group_right") + self._pick(
                "", " ()", " (nope)", " (endpoint)", " (__name__)"
            )
        return f"({left}) {op}{on} ({right})"

    def vector(self, depth: int = 0) -> str:
        if depth > 2:
            return self._pick(self.selector(), self.ranged())
        match self._random.randrange(16):
            case 0 | 1:
                return self.selector() + self.when()
            case 2 | 3:
                return self.ranged(depth)
            case 4 | 5:
                by = self._pick("", " by (endpoint)", " by (host)", " without (host)", " by (endpoint, host)",
                                " by (nope)", " by ()", " without ()", " by (__name__)",
                                " without (nope, endpoint)")  # fmt: skip
                op = self._pick("sum", "avg", "min", "max", "count", "group", "stddev", "stdvar", "quantile", "sum",
                                "count_values", "ranked")  # fmt: skip
                inner = self.vector(depth + 1)
                if op == "ranked":  # which of equal ones it is is not said: of all of them, something that is
                    best = self._pick("topk", "bottomk")
                    k = self._pick("2", "1", "0", "-1", "scalar(calls_5m_n)", "1.9", "20")
                    return f"{self._pick('sum', 'max', 'count')}{by} ({best}{by} ({k}, {inner}))"
                parameter = {"quantile": self._pick("0.3, ", "1, ", "2, "), "count_values": '"value", '}.get(op, "")
                return f"{op}{by} ({parameter}{inner})"
            case 6:
                function = self._pick("abs", "ceil", "floor", "sqrt", "sgn", "ln", "exp", "round", "log2", "log10",
                                      "sort", "sort_desc", "absent", "timestamp", "-", "+")  # fmt: skip
                return f"{function}({self.vector(depth + 1)})"
            case 7:
                function = self._pick("clamp(#, 5, 2)", "clamp(#, -3, 40)", "clamp_max(#, 40)", "clamp_min(#, 7)",
                                      "round(#, 7)", "round(#, 0.1)", "vector(scalar(#))",
                                      "abs(# atan2 2)")  # fmt: skip
                return function.replace("#", self.vector(depth + 1))
            case 8:
                function = self._pick(
                    'label_replace(#, "x", "$1-$2-${1}1$$", "host", "h(.)")',
                    'label_replace(#, "host", "$1", "endpoint", "/(a|b)?(.*)")',
                    'label_replace(#, "endpoint", "", "endpoint", "/a")',
                    'label_join(#, "x", "-", "host", "nope", "endpoint")',
                    'label_join(#, "host", "", "nope")',
                )
                return function.replace("#", self.vector(depth + 1))
            case 9:
                return self.histogram()
            case 10 | 11:
                op = self._pick("+", "-", "*", "/", "%", "^", ">", "<= bool", "== bool", "!=", ">=", "<")
                sides = [f"({self.vector(depth + 1)})", self._pick("3", "0.5", "time()", "scalar(sum(calls_5m_n))")]
                self._random.shuffle(sides)
                return f"{sides[0]} {op} {sides[1]}"
            case 12:
                grouped = [f"sum by (endpoint) ({self.ranged()})" for _ in range(2)]
                return self.combined(*grouped)
            case _:
                return self.combined(self.vector(depth + 1), self.vector(depth + 1))


def asked(client: httpx.Client, path: str, **parameters: Any) -> Any:
    reply = client.post(path, data=parameters)
    said = reply.json()
    if said["status"] == "error":
        return reply.status_code
    if isinstance(said["data"], dict) and said["data"].get("resultType") == "scalar":
        return said["data"]["result"]
    rows = said["data"]["result"]
    assert len({tuple(sorted(row["metric"].items())) for row in rows}) == len(rows), "series with equal labels"
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


@pytest.mark.story
@pytest.mark.prometheus
@pytest.mark.hypothesis
def test_answers_are_those_of_a_real_prometheus(api: httpx.Client, real: httpx.Client) -> None:
    questions, random_, compared, count = Questions(11), random.Random(12), 0, 4_000 if AT_NIGHT else 160
    for _ in range(count):
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
        assert found == expected if isinstance(expected, int) else same(found, expected), (
            f"{parameters}\n{found}\n{expected}"
        )
        compared += bool(expected) and isinstance(expected, dict)
    assert compared > count * 3 // 8


EDGES = """
sum_over_time(calls_5m_n[0])
count_over_time(calls_5m_n[20m:0])
max_over_time(calls_5m_n[0:5m])
calls_5m_n > on () calls_5m_total
calls_5m_total > on () calls_5m_n
calls_5m_n == on () max(calls_5m_n)
calls_5m_n + on () sum(calls_5m_n)
calls_5m_n + on () group_left () sum(calls_5m_n)
sum by (host) (calls_5m_n) < on (host) group_right (host) calls_5m_n * 3
calls_5m_n * on (host, endpoint) group_left (__name__) calls_5m_total
calls_5m_n == bool on (host, endpoint) group_left (__name__) calls_5m_total
calls_5m_n + on (host) group_left (endpoint) sum by (host) (calls_5m_n)
calls_5m_n < on (__name__, host, endpoint) calls_5m_n + 1
calls_5m_n and on () calls_5m_total > 1000
calls_5m_n or on () vector(1)
vector(1) or ignoring () calls_5m_n
calls_5m_n unless on () vector(1)
calls_5m_n{host=~"a)|(b"}
nope{host!~"a)|(b"}
nope{host=~"("}
nope{host=~"a{2000}"}
label_replace(calls_5m_n, "x", "a\\\\1$1b$x", "host", "h(.)")
label_replace(calls_5m_n, "endpoint", "", "endpoint", "/a")
label_replace(calls_5m_n, "host", "", "host", ".*")
label_replace(calls_5m_n, "1x", "", "endpoint", "/a")
label_join(calls_5m_n, "__name__", "_", "host", "endpoint")
count_values without (host) ("endpoint", calls_5m_n)
count_values("v", calls_5m_total / 7e9)
count_values("v", calls_5m_total * 7e30)
count_values("bad-", calls_5m_n)
histogram_quantile(0, calls_5m_latency_bucket{endpoint="/a"})
histogram_quantile(0, sum by (le) (rate(calls_5m_latency_bucket{host="h1"}[10m])))
histogram_quantile(scalar(calls_5m_n) / 0, sum by (le) (rate(calls_5m_latency_bucket[10m])))
histogram_quantile(0.4, {__name__=~"calls.*"})
histogram_quantile(0.75, sum by (le) ({host="h1", le=~".+"}) + sum by (le) (calls_5m_latency_bucket{host="h2"}))
histogram_quantile(0.5, sum by (le) (calls_5m_latency_bucket{host="h1"} or calls_5m_latency_bucket{host="h2"}))
histogram_quantile(0.9, {le!="", endpoint="/a"} - ignoring (endpoint) calls_5m_latency_bucket{endpoint="/b"})
histogram_quantile(0.4, label_replace(calls_5m_latency_bucket, "__name__", "b$1", "host", "h([01])"))
histogram_quantile(0.4, sqrt(sum by (le) (delta(calls_5m_latency_bucket[1h])) - 20))
quantile(0.3, calls_5m_n / 0 * 0 or calls_5m_n)
quantile(0.3, sqrt(calls_5m_n - 20))
topk(NaN, calls_5m_n)
bottomk(+Inf, calls_5m_n)
clamp(calls_5m_n, 3, NaN)
clamp(calls_5m_n, NaN, -Inf)
clamp_min(sqrt(calls_5m_n - 20), +Inf)
clamp_max(sqrt(calls_5m_n - 20), -Inf)
clamp_max(calls_5m_n, NaN)
absent((calls_5m_n{host="x", endpoint=~"a"}))
absent_over_time(calls_5m_n{host="x"}[5m])
timestamp((calls_5m_n offset 3m))
rate((calls_5m_n)[1m:7m])
sum_over_time(max(calls_5m_total / (calls_5m_n - 20))[1h:5m])
avg_over_time((calls_5m_total / (calls_5m_n > 20 or calls_5m_n - calls_5m_n))[1h:5m])
changes(sqrt(calls_5m_n - 20)[2h:5m])
stddev_over_time((calls_5m_n / 0)[30m:5m])
max_over_time((-sqrt(calls_5m_n - 20))[1h:5m] @ end())
calls_5m_n @ 0.5
calls_5m_n offset Inf
rate(calls_5m_n[NaN])
1 > 0
"""


@pytest.mark.prometheus
@pytest.mark.parametrize("query", EDGES.strip().split("\n"))
def test_edges_are_those_of_a_real_prometheus(api: httpx.Client, real: httpx.Client, query: str) -> None:
    at = BEGIN_S + 30 * SLOT_S + 7
    for path, when in ("/query", {"time": at}), ("/query_range", {"start": at, "end": at + 5_000, "step": 250}):
        found, expected = (asked(client, path, query=query, **when) for client in (api, real))
        assert found == expected if isinstance(expected, int) else same(found, expected), f"{found}\n{expected}"


@pytest.mark.prometheus
def test_promtool_asks_it(server: ServerProcess) -> None:
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

    # With "features" in it Grafana takes a source for Mimir's, and its list of alert rules asks for some.
    assert data("/status/buildinfo").keys() == {"version", "application"}
    assert data("/rules", type="alert") == {"groups": []} and data("/alerts") == {"alerts": []}
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
        ("histogram_sum(calls_5m_n)", 422),
        ('label_replace(calls_5m_n, "a", "${x}", "host", "(?P<x>.*)")', 422),
        ('label_replace(calls_5m_n, "a", "$1", "host", "a)|(b")', 422),
        ("limitk(1, calls_5m_n)", 422),
        ("calls_5m_n @ -3", 422),
        ("calls_5m_n offset 9000y", 422),
        ("calls_5m_n offset 99999999y", 422),
        ("calls_5m_n offset -99999999y", 422),
        ("rate(calls_5m_n[99999999y])", 422),
        ("max_over_time(vector(1)[1y:99999999y])", 422),
        ("max_over_time(vector(1)[99999999y:1m])", 422),
        ("max_over_time(vector(1)[9y:1ms])", 422),
        ("max_over_time(vector(1)[9y:1ms] @ 17)", 422),
        ("vector(1)[5m:1m]", 422),
        ('calls_5m_n{host="x" or host="y"}', 422),
        ("calls_5m_n or_matchers", 400),
        ('{__name__=~"calls_5m_(n|total)"} + 1', 422),
        ("", 400),
        ("sum(" * 5_000, 422),  # each of which ended the parser, and the server with it
        ("1" + "+1" * 9_000, 422),
        ("(" * 9_000 + "1" + ")" * 9_000, 422),
        ("a" + " Unless a" * 2_000, 422),
        ('#"\n1' + "+1" * 9_000 + '#"', 422),
        ("#\r1" + "+1" * 9_000, 422),
        ("'\\'' == \"'\" + 1" + "+1" * 9_000 + "'", 422),
        ("1" + "+1" * 900, 422),
        ("calls_5m_n[5m:", 400),
    ],
)
def test_what_is_not_supported_is_named(api: httpx.Client, query: str, status: int) -> None:
    reply = api.get("/query", params={"query": query[:20_000]})
    assert reply.status_code == status and reply.json()["status"] == "error" and reply.json()["error"]


def test_what_a_text_has_in_it_is_no_level(api: httpx.Client) -> None:
    hosts = "|".join(f"h-{i}" for i in range(3_000))
    for quote in "\"'`":
        assert asked(
            api, "/query", query=f"calls_5m_n{{host=~{quote}{hosts}|h1{quote}}} # {hosts}", time=BEGIN_S + 9_000
        )


def test_parameters_are_read_as_prometheus_reads_them(api: httpx.Client) -> None:
    at = str(BEGIN_S + 9_000)
    body = {"query": "1", "time": at}
    for reply in (
        api.get("/query", params=[("query", "1"), ("query", "2"), ("time", at)]),
        api.post("/query", params={"query": "2", "time": "5"}, data=body),
    ):
        assert reply.json()["data"]["result"] == [float(at), "1"]
    for steps, status in (11_000, 200), (11_001, 400):  # Grafana asks for 11,000 of a long time, and for its start
        range_ = {"query": "1", "start": "0", "end": str(steps), "step": "1"}
        assert api.get("/query_range", params=range_).status_code == status
    assert api.get("/query", params={"query": "calls_5m_n", "lookback_delta": "1m"}).status_code == 422
    for moment in "1_767_225_600", f" {at}", "0x10", "nan":
        assert api.get("/query", params={"query": "1", "time": moment}).status_code == 400
    names = {
        "/series": {"match[]": "calls_5m_n"},
        "/labels": {},
        "/label/host/values": {},
        "/label/__name__/values": {},
    }
    for path, matching in names.items():
        everything = api.get(path, params=matching).json()["data"]
        for limit, count in ("2", 2), ("0", len(everything)), ("99", len(everything)):
            assert api.get(path, params={**matching, "limit": limit}).json()["data"] == everything[:count]
        for wrong in {"limit": "-1"}, {"limit": "x"}:
            assert api.get(path, params={**matching, **wrong}).status_code == 400
    assert api.get("/labels", params={"start": "yesterday"}).status_code == 400


def test_a_selector_alone_is_checked_as_a_question_is(api: httpx.Client) -> None:
    for path in "/series", "/labels", "/label/host/values":
        assert api.get(path, params={"match[]": 'nope{host=~"a)|(b"}'}).status_code == 400
        assert api.get(path, params={"match[]": 'nope{host=~"a|b"}'}).json()["data"] == []
        for selector in "calls_5m_n offset 5m", "calls_5m_n @ 5", "calls_5m_n[5m]", "sum(calls_5m_n)":
            assert api.get(path, params={"match[]": selector}).status_code == 400


def test_what_tables_may_have(tmp_path: Path) -> None:
    """Decimals; a sum that does not fit, which is in nobody else's way; two tables whose metrics have one name."""
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server:
        with server.connect() as db:
            columns = {"host": "string", "zone": "string", "ts": "timestamp", "cost": "decimal(12,2)", "size": "int64"}
            db.create_event_table("e", event_time="ts", columns={**columns, "note": "string"})
            slot = kivi.time_slot("ts", "5m", name="slot")
            for name, by, measures in (
                ("a", "host", {"b_c": kivi.count(), "cost": kivi.sum("cost")}),
                ("a_b", "zone", {"c": kivi.sum("cost")}),
                ("wide", "host", {"size": kivi.sum("size"), "n": kivi.count()}),
            ):
                db.create_aggregate(name, source="e", group_by=[by, slot], measures=measures)
            db.create_aggregate("empty", source="e", group_by=["note", slot], measures={"n": kivi.count()})
            event = {"host": "h", "zone": "z", "ts": BEGIN_S * 1_000_000, "cost": Decimal("1.25"), "size": 2**62}
            db.append("e", [{**event, "note": ""}, {**event, "note": ""}])
            db.create_event_table("l", event_time="ts", columns={"ts": "timestamp", "size": "int64"})
            db.create_aggregate("long", source="l", group_by=[slot], measures={"size": kivi.sum("size")})
            db.append("l", [{"ts": (BEGIN_S + i * 300) * 1_000_000, "size": 5 * 10**18} for i in range(8)])
        with httpx.Client(base_url=base(server) + "/api/v1", timeout=60) as api:

            def now(query: str) -> Any:
                said = asked(api, "/query", query=query, time=BEGIN_S + 300)
                return {key: value for key, ((_, value),) in said.items()} if isinstance(said, dict) else said

            assert now("sum(a_cost)") == {(): "2.5"}
            by_host, by_zone = ((("__name__", "a_b_c"), label) for label in (("host", "h"), ("zone", "z")))
            assert now("a_b_c") == {by_host: "2", by_zone: "2.5"}
            assert now("sum(a_b_c)") == {(): "4.5"}
            assert [len(each) for each in api.get("/metadata?metric=a_b_c&limit=1").json()["data"].values()] == [2]
            assert now("sum(long_size)") == {(): str(5 * 10**18)}
            later = asked(api, "/query", query="sum(long_size)", time=BEGIN_S + 10 * 300)
            assert later == {(): [[BEGIN_S + 10 * 300, str(40 * 10**18)]]}  # more than its type holds
            assert now("wide_size") == 422 and now("wide_n") == {(("__name__", "wide_n"), ("host", "h")): "2"}
            assert api.get("/labels").json()["data"] == ["__name__", "host", "zone"]
            assert api.get("/series?match[]=wide_size").json()["data"] == [{"__name__": "wide_size", "host": "h"}]
            assert len(api.get("/metadata?limit=-1").json()["data"]) == 6
            assert now("empty_n") == now('empty_n{note=""}') == {(("__name__", "empty_n"),): "2"}  # which is no label
            assert now("topk(NaN, a_cost)") == 422 and now("topk(+Inf, a_cost)") == 422
            assert now('absent(nope{x="", y="1", z="1", z="2"})') == {(("y", "1"),): "1"}
            assert now('a_cost{host=~"(h*h*)*(h*h*)*x"}') == {}


def test_decimals_are_summed_up_exactly(tmp_path: Path) -> None:
    """Ten slots of 0.1 are 1, and what is asked of the last ones alone has all before it."""
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server, server.connect() as db:
        db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "cost": "decimal(12,2)"})
        slot = kivi.time_slot("ts", "5m", name="slot")
        db.create_aggregate("a", source="e", group_by=[slot], measures={"cost": kivi.sum("cost")})
        db.append("e", [{"ts": (BEGIN_S + i * 300) * 1_000_000, "cost": Decimal("0.1")} for i in range(1_000)])
        with httpx.Client(base_url=base(server) + "/api/v1", timeout=60) as api:
            for count in 3, 6, 10, 999, 1_000:
                found = asked(api, "/query", query="a_cost", time=BEGIN_S + count * 300)
                assert found == {(("__name__", "a_cost"),): [[BEGIN_S + count * 300, f"{count / 10:g}"]]}


def test_equal_questions_are_computed_once_and_a_304_is_no_other_answer(tmp_path: Path) -> None:
    """What others have asked, and what the caller has, is what would be read again: after each change of the tables, of
    what tables there are, and when a slot has ended without a commit."""
    columns = {"host": "string", "ts": "timestamp", "us": "int64"}
    rng, numbers = random.Random(3), iter(range(10**6))
    until_s = int(time.time()) + 120

    def measured(db: Any, name: str, source: str, slot: str) -> None:
        by = ["host", kivi.time_slot("ts", slot, name="slot")]
        db.create_aggregate(name, source=source, group_by=by, measures={"n": kivi.count(), "q": kivi.quantiles("us")})

    with (
        ServerProcess(tmp_path / "data", "--http", "localhost:0") as server,
        server.connect() as db,
        httpx.Client(base_url=base(server) + "/api/v1", timeout=60) as api,
    ):
        for source in ("e", "f"):
            db.create_event_table(source, event_time="ts", columns=columns)
            measured(db, f"{source}_2s", source, "2s")
        measured(db, "f_1d", "f", "1d")

        def append(source: str, at_s: float) -> None:
            host = rng.choice("abc")
            db.append(source, [{"host": host, "ts": int(at_s * 1e6), "us": rng.randrange(99)} for _ in range(3)])

        def retract() -> None:
            with db.transaction() as tx:
                tx.retract("e", where=kivi.col("us") < 30)

        def recreate() -> None:
            if "e_4s" in db.tables():
                db.drop("e_4s")
            else:
                measured(db, "e_4s", "e", "4s")

        changes = [
            lambda: append("e", time.time() - 20),
            lambda: append("e", time.time()),
            lambda: append("f", time.time()),
            retract,
            recreate,
            lambda: time.sleep(2),
        ]
        questions = [
            ("query", {"query": query, "time": str(until_s)})
            for query in (
                "sum(e_2s_n)", 'count({__name__=~"e_.*_n"})', "f_2s_n offset 10s", "e_4s_n",
                "histogram_quantile(0.9, sum by (le) (increase(e_2s_q_bucket[3m])))", "sum(e_2s_n) + on() sum(f_2s_n)",
            )
        ]  # fmt: skip
        range_ = {"start": str(until_s - 200), "end": str(until_s), "step": "1"}
        questions += [
            ("query_range", {"query": "e_2s_n", **range_}),
            ("series", {"match[]": '{__name__=~"e_.*n"}'}),
            ("labels", {}),
            ("label/host/values", {"match[]": "f_2s_n"}),
            ("label/__name__/values", {}),
            ("metadata", {}),
        ]
        had: list[tuple[str, str]] = [("", "")] * len(questions)
        told = [0, 0]
        for _ in range(30):
            rng.choice(changes)()
            for i, (path, parameters) in enumerate(questions):
                tag, text = had[i]
                reply = api.get(f"/{path}", params=parameters, headers={"If-None-Match": tag})
                assert reply.status_code in (200, 304), reply.text
                told[reply.status_code == 304] += 1
                if reply.status_code == 200:
                    had[i] = tag, text = reply.headers["ETag"], reply.text
                again = api.get(f"/{path}", params={**parameters, "nobodys": str(next(numbers))})
                if again.headers["ETag"] == tag:  # else a slot has ended between the two
                    assert again.text == text, (path, parameters, reply.status_code)
        assert min(told) > 30, told
        assert "ETag" not in api.get("/query", params={"query": "e_2s_n"}).headers  # of now

        def answers() -> dict[str, float]:
            lines = httpx.get(f"{base(server)}/metrics").text.splitlines()
            return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("kivi_http_answers")}

        def poll(_: int) -> str:
            return api.post("/query", data={"query": "sum(f_1d_n)", "time": str(BEGIN_S)}).text

        before = answers()
        with ThreadPoolExecutor(8) as pool:
            assert len({*pool.map(poll, range(200))}) == 1
        computed, shared = (after - before[name] for name, after in sorted(answers().items()))
        assert computed + shared == 200 and computed <= 2  # it may be midnight


def test_key_columns_whose_labels_are_taken_are_exported(tmp_path: Path) -> None:
    """As Prometheus names those of a target: ``le`` beside the bounds of a histogram, and the name of the metric."""
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server:
        with server.connect() as db:
            keys = {"le": "string", "exported_le": "int64", "__name__": "string"}
            db.create_event_table("e", event_time="ts", columns={**keys, "ts": "timestamp", "us": "int64"})
            by = [*keys, kivi.time_slot("ts", "5m", name="slot")]
            measures = {"n": kivi.count(), "us": kivi.quantiles("us")}
            db.create_aggregate("a", source="e", group_by=by, measures=measures)
            event = {"ts": BEGIN_S * 1_000_000, "exported_le": 3}
            db.append(
                "e",
                [{**event, "le": le, "__name__": name, "us": us} for le in ("0.5", "x") for name in "fg"
                 for us in (100 if le == "x" else 200, 300)],
            )  # fmt: skip
        with httpx.Client(base_url=base(server) + "/api/v1", timeout=60) as api:

            def now(query: str) -> Any:
                return asked(api, "/query", query=query, time=BEGIN_S + 300)

            labels = {"exported_exported_le": "x", "exported_le": "3", "exported___name__": "f"}
            median = now('histogram_quantile(0.5, a_us_bucket{exported_exported_le="x", exported___name__="f"})')
            ((found, ((_, number),)),) = median.items()
            assert dict(found) == labels and float(number) == pytest.approx(100, rel=0.012)
            ((_, number),) = now('histogram_quantile(0.1, sum by (le) (a_us_bucket{exported_exported_le!="x"}))')[()]
            assert float(number) == pytest.approx(200, rel=0.012)
            assert now('count(a_us_bucket{le="+Inf"})')[()][0][1] == "4"
            counted = now('a_n{le="x", exported___name__="f"}')
            assert counted == {
                (("__name__", "a_n"), ("exported___name__", "f"), ("exported_le", "3"), ("le", "x")): [
                    [BEGIN_S + 300, "2"]
                ]
            }
            assert api.get("/label/__name__/values?match[]=a_n").json()["data"] == ["a_n"]
            names = ["__name__", "exported___name__", "exported_exported_le", "exported_le", "le"]
            assert api.get("/labels?match[]=a_us_bucket").json()["data"] == names


def test_quantiles_of_histograms_that_are_put_together_are_those_of_all_their_values(tmp_path: Path) -> None:
    """Of one metric and of two, whose values lie in other buckets; and of such as are not alike none."""
    rng = random.Random(1)
    values = {"1": [rng.randrange(2, 100) for _ in range(50)], "2": [rng.randrange(27, 1_000) for _ in range(50)]}
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server:
        with server.connect() as db:
            db.create_event_table("e", event_time="ts", columns={"host": "string", "ts": "timestamp", "us": "int64"})
            for name, accuracy in (("a", 0.01), ("b", 0.01), ("c", 0.05)):
                by = ["host", kivi.time_slot("ts", "5m", name="slot")]
                measures = {"us": kivi.quantiles("us", accuracy=accuracy)}
                db.create_aggregate(name, source="e", group_by=by, measures=measures)
            db.append(
                "e", [{"host": host, "ts": BEGIN_S * 1_000_000, "us": us} for host, of in values.items() for us in of]
            )
        every = sorted(values["1"] + values["2"])
        with httpx.Client(base_url=base(server) + "/api/v1", timeout=60) as api:
            for q in 0.1, 0.25, 0.5, 0.75, 0.9:
                exact = every[math.ceil(q * len(every)) - 1]
                for histograms in (
                    "sum by (le) (a_us_bucket)",
                    'sum by (le) (a_us_bucket{host="1"}) + sum by (le) (a_us_bucket{host="2"})',
                    'sum by (le) (a_us_bucket{host="1"} or a_us_bucket{host="2"})',
                    'a_us_bucket{host="1"} + ignoring (host) b_us_bucket{host="2"}',
                    'sum by (le) (a_us_bucket{host="1"} or b_us_bucket{host="2"})',
                    'sum by (le) ({__name__=~"[ab]_us_bucket"})',
                    "sum by (le) (a_us_bucket and b_us_bucket)",
                    'sum by (le) (a_us_bucket and ignoring (host) b_us_bucket{host="2"})',
                    'sum by (le) (a_us_bucket unless b_us_bucket{host="3"})',
                ):
                    found = asked(api, "/query", query=f"histogram_quantile({q}, {histograms})", time=BEGIN_S + 300)
                    ((_, number),) = found[()]
                    assert float(number) == pytest.approx(exact, rel=0.012), (q, histograms)
            mixed = 'histogram_quantile(0.5, sum by (le) (a_us_bucket{host="1"} or c_us_bucket{host="2"}))'
            assert asked(api, "/query", query=mixed, time=BEGIN_S + 300) == 422
            for of_both, series in (
                ("histogram_quantile(0.5, a_us_bucket) - histogram_quantile(0.5, c_us_bucket)", 2),
                ("histogram_quantile(0.5, sum by (le) (a_us_bucket) and on () (sum(c_us_bucket) > 0))", 1),
                ("histogram_quantile(0.5, sum by (le) (a_us_bucket) * scalar(count(c_us_bucket)))", 1),
                ("histogram_quantile(0.5, a_us_bucket unless on () histogram_quantile(0.9, c_us_bucket{host='3'}))", 2),
            ):
                assert len(asked(api, "/query", query=of_both, time=BEGIN_S + 300)) == series, of_both


def test_zeros_beside_negative_values_are_zeros_in_quantiles(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server, server.connect() as db:
        db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "us": "int64"})
        slot = kivi.time_slot("ts", "5m", name="slot")
        db.create_aggregate("a", source="e", group_by=[slot], measures={"us": kivi.quantiles("us")})
        db.append("e", [{"ts": BEGIN_S * 1_000_000, "us": us} for us in [-40, *[0] * 98, 100]])
        with httpx.Client(base_url=base(server) + "/api/v1", timeout=60) as api:
            for q, exact in ((0.005, -40.0), (0.1, 0.0), (0.5, 0.0), (0.9, 0.0), (0.995, 100.0)):
                query = f"histogram_quantile({q}, a_us_bucket)"
                ((_, number),) = asked(api, "/query", query=query, time=BEGIN_S + 300)[()]
                assert float(number) == pytest.approx(exact, rel=0.012, abs=1e-300)


@pytest.mark.parametrize(
    ("width", "zone", "begins", "ends"),
    [("1month", None, "2026-03-01T00:00+00:00", "2026-04-01T00:00+00:00"),
     ("1d", "Europe/Berlin", "2025-10-26T00:00+02:00", "2025-10-27T00:00+01:00")],
)  # fmt: skip
def test_a_slot_longer_than_others_has_the_sample_of_before_until_it_ends(
    tmp_path: Path, width: str, zone: str | None, begins: str, ends: str
) -> None:
    """A month of 31 days, and the day on which the clocks go back."""
    begin, end = (dt.datetime.fromisoformat(text) for text in (begins, ends))
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server, server.connect() as db:
        db.create_event_table("e", event_time="ts", columns={"ts": "timestamp"})
        slot = kivi.time_slot("ts", width, name="slot", **({"tz": zone} if zone else {}))
        db.create_aggregate("a", source="e", group_by=[slot], measures={"n": kivi.count()})
        hour = dt.timedelta(hours=1)
        db.append("e", [{"ts": begin - hour}, {"ts": begin + hour}])
        with httpx.Client(base_url=base(server) + "/api/v1", timeout=60) as api:
            for moment, count in ((begin, "1"), (end - hour / 60, "1"), (end, "2")):
                ((_, number),) = asked(api, "/query", query="a_n", time=moment.timestamp())[(("__name__", "a_n"),)]
                assert number == count, moment


def test_buckets_of_subnormal_values_are_as_many_as_their_bounds(tmp_path: Path) -> None:
    """The bounds of many buckets are rounded to one float64 there."""
    values = [0.0, 5e-324, 1e-323, 1.5e-323, 9.9e-322, -5e-324, -1e-323, 2.2250738585072014e-308, 1.0]
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server, server.connect() as db:
        db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "x": "float64"})
        slot = kivi.time_slot("ts", "5m", name="slot")
        db.create_aggregate("a", source="e", group_by=[slot], measures={"x": kivi.quantiles("x")})
        db.append("e", [{"ts": BEGIN_S * 1_000_000, "x": value} for value in values])
        with httpx.Client(base_url=base(server) + "/api/v1", timeout=60) as api:
            found = asked(api, "/query", query="a_x_bucket", time=BEGIN_S + 300)
            counts = {float(dict(labels)["le"]): float(number) for labels, ((_, number),) in found.items()}
            assert len(counts) == len(found)
            for bound, count in counts.items():  # an accuracy of 1 % is none of so few digits
                assert sum(value <= bound - 5e-324 for value in values) <= count
                assert count <= sum(value <= 1.02 * bound + 5e-324 for value in values)
            assert [counts[bound] for bound in sorted(counts)] == sorted(counts.values()) and counts[math.inf] == 9
            for q, exact in ((0.05, -1e-323), (0.4, 0.0), (0.5, 5e-324), (0.99, 1.0)):
                query = f"histogram_quantile({q}, a_x_bucket)"
                ((_, number),) = asked(api, "/query", query=query, time=BEGIN_S + 300)[()]
                assert float(number) == pytest.approx(exact, rel=0.012, abs=1e-322)


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


BY_5_MINUTES = 288


def of_a_month(count: int) -> tuple[Series, Evaluation]:
    """So many series of 60 days in slots of 5 minutes, and the hours of the last 30 days. Some begin anew."""
    made = np.random.default_rng(5)
    ends_ms = np.arange(60 * BY_5_MINUTES + 1, dtype=np.int64) * 300_000 + BEGIN_S * 1_000
    steps = made.integers(0, 9, (1, len(ends_ms))).astype(float)
    steps[made.random(steps.shape) < 0.001] = -1e5
    values = np.broadcast_to(np.cumsum(steps, axis=1), (count, len(ends_ms)))
    series = Series([{"i": str(i)} for i in range(count)], ends_ms, values, np.zeros(count, np.int64), 300_000)
    times_ms = ends_ms[-1] - np.arange(720, dtype=np.int64)[::-1] * 3_600_000
    return series, Evaluation(times_ms, lambda *_: [series], (int(times_ms[0]), int(times_ms[-1])))


@pytest.mark.parametrize(
    ("count", "query", "is_answered"),
    [
        *[(570, f"sum({name}(m[30d]))", True) for name in ("increase", "rate", "delta", "irate", "changes", "resets")],
        (570, "sum(increase(m[30d])) / sum(increase(m[30d]))", True),
        (200, "sum(sum_over_time(m[30d])) + sum(max_over_time(m[30d]))", True),  # together 2.5e9 samples
        (570, "+".join(["max_over_time(m[30d])"] * 3), False),  # together 10.6e9, though each has 3.5e9
        (90, "stddev_over_time(m[30d])", False),  # 90 * 720 * 8641 samples, each as 20
        (2_000, "stddev_over_time(m[5m])", False),  # 1,440,000 ranges, each as 10,000
        (200, 'histogram_quantile(0.5, label_replace(m, "le", "+Inf", "i", ".*"))', True),  # 144,000, each as 50,000
        (400, 'histogram_quantile(0.5, label_replace(m, "le", "+Inf", "i", ".*"))', False),
        (2_000, "sum(topk by (i) (1, m)) + sum(quantile by (i) (0.5, m))", True),  # at 720 steps in a second or two
    ],
)
def test_the_limit_of_ranges_is_of_what_is_read(count: int, query: str, is_answered: bool) -> None:
    _, evaluation = of_a_month(count)
    if is_answered:
        assert evaluation.value(parsed(query)).there.any()
    else:
        with pytest.raises(Unanswerable, match="10,000,000,000 samples of its ranges.*fewer series or steps"):
            evaluation.value(parsed(query))


def test_the_values_that_a_question_holds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each level holds its left side while the right one is evaluated: a question of some hundred of them ended the
    server. What is let go again does not count."""
    monkeypatch.setattr(prom_ranges, "HELD_MAX", 50_000)
    deep = "m + (" * 9 + "m" + ")" * 9
    for query, is_answered in (
        (deep, False),
        (f"clamp({deep}, 1, 2)", False),
        ("+".join(["m"] * 10), True),
        ("sum(m) + " * 20 + "sum(m)", True),
        ("scalar(sum(m + m)) + " * 9 + "m", True),
    ):
        _, evaluation = of_a_month(10)  # 7,200 values a vector
        if is_answered:
            assert evaluation.value(parsed(query)).there.any()
        else:
            with pytest.raises(Unanswerable, match="holds more than 50,000 values"):
                evaluation.value(parsed(query))


def test_of_slots_before_those_that_are_looked_at_one_number_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each series. A question about the last minutes of a year held every slot of the table."""
    read = list[int]()

    def counted(batch: Any) -> Any:
        read.append(batch.num_rows)
        return rows_from_batch(batch)

    monkeypatch.setattr(prom_series, "rows_from_batch", counted)
    with kivi.open(None) as db:
        db.create_event_table("e", event_time="ts", columns={"host": "int64", "ts": "timestamp", "us": "int64"})
        by: list[Any] = ["host", kivi.time_slot("ts", "5m", name="slot")]
        measures = {"n": kivi.count(), "us": kivi.quantiles("us")}
        db.create_aggregate("a", source="e", group_by=by, measures=measures)
        events = [{"host": i % 3, "ts": (BEGIN_S + i * 100) * 1_000_000, "us": i} for i in range(3_000)]  # 1,000 slots
        db.append("e", events)
        store = db.store
        for name, samples in ("a_n", 1), ("a_us_bucket", 2):
            (counter,) = (each for each in counters(store, lambda _: True) if each.name == name)
            matching = [Matching("host", "=~", "0|1")]
            lease, at_us = store.begin(), (BEGIN_S + 290_000) * 1_000_000
            try:
                reading = Reading(store, lease)
                found = reading.series(counter, matching, (at_us, at_us), [(counter, matching)])
                again = reading.series(counter, matching, (at_us, at_us), [(counter, matching)])
            finally:
                store.release(lease)
            at = np.searchsorted(found.ends_ms, at_us // 1_000, side="right") - 1
            end_s = int(found.ends_ms[at]) // 1_000
            for host in "01":
                (row,) = (i for i, labels in enumerate(found.labels)
                          if labels["host"] == host and labels.get("le") in (None, "+Inf"))  # fmt: skip
                ended = sum(event["ts"] < end_s * 1_000_000 and event["host"] == int(host) for event in events)
                assert found.values[row, at] == again.values[row, at] == ended
            assert sum(read) <= samples * 3 + 4 * 3, (name, read)
            read.clear()
            lease = store.begin()
            try:
                (only,) = Reading(store, lease).labelled(counter, [Matching("host", "=", "2"), *LAST[name]])
            finally:
                store.release(lease)
            assert only["host"] == "2"
            read.clear()


LAST: dict[str, list[Matching]] = {"a_n": [], "a_us_bucket": [Matching("le", "=", "+Inf")]}


def test_counters_that_begin_anew_are_read_where_they_do() -> None:
    """What each window gained, changed and began anew, counted sample by sample."""
    series, evaluation = of_a_month(1)
    values, ends_ms = series.values[0], series.ends_ms
    for hours in 1, 5, 720:
        found = {
            name: evaluation.value(parsed(f"{name}(m[{hours}h])")).numbers[0] for name in ("rate", "resets", "changes")
        }
        for t in range(0, 720, 71):
            inside = values[
                (ends_ms >= evaluation.times_ms[t] - hours * 3_600_000) & (ends_ms <= evaluation.times_ms[t])
            ]
            drops = inside[1:] < inside[:-1]
            gained = inside[-1] - inside[0] + inside[:-1][drops].sum()
            assert math.isclose(found["rate"][t] * hours * 3_600, gained, rel_tol=1e-9, abs_tol=1e-6)
            assert found["resets"][t] == drops.sum()
            assert found["changes"][t] == (inside[1:] != inside[:-1]).sum()
