"""DuckDB in process: a batch is a transaction, of an insert from Arrow and a grouped upsert, synced at commit.

It has no states of percentiles or distinct counts that could be combined, so with measures the rows that a batch
touches are computed again from all their events (``measures`` "rows"), or, which is less work and no answer, from the
events of the batch alone ("batch").
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from bench.data import SLOT_US
from bench.peers import Job, Outcome, answer, take_turns

_UPSERT = f"""
    INSERT INTO endpoint_5m
    SELECT endpoint_id, ts // {SLOT_US} * {SLOT_US} AS slot, sum(resp_time_us), count(*) FROM batch GROUP BY ALL
    ON CONFLICT (endpoint_id, slot) DO UPDATE SET total = total + excluded.total, n = n + excluded.n
"""
_MEASURES = {
    "batch": f"""
    INSERT OR REPLACE INTO endpoint_5m
    SELECT endpoint_id, ts // {SLOT_US} * {SLOT_US} AS slot, sum(resp_time_us), count(*),
        approx_quantile(resp_time_us, [0.5, 0.95, 0.99]), approx_count_distinct(resp_time_us)
    FROM batch GROUP BY ALL
""",
    "rows": f"""
    INSERT OR REPLACE INTO endpoint_5m
    SELECT endpoint_id, ts // {SLOT_US} * {SLOT_US} AS slot, sum(resp_time_us), count(*),
        approx_quantile(resp_time_us, [0.5, 0.95, 0.99]), approx_count_distinct(resp_time_us)
    FROM events SEMI JOIN (SELECT DISTINCT endpoint_id AS e, ts // {SLOT_US} AS s FROM batch)
        ON endpoint_id = e AND ts // {SLOT_US} = s
    GROUP BY ALL
""",
}


def main(job: Job) -> Outcome:
    pool = job.made()
    batches = pool.integers
    path = Path(job.directory)
    path.mkdir()
    db = duckdb.connect(str(path / "db"))
    db.execute("CREATE TABLE events (endpoint_id BIGINT, ts BIGINT, resp_time_us BIGINT)")
    db.execute(
        "CREATE TABLE endpoint_5m (endpoint_id BIGINT, slot BIGINT, total BIGINT, n BIGINT, "
        f"{'latency BIGINT[], different BIGINT, ' if job.measures else ''}"
        "PRIMARY KEY (endpoint_id, slot))"
    )

    def once(i: int) -> None:
        db.register("batch", batches[i])
        db.execute("BEGIN")
        db.execute("INSERT INTO events SELECT * FROM batch")
        db.execute(_MEASURES.get(job.measures, _UPSERT))
        db.execute("COMMIT")

    sent, events, seconds = take_turns(pool, once, job.seconds)
    if job.measures == "batch":  # the rows hold the last batch that touched them: all events, grouped, are the totals
        db.execute("DELETE FROM endpoint_5m")
        db.execute(_MEASURES["batch"].replace("FROM batch", "FROM events"))
    ((rows, count, total),) = db.execute("SELECT count(*), sum(n), sum(total) FROM endpoint_5m").fetchall()
    ((stored,),) = db.execute("SELECT count(*) FROM events").fetchall()
    if stored != count:
        raise AssertionError(f"{stored} events are stored, and {count} are in the aggregate")
    return Outcome(
        sent, events, seconds, rows, int(count), int(total), f"DuckDB {duckdb.__version__}, a file, default settings"
    )


if __name__ == "__main__":
    answer(main)
