"""Anomalies as they happen, in what arrives by OpenTelemetry and by ``append``: each once, whatever is killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import kivi
from apm_demo import rule
from apm_demo.children import Child
from apm_demo.detector import start, step, watched
from apm_demo.tables import micros
from tests.otlp import Recorder, Server, export
from tests.waiting import wait_until

NOON_US = 1_767_268_800_000_000
SLOT_US = 300_000_000
PLACE = {"namespace": "acme", "service": "shop", "instance": "shop-1", "method": "", "kind": "server"}


def event(route: str, slot: int, duration_us: int, n: int = 0) -> dict[str, Any]:
    at = NOON_US + slot * SLOT_US + n
    return {**PLACE, "route": route, "ts": at, "duration_us": duration_us, "status_code": 0, "error": 0}


def expected(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """By the rule itself, over all events: averages of slots that were complete before they were measured against."""
    totals: dict[tuple[str, int], tuple[int, int]] = {}
    for e in events:
        key = e["route"], rule.slot_us(micros(e["ts"]), SLOT_US)
        total, count = totals.get(key, (0, 0))
        totals[key] = total + e["duration_us"], count + 1
    found = []
    for e in events:
        previous = totals.get((e["route"], rule.previous_slot_us(micros(e["ts"]), SLOT_US)))
        limit = rule.limit_us(rule.Totals(*previous) if previous else None)
        if limit is not None and e["duration_us"] > limit:
            found.append((e["route"], e["duration_us"]))
    return sorted(found)


def raised(server: Server) -> list[tuple[str, int]]:
    return sorted((row["route"], row["duration_us"]) for row in server.read("invocations_anomalies"))


@pytest.mark.story
def test_anomalies_are_raised_once_as_they_happen_though_all_is_killed(tmp_path: Path) -> None:
    def detector(number: int) -> Child:
        child = Child(
            f"detector-{number}", tmp_path / f"{number}.log", "apm_demo.detector", "--endpoint", server.endpoint
        )
        child.wait_for("ready invocations -> invocations_anomalies", 60)
        return child

    def until(count: int) -> float:
        began = time.monotonic()
        wait_until(lambda: len(raised(server)) >= count, reason=lambda: (raised(server), running.tail()))
        return time.monotonic() - began

    recorder = Recorder()
    with Server(tmp_path / "data") as server:
        running = detector(1)
        try:
            with server.connect() as db:
                db.append("invocations", [event("/a", 0, 10_000 + i % 3 * 1_000, i) for i in range(40)])
                db.append("invocations", [event("/b", 0, 40_000, i) for i in range(2_000)])
            for duration_us in (22_000, 80_000, 22_001, 5, 90_001):  # averages are 10,975 and 40,000
                end = (NOON_US + SLOT_US + 7) * 1_000
                for route in ("/a", "/b", "/new"):
                    recorder.span(route, start=end - duration_us * 1_000, end=end)
            export(server.otlp, recorder.memory.get_finished_spans())
            first = [("/a", 22_000), ("/a", 22_001), ("/a", 80_000), ("/a", 90_001), ("/b", 90_001)]
            until(len(first))
            assert raised(server) == first
            server.restart()  # beneath the detector, which goes on
            with server.connect() as db:
                db.append("invocations", [event("/a", 1, 400_000 + i, i) for i in range(3)])
            until(len(first) + 3)
            running.kill()
            with server.connect() as db:
                db.append("invocations", [event("/b", 1, 300_000)])  # while nobody looks
            running = detector(2)
            until(len(first) + 4)
            time.sleep(0.3)
            assert raised(server) == expected(server.read("invocations"))
            (row,) = [row for row in server.read("invocations_anomalies") if row["duration_us"] == 300_000]
            assert (row["previous_sum_us"], row["previous_count"]) == (80_000_000, 2_000)
            running.terminate()
            running.wait(60)
        finally:
            running.stop()


def create(db: Any, *slots: str) -> None:
    """Calls, and what ``by_endpoint`` says of them; for each further width an aggregate of its own."""
    db.create_event_table(
        "calls", event_time="ts", columns={"endpoint_id": "int64", "ts": "timestamp", "resp_time_us": "int64"}
    )
    for name, width in {"by_endpoint": "5m", **{f"by_endpoint_{width}": width for width in slots}}.items():
        db.create_aggregate(
            name,
            source="calls",
            group_by=["endpoint_id", kivi.time_slot("ts", width)],
            measures={"n": kivi.count(), "total": kivi.sum("resp_time_us"), "slowest": kivi.max("resp_time_us")},
        )


def call(slot: int, resp_time_us: int, endpoint_id: int = 251) -> dict[str, int]:
    return {"endpoint_id": endpoint_id, "ts": NOON_US + slot * SLOT_US, "resp_time_us": resp_time_us}


def test_two_of_one_name_judge_each_event_once_and_a_table_made_anew_begins_anew() -> None:
    with kivi.open() as db:
        create(db)
        db.append("calls", [call(0, 10), call(0, 20), call(1, 999)])
        what = watched(db, "by_endpoint")
        for _ in range(2):
            start(db, what, "mine")
            start(db, what, "all", from_start=True)
        assert step(db, what, "mine") is None
        assert (step(db, what, "all"), step(db, what, "all")) == (1, None)
        db.append("calls", [call(1, 30), call(1, 31)])

        class Slow:
            """Reads its place; then the other one is quicker."""

            def __getattr__(self, name: str) -> Any:
                if name == "run":
                    assert step(db, what, "mine") == 1
                return getattr(db, name)

        assert step(Slow(), what, "mine") == 0
        with db.snapshot() as snapshot:
            assert [row["resp_time_us"] for row in snapshot.scan("calls_anomalies")] == [999, 31]
        for name in ("by_endpoint", "calls"):
            db.drop(name)
        create(db)
        db.append("calls", [call(0, 5), call(1, 11)])
        assert (step(db, what, "mine"), step(db, what, "mine")) == (1, None)
        db.create_aggregate("by_slot", source="calls", group_by=["ts"], measures={"n": kivi.count()})
        us = {"total": kivi.sum("resp_time_us"), "n": kivi.count(), "most": kivi.max("resp_time_us")}
        monthly = kivi.time_slot("ts", "1month", tz="Europe/Madrid")
        db.create_aggregate("monthly", source="calls", group_by=["endpoint_id", monthly], measures=us)
        for name in ("by_slot", "monthly"):
            with pytest.raises(kivi.InvalidArgument, match="how long calls took"):
                watched(db, name)


def test_one_name_for_two_aggregates_is_two_places() -> None:
    with kivi.open() as db:
        create(db, "1h")
        both = [watched(db, "by_endpoint"), watched(db, "by_endpoint_1h", "by_the_hour")]
        for what in both:
            start(db, what, "anomalies")
        db.append("calls", [call(0, 10), call(12, 10), call(13, 999)])
        assert [step(db, what, "anomalies") for what in both] == [1, 1]
        assert [step(db, what, "anomalies") for what in both] == [None, None]
        with db.snapshot() as snapshot:
            for what in both:
                assert [row["resp_time_us"] for row in snapshot.scan(what.anomalies)] == [999]
        with db.transaction() as tx:
            tx.delete("detectors", (both[0].place("anomalies"),))
        with pytest.raises(kivi.NotFound, match="start the detector again"):
            step(db, both[0], "anomalies")


def test_an_average_that_cannot_be_told_stops_nobody() -> None:
    """A sum that has outgrown its column, twice an average that does, moments that no calendar has."""
    most, year_us = 2**63 - 1, 31_556_952_000_000
    with kivi.open() as db:
        create(db)
        what = watched(db, "by_endpoint")
        start(db, what, "mine")
        db.append("calls", [call(0, most, 1), call(0, most, 1), call(1, 5, 1)])  # the sum before is of 65 bits
        db.append("calls", [call(0, most - 1, 2), call(1, most, 2)])  # the limit is
        db.append("calls", [{**call(0, 7), "ts": at} for at in (2**62, 10_030 * year_us, -(2**62))])
        db.append("calls", [call(0, 10), call(1, 21), call(1, 20)])
        judged = 0
        while (found := step(db, what, "mine")) is not None:
            judged += found
        with db.snapshot() as snapshot:
            assert [row["resp_time_us"] for row in snapshot.scan("calls_anomalies")] == [21]
        assert judged == 1
