"""Goal 1: the append stream. Batches of 10,000 and of 100,000 events, through gRPC, each durable and visible.

Wanted, wide: 60% of the limit, 6 times PostgreSQL's best, ahead of DuckDB and ClickHouse at equal batch size; with
string keys half of that. *String keys*: customer, application and server as text in every event and in the key of the
aggregate, besides the endpoint: the limit and the peers they are compared with have integers only.

What kivi has acknowledged is durable and visible, and not yet folded into its base rows; how long that takes after the
clock has stopped is in the raw results (``backlog_s``). What lasts is the rate of goal 6.

kivi is measured with a few threads that call ``db.append``, and with tasks of the client for asyncio; "kivi" in a
ratio is the better of the two.
"""

from __future__ import annotations

from typing import Any, Final

from bench import tables
from bench.context import Context
from bench.data import Pool
from bench.peers import postgres
from bench.sheet import Figures, Ratio, Sheet, best
from bench.streaming import Streamed, in_flight, stream, stream_aio

__all__ = ["sheet", "take"]

BATCHES: Final = (10_000, 100_000)


def case(kind: str, rows: int, how: str = "") -> str:
    return f"{kind}, {rows:,}" + (f", {how}" if how else "")


def _kivi(figures: Figures, kind: str, rows: int) -> float:
    return best(figures, "kivi", case(kind, rows, "threads"), case(kind, rows, "tasks"))


def _against(peer: str, rows: int) -> Ratio:
    def value(figures: Figures) -> float:
        return _kivi(figures, "wide", rows) / figures[peer, case("wide", rows)]

    return Ratio(f"wide, {rows:,}: kivi / {peer}", value, at_least=0.6 if peer == "limit" else 1.0)


def _against_postgres(rows: int) -> Ratio:
    def value(figures: Figures) -> float:
        return _kivi(figures, "wide", rows) / best(figures, "postgres", *postgres.COPIES_OF["wide"])

    return Ratio(f"wide, {rows:,}: kivi / postgres, its best", value, at_least=6.0)


def _strings(kind: str, rows: int) -> Ratio:
    def value(figures: Figures) -> float:
        return _kivi(figures, kind, rows) / figures["limit", case("wide", rows)]

    return Ratio(f"{kind}, {rows:,}: kivi / limit of integers", value, at_least=0.3)


def sheet() -> Sheet:
    ratios = []
    for rows in BATCHES:
        ratios += [_against("limit", rows), _against_postgres(rows), _against("duckdb", rows)]
        ratios += [_against("clickhouse", rows), _strings("strings", rows), _strings("dictionaries", rows)]
    return Sheet("goal1", "Append stream, events a second", ratios)


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    for kind in ("wide", "hot"):
        for rows in BATCHES:
            pool = context.pool(kind, rows)
            context.library(sheet, "limit", case(kind, rows), pool)
            _measure(context, sheet, kind, pool, pool.batches)
            context.library(sheet, "duckdb", case(kind, rows), pool)
            context.library(sheet, "clickhouse", case(kind, rows), pool)
            if kind == "wide":
                _measure(context, sheet, "strings", pool, pool.strings())
                _measure(context, sheet, "dictionaries", pool, pool.strings(dictionary=True))
        context.library(sheet, "sqlite", case(kind, 1_000), context.pool(kind, 1_000))
        if "postgres" in context.peers:
            postgres.copies(context, sheet, kind)


def _measure(context: Context, sheet: Sheet, kind: str, pool: Pool, batches: list[Any]) -> None:
    at_a_time = in_flight(pool.batch_rows)
    for how in ("threads", "tasks"):
        with context.server() as server, server.connect() as db:
            tables.create(db, named=len(batches[0].schema) > 3)
            began_cpu_s = server.cpu_s
            done: Streamed = (
                stream(db, tables.EVENTS, batches, at_a_time, context.seconds)
                if how == "threads"
                else stream_aio(server.endpoint, tables.EVENTS, batches, at_a_time, context.seconds)
            )
            cpu_ns = (server.cpu_s - began_cpu_s) * 1e9 / sum(pool.events([n]) for n in done.sent)
            backlog_s = tables.settled_s(db)
            tables.check(db, pool.expected(done.sent), f"kivi, {case(kind, pool.batch_rows, how)}")
            sheet.record(
                "kivi", case(kind, pool.batch_rows, how), done.rate, "events/s",
                in_flight=at_a_time, events=done.events, backlog_s=round(backlog_s, 2),
                server_cpu_ns_per_event=round(cpu_ns, 1),
            )  # fmt: skip
