"""Writes at a pace against many subscribers' ranges: how long until each is told, and how far it goes."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

import kivi
import kivi.aio
from bench import echo, subscribers
from bench.context import Context
from bench.cores import pinned
from bench.data import START_US
from bench.matching import DOMAIN, SHARE, Ranges
from bench.server import Server
from bench.sheet import Sheet, percentile
from bench.together import run
from bench.verify import WrongTotals
from bench.writing import Written, at_a_pace

__all__ = [
    "BASE",
    "KINDS",
    "P99_MS_MAX",
    "TABLE",
    "WIDE",
    "WIDE_P99_MS_MAX",
    "WRITES_S",
    "Case",
    "create",
    "echoed",
    "point",
    "take",
]

KINDS: Final = ("rows", "events")
P99_MS_MAX: Final = 20.0
QUERIES: Final = 1_500
WRITES_S: Final = 1_000
WIDE: Final = ((24_000, 1_000), (1_000, 16_000))
"""(queries, writes a second) that are measured whatever the steps before came to."""
WIDE_P99_MS_MAX: Final = 100.0


def point(queries: int, writes_s: int) -> str:
    """An operating point, as figures call it."""
    return f"{queries:,} queries x {writes_s:,} writes/s"


BASE: Final = point(QUERIES, WRITES_S)
_QUERIES_MAX: Final = 24_000
_WRITES_S_MAX: Final = 8_000
TABLE: Final = "readings"
_ROWS: Final = 4_000  # of the row table; each is overwritten after all others, so 4 s later at 1,000 writes a second
_HEARTBEAT_MS: Final = 10_000.0
_FACTOR: Final = 3  # longer than a rate is measured elsewhere: a notification is rarer than a write
_PACE: Final = 0.97  # of the writes that were asked for
_LATE_S: Final = 30.0
_WARM_UP_S: Final = 0.5
_QUIET: Final = 0.1  # of a core
_QUIET_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class _Step:
    """What one pace and number of queries came to. ``passed_over``: rows overwritten before they were told.

    ``commit_p99_ms``: until the writer itself knew of its commit, for comparison.
    """

    queries: int
    writes_s: float
    kept_pace: bool
    p50_ms: float
    p99_ms: float
    worst_ms: float
    commit_p99_ms: float
    told: int
    passed_over: int
    core: float

    @property
    def matches_s(self) -> float:
        return self.queries * self.writes_s

    @property
    def sustained(self) -> bool:
        return self.kept_pace and self.p99_ms <= P99_MS_MAX


class Case:
    """A server, a writer and subscribers, and what has been written so far."""

    def __init__(self, kind: str, server: Server, told: subscribers.Subscribers, share: int) -> None:
        self._kind = kind
        self._server = server
        self._told = told
        self._ranges = Ranges(_QUERIES_MAX, share=share)
        self._rng = np.random.default_rng(2)
        self._seq = _ROWS  # of the next write: the rows that are there from the beginning have those below
        self._held = self._rng.integers(0, DOMAIN, _ROWS)  # each row's value
        self._held_seq = np.arange(_ROWS)
        self._queries = 0
        self.db: Any

    async def fill(self) -> None:
        if self._kind == "rows":
            async with self.db.transaction() as tx:
                for i, value in enumerate(self._held.tolist()):
                    await tx.put(TABLE, (i,), value=value, seq=i)

    async def subscribe(self, queries: int) -> None:
        """So many from now on."""
        if queries < self._queries:
            self._told.keep(queries)
        new = slice(self._queries, queries)
        low, high = self._ranges.low[new].tolist(), self._ranges.high[new].tolist()
        since = await self.db.watermark() if self._kind == "events" else None
        self._told.ranges(list(zip(low, high, strict=True)), "value", since)
        self._queries = queries
        until = time.monotonic() + _LATE_S
        cpu_s, before = self._server.cpu_s, -1.0
        while (
            cpu_s - before > _QUIET * _QUIET_S and time.monotonic() < until
        ):  # the server still reads for the new ones
            await asyncio.sleep(_QUIET_S)
            before, cpu_s = cpu_s, self._server.cpu_s

    async def step(self, writes_s: float, seconds: float) -> _Step:
        """Raises WrongTotals."""
        await self._write(writes_s, _WARM_UP_S)
        self._told.told()
        gc.collect()  # as the subscribers' process does
        gc.freeze()
        cpu_s = self._server.cpu_s
        first, values, written = await self._write(writes_s, seconds)
        core = (self._server.cpu_s - cpu_s) / written.seconds
        query, at = self._ranges.selected(values, self._queries)
        wanted = np.sort(_pair(query, first + at))
        got_pair, got_at = self._heard(first, wanted)
        if len(np.unique(got_pair)) != len(got_pair) or not np.isin(got_pair, wanted).all():
            raise WrongTotals("kivi: a subscriber was told twice, or of what its query does not select")
        missing = len(wanted) - len(got_pair)
        if missing and self._kind == "events":
            raise WrongTotals(f"kivi: {missing:,} of {len(wanted):,} events were not told")
        if self._kind == "rows":
            self._check_states()
        began = np.array(written.began_ns)[(got_pair & ((1 << 40) - 1)) - first]
        took = ((got_at - began) / 1e6).tolist() or [0.0]
        return _Step(
            self._queries, written.rate, written.rate >= _PACE * writes_s and len(values) >= round(writes_s * seconds),
            percentile(took, 50), percentile(took, 99), max(took),
            percentile(written.took_s, 99) * 1e3, len(got_pair), missing, core,
        )  # fmt: skip

    def _heard(self, first: int, wanted: Any) -> tuple[Any, Any]:
        """(pairs of subscriber and write, when) of the writes from ``first`` on: all, or what comes within reason."""
        pairs, moments = np.empty(0, np.int64), np.empty(0, np.int64)
        until = time.monotonic() + _LATE_S
        quiet = 0
        while len(pairs) < len(wanted) and time.monotonic() < until and quiet < 5:
            told = self._told.told()
            mark = np.array(told.mark, np.int64)
            ours = mark >= first  # rows of before it may still come
            pairs = np.append(pairs, _pair(np.array(told.number, np.int64), mark)[ours])
            moments = np.append(moments, np.array(told.at_ns, np.int64)[ours])
            if self._kind == "rows":  # some may never come
                quiet = 0 if ours.any() else quiet + 1
            time.sleep(0.1)
        return pairs, moments

    def _check_states(self) -> None:
        query, at = self._ranges.selected(self._held, self._queries)
        right = set(_pair(query, self._held_seq[at]).tolist())
        until = time.monotonic() + _LATE_S
        while True:
            states = self._told.states()
            found = {int(_pair(q, seq)) for q, state in enumerate(states) for seq in state}
            if found == right:
                return
            if time.monotonic() > until:
                raise WrongTotals(
                    f"kivi: {len(found ^ right):,} rows of {len(states):,} subscribers are wrong at the end"
                )
            time.sleep(0.2)

    async def _write(self, writes_s: float, seconds: float) -> tuple[int, Any, Written]:
        """(the first write's number, values in order, when)."""
        first, db = self._seq, self.db
        planned = self._rng.integers(0, DOMAIN, max(1, round(writes_s * seconds)))
        listed = planned.tolist()
        once: Callable[[int], Awaitable[None]]
        if self._kind == "rows":

            async def once(i: int) -> None:
                async with db.transaction() as tx:
                    await tx.put(TABLE, ((first + i) % _ROWS,), value=listed[i], seq=first + i)

            written = await at_a_pace(once, writes_s, seconds)
        else:
            async with db.appender(TABLE, linger_ms=0) as appender:

                async def once(i: int) -> None:
                    await appender.append(value=listed[i], seq=first + i, ts=START_US + first + i)

                written = await at_a_pace(once, writes_s, seconds)
        values = planned[: len(written.began_ns)]
        self._seq += len(values)
        ids = (first + np.arange(len(values))) % _ROWS
        self._held[ids] = values
        self._held_seq[ids] = first + np.arange(len(values))
        return first, values, written


def _pair(query: Any, seq: Any) -> Any:
    return (query << 40) | seq


def create(db: Any, kind: str) -> None:
    """The table that is written to."""
    if kind == "rows":
        db.create_table(TABLE, key={"id": "int64"}, columns={"value": "int64", "seq": "int64"})
    else:
        columns = {"value": "int64", "seq": "int64", "ts": "timestamp"}
        db.create_event_table(TABLE, event_time="ts", columns=columns)


def take(context: Context, sheet: Sheet, kind: str, core: set[int]) -> None:
    """One run of one kind of table: the published operating point, and beyond."""
    with context.directory() as path:
        server = Server(path / "data")
        with pinned(core):
            server.start()
        try:
            with server.connect() as db:
                create(db, kind)
            order = subscribers.Order(server.endpoint, TABLE, "seq", 0.0, _HEARTBEAT_MS)
            with subscribers.started(order) as told:
                run(_ladder(context, sheet, kind, server, told))
        finally:
            server.kill()


def echoed(context: Context, sheet: Sheet, core: set[int]) -> None:
    """What an empty call takes at the same pace, on the same core: what of a latency is the machine's and gRPC's."""
    with ExitStack() as stack:
        with pinned(core):
            endpoint = stack.enter_context(echo.served())
        took = echo.paced(endpoint, WRITES_S, context.seconds)
    for share in (50, 99):
        sheet.record("echo", f"{WRITES_S:,} calls/s, p{share}", percentile(took, share) * 1e3, "ms")


async def _ladder(context: Context, sheet: Sheet, kind: str, server: Server, told: subscribers.Subscribers) -> None:
    case = Case(kind, server, told, 10_000 if context.quick else SHARE)
    seconds = _FACTOR * context.seconds
    async with await kivi.aio.connect(server.endpoint, timeout=120.0) as case.db:
        await case.fill()

        taken = set[tuple[int, int]]()

        async def step(queries: int, writes_s: int) -> _Step:
            taken.add((queries, writes_s))
            await case.subscribe(queries)
            return _noted(sheet, kind, await case.step(writes_s, seconds), writes_s)

        best = step_ok = await step(QUERIES, WRITES_S)
        most = (3_000, 2_000) if context.quick else (_QUERIES_MAX, _WRITES_S_MAX)
        queries, writes_s = QUERIES, WRITES_S
        while step_ok.sustained and queries < most[0]:
            step_ok = await step(2 * queries, writes_s)
            if step_ok.sustained:
                best, queries = step_ok, 2 * queries
        step_ok = best
        while step_ok.sustained and writes_s < most[1]:
            writes_s *= 2
            step_ok = await step(queries, writes_s)
            if step_ok.sustained:
                best = step_ok
        for each in () if context.quick else WIDE:
            if each not in taken:
                await step(*each)
    details = {"queries": best.queries, "writes_s": best.writes_s, "p99_ms": best.p99_ms}
    sheet.record(
        "kivi", f"{kind}, most within 20 ms", best.matches_s if best.sustained else 0.0, "matches/s", **details
    )


def _noted(sheet: Sheet, kind: str, step: _Step, writes_s: int) -> _Step:
    case = f"{kind}, {point(step.queries, writes_s)}"
    about = {"told": step.told, "passed_over": step.passed_over, "worst_ms": step.worst_ms, "kept_pace": step.kept_pace}
    sheet.record("kivi", case, step.matches_s, "matches/s", writes_s=step.writes_s)
    sheet.record("kivi", f"{case}, p50", step.p50_ms, "ms")
    sheet.record("kivi", f"{case}, p99", step.p99_ms, "ms", **about)
    sheet.record("kivi", f"{case}, commit, p99", step.commit_p99_ms, "ms")
    sheet.record("kivi", f"{case}, of the core", step.core, "of 1")
    return step
