"""Goal 5: what more aggregates, and more rows in one, cost the append stream: factors of its own rate.

* *Eight aggregates instead of one*: by endpoint, in slots of 1, 2, 5, 10, 15, 30 and 60 minutes and a day, which is the
  dear form, as none of them is coarse in its endpoints; and the demonstration's: customer, application, server and
  endpoint, each in slots of 5 minutes and an hour, of events with strings. Wanted: at most a factor of 3.
* *A million rows instead of 10,000*: as many endpoints, each equally often, in one slot. Wanted: at most a factor of 4.

Each aggregate's rows are verified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pyarrow.compute as pc

import kivi
from bench import tables, verify
from bench.context import Context
from bench.data import PER_NAME, Pool, Totals
from bench.sheet import Figures, Ratio, Sheet
from bench.streaming import in_flight, stream

__all__ = ["sheet", "take"]

BATCHES: Final = (10_000, 100_000)
_MINUTES: Final = (1, 2, 10, 15, 30, 60, 1440)  # besides the five of the aggregate that is always there
_MINUTE_US: Final = 60_000_000
_LEVELS: Final = ("customer", "application", "server", "endpoint")
_SLOTS: Final = (5, 60)
_EVEN: Final = (10_000, 1_000_000)


def sheet() -> Sheet:
    ratios = []
    for rows in BATCHES:
        for kind in ("integers", "strings"):
            cases = (f"{kind}, 1 aggregate, {rows:,}", f"{kind}, 8 aggregates, {rows:,}")
            text = f"{kind}, batches of {rows:,}: 8 aggregates cost a factor of"
            ratios.append(Ratio(text, _factor(*cases), at_most=3.0))
        few, many = (f"{endpoints:,} rows, {rows:,}" for endpoints in _EVEN)
        text = f"batches of {rows:,}: a million rows cost a factor of"
        ratios.append(Ratio(text, _factor(few, many), at_most=4.0))
    return Sheet("goal5", "More aggregates, and more rows: events a second, and factors", ratios)


def _factor(first: str, second: str) -> Callable[[Figures], float]:
    return lambda figures: figures["kivi", first] / figures["kivi", second]


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    for rows in BATCHES:
        pool = context.pool("wide", rows)
        for kind, batches, more in (
            ("integers", pool.batches, {f"endpoint_{n}m": (["endpoint_id"], n, 1) for n in _MINUTES}),
            ("strings", pool.strings(), _levels()),
        ):
            _measure(context, sheet, f"{kind}, 1 aggregate, {rows:,}", pool, batches, {})
            _measure(context, sheet, f"{kind}, 8 aggregates, {rows:,}", pool, batches, more)
        for endpoints in _EVEN:
            pool = context.pool(f"even-{endpoints}", rows)
            _measure(context, sheet, f"{endpoints:,} rows, {rows:,}", pool, pool.batches, {})


_More = dict[str, tuple[list[str], int, int]]  # name -> columns of its key, minutes of its slots, endpoints a key


def _levels() -> _More:
    """Seven: the eighth is the aggregate that is always there, by endpoint in slots of five minutes."""
    columns = {level: list(_LEVELS[: i + 1]) for i, level in enumerate(_LEVELS[:-1])}
    columns["endpoint"] = ["endpoint_id"]
    return {
        f"{level}_{minutes}m": (columns[level], minutes, PER_NAME.get(level, 1))
        for level in _LEVELS
        for minutes in _SLOTS
        if (level, minutes) != ("endpoint", 5)
    }


def _measure(context: Context, sheet: Sheet, case: str, pool: Pool, batches: list[Any], more: _More) -> None:
    with context.server() as server, server.connect() as db:
        groups = {
            name: [*columns, kivi.time_slot("ts", f"{minutes}m", name="slot")]
            for name, (columns, minutes, _) in more.items()
        }
        tables.create(db, named=len(batches[0].schema) > 3, keyed=("endpoint_id",), more=groups)
        done = stream(db, tables.EVENTS, batches, in_flight(pool.batch_rows), context.seconds)
        backlog_s = tables.settled_s(db)
        tables.check(db, pool.expected(done.sent), f"kivi, {case}")
        for name, (_, minutes, endpoints) in more.items():
            coarse = Pool(pool.name, pool.batch_rows, pool.endpoint // endpoints, pool.ts_us, pool.resp_us)
            expected = coarse.expected(done.sent, minutes * _MINUTE_US).totals
            verify.same(f"kivi, {case}, {name}", _totals(tables.held(db, name)), expected)
    sheet.record("kivi", case, done.rate, "events/s", events=done.events, backlog_s=round(backlog_s, 2))


def _totals(held: Any) -> Totals:
    return Totals(len(held), pc.sum(held["n"]).as_py(), pc.sum(held["total"]).as_py())
