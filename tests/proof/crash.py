"""One crash of a real server at a named point, and what must be true afterwards.

::

    before     a store with a history (made once, copied for every crash)
    meanwhile  four clients, two crowds whose commits enter in groups, and an operator (consolidate, checkpoint, create
               and drop an aggregate and a view, append and stage in bulk) against a server that ends itself at the
               point; the acknowledgements are kept here
    after      what is left is opened:
               R13  a new timestamp is above every one and every snapshot handed out before
               R16  each token says what became of its commit; every answer before and after is the replay of that
               sums and counts equal a recount of the events, for the aggregate that was being built as well; the view
               that was being filled has the rows of its source
               a checkpoint is not there, or opens and is a prefix of the history
               a second crash and recovery change nothing
"""

from __future__ import annotations

import contextlib
import filecmp
import random
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

import kivi
from kivi.errors import KiviError, NotFound
from tests.measures import plain
from tests.oracle import Attempt, Mismatch, Op, Oracle, Read
from tests.proof.concurrent import ARGUMENTS, is_one_of_many
from tests.proof.crowd import Crowd, Tasks
from tests.proof.powerloss import Disk, environment
from tests.proof.views import Viewed, people
from tests.proof.workloads import TABLES, Bank, Client, Counters, Mix, fund, make_tables, micros, settled
from tests.serverproc import EndedError, ServerProcess
from tests.waiting import wait_until

__all__ = [
    "Crashed",
    "History",
    "NotReachedError",
    "call_failed",
    "crash_at",
    "killed_at_rest",
    "power_lost",
    "prepare",
]

CLIENTS: tuple[type[Client], ...] = (Mix, Bank, Counters, Viewed)
CALLERS = 24  # of each of the crowds


class NotReachedError(AssertionError):
    """The server went on: the crash was not made, and nothing was proved."""


@dataclass
class History:
    """A store that is closed, and the commits that made it."""

    path: Path
    attempts: list[Attempt]
    first: int


@dataclass
class Crashed:
    """What a crash was made of. ``grouped`` of the ``entered`` commits had entered in groups of two or more, as the
    server said when it was last asked."""

    commits: int
    unknown: int
    checkpoints: int
    entered: int = 0
    grouped: int = 0
    listened: bool = True  # False: the point was reached in the recovery, before any client could connect


def prepare(path: Path) -> History:
    """A store with events in blocks, in the log alone, and rows of every kind."""
    oracle = Oracle(TABLES)
    with kivi.open(path, background=False) as db:
        make_tables(db, path.parent / "objects")
        first = fund(db, oracle)
        with db.transaction() as tx:
            for op in people():
                tx.put(op.table, op.key, **op.values)
        oracle.attempt(Attempt(tx.start_ts, people(), "committed", tx.commit_ts, who="prepare"))
        for portion in range(4):
            events = [{"a": i % 5, "b": "xyz"[i % 3], "ts": i, "x": i} for i in range(600)]
            ops = [Op("append", "e", events=events)]
            with db.transaction() as tx:
                tx.append("e", events)
                for key in range(5):
                    op = Op("delta", "t", (key,), {"n": portion, "hi": portion})
                    tx.delta(op.table, op.key, **op.values)
                    ops.append(op)
            oracle.attempt(Attempt(tx.start_ts, ops, "committed", tx.commit_ts, who="prepare"))
            if portion == 1:
                db.consolidate()
        db.store.crash()
    return History(path, oracle.attempts, first)


class Operator:
    """What runs beside the clients: everything that has a point of its own."""

    def __init__(self, db: Any, oracle: Oracle, where: Path) -> None:
        self.db = db
        self.oracle = oracle
        self.where = where
        self.checkpoints: list[Path] = []
        self.failure: BaseException | None = None

    def run(self, stop: threading.Event) -> None:
        try:
            for number in range(1_000):
                for step in (self.bulk, self.staged, self.aggregate, self.view, self.checkpoint, self.consolidate):
                    if stop.is_set():
                        return
                    step(number)
        except KiviError:
            return  # the server has gone
        except BaseException as error:
            self.failure = error

    def events(self, number: int) -> list[dict[str, Any]]:
        return [{"a": i % 5, "b": "y", "ts": number, "x": i} for i in range(300)]

    def _commit(self, tx: Any, events: list[dict[str, Any]], token: str) -> None:
        attempt = Attempt(tx.start_ts, [Op("append", "e", events=events)], "unknown", token=token, who="operator")
        self.oracle.attempt(attempt)
        attempt.commit_ts = tx.commit()
        attempt.outcome = "committed"

    def bulk(self, number: int) -> None:
        token, events = f"bulk {number}", self.events(number)
        tx = self.db.transaction(token=token)
        tx.append("e", pa.Table.from_pylist(events))
        self._commit(tx, events, token)

    def staged(self, number: int) -> None:
        token, events = f"staged {number}", self.events(number)
        stages = [self.db.stage("e", events[:100]), self.db.stage("e", events[100:])]
        tx = self.db.transaction(token=token)
        tx.append_stages("e", stages)
        self._commit(tx, events, token)

    def aggregate(self, number: int) -> None:
        with contextlib.suppress(NotFound):
            self.db.drop("late")
        measures = {"total": kivi.sum("x"), "calls": kivi.count()}
        self.db.create_aggregate("late", source="e", group_by=["b", "a"], measures=measures)

    def view(self, number: int) -> None:
        with contextlib.suppress(NotFound):
            self.db.drop("late_view")
        self.db.create_view("late_view", source="people", key=["desk"], columns=["name", "balance"], unique=True)

    def consolidate(self, number: int) -> None:
        self.db.consolidate()

    def checkpoint(self, number: int) -> None:
        path = self.where / f"checkpoint {number}"
        self.checkpoints.append(path)
        self.db.checkpoint(str(path))


class Gauge:
    """Asks the server, until it has gone, how many commits entered, and how many of them in groups."""

    def __init__(self, db: Any) -> None:
        self.db = db
        self.failure: BaseException | None = None
        self.entered = self.grouped = 0

    def run(self, stop: threading.Event) -> None:
        with contextlib.suppress(KiviError):
            while not stop.is_set():
                stats = self.db.stats()
                self.entered, self.grouped = int(stats["commits"]), int(stats["commits_grouped"])
                time.sleep(0.02)


@dataclass
class Ran:
    """What ran beside the clients; both are None where the server never listened, and crowds alone have no operator."""

    operator: Operator | None = None
    gauge: Gauge | None = None

    def crashed(self, oracle: Oracle, unknown: int, checkpoints: int = 0) -> Crashed:
        commits, gauge = len(oracle.committed()), self.gauge
        entered, grouped = (0, 0) if gauge is None else (gauge.entered, gauge.grouped)
        return Crashed(commits, unknown, checkpoints, entered, grouped)


def crash_at(
    point: str, number: int, history: History, where: Path, *, seed: int = 0, seconds_max: float = 40
) -> Crashed:
    """A server that ends itself. Raises Mismatch or AssertionError; also if the point was not reached."""
    data = where / "data"
    shutil.copytree(history.path, data)
    server = ServerProcess(data, *ARGUMENTS)
    server.command = [sys.executable, "-m", "tests.proof.points", point, str(number)]
    oracle = Oracle(TABLES)
    oracle.attempts = list(history.attempts)

    def wait(failed: Callable[[], bool]) -> None:
        def not_reached() -> NoReturn:
            server.kill()
            raise NotReachedError(f"the point {point!r} was not reached {number} times")

        process = server.process
        wait_until(lambda: process is None or process.poll() is not None or failed(), seconds_max, reason=not_reached)

    made = None
    with contextlib.suppress(EndedError):  # a crash in the recovery is a crash: what it leaves is judged as well
        made = ran(server, oracle, where, history.first, seed, wait)
    assert server.process is not None
    assert server.process.returncode == -9, "".join(server.output)
    unknown = sum(attempt.outcome == "unknown" for attempt in oracle.attempts)
    recovered(data, oracle)
    if made is None:
        return Crashed(len(oracle.committed()), unknown, 0, listened=False)
    checkpoints = sum(_checkpoint_holds(path, oracle) for path in (made.operator.checkpoints if made.operator else ()))
    return made.crashed(oracle, unknown, checkpoints)


def acknowledged(oracle: Oracle) -> int:
    """How many commits the clients have heard of; one that came again under its token counts once, and the events of
    ``appender(each=True)``, of which many come at once, do not count."""
    return sum(
        attempt.outcome == "committed" and not attempt.repeat and not is_one_of_many(attempt)
        for attempt in tuple(oracle.attempts)
    )


def killed_at_rest(history: History, where: Path, *, seed: int, commits: int, seconds_max: float = 60) -> Crashed:
    """A server whose clients are crowds alone, killed when they have ended their round: the last commits that entered
    were those of groups, and all of them are acknowledged."""
    data = where / "data"
    shutil.copytree(history.path, data)
    server = ServerProcess(data, *ARGUMENTS)
    oracle = Oracle(TABLES)
    oracle.attempts = list(history.attempts)

    def wait(failed: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds_max
        while acknowledged(oracle) < commits and not failed():
            assert time.monotonic() < deadline, f"{commits} commits took too long"
            time.sleep(0.01)

    made = ran(server, oracle, where, history.first, seed, wait, alone=True, at_rest=True)
    unknown = sum(attempt.outcome == "unknown" for attempt in oracle.attempts)
    recovered(data, oracle)
    return made.crashed(oracle, unknown)


def power_lost(
    library: Path,
    history: History,
    where: Path,
    *,
    seed: int,
    commits: int,
    states: int,
    seconds_max: float = 60,
    planted: str | None = None,
    at_rest: bool = False,
) -> list[Crashed]:
    """A server is killed after about so many commits; then as many states of its disk as asked for are recovered.

    ``at_rest``: when all that entered is acknowledged, instead of as soon as the last of so many is.
    ``planted``: a bug of ``points`` that the server has.
    """
    data, journal = where / "data", where / "journal"
    shutil.copytree(history.path, data)
    disk = Disk(data)
    server = ServerProcess(data, *ARGUMENTS)
    server.environment = environment(library, data, journal)
    if planted is not None:
        server.command = [sys.executable, "-m", "tests.proof.points", planted, "0"]
    oracle = Oracle(TABLES)
    oracle.attempts = list(history.attempts)

    def wait(failed: Callable[[], bool]) -> None:
        wait_until(
            lambda: failed() or acknowledged(oracle) >= commits, seconds_max, reason=f"{commits} commits took too long"
        )
        if not at_rest:
            server.kill()

    made = ran(server, oracle, where, history.first, seed, wait, at_rest=at_rest)
    disk.read(journal)
    assert disk.unsynced, "nothing was left to lose"
    disk.restore(where / "all", None)
    differences = _differences(data, where / "all")
    assert not differences, f"the journal missed something: {differences}"
    out = []
    for state in range(states):
        again = oracle.copied()
        unknown = sum(attempt.outcome == "unknown" for attempt in again.attempts)
        place = where / f"state {state}"
        disk.restore(place, random.Random(seed * 1_000 + state))
        recovered(place, again)
        shutil.rmtree(place)
        out.append(made.crashed(again, unknown))
    return out


def _differences(left: Path, right: Path) -> list[str]:
    """Files that are in one tree only, or differ; but for the text log of RocksDB, which stdio writes unseen."""
    names = {str(path.relative_to(root)) for root in (left, right) for path in root.rglob("*") if path.is_file()}
    return [
        name
        for name in sorted(names)
        if not Path(name).name.startswith("LOG")
        and not ((left / name).exists() and (right / name).exists() and filecmp.cmp(left / name, right / name, False))
    ]


def call_failed(
    library: Path,
    history: History,
    where: Path,
    *,
    number: int,
    error: int,
    lasts: bool,
    seed: int,
    seconds: float = 2.5,
) -> Crashed:
    """A server some call of which fails, RocksDB's own included; it runs on for a while, or ends by itself."""
    data = where / "data"
    shutil.copytree(history.path, data)
    server = ServerProcess(data, *ARGUMENTS)
    server.environment = environment(library, data, where / "journal", (number, error, lasts))
    oracle = Oracle(TABLES)
    oracle.attempts = list(history.attempts)

    def wait(failed: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and server.process is not None and server.process.poll() is None:
            if failed():
                return
            time.sleep(0.01)
        server.kill()

    made = Ran()
    with contextlib.suppress(RuntimeError):  # it may refuse to start
        made = ran(server, oracle, where, history.first, seed, wait)
    unknown = sum(attempt.outcome == "unknown" for attempt in oracle.attempts)
    recovered(data, oracle)
    return made.crashed(oracle, unknown)


def ran(
    server: ServerProcess,
    oracle: Oracle,
    where: Path,
    first: int,
    seed: int,
    wait: Callable[[Callable[[], bool]], None],
    *,
    alone: bool = False,
    at_rest: bool = False,
) -> Ran:
    """Clients, crowds and an operator against the server, until ``wait`` returns. Raises what one of them met.

    ``alone``: there are crowds, and nobody else. ``at_rest``: all of them then end what they have begun, and the server
    is killed when nothing is on its way.
    """
    stop = threading.Event()
    threads: list[threading.Thread] = []
    made = Ran()
    running: list[Client | Operator | Gauge] = []
    try:
        with server, contextlib.suppress(KiviError):  # some points are reached while the clients still connect
            clients: list[Client] = [
                kind(server.connect(timeout=5.0), oracle, seed * 100 + i, first=first)
                for i, kind in enumerate(() if alone else CLIENTS)
            ]
            clients += [
                Crowd(server.connect(timeout=5.0), oracle, seed * 100 + 50, first=first, callers=CALLERS, every_s=0.05),
                Tasks(
                    server.endpoint, oracle, seed * 100 + 51, first=first, callers=CALLERS, every_s=0.05, timeout=5.0
                ),
            ]
            running += clients
            if not alone:
                made.operator = Operator(server.connect(timeout=5.0), oracle, where)
                running.append(made.operator)
            made.gauge = Gauge(server.connect(timeout=5.0))
            running.append(made.gauge)
            threads += [threading.Thread(target=each.run, args=(stop,)) for each in running]
            for thread in threads:
                thread.start()
            wait(lambda: any(each.failure is not None for each in running))
            if at_rest:
                stop.set()
                for thread in threads:
                    thread.join()
                server.kill()
    finally:  # whatever happened: who is not stopped asks for ever, and the process never ends
        stop.set()
        for each in running:
            each.db.close()  # it would look for the server for some seconds
        for thread in threads:
            thread.join()
    for each in running:
        if each.failure is not None:
            raise each.failure
    return made


def _contents(db: Any) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    with db.snapshot() as snap:
        found = {table: plain(list(snap.scan(table))) for table in TABLES}
        found["e"] = [{**row, "ts": micros(row["ts"])} for row in found["e"]]
        for late in {"late", "late_view"}.intersection(db.tables()):
            with contextlib.suppress(NotFound):  # it is still being built
                found[late] = list(snap.scan(late))
        return snap.ts, found


def recovered(data: Path, oracle: Oracle) -> int:
    """Everything that must hold of what is left; how many unknown outcomes were resolved."""
    seen = max(
        [a.start_ts or 0 for a in oracle.attempts]
        + [a.commit_ts or 0 for a in oracle.attempts]
        + [read.ts for read in oracle.reads]
    )
    with kivi.open(data, background=False) as db:
        resolved = oracle.resolve(lambda token: settled(db, token))
        oracle.confirm(lambda token: settled(db, token))
        if (resumed := db.store._resumed) is not None:
            resumed.join()
        ts, found = _contents(db)
        for table in TABLES:
            oracle.read(Read(ts, table, None, found[table], who="after the crash"))
        oracle.check()
        with contextlib.suppress(NotFound):
            if (state := db.describe("late_view")["state"]) != "ready":
                raise Mismatch(f"the view that was being filled is {state}")
        if found.get("late_view", found["by_desk"]) != found["by_desk"]:
            raise Mismatch(f"the view that was filled:\n  expected {found['by_desk']}\n  got      {found['late_view']}")
        if "late" in found:
            _recounted(found["late"], found["e"])
        op = Op("delta", "counters", (0,), {"n": 1})
        with db.transaction() as tx:
            tx.delta(op.table, op.key, **op.values)
        if (tx.commit_ts or 0) <= seen:
            raise Mismatch(f"R13: {tx.commit_ts} after {seen} had been handed out")
        oracle.attempt(Attempt(tx.start_ts, [op], "committed", tx.commit_ts, who="after the crash"))
        _, found = _contents(db)
        db.store.crash()
    with kivi.open(data, background=False) as db:
        _, again = _contents(db)
        db.consolidate()
        _same(found, again, "a second recovery")
        _, folded = _contents(db)
        _same(found, folded, "consolidation after a crash")
    return resolved


def _same(before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    for table in TABLES:
        if after[table] != before[table]:
            raise Mismatch(f"{what} changed {table}:\n  before {before[table]}\n  after  {after[table]}")


def _recounted(rows: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    expected: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in events:
        expected[event["b"], event["a"]].append(event["x"])
    counted = {key: (sum(values), len(values)) for key, values in expected.items()}
    found = {(row["b"], row["a"]): (row["total"], row["calls"]) for row in rows}
    if found != counted:
        raise Mismatch(f"the aggregate that was built is no recount:\n  expected {counted}\n  got      {found}")


def _checkpoint_holds(path: Path, oracle: Oracle) -> bool:
    """Whether it is there. Then it is complete, and the replay of a prefix."""
    if not path.exists():
        return False
    with kivi.open(path, background=False) as db:
        ts, found = _contents(db)
        replay = oracle.state(ts)
        for table in TABLES:
            expected = replay.answer(Read(ts, table, None, None))
            if found[table] != expected:
                raise Mismatch(f"the checkpoint's {table} at {ts}:\n  expected {expected}\n  got      {found[table]}")
    return True
