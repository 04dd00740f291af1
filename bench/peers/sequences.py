"""ClickHouse in process, asked for sequences of events: ``sequenceCount`` and ``windowFunnel``, by endpoint.

The table is in the order that these group by, in one part. Each question is asked as it is, over all events, and as
somebody writes it who knows that few endpoints have the status: of those endpoints alone.

What it refuses as too difficult is left out.

``(?1)(?2)`` are two rows that follow each other as long as each row is an event, so a third condition is always true
there. ``(?1)(?t<=900)(?2)`` may have events between the two, although it does not say ``.*``.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import chdb
import pyarrow as pa

from bench.peers import said
from bench.peers.clickhouse import native
from bench.sequences import MOST_US, RARE, WITHIN_US, batches

_TABLE = (
    "CREATE TABLE calls (ts UInt64, endpoint_id Int64, status Int64, us Int64) "
    "ENGINE = MergeTree ORDER BY (endpoint_id, ts)"
)
_CONDITIONS = f"ts, us < {MOST_US} AND status != {{0}}, status = {{0}}"
_NUMBERS = {
    "followed": f"sequenceCount('(?1)(?2)')({_CONDITIONS}, 1)",
    "within": f"sequenceCount('(?1)(?t<={WITHIN_US})(?2)')({_CONDITIONS})",
    "funnel": f"windowFunnel({WITHIN_US})({_CONDITIONS}) - 1",
}
_OF = {"": "", ", of some": "WHERE endpoint_id IN (SELECT endpoint_id FROM calls WHERE status = {0})"}


def main(directory: str, events: int, times: int) -> dict[str, Any]:
    """By question and status: the seconds of each time, and of which endpoint how many were found."""
    db = chdb.connect(directory)
    db.query(_TABLE)
    for batch in batches(events):
        numbers = batch.set_column(0, "ts", batch.column("ts").cast(pa.int64())).drop_columns(["host"])
        with db.send_insert("INSERT INTO calls", "Native") as insert:
            insert.append(native(numbers))
            insert.finish()
    db.query("OPTIMIZE TABLE calls FINAL")
    found: dict[str, Any] = {"about": f"chdb {chdb.__version__}, ClickHouse {chdb.engine_version}"}
    for (name, number), (of, where), code in itertools.product(_NUMBERS.items(), _OF.items(), RARE):
        asked = f"SELECT endpoint_id, {number} AS n FROM calls {where} GROUP BY endpoint_id HAVING n > 0".format(code)
        took = []
        try:
            for again in range(times + 1):
                began = time.perf_counter()
                rows = str(db.query(asked, "CSV"))
                if again:  # the first one fills caches
                    took.append(time.perf_counter() - began)
        except Exception as error:  # of a class that chdb keeps to itself
            if "TOO_SLOW" not in str(error):
                raise
            continue
        counts = {int(endpoint): int(n) for endpoint, n in (line.split(",") for line in rows.split())}
        found[f"{name}{of}: {code}"] = took, sorted(counts.items())
    return found


if __name__ == "__main__":
    said(main(**json.loads(sys.argv[1])))
