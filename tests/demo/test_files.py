"""Landing and the real trace: nothing half written is ever seen, and no line is lost or changed on the way."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from apm_demo import trace
from apm_demo.landing import land, landed


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    def lines() -> Iterator[str]:
        yield "one"
        assert landed(tmp_path) == []
        yield "two"

    path = land(tmp_path, "part-0.jsonl", lines())
    assert landed(tmp_path) == [path]
    assert path.read_text() == "one\ntwo\n"


def test_a_writer_that_fails_lands_nothing(tmp_path: Path) -> None:
    def lines() -> Iterator[str]:
        yield "one"
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        land(tmp_path, "part-0.jsonl", lines())
    assert landed(tmp_path) == []


def test_times_are_cut_to_microseconds() -> None:
    moment = dt.datetime(2023, 11, 16, 18, 17, 3, 979960, tzinfo=dt.UTC)
    expected = (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)
    assert trace.timestamp_us("2023-11-16 18:17:03.9799600") == expected
    assert trace.timestamp_us("2023-11-16 18:17:03.9799609") == expected  # cut off, not rounded
    assert trace.timestamp_us("2023-11-16 18:17:03") == expected - 979_960
    assert trace.timestamp_us("2023-11-16 18:17:03.5") == expected - 979_960 + 500_000


def test_the_trace_is_all_there() -> None:
    requests = trace.requests()
    by_service = {service: [r for r in requests if r.service == service] for service in trace.SERVICES}
    assert {service: len(found) for service, found in by_service.items()} == {"code": 8_819, "conv": 19_366}
    first = by_service["code"][0]
    assert (first.context_tokens, first.generated_tokens) == (4808, 10)
    assert len({r.trace_id for r in requests}) == len(requests)
    assert Counter(r.status for r in requests) == {200: 27_895, 503: 290}


def test_the_trace_comes_with_its_attribution() -> None:
    text = files("apm_demo").joinpath("data", "README.md").read_text(encoding="utf-8")
    for needed in ("Creative Commons Attribution 4.0", "Azure Public Dataset", "Splitwise", "ISCA 2024"):
        assert needed in text


@pytest.mark.parametrize("pieces", [1, 7, 15])
def test_landing_the_trace_keeps_every_line(tmp_path: Path, pieces: int) -> None:
    total = trace.land_trace(tmp_path, pieces)
    lines = [line.split(",") for path in landed(tmp_path) for line in path.read_text().splitlines()]
    assert len(landed(tmp_path)) == pieces
    assert len(lines) == total == 28_185
    slots = [len({line.split(",")[1][:16] for line in path.read_text().splitlines()}) for path in landed(tmp_path)]
    assert min(slots) > 50, "a file holds requests of nearly every minute: they come out of order"
    again = tmp_path / "again"
    again.mkdir()
    trace.land_trace(again, pieces)
    assert [path.read_bytes() for path in landed(again)] == [path.read_bytes() for path in landed(tmp_path)]
    found = [
        trace.Request(service, trace.timestamp_us(ts), int(c), int(g), int(status), trace_id)
        for service, ts, c, g, status, trace_id in lines
    ]
    assert sorted(found) == sorted(trace.requests())


def test_a_recount_by_hand() -> None:
    minute = 60_000_000
    events = [
        trace.Request("a", 10, 5, 1, 200, ""),
        trace.Request("a", minute - 1, 7, 2, 500, ""),
        trace.Request("a", minute, 1, 9, 503, ""),
        trace.Request("b", 3, 4, 4, 499, ""),
    ]
    assert trace.recount(events, minute) == {
        ("a", 0): trace.Row(2, 12, 3, 7, 2, 1),
        ("a", minute): trace.Row(1, 1, 9, 1, 9, 1),
        ("b", 0): trace.Row(1, 4, 4, 4, 4, 0),
    }
