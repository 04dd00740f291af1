"""Threads against one store, judged by the replay oracle: R1 to R8, R10, R11, R14, R17.

Eight threads run random transactions on a few hot rows while consolidation runs every few milliseconds, keep snapshots
open and read them again and again. Two more send groups of blind transactions, and the threads of a crowd do what
applications do without a snapshot (``tests.proof.crowd``). They stop once the stated minima are reached; if the time is
up first, the run proves nothing and fails as such.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kivi.embedded.database import Database
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from tests.oracle import Oracle, Read
from tests.proof.crowd import Bunches, Crowd
from tests.proof.views import TABLES as VIEWED
from tests.proof.views import Viewed
from tests.proof.workloads import TABLES, Client, Mix, make_tables, settled
from tests.seeds import stories

THREADS = 8
CALLERS = 24
SECONDS_MAX = 150.0
MINIMA = {"commits": 1_200, "reads": 1_500, "aborts": 50, "consolidations": 50, "grouped": 500}


def counted(store: Store, oracle: Oracle) -> dict[str, int]:
    outcomes = [attempt.outcome for attempt in oracle.attempts]
    return {
        "commits": outcomes.count("committed"),
        "reads": len(oracle.reads),
        "aborts": outcomes.count("aborted"),
        "consolidations": store.consolidator.passes,
        "grouped": int(store.stats()["commits_grouped"]),
    }


def race(store: Store, oracle: Oracle, workers: list[Client]) -> None:
    """Runs the workers until the minima are reached, somebody fails or the time is up."""
    stop = threading.Event()
    threads = [threading.Thread(target=worker.run, args=(stop,)) for worker in workers]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + SECONDS_MAX
    while time.monotonic() < deadline and not any(worker.failure for worker in workers):
        time.sleep(0.05)
        found = counted(store, oracle)
        if all(found[name] >= least for name, least in MINIMA.items()):
            break
    stop.set()
    for thread in threads:
        thread.join()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("where", ["disk", *stories("memory")])
def test_threads_against_the_replay_oracle(where: str, tmp_path: Path) -> None:
    """R1 to R8, R11, R14, R17: every read of every thread is the replay of CTS <= S."""
    settings = Settings.of(
        {"consolidate_every_s": 0.004, "fold_every_s": 0.02, "consolidate_rows": 4, "block_rows": 64}
    )
    store = Store.open(str(tmp_path / "store") if where == "disk" else None, settings=settings)
    with Database(store) as db:
        make_tables(db)
        oracle = Oracle(TABLES)
        first = db.watermark()
        workers: list[Client] = [Mix(db, oracle, seed, first=first) for seed in range(THREADS)]
        workers += [Bunches(db, oracle, seed, first=first) for seed in (100, 101)]
        workers += [Viewed(db, oracle, seed, first=first) for seed in (150, 151)]
        workers.append(Crowd(db, oracle, 200, first=first, callers=CALLERS, every_s=0.02))
        race(store, oracle, workers)
        for worker in workers:
            if worker.failure is not None:
                raise worker.failure
        assert store.consolidator.failure is None
        oracle.confirm(lambda token: settled(db, token))
        with db.snapshot() as last:
            for table in ("t", "past", "counters", "by_a", "by_b", *VIEWED):
                oracle.read(Read(last.ts, table, None, list(last.scan(table)), who="last"))
            db.consolidate()
            for table in ("t", "past", "counters", "by_a", "by_b", *VIEWED):
                oracle.read(Read(last.ts, table, None, list(last.scan(table)), who="last"))
        found = counted(store, oracle)
    short = {name: (found[name], least) for name, least in MINIMA.items() if found[name] < least}
    oracle.check()
    assert not short, f"not run: {short}"
