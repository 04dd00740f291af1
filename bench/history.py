"""Goal 13: questions of ten days of events, kivi and DuckDB's native table side by side.

Events of five columns are loaded into both, in batches of 100,000: none late, 5 % and 50 %; kivi's are settled. Then
each question is asked of both in turn, seven times, in one process, with two threads each; what counts is the median.
No time is believed before the answers are equal.

*Spans* count events and sum a column, of a minute up to four days, and of four days of one host. *Scans* hand out two
columns of all events as Arrow, in process and over gRPC. *Sliding windows* are five minutes long, one every minute, per
endpoint, over a day, from an aggregate of minutes; DuckDB sums up minutes first, and then windows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

import kivi
from bench.context import Context
from bench.past import DAY_US, START_US, Past, moment
from bench.server import Server, disk_bytes
from bench.sheet import Figures, Ratio, Sheet
from bench.verify import WrongTotals

__all__ = ["sheet", "take"]

_EVENTS: Final = 30_000_000
_QUICK_EVENTS: Final = 500_000
_TIMES: Final = 7
_LATE: Final = {"in order": 0.0, "5 % late": 0.05, "50 % late": 0.5}
_INGESTED: Final = {"15 % late": 0.15}
"""Only loaded."""
_ASKED: Final = "5 % late"
"""Of these events everything else is asked."""
_MIDDLE_US: Final = START_US + 4 * DAY_US
_SPANS: Final = {"1 minute": DAY_US // 1440, "1 hour": DAY_US // 24, "1 day": DAY_US, "4 days": 4 * DAY_US}
_HOST: Final = "h0007"
_SELECTED: Final = (1e-6, 1e-4, 1e-2, 1e-1, 1.0)
_COLUMNS: Final = ["endpoint_id", "us"]
_TABLE: Final = "calls"
_DECLARED: Final = {"ts": "timestamp", "endpoint_id": "int64", "host": "string", "status": "int64", "us": "int64"}
_TRACED: Final = {"ts": "timestamp", "trace_id": "string", "us": "int64"}
_DUCKDB: Final = {"timestamp": "TIMESTAMPTZ", "int64": "BIGINT", "string": "VARCHAR"}
_SUMMED: Final = {"n": kivi.count(), "total": kivi.sum("us")}
_MEMORY: Final = {"query_bytes": 2 << 30, "sql_memory_bytes": 2 << 30, "sql_threads": 2, "sql_rows": 100_000_000}

Ask = Callable[[], Any]


def sheet() -> Sheet:
    ratios = []
    for span in _SPANS:
        for how in _LATE:
            short = span in ("1 minute", "1 hour")
            most = 1.5 if short else 1.0 if (span, how) == ("1 day", "in order") else 0.5
            ratios.append(_beside(f"{span}, {how}", most, enough_ms=2.0 if short and how == "in order" else 0.0))
    for asked, most in (("4 days of a host", 2.0), ("p99 by endpoint", 1.5)):
        ratios += [_beside(f"{asked}, {how}", most) for how in _LATE]
    for asked, most in (
        ("a trace id", 1.0),
        ("a trace id, SQL", 1.0),
        ("windows of a day", 0.2),
        ("p99 by endpoint, SQL", 1.5),
    ):
        ratios.append(_beside(asked, most))
    for how in _LATE:
        ratios.append(Ratio(f"two columns, {how}: kivi / DuckDB, rows/s", _quotient(f"two columns, {how}"), 0.6))
    for asked in (*_SPANS, "4 days of a host", "p99 by endpoint"):
        ratios.append(Ratio(f"{asked}: kivi, 50 % late / in order, time", _of_late(asked, "50 % late"), None, 2.0))
    ratios += [
        Ratio("two columns over gRPC, rows/s", _figure("two columns over gRPC"), 25e6),
        Ratio("rows of an aggregate, rows/s", _figure("rows of an aggregate"), 10e6),
        Ratio("bytes an event", _figure(f"bytes an event, {_ASKED}"), None, 8.0),
        Ratio("slowest selection / a plain scan, time", _slowest, None, 1.2),
    ]
    for how in (*_LATE, *_INGESTED):
        if how != "in order":
            ratios.append(Ratio(f"ingest, {how} / in order, events/s", _of_late("ingest", how), 0.9))
    return Sheet("goal13", "History: questions of ten days, beside DuckDB", ratios)


def _figure(case: str) -> Callable[[Figures], float]:
    return lambda figures: figures["kivi", case]


def _quotient(case: str) -> Callable[[Figures], float]:
    return lambda figures: figures["kivi", case] / figures["duckdb", case]


def _beside(case: str, at_most: float, enough_ms: float = 0.0) -> Ratio:
    """``enough_ms``: a time that is short enough, whatever DuckDB takes."""

    def value(figures: Figures) -> float:
        return max(0.0, figures["kivi", case] - enough_ms) and figures["kivi", case] / figures["duckdb", case]

    note = f" (0: at most {enough_ms:g} ms)" if enough_ms else ""
    return Ratio(f"{case}: kivi / DuckDB, time{note}", value, at_most=at_most)


def _of_late(case: str, how: str) -> Callable[[Figures], float]:
    return lambda figures: figures["kivi", f"{case}, {how}"] / figures["kivi", f"{case}, in order"]


def _slowest(figures: Figures) -> float:
    return max(figures["kivi", _selecting(part)] for part in _SELECTED) / figures["kivi", "a plain scan"]


def _selecting(part: float) -> str:
    return f"selecting {part:g} of all"


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    events = _QUICK_EVENTS if context.quick else min(_EVENTS, context.events)
    for how, late in (_LATE | _INGESTED).items():
        past = Past(events, late)
        with context.directory() as path:
            sheet.record("kivi", f"ingest, {how}", _loaded(path / "data", past), "events/s", events=events)
            if how in _LATE:
                _ask_of(context, sheet, path, past, how)
    with context.directory() as path:
        _trace(context, sheet, path, Past(events, 0.05))


def _loaded(data: Path, past: Past) -> float:
    """Events a second, from the first append until the last is acknowledged; then all of them are settled."""
    batches = list(past.batches())
    with kivi.open(data, settle=True) as db:
        db.create_event_table(_TABLE, event_time="ts", columns=_DECLARED)
        began = time.perf_counter()
        for batch in batches:
            db.append(_TABLE, batch)
        took = time.perf_counter() - began
        db.consolidate()
        db.store.settle()
        db.consolidate()
    return past.events / took


class _Both:
    """kivi and DuckDB, asked in turn. Without DuckDB kivi alone, and nothing is compared."""

    def __init__(self, context: Context, sheet: Sheet, duckdb: Any) -> None:
        self._sheet, self._duckdb = sheet, duckdb
        self._times = 3 if context.quick else _TIMES

    def time(self, case: str, ask: Ask, text: str | None, *, rows: int = 0) -> Any:
        """kivi's answer, and what it took: milliseconds, or of so many ``rows`` rows/s."""
        took: dict[str, list[float]] = {"kivi": [], "duckdb": []}
        asked: dict[str, Ask] = {"kivi": ask}
        if self._duckdb is not None and text is not None:
            asked["duckdb"] = lambda: self._duckdb.sql(text).to_arrow_table()
        found: dict[str, Any] = {}
        for again in range(self._times + 1):
            for system, call in asked.items():
                began = time.perf_counter()
                answer = call()
                if again:  # the first one fills caches
                    took[system].append(time.perf_counter() - began)
                found[system] = answer
        if "duckdb" in found and not rows:
            _same(case, found["kivi"], found["duckdb"])
        for system in asked:
            took_s = statistics.median(took[system])
            value, unit = (rows / took_s, "rows/s") if rows else (took_s * 1e3, "ms")
            self._sheet.record(system, case, value, unit, least_s=min(took[system]), greatest_s=max(took[system]))
        return found["kivi"]


def _same(case: str, found: pa.Table, expected: pa.Table) -> None:
    """Raises WrongTotals unless they have the same rows, in any order; floats within the accuracy of a percentile."""
    rows = [sorted(map(tuple, (row.values() for row in table.to_pylist())), key=repr) for table in (found, expected)]
    if len(rows[0]) != len(rows[1]) or not all(map(_alike, *rows)):
        raise WrongTotals(f"{case}: kivi says {rows[0][:3]}, DuckDB {rows[1][:3]}")


def _alike(row: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(
        abs(a - b) <= 0.02 * abs(b) if isinstance(a, float) or isinstance(b, float) else a == b
        for a, b in zip(row, other, strict=True)
    )


@contextmanager
def _native(context: Context, sheet: Sheet, path: Path, table: str, declared: Any, batches: Any) -> Iterator[Any]:
    """A DuckDB of the same events in its own table; None if it is not to be measured, or is not there."""
    if "duckdb" not in context.peers:
        yield None
        return
    try:
        import duckdb
    except ImportError as error:
        sheet.skip("duckdb", str(error))
        yield None
        return
    sheet.versions["duckdb"] = f"DuckDB {duckdb.__version__}, a file, in process, two threads"
    with duckdb.connect(str(path / "duckdb"), config={"threads": "2"}) as connection:
        connection.execute("set timezone = 'UTC'")
        connection.execute(f"create table {table} ({', '.join(f'{n} {_DUCKDB[t]}' for n, t in declared.items())})")
        for part in _grouped(batches):
            connection.register("part", part)
            connection.execute(f"insert into {table} select * from part")
            connection.unregister("part")
        connection.execute("checkpoint")
        yield connection


def _grouped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    waiting = list[pa.RecordBatch]()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) == 20:
            yield pa.Table.from_batches(waiting)
            waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)


# -- the questions ---------------------------------------------------------------------------------


def _ask_of(context: Context, sheet: Sheet, path: Path, past: Past, how: str) -> None:
    sheet.record("kivi", f"bytes an event, {how}", _settled_bytes(path / "data") / past.events, "bytes")
    with _native(context, sheet, path, _TABLE, _DECLARED, past.batches()) as duckdb:
        if duckdb is not None:
            sheet.record("duckdb", f"bytes an event, {how}", (path / "duckdb").stat().st_size / past.events, "bytes")
        both = _Both(context, sheet, duckdb)
        with kivi.open(path / "data", **_MEMORY) as db:
            with db.snapshot(ttl_s=3600) as snap:
                _spans(both, snap, how)
                _scanned(both, snap, past, how)
                if how == _ASKED:
                    _selected(both, snap)
            if how == _ASKED:
                _windows(both, db)
    if how == _ASKED:
        _over_grpc(context, sheet, path, past)


def _settled_bytes(data: Path) -> float:
    return float(disk_bytes(data / "events"))


def _spans(both: _Both, snap: Any, how: str) -> None:
    for name, span in _SPANS.items():
        start, end = _MIDDLE_US, _MIDDLE_US + span
        inside = f"ts >= {moment(start)} and ts < {moment(end)}"
        summed = f"select count(*), sum(us)::bigint from {_TABLE} where {inside}"
        both.time(f"{name}, {how}", _asking(snap, start=start, end=end, measures=_SUMMED), summed)
        if name == "4 days":
            ask = _asking(snap, start=start, end=end, where=kivi.col("host") == _HOST, measures=_SUMMED)
            both.time(f"{name} of a host, {how}", ask, f"{summed} and host = '{_HOST}'")
    measures = {"latency": kivi.quantiles("us")}
    p99 = _asking(
        snap,
        group_by=["endpoint_id"],
        measures=measures,
        derived={"p99": "quantile(latency, 0.99)"},
        columns=["endpoint_id", "p99"],
    )
    text = f"select endpoint_id, quantile_disc(us, 0.99)::double from {_TABLE} group by all"
    both.time(f"p99 by endpoint, {how}", p99, text)
    if how == _ASKED:
        both.time("p99 by endpoint, SQL", lambda: snap.sql(text), text)


def _asking(snap: Any, **question: Any) -> Ask:
    return lambda: snap.query(_TABLE, **question).to_arrow()


def _scanned(both: _Both, snap: Any, past: Past, how: str) -> None:
    text = f"select {', '.join(_COLUMNS)} from {_TABLE}"
    found = both.time(f"two columns, {how}", lambda: snap.to_arrow(_TABLE, columns=_COLUMNS), text, rows=past.events)
    _whole(found, past)


def _whole(found: pa.Table, past: Past) -> None:
    """Raises WrongTotals unless a scan has all events."""
    expected = [0, 0]
    for batch in past.batches():
        expected = [a + int(batch[name].to_numpy().sum()) for a, name in zip(expected, _COLUMNS, strict=True)]
    totals = [sum(int(chunk.to_numpy().sum()) for chunk in found[name].chunks) for name in _COLUMNS]
    if totals != expected or found.num_rows != past.events:
        raise WrongTotals(f"a scan has {found.num_rows:,} events with {totals}, of {past.events:,} with {expected}")


def _selected(both: _Both, snap: Any) -> None:
    """Of a column in no order, by what part of the events it selects."""
    values = np.sort(snap.to_arrow(_TABLE, columns=["us"])["us"].to_numpy())
    both.time("a plain scan", lambda: snap.to_arrow(_TABLE, columns=["us"]), f"select us from {_TABLE}", rows=0)
    for part in _SELECTED:
        least = int(values[min(len(values) - 1, int(len(values) * (1 - part)))])
        ask = _asking(snap, where=kivi.col("us") >= least, measures=_SUMMED)
        both.time(_selecting(part), ask, f"select count(*), sum(us)::bigint from {_TABLE} where us >= {least}")


def _windows(both: _Both, db: Any) -> None:
    db.create_aggregate(
        "calls_1m",
        source=_TABLE,
        group_by=["endpoint_id", kivi.time_slot("ts", "1m", name="slot")],
        measures={"n": kivi.count(), "total": kivi.sum("us")},
    )
    db.consolidate()
    start, end = _MIDDLE_US, _MIDDLE_US + DAY_US
    text = f"""
        with minutes as (
            select endpoint_id, time_bucket(interval 1 minute, ts) as slot, count(*) as n, sum(us)::bigint as total
            from {_TABLE} where ts >= {moment(start)} and ts < {moment(end)} group by all)
        select endpoint_id, slot - to_minutes(back::int) as begins, begins + interval 5 minutes,
            sum(n)::bigint, sum(total)::bigint
        from minutes, range(5) as earlier(back) group by all"""
    with db.snapshot(ttl_s=600) as snap:

        def ask() -> Any:
            return snap.windows(
                _TABLE, size="5m", slide="1m", start=start, end=end, group_by=["endpoint_id"], measures=_SUMMED
            ).to_arrow()

        both.time("windows of a day", ask, text)
        rows = snap.to_arrow("calls_1m").num_rows
        both.time("rows of an aggregate", lambda: snap.to_arrow("calls_1m"), None, rows=rows)


def _over_grpc(context: Context, sheet: Sheet, path: Path, past: Past) -> None:
    with Server(path / "data") as server, server.connect() as db:
        both = _Both(context, sheet, None)
        with db.snapshot(ttl_s=600) as snap:
            ask = lambda: snap.to_arrow(_TABLE, columns=_COLUMNS)  # noqa: E731
            _whole(both.time("two columns over gRPC", ask, None, rows=past.events), past)
            rows = snap.to_arrow("calls_1m").num_rows
            both.time("rows of an aggregate over gRPC", lambda: snap.to_arrow("calls_1m"), None, rows=rows)


def _trace(context: Context, sheet: Sheet, path: Path, past: Past) -> None:
    """An event by a column of which every value is another one."""
    with kivi.open(path / "data", settle=True, **_MEMORY) as db:
        db.create_event_table("traces", event_time="ts", columns=_TRACED)
        for batch in past.traces():
            db.append("traces", batch)
        db.consolidate()
        db.store.settle()
        wanted = past.trace_id(past.events // 2)
        text = f"select trace_id, us from traces where trace_id = '{wanted}'"
        with (
            _native(context, sheet, path, "traces", _TRACED, past.traces()) as duckdb,
            db.snapshot(ttl_s=600) as snap,
        ):
            both = _Both(context, sheet, duckdb)
            where = kivi.col("trace_id") == wanted
            found = both.time(
                "a trace id", lambda: snap.to_arrow("traces", where=where, columns=["trace_id", "us"]), text
            )
            if found.num_rows != 1:
                raise WrongTotals(f"a trace id has {found.num_rows} events")
            both.time("a trace id, SQL", lambda: snap.sql(text), text)
