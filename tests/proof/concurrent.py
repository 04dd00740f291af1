"""Concurrent checkers over gRPC: clients against a real server in its own process, judged by the replay oracle.

::

    server process   kivi serve, consolidating every 50 ms, killed with SIGKILL now and then if asked
    8 threads        each a client of its own, one workload each in turn (``workloads``)
    2 crowds         64 threads of one client, and 64 tasks of one ``kivi.aio`` client (``crowd``)
    afterwards       unknown outcomes are resolved through their tokens; every table is read once more, before and
                     after a forced consolidation; every answer of every client must be the replay of CTS <= S

``grouped`` counts the commits that entered in groups of two or more. The events of ``appender(each=True)`` are counted
by themselves, as ``each``, since they come so many at once that little else would be needed for the other minima. A run
that does not reach its stated minima proves nothing and says so: *not run*.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kivi
from tests.oracle import Attempt, Oracle, Report
from tests.proof.crowd import CALLERS, Crowd, Tasks
from tests.proof.views import Viewed
from tests.proof.workloads import (
    TABLES,
    Bank,
    Client,
    Counters,
    LongFork,
    MemberToken,
    Mix,
    Sessions,
    fund,
    make_tables,
    settled,
)
from tests.serverproc import ServerProcess

__all__ = ["ARGUMENTS", "Result", "checked", "clients_of", "finish", "is_one_of_many", "read_all", "resolve"]

WORKLOADS: Sequence[type[Client]] = (Mix, Bank, LongFork, Counters, Sessions, Mix, Viewed, Viewed)
"""One for each client."""
CONFIRMED = 400  # tokens of known commits that are asked for in the end
SETTINGS = (
    "consolidate_every_s=0.05",
    "fold_every_s=0.3",
    "settle=true",
    "settle_every_s=0.05",
    "settle_idle_s=0.0",
    "cold_every_s=0.1",
    "consolidate_rows=16",
    "block_rows=256",
    "flush_every_s=1",
    "segment_bytes=1048576",
)
ARGUMENTS = tuple(argument for setting in SETTINGS for argument in ("--set", setting))
"""Of the server: small units, so that everything happens often."""
STATS = {"consolidations": "consolidations", "entered": "commits", "grouped": "commits_grouped"}
"""What the server counts. ``entered`` are all commits, those of groups included; but for ``each``."""


@dataclass
class Result:
    """What a run did. ``short``: what fell below its minimum, as (found, minimum)."""

    seconds: float
    counted: Mapping[str, int]
    short: Mapping[str, tuple[int, int]]
    oracle: Report | None = None
    clients: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return "not run" if self.short else "passed"


def checked(
    data: Path,
    *,
    minima: Mapping[str, int],
    seconds_max: float,
    seed: int = 0,
    kill_every_s: float | None = None,
    callers: int = CALLERS,
) -> Result:
    """Runs until the minima are reached or the time is up, then checks. Raises Mismatch, or what a client met."""
    began = time.monotonic()
    with ServerProcess(data, *ARGUMENTS) as server:
        db = server.connect(timeout=60)
        oracle = Oracle(TABLES)
        make_tables(db, data.parent / "objects")
        clients = clients_of(server.endpoint, oracle, seed, first=fund(db, oracle), callers=callers)
        counted = _drive(server, db, oracle, clients, minima, seconds_max, kill_every_s)
        finish(clients)
        resolve(db, oracle)
        read_all(db, oracle, "last")
        report = oracle.check()
        db.close()
        assert server.stop() == 0
    counted["unknown"] = sum(client.unknown for client in clients)
    short = {name: (counted[name], least) for name, least in minima.items() if counted[name] < least}
    return Result(time.monotonic() - began, counted, short, report, [client.name for client in clients])


def clients_of(endpoint: str, oracle: Oracle, seed: int, *, first: int, callers: int) -> list[Client]:
    """One of each workload, and two crowds, of an endpoint. ``first``: the commit that has opened the accounts."""
    return [
        *(
            workload(kivi.connect(endpoint, timeout=60.0), oracle, seed * 1_000 + i, first=first)
            for i, workload in enumerate(WORKLOADS)
        ),
        Crowd(kivi.connect(endpoint, timeout=60.0), oracle, seed * 1_000 + 100, first=first, callers=callers),
        Tasks(endpoint, oracle, seed * 1_000 + 101, first=first, callers=callers),
    ]


def finish(clients: Sequence[Client]) -> None:
    """Closes them. Raises what one of them has met."""
    for client in clients:
        if client.failure is not None:
            raise client.failure
        client.db.close()


def resolve(db: Any, oracle: Oracle) -> None:
    """Asks for what had no answer, and for some of what had one, by their tokens."""
    oracle.resolve(lambda token: settled(db, token))
    oracle.confirm(lambda token: settled(db, token), CONFIRMED)


def read_all(db: Any, oracle: Oracle, name: str, at_least: int | None = None) -> None:
    """Every table, before and after a forced consolidation, at one snapshot."""
    last = Client(db, oracle, -1)
    last.name = name
    with db.snapshot(min_snapshot=at_least) as snap:
        for table in oracle.tables:
            last.scan(snap, table)
        db.consolidate()
        for table in oracle.tables:
            last.scan(snap, table)


def is_one_of_many(attempt: Attempt) -> bool:
    """Whether it is an event of ``appender(each=True)``."""
    return isinstance(attempt.token, MemberToken)


def _drive(
    server: ServerProcess,
    db: Any,
    oracle: Oracle,
    clients: list[Client],
    minima: Mapping[str, int],
    seconds_max: float,
    kill_every_s: float | None,
) -> Counter[str]:
    """Lets the clients run; returns what happened, counted."""
    stop = threading.Event()
    threads = [threading.Thread(target=client.run, args=(stop,), name=client.name) for client in clients]
    counted: Counter[str] = Counter()
    passed: Counter[str] = Counter()  # of servers that were killed
    for thread in threads:
        thread.start()
    try:
        now = time.monotonic()
        deadline, next_kill = now + seconds_max, now + (kill_every_s or seconds_max + 1)
        while time.monotonic() < deadline and not any(client.failure for client in clients):
            time.sleep(0.1)
            stats = db.stats()
            running = Counter({name: int(stats[of]) for name, of in STATS.items()})
            if time.monotonic() > next_kill:
                passed += running
                running.clear()
                server.restart()
                counted["kills"] += 1
                assert kill_every_s is not None
                next_kill = time.monotonic() + kill_every_s
            outcomes = Counter((attempt.outcome, is_one_of_many(attempt)) for attempt in tuple(oracle.attempts))
            each = outcomes["committed", True]
            counted.update(
                {
                    "commits": outcomes["committed", False] - counted["commits"],
                    "each": each - counted["each"],
                    "aborts": outcomes["aborted", False] - counted["aborts"],
                    "reads": len(oracle.reads) + len(oracle.glimpses) - counted["reads"],
                    "consolidations": passed["consolidations"] + running["consolidations"] - counted["consolidations"],
                    **{name: passed[name] + running[name] - each - counted[name] for name in ("entered", "grouped")},
                }
            )
            if all(counted[name] >= least for name, least in minima.items()):
                break
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return counted
