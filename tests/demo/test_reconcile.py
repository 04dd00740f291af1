"""Reconciling goes green on what is right and red, with the keys, on each thing that can differ.

The demonstration's own jobs bring landed files into a real server; then something is changed on one side.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from apm_demo import live_job, tables, trace, trace_job
from apm_demo.landing import land, landed
from apm_demo.recompute import aggregates
from apm_demo.reconcile import Report, reconcile, tell
from apm_demo.say import Voice
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
PLACES = {250: ("acme", "shop", "shop-1"), 251: ("acme", "shop", "shop-2"), 252: ("zeta", "mail", "mail-1")}
START_US = 1_709_312_400_000_000


def lines(count: int, seed: int) -> list[str]:
    """Invocations of an hour, in no order."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        endpoint_id = rng.choice(list(PLACES))
        customer, application, server = PLACES[endpoint_id]
        made.append(
            json.dumps(
                {
                    "customer": customer, "application": application, "server": server, "endpoint_id": endpoint_id,
                    "ts_us": START_US + rng.randrange(3_600_000_000), "duration_us": rng.randrange(1 << 40),
                    "status": rng.choice((200, 404, 500, 503)), "trace_id": f"{rng.getrandbits(128):032x}",
                }
            )
        )  # fmt: skip
    return made


@dataclasses.dataclass
class World:
    """A server that has what landed, and Spark."""

    server: ServerProcess
    db: Any
    landing: Path
    spark: Any

    def reconcile(self, **options: Any) -> Report:
        """Of three aggregates, or ``only`` some: each takes Spark two or three seconds."""
        only = ("customer_1h", "endpoint_1h", "llm_1h")
        return reconcile(self.spark, self.server.endpoint, self.landing, **{"only": only, **options})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, spark: Any) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("reconcile")
    landing = folder / "landing"
    for name in ("invocations", "trace"):
        (landing / name).mkdir(parents=True)
    for n in range(3):
        land(landing / "invocations", f"part-{n}.jsonl", lines(300, n))
    trace.land_trace(landing / "trace", 30)
    for path in landed(landing / "trace")[2:]:  # two files of it say what all of them would
        path.unlink()
    with ServerProcess(folder / "store") as server, kivi.connect(server.endpoint, timeout=30) as db:
        tables.create(db)
        tables.create_rules(db)
        into, once = server.endpoint, {"availableNow": True}
        live_job.start(spark, into, landing / "invocations", folder / "live", **once).awaitTermination()
        trace_job.start(spark, into, landing / "trace", folder / "trace", **once).awaitTermination()
        yield World(server, db, landing, spark)


def differing(report: Report) -> dict[str, tuple[int, int]]:
    """Aggregate -> rows that differ from its events, and from the files; of those where any does."""
    return {
        line.aggregate.name: (line.kivi.differing, line.files.differing if line.files else 0)
        for line in report.lines
        if line.differing
    }


@pytest.mark.story
def test_no_difference_to_events_and_files(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    report = world.reconcile(only=())
    assert {line.aggregate.name for line in report.lines} == {
        name for name in world.db.tables() if world.db.describe(name)["kind"] == "aggregate"
    }
    assert differing(report) == {}
    counted = {line.aggregate.name: line.events for line in report.lines}
    assert counted["endpoint_5m"] == counted["customer_1h"] == 900
    requests = sum(len(path.read_text().splitlines()) for path in landed(world.landing / "trace"))
    assert counted["llm_5m"] == counted["llm_1h"] == requests
    by_files = {line.aggregate.name for line in report.lines if line.files is not None}
    assert by_files == counted.keys() - {"anomalies_per_endpoint"}  # anomalies do not land, they are found
    assert tell(report, Voice(), all_files=True) == 0
    said = capsys.readouterr().out
    assert "No difference in 15 aggregates" in said
    assert re.search(r"^endpoint_5m +36 +900 +0 +0$", said, re.MULTILINE)


def test_a_landed_file_with_one_more_event(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    path = landed(world.landing / "invocations")[1]
    whole = path.read_text()
    first = json.loads(whole.splitlines()[0])
    extra = json.dumps({**first, "duration_us": 1})
    path.write_text(f"{whole}{extra}\n")
    try:
        report = world.reconcile()
    finally:
        path.write_text(whole)
    found = differing(report)
    assert found == dict.fromkeys(("customer_1h", "endpoint_1h"), (0, 1))  # a row of each, and only against the files
    assert tell(report, Voice(), all_files=True) == 1
    said = capsys.readouterr().out
    assert "2 of 3 aggregates DIFFER" in said
    key = ", ".join(f"{name}={first[name]}" for name in ("customer", "application", "server", "endpoint_id"))
    assert f"endpoint_1h ({key}, slot=" in said
    assert "from the landed files" in said


def test_a_microsecond_is_a_difference(world: World) -> None:
    path = landed(world.landing / "invocations")[0]
    whole = path.read_text()
    first, *rest = whole.splitlines()
    event = json.loads(first)
    path.write_text("\n".join([json.dumps({**event, "duration_us": event["duration_us"] + 1}), *rest, ""]))
    try:
        report = world.reconcile(only=("customer_1h",))
    finally:
        path.write_text(whole)
    (line,) = report.lines
    assert line.files is not None
    (said,) = line.files.first
    assert said.startswith(f"customer_1h (customer={event['customer']}, slot=")
    assert "sum_resp_time is" in said
    assert "calls is" not in said


def test_files_that_are_on_their_way_count_only_when_they_are_asked_for(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    late = land(world.landing / "invocations", "part-9.jsonl", lines(10, 9))
    try:
        waiting, all_of_it = (
            world.reconcile(all_files=every, only=("customer_1h", "endpoint_1h")) for every in (False, True)
        )
    finally:
        late.unlink()
    assert differing(waiting) == {}
    assert waiting.waiting == ["part-9.jsonl"]
    assert tell(waiting, Voice(), all_files=False) == 0
    assert "1 landed files are in no batch, and do not count yet: part-9.jsonl" in capsys.readouterr().out
    assert differing(all_of_it).keys() == {"customer_1h", "endpoint_1h"}


def test_measures_of_every_exact_kind_are_computed_again(world: World) -> None:
    """R20: quantiles by their buckets, avg, and sums and counts with expressions and ``where``."""
    us = kivi.col("duration_us")
    measures = {
        "calls": kivi.count(),
        "slow": kivi.count(where=(us > 1 << 39) & ~(kivi.col("server") == "shop-1")),
        "twice": kivi.sum(us * 2 + kivi.coalesce(us, 0), where=us >= 1_000),
        "spread": kivi.quantiles("duration_us", 0.01),
        "rough": kivi.quantiles("duration_us", 0.4, where=us > 1 << 20),
        "mean": kivi.avg("duration_us"),
        "worst": kivi.argmax("server", by="duration_us"),
    }
    slot = kivi.time_slot("ts", "1h")
    world.db.create_aggregate("kpi", source="invocations", group_by=["customer", slot], measures=measures)
    try:
        monthly = kivi.time_slot("ts", "1month", tz="Europe/Madrid")
        world.db.create_aggregate("kpi_month", source="invocations", group_by=[monthly], measures={"n": kivi.count()})
        (compared,) = [aggregate for aggregate in aggregates(world.db) if aggregate.name.startswith("kpi")]
        assert compared.measures.keys() == measures.keys() - {"worst"}
        report = world.reconcile(only=("kpi",))
        (line,) = report.lines
        assert (line.events, line.kivi.differing, line.files and line.files.differing) == (900, 0, 0), line
        path = landed(world.landing / "invocations")[0]
        whole = path.read_text()
        try:
            path.write_text("\n".join(whole.splitlines()[1:]) + "\n")
            (line,) = world.reconcile(only=("kpi",)).lines
        finally:
            path.write_text(whole)
        assert line.files is not None
        (said,) = line.files.first
        assert all(f"{name} is" in said for name in ("calls", "spread", "mean", "twice")), said
    finally:
        world.db.drop("kpi")
        world.db.drop("kpi_month")


def test_a_file_that_is_gone_is_said(world: World, tmp_path: Path) -> None:
    path = landed(world.landing / "invocations")[2]
    moved = path.rename(tmp_path / path.name)
    try:
        report = world.reconcile(only=("customer_1h",))
    finally:
        moved.rename(path)
    assert report.gone == ["part-2.jsonl"]
    assert tell(report, Voice(), all_files=True) == 1


@pytest.mark.story
def test_the_program_as_a_scheduler_starts_it(world: World, tmp_path: Path) -> None:
    """By the environment, as a scheduler would start it."""
    environment = {**os.environ, "KIVI_ENDPOINT": world.server.endpoint, "APM_LANDING": str(world.landing)}
    command = [sys.executable, "-m", "apm_demo.reconcile", "--only", "endpoint_5m"]
    (tmp_path / "scratch").mkdir()
    before = world.db.watermark()
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**environment, "TMPDIR": str(tmp_path / "scratch")}, timeout=240
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == ""
    assert "No difference in 1 aggregates" in ran.stdout
    assert list((tmp_path / "scratch").iterdir()) == []
    assert world.db.watermark() == before  # nothing was written


def test_a_server_that_is_not_there_is_no_difference(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "apm_demo.reconcile", "--endpoint", "127.0.0.1:9"], capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert "127.0.0.1:9" in ran.stdout
    assert "It could not compare." in ran.stdout


def test_an_event_that_never_landed(world: World) -> None:
    """Last of those that use these data, as it stays: kivi agrees with its own events, and not with the files."""
    event = json.loads(lines(1, 77)[0])
    event["ts"] = event.pop("ts_us")
    world.db.append("invocations", [event])
    assert differing(world.reconcile()) == dict.fromkeys(("customer_1h", "endpoint_1h"), (0, 1))


def test_slots_above_the_retention_floor(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Events are forgotten, aggregates are not: what cannot be rebuilt is not compared, and the report says so."""
    db, hour = world.db, 3_600_000_000
    db.create_event_table("kept", event_time="ts", columns={"ts": "timestamp", "v": "int64"}, retention="2h")
    db.create_aggregate(
        "kept_10m",
        source="kept",
        group_by=[kivi.time_slot("ts", "10m", name="slot")],
        measures={"total": kivi.sum("v"), "some": kivi.count("v"), "least": kivi.min("v")},
    )
    start = START_US // hour * hour
    for part in range(6):
        values = (None if n % 5 == 0 else n * part - 7 for n in range(60))
        db.append("kept", [{"ts": start + part * hour + n * 60_000_000, "v": v} for n, v in enumerate(values)])
    wait_until(lambda: "complete_since_us" in db.describe("kept")["statistics"], 60)
    with db.snapshot() as snapshot:
        slots, events = len(snapshot.to_arrow("kept_10m")), len(snapshot.to_arrow("kept"))
    assert slots == 36
    assert events < 360
    (wanted,) = [a for a in aggregates(db) if a.name == "kept_10m"]
    assert wanted.since_us is not None
    report = reconcile(world.spark, world.server.endpoint, None, only=("kept_10m",))
    (line,) = report.lines
    assert (line.kivi.differing, line.files, line.events) == (0, None, None)
    assert 12 <= line.kivi.rows < 36
    assert tell(report, Voice(), all_files=True) == 0
    assert "kept_10m: slots from" in capsys.readouterr().out
