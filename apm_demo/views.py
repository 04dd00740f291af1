"""What a view of the dashboard shows: which parts of the store it is made of, and what they are put together to.

A *view* answers one ``Question``: how far the drill-down has gone, and over which range of time. Its *parts* are
queries, each of one table; the same part is a subscription when the view is live, and a scan when it is of the past.
``Composer`` makes the *state* of a view from the rows of its parts, all of one snapshot. A state is sections of named
values, so that two states differ by few of them::

    head        what is asked, the slots shown       {name: value}
    totals      of all that is shown                 {name: number}
    children    customer, application, server or id  {key: [label, count, sum, slowest, anomalies,
                                                           p50, p95, p99, apdex, errors, trace id of the slowest]}
    series      what the charts draw                 {"slot|name": [sum, count]}
    anomalies   the latest of them                   {"latest": [...]}
    llm, batch  the trace's panel; Spark's latest batch

Integers are exact: sums and counts go out as they are in the store, and the page divides. Times are microseconds.
Percentiles and Apdex are of all slots shown together: the distributions of the rows are combined.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import kivi
import kivi.aio
from apm_demo.tables import APDEX_US, LEVELS, LLM_WIDTHS, PATHS, WIDTHS, aggregate, micros, moment

__all__ = ["RANGES", "Composer", "Part", "Plan", "Question", "Range", "State", "differences", "parts", "plan", "read"]

Row = dict[str, Any]
State = dict[str, dict[str, Any]]


class Range(NamedTuple):
    """The slots of a time range: the latest so many of a width."""

    width: str
    slots: int

    @property
    def width_us(self) -> int:
        return WIDTHS[self.width]


RANGES: Final = {
    "1m": Range("5s", 12), "5m": Range("5s", 60), "1h": Range("5m", 12), "6h": Range("5m", 72), "24h": Range("1h", 24),
}  # fmt: skip
_ANOMALIES: Final = 40  # the latest that are listed
_LINES: Final = 8  # more children than these are one line in the charts, their sum
_INTERVAL_MS: Final = 200.0  # between two states of what changes most, and is largest
_SOON_MS: Final = 50.0  # of the small parts: a fraction of it, so that they are told, too, when the large one is
_AHEAD_US: Final = 600_000_000
_TOKENS: Final = (
    "requests", "context_tokens", "generated_tokens", "context_tokens_max", "generated_tokens_max", "errors",
    "longest_trace_id",
)  # fmt: skip


class Question(NamedTuple):
    """``path``: as many of customer, application and server as are chosen. ``endpoint_id`` needs all three."""

    path: tuple[str, ...] = ()
    endpoint_id: int | None = None
    range: str = "5m"

    @property
    def level(self) -> str:
        """Of what is listed."""
        return PATHS[len(self.path)] if len(self.path) < len(PATHS) else "endpoint"


class Plan(NamedTuple):
    """What a view's queries are made from, besides its question. It is made anew when time has outgrown it.

    ``since_us``: of the oldest slot asked for. ``until_us``: what is later has been sent by a clock that is wrong, and
    would end the range where nobody else is. ``ids``: the endpoints listed, at that level.
    """

    since_us: int
    until_us: int
    ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Part:
    """One query. Equal parts of different views are one subscription."""

    table: str
    prefix: tuple[str, ...] = ()
    since: tuple[str, int] | None = None  # a column with times, and the least, in microseconds
    until_us: int | None = None  # and what it is less than
    equal: tuple[tuple[str, str], ...] = ()
    ids: tuple[int, ...] | None = None
    columns: tuple[str, ...] | None = None
    order_by: str | None = None
    limit: int | None = None
    interval_ms: float = _SOON_MS

    def query(self) -> dict[str, Any]:
        """What a scan and a subscription both take."""
        terms = [kivi.col(name) == value for name, value in self.equal]
        if self.since is not None:
            terms.append(kivi.col(self.since[0]) >= moment(self.since[1]))
            if self.until_us is not None:
                terms.append(kivi.col(self.since[0]) < moment(self.until_us))
        if self.ids is not None:
            terms.append(kivi.col("endpoint_id").isin(list(self.ids)))
        where = None
        for term in terms:
            where = term if where is None else where & term
        return {"prefix": self.prefix, "where": where, "columns": self.columns}

    def subscribe(self, db: kivi.aio.Database, heartbeat_ms: float) -> Any:
        order = () if self.order_by is None else (self.order_by,)
        return db.subscribe(
            self.table, order_by=order, limit=self.limit, interval_ms=self.interval_ms, heartbeat_ms=heartbeat_ms,
            **self.query(),
        )  # fmt: skip

    async def read(self, snapshot: kivi.aio.Snapshot) -> list[Row]:
        """The rows that a subscription has at this snapshot."""
        rows = [row async for row in snapshot.scan(self.table, **self.query())]
        if self.order_by is not None:
            rows.sort(key=itemgetter(self.order_by.removeprefix("-")), reverse=self.order_by.startswith("-"))
        return rows[: self.limit]


# -- which queries -------------------------------------------------------------------------------------------


async def plan(snapshot: kivi.aio.Snapshot, question: Question) -> Plan:
    chosen = RANGES[question.range]
    names, newest = [await part.read(snapshot) for part in (_NAMES, _newest(chosen, _until_us()))]
    return planned(question, names, micros(newest[0]["slot"]) if newest else None)


def planned(question: Question, names: Iterable[Row], newest_us: int | None) -> Plan:
    """Begins up to a quarter of the range early, at a round time: views share parts, and seldom need new ones."""
    chosen = RANGES[question.range]
    since = 0
    if newest_us is not None:
        step = chosen.slots // 4 * chosen.width_us
        since = (newest_us - (chosen.slots - 1) * chosen.width_us) // step * step
    ids: tuple[int, ...] | None = None
    if question.endpoint_id is not None:
        ids = (question.endpoint_id,)
    elif question.level == "endpoint":
        ids = tuple(row["endpoint_id"] for row in names if _below(row, question.path))
    return Plan(since, _until_us(), ids)


def _below(row: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    return all(row[name] == value for name, value in zip(PATHS, path, strict=False))


_NAMES: Final = Part("endpoints")


def _until_us() -> int:
    """Ten to twenty minutes from now: clocks differ a little."""
    return (int(time.time() * 1_000_000) // _AHEAD_US + 2) * _AHEAD_US


def _newest(chosen: Range, until_us: int) -> Part:
    """The newest slot of anybody, which is where the range ends for all."""
    table = aggregate("customer", chosen.width)
    return Part(table, since=("slot", 0), until_us=until_us, columns=("slot",), order_by="-slot", limit=1)


def _llm_width(question: Question) -> str:
    """The trace is from another time and place: its panel has slots of its own."""
    width = RANGES[question.range].width
    return width if width in LLM_WIDTHS else "5m"


def parts(question: Question, plan: Plan) -> dict[str, Part]:
    chosen, level = RANGES[question.range], question.level
    numbers = ("slot", "sum_resp_time", "invocations", "slowest", "latency", "errors", "slowest_trace_id")
    since, until_us = ("slot", plan.since_us), plan.until_us
    found = {
        "names": _NAMES,
        "newest": _newest(chosen, until_us),
        "rows": Part(
            aggregate(level, chosen.width), question.path if level != "endpoint" else (), since, until_us, ids=plan.ids,
            columns=(*LEVELS[level][-1:], *numbers), interval_ms=_INTERVAL_MS,
        ),
        "counts": Part(
            "anomalies_per_endpoint", since=since, until_us=until_us, columns=("endpoint_id", "slot", "anomalies"),
        ),
        "latest": Part(
            "anomalies", since=("ts", plan.since_us), until_us=until_us,
            equal=tuple(zip(PATHS, question.path, strict=False)),
            ids=plan.ids if question.endpoint_id is not None else None, order_by="-ts", limit=_ANOMALIES,
        ),
        "llm": Part(aggregate("llm", _llm_width(question)), columns=("service", "slot", *_TOKENS)),
        "batch": Part("batches", columns=("batch_id", "events"), order_by="-batch_id", limit=1),
    }  # fmt: skip
    if level == "endpoint" and len(plan.ids or ()) > _LINES:  # their sum is in the store
        columns = ("server", *numbers)
        found["whole"] = Part(aggregate("server", chosen.width), question.path, since, until_us, columns=columns)
    return found


async def read(snapshot: kivi.aio.Snapshot, question: Question) -> State:
    """A view's state at this snapshot."""
    wanted = parts(question, await plan(snapshot, question))
    return Composer(question)({name: await part.read(snapshot) for name, part in wanted.items()})


# -- what they are put together to -------------------------------------------------------------------------


class _Sum(NamedTuple):
    rows: list[Row]
    calls: int
    total: int
    slowest: int
    latency: kivi.Quantiles | None
    errors: int
    trace_id: str | None  # of the slowest, in the earliest slot of equals


def _quantiles(latency: kivi.Quantiles | None) -> list[float | None]:
    """p50, p95, p99 and Apdex."""
    if latency is None:
        return [None] * 4
    satisfied, tolerating = (latency.fraction_below(bound) or 0.0 for bound in (APDEX_US, 4 * APDEX_US))
    return [*(latency.quantile(q) for q in (0.5, 0.95, 0.99)), (satisfied + tolerating) / 2]


class Composer:
    """Makes the states of one view. Of a thousand children only those are summed again whose rows have changed."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._range = RANGES[question.range]
        self._column = LEVELS[question.level][-1]
        self._sums: dict[Any, _Sum] = {}
        self._first_us = 0

    def __call__(self, rows: Mapping[str, list[Row]]) -> State:
        question, names = self._question, {row["endpoint_id"]: row for row in rows["names"]}
        last = micros(rows["newest"][0]["slot"]) if rows["newest"] else None
        first = 0 if last is None else last - (self._range.slots - 1) * self._range.width_us
        self._sum(rows["rows"], first)
        anomalies = self._anomalies(rows["counts"], names, first)
        children = {}
        for child, summed in self._sums.items():
            if summed.calls:
                label = names[child]["name"] if child in names else str(child)
                numbers = (summed.calls, summed.total, summed.slowest)
                others = (*_quantiles(summed.latency), summed.errors, summed.trace_id)
                children[str(child)] = [label, *numbers, anomalies.get(child, 0), *others]
        latency = kivi.Quantiles.combined(s.latency for s in self._sums.values() if s.calls and s.latency is not None)
        p50, p95, p99, apdex = _quantiles(latency)
        slowest = max((s for s in self._sums.values() if s.calls), key=attrgetter("slowest"), default=None)
        return {
            "head": {
                "path": list(question.path), "level": question.level, "range": question.range,
                "width": self._range.width, "width_us": self._range.width_us, "slots": self._range.slots, "last": last,
                "apdex_us": APDEX_US,
                "endpoint": None if question.endpoint_id is None else {
                    "id": question.endpoint_id, "name": names.get(question.endpoint_id, {}).get("name", "")
                },
            },
            "totals": {
                "count": sum(c[1] for c in children.values()),
                "sum": sum(c[2] for c in children.values()),
                "slowest": 0 if slowest is None else slowest.slowest,
                "slowest_trace_id": None if slowest is None else slowest.trace_id,
                "errors": sum(s.errors for s in self._sums.values()),
                "anomalies": sum(anomalies.values()),
                "p50": p50,
                "p95": p95,
                "p99": p99,
                "apdex": apdex,
            },
            "children": children,
            "series": self._series(rows, first, len(children)),
            "anomalies": {"latest": [_anomaly(row, names) for row in rows["latest"] if micros(row["ts"]) >= first]},
            "llm": _llm(_llm_width(question), rows["llm"]),
            "batch": rows["batch"][0] if rows["batch"] else {},
        }  # fmt: skip

    def _sum(self, rows: list[Row], first: int) -> None:
        known = self._sums if first == self._first_us else {}
        self._first_us, oldest = first, moment(first)
        self._sums = {}
        for child, found in itertools.groupby(rows, itemgetter(self._column)):
            own = list(found)
            before = known.get(child)
            if before is not None and before.rows == own:  # rows that did not change are the same objects: cheap
                self._sums[child] = before
                continue
            shown = [row for row in own if row["slot"] >= oldest]
            slowest = max(shown, key=itemgetter("slowest"), default=None)
            self._sums[child] = _Sum(
                own,
                sum(row["invocations"] for row in shown),
                sum(row["sum_resp_time"] for row in shown),
                0 if slowest is None else slowest["slowest"],
                kivi.Quantiles.combined(row["latency"] for row in shown),
                sum(row["errors"] for row in shown),
                None if slowest is None else slowest["slowest_trace_id"],
            )

    def _anomalies(self, counts: list[Row], names: Mapping[int, Row], first: int) -> dict[Any, int]:
        """Child -> how many."""
        found: dict[Any, int] = {}
        question, oldest = self._question, moment(first)
        for row in counts:
            endpoint, place = row["endpoint_id"], names.get(row["endpoint_id"])
            if row["slot"] < oldest or place is None or not _below(place, question.path):
                continue
            if question.endpoint_id in (None, endpoint):
                child = endpoint if question.level == "endpoint" else place[question.level]
                found[child] = found.get(child, 0) + row["anomalies"]
        return found

    def _series(self, rows: Mapping[str, list[Row]], first: int, children: int) -> dict[str, list[int]]:
        single = children <= _LINES
        found: dict[str, list[int]] = {}
        oldest = moment(first)
        for row in rows["rows"] if single or "whole" not in rows else rows["whole"]:
            if row["slot"] >= oldest:
                point = found.setdefault(f"{micros(row['slot'])}|{row[self._column] if single else ''}", [0, 0])
                point[0] += row["sum_resp_time"]
                point[1] += row["invocations"]
        return found


def _anomaly(row: Row, names: Mapping[int, Row]) -> Row:
    kept = (*PATHS, "endpoint_id", "resp_time_us", "previous_sum_us", "previous_count")
    return {
        **{name: row[name] for name in kept},
        "ts_us": micros(row["ts"]),
        "endpoint": names.get(row["endpoint_id"], {}).get("name", ""),
    }


def _llm(width: str, rows: Sequence[Row]) -> dict[str, Any]:
    services: dict[str, list[list[int]]] = {}
    for row in rows:
        services.setdefault(row["service"], []).append([micros(row["slot"]), *(row[name] for name in _TOKENS)])
    return {"width": width, "width_us": LLM_WIDTHS[width], "services": services}


def differences(before: State, after: State) -> dict[str, Any]:
    """What a page that shows ``before`` lacks: {"set": {section: {name: value}}, "gone": {section: [names]}}."""
    new: dict[str, dict[str, Any]] = {}
    gone: dict[str, list[str]] = {}
    for section, now in after.items():
        was = before[section]
        if changed := {name: value for name, value in now.items() if name not in was or was[name] != value}:
            new[section] = changed
        if lost := [name for name in was if name not in now]:
            gone[section] = lost
    return {"set": new, "gone": gone}
