"""Goal 16: patterns over ten days of events, by how rare their rarest symbol is, beside reading all, and ClickHouse.

*Rises* of an endpoint that end with a status: ``A B* C`` within a quarter of an hour, of 1,000 endpoints. The status of
``C`` is that of one event in a million, up to one in a hundred. The same pattern is asked in turn as it is, and written
so that nothing is known of its symbols beforehand (``coalesce(status, 0)``): then all events are read and matched. No
time is believed before both give the same rows.

ClickHouse has no such patterns, and questions that are some: of which endpoints a quick call is *followed* at once by
one with the status, and how often (``A C``, ``sequenceCount``); and *within* the quarter of an hour, with whatever
between (``A X*? C``, ``sequenceCount`` for how often, ``windowFunnel`` for whether). It is asked of all endpoints, and
of those that have the status (``peers.sequences``). No time is believed before both have the same endpoints, and the
same counts. Matches with more than 20 million rows together are no answer of kivi's: of 50 million events, *within*
with a status of one in a hundred is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

import kivi
from bench import environment, peers
from bench.context import Context
from bench.sequences import MOST_US, RARE, WITHIN_US, batches
from bench.sheet import Figures, Ratio, Sheet
from bench.verify import WrongTotals

__all__ = ["sheet", "take"]

_EVENTS: Final = 50_000_000
_QUICK_EVENTS: Final = 500_000
_TIMES: Final = 3
_COLUMNS: Final = {"ts": "timestamp", "endpoint_id": "int64", "host": "string", "status": "int64", "us": "int64"}
_SEQUENCES: Final = {"followed": ("A C", None), "within": ("A X*? C", WITHIN_US)}
_THEIRS: Final = {"followed": "followed", "within": "within", "funnel": "within"}
"""What ClickHouse is asked, and which of these it is."""


def sheet() -> Sheet:
    ratios = []
    for part in RARE.values():
        least = 5.0 if part <= 1e-4 else 1 / 1.2
        ratios.append(Ratio(f"{part:g}: reading all / as it is, time", _faster("rises, all", "rises", part), least))
    for name, ours in _THEIRS.items():
        for how in ("", ", of some"):
            for part in RARE.values():
                text = f"{part:g}, {name}: ClickHouse{how} / kivi, time"
                ratios.append(Ratio(text, _faster(f"{name}{how}", ours, part, "clickhouse")))
    return Sheet("goal16", "Patterns: rare symbols, beside reading all events and ClickHouse", ratios)


def _faster(slow: str, quick: str, part: float, system: str = "kivi") -> Any:
    def value(figures: Figures) -> float:
        return figures[system, f"{slow}: {part:g}"] / figures["kivi", f"{quick}: {part:g}"]

    return value


def _rises(code: int, known: bool) -> Any:
    us, status = kivi.col("us"), kivi.col("status")
    if not known:
        us, status = kivi.coalesce(us, 0), kivi.coalesce(status, 0)
    return kivi.pattern(
        "A B* C",
        partition_by=["endpoint_id"],
        within=WITHIN_US,
        define={"A": us < MOST_US, "B": kivi.col("us") > kivi.prev("us"), "C": status == code},
        measures={"began": kivi.first("A.ts"), "rises": kivi.count("B")},
    )


def _sequence(text: str, within: int | None, code: int) -> Any:
    status = kivi.col("status")
    return kivi.pattern(
        text,
        partition_by=["endpoint_id"],
        within=within,
        define={"A": (kivi.col("us") < MOST_US) & (status != code), "C": status == code},
        measures={"began": kivi.first("A.ts")},
    )


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    events = min(_QUICK_EVENTS if context.quick else _EVENTS, context.events)
    times = 1 if context.quick else _TIMES
    with context.directory() as path:
        with kivi.open(path / "data", query_bytes=4 << 30) as db:
            db.create_event_table("calls", event_time="ts", columns=_COLUMNS)
            for batch in batches(events):
                db.append("calls", batch)
            db.consolidate()
            db.store.settle()
            with db.snapshot(ttl_s=3600) as snap:
                for code, part in RARE.items():
                    asked = {f"rises: {part:g}": _rises(code, True), f"rises, all: {part:g}": _rises(code, False)}
                    one, other = _measured(snap, sheet, asked, times)
                    if not one.equals(other):
                        raise WrongTotals(f"{part:g}: what is near candidates has other matches than all events")
                found = dict[str, pa.Table]()
                for (name, sequence), (code, part) in itertools.product(_SEQUENCES.items(), RARE.items()):
                    asked = {f"{name}: {part:g}": _sequence(*sequence, code)}
                    with contextlib.suppress(kivi.ResourceExhausted):  # too many rows of matches for one question
                        found[f"{name}: {code}"] = _measured(snap, sheet, asked, times)[0]
        if "clickhouse" in context.peers:
            _compare(path / "peer", sheet, events, times, found)


def _measured(snap: Any, sheet: Sheet, asked: dict[str, Any], times: int) -> list[pa.Table]:
    """The matches of each pattern, which take turns."""
    took: dict[str, list[float]] = {case: [] for case in asked}
    found = {}
    for again in range(times + 1):
        for case, pattern in asked.items():
            began = time.perf_counter()
            found[case] = snap.match("calls", pattern)
            if again:  # the first one fills caches
                took[case].append(time.perf_counter() - began)
    for case, seconds in took.items():
        told = found[case].explain().split("\n")[1:]
        sheet.record("kivi", case, statistics.median(seconds) * 1e3, "ms", explained=told)
    return [result.to_arrow() for result in found.values()]


def _compare(path: Path, sheet: Sheet, events: int, times: int, matches: dict[str, pa.Table]) -> None:
    try:
        arguments = {"directory": str(path), "events": events, "times": times}
        found = peers.asked("sequences", arguments, environment.python())
    except (environment.CannotInstall, peers.PeerFailed) as error:
        sheet.skip("clickhouse", str(error))
        return
    sheet.versions["clickhouse"] = found.pop("about")
    for case, (seconds, rows) in found.items():
        asked, _, code = case.partition(": ")
        name = asked.partition(",")[0]
        if f"{_THEIRS[name]}: {code}" not in matches:
            continue
        counts = dict(Counter(matches[f"{_THEIRS[name]}: {code}"]["endpoint_id"].to_pylist()))
        theirs = dict(rows)
        if theirs != (dict.fromkeys(counts, 1) if name == "funnel" else counts):
            raise WrongTotals(
                f"{case}: kivi finds {len(counts):,} endpoints, ClickHouse {len(theirs):,}, or other counts"
            )
        sheet.record("clickhouse", f"{asked}: {RARE[int(code)]:g}", statistics.median(seconds) * 1e3, "ms")
