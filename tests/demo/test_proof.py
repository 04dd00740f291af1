"""The proof goes green on what is right and red on each thing that can be wrong: one that cannot fail proves nothing.

The store is real (embedded); what a Spark batch does is done here by hand, since only its result matters.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from apm_demo import trace
from apm_demo.landing import land
from apm_demo.proof import (
    Finding,
    Invocation,
    differences,
    expected_anomalies,
    invocations,
    off_percentiles,
    off_traces,
    prove_live,
    prove_trace,
    raw_values,
)
from apm_demo.tables import WIDTHS, create, create_rules

SLOT = WIDTHS["5s"]
PLACE = ("acme", "search", "search-1", 255)
# Two files: the second slot has one event that is slower than twice the first one's average of 15 ms, and one not.
FILES = [
    [Invocation(*PLACE, 1 * SLOT + 10, 10_000, 200, "a"), Invocation(*PLACE, 1 * SLOT + 20, 20_000, 503, "b")],
    [Invocation(*PLACE, 2 * SLOT + 30, 121_000, 499, "c"), Invocation(*PLACE, 2 * SLOT + 40, 30_000, 500, "d")],
]


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Any]:
    with kivi.open(tmp_path / "store") as opened:
        create(opened)
        yield opened


def row(event: Invocation) -> dict[str, Any]:
    fields = event._asdict()
    ts_us = fields.pop("ts_us")
    return {**fields, "ts": ts_us}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    where = tmp_path / "landing"
    where.mkdir()
    for n, events in enumerate(FILES):
        land(where, f"part-{n}.jsonl", (json.dumps(event._asdict()) for event in events))
    return where


def bring(db: Any, judged: bool = True) -> None:
    """What the live job does, a file a batch."""
    if judged:
        create_rules(db)
    for batch_id, events in enumerate(FILES):
        with db.transaction() as tx:
            tx.append("invocations", [row(event) for event in events])
            tx.put("batches", (batch_id,), files=f"part-{batch_id}.jsonl", events=len(events))


def wrong(findings: list[Finding]) -> str:
    return "\n".join(sentence for finding in findings for sentence in finding.wrong)


def test_what_is_right_is_proved(db: Any, folder: Path) -> None:
    bring(db)
    with db.snapshot() as snapshot:
        findings = prove_live(snapshot, folder, answered=4, failed=2)
    assert wrong(findings) == ""
    assert len(findings) == 7


def one_more_event(db: Any, folder: Path) -> None:
    db.append("invocations", [row(Invocation(*PLACE, 7 * SLOT, 5, 200, "e"))])


def one_event_less(db: Any, folder: Path) -> None:
    land(folder, "part-9.jsonl", [json.dumps(Invocation(*PLACE, 7 * SLOT, 5, 200, "e")._asdict())])


def a_microsecond_more(db: Any, folder: Path) -> None:
    respell(folder, FILES[0][0]._replace(duration_us=10_001), FILES[0][1])


def another_error(db: Any, folder: Path) -> None:
    respell(folder, FILES[0][0]._replace(status=500), FILES[0][1])


def another_trace(db: Any, folder: Path) -> None:
    respell(folder, FILES[0][0], FILES[0][1]._replace(trace_id="x"))


def respell(folder: Path, *events: Invocation) -> None:
    land(folder, "part-0.jsonl", (json.dumps(event._asdict()) for event in events))


def an_anomaly_twice(db: Any, folder: Path) -> None:
    with db.snapshot() as snapshot:
        stored = list(snapshot.scan("anomalies"))
    db.append("anomalies", stored)


def a_file_in_two_batches(db: Any, folder: Path) -> None:
    with db.transaction() as tx:
        tx.put("batches", (2,), files="part-0.jsonl", events=2)


def a_batch_that_miscounts(db: Any, folder: Path) -> None:
    with db.transaction() as tx:
        tx.put("batches", (0,), events=3)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (one_more_event, "endpoint_5s"),
        (one_event_less, "customer_1h"),
        (a_microsecond_more, "server_5m"),
        (another_error, "application_5s"),
        (another_trace, "the trace id is x in the files, b in the store"),
        (an_anomaly_twice, "anomaly"),
        (a_file_in_two_batches, "file part-0.jsonl"),
        (a_batch_that_miscounts, "events of batch"),
    ],
)
def test_a_planted_error_is_found(db: Any, folder: Path, spoil: Callable[[Any, Path], None], says: str) -> None:
    bring(db)
    spoil(db, folder)
    with db.snapshot() as snapshot:
        findings = prove_live(snapshot, folder, answered=4, failed=2)
    assert says in wrong(findings)


def test_a_missed_anomaly_is_found(db: Any, folder: Path) -> None:
    bring(db, judged=False)
    with db.snapshot() as snapshot:
        assert "anomaly" in wrong(prove_live(snapshot, folder, answered=4, failed=2))


def test_an_event_that_never_landed_is_found(db: Any, folder: Path) -> None:
    bring(db)
    with db.snapshot() as snapshot:
        assert "numbers differ" in wrong(prove_live(snapshot, folder, answered=5, failed=2))
        assert "numbers differ" in wrong(prove_live(snapshot, folder, answered=4, failed=1))


def test_nothing_at_all_is_not_a_proof(db: Any, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with db.snapshot() as snapshot:
        assert "are 0" in wrong(prove_live(snapshot, empty, answered=0, failed=0))


def requests() -> list[dict[str, Any]]:
    found = [request._asdict() for request in trace.requests()]
    return [{"ts": request.pop("ts_us"), **request} for request in found]


def append_trace(db: Any, events: list[dict[str, Any]]) -> list[Finding]:
    db.append("llm_requests", events)
    with db.snapshot() as snapshot:
        return prove_trace(snapshot)


@pytest.mark.story
def test_the_trace_is_proved(db: Any) -> None:
    assert wrong(append_trace(db, requests())) == ""


def test_percentiles_that_no_raw_value_supports_are_found() -> None:
    raw = raw_values([("a", 30), ("a", 10), ("a", 20), ("b", 7)])
    assert raw == {"a": [10, 20, 30], "b": [7]}
    right = {"a": {"p50": 20.1, "p95": 30.0, "p99": 29.8}, "b": dict.fromkeys(("p50", "p95", "p99"), 7.0)}
    assert off_percentiles("t", raw, right) == []
    right["a"]["p95"] = 29.6
    (said,) = off_percentiles("t", raw, right)
    assert said == "t a: the sorted values say p95 30, the store 29.6"
    del right["b"]
    assert len(off_percentiles("t", raw, right)) == 2


def test_a_trace_id_of_another_call_is_found() -> None:
    raw = {"a": [(5, 30, "late"), (5, 10, "early"), (5, 10, "as early"), (4, 1, "quick")], "b": [(1, 1, "b")]}
    for right in ("early", "as early"):
        assert off_traces("t", raw, {"a": right, "b": "b"}) == []
    (said,) = off_traces("t", raw, {"a": "late", "b": "b"})
    assert said == "t a: the trace id is as early or early in the files, late in the store"
    assert len(off_traces("t", raw, {"a": "quick", "c": "b"})) == 3


def test_a_request_that_failed_after_all_and_one_of_another_trace_are_found(db: Any) -> None:
    events = requests()
    spared = next(event for event in events if event["status"] == 503)
    spared["status"] = 200
    longest = max(events, key=lambda event: event["generated_tokens"])
    longest["trace_id"] = "x"
    said = wrong(append_trace(db, events))
    assert "llm_5m" in said
    assert "llm_1h" in said
    assert "x in the store" in said


def test_a_request_twice_is_found(db: Any) -> None:
    events = requests()
    said = wrong(append_trace(db, [*events, events[100]]))
    assert "llm_requests" in said
    assert "llm_5m" in said
    assert "llm_1h" in said


def test_a_batch_that_was_lost_is_found(db: Any) -> None:
    assert "llm_5m" in wrong(append_trace(db, requests()[:-1_000]))


def test_the_order_of_batches_decides_what_is_known() -> None:
    """In a batch before the slot's average is known nothing is an anomaly; within one batch all of it is known."""
    (first, second), late = FILES[0], FILES[1]
    assert expected_anomalies({0: late, 1: [first, second]}, SLOT) == Counter()
    together = expected_anomalies({0: [*late, first, second]}, SLOT)
    assert together == Counter({(*late[0], 30_000, 2): 1})


def test_only_the_first_differences_are_told_in_full() -> None:
    said = differences("row", dict.fromkeys(range(10), 1), {})
    assert len(said) == 4
    assert "and 7 more" in said[-1]


def test_files_are_read_line_by_line(folder: Path) -> None:
    assert list(invocations(folder).values()) == FILES
