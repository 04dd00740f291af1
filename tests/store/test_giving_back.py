"""What was deleted leaves the disk, though the store is closed or killed before it was compacted and idle after it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kivi
from kivi.engine import Engine
from tests.seeds import stories
from tests.waiting import wait_until

SETTINGS = {"settle": False, "block_rows": 500}
_KEPT = {"events": 0, "rows": 4_000_000, "retracted": 200_000, "dropped": 0}
"""Bytes. What is deleted takes 4,000,000 beside them, and what is kept of the rest less than 1,000,000."""

_PROGRAM = """
import datetime, os, random, signal, sys
import pyarrow as pa
import kivi
from kivi.engine import giving_back
from kivi.runtime.imports import do_without_pandas
from tests.store.test_giving_back import _KEPT, SETTINGS
from tests.waiting import wait_until

do_without_pandas()
path, what, end = sys.argv[1:]
giving_back._REST_S = 1e6  # who asks after the first waits for as long
db = kivi.open(path, **SETTINGS)
engine = db.store.engine
columns = {"ts": "timestamp", "k": "int64", "b": "bytes"}
db.create_event_table("e", event_time="ts", columns=columns, retention="1d" if what == "events" else None)
by = ["k", kivi.time_slot("ts", "1h", name="slot")]
if what == "rows":
    db.create_aggregate("a", source="e", group_by=by, measures={"last": kivi.last("b")}, retention="1d")
now = 1_700_000_000_000_000
for part in range(40):
    ids = range(part * 500, (part + 1) * 500)
    values = [random.Random(i).randbytes(200) for i in ids]
    db.append("e", pa.table({"ts": pa.array([now + i for i in ids], pa.timestamp("us")), "k": ids, "b": values}))
    db.consolidate()
    engine.flush()
events = db.store.event_tables.of(db.store.table("e").id)
wait_until(lambda: not db.store.consolidator._compactable and not events._waiting)
engine.give_back(b"\\xfe", None)
wait_until(lambda: not engine._giving_back._asked)
before = engine.stats()
assert before["sst_bytes"] + before["blob_bytes"] > 4_000_000 + (_KEPT[what] if what == "rows" else 0), before
match what:
    case "events" | "rows":
        db.append("e", pa.table({"ts": pa.array([now + 10**12], pa.timestamp("us")), "k": [0], "b": [b""]}))
    case "retracted":
        with db.transaction() as tx:
            tx.retract("e", where=kivi.col("k") < 19_000)
    case "dropped":
        db.drop("e")
db.consolidate()
wait_until(lambda: engine._giving_back._asked, timeout_s=60)
engine.flush()
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
db.close()
"""


def _held(engine: Engine) -> int:
    return engine.stats()["sst_bytes"] + engine.stats()["blob_bytes"]


@pytest.mark.parametrize(
    ("what", "end"),
    [("rows", "killed"), *stories(*((each, "killed") for each in _KEPT if each != "rows"), ("rows", "closed"))],
)
def test_what_was_deleted_before_a_restart_is_given_back_by_an_idle_store(tmp_path: Path, what: str, end: str) -> None:
    path = tmp_path / "store"
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(path), what, end], check=False)
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0)
    with kivi.open(str(path), **SETTINGS) as db:
        wait_until(
            lambda: _held(db.store.engine) < _KEPT[what] + 1_000_000,
            reason=lambda: _held(db.store.engine),
            timeout_s=30,
        )
