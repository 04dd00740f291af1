"""ClickHouse in process: MergeTree, a materialized view into a SummingMergeTree, every inserted part synced.

Batches are in ClickHouse's own format before the clock starts, and go through its streaming insert: measured beside an
insert from Arrow through its Python table function, this was the faster of the two.

With measures the view goes into an AggregatingMergeTree, with states of quantilesDD (relative accuracy 1 %) or
quantilesTDigest, and of uniq. The parts of the aggregate are made one before anything is read from it.
"""

from __future__ import annotations

from typing import Any

import chdb

from bench.data import SLOT_US, SLOTS
from bench.peers import Job, Outcome, answer, read_in_turn, take_turns

_SYNCED = "SETTINGS fsync_after_insert = 1, fsync_part_directory = 1"
_TABLES = (
    f"CREATE TABLE events (endpoint_id Int64, ts Int64, resp_time_us Int64) ENGINE = MergeTree ORDER BY () {_SYNCED}",
    "CREATE TABLE endpoint_5m (endpoint_id Int64, slot Int64, total Int64, n Int64) "
    f"ENGINE = SummingMergeTree ORDER BY (endpoint_id, slot) {_SYNCED}",
    "CREATE MATERIALIZED VIEW add_events TO endpoint_5m AS SELECT endpoint_id, "
    f"intDiv(ts, {SLOT_US}) * {SLOT_US} AS slot, sum(resp_time_us) AS total, toInt64(count()) AS n "
    "FROM events GROUP BY endpoint_id, slot",
)
_QUANTILES = {"DD": "quantilesDD{}(0.01, 0.5, 0.95, 0.99)", "TDigest": "quantilesTDigest{}(0.5, 0.95, 0.99)"}
_NEAR = 0.03  # of each other: what the states say of everything, and what the events do
_HELD = (
    "SELECT count(), sum(n), sum(total) FROM "
    "(SELECT sum(n) AS n, sum(total) AS total FROM endpoint_5m GROUP BY endpoint_id, slot)"
)


def _tables(measures: str) -> tuple[str, ...]:
    if not measures:
        return _TABLES
    quantiles = _QUANTILES[measures]
    name, _, arguments = quantiles.partition("{}")
    return (
        _TABLES[0],
        "CREATE TABLE endpoint_5m (endpoint_id Int64, slot Int64, total SimpleAggregateFunction(sum, Int64), "
        f"n SimpleAggregateFunction(sum, Int64), latency AggregateFunction({name}{arguments}, Int64), "
        "different AggregateFunction(uniq, Int64)) "
        f"ENGINE = AggregatingMergeTree ORDER BY (endpoint_id, slot) {_SYNCED}",
        _TABLES[2].replace(
            " FROM events",
            f", {quantiles.format('State')}(resp_time_us) AS latency, uniqState(resp_time_us) AS different FROM events",
        ),
    )


def _check_measures(db: Any, measures: str) -> None:
    """The states say about what the events do."""
    merged = _QUANTILES[measures].format("Merge")
    query = f"SELECT toInt64({merged}(latency)[3]), uniqMerge(different) FROM endpoint_5m"
    for found, right in zip(
        _numbers(db, query),
        _numbers(db, "SELECT toInt64(quantileExact(0.99)(resp_time_us)), uniqExact(resp_time_us) FROM events"),
        strict=True,
    ):
        if abs(found - right) > _NEAR * right:
            raise AssertionError(f"the states say {found}, and the events {right}")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def native(batch: Any) -> bytes:
    """A batch of int64 columns in ClickHouse's Native format: counts, then name, type and values of each column."""
    parts = [_varint(batch.num_columns), _varint(batch.num_rows)]
    for field, column in zip(batch.schema, batch.columns, strict=True):
        name = field.name.encode()
        parts += [_varint(len(name)), name, _varint(5), b"Int64", column.to_numpy().tobytes()]
    return b"".join(parts)


def _numbers(db: Any, query: str) -> list[int]:
    return [int(text) for text in str(db.query(query, "CSV")).strip().split(",")]


def main(job: Job) -> Outcome:
    pool = job.made()
    batches = [native(batch) for batch in pool.integers]
    db = chdb.connect(job.directory)
    for statement in _tables(job.measures):
        db.query(statement)

    def once(i: int) -> None:
        with db.send_insert("INSERT INTO events", "Native") as insert:
            insert.append(batches[i])
            insert.finish()

    def read(endpoint: int) -> None:
        merged = _QUANTILES[job.measures].format("Merge")
        found = db.query(
            f"SELECT slot, {merged}(latency)[3] FROM endpoint_5m WHERE endpoint_id = {endpoint} "
            f"GROUP BY slot ORDER BY slot DESC LIMIT {SLOTS}",
            "CSV",
        )
        if len(str(found).split()) != SLOTS:
            raise AssertionError(f"endpoint {endpoint} has other slots than the last {SLOTS}: {found}")

    if job.read:
        for i in range(len(pool)):
            once(i)
        db.query("OPTIMIZE TABLE endpoint_5m FINAL")
        sent, (events, seconds) = [1] * len(pool), read_in_turn(read, job)
    else:
        sent, events, seconds = take_turns(pool, once, job.seconds)
    if job.measures:
        _check_measures(db, job.measures)
    rows, count, total = _numbers(db, _HELD)
    (stored,) = _numbers(db, "SELECT count() FROM events")
    if stored != count:
        raise AssertionError(f"{stored} events are stored, and {count} are in the aggregate")
    about = f"chdb {chdb.__version__}, ClickHouse {chdb.engine_version}, tables with {_SYNCED}"
    return Outcome(sent, events, seconds, rows, count, total, about)


if __name__ == "__main__":
    answer(main)
