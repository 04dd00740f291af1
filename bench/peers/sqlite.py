"""SQLite in process: 1,000 events a commit, a trigger that adds each to its row; write-ahead log, synchronous=FULL."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from bench.data import SLOT_US
from bench.peers import Job, Outcome, answer, take_turns

_TABLES = f"""
    CREATE TABLE events (endpoint_id INTEGER, ts INTEGER, resp_time_us INTEGER);
    CREATE TABLE endpoint_5m (
        endpoint_id INTEGER, slot INTEGER, total INTEGER, n INTEGER, PRIMARY KEY (endpoint_id, slot)
    ) WITHOUT ROWID;
    CREATE TRIGGER add_event AFTER INSERT ON events BEGIN
        INSERT INTO endpoint_5m VALUES (new.endpoint_id, new.ts - new.ts % {SLOT_US}, new.resp_time_us, 1)
        ON CONFLICT (endpoint_id, slot) DO UPDATE SET total = total + excluded.total, n = n + 1;
    END;
"""


def main(job: Job) -> Outcome:
    pool = job.made()
    batches = [list(zip(*(column.to_pylist() for column in batch.columns), strict=True)) for batch in pool.integers]
    path = Path(job.directory)
    path.mkdir()
    db = sqlite3.connect(path / "db", isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.executescript(_TABLES)

    def once(i: int) -> None:
        db.execute("BEGIN")
        db.executemany("INSERT INTO events VALUES (?, ?, ?)", batches[i])
        db.execute("COMMIT")

    sent, events, seconds = take_turns(pool, once, job.seconds)
    rows, count, total = db.execute("SELECT count(*), sum(n), sum(total) FROM endpoint_5m").fetchone()
    return Outcome(
        sent,
        events,
        seconds,
        rows,
        count,
        total,
        f"SQLite {sqlite3.sqlite_version}, journal_mode WAL, synchronous FULL",
    )


if __name__ == "__main__":
    answer(main)
