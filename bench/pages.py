"""Pages that follow live queries over HTTP: many clients of server-sent events on fewer distinct queries.

Each query is the rows of one page. A write changes a row of one page, and the writes go round, so that each query has
an update a second. Measured is how long it takes from the begin of the call that commits until a client has the event;
the same over gRPC, with one subscriber for each query, for comparison; and what the clients cost other commits:
transactions of one delta, as many as go, with the clients and without them, in turn.

The clients are in processes of their own (``subscribers``), and read no more of an event than a number. ``CLIENTS`` are
asked for, and as many come as the server may have files open: ``clients`` of each figure says how many.

Verified: at the end every client has had the last write of its page.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

import kivi
import kivi.aio
from bench import subscribers
from bench.context import Context
from bench.server import Server
from bench.sheet import Sheet, percentile
from bench.together import in_tasks, run
from bench.verify import WrongTotals
from bench.writing import at_a_pace

__all__ = ["BESIDE", "CLIENTS", "EVENT", "QUERIES", "take"]

CLIENTS: Final = 24_000
QUERIES: Final = 1_000
EVENT: Final = "an event of a page"
BESIDE: Final = "transactions of one delta beside pages"
_PROCESSES: Final = 4
_FILES_OF_OTHERS: Final = 1_500
_TABLE: Final = "shown"
_COUNTER: Final = "counters"
_ROWS: Final = 10  # of a page
_INTERVAL_MS: Final = 100.0
_HEARTBEAT_MS: Final = 10_000.0
_TASKS: Final = 64
_TURNS: Final = 2
_FACTOR: Final = 3
_LATE_S: Final = 60.0


class _Pages:
    """What is written, and what the last write of each page was."""

    def __init__(self, db: Any, queries: int) -> None:
        self._db, self._queries = db, queries
        self._seq = 0

    async def fill(self) -> None:
        for page in range(self._queries):
            async with self._db.transaction() as tx:
                for row in range(_ROWS):
                    await tx.put(_TABLE, (page, row), seq=0)

    async def write(self, seconds: float) -> tuple[int, Any]:
        """A write of each page a second: the number of the first of them, and when each began."""
        first = self._seq

        async def once(i: int) -> None:
            at = first + i
            async with self._db.transaction() as tx:
                await tx.put(_TABLE, (at % self._queries, at // self._queries % _ROWS), seq=at + 1)

        written = await at_a_pace(once, self._queries, seconds)
        self._seq += len(written.began_ns)
        return first, np.array(written.began_ns)

    async def commits(self, seconds: float) -> float:
        """Others' transactions a second, beside the writes."""

        async def increment() -> None:
            async with self._db.transaction() as tx:
                await tx.delta(_COUNTER, (1,), hits=1)

        async with asyncio.TaskGroup() as group:
            group.create_task(self.write(seconds))
            count, took_s = await in_tasks([increment] * _TASKS, seconds)
        return count / took_s

    def last(self, number: Any) -> Any:
        """What the last write of the page is called that the ``number``-th of a crowd follows."""
        return self._seq - (self._seq - 1 - number % self._queries) % self._queries


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    queries = 20 if context.quick else QUERIES
    clients = 4 * queries if context.quick else min(CLIENTS, most - _FILES_OF_OTHERS)
    with context.server("--http", "localhost:0") as server:
        with server.connect() as db:
            db.create_table(_TABLE, key={"page": "int64", "row": "int64"}, columns={"seq": "int64"})
            db.create_table(_COUNTER, key={"id": "int64"}, columns={"hits": kivi.sum("int64")})
        run(_measured(context, sheet, server, queries, clients))


async def _measured(context: Context, sheet: Sheet, server: Server, queries: int, clients: int) -> None:
    http = next(line for line in reversed(server.output) if line.startswith("http on ")).split()[-1]
    order = subscribers.Order(server.endpoint, _TABLE, "seq", _INTERVAL_MS, _HEARTBEAT_MS, http)
    async with await kivi.aio.connect(server.endpoint, timeout=120.0) as db:
        pages = _Pages(db, queries)
        await pages.fill()
        seconds = _FACTOR * context.seconds

        async def latency(name: str, crowds: list[subscribers.Subscribers]) -> None:
            await pages.write(1.0)
            await asyncio.to_thread(_heard, crowds, pages)
            cpu_s, began_s = server.cpu_s, time.monotonic()
            first, began = await pages.write(seconds)
            core = (server.cpu_s - cpu_s) / (time.monotonic() - began_s)
            took = await asyncio.to_thread(_heard, crowds, pages, first, began)
            about = {"clients": sum(map(len, crowds)), "queries": queries, "events": len(took), "cores": core}
            for share in (50, 99):
                sheet.record(name, f"{EVENT}, p{share}", percentile(took, share), "ms", **about)

        with ExitStack() as stack:
            crowd = stack.enter_context(subscribers.started(order))
            await asyncio.to_thread(crowd.prefixes, range(queries))
            await latency("gRPC", [crowd])
        alone, beside = [], []
        for turn in range(_TURNS):
            alone.append(await pages.commits(context.seconds))
            with ExitStack() as stack:
                crowds = [stack.enter_context(subscribers.started(order)) for _ in range(_PROCESSES)]
                for i, crowd in enumerate(crowds):
                    numbers = range(i, clients, _PROCESSES)
                    await asyncio.to_thread(crowd.pages, [number % queries for number in numbers], f"127.0.0.{2 + i}")
                if not turn:
                    await latency("HTTP", crowds)
                beside.append(await pages.commits(context.seconds))
                await asyncio.to_thread(_heard, crowds, pages)
            await asyncio.sleep(1.0)  # the server closes what the clients left
        sheet.record("kivi", f"{BESIDE}, alone", statistics.median(alone), "transactions/s", turns=alone)
        sheet.record("kivi", f"{BESIDE}, with clients", statistics.median(beside), "transactions/s", turns=beside)


def _heard(crowds: list[subscribers.Subscribers], pages: _Pages, first: int = 0, began: Any = None) -> list[float]:
    """Until every client has the last write of its page: how long each event of the writes since ``first`` took, in ms.

    Raises WrongTotals.
    """
    took: list[float] = []
    newest = [np.zeros(len(crowd), np.int64) for crowd in crowds]
    until = time.monotonic() + _LATE_S
    while True:
        behind = 0
        for i, crowd in enumerate(crowds):
            told = crowd.told()
            number, mark = np.array(told.number, np.int64), np.array(told.mark, np.int64)
            np.maximum.at(newest[i], number, mark)
            behind += int((newest[i] < pages.last(np.array(crowd.followed))).sum())
            if began is not None:
                at = mark - 1 - first
                ours = (at >= 0) & (at < len(began))
                took += ((np.array(told.at_ns, np.int64)[ours] - began[at[ours]]) / 1e6).tolist()
        if not behind:
            return took
        if time.monotonic() > until:
            raise WrongTotals(f"kivi: {behind:,} clients were not told of the last write of their page")
        time.sleep(0.1)
