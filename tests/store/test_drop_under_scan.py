"""A scan that is open while its table is dropped and erased says so; it never ends early as if that were all."""

from __future__ import annotations

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.runtime.settings import Settings
from kivi.store.facade import Store


@pytest.mark.parametrize("kind", ["rows", "events"])
def test_an_open_scan_of_a_dropped_table_is_not_found_and_never_short(kind):
    db = Database(Store.open(settings=Settings(background=False, block_rows=1_000)))
    if kind == "rows":
        db.create_table("t", key={"id": "int64"}, columns={"x": "int64"})
        with db.transaction() as tx:
            for i in range(10_000):
                tx.put("t", (i,), x=1)
    else:
        db.create_event_table("t", event_time="ts", columns={"ts": "timestamp"})
        for i in range(10):
            db.append("t", [{"ts": 1_000 * i + j} for j in range(1_000)])
    db.consolidate()
    with db.snapshot() as snap:
        rows = snap.scan("t")
        next(rows)
        db.drop("t")
        db.consolidate()
        for _ in range(100):
            db.store.housekeeping.step()
        with pytest.raises(kivi.NotFound):
            list(rows)
    db.close()
