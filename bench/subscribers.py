"""Many subscribers in a process of their own: what each was told, and when it had it in its hands.

``python -m bench.subscribers`` is told an ``Order`` as JSON on its command line, and then one command a line; each is
answered by a line. All subscriptions are tasks of one event loop, a thousand of them a connection; pages are
connections of HTTP, of which no more is read than it takes to note the marks.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import resource
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import kivi
import kivi.aio
from bench.machine import ROOT

__all__ = ["Order", "Subscribers", "Told", "started"]

STREAMS: Final = 1_000  # subscriptions of one connection
_AT_ONCE: Final = 16  # subscriptions that begin together


@dataclass(frozen=True, slots=True)
class Order:
    """``mark``: an integer column whose value is noted of each row that comes."""

    endpoint: str
    table: str
    mark: str
    interval_ms: float
    heartbeat_ms: float
    http: str = ""
    """Where pages connect to."""


@dataclass(frozen=True, slots=True)
class Told:
    """Of each row that came: the subscriber, the row's mark, and when (CLOCK_MONOTONIC, ns); and of each update."""

    number: Sequence[int]
    mark: Sequence[int]
    at_ns: Sequence[int]
    update_number: Sequence[int]
    update_at_ns: Sequence[int]


class Subscribers:
    """The running process. Every method waits for its answer, and raises RuntimeError if the process fails."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.followed: list[int] = []
        """The first key columns of the rows that each subscriber follows, as far as that was asked for."""

    def __len__(self) -> int:
        return len(self.followed)

    def ranges(self, ranges: Sequence[tuple[int, int]], column: str, since: int | None = None) -> None:
        """One more subscriber for each: ``low <= column < high``; ``since``, of events: those after that only."""
        self._ask("ranges", ranges=ranges, column=column, since=since)

    def prefixes(self, prefixes: Sequence[int]) -> None:
        """One more subscriber for each: the rows below that key."""
        self.followed += prefixes
        self._ask("prefixes", prefixes=[*prefixes])

    def pages(self, prefixes: Sequence[int], source: str) -> None:
        """Likewise, over HTTP, from the address ``source``: each has ports for so many connections."""
        self.followed += prefixes
        self._ask("pages", prefixes=[*prefixes], source=source)

    def keep(self, count: int) -> None:
        """All but the first ``count`` end."""
        del self.followed[count:]
        self._ask("keep", count=count)

    def told(self) -> Told:
        """What came since this was asked the last time."""
        return Told(**self._ask("told"))

    def states(self) -> list[list[int]]:
        """The marks of the rows that each subscriber has now, in order."""
        found: list[list[int]] = self._ask("states")
        return found

    def _ask(self, do: str, **more: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of the subscribers has failed")
        return json.loads(line)


@contextmanager
def started(order: Order) -> Iterator[Subscribers]:
    """Without any subscriber yet; ended when this is left."""
    command = [sys.executable, "-m", "bench.subscribers", json.dumps(asdict(order))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield Subscribers(process)
        finally:
            process.kill()


class _Page(asyncio.Protocol):
    """A client of server-sent events, once the first of them has come."""

    def __init__(self, crowd: _Crowd, number: int, request: bytes) -> None:
        self._crowd, self._number, self._request = crowd, number, request
        self._rest = b""
        self._accepted = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        at = time.monotonic_ns()
        data = self._rest + data
        end = data.rfind(b"\n\n") + 1
        self._rest = data[end:]
        self._accepted = self._accepted or data.startswith(b"HTTP/1.1 200")
        if b"event: error" in data or not self._accepted:
            self._crowd.fail(RuntimeError(f"a page was told {data[:500]!r}"))
        for mark in self._crowd.marks.findall(data, 0, end):
            self._crowd.note(self._number, int(mark), at)
            if not self.opened.done():
                self.opened.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._crowd.fail(RuntimeError(f"the connection of a page was lost: {error}"))
        if not self.opened.done():
            self.opened.set_result(None)


class _Crowd:
    def __init__(self, order: Order, stack: AsyncExitStack) -> None:
        self._order = order
        self._stack = stack
        self._clients: list[Any] = []
        self._lives: list[tuple[Any, asyncio.Task[None]]] = []
        self._failed: list[BaseException] = []
        self._pages = 0
        self.marks = re.compile(rb'"%b":(\d+)' % order.mark.encode())
        self._clear()

    def _clear(self) -> None:
        self._rows = array("q")
        self._updates = array("q")

    async def add(self, queries: Sequence[dict[str, Any]]) -> None:
        """Each has had its first state when this returns."""
        limit = asyncio.Semaphore(_AT_ONCE)
        before = len(self._lives)
        while len(self._clients) * STREAMS < before + len(queries):
            client = await kivi.aio.connect(self._order.endpoint, timeout=120.0)
            self._clients.append(await self._stack.enter_async_context(client))

        async def begin(number: int, query: dict[str, Any]) -> tuple[Any, asyncio.Task[None]]:
            order = self._order
            async with limit:
                live = self._clients[number // STREAMS].subscribe(
                    order.table, interval_ms=order.interval_ms, heartbeat_ms=order.heartbeat_ms, **query
                )
                await live.__aenter__()
            return live, asyncio.create_task(self._follow(number, live))

        self._lives += await asyncio.gather(*(begin(before + i, query) for i, query in enumerate(queries)))

    async def open(self, prefixes: Sequence[int], source: str) -> None:
        """Pages. Each has had its first state when this returns."""
        limit, order = asyncio.Semaphore(_AT_ONCE), self._order
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        host, port = order.http.removeprefix("http://").rsplit(":", 1)

        async def begin(number: int, prefix: int) -> None:
            path = f"/v1/live?table={order.table}&prefix={prefix}&interval_ms={order.interval_ms:.0f}"
            request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
            async with limit:
                _, page = await asyncio.get_running_loop().create_connection(
                    lambda: _Page(self, number, request), "127.0.0.1", int(port), local_addr=(source, 0)
                )
                await page.opened

        await asyncio.gather(*(begin(self._pages + i, prefix) for i, prefix in enumerate(prefixes)))
        self._pages += len(prefixes)

    async def _follow(self, number: int, live: Any) -> None:
        mark, rows, updates, clock = self._order.mark, self.note, self._told, time.monotonic_ns
        try:
            while (update := await live.next()) is not None:
                at = clock()
                updates(number, at)
                for change in update.changes:
                    if change.row is not None:
                        rows(number, change.row[mark], at)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failed.append(error)

    def fail(self, error: BaseException) -> None:
        self._failed.append(error)

    def note(self, number: int, mark: int, at: int) -> None:
        self._rows.extend((number, mark, at))

    def _told(self, number: int, at: int) -> None:
        self._updates.extend((number, at))

    async def do(self, command: dict[str, Any]) -> Any:
        if self._failed:
            raise self._failed[0]
        found = await self._done(command)
        if command["do"] not in ("told", "states"):
            gc.collect()  # what subscriptions are made of stays: a client that looks through it again and again would
            gc.freeze()  # measure that, hundreds of milliseconds, and not when it was told
        return found

    async def _done(self, command: dict[str, Any]) -> Any:
        match command["do"]:
            case "ranges":
                column, since = kivi.col(command["column"]), command["since"]
                wheres = [(column >= low) & (column < high) for low, high in command["ranges"]]
                await self.add([{"where": where, "since": since} for where in wheres])
            case "prefixes":
                await self.add([{"prefix": (first,)} for first in command["prefixes"]])
            case "pages":
                await self.open(command["prefixes"], command["source"])
            case "keep":
                ending, self._lives = self._lives[command["count"] :], self._lives[: command["count"]]
                for live, task in ending:
                    task.cancel()
                    await live.close()
            case "told":
                rows, updates = self._rows.tolist(), self._updates.tolist()
                self._clear()
                return asdict(Told(rows[::3], rows[1::3], rows[2::3], updates[::2], updates[1::2]))
            case "states":
                return [[row[self._order.mark] for row in live.rows] for live, _ in self._lives]
        return None


async def _main(order: Order) -> None:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        crowd = _Crowd(order, stack)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await crowd.do(json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(Order(**json.loads(sys.argv[1]))))
