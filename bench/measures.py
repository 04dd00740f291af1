"""Goal 10: what percentiles and distinct counts cost, beside those who compute them too.

*Ingest*: the append stream, wide, with a sum and a count alone (*sums*), and with quantiles within 1 % and distinct
counts within 1 % as well (*measures*), in turn; until everything is folded into base rows, for base rows are where
states cost most. The distinct values are those of the response times, nearly all of which differ: the dear case.
Response times are log-normal (sigma 1). ClickHouse keeps states of the same accuracy, by a materialized view into an
AggregatingMergeTree; DuckDB has none, and computes the rows that a batch touches again from their events. How quick it
would be with the events of the batch alone, which gives no answer, is shown beside it.

*Reading*: the last 12 slots of endpoints of about 1,000 events a slot: their p99, and their sums alone. ClickHouse
reads its states after ``OPTIMIZE ... FINAL``; PostgreSQL computes ``percentile_disc`` from the raw rows, with an
index on (endpoint, time). One caller, one answer after the other. ClickHouse answers in this process, and PostgreSQL
over a connection, so kivi is measured both ways, and each is compared with its like.

*Rolling up*: the p99 of 100 endpoints x 288 slots of five minutes, of 1,000 events each, in one hour's slots, for each
endpoint.

*On disk*: what a row of 1,000 events takes more with one more measure, at rest (as goal 8 measures sizes).

Before a figure is believed, every row's p99 is compared with the value at that rank among the sorted response times
(within 1 %), and the distinct counts with the exact ones (their sum within 1 %).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import kivi
from bench import tables
from bench.context import Context
from bench.data import SLOT_US, SLOTS, START_US, Pool, make
from bench.peers import postgres
from bench.sheet import Figures, Ratio, Sheet, best
from bench.sizing import kept_bytes
from bench.streaming import in_flight, stream
from bench.verify import WrongTotals

__all__ = ["check", "sheet", "take"]

BATCHES: Final = (10_000, 100_000)
_QUANTILES: Final = {"latency": kivi.quantiles("resp_time_us", accuracy=0.01)}
_DISTINCT: Final = {"different": kivi.distinct("resp_time_us", error=0.01)}
MEASURES: Final = {**_QUANTILES, **_DISTINCT}
P99: Final = {"p99": "quantile(latency, 0.99)"}
_ERROR: Final = 0.01
_TURNS: Final = 3
_CLICKHOUSE: Final = ("DD", "TDigest")
_SUMS: Final = "endpoint_5m_sums"
_PLACES: Final = (30, 10)  # of the ten endpoints that are read: they have 1,000 events a slot where there are 4 million
_READS: Final = 20
_DAY: Final = (100, 288)  # endpoints, slots
_EVENTS_A_ROW: Final = 1_000


def sheet() -> Sheet:
    ratios = []
    for rows in BATCHES:
        kivis = _of("kivi", f"ingest, measures, {rows:,}")
        clickhouse = [f"ingest, quantiles{kind}, {rows:,}" for kind in _CLICKHOUSE]
        ratios += [
            Ratio(
                f"batches of {rows:,}: sums / measures, kivi's ingest",
                _quotient(_of("kivi", f"ingest, sums, {rows:,}"), kivis),
                at_most=2.5,
            ),
            Ratio(
                f"batches of {rows:,}: kivi / clickhouse, the quicker states, ingest",
                _quotient(kivis, lambda figures, cases=clickhouse: best(figures, "clickhouse", *cases)),  # type: ignore[misc]
                at_least=2.0,
            ),
            Ratio(
                f"batches of {rows:,}: kivi / duckdb, rows computed again, ingest",
                _quotient(kivis, _of("duckdb", f"ingest, rows, {rows:,}")),
                at_least=1.0,
            ),
        ]
    reads = _of("kivi", "p99 of 12 slots")
    ratios += [
        Ratio(
            "12 slots: p99 / sums, the time of kivi's read",
            _quotient(_of("kivi", "sums of 12 slots"), reads),
            at_most=2.0,
        ),
        Ratio(
            "12 slots: p99, kivi in process / clickhouse in process, states of 1 % accuracy",
            _quotient(_of("kivi", "p99 of 12 slots, in process"), _of("clickhouse", _read_case("DD"))),
            at_least=10.0,
        ),
        Ratio(
            "12 slots: p99, kivi in process / clickhouse in process, the quicker states",
            _quotient(
                _of("kivi", "p99 of 12 slots, in process"),
                lambda figures: best(figures, "clickhouse", *map(_read_case, _CLICKHOUSE)),
            ),
            at_least=10.0,
        ),
        Ratio(
            "12 slots: p99, kivi / postgres, raw rows",
            _quotient(reads, _of("postgres", "p99 of 12 slots")),
            at_least=10.0,
        ),
        Ratio("rollup of 100 endpoints x 288 slots, ms", _of("kivi", "rollup, 100 x 288"), at_most=500.0),
        Ratio("a row's quantiles at 1 %, bytes on disk", _of("kivi", "a row's quantiles"), at_most=1_500.0),
        Ratio("a row's distinct count at 1 %, bytes on disk", _of("kivi", "a row's distinct count"), at_most=16_384.0),
    ]
    return Sheet("goal10", "Percentiles and distinct counts: ingest, reads, rollups, and bytes a row", ratios)


_Figure = Callable[[Figures], float]


def _of(system: str, case: str) -> _Figure:
    return lambda figures: figures[system, case]


def _quotient(first: _Figure, second: _Figure) -> _Figure:
    return lambda figures: first(figures) / second(figures)


def _read_case(kind: str) -> str:
    return f"p99 of 12 slots, quantiles{kind}"


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    for rows in BATCHES:
        pool = context.pool("wide", rows)
        _ingest(context, sheet, pool)
        for kind in _CLICKHOUSE:
            context.library(sheet, "clickhouse", f"ingest, quantiles{kind}, {rows:,}", pool, kind)
        for kind in ("rows", "batch"):
            context.library(sheet, "duckdb", f"ingest, {kind}, {rows:,}", pool, kind)
    pool = context.pool("wide", BATCHES[-1])
    endpoints = pool.busiest(*_PLACES)
    _read(context, sheet, pool, endpoints)
    for kind in _CLICKHOUSE:
        context.library(sheet, "clickhouse", _read_case(kind), pool, kind, tuple(endpoints))
    postgres.percentiles(context, sheet, "p99 of 12 slots", pool, endpoints)
    _roll_up(context, sheet)
    _sizes(context, sheet)


def check(db: Any, pool: Pool, sent: list[int], who: str) -> None:
    """Raises WrongTotals unless every row is right: sum and count exactly, p99 and the distinct counts within 1 %."""
    tables.check(db, pool.expected(sent), who)
    with db.snapshot(ttl_s=600) as snapshot:
        held = snapshot.to_arrow(tables.AGGREGATE, columns=["endpoint_id", "slot", "p99", "different"])
    held = held.sort_by([("endpoint_id", "ascending"), ("slot", "ascending")])
    exact = pool.values(sent, 99)
    wrong = np.abs(held["p99"].to_numpy() - exact.percentile) > _ERROR * exact.percentile
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise WrongTotals(
            f"{who}: {int(wrong.sum()):,} rows have a wrong p99, at first {held.slice(at, 1).to_pylist()[0]}, where "
            f"the sorted values say {exact.percentile[at]}"
        )
    different, right = int(held["different"].to_numpy().sum()), int(exact.distinct.sum())
    if abs(different - right) > _ERROR * right:
        raise WrongTotals(f"{who}: the rows count {different:,} distinct values in all, and there are {right:,}")


# -- ingest ----------------------------------------------------------------------------------------


def _ingest(context: Context, sheet: Sheet, pool: Pool) -> None:
    rates: dict[str, list[float]] = {"sums": [], "measures": []}
    for _ in range(_TURNS):
        for case, taken in rates.items():
            with context.server() as server, server.connect() as db:
                more: dict[str, Any] = {"measures": MEASURES, "derived": P99} if case == "measures" else {}
                tables.create(db, **more)
                done = stream(db, tables.EVENTS, pool.batches, in_flight(pool.batch_rows), context.seconds)
                taken.append(done.events / (done.seconds + tables.settled_s(db)))
                if more:
                    check(db, pool, done.sent, f"kivi, {case}, {pool.batch_rows:,}")
                else:
                    tables.check(db, pool.expected(done.sent), f"kivi, {case}, {pool.batch_rows:,}")
    for case, taken in rates.items():
        sheet.record("kivi", f"ingest, {case}, {pool.batch_rows:,}", statistics.median(taken), "events/s", turns=taken)


# -- reading ---------------------------------------------------------------------------------------


def _read(context: Context, sheet: Sheet, pool: Pool, endpoints: list[int]) -> None:
    """Over the network, as applications read, and in process, as ClickHouse is read here."""
    with context.server() as server, server.connect() as db:
        _read_in_turn(context, sheet, pool, endpoints, db, "")
    with context.directory() as path, kivi.open(path / "data") as db:
        _read_in_turn(context, sheet, pool, endpoints, db, ", in process")


def _read_in_turn(
    context: Context, sheet: Sheet, pool: Pool, endpoints: list[int], db: kivi.Database, where: str
) -> None:
    """The reads of both kinds in turn, 20 and 20, until the time is up."""
    tables.create(db, measures=MEASURES, derived=P99)
    db.create_aggregate(
        _SUMS,
        source=tables.EVENTS,
        group_by=["endpoint_id", kivi.time_slot("ts", "5m", name="slot")],
        measures={"total": kivi.sum("resp_time_us"), "n": kivi.count()},
    )
    for batch in pool.batches:
        db.append(tables.EVENTS, batch)
    db.consolidate()
    check(db, pool, [1] * len(pool), "kivi, to be read")
    cases = {"sums of 12 slots": (_SUMS, "total"), "p99 of 12 slots": (tables.AGGREGATE, "p99")}
    took: dict[str, list[float]] = {case: [] for case in cases}
    until = time.perf_counter() + context.seconds * len(cases)
    while time.perf_counter() < until or not took["p99 of 12 slots"]:
        for case, (table, column) in cases.items():
            for i in range(_READS):
                began = time.perf_counter()
                with db.snapshot() as snapshot:
                    rows = list(
                        snapshot.scan(
                            table,
                            prefix=(endpoints[i % len(endpoints)],),
                            columns=["slot", column],
                            limit=SLOTS,
                            reverse=True,
                        )
                    )
                took[case].append(time.perf_counter() - began)
                if len(rows) != SLOTS:
                    raise WrongTotals(f"kivi: {case}: {len(rows)} rows where {SLOTS} were asked for")
    for case, seconds in took.items():
        rate, p50 = len(seconds) / sum(seconds), statistics.median(seconds) * 1e3
        sheet.record("kivi", case + where, rate, "reads/s", p50_ms=p50)


def _roll_up(context: Context, sheet: Sheet) -> None:
    """The median of five, of rows in base."""
    endpoints, slots = _DAY
    pool = _a_day(endpoints, slots, 20 if context.quick else _EVENTS_A_ROW)
    with context.server() as server, server.connect() as db:
        tables.create(db, measures=MEASURES, derived=P99)
        for batch in pool.batches:
            db.append(tables.EVENTS, batch)
        db.consolidate()
        check(db, pool, [1] * len(pool), "kivi, a day")
        took = []
        for _ in range(5):
            began = time.perf_counter()
            with db.snapshot() as snapshot:
                held = snapshot.rollup(tables.AGGREGATE, by=["endpoint_id"], step="1h", measures=["p99"]).to_arrow()
            took.append(time.perf_counter() - began)
    exact = pool.values([1] * len(pool), 99, slot_us=3_600_000_000).percentile
    if held.num_rows != len(exact) or (np.abs(held["p99"].to_numpy() - exact) > _ERROR * exact).any():
        raise WrongTotals(f"kivi: a rollup to hours of {endpoints} endpoints is not what the sorted values say")
    sheet.record("kivi", f"rollup, {endpoints} x {slots}", statistics.median(took) * 1e3, "ms", rows=endpoints * slots)


def _a_day(endpoints: int, slots: int, each: int) -> Pool:
    """So many events in each slot of each endpoint."""
    count = endpoints * slots * each
    random = np.random.default_rng(2)
    rows = random.permutation(np.arange(count) % (endpoints * slots))
    ts_us = START_US + rows // endpoints * SLOT_US + random.integers(0, SLOT_US, count)
    resp_us = random.lognormal(10, 1, count).astype(np.int64)
    batch_rows = min(count // 10, 720_000)  # of 28.8 million: a transaction has at most 64 MiB
    return Pool("a day", batch_rows, (rows % endpoints).astype(np.int64), ts_us, resp_us)


# -- on disk ---------------------------------------------------------------------------------------


def _sizes(context: Context, sheet: Sheet) -> None:
    rows = 200 if context.quick else 2_000
    pool = make(f"even-{rows}", 100_000, rows * _EVENTS_A_ROW)
    with context.directory() as path:

        def nbytes(name: str, measures: dict[str, Any]) -> float:
            return kept_bytes(Path(path / name), pool, pool.batches, measures=measures) / rows

        sums = nbytes("sums", {})
        sheet.record("kivi", "a row's quantiles", nbytes("quantiles", _QUANTILES) - sums, "bytes", rows=rows)
        sheet.record("kivi", "a row's distinct count", nbytes("distinct", _DISTINCT) - sums, "bytes", rows=rows)
