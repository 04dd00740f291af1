"""The proof: everything the store says, against a recount of the files that landed.

The recount knows nothing of Spark, of Arrow or of kivi's aggregates: it reads the files line by line and adds up whole
numbers in dictionaries. The store is read at **one** snapshot, so the event tables, all levels, all widths and the
anomalies have to agree with the files and so with each other.

Anomalies depend on when a batch was committed: an event is measured against what was known of the previous slot then.
The recount therefore walks the batches in order, adds up what each brought, and applies the rule to it as the sentence
says it, ``time * count > 2 * sum``. Which files a batch held is what the batch itself wrote down, in the same
transaction; that every file is in exactly one batch is checked too.

Percentiles are compared with the sorted raw values: of n, the one at rank ceil(q * n), within what the tables state.
Apdex counts the values below two bounds, each of which may be off by as much. Errors are counted three times: by who
called, in the files and in the store. The trace id of a row's slowest call is that of its largest raw value.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from apm_demo import trace
from apm_demo.landing import landed
from apm_demo.tables import ACCURACY, APDEX_US, FACTOR, FAILED, LEVELS, LLM_WIDTHS, WIDTHS, aggregate, micros

__all__ = [
    "Finding",
    "Invocation",
    "differences",
    "expected_anomalies",
    "invocations",
    "off_percentiles",
    "off_traces",
    "prove_live",
    "prove_trace",
    "raw_values",
]

_SHOWN: Final = 3  # differences told in full
_PERCENTILES: Final = {"p50": 50, "p95": 95, "p99": 99}


class Finding(NamedTuple):
    """One thing that was checked: a sentence, and what is wrong with it. Proved if nothing is."""

    text: str
    wrong: list[str]


class Invocation(NamedTuple):
    """One line of a landed file."""

    customer: str
    application: str
    server: str
    endpoint_id: int
    ts_us: int
    duration_us: int
    status: int
    trace_id: str


def invocations(folder: Path) -> dict[str, list[Invocation]]:
    """File name -> the events in it."""
    return {
        path.name: [Invocation(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in landed(folder)
    }


def expected_anomalies(batches: Mapping[int, list[Invocation]], width_us: int) -> Counter[tuple[Any, ...]]:
    """(the event, sum and count of its previous slot) for each anomaly; batches in the order of their ids."""
    sums: Counter[tuple[int, int]] = Counter()
    counts: Counter[tuple[int, int]] = Counter()
    found: Counter[tuple[Any, ...]] = Counter()
    for _, events in sorted(batches.items()):
        for event in events:
            slot = (event.endpoint_id, event.ts_us // width_us)
            sums[slot] += event.duration_us
            counts[slot] += 1
        for event in events:
            before = (event.endpoint_id, event.ts_us // width_us - 1)
            if event.duration_us * counts[before] > FACTOR * sums[before] and counts[before]:
                found[(*event, sums[before], counts[before])] += 1
    return found


def differences(name: str, expected: Mapping[Any, Hashable], found: Mapping[Any, Hashable]) -> list[str]:
    """Sentences about the keys whose values differ, the first few in full."""
    wrong = [key for key in sorted({*expected, *found}, key=repr) if expected.get(key) != found.get(key)]
    told = [f"{name} {key}: the files say {expected.get(key)}, the store {found.get(key)}" for key in wrong[:_SHOWN]]
    return told + ([f"{name}: and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else [])


def prove_live(snapshot: Any, folder: Path, answered: int, failed: int) -> list[Finding]:
    """The live traffic; ``answered`` is how many calls the client saw answered, ``failed`` of them with an error."""
    by_file = invocations(folder)
    events = [event for part in by_file.values() for event in part]
    errors = _errors(events)
    return [
        Finding(
            f"{answered:,} calls were answered over HTTP, {failed:,} of them with an error, and {len(events):,} events "
            f"landed in {len(by_file)} files, {errors:,} of them errors",
            [] if (answered, failed) == (len(events), errors) and events else ["these numbers differ, or are 0"],
        ),
        _events_are(snapshot, events),
        *_aggregates_are(snapshot, events),
        *_anomalies_are(snapshot, by_file),
    ]


def _errors(events: Iterable[Invocation | trace.Request]) -> int:
    return sum(event.status >= FAILED for event in events)


def _events_are(snapshot: Any, events: list[Invocation]) -> Finding:
    stored = snapshot.to_arrow("invocations").to_pylist()
    found = Counter(_invocation(row) for row in stored)
    return Finding(
        f"invocations holds each of them once: {len(stored):,} events",
        differences("invocations", Counter(events), found),
    )


def _aggregates_are(snapshot: Any, events: list[Invocation]) -> list[Finding]:
    sums: list[str] = []
    off: list[str] = []
    slow: list[str] = []
    checked = 0
    for level, columns in LEVELS.items():
        for width, width_us in WIDTHS.items():
            name = aggregate(level, width)
            raw: dict[tuple[Any, ...], list[Invocation]] = {}
            for event in events:
                key = (*(getattr(event, column) for column in columns), event.ts_us // width_us * width_us)
                raw.setdefault(key, []).append(event)
            rows = {
                (*(row[column] for column in columns), micros(row["slot"])): row for row in snapshot.scan(name)
            }  # fmt: skip
            sums += differences(
                name, {key: _sums(of) for key, of in raw.items()},
                {key: tuple(row[column] for column in _SUMS) for key, row in rows.items()},
            )  # fmt: skip
            times = {key: sorted(event.duration_us for event in of) for key, of in raw.items()}
            percentiles = {key: {p: row[f"{p}_us"] for p in _PERCENTILES} for key, row in rows.items()}
            off += off_percentiles(name, times, percentiles)
            off += [
                f"{name} {key}: an Apdex of {row['apdex']}, which the sorted values do not say"
                for key, row in rows.items()
                if not _is_apdex(row["apdex"], times.get(key, []))
            ][:_SHOWN]
            slow += off_traces(
                name,
                {key: [(e.duration_us, e.ts_us, e.trace_id) for e in of] for key, of in raw.items()},
                {key: row["slowest_trace_id"] for key, row in rows.items()},
            )
            checked += len(rows)
    return [
        Finding(
            f"{len(LEVELS) * len(WIDTHS)} aggregates (customer, application, server, endpoint; 5 s, 5 min, 1 h), "
            f"{checked:,} rows: sum, count, maximum, errors and error rate equal the recount",
            sums,
        ),
        Finding(
            f"p50, p95 and p99 of {checked:,} rows: within {ACCURACY:.0%} of the value at that rank of the sorted "
            f"times; Apdex of {APDEX_US // 1_000} ms as they say",
            off,
        ),
        Finding(f"the slowest trace id of {checked:,} rows: that of the slowest call in the files", slow),
    ]


_SUMS: Final = ("sum_resp_time", "calls", "slowest_us", "errors", "error_rate")


def _sums(events: list[Invocation]) -> tuple[float, ...]:
    """What an aggregate's row has in ``_SUMS``."""
    times = [event.duration_us for event in events]
    errors = _errors(events)
    return sum(times), len(times), max(times), errors, errors / len(times)


def raw_values(events: Iterable[tuple[Any, int]]) -> dict[Any, list[int]]:
    """Key -> the values of its events, sorted; events are pairs of both."""
    found: dict[Any, list[int]] = {}
    for key, value in events:
        found.setdefault(key, []).append(value)
    return {key: sorted(values) for key, values in found.items()}


def off_percentiles(name: str, raw: Mapping[Any, list[int]], found: Mapping[Any, Mapping[str, float]]) -> list[str]:
    """Sentences about percentiles that are not the value at their rank; ``found`` has p50, p95 and p99 of each key."""
    wrong = [f"{name} {key}: it has values, and no percentiles" for key in raw.keys() - found.keys()]
    for key, row in found.items():
        values = raw.get(key, [])
        for percentile, percent in _PERCENTILES.items():
            nearest = values[-(-percent * len(values) // 100) - 1] if values else None
            if nearest is None or abs(row[percentile] - nearest) > ACCURACY * nearest:
                wrong.append(f"{name} {key}: the sorted values say {percentile} {nearest}, the store {row[percentile]}")
    return _first(name, wrong)


def off_traces(name: str, raw: Mapping[Any, list[tuple[int, int, str]]], found: Mapping[Any, str | None]) -> list[str]:
    """Sentences about trace ids that are not those of the largest value, of equals the earliest.

    ``raw`` has (value, time in microseconds, trace id) of each event. Events that are equal in value and time come in
    the order of their commits, which the files do not say: the trace id of any of them is right.
    """
    wrong = []
    for key in sorted({*raw, *found}, key=repr):
        events = raw.get(key, [])
        best = max(((value, -ts_us) for value, ts_us, _ in events), default=None)
        right = sorted(trace_id for value, ts_us, trace_id in events if (value, -ts_us) == best)
        if found.get(key) not in right:
            wrong.append(
                f"{name} {key}: the trace id is {' or '.join(right)} in the files, {found.get(key)} in the store"
            )
    return _first(name, wrong)


def _first(name: str, wrong: list[str]) -> list[str]:
    return [*wrong[:_SHOWN], *([f"{name}: and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else [])]


def _is_apdex(apdex: float, values: list[int]) -> bool:
    if not values:
        return False
    low, high = (
        sum(sum(v < bound * (1 + off) for v in values) / len(values) for bound in (APDEX_US, 4 * APDEX_US)) / 2
        for off in (-ACCURACY, ACCURACY)
    )
    return low <= apdex <= high or math.isclose(apdex, low) or math.isclose(apdex, high)


def _anomalies_are(snapshot: Any, by_file: Mapping[str, list[Invocation]]) -> list[Finding]:
    held = {row["batch_id"]: row for row in snapshot.scan("batches")}
    files = {batch_id: [name for name in row["files"].split(",") if name] for batch_id, row in held.items()}
    wrong = differences("file", dict.fromkeys(by_file, 1), Counter(name for names in files.values() for name in names))
    batches = {batch_id: [e for name in names for e in by_file.get(name, [])] for batch_id, names in files.items()}
    wrong += differences(
        "events of batch", {b: len(e) for b, e in batches.items()}, {b: r["events"] for b, r in held.items()}
    )
    expected = expected_anomalies(batches, WIDTHS["5s"])
    rows = snapshot.to_arrow("anomalies").to_pylist()
    found = Counter((*_invocation(row), row["previous_sum_us"], row["previous_count"]) for row in rows)
    counted = sum(row["anomalies"] for row in snapshot.scan("anomalies_per_endpoint"))
    return [
        Finding(f"Spark brought the files in {len(held)} batches, every file in exactly one", wrong),
        Finding(
            f"{len(rows):,} anomalies, exactly those that the rule finds when the batches are gone through again",
            differences("anomaly", expected, found)
            + ([] if counted == len(rows) else [f"anomalies_per_endpoint counts {counted}"]),
        ),
    ]


def prove_trace(snapshot: Any) -> list[Finding]:
    """The real trace, recounted from the files as they came, in whole microseconds."""
    events = trace.requests()
    stored = snapshot.to_arrow("llm_requests").to_pylist()
    found = Counter(trace.Request._make(_field(row, name) for name in trace.Request._fields) for row in stored)
    wrong: list[str] = []
    off: list[str] = []
    longest: list[str] = []
    checked = 0
    for width, width_us in LLM_WIDTHS.items():
        name = aggregate("llm", width)
        rows = {(row["service"], micros(row["slot"])): row for row in snapshot.scan(name)}
        expected = trace.recount(events, width_us)
        wrong += differences(
            name,
            {key: (*row, row.errors / row.requests) for key, row in expected.items()},
            {key: tuple(row[column] for column in (*trace.Row._fields, "error_rate")) for key, row in rows.items()},
        )
        checked += len(rows)
        slots = [((e.service, e.ts_us // width_us * width_us), e) for e in events]
        for tokens in ("context", "generated"):
            off += off_percentiles(
                f"{name}, {tokens}",
                raw_values((key, getattr(e, f"{tokens}_tokens")) for key, e in slots),
                {key: {p: row[f"{tokens}_{p}"] for p in _PERCENTILES} for key, row in rows.items()},
            )
        generated: dict[Any, list[tuple[int, int, str]]] = {}
        for key, e in slots:
            generated.setdefault(key, []).append((e.generated_tokens, e.ts_us, e.trace_id))
        longest += off_traces(name, generated, {key: row["longest_trace_id"] for key, row in rows.items()})
    context, answers = sum(e.context_tokens for e in events), sum(e.generated_tokens for e in events)
    return [
        Finding(
            f"llm_requests holds each of the {len(events):,} requests of the real trace once",
            differences("llm_requests", Counter(events), found),
        ),
        Finding(
            f"2 aggregates (service; 5 min, 1 h), {checked} rows: counts, sums, maxima and error rates equal those of "
            f"the files, {context:,} context and {answers:,} generated tokens and {_errors(events):,} errors in all",
            wrong,
        ),
        Finding(
            f"p50, p95 and p99 of the tokens, {2 * checked} times: within {ACCURACY:.0%} of the value at that rank of "
            "the sorted counts",
            off,
        ),
        Finding(
            f"the trace id of the longest answer, {checked} times: that of the largest count in the files", longest
        ),
    ]


def _invocation(row: Mapping[str, Any]) -> Invocation:
    return Invocation._make(_field(row, name) for name in Invocation._fields)


def _field(row: Mapping[str, Any], name: str) -> Any:
    return micros(row["ts"]) if name == "ts_us" else row[name]
