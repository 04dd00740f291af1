"""Metrics as Prometheus sees them: a real one scrapes a loaded server, evaluates the rules, answers the dashboard."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import threading
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kivi_server.metrics import DISTRIBUTIONS, METRICS, OF_NODES, UNSERVED
from prometheus_client.parser import text_string_to_metric_families

import kivi
from kivi.store.facade import Store
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.ports import Port
from tests.serverproc import ROOT, ServerProcess
from tests.waiting import wait_until

DOCKER = ROOT / "docker"
RULES = DOCKER / "prometheus" / "kivi.rules.yml"
DASHBOARD = json.loads((DOCKER / "grafana" / "dashboards" / "kivi.json").read_text())
EXPRESSIONS = [(p["title"], t["expr"]) for p in DASHBOARD["panels"] for t in p.get("targets", [])]
OF_CLUSTERS = "kivi_cluster_"
"""What names of metrics begin with that a server has if it is a node."""
PANELS = [panel for panel in EXPRESSIONS if OF_CLUSTERS not in panel[1]]
NOON_US = 1_767_268_800_000_000

pytestmark = pytest.mark.prometheus


class Load:
    """Does a little of everything until it is stopped."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.committed = self.conflicts = 0
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        with kivi.connect(self.endpoint) as db:
            db.create_table("accounts", key={"id": "int64"}, columns={"name": "string", "n": kivi.sum("int64")})
            db.create_event_table("calls", event_time="ts", columns={"endpoint": "int64", "ts": "timestamp"})
            db.create_aggregate("by_endpoint", source="calls", group_by=["endpoint"], measures={"n": kivi.count()})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with kivi.connect(self.endpoint) as db, db.snapshot(ttl_s=600) as held:
                held.get("accounts", (0,))
                while not self._stop.is_set():
                    self._turn(db)
        except BaseException as error:
            self._failure = error

    def _turn(self, db: Any) -> None:
        with db.transaction() as tx:
            tx.delta("accounts", (1,), n=1)
        db.append("calls", [{"endpoint": i % 50, "ts": NOON_US + i} for i in range(200)])
        self.committed += 2
        with db.snapshot() as snapshot:
            snapshot.get("accounts", (1,))
            list(snapshot.scan("by_endpoint", limit=5))
        first, second = db.transaction(), db.transaction()
        with first, pytest.raises(kivi.Conflict), second:
            for each in (first, second):
                each.get("accounts", (2,))
                each.put("accounts", (2,), name="x")
            first.commit()
            self.committed += 1
        self.conflicts += 1


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Load, str]]:
    """A server under load, and where its metrics are."""
    with ServerProcess(tmp_path_factory.mktemp("loaded") / "data", "--metrics", "localhost:0") as server:
        address = next(line for line in server.output if line.startswith("metrics on "))
        with Load(server.endpoint) as load:
            yield load, address.split()[-1]


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return str(reply.read().decode())


def values(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page(url))
        for sample in family.samples
    }


def test_every_number_has_a_name_or_a_reason_to_have_none(loaded: tuple[Load, str], tmp_path: Path) -> None:
    with contextlib.closing(Store.open(str(tmp_path / "data"))) as store:
        assert not store.stats().keys() - METRICS.keys() - UNSERVED
        assert set(store.histograms()) == set(DISTRIBUTIONS)
    served = {name for name, _ in values(loaded[1])}
    for metric in METRICS.values():
        name = f"kivi_{metric.name}" + ("_total" if metric.kind.__name__.startswith("Counter") else "")
        assert name in served


def test_the_counters_are_what_was_done(loaded: tuple[Load, str]) -> None:
    load, url = loaded
    wait_until(lambda: load.committed >= 30, 60)
    before = load.committed, load.conflicts
    found = values(url)
    after = load.committed, load.conflicts
    tables = 3 + 2  # commits of the catalog: an aggregate takes some more
    assert before[0] <= found["kivi_commits_total", ()] <= after[0] + tables + 10
    assert before[1] <= found["kivi_aborts_total", (("reason", "conflict"),)] <= after[1] + 1
    code = (("code", "ABORTED"), ("rpc", "Session/commit"))
    assert before[1] <= found["kivi_rpc_requests_total", code] <= after[1] + 1
    for name in ("kivi_commit_duration_seconds", "kivi_log_sync_duration_seconds", "kivi_read_runs_searched"):
        assert found[f"{name}_count", ()] >= 20
        assert found[f"{name}_bucket", (("le", "+Inf"),)] == found[f"{name}_count", ()]
    assert found["kivi_commit_duration_seconds_count", ()] == pytest.approx(found["kivi_commits_total", ()], abs=12)
    newest, watermark = found["kivi_newest_commit_timestamp", ()], found["kivi_watermark", ()]
    assert found["kivi_watermark_lag", ()] == newest - watermark >= 0
    assert 0 < found["kivi_oldest_snapshot_age_seconds", ()] < 600
    assert found["kivi_disk_free_bytes", ()] < found["kivi_disk_size_bytes", ()]


def test_buckets_double_from_a_quarter_of_a_millisecond(loaded: tuple[Load, str]) -> None:
    served: dict[str, set[float]] = defaultdict(set)
    for name, labels in values(loaded[1]):
        if name.endswith("_seconds_bucket"):
            served[name].add(float(dict(labels)["le"]))
    assert len(served) == 4  # commit, sync, consolidation, calls
    for bounds in served.values():
        *finite, infinite = sorted(bounds)
        assert finite[0] == 0.000_25 and infinite == float("inf") and finite[-1] > 30
        assert all(upper == pytest.approx(2 * lower, rel=1e-4) for lower, upper in itertools.pairwise(finite))


def test_no_label_has_a_value_that_users_choose(loaded: tuple[Load, str]) -> None:
    versions = {"version", "python", "grpcio", "pyarrow", "rocksdict"}
    allowed = {"le", "by", "outcome", "kind", "reason", "state", "rpc", "code", *versions}
    for name, labels in values(loaded[1]):
        assert {label for label, _ in labels} <= allowed, name
        assert not {value for _, value in labels} & {"accounts", "calls", "by_endpoint"}


@pytest.mark.story
def test_names_and_files_pass_promtool(loaded: tuple[Load, str]) -> None:
    promtool = require("promtool")
    linted = subprocess.run(
        [promtool, "check", "metrics"], input=page(loaded[1]), capture_output=True, text=True, check=False
    )
    assert (linted.returncode, linted.stderr) == (0, "")
    for command in (
        ["check", "rules", RULES.name],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "kivi.rules.test.yml"],
    ):
        done = subprocess.run([promtool, *command], cwd=RULES.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A real one, in a directory of its own."""

    def __init__(self, program: str, directory: Path, target: str) -> None:
        self.directory = directory
        config = (DOCKER / "prometheus" / "prometheus.yml").read_text()
        config = config.replace("kivi:9464", target).replace("5s", "1s")
        (directory / "prometheus.yml").write_text(config)
        (directory / RULES.name).write_text(RULES.read_text())
        self._port = Port()
        self.address = f"127.0.0.1:{self._port.number}"
        self.log = directory / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    program,
                    "--config.file=prometheus.yml",
                    "--storage.tsdb.path=tsdb",
                    f"--web.listen-address={self.address}",
                ],
                cwd=directory,
                stdout=log,
                stderr=log,
            )

    def wait(self, expression: str, timeout_s: float = 30.0) -> None:
        """Until a query has a result."""

        def answered() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError):  # it does not listen yet
                return bool(self.query(expression))
            return False

        wait_until(answered, timeout_s, reason=self.log.read_text, pause_s=0.25)

    def get(self, path: str, **parameters: str) -> Any:
        return json.loads(page(f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))["data"]

    def query(self, expression: str) -> list[Any]:
        result: list[Any] = self.get("query", query=expression)["result"]
        return result


@pytest.fixture(scope="module")
def prometheus(loaded: tuple[Load, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    target = urllib.parse.urlsplit(loaded[1]).netloc
    running = Prometheus(require("prometheus"), tmp_path_factory.mktemp("prometheus"), target)
    try:
        running.wait("rate(kivi_commits_total[10s]) > 0")
        yield running
    finally:
        running.process.kill()
        running.process.wait()


@pytest.mark.story
def test_every_panel_of_the_dashboard_shows_something(prometheus: Prometheus) -> None:
    assert len(PANELS) > 40
    assert not any("vector(" in expression for _, expression in PANELS)

    def empty() -> list[tuple[str, str, Any]]:
        out = []
        for title, expression in PANELS:
            asked = expression.replace("$__rate_interval", "10s").replace("$instance", ".+")
            found = prometheus.query(asked)
            if not found or any(sample["value"][1] in ("NaN", "+Inf") for sample in found):
                out.append((title, asked, found))
        return out

    wait_until(lambda: not empty(), reason=empty, pause_s=1)


def test_rules_are_loaded_and_silent_while_all_is_well(prometheus: Prometheus) -> None:
    (group,) = prometheus.get("rules")["groups"]
    assert len(group["rules"]) == RULES.read_text().count("- alert:")
    wait_until(
        lambda: all(rule["health"] != "unknown" for rule in prometheus.get("rules")["groups"][0]["rules"]), pause_s=0.2
    )
    rules = prometheus.get("rules")["groups"][0]["rules"]
    assert {rule["name"]: rule["health"] for rule in rules} == {rule["name"]: "ok" for rule in rules}
    firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
    assert firing <= {"KiviDiskFull"}  # of a machine whose disk is
    metrics = set(re.findall(r"kivi_[a-z_]+", RULES.read_text()))
    for metric in metrics - {name for name in metrics if "kivi_rules" in name}:
        if metric.startswith(OF_CLUSTERS):
            assert metric in {f"kivi_{one.name}" for one in OF_NODES.values()}
        else:
            assert prometheus.query(f'{{__name__="{metric}"}}'), metric


def test_a_node_of_a_cluster_has_what_panels_and_rules_of_clusters_ask_for(tmp_path: Path) -> None:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as nats:
        how = ("--cluster", "apm", "--nats", nats.urls[0], "--log-bytes", "1GiB", "--metrics", "localhost:0")
        with ServerProcess(tmp_path / "node", *how) as node:
            address = next(line for line in node.output if line.startswith("metrics on ")).split()[-1]
            found = values(address)
    assert {f"kivi_{metric.name}" for metric in OF_NODES.values()} <= {name for name, _ in found}
    assert found["kivi_cluster_nodes_live", ()] == 1 and found["kivi_cluster_log_applied", ()] >= 1
    asked = {name for _, text in EXPRESSIONS for name in re.findall(r"kivi_cluster_[a-z_]+", text)}
    assert asked and asked <= {name for name, _ in found}
